"""Tables in files behind a small cache, on several ranks: the numbers are those of tables on the device, to the bit."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from rank_jobs import dlrm
from rank_pool import needs_torchrec, run_ranks
from test_bags import same
from test_ranks import config as history_config

from recperf.models.tiers.config import TablesConfig
from recperf.workloads.dlrm_v4.config import EvaluationConfig

pytestmark = needs_torchrec
STEPS = 12
DEVICE, FILES = TablesConfig(placement="device"), TablesConfig(placement="file", resident="64KiB")


def configs(ranks: int = 2) -> dict[str, Any]:
    """Tables of which the cache of a rank holds less than half, and that of one rank in `table` even all."""
    bags = dlrm("rowwise-adagrad", "t1=row,t2=table,t4=table", batch=61)
    whole = dlrm("adagrad", "table", batch=61)
    histories = history_config()
    rows = tuple(range(400, 400 + len(histories.model.rows)))
    return {
        "mixed": replace(bags, model=replace(bags.model, rows=(3000, 900, 20_000, 1200))),
        "table": replace(whole, model=replace(whole.model, rows=(3000, 900, 4000, 1200))),
        "dlrm-v4": replace(
            histories,
            model=replace(histories.model, rows=rows, table_dim=48 * ranks),
            evaluate=EvaluationConfig(batch_size=12),
        ),
    }


@functools.cache
def trained(ranks: int, name: str) -> list[dict[str, dict[str, Any]]]:
    each = {tables.placement: replace(configs(ranks)[name], tables=tables) for tables in (DEVICE, FILES)}
    return run_ranks(ranks, "trainings", configs=each, steps=STEPS)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "name", ["mixed", *(pytest.param(name, marks=pytest.mark.long) for name in ("table", "dlrm-v4"))]
)
def test_rows_in_files_train_and_score_as_rows_on_the_device(name: str, ranks: int) -> None:
    results = trained(ranks, name)
    device, files = (results[0][place] for place in ("device", "file"))
    assert files["losses"] == device["losses"]
    assert len(set(files["losses"])) == STEPS
    same(files["first"], device["first"])
    same(files["state"], device["state"])
    assert torch.equal(files["logits"], device["logits"])
    moved = [told["file"]["moved"] for told in results]
    assert any(min(one) > 0 for one in moved if one), "nothing left a cache and came back"


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_state_goes_on_in_other_tiers(ranks: int) -> None:
    """From files to the device and from the device to files, each half of the steps, to the bit."""
    half = STEPS // 2
    for first, then in ((DEVICE, FILES), (FILES, DEVICE), (FILES, FILES)):
        before = {name: replace(one, tables=first) for name, one in configs(ranks).items()}
        after = {name: replace(one, tables=then) for name, one in configs(ranks).items()}
        begun = run_ranks(ranks, "trainings", configs=before, steps=half)
        states = {name: begun[0][name]["state"] for name in before}
        ended = run_ranks(ranks, "going_on", configs=after, steps=half, states=states, done=half)
        for name in before:
            whole = trained(ranks, name)[0]["file"]
            assert begun[0][name]["losses"] + ended[0][name]["losses"] == whole["losses"]
            same(ended[0][name]["state"], whole["state"])
