"""Benchmarks of listening events compare what they say they do, and look at the worst where they promise a limit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

Script = Callable[[str], ModuleType]


def test_the_first_batch_is_judged_by_its_worst_round(
    script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bench = script("yambda_first_batch")
    totals = iter([1.0, 1.0, 9.0] * 4)
    waits = {"usual": [2.0, 3.0], "change": [4.0], "lookup": [0.5, 0.25], "anchors": [1], "batches": 3}

    def child(what: str, folder: Path) -> Any:
        first = {
            "total": next(totals, 0.0),
            "busy": 1.0,
            "imports": 1.0,
            "index": 1.0,
            "batches": 3,
            "mean_length": 2.0,
        }
        return first if what == "first" else waits

    monkeypatch.setattr(bench, "child", child)
    monkeypatch.setattr("recperf.data.yambda.store.open_store", lambda folder: type("Store", (), {"events": 5}))
    entries = bench.measured(tmp_path)
    by_name = {(entry["variant"], entry["metric"]): entry for entry in entries}
    assert by_name["finding a window", "lookup"]["conditions"]["longest_ms"] == 0.5
    assert by_name["usual batch", "wait"]["conditions"]["longest_ms"] == 3.0
    assert by_name["change of windows", "wait"]["conditions"]["longest_ms"] == 4.0
    assert by_name["index there", "first batch"]["p50"] == 1.0
    words = bench.missed(entries)
    assert len(words) == 4
    assert "9.00 s at worst" in words[0]


def test_gathered_batches_are_compared_in_all_they_hold(script: Script, tmp_path: Path) -> None:
    from recperf.data.yambda.config import HistoryConfig
    from recperf.data.yambda.history import Histories
    from recperf.data.yambda.synthesize import of_size, write_store

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


@pytest.mark.parametrize("way", ["ours", "layout", "peer"])
def test_ways_to_prepare_run(script: Script, tmp_path: Path, way: str) -> None:
    pytest.importorskip("pyarrow")
    if way == "peer":
        pytest.importorskip("polars")
    work = script("_yambda_prepare")
    made = work.raw_files(tmp_path / "raw", 3000)
    assert made["codec"] == "ZSTD"
    assert made["row_group_rows"] == made["events"]
    found = getattr(work, way)(tmp_path / "raw", tmp_path / "out")
    assert found["events"] == made["events"]
    assert found["bytes"] > 11 * 0.9 * made["events"]
    if way == "layout":
        assert found["bytes"] == found["store_bytes"] + found["reference_bytes"]
        assert found["reference_bytes"] > 2 * found["store_bytes"]
        assert found["seconds"] == pytest.approx(found["store_s"] + found["layout_s"])
