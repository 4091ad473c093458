"""micro-dlrm-dram and the commands around it, on a table small enough for a test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from recperf.cli.sweep import as_text, split, widths
from recperf.errors import DataError, MachineError
from recperf.execution.sweep import fits, line, shown_parts
from recperf.measure.peaks import sampling
from recperf.measure.sections import part_ms
from recperf.workloads.micro_dlrm_dram.config import default, hot_ids, resolved_rows

SMALL = ["--model.rows", "20000", "--model.dim", "16", "--data.batches", "12", "--data.ids-per-bag", "4"]
SMALL += ["--train.batch-size", "128", "--train.device", "cpu", "--data.held-out-batches", "2"]


pytestmark = pytest.mark.usefixtures("stored_ceilings")


def read(name: str) -> Any:
    return json.loads(Path("r", name).read_text())


def test_a_run_leaves_profile_pair_ceilings_and_seal(call) -> None:
    code, out, err = call("run", "micro-dlrm-dram", *SMALL, "--run-dir", "r", "--json")
    assert code == 0, err
    result, profile, pair = json.loads(out), read("profile.json"), read("pair.json")
    assert result["data"]["synthetic"] is True
    assert set(result["quality"]["baselines"]) == {"majority", "planted"}
    assert sum(part["share"] for part in profile["components"]) == pytest.approx(1)
    names = {part["name"] for part in profile["components"]}
    assert {"data", "hash", "embedding", "embedding_backward", "dense_update", "sparse_update", "other"} <= names
    assert profile["ids"]["lookups"] == 128 * 3 * 4
    assert 0 < profile["ids"]["unique_rows"] <= profile["ids"]["lookups"]
    assert profile["ids"]["working_set_bytes"] == 20000 * 16 * 4
    assert 0 < profile["ids"]["touched_bytes"] <= profile["ids"]["working_set_bytes"]
    assert profile["overhead"]["plain_ms"] > 0
    for part in ("bottom", "top", "embedding"):
        hot, cold = ({c["name"]: c for c in pair[arm]["components"]}[part] for arm in ("hot", "cold"))
        assert hot["flops"] == cold["flops"]
        # Counted bytes are those of different rows: fewer of them are hot.
        assert hot["bytes"] < cold["bytes"] if part == "embedding" else hot["bytes"] == cold["bytes"]
    assert pair["hot"]["ids"]["lookups"] == pair["cold"]["ids"]["lookups"]
    # What the ids can reach, whatever the number of steps.
    assert pair["ids"]["hot"] < pair["ids"]["cold"] == 20000
    assert set(pair["expected"]) == {"low", "expected", "high"}
    assert 0 <= pair["other_work"] <= 1
    assert read("peaks.json")["machine"]["fingerprint"] == result["provenance"]["machine"]
    assert read("seal.json")["files"].keys() >= {"result.json", "events.jsonl", "profile.json", "pair.json"}
    code, out, _ = call("check", "r", "--json")
    assert {row["name"]: row["holds"] for row in json.loads(out)["runs"][0]["claims"]}["intact"]


@pytest.mark.long
def test_movielens_goes_through_the_same_table(call) -> None:
    arguments = [
        "--preset",
        "movielens",
        "--data.source",
        "embedded",
        "--train.epochs",
        "1",
        "--train.batch-size",
        "2000",
    ]
    arguments += ["--model.rows", "20000", "--model.dim", "16", "--target.beat", "none", "--train.device", "cpu"]
    code, _, err = call("run", "micro-dlrm-dram", *arguments, "--run-dir", "r", "--quiet")
    assert code == 0, err
    assert not Path("r/pair.json").exists()
    assert read("result.json")["data"]["name"] == "movielens-like"
    assert call("pair", *arguments)[0] == 2


@pytest.mark.long
def test_other_ids_and_optimizers_train(call) -> None:
    options = ["--data.ids", "zipf", "--train.table-optimizer", "sgd", "--train.clip", "0.5", "--target.beat", "none"]
    code, _, err = call("run", "micro-dlrm-dram", *SMALL, *options, "--run-dir", "r", "--quiet")
    assert code == 0, err


def test_pair_prints_the_ratio_and_what_is_expected(call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "QUICK", sampling.TINY)
    monkeypatch.setattr("recperf.measure.peaks.other_work.OtherWork.share", lambda *_: 0.0)
    code, out, _ = call("pair", *SMALL, "--train.threads", "3")
    assert code == 0
    assert "cold / hot" in out
    assert "measuring the ceilings for 3 threads" in out
    assert "is expected (" in out.splitlines()[-1]
    code, out, _ = call("pair", *SMALL, "--preset", "zipf")
    assert "no ratio is expected, because the ids are not equally likely" in out.splitlines()[-1]
    assert call("pair", "micro-dlrm", "--data.source", "embedded")[0] == 2


def test_sweep_measures_every_combination(call) -> None:
    arguments = ["sweep", "micro-dlrm-dram", *SMALL, "--model.dim", "8,16,32", "--out", "s", "--json"]
    code, out, _ = call(*arguments)
    assert code == 0
    swept = json.loads(out)
    assert [row["settings"] for row in swept["rows"]] == [{"model.dim": "8"}, {"model.dim": "16"}, {"model.dim": "32"}]
    assert {fit["part"] for fit in swept["fits"]} == {"embedding", "step"}
    assert json.loads(Path("s/sweep.json").read_text()) == swept
    assert call("sweep", "micro-dlrm-dram")[0] == 2


def test_a_sweep_without_a_part_called_embedding_shows_the_largest_part() -> None:
    ms = {"p20": 1.0, "p50": 2.0, "p80": 3.0}
    parts = [{"name": "top", "ms": ms}, {"name": "backward", "ms": {**ms, "p50": 2.5}}]
    overhead = {"plain": {**ms, "p50": 1.75}}
    profile = {"step_ms": ms, "overhead": overhead, "components": parts, "verdict": {"limit": "compute"}}
    rows = [{"settings": {"train.batch-size": size}, "profile": profile} for size in ("1", "2", "3")]
    shown = shown_parts([profile] * 3)
    assert shown == ["step", "backward"]
    assert [fit["part"] for fit in fits(rows, shown)] == shown
    text = as_text({"rows": rows, "fits": [], "parts": shown})
    assert "backward ms" in text
    assert "1.750" in text, "the step without timers"
    with pytest.raises(DataError, match="no part 'embedding'"):
        part_ms(profile, "embedding")


def test_swept_options_are_separated_and_lines_are_fitted() -> None:
    swept, rest = split(["--a.b", "1,2", "--json", "--c=3,4", "--d", "5"])
    assert swept == {"a.b": ["1", "2"], "c": ["3", "4"]}
    assert rest == ["--json", "--d", "5"]
    assert widths("32-16-1") == ["32", "16", "1"]
    assert widths("-5") == ["-5"]
    assert line([1, 2, 3], [3, 5, 7]) == pytest.approx((2, 1, 1))


def test_a_table_that_memory_cannot_hold_is_refused_before_it_is_made(call) -> None:
    code, _, err = call("run", "micro-dlrm-dram", "--model.rows", "2000000000", "--run-dir", "r")
    assert code == 4
    assert "GiB are free" in err
    assert "--model.rows" in err
    assert call("pair", "--model.rows", "2000000000")[0] == 4


def test_auto_rows_follow_the_measured_knee(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that reports 300 MiB of cache and has 8 of them."""
    from dataclasses import replace

    module = "recperf.workloads.micro_dlrm_dram.config."
    monkeypatch.setattr(module + "caches", lambda: {"L1": 1 << 16, "L2": 1 << 21, "L3": 300 << 20})
    config = replace(default(), model=replace(default().model, rows="auto"))
    assert default().train.device == "cpu", "the workload is about a CPU's memory"
    monkeypatch.setattr(module + "find", lambda: None)
    with pytest.raises(MachineError, match="needs the measured ceilings"):
        resolved_rows(config)
    monkeypatch.setattr(module + "find", lambda: {"knee": {"bytes": 8 << 20}})
    assert resolved_rows(config) * 1024 == 20 * (8 << 20)
    for measured, size in ((None, 1 << 20), (1 << 19, 1 << 19)):
        assert 0.99 * size < hot_ids(config, measured) * 3 * 1024 <= size
    monkeypatch.setattr(module + "available_bytes", lambda: 1 << 28)
    assert resolved_rows(config) * 1024 == 1 << 27


