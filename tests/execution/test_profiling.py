"""Profiling a workload: what it costs, which fixes hold, and which are turned away."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from recperf.execution import clocked_steps, measuring, profiling
from recperf.execution import fixes as fixes_module
from recperf.files import json_bytes
from recperf.measure.ceilings import ceilings_of
from recperf.measure.clocks import ClockReading, ThreadClock
from recperf.measure.fixes import Fix
from recperf.measure.peaks import measure_with
from recperf.measure.peaks.other_work import OtherWork
from recperf.measure.peaks.records import Peaks
from recperf.measure.peaks.sampling import TINY
from recperf.measure.profile import StepProfile, build_profile
from recperf.measure.profile_records import Missing
from recperf.measure.records import Advice, Observed, Operator, Percentiles
from recperf.runs.report.profiles import report_of
from recperf.workloads import find
from recperf.workloads.dlrm.build import PreparedDLRM
from recperf.workloads.dlrm.config import experiment_plain

DLRM = find("dlrm")
REAL = PreparedDLRM.fixes
BUDGET = profiling.ProfileOptions(steps=8)


@pytest.fixture(scope="module")
def peaks() -> Peaks:
    return measure_with(TINY, quick=True, say=lambda text: None)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixes are compared as ever, and each takes a step of a made-up millisecond."""

    def no_round(recipe: Any, sync: Any) -> list[int]:
        fixes_module.take_step(recipe, fixes_module.endless(recipe.order, fixes_module.EPOCHS_LATER), recipe.steps - 1)
        return [1_000_000]

    monkeypatch.setattr(fixes_module, "_times", no_round)


@contextmanager
def of(fixes: Any) -> Iterator[None]:
    """What a prepared dlrm has to suggest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PreparedDLRM, "fixes", fixes)
        yield


def tiny() -> Any:
    config = experiment_plain()
    return replace(
        config,
        model=replace(config.model, bottom=(8, 8, 4), dim=4, top=(8, 1)),
        data=replace(config.data, batches=6, held_out_batches=1),
        train=replace(config.train, batch_size=64, device="cpu", threads=1, onednn="on"),
    )


@pytest.fixture(autouse=True)
def any_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of these tiny steps is faster is chance, and how busy this machine is; what is combined must not be."""
    monkeypatch.setattr(fixes_module, "WORTH", 0.0)
    monkeypatch.setattr(OtherWork, "share", lambda *_: 0.0)


def tried(peaks: Peaks, fixes: Any = None) -> StepProfile:
    """A profile with its fixes tried: all of dlrm's own, or what a function makes of a prepared one."""
    notices: list[str] = []
    with of(fixes or PreparedDLRM.fixes):
        profile = profiling.profile(DLRM, tiny(), peaks, replace(BUDGET, try_fixes=True), notices.append)
    assert [line for line in notices if line.startswith("trying --")] == [
        f"trying {fix.change}" for fix in profile.advice
    ]
    return profile


def made(name: str, config: Any, tolerance: float = 1e-4) -> Fix:
    switch = f"--fast.{name} fused"
    return Fix(name=name, title=f"a made-up {name}", switch=switch, config=config, tolerance=tolerance)


def real(prepared: PreparedDLRM, *names: str) -> tuple[Fix, ...]:
    return tuple(fix for fix in REAL(prepared) if fix.name in names)


