"""Tries switches of a workload that could make its step faster, whose gains `measure.fixes` predicts."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import torch

from ..config import from_json, to_json
from ..measure import fixes as predictions
from ..measure.clocks import spread
from ..measure.fixes import Fix
from ..measure.peaks.other_work import OtherWork
from ..measure.peaks.records import Peaks
from ..measure.records import Advice, Percentiles
from ..train.device import applied
from ..train.loop import Recipe, take_step
from .clocked_steps import endless
from .measuring import MeasuredSteps
from .workload import Workload

EPOCHS_LATER = 4000
"""Epochs after training whose batches nothing else in a profile uses."""
COMPARED = 5
"""Steps whose losses show whether a fix changes the numbers."""
ROUND_NS = 200e6
"""Time of a round of steps."""
WORTH = 1.0
"""Measured gain below which a fix on a CPU is left out of the combination."""


@dataclass(frozen=True)
class Measured:
    step: Percentiles
    """p20, p50 and p80 of several rounds, in ms per step."""
    losses: list[float]
    """The first ones from initial weights."""
    others: float | None
    """Share of the cores that other work took meanwhile."""


def try_fixes(
    workload: Workload,
    config: Any,
    measured: MeasuredSteps,
    fixes: list[Fix],
    peaks: Peaks,
    say: Callable[[str], None],
) -> list[Advice]:
    """Measure each fix of a workload alone, then all together that kept the losses; the advice has the gains.

    No gain is predicted where the step that they are measured against is not the profile's any more.
    """

    def measure(changed: Any) -> Measured:
        return _measure(workload, changed)

    say("trying fixes: measuring the step without any")
    base = measure(config)
    doubt = predictions.too_busy(base.others) or predictions.drifted(measured.seen.step_ms, base.step)
    predictor = predictions.Predictor(measured.seen, measured.profile, measured.figures, peaks, doubt)
    fixes, rows = predictor.suggest(fixes)
    on_cpu = measured.profile.device == "cpu"
    # On a GPU a faster kernel may show only once launches no longer limit the step; on a CPU nothing hides it.
    worth = WORTH if on_cpu else 0.0
    accepted, unchanged = try_each(fixes, rows, measure, config, base, say, worth)
    combined = _compatible(accepted)
    if len(combined) < 2:
        return rows
    say(f"trying {_switches(combined)}")
    whole = Fix(
        name="all together",
        title="every fix that was faster" if on_cpu else "every fix that kept the losses",
        switch=_switches(combined),
        config=_merge(config, combined),
        tolerance=sum(fix.tolerance for fix in combined),
    )
    names = [name for fix in combined for name in (fix.name, *fix.implies)]
    row = predictor.row(whole, names)
    try_fix(measure, config, whole, row, unchanged)
    return [*rows, row]


def try_each(
    fixes: list[Fix],
    rows: list[Advice],
    measure: Callable[[Any], Measured],
    config: Any,
    base: Measured,
    say: Callable[[str], None],
    worth: float = WORTH,
) -> tuple[list[Fix], list[Measured]]:
    """Measure each fix into its row. Returns those that kept the losses and gained at least `worth`, and every
    measurement without a fix."""
    accepted, unchanged = [], [base]
    for fix, row in zip(fixes, rows):
        say(f"trying {fix.switch}")
        if try_fix(measure, config, fix, row, unchanged) and (not worth or (row.measured_gain or 0.0) >= worth):
            accepted.append(fix)
    return accepted, unchanged


def _compatible(fixes: list[Fix]) -> list[Fix]:
    """Two positions of one switch exclude each other: the one with the larger predicted gain stays."""
    by_switch: dict[str, Fix] = {}
    for fix in fixes:
        by_switch.setdefault(fix.switch.split()[0], fix)
    return list(by_switch.values())


def _switches(fixes: list[Fix]) -> str:
    """The switches of several fixes, each once."""
    pairs = [pair for fix in fixes for pair in zip(*[iter(fix.switch.split())] * 2)]
    return " ".join(" ".join(pair) for pair in dict.fromkeys(pairs))


def _merge(config: Any, fixes: list[Fix]) -> Any:
    """One config with the changes of every fix."""
    base, merged = to_json(config), to_json(config)

    def take(merged_value: Any, before: Any, changed: Any) -> Any:
        if isinstance(merged_value, dict):
            return {key: take(merged_value[key], before[key], changed[key]) for key in merged_value}
        return changed if changed != before else merged_value

    for fix in fixes:
        merged = take(merged, base, to_json(fix.config))
    return from_json(type(config), merged)


def try_fix(measure: Callable[[Any], Measured], config: Any, fix: Fix, row: Advice, unchanged: list[Measured]) -> bool:
    """Measure a fix into its row, with the step without it before and after, so that drift is not taken for a gain.

    `unchanged` has the measurements without a fix so far; the one after it is added. Returns whether the losses stayed
    the same: within the tolerance of the fix, or within twice the largest difference of two unchanged runs.
    """
    try:
        fixed = measure(fix.config)
    except Exception as error:  # A fix that does not run here is a result, not a failure of the profile.
        row.status, row.note = "not applicable", f"{type(error).__name__}: {error}".splitlines()[0]
        return False
    before, after = unchanged[-1], measure(config)
    unchanged.append(after)
    repeats = [difference(unchanged[0].losses, again.losses) or 0.0 for again in unchanged[1:]]
    tolerance = max(fix.tolerance, 2 * max(repeats))
    differs = difference(unchanged[0].losses, fixed.losses)
    same = differs is not None and differs <= tolerance
    row.measured_ms, row.same_losses, row.largest_difference = fixed.step.p50, same, differs
    row.status = "tried" if same else "rejected"
    busiest = max((one.others for one in (before, fixed, after) if one.others is not None), default=None)
    doubt = predictions.too_busy(busiest) or predictions.drifted(before.step, after.step)
    notes = [row.note] if row.note else []
    if differs is None:
        notes.append("A loss is NaN or infinite")
    elif not same:
        notes.append(f"A loss differs by {differs:.2g}, more than rounding and repeats explain ({tolerance:.2g})")
    if doubt:
        notes.append(f"Gain not judged: {doubt}")
        row.status = "not judged" if same else "rejected"
    else:
        row.measured_gain = (before.step.p50 + after.step.p50) / 2 / fixed.step.p50
        row.measured_range = [
            min(before.step.p20, after.step.p20) / fixed.step.p80,
            max(before.step.p80, after.step.p80) / fixed.step.p20,
        ]
    row.note = ". ".join(notes) or None
    return same


def difference(losses: list[float], fixed_losses: list[float]) -> float | None:
    """The largest relative difference; None if a loss is NaN or infinite."""
    if not all(map(math.isfinite, [*losses, *fixed_losses])):
        return None
    return max((abs(a - b) / max(abs(a), 1e-12) for a, b in zip(losses, fixed_losses)), default=0.0)


def _measure(workload: Workload, config: Any) -> Measured:
    """Measure the step of a config, from initial weights and without a clock."""
    others = OtherWork()
    prepared = workload.prepare(config)
    with applied(prepared.settings):
        trial = prepared.trial(config.seed)
        recipe, sync = trial.recipe, prepared.settings.sync or (lambda: None)
        first = recipe.order.batches(0)
        losses = [float(take_step(recipe, first, step)[0]) for step in range(min(COMPARED, len(recipe.order)))]
        del first  # Its batches may hold rows of tables in tiers.
        rounds = _times(recipe, sync)
    del trial, recipe
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return Measured(step=spread(rounds), losses=losses, others=others.share())


def _times(recipe: Recipe, sync: Callable[[], None]) -> list[int]:
    """ns per step of rounds, at whose ends a GPU is synchronised."""
    batches: Iterator[Any] = endless(recipe.order, recipe.epochs + EPOCHS_LATER)

    def several(count: int) -> int:
        sync()
        began = perf_counter_ns()
        for _ in range(count):
            take_step(recipe, batches, recipe.steps - 1)
        sync()
        return (perf_counter_ns() - began) // count

    several(1)
    single = [several(1) for _ in range(5)]
    count = min(50, round(ROUND_NS / sorted(single)[2]))
    return [several(count) for _ in range(5)] if count > 1 else single
