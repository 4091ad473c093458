"""Profiling a workload: a window of steady steps, traced ones after it, and fixes that are tried."""

from __future__ import annotations

import gc
import math
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from ..distributed.ranks import current
from ..errors import DataError
from ..measure import fixes as predictions
from ..measure import sections
from ..measure.explain import verdict
from ..measure.peaks.other_work import OtherWork
from ..measure.profile import endless
from ..measure.trace.analyse import analyse
from ..measure.trace.cut import write_cut
from ..measure.trace.read import read
from ..measure.trace.record import record
from ..train.device import applied
from ..train.loop import Recipe, take_step
from .measuring import STEPS, measure_window
from .workload import Fix, Prepared, Trial, Workload

TRACED = 8
"""Steps under torch.profiler: enough for means, few enough for a trace a browser opens."""
TRACED_LATER, TABLES_LATER, TRIED_LATER = 2000, 3000, 4000
"""Epochs whose batches nothing else in a profile uses."""
COMPARED = 5
"""Steps whose losses tell whether a fix changes the numbers."""
DRIFT = 1.15
"""Ratio of the steps before and after a fix above which its gain is unsure."""
WORTH = 1.0
"""Measured gain below which a fix on a CPU is left out of the combination."""
BUDGET_MODE = "not recorded in budget mode; --mode full records it"
ALONE = "fixes are predicted and tried in one process"


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What to do beyond the budget."""

    full: bool = True
    try_fixes: bool = False
    trace: Path | None = None
    """Where this rank's trace is kept."""
    trace_mb: float = 50.0
    steps: int = STEPS
    run: str = ""
    """What the traces of this profile's ranks have in common."""


def profile(
    workload: Workload, config: Any, peaks: dict[str, Any] | None, wish: Wish, say: Callable[[str], None]
) -> dict[str, Any]:
    """Everything but stalls, which need a process of their own.

    Every rank takes the same window and records the same steps. What is told of one of them is told of the slowest.
    """
    world = current()
    other_work = OtherWork()
    prepared = world.leader_first(lambda: workload.prepare(config))
    world.require_same_data(prepared.data["digest"])
    with applied(prepared.settings):
        trial = prepared.trial(config.seed)
        say(f"measuring up to {wish.steps} steps, part by part")
        found = measure_window(prepared, trial, trial.recipe, peaks, steps=wish.steps)
        slowest = found.get("communication", {}).get("slowest", 0)
        missing = {"missing": BUDGET_MODE}
        traced: dict[str, Any] = dict.fromkeys(("operator_table", "kernels", "idle", "transfers"), missing)
        parts, cost, trace = None, None, None
        if wish.full:
            say(f"recording {TRACED} steps with torch.profiler")
            traced, parts, cost, trace = world.broadcast(_traced(prepared, trial, found, wish, say), slowest)
        found |= traced
        touched = world.broadcast(_touched(trial), slowest)
        tables = trial.tables()
    found |= {
        "kind": "profile",
        "workload": workload.name,
        "preset": None,
        "mode": "full" if wish.full else "budget",
        "switches": dict(prepared.settings.reasons),
        "verdict": verdict(found, peaks),
        "roofline": sections.roofline(found, peaks),
        "embeddings": sections.embeddings(found, peaks, tables, touched),
        "communication": found.get("communication") or {"missing": "one rank"},
        "trace": trace,
        "stalls": None,
    }
    del trial
    if world.choose(True, several=False):
        _fixes(workload, config, prepared, found, peaks, parts, wish, say)
    else:
        found["fixes"] = {"missing": ALONE}
    found["trust"] = _trust(found, config, cost, other_work)
    return found


def _fixes(
    workload: Workload, config: Any, prepared: Prepared, found: dict[str, Any], peaks: dict[str, Any] | None,
    parts: list[dict[str, Any]] | None, wish: Wish, say: Callable[[str], None],
) -> None:  # fmt: skip
    """Add fixes ranked by their predicted gain; with --try-fixes they are measured."""
    ranked = predictions.ranked(prepared.fixes(), found, parts, peaks, os.cpu_count() or 1)
    found["fixes"] = [_suggested(fix, predicted, found) for fix, predicted in ranked]
    if wish.try_fixes and ranked:
        _try(workload, config, found, ranked, peaks, parts, say)