def test_a_verdict_beside_other_work_is_never_sure_of_itself(peaks: Peaks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other work came while the parts were timed, not while the step was observed."""
    monkeypatch.setattr(measuring, "share_of_others", lambda *_: 0.3)
    monkeypatch.setattr(measuring, "REPEAT_SECONDS", 0.0)
    profile = profiling.profile(DLRM, tiny(), peaks, BUDGET, lambda _: None)
    assert profile.other_work == 0.3
    assert profile.verdict.confidence != "high"
    assert "other work used 30% of the cores" in profile.verdict.doubts
    profile.workload.overhead.share = -0.049
    trust = next(section for section in report_of(profile).sections if section.key.endswith("trust"))
    assert "less than the spread of the steps: a step takes" in str(trust.blocks)
    assert "-4.9" not in str(trust.blocks)


def test_steps_that_waited_for_a_core_nearly_all_the_time_have_parts(
    peaks: Peaks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of waiting ends later than that of the step, so that it may count more than the whole of a step."""

    class Busy(ThreadClock):
        def now(self) -> ClockReading:
            reading = super().now()
            return reading._replace(waiting=2 * reading.wall)

    monkeypatch.setattr(clocked_steps, "ThreadClock", Busy)
    profile = profiling.profile(DLRM, tiny(), peaks, BUDGET, lambda _: None)
    assert math.fsum(part.share for part in profile.workload.components) == pytest.approx(1)
    assert profile.step_ms.p50 > 0


@pytest.mark.long
def test_every_fix_of_a_plain_step_is_tried_and_keeps_the_numbers(peaks: Peaks) -> None:
    profile = tried(peaks)
    rows = {fix.name: fix for fix in profile.advice}
    assert {"embedding", "interaction", "optimizer"} <= rows.keys()
    assert list(rows)[-1] == "all together"
    for fix in rows.values():
        assert fix.status == ("tried" if fix.measured_gain else "not judged"), fix
        assert fix.same_losses is True
        assert 0 <= fix.largest_difference <= 1e-4 * len(rows)
        assert fix.measured_ms > 0
    alone = list(rows.values())[:-1]
    together = rows["all together"]
    gains = [fix.predicted_gain for fix in alone]
    if together.predicted_gain:
        assert gains == sorted(gains, reverse=True)
        assert together.predicted_gain >= max(gains)
    assert set(together.change.split()) == {word for fix in alone for word in fix.change.split()}


@pytest.mark.long
@pytest.mark.usefixtures("at_once")
def test_fixes_that_change_the_numbers_or_do_not_run_are_left_out(peaks: Peaks) -> None:
    def fixes(prepared: PreparedDLRM) -> tuple[Fix, ...]:
        config = prepared.config
        wrong = made("mlp", replace(config, train=replace(config.train, learning_rate=2.0)))
        impossible = made("graph", replace(config, fast=replace(config.fast, graph="on")))
        return (wrong, impossible, *real(prepared, "interaction", "optimizer"))

    profile = tried(peaks, fixes)
    json_bytes(profile)
    rows = {fix.name: fix for fix in profile.advice}
    assert (rows["mlp"].status, rows["mlp"].same_losses) == ("rejected", False)
    assert "A loss differs by" in rows["mlp"].note
    assert rows["mlp"].measured_ms > 0
    assert rows["graph"].status == "not applicable"
    assert rows["graph"].note.startswith("MachineError: a step cannot be a CUDA graph")
    assert (rows["graph"].measured_ms, rows["graph"].same_losses) == (None, None)
    together = rows["all together"]
    assert together.status == "tried"
    assert set(together.change.split()) & {"--fast.mlp", "--fast.graph"} == set()
    assert {"--fast.interaction", "--fast.optimizer"} <= set(together.change.split())


def measured(ms: float, losses: list[float], *, spread: float = 0.01, others: float = 0.0) -> fixes_module.Measured:
    step = Percentiles(ms * (1 - spread), ms, ms * (1 + spread))
    return fixes_module.Measured(step=step, losses=losses, others=others)


def one_fix(*steps: fixes_module.Measured, note: str | None = None) -> Advice:
    """The row of a fix, from made-up measurements of the step before it, with it and after it."""
    before, later = steps[0], iter(steps[1:])
    row = Advice("mlp", "", "", note=note)
    unchanged = [before]
    same = fixes_module.try_fix(lambda _: next(later), None, made("mlp", None, 0.5), row, unchanged)
    assert (same, unchanged[-1]) == (row.same_losses, steps[-1])
    return row


def test_a_fix_that_makes_a_loss_nan_or_infinite_is_rejected() -> None:
    """NaN is neither above nor below a tolerance, wherever it is among the losses."""
    plain = measured(4.0, [1.0, 1.0])
    for losses in ([math.nan, 1.0], [1.0, math.nan], [1.0, math.inf]):
        row = one_fix(plain, measured(2.0, losses), plain)
        assert (row.status, row.same_losses, row.measured_gain) == ("rejected", False, 2.0)
        assert (row.largest_difference, row.note) == (None, "A loss is NaN or infinite")


def test_losses_are_compared_with_the_spread_of_repeats() -> None:
    """A loss that repeats differ in by 0.4 may differ by 0.7, which its tolerance of 0.5 alone would not allow."""
    plain, again, fixed = (measured(4.0, [loss]) for loss in (1.0, 1.4, 1.7))
    assert one_fix(plain, fixed, plain).status == "rejected"
    assert one_fix(plain, fixed, again).status == "tried"


def test_an_interrupt_is_not_a_fix_that_failed(peaks: Peaks, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(fixes_module, "_times", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tried(peaks)


def test_a_profile_without_ceilings_guesses_no_fixes() -> None:
    profile = profiling.profile(DLRM, tiny(), None, BUDGET, lambda text: None)
    assert profile.advice == []
    assert isinstance(profile.workload.roofline, Missing)
    assert profile.workload.roofline.missing.startswith("the ceilings")
    assert profile.verdict.confidence != "high"


def test_tables_are_those_of_the_model_and_their_lookups_those_of_the_window(peaks: Peaks) -> None:
    figures = profiling.profile(DLRM, tiny(), peaks, replace(BUDGET, steps=5), lambda text: None).workload
    assert figures.steps == clocked_steps.FEWEST
    assert figures.embeddings.lookups == pytest.approx(figures.ids.lookups, rel=0.2)
    assert [table.rows for table in figures.embeddings.tables] == [4, 3, 2]


def test_a_machine_that_drifts_is_not_credited_to_a_fix() -> None:
    """The step without the fix was 4 ms before it and 2 after: a fixed step of 2 ms says nothing."""
    row = one_fix(measured(4.0, [1.0]), measured(2.0, [1.0]), measured(2.0, [1.0]), note="Not predicted")
    assert (row.status, row.same_losses) == ("not judged", True)
    assert (row.measured_ms, row.measured_gain, row.measured_range) == (2.0, None, None)
    drift = "Gain not judged: machine drifted, a step without any fix took 4 ms and later 2 ms"
    assert row.note == f"Not predicted. {drift}"
    row = one_fix(measured(4.0, [1.0]), measured(2.0, [1.0], others=0.3), measured(4.0, [1.0]))
    assert (row.status, row.measured_gain) == ("not judged", None)
    assert row.note == "Gain not judged: machine too busy, other work took 30 % of the cores"
    row = one_fix(measured(4.2, [1.0]), measured(2.0, [1.0]), measured(3.8, [1.0]))
    assert (row.status, row.measured_gain, row.note) == ("tried", 2.0, None)
    assert row.measured_range == pytest.approx([3.8 * 0.99 / 2.02, 4.2 * 1.01 / 1.98])


@pytest.mark.parametrize(
    ("step", "others", "reason"),
    [(1.0, 0.0, "machine drifted, a step without any fix took 100 ms and later 1 ms"), (100.0, 0.5, "too busy"),
     (100.0, 0.0, None)],
)  # fmt: skip
def test_parts_of_another_minute_predict_nothing(
    monkeypatch: pytest.MonkeyPatch, peaks: Peaks, step: float, others: float, reason: str | None
) -> None:
    """A product takes 90 of 100 ms of a step; the steps that fixes are tried on now take `step`."""
    product = Operator("aten::mm", "top", "product", 1, 1, 90.0, flops=1e6)
    seen = Observed("cpu", 1, Percentiles(99.0, 100.0, 101.0), {"input": 10.0}, [product])
    figures: Any = SimpleNamespace(device="cpu", threads=1, batch_size=64, communication=None, components=[])
    profile = build_profile(seen, ceilings_of(peaks, threads=1), None, None, {})
    steps = measuring.MeasuredSteps(profile, figures, seen, None, None)
    monkeypatch.setattr(fixes_module, "_measure", lambda *_: measured(step, [1.0], others=others))
    (row,) = fixes_module.try_fixes(DLRM, None, steps, [made("onednn", None)], peaks, lambda text: None)
    if reason is None:
        assert (row.status, row.note) == ("tried", None)
        assert row.predicted_range[0] <= row.predicted_gain <= row.predicted_range[1]
        assert 1 < row.predicted_gain <= 10
        return
    assert (row.predicted_gain, row.predicted_range) == (None, None)
    assert row.note.startswith("Not predicted: ")
    assert reason in row.note
    assert row.status == ("not judged" if others else "tried")
