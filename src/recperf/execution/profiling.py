"""Profiles a workload: a window of measured steps, some steps under torch.profiler, and fixes."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from ..distributed.ranks import current
from ..errors import DataError
from ..folders import temporary_folder
from ..measure import fixes, sections
from ..measure.experiments import SECONDS
from ..measure.profile import endless
from ..measure.trace.analyse import analyse
from ..measure.trace.cut import write_cut
from ..measure.trace.read import read
from ..measure.trace.record import record
from ..train.device import applied
from ..train.loop import take_step
from .fixes import suggest, try_fixes
from .measuring import STEPS, measure_pair, measure_window, require_threads
from .workload import Prepared, Trial, Workload

TRACED = 8
"""Steps under torch.profiler: enough for means, few enough for a trace a browser opens."""
TRACED_LATER, TABLES_LATER = 2000, 3000
"""Epochs after training whose batches nothing else in a profile uses."""
BUDGET_MODE = "not recorded in budget mode; --mode full records it"
SINGLE_PROCESS = "fixes are predicted and tried in a single process only"


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """What to measure beside the step budget."""

    full: bool = True
    try_fixes: bool = False
    trace: Path | None = None
    """Where to save the trace of this rank."""
    trace_mb: float = 50.0
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
    prepared = world.leader_first(lambda: workload.prepare(config))
    world.require_same_data(prepared.data["digest"])
    with applied(prepared.settings):
        trial = prepared.trial(config.seed)
        if peaks is not None:
            require_threads(peaks, say)
        pair = measure_pair(prepared, trial, peaks) if options.confirm else None
        say(f"measuring the parts of up to {options.steps} steps")
        result = measure_window(
            prepared, trial, trial.recipe, peaks, steps=options.steps, pair=pair, confirm=options.confirm
        )
        slowest = result.get("communication", {}).get("slowest", 0)
        missing = {"missing": BUDGET_MODE}
        traced: dict[str, Any] = dict.fromkeys(("operator_table", "kernels", "idle", "transfers"), missing)
        parts, cost, trace = None, None, None
        if options.full:
            say(f"recording {TRACED} steps with torch.profiler")
            traced, parts, cost, trace = world.broadcast(_traced(prepared, trial, result, options, say), slowest)
        result |= traced
        touched = world.broadcast(_touched(trial), slowest)
        tables = trial.tables()
    result |= {
        "kind": "profile",
        "workload": workload.name,
        "preset": None,
        "mode": "full" if options.full else "budget",
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
        ranked = suggest(prepared.fixes(), result, parts, peaks, doubt)
        if options.try_fixes and ranked and peaks is not None:
            try_fixes(workload, config, result, ranked, peaks, parts, doubt, say)
    else:
        result["fixes"] = {"missing": SINGLE_PROCESS}
    result["trust"] = _trust(result, config, cost)
    return result


def _traced(
    prepared: Prepared, trial: Trial, result: dict[str, Any], options: ProfileOptions, say: Callable[[str], None]
) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, float], dict[str, Any] | None]:
    recipe = trial.recipe
    batches = endless(recipe.order, recipe.epochs + TRACED_LATER)
    cuda = prepared.settings.device.type == "cuda"
    with temporary_folder() as folder:
        path = folder / "trace.json"
        record(
            lambda _: take_step(recipe, batches, recipe.steps - 1), TRACED, path, cuda,
            about=current().trace_facts(options.run), meet=current().trace_barrier(),
        )  # fmt: skip
        analysed = analyse(read(path))
        saved = _save_trace(path, options, say)
    plain, traced = result["overhead"]["plain_ms"], analysed["window"]["wall_ms"]
    cost = {"plain_ms": plain, "clocked_ms": traced, "share": traced / plain - 1}
    tables = {name: analysed[name] for name in ("operator_table", "kernels", "idle", "transfers")}
    return tables, analysed["parts"], cost, saved


def _save_trace(path: Path, options: ProfileOptions, say: Callable[[str], None]) -> dict[str, Any] | None:
    """Save the trace, cut to size. A trace whose single step is too large is reported and not saved."""
    if options.trace is None:
        return None
    try:
        return write_cut(path, options.trace, options.trace_mb)
    except DataError as error:
        say(f"no trace is saved: {error.what}")
        return None


def _touched(trial: Trial) -> list[torch.Tensor]:
    """The rows that four batches look up."""
    batches = endless(trial.recipe.order, trial.recipe.epochs + TABLES_LATER)
    return [trial.rows_of(batch).cpu() for batch in islice(batches, 4)]


def _trust(result: dict[str, Any], config: Any, cost: dict[str, float] | None) -> dict[str, Any]:
    missing = [
        f"{name}: {result[name]['missing']}"
        for name in ("operator_table", "kernels", "idle", "transfers", "roofline", "communication", "fixes")
        if isinstance(result[name], dict) and "missing" in result[name]
    ]
    return {
        "steps": result["steps"],
        "warmup": result["warmup"],
        "profiling": {"budget": result["overhead"], "full": cost},
        "seed": config.seed,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": _version("triton"),
            "cuda": torch.version.cuda,
        },
        "clocks": _clocks() if result["device"] != "cpu" else None,
        "other_work": {"share": result["other_work"]},
        "not_measured": missing,
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


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
