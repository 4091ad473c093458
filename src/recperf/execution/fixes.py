"""Predicts and tries fixes: switches of a workload that could make a step faster."""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import torch

from ..config import from_json, to_json
from ..measure import fixes as predictions
from ..measure.profile import endless
from ..train.device import applied
from ..train.loop import Recipe, take_step
from .workload import Fix, Workload

EPOCHS_LATER = 4000
"""Epochs after training whose batches nothing else in a profile uses."""
COMPARED = 5
"""Steps whose losses show whether a fix changes the numbers."""
DRIFT = 1.15
"""Ratio of the steps before and after a fix above which its gain is uncertain."""
WORTH = 1.0
"""Measured gain below which a fix on a CPU is left out of the combination."""


def suggest(
    fixes: tuple[Fix, ...], profile: dict[str, Any], parts: list[dict[str, Any]] | None, peaks: dict[str, Any] | None
) -> list[tuple[Fix, float]]:
    """Rank fixes by their predicted gain, and add their rows to the profile."""
    ranked = predictions.ranked(fixes, profile, parts, peaks, os.cpu_count() or 1)
    profile["fixes"] = [_row(fix, predicted, profile) for fix, predicted in ranked]
    return ranked


def _row(fix: Fix, predicted: float, profile: dict[str, Any]) -> dict[str, Any]:
    step = profile["overhead"]["plain_ms"]
    return {
        "name": fix.name,
        "title": fix.title,
        "switch": fix.switch,
        "why": WHY.get(fix.name, fix.title),
        "predicted_ms": predicted,
        "predicted_gain": step / predicted,
        "measured_ms": None,
        "measured_gain": None,
        "same_numbers": None,
        "largest_difference": None,
        "status": "suggested",
        "note": None,
    }


WHY = {
    "input": "the device waits while the host makes and copies each batch",
    "pinned": "from pageable memory a copy passes through a buffer of the driver, and the host waits for it",
    "graph": "the host launches every kernel separately; a graph is one launch per step",
    "precision": "tensor cores compute tf32 several times as fast as other units compute float32",
    "bfloat16": "tensor cores compute bfloat16 twice as fast as tf32, from half the bytes",
    "embedding": "lookup, backward pass and update are many kernels that pass data through memory",
    "interaction": "products, their selection and the scattered gradient pass through memory",
    "mlp": "bias, ReLU and bias gradient are separate passes over every activation",
    "optimizer": "every parameter is updated by separate kernels",
    "threads": "compute-bound operators can use more cores",
    "onednn": "oneDNN multiplies large matrices faster",
}


def try_fixes(
    workload: Workload,
    config: Any,
    profile: dict[str, Any],
    ranked: list[tuple[Fix, float]],
    peaks: dict[str, Any] | None,
    parts: list[dict[str, Any]] | None,
    say: Callable[[str], None],
) -> None:
    """Measure each fix alone, then all together that kept the numbers, and write the gains into the profile's rows.

    Gains are predicted again from the step time without a clock, which the fixes are measured against too.
    """
    say("trying fixes: measuring the step without any")
    base, losses = _measure(workload, config)
    unclocked = {**profile, "overhead": {**profile["overhead"], "plain_ms": base}}
    ranked = suggest(tuple(fix for fix, _ in ranked), unclocked, parts, peaks)
    profile["fixes"] = unclocked["fixes"]
    accepted: list[Fix] = []
    before = base
    for (fix, _), row in zip(ranked, profile["fixes"]):
        say(f"trying {fix.switch}")
        same, before = _try_fix(workload, config, fix, row, before, losses)
        # On a GPU a faster kernel may show only once launches no longer limit the step; on a CPU nothing hides it.
        if same and (profile["device"] != "cpu" or row["measured_gain"] >= WORTH):
            accepted.append(fix)
    combined = _compatible(accepted)
    if len(combined) < 2:
        return
    say(f"trying {_switches(combined)}")
    whole = Fix(
        name="all together",
        title="every fix that kept the numbers" if profile["device"] != "cpu" else "every fix that was faster",
        switch=_switches(combined),
        config=_merge(config, combined),
        tolerance=sum(fix.tolerance for fix in combined),
    )
    row = _row(whole, _predict_together(combined, unclocked, parts, peaks), unclocked)
    profile["fixes"].append(row)
    _try_fix(workload, config, whole, row, before, losses)


