"""Profiling a workload: what it costs, which fixes hold, and which are turned away."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest

from recperf.config import to_json
from recperf.execution import fixes as fixes_module
from recperf.execution import profiling
from recperf.execution.workload import Fix
from recperf.measure.peaks import measure_with
from recperf.measure.peaks.sampling import TINY
from recperf.workloads import few_steps, find
from recperf.workloads.dlrm.build import PreparedDLRM
from recperf.workloads.dlrm.config import experiment, experiment_plain

DLRM = find("dlrm")
REAL = PreparedDLRM.fixes
BUDGET = profiling.ProfileOptions(full=False, steps=8)


@pytest.fixture(scope="module")
def peaks() -> dict[str, Any]:
    return measure_with(TINY, quick=True, say=lambda text: None)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixes are compared as ever, and timed with a single step."""

    def round_of_one(recipe: Any, sync: Any) -> list[float]:
        began = perf_counter()
        fixes_module.take_step(recipe, fixes_module.endless(recipe.order, fixes_module.EPOCHS_LATER), recipe.steps - 1)
        return [(perf_counter() - began) * 1e3]

    monkeypatch.setattr(fixes_module, "_rounds", round_of_one)


@contextmanager
def of(fixes: Any) -> Iterator[None]:
    """What a prepared dlrm has to suggest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PreparedDLRM, "fixes", fixes)
        yield


def tiny(config: Any = None, *, widths: int = 8, batch: int = 64) -> Any:
    config = config or experiment_plain()
    return replace(
        config,
        model=replace(config.model, bottom=(widths, widths, 4), dim=4, top=(widths, 1)),
        data=replace(config.data, batches=6, held_out_batches=1),
        train=replace(config.train, batch_size=batch, device="cpu", threads=1, onednn="on"),
    )


@pytest.fixture(autouse=True)
def any_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of these tiny steps is faster is chance; what is combined must not be."""
    monkeypatch.setattr(fixes_module, "WORTH", 0.0)


def tried(peaks: dict[str, Any], fixes: Any = None, config: Any = None, **wish: Any) -> dict[str, Any]:
    """A profile with its fixes tried: all of dlrm's own, or what a function makes of a prepared one."""
    notices: list[str] = []
    with of(fixes or PreparedDLRM.fixes):
        profile = profiling.profile(
            DLRM, config or tiny(), peaks, replace(BUDGET, try_fixes=True, **wish), notices.append
        )
    assert notices[0].startswith("measuring the parts of up to 8 steps")
    assert [line for line in notices if line.startswith("trying --")] == [
        f"trying {fix['switch']}" for fix in profile["fixes"]
    ]
    return profile


def made(name: str, config: Any, tolerance: float = 1e-4) -> Fix:
    switch = f"--fast.{name} fused"
    return Fix(name=name, title=f"a made-up {name}", switch=switch, config=config, tolerance=tolerance)


def real(prepared: PreparedDLRM, *names: str) -> tuple[Fix, ...]:
    return tuple(fix for fix in REAL(prepared) if fix.name in names)


@pytest.mark.long
def test_every_fix_of_a_plain_step_is_tried_and_keeps_the_numbers(peaks: dict[str, Any]) -> None:
    profile = tried(peaks)
    rows = {fix["name"]: fix for fix in profile["fixes"]}
    assert {"embedding", "interaction", "optimizer"} <= rows.keys()
    assert list(rows)[-1] == "all together"
    for fix in rows.values():
        assert fix["status"] == "tried", fix
        assert fix["same_numbers"] is True
        assert fix["note"] is None or fix["note"].startswith("unsure")
        assert 0 <= fix["largest_difference"] <= 1e-4 * len(rows)
        assert fix["measured_ms"] > 0
        assert fix["predicted_ms"] > 0
    alone = list(rows.values())[:-1]
    gains = [fix["predicted_gain"] for fix in alone]
    assert gains == sorted(gains, reverse=True)
    together = rows["all together"]
    assert together["predicted_gain"] >= max(gains)
    assert set(together["switch"].split()) == {word for fix in alone for word in fix["switch"].split()}


@pytest.mark.usefixtures("at_once")
def test_fixes_that_change_the_numbers_or_do_not_run_are_left_out(peaks: dict[str, Any]) -> None:
    def fixes(prepared: PreparedDLRM) -> tuple[Fix, ...]:
        config = prepared.config
        wrong = made("mlp", replace(config, train=replace(config.train, learning_rate=2.0)))
        impossible = made("graph", replace(config, fast=replace(config.fast, graph="on")))
        return (wrong, impossible, *real(prepared, "interaction", "optimizer"))

    profile = tried(peaks, fixes)
    json.dumps(profile, allow_nan=False)
    rows = {fix["name"]: fix for fix in profile["fixes"]}
    assert (rows["mlp"]["status"], rows["mlp"]["same_numbers"]) == ("rejected", False)
    assert "a loss differs by" in rows["mlp"]["note"]
    assert rows["mlp"]["measured_ms"] > 0
    assert rows["graph"]["status"] == "not applicable"
    assert rows["graph"]["note"].startswith("MachineError: a step cannot be a CUDA graph")
    assert (rows["graph"]["measured_ms"], rows["graph"]["same_numbers"]) == (None, None)
    together = rows["all together"]
    assert together["status"] == "tried"
    assert set(together["switch"].split()) & {"--fast.mlp", "--fast.graph"} == set()
    assert {"--fast.interaction", "--fast.optimizer"} <= set(together["switch"].split())