@pytest.mark.long
def test_a_run_with_auto_rows_saves_their_number_and_resumes_with_it(call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is measured between the two, and however much memory is free then."""
    find = "recperf.workloads.micro_dlrm_dram.config.find"
    monkeypatch.setattr(find, lambda: {"knee": {"bytes": 1 << 15}})
    auto = ["--model.rows", "auto", *SMALL[2:], "--train.checkpoint-steps", "4", "--no-report"]
    assert call("run", "micro-dlrm-dram", *auto, "--run-dir", "r", "--quiet")[0] == 0
    assert read("config.json")["config"]["model"]["rows"] == 20 * (1 << 15) // 64
    for name in ("trial-42.json", "profile.json", "result.json", "seal.json"):
        Path("r", name).unlink()
    monkeypatch.setattr(find, lambda: {"knee": {"bytes": 1 << 16}})
    code, _, err = call("run", "--resume", "r", "--no-report", "--quiet")
    assert code == 0, err
    assert read("profile.json")["ids"]["working_set_bytes"] == 20 * (1 << 15)


def test_memory_beyond_the_table_stays_small() -> None:
    """Rows of state, activations and sparse gradients together, at the default's shapes with a tenth of the rows."""
    from dataclasses import replace

    from recperf.train.loop import take_step
    from recperf.workloads.micro_dlrm_dram.build import PreparedDram

    config = replace(default(), model=replace(default().model, rows=200_000, bag="reference"))
    trial = PreparedDram(config).trial(1)
    batches = trial.recipe.order.batches(0)
    take_step(trial.recipe, batches, 0)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() != trial.table.table_RD.data_ptr():
                largest = max(largest, out.untyped_storage().nbytes())
            return out

    with Watch():
        take_step(trial.recipe, batches, 1)
    # The largest temporary is a row for each different id of a batch: no tensor is as large as the default's table.
    assert largest <= 1024 * 3 * 32 * 1024
    assert largest < 0.1 * 2_000_000 * 1024