def _compatible(fixes: list[Fix]) -> list[Fix]:
    """Two positions of one switch exclude each other: the one with the larger predicted gain stays."""
    by_switch: dict[str, Fix] = {}
    for fix in fixes:
        by_switch.setdefault(fix.switch.split()[0], fix)
    return list(by_switch.values())


def _predict_together(
    fixes: list[Fix], profile: dict[str, Any], parts: list[dict[str, Any]] | None, peaks: dict[str, Any] | None
) -> float:
    """Predicted step time in ms with all fixes."""
    facts = predictions.facts(profile, parts, peaks) if parts is not None and peaks is not None else None
    if facts is not None:
        return predictions.predict(facts, [name for fix in fixes for name in (fix.name, *fix.implies)])
    base, names = profile["overhead"]["plain_ms"], {fix.name for fix in fixes}
    saved = sum(base - row["predicted_ms"] for row in profile["fixes"] if row["name"] in names)
    return float(max(predictions.LEAST * base, base - saved))


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


def _try_fix(
    workload: Workload, config: Any, fix: Fix, row: dict[str, Any], before: float, losses: list[float]
) -> tuple[bool, float]:
    """Measure a fix into its row, with the step without it before and after, so that drift is not taken for a gain.

    Returns whether the losses stayed the same, and the step time without the fix measured last.
    """
    try:
        step, fixed_losses = _measure(workload, fix.config)
    except Exception as error:  # A fix that does not run here is a result, not a failure of the profile.
        row |= {"status": "not applicable", "note": f"{type(error).__name__}: {error}".splitlines()[0]}
        return False, before
    after, _ = _measure(workload, config)
    note, difference = None, _difference(losses, fixed_losses)
    same = difference is not None and difference <= fix.tolerance
    if difference is None:
        note = "a loss is NaN or infinite"
    elif not same:
        note = f"a loss differs by {difference:.2g}, more than rounding explains ({fix.tolerance:g})"
    elif max(before, after) > DRIFT * min(before, after):
        note = f"uncertain: without the fix a step took {before:.3g} ms before and {after:.3g} ms after"
    row |= {
        "measured_ms": step,
        "measured_gain": (before + after) / 2 / step,
        "same_numbers": same,
        "largest_difference": difference,
        "status": "tried" if same else "rejected",
        "note": note,
    }
    return same, after


def _difference(losses: list[float], fixed_losses: list[float]) -> float | None:
    """The largest relative difference; None if a loss is NaN or infinite."""
    if not all(map(math.isfinite, [*losses, *fixed_losses])):
        return None
    return max(abs(a - b) / max(abs(a), 1e-12) for a, b in zip(losses, fixed_losses))


def _measure(workload: Workload, config: Any) -> tuple[float, list[float]]:
    """The median step time in ms without a clock, and the first losses from initial weights."""
    prepared = workload.prepare(config)
    with applied(prepared.settings):
        trial = prepared.trial(config.seed)
        recipe, sync = trial.recipe, prepared.settings.sync or (lambda: None)
        first = recipe.order.batches(0)
        losses = [float(take_step(recipe, first, step)[0]) for step in range(min(COMPARED, len(recipe.order)))]
        rounds = _rounds(recipe, sync)
    del trial, recipe
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return sorted(rounds)[len(rounds) // 2], losses


def _rounds(recipe: Recipe, sync: Callable[[], None]) -> list[float]:
    """Step time in ms of several rounds; a GPU is synchronised only at the end of a round."""
    batches: Iterator[Any] = endless(recipe.order, recipe.epochs + EPOCHS_LATER)

    def several(count: int) -> float:
        sync()
        began = perf_counter()
        for _ in range(count):
            take_step(recipe, batches, recipe.steps - 1)
        sync()
        return (perf_counter() - began) / count * 1e3

    each = several(3)
    count = max(1, min(50, round(200 / each)))
    return [several(count) for _ in range(5 if each < 200 else 3)]