def _traced(
    prepared: Prepared, trial: Trial, found: dict[str, Any], wish: Wish, say: Callable[[str], None]
) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, float], dict[str, Any] | None]:
    recipe = trial.recipe
    batches = endless(recipe.order, recipe.epochs + TRACED_LATER)
    cuda = prepared.settings.device.type == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        record(
            lambda _: take_step(recipe, batches, recipe.steps - 1), TRACED, path, cuda,
            about=current().trace_facts(wish.run), meet=current().trace_barrier(),
        )  # fmt: skip
        analysed = analyse(read(path))
        kept = _kept(path, wish, say)
    plain, traced = found["overhead"]["plain_ms"], analysed["window"]["wall_ms"]
    cost = {"plain_ms": plain, "clocked_ms": traced, "share": traced / plain - 1}
    tables = {name: analysed[name] for name in ("operator_table", "kernels", "idle", "transfers")}
    return tables, analysed["parts"], cost, kept


def _kept(path: Path, wish: Wish, say: Callable[[str], None]) -> dict[str, Any] | None:
    """The trace, cut to size; one whose single step is too large is said, and does not cost the profile."""
    if wish.trace is None:
        return None
    try:
        return write_cut(path, wish.trace, wish.trace_mb)
    except DataError as error:
        say(f"no trace is kept: {error.what}")
        return None


def _share_of_others(other_work: OtherWork) -> float | None:
    """The share of the processor used by processes that are not ranks of this run; unknown over several hosts."""
    world = current()
    used = world.total(other_work.own_seconds())
    return other_work.share(used) if world.on_one_host else None


def _touched(trial: Trial) -> list[torch.Tensor]:
    """The rows some batches look up."""
    batches = endless(trial.recipe.order, trial.recipe.epochs + TABLES_LATER)
    return [trial.rows_of(batch).cpu() for batch in islice(batches, 4)]


def _suggested(fix: Fix, predicted: float, found: dict[str, Any]) -> dict[str, Any]:
    step = found["overhead"]["plain_ms"]
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
    "input": "the host makes and copies every batch while the device waits",
    "pinned": "from pageable memory a copy goes through the driver's own buffer, and the host waits for it",
    "graph": "the host launches every kernel on its own; a graph is one launch a step",
    "precision": "the matrix units work on tf32 several times faster than the others on float32",
    "bfloat16": "the matrix units work on bfloat16 twice as fast as on tf32, and read half the bytes",
    "embedding": "lookups, their backward pass and the update are many kernels that write what the next reads",
    "interaction": "products, their selection and the gradient's scatter pass through memory",
    "mlp": "bias, ReLU and bias gradients are passes of their own over every activation",
    "optimizer": "every parameter is updated by kernels of its own",
    "threads": "operators with arithmetic can be shared between cores",
    "onednn": "oneDNN multiplies large matrices faster",
}


def _try(
    workload: Workload,
    config: Any,
    found: dict[str, Any],
    ranked: list[tuple[Any, float]],
    peaks: dict[str, Any] | None,
    parts: list[dict[str, Any]] | None,
    say: Callable[[str], None],
) -> None:
    """Each fix alone, then all that held; predicted gains beside measured ones.

    Predictions are made anew from the pace of unmeasured steps, against which the fixes are measured too.
    """
    say("trying fixes: what the step costs and gives without any")
    base, losses = _measured(workload, config)
    paced = {**found, "overhead": {**found["overhead"], "plain_ms": base}}
    ranked = predictions.ranked([fix for fix, _ in ranked], paced, parts, peaks, os.cpu_count() or 1)
    found["fixes"] = [_suggested(fix, predicted, paced) for fix, predicted in ranked]
    held: list[Fix] = []
    before = base
    for (fix, _), row in zip(ranked, found["fixes"]):
        say(f"trying {fix.switch}")
        same, before = _tried(workload, config, fix, row, before, losses)
        # On a GPU a fix to a kernel may show only once launches no longer set the pace; on a CPU nothing hides it.
        if same and (found["device"] != "cpu" or row["measured_gain"] >= WORTH):
            held.append(fix)
    # Two positions of one switch exclude each other: the one with the larger predicted gain goes in.
    together: list[Fix] = []
    for fix in held:
        taken = {other.switch.split()[0] for other in together}
        if fix.switch.split()[0] not in taken:
            together.append(fix)
    if len(together) < 2:
        return
    say(f"trying {_words(together)}")
    merged = _merged(config, together)
    facts = predictions.facts(paced, parts, peaks) if parts is not None and peaks is not None else None
    if facts is not None:
        predicted = predictions.predict(facts, [name for fix in together for name in (fix.name, *fix.implies)])
    else:
        gains = [base - row["predicted_ms"] for row in found["fixes"] if row["name"] in {f.name for f in together}]
        predicted = max(predictions.LEAST * base, base - sum(gains))
    whole = Fix(
        name="all together",
        title="every fix that kept the numbers" if found["device"] != "cpu" else "every fix that was faster",
        switch=_words(together),
        config=merged,
        tolerance=sum(fix.tolerance for fix in together),
    )
    row = _suggested(whole, predicted, paced)
    found["fixes"].append(row)
    _tried(workload, config, whole, row, before, losses)


