"""Trials of memory: which change of a program frees most at the peak of a step, and the largest batch that fits.

They are trials of time as well: a change runs beside the unchanged program, and both say what they had at their peak.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any

from ..machine import available_bytes
from ..measure.clocks import cuda_used
from ..measure.limits import freed
from ..measure.records import StepMemory
from ..runs.step_report import Report
from .memory_advice import scarce
from .script import ScriptOutcome
from .trial_search import FEWEST, NotTried, Search

RunsWithin = Callable[[dict[str, Any], int | None, float], None]
"""Lets a changed program take two steps in so many bytes of the host, and seconds; raises NotTried."""
PART = 0.25
"""Of the time for trials, what is kept for those of memory alone where it is scarce."""
LEFT = 0.1
"""Of the free memory of the host, what a trial of a batch leaves."""
CLOSE = 1.25
"""Ratio of a batch that does not fit and one that does, from which no further one is tried."""
MOST = 100
"""Times the batch, from which memory does not limit it."""
STEPS = 2
"""Of a trial of a batch."""
NO_MEMORY = ("allocate memory", "out of memory", "MemoryError")
"""What programs say that have too little."""


def try_memory(trials: Search, runs_within: RunsWithin, outcome: ScriptOutcome, say: Callable[[str], None]) -> None:
    """Measure what frees memory, and the largest batch that fits."""
    report = outcome.report
    memory = scarce(report) if report else None
    if report is None or memory is None:
        return
    for one in memory.advice:
        trials.try_one(one, say, most=FEWEST)
    named = {one.name for one in memory.advice}
    tried = (one for one in report.advice if one.measured_peak and one.name not in named)
    rows = [*(one for one in tried if "batch_size" not in one.settings and freed(one) > 0), *memory.advice]
    memory.advice = sorted(rows, key=lambda one: -freed(one))
    _try_batches(trials, runs_within, report, memory, say)


def _try_batches(
    trials: Search, runs_within: RunsWithin, report: Report, memory: StepMemory, say: Callable[[str], None]
) -> None:
    """Run steps with the largest batch that should fit, and where it does not, with smaller ones."""
    now, predicted = memory.batch, memory.largest_batch
    if not now or not predicted or not now < predicted <= MOST * now:
        return
    facts = report.program_facts
    loader = facts.loader if facts else None
    if loader is None or loader.batch_size != now:
        memory.batch_note = "not tried: the batch is not that of a DataLoader"
        return
    fits, too_large = now, 0
    size = min(int((1 - LEFT) * predicted), loader.samples or predicted)
    while size > fits and (not too_large or too_large > CLOSE * fits):
        left = trials.began + trials.seconds - monotonic()
        if left < STEPS * report.step_ms.p50 / 1e3 * size / now:
            memory.batch_note = f"the time for trials was too short for {size:,}"
            break
        say(f"trying a batch of {size:,}")
        room = None if cuda_used() else int((1 - LEFT) * available_bytes())
        try:
            runs_within({"batch_size": size}, room, left)
        except NotTried as error:
            if not any(text in str(error) for text in NO_MEMORY):
                memory.batch_note = f"{size:,}: {error}"
                break
            too_large = size
        else:
            fits = size
            if not too_large:
                break
        size = (fits + too_large) // 2
    memory.fitting_batch = fits if fits > now else None
    if too_large:
        memory.batch_note = f"{too_large:,} does not"
