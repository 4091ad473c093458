"""Profiles a workload: a window of measured steps with tables from their trace, and fixes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from ..distributed.ranks import current
from ..distributed.shares import own_part
from ..measure import fixes, sections
from ..measure.experiments import SECONDS
from ..measure.measuring import STEPS
from ..measure.observing import Observer
from ..measure.profile import endless
from ..measure.trace.analyse import analyse
from ..runs.record import packages
from ..train.device import applied
from .fixes import try_fixes
from .measuring import measure_window, require_threads
from .workload import Trial, Workload

TABLES_LATER = 3000
"""Epochs after training whose batches nothing else in a profile uses."""
FROM_TRACE = ("kernels", "idle", "transfers")
SINGLE_PROCESS = "fixes are predicted and tried in a single process only"


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """What to measure beside the step budget."""

    try_fixes: bool = False
    trace: Path | None = None
    """Where to save the trace of this rank."""
    steps: int = STEPS
    confirm: float = SECONDS
    """Time limit in seconds of the experiments that confirm the verdict; 0: none."""
    run: str = ""
    """Identifies the traces of the ranks of this profile."""


def profile(
    workload: Workload, config: Any, peaks: dict[str, Any] | None, options: ProfileOptions, say: Callable[[str], None]
) -> dict[str, Any]:
    """Measure everything but stalls, which need a separate process.

    All ranks measure and record the same steps. Figures about a single rank are those of the slowest one.
    """
    world = current()
    prepared = workload.prepare(config)
    with applied(prepared.settings):
        trial = prepared.trial(config.seed)
        if peaks is not None:
            require_threads(peaks, say)
        say(f"measuring the parts of up to {options.steps} steps")
        result, _, observer = measure_window(
            prepared, trial, peaks, steps=options.steps, confirm=options.confirm, run=options.run
        )
        slowest = result.get("communication", {}).get("slowest", 0)
        traced, parts, cost = world.broadcast(_traced(result, observer), slowest)
        trace = world.broadcast(_save_trace(observer, options.trace), slowest)
        result |= traced
        touched = world.broadcast(_touched(trial), slowest)
        tables = trial.tables()
    result |= {
        "kind": "profile",
        "workload": workload.name,
        "preset": None,
        "switches": dict(prepared.settings.reasons),
        "roofline": sections.roofline(result, peaks),
        "embeddings": sections.embeddings(result, peaks, tables, touched),
        "communication": result.get("communication") or {"missing": "one rank"},
        "trace": trace,
        "stalls": None,
    }
    del trial
    if world.choose(True, several=False):
        doubt = fixes.doubt(result, result["other_work"])
        ranked = fixes.suggest(prepared.fixes(), result, parts, peaks, doubt)
        if options.try_fixes and ranked and peaks is not None:
            try_fixes(workload, config, result, ranked, peaks, parts, doubt, say)
    else:
        result["advice"] = {"missing": SINGLE_PROCESS}
    result["trust"] = _trust(result, config, cost)
    return result


def _traced(
    result: dict[str, Any], observer: Observer | None
) -> tuple[dict[str, Any], list[dict[str, Any]] | None, dict[str, float] | None]:
    """Tables from the trace of the observed steps, its parts, and what tracing cost."""
    if observer is None or observer.trace is None or not observer.traced:
        return {name: {"missing": "no step was traced"} for name in FROM_TRACE}, None, None
    analysed = analyse(observer.trace)
    plain, traced = result["overhead"]["plain_ms"], analysed["window"]["wall_ms"]
    cost = {"plain_ms": plain, "clocked_ms": traced, "share": traced / plain - 1}
    return {name: analysed[name] for name in FROM_TRACE}, analysed["parts"], cost


def _save_trace(observer: Observer | None, path: Path | None) -> dict[str, Any] | None:
    if path is None or observer is None or observer.recording is None:
        return None
    return {"file": path.name, "bytes": observer.recording.save(path), "steps": len(observer.traced)}


def _touched(trial: Trial) -> list[torch.Tensor]:
    """The rows that four batches look up."""
    batches = endless(trial.recipe.order, trial.recipe.epochs + TABLES_LATER)
    return [trial.rows_of(own_part(batch)).cpu() for batch in islice(batches, 4)]


def _trust(result: dict[str, Any], config: Any, cost: dict[str, float] | None) -> dict[str, Any]:
    missing = [
        f"{name}: {result[name]['missing']}"
        for name in (*FROM_TRACE, "roofline", "communication", "advice")
        if isinstance(result[name], dict) and "missing" in result[name]
    ]
    return {
        "steps": result["steps"],
        "warmup": result["warmup"],
        "profiling": {"budget": result["overhead"], "full": cost},
        "seed": config.seed,
        "versions": {**packages(), "cuda": torch.version.cuda},
        "clocks": _clocks() if result["device"] != "cpu" else None,
        "other_work": {"share": result["other_work"]},
        "not_measured": missing,
    }


def _clocks() -> dict[str, float] | None:
    """Current clocks and power of the GPU from nvidia-smi; None if it does not report them."""
    query = "--query-gpu=clocks.sm,clocks.mem,power.draw"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
        sm, memory, power = (float(field) for field in output.splitlines()[0].split(","))
    except (OSError, ValueError, IndexError, subprocess.SubprocessError):
        return None
    return {"sm_mhz": sm, "mem_mhz": memory, "power_w": power}


def stall_command(config_file: Path) -> list[str]:
    """The command that Nsight Compute profiles: a few steps of a saved config."""
    return [sys.executable, "-m", "recperf.workloads.few_steps", str(config_file)]