def _words(together: list[Fix]) -> str:
    """The switches of several fixes, each once."""
    pairs = [pair for fix in together for pair in zip(*[iter(fix.switch.split())] * 2)]
    return " ".join(" ".join(pair) for pair in dict.fromkeys(pairs))


def _merged(config: Any, together: list[Fix]) -> Any:
    """One config with what every fix changed."""
    from ..config import from_json, to_json

    base, merged = to_json(config), to_json(config)

    def take(ours: Any, before: Any, theirs: Any) -> Any:
        if isinstance(ours, dict):
            return {key: take(ours[key], before[key], theirs[key]) for key in ours}
        return theirs if theirs != before else ours

    for fix in together:
        merged = take(merged, base, to_json(fix.config))
    return from_json(type(config), merged)


def _tried(
    workload: Workload, config: Any, fix: Fix, row: dict[str, Any], before: float, losses: list[float]
) -> tuple[bool, float]:
    """Measure a fix into its row, the step without it before and after: a machine that drifts must not be credited.

    Whether the numbers stayed, and the step without the fix as it is now.
    """
    try:
        step, ours = _measured(workload, fix.config)
    except Exception as error:  # A fix that does not run here is a finding, not the end of the profile.
        row |= {"status": "not applicable", "note": f"{type(error).__name__}: {error}".splitlines()[0]}
        return False, before
    after, _ = _measured(workload, config)
    note, difference = None, _difference(losses, ours)
    same = difference is not None and difference <= fix.tolerance
    if difference is None:
        note = "a loss is not a finite number"
    elif not same:
        note = f"a loss differs by {difference:.2g}, more than the {fix.tolerance:g} its arithmetic excuses"
    elif max(before, after) > DRIFT * min(before, after):
        note = f"unsure: without it a step took {before:.3g} ms before and {after:.3g} ms after"
    row |= {
        "measured_ms": step,
        "measured_gain": (before + after) / 2 / step,
        "same_numbers": same,
        "largest_difference": difference,
        "status": "tried" if same else "rejected",
        "note": note,
    }
    return same, after


def _difference(losses: list[float], ours: list[float]) -> float | None:
    """The largest relative one; none where a loss is no number, which compares with nothing."""
    if not all(map(math.isfinite, [*losses, *ours])):
        return None
    return max(abs(a - b) / max(abs(a), 1e-12) for a, b in zip(losses, ours))


def _measured(workload: Workload, config: Any) -> tuple[float, list[float]]:
    """The median step, as training takes it, and the first losses from fresh weights."""
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
    """ms a step, in rounds of several steps: a device that works ahead must be waited for only at a round's end."""
    batches: Iterator[Any] = endless(recipe.order, recipe.epochs + TRIED_LATER)

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


def _trust(found: dict[str, Any], config: Any, cost: dict[str, float] | None, other_work: OtherWork) -> dict[str, Any]:
    missing = [
        f"{name}: {found[name]['missing']}"
        for name in ("operator_table", "kernels", "idle", "transfers", "roofline", "communication", "fixes")
        if isinstance(found[name], dict) and "missing" in found[name]
    ]
    return {
        "steps": found["steps"],
        "warmup": found["warmup"],
        "profiling": {"budget": found["overhead"], "full": cost},
        "seed": config.seed,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": _version("triton"),
            "cuda": torch.version.cuda,
        },
        "clocks": _clocks() if found["device"] != "cpu" else None,
        "other_work": {"share": _share_of_others(other_work)},
        "not_measured": missing,
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _clocks() -> dict[str, float] | None:
    """The GPU's clocks and power as they are now, by nvidia-smi; none where it does not say."""
    query = "--query-gpu=clocks.sm,clocks.mem,power.draw"
    words = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(words, capture_output=True, text=True, timeout=10, check=True).stdout
        sm, memory, power = (float(word) for word in said.splitlines()[0].split(","))
    except (OSError, ValueError, IndexError, subprocess.SubprocessError):
        return None
    return {"sm_mhz": sm, "mem_mhz": memory, "power_w": power}


def stall_command(config_file: Path) -> list[str]:
    """A short process for Nsight Compute to watch: a few steps of a saved config."""
    return [sys.executable, "-m", "recperf.workloads.few_steps", str(config_file)]