@pytest.mark.usefixtures("at_once")
def test_one_fix_that_holds_is_not_combined_with_itself(peaks: dict[str, Any]) -> None:
    profile = tried(peaks, lambda prepared: real(prepared, "optimizer"))
    assert [fix["name"] for fix in profile["fixes"]] == ["optimizer"]


@pytest.mark.usefixtures("at_once")
def test_fixes_slower_on_a_cpu_are_not_combined(peaks: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixes_module, "WORTH", 1e9)
    profile = tried(peaks, lambda prepared: real(prepared, "interaction", "optimizer"))
    assert {fix["name"] for fix in profile["fixes"]} == {"interaction", "optimizer"}
    assert {fix["status"] for fix in profile["fixes"]} == {"tried"}


@pytest.mark.usefixtures("at_once")
def test_two_positions_of_one_switch_exclude_each_other(peaks: dict[str, Any]) -> None:
    def fixes(prepared: PreparedDLRM) -> tuple[Fix, ...]:
        (one,) = real(prepared, "embedding")
        return (one, replace(one, name="mlp", title="another position"), *real(prepared, "optimizer"))

    *alone, together = tried(peaks, fixes)["fixes"]
    assert len(alone) == 3
    assert together["switch"].split().count("--fast.embedding") == 1


def test_a_fix_that_makes_a_loss_nan_or_infinite_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN is neither above nor below a tolerance, wherever it is among the losses."""
    for losses in ([math.nan, 1.0], [1.0, math.nan], [1.0, math.inf]):
        monkeypatch.setattr(fixes_module, "_measure", lambda *_, losses=losses: (2.0, losses))
        row: dict[str, Any] = {}
        same, after = fixes_module._try_fix(DLRM, None, made("mlp", None, 0.5), row, 4.0, [1.0, 1.0])
        assert (same, after) == (False, 2.0)
        assert (row["status"], row["same_numbers"], row["measured_gain"]) == ("rejected", False, 1.5)
        assert (row["largest_difference"], row["note"]) == (None, "a loss is NaN or infinite")


def test_an_interrupt_is_not_a_fix_that_failed(peaks: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(fixes_module, "_rounds", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tried(peaks)


def test_a_profile_without_ceilings_guesses_no_fixes() -> None:
    profile = profiling.profile(DLRM, tiny(), None, BUDGET, lambda text: None)
    assert profile["fixes"] == []
    assert "missing" in profile["roofline"]
    assert profile["verdict"]["confidence"] == "low"
    assert any(text.startswith("roofline: the ceilings") for text in profile["trust"]["not_measured"])


def test_tables_are_those_of_the_model_and_their_lookups_those_of_the_window(peaks: dict[str, Any]) -> None:
    profile = profiling.profile(DLRM, tiny(), peaks, replace(BUDGET, steps=5), lambda text: None)
    assert profile["steps"] == 5
    assert profile["embeddings"]["lookups"] == pytest.approx(profile["ids"]["lookups"], rel=0.2)
    assert [table["rows"] for table in profile["embeddings"]["tables"]] == [4, 3, 2]


def test_a_few_steps_of_a_saved_config_run_in_a_process_of_their_own(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"schema": 1, "workload": "dlrm", "config": to_json(tiny())}))
    assert profiling.stall_command(path)[1:] == ["-m", "recperf.workloads.few_steps", str(path)]
    steps: list[int] = []
    monkeypatch.setattr("recperf.train.loop.take_step", lambda recipe, batches, step: steps.append(step))
    few_steps.main(path)
    assert steps == [0, 1, 2, 3]


def test_measuring_in_budget_mode_costs_less_than_a_tenth_of_a_step() -> None:
    """Of a step of at least 5 ms. The best of three: what a shared machine adds is not measuring's doing."""
    costs: list[float] = []
    batch = 1024
    while len(costs) < 3:
        config = tiny(experiment(), widths=256, batch=batch)
        profile = profiling.profile(DLRM, config, None, replace(BUDGET, steps=24), lambda text: None)
        assert profile["trust"]["profiling"] == {"budget": profile["overhead"], "full": None}
        if profile["overhead"]["plain_ms"] < 5:
            batch *= 2
            continue
        costs.append(profile["overhead"]["share"])
        if costs[-1] < 0.1:
            return
    pytest.fail(f"clocking cost {[f'{cost:.1%}' for cost in costs]} of a step")


def test_a_machine_that_drifts_is_not_credited_to_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step without the fix was 4 ms before it and 2 after: of a fixed step of 2, half the gain is the machine's."""
    monkeypatch.setattr(fixes_module, "_measure", lambda *_: (2.0, [1.0]))
    row: dict[str, Any] = {}
    same, after = fixes_module._try_fix(DLRM, None, made("mlp", None), row, 4.0, [1.0])
    assert (same, after, row["measured_gain"]) == (True, 2.0, 1.5)
    assert row["note"] == "uncertain: without the fix a step took 4 ms before and 2 ms after"
    fixes_module._try_fix(DLRM, None, made("mlp", None), row, 2.1, [1.0])
    assert row["note"] is None
