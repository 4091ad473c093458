"""Benchmarks of listening events compare what they say they do, and look at the worst where they promise a limit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

Script = Callable[[str], ModuleType]


def test_gathered_batches_are_compared_in_all_they_hold(script: Script, tmp_path: Path) -> None:
    from recperf.data.known.yambda.synthesize import write_store
    from recperf.data.known.yambda.yambda_like import of_size
    from recperf.data.streaming.config import HistoryConfig
    from recperf.data.streaming.history import Histories

    bench = script("history_gather")
    store = bench.open_store(write_store(of_size(3000), tmp_path / "store"))
    config = HistoryConfig(length=30)
    peer, positions = bench.PerSample(store, config), np.arange(50, 90)
    ours, theirs = Histories(store, config, impl="reference").batch(positions), peer.batch(positions)
    bench.agree(ours, theirs)
    bench.crosses_agree(ours, peer, positions)
    with pytest.raises(AssertionError):
        bench.agree(replace(ours, labels_B=1 - ours.labels_B), theirs)
    values_V = ours.features.values_V.clone()
    # The last sample of the last cross, right before the histories.
    values_V[len(bench.CONTEXT) * len(positions) - 1] += 1
    wrong = replace(ours, features=replace(ours.features, values_V=values_V))
    assert not torch.equal(values_V, ours.features.values_V)
    with pytest.raises(AssertionError, match="user_x_artist_x_hour"):
        bench.crosses_agree(wrong, peer, positions)


@pytest.mark.parametrize("way", ["ours", "peer"])
def test_ways_to_prepare_run(script: Script, tmp_path: Path, way: str) -> None:
    pytest.importorskip("pyarrow")
    if way == "peer":
        pytest.importorskip("polars")
    work = script("_yambda_prepare")
    made = work.raw_files(tmp_path / "raw", 3000)
    assert made["codec"] == "ZSTD"
    assert made["row_group_rows"] == made["events"]
    figures = getattr(work, way)(tmp_path / "raw", tmp_path / "out")
    assert figures["events"] == made["events"]
    assert figures["bytes"] > 9 * 0.9 * made["events"]
