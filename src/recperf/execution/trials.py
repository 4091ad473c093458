"""Tries advice on a program after it was profiled: the unchanged and the changed program run beside each other, each in
a process of its own, and take turns of the same steps. Who has no turn stands still, with all of its processes.

Nothing of the user's changes: `why_not` says which programs run again, and `side_effects` ends one that would write.
"""

from __future__ import annotations

import gc
import json
import math
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, stdev
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

import torch

from ..files import write_atomic
from ..machine import available_bytes
from ..measure.clocks import cuda_used
from ..measure.limits import is_filled
from ..measure.records import Advice
from ..stop import FLAG
from .fixes import difference
from .memory_trials import PART as OF_MEMORY
from .memory_trials import try_memory
from .program_edits import diff, edited
from .script import Program, ScriptOutcome
from .script_experiments import confirm
from .source_rules import EDITS, sources_of
from .trial_processes import Nursery, Side, refused
from .trial_search import FEW, FEWEST, MOST, NARROW, Compared, NotTried, Search, changes_of, interval

LEAST_S, PART = 60.0, 0.5
"""Time for all trials together: this, or this part of what the program ran if that is more."""
RUNS, FEWEST_RUNS = 4, 3
"""Runs of what is printed first, and those that tell how runs differ."""
AT_ONCE = 3
"""Programs that the first trial runs beside each other."""
TURN_NS = 0.25e9
WARM_UPS, WARM_PART = 8, 3
"""Steps before the first turn: this many, or this part of a short program's."""
LONGER = 3
"""A changed program that takes this many times as long is ended."""
PATIENCE_S = 2.0
STARTING_S = 60.0
"""Time that starting a process may take beside what the program needs."""


def try_advice(
    program: Program,
    outcome: ScriptOutcome,
    say: Callable[[str], None],
    *,
    seconds: float | None = None,
    anywhere: bool = False,
    patch: Path | None = None,
) -> None:
    """Measure every change that can be made from outside, and write the gains into the advice of the report.

    All together take no more than `seconds`, by default the larger of a minute and half of what the program ran. With
    `anywhere` the default is no limit, and programs that write files run again too. What gains is written to `patch`,
    and the program with it is measured as well.
    """
    assert outcome.report is not None
    advice = outcome.report.advice or []
    of_memory = [one for memory in outcome.report.memory for one in memory.advice]
    if problem := why_not(outcome, anywhere=anywhere):
        for one in [*advice, *of_memory]:
            one.status, one.note = "not tried", problem
        return
    if seconds is None:
        seconds = math.inf if anywhere else max(LEAST_S, PART * outcome.wall_s)
    temporary = TemporaryDirectory(prefix="recperf-trial-", ignore_cleanup_errors=True)
    with temporary as folder, FLAG.before_exit(temporary.cleanup):
        trials = Trials(program, outcome, Path(folder), seconds, anywhere, kept=1 + (patch is not None))
        with suppress(KeyboardInterrupt), trials:
            if seconds > 0 and any(one.settings for one in [*advice, *of_memory]):
                # Its start is not the time of a trial.
                trials.nursery({})
            confirm(trials, outcome, say)
            # Where there is enough memory, its trials take what those of time leave.
            trials.seconds = seconds * (1 - OF_MEMORY * any(map(is_filled, outcome.report.memory)))
            trials.try_each(advice, say)
            trials.seconds = seconds
            try_memory(trials, trials.runs_within, outcome, say)
            if patch is not None:
                trials.write_patch(patch, advice, say)
    for one in [*advice, *of_memory]:
        if one.status == "suggested":
            one.status, one.note = "not tried", "stopped by Ctrl-C"


def why_not(outcome: ScriptOutcome, *, anywhere: bool) -> str | None:
    """Why a program does not run again; None where it may."""
    if "SLURM_JOB_ID" in os.environ or "TORCHELASTIC_RUN_ID" in os.environ:
        return "no program runs again under SLURM or torchrun"
    if outcome.code:
        return f"the program ended with exit code {outcome.code}"
    if outcome.read_input:
        return "the program read its standard input"
    if outcome.effects and not anywhere:
        return refused(outcome.effects[0])
    if AT_ONCE * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) > available_bytes():
        return f"the memory does not hold {AT_ONCE} more of the program"
    if cuda_used():
        gc.collect()
        torch.cuda.empty_cache()
        if AT_ONCE * torch.cuda.max_memory_reserved() > torch.cuda.mem_get_info()[0]:
            return f"the memory of the device does not hold {AT_ONCE} more of the program"
    return None


@dataclass
class Run:
    """The changed program beside the unchanged one, once."""

    gains: list[float]
    """The logarithms of those of its turns."""
    step_ms: float
    differs: float | None
    peak: tuple[int, int] = (0, 0)
    """Of the unchanged and the changed program, in bytes."""


class Trials(Search):
    """The trials of a program: it runs again, in processes."""

    runs = RUNS

    def __init__(
        self,
        program: Program,
        outcome: ScriptOutcome,
        folder: Path,
        seconds: float,
        anywhere: bool,
        *,
        kept: int = 1,
    ) -> None:
        facts = outcome.report.program_facts if outcome.report else None
        batch_size = facts.loader.batch_size if facts and facts.loader else None
        super().__init__(seconds, workers=outcome.workers, batch_size=batch_size, kept=kept)
        self.program, self.outcome, self.folder, self.anywhere = program, outcome, folder, anywhere
        self._compared: dict[str, Compared] = {}
        """What was measured, by the settings."""
        self.nurseries: dict[tuple[tuple[str, str], ...], Nursery] = {}

    def write_patch(self, patch: Path, advice: list[Advice], say: Callable[[str], None]) -> None:
        """Write what gains most, as far as it is an edit of the program's own files, and measure the edited program."""
        best = next((one for one in advice if one.status == "tried" and "batch_size" not in one.settings), None)
        settings = best.settings if best else {}
        sources: dict[str, str] = {}
        diffs, made = [], {name for name in settings if name.startswith(EDITS)}
        with_rules = sources_of(settings)
        for file in self.outcome.files:
            with suppress(OSError, UnicodeDecodeError), file.open(encoding="utf-8", newline="") as stream:
                before = stream.read()
                after, names = edited(with_rules.get(str(file), before), settings)
                if after != before:
                    sources[str(file)] = after
                    diffs.append(diff(file, before, after))
                    made |= names
        if missing := ", ".join(name for name in settings if name not in made):
            say(f"not in the patch, because the program's files have no place for it: {missing}")
        if best is None or not diffs:
            say("there is no patch: no change gains that is an edit of the program's files")
            return
        write_atomic(patch, "".join(diffs).encode())
        settings = {name: settings[name] for name in made}
        whole = Advice("patch", f"As an edit: {best.change}.", f"git apply {patch}", settings=settings)
        whole.changes = changes_of(best)
        if all(name.startswith(EDITS) for name in best.settings):
            # It is what was measured.
            for name in ("measured_gain", "measured_range", "measured_ms", "status", "note", "same_losses"):
                setattr(whole, name, getattr(best, name))
        else:
            self.try_one(whole, say, {"sources": sources}, most=MOST)
        advice.append(whole)

    def compare(self, settings: dict[str, Any], deadline: float, most: int = MOST) -> Compared:
        """Let the unchanged and the changed program take turns; for `MOST` turns in several runs, since memory, caches
        and the order of cores differ from run to run, and what is printed must hold in the next one."""
        key = json.dumps(settings, sort_keys=True)
        if most <= FEW and key in self._compared:
            return self._compared[key]
        began = monotonic()
        turns = most if most <= FEW else most // self.runs
        runs = [self._run(settings, deadline, turns)]
        with suppress(NotTried):
            while most > FEW and len(runs) < self.runs and monotonic() + (monotonic() - began) / len(runs) < deadline:
                runs.append(self._run(settings, deadline, turns))
        self._compared[key] = compared = self._over(runs)
        return compared

    def _over(self, runs: list[Run]) -> Compared:
        means = [fmean(run.gains) for run in runs]
        enough = len(means) >= FEWEST_RUNS
        ends = interval(means if enough else [gain for run in runs for gain in run.gains])
        return Compared(
            gain=math.exp(fmean(means)), range=[math.exp(end) for end in ends],
            step_ms=median(run.step_ms for run in runs), differs=runs[0].differs,
            between=stdev(means) if enough else None,
            peak=[round(median(peaks)) for peaks in zip(*(run.peak for run in runs))] if runs[0].peak[0] else None,
        )  # fmt: skip

    def _run(self, settings: dict[str, Any], deadline: float, most: int) -> Run:
        """Both programs once. The first trial has a second unchanged one, whose losses show whether those of two runs
        can be compared."""
        steps = self.outcome.steps
        warm_ups = max(2, min(WARM_UPS, steps // WARM_PART))
        with self._sides([{}, settings] + [{}] * (self.repeats is None), warm_ups) as sides:
            plain, altered, *second = sides
            began = monotonic()
            first = plain.answer(min(deadline, began + LONGER * self.outcome.wall_s + STARTING_S))
            started = max(monotonic() - began, self.outcome.wall_s)
            other = altered.answer(min(deadline, began + LONGER * started + PATIENCE_S))
            if second:
                self._compare_repeats(first["losses"], second[0], min(deadline, monotonic() + LONGER * started))
            # Batches that a loader has ready at the beginning of a turn must not make up most of it.
            ready = 2 * max(first["buffered"], other["buffered"])
            each = max(ready, round(TURN_NS / max(1, min(first["ns"], other["ns"]))))
            ends = max(steps, first["steps"]) / self.larger(settings)
            each = max(1, min(each, int(ends - warm_ups) // FEWEST))
            turns = _take_turns(plain, altered, each, deadline, most)
            return Run(
                gains=[math.log(before / after) for before, after in turns],
                step_ms=median(after for _, after in turns) / each / 1e6,
                differs=_differs(first["losses"], other["losses"]) if other["losses"] else None,
                peak=(first["peak"], other["peak"]),
            )

    def _compare_repeats(self, losses: list[float], second: Side, deadline: float) -> None:
        try:
            again = second.answer(deadline)["losses"]
            differs = difference(losses, again)
        except NotTried:
            differs = None
        self.repeats = math.nan if differs is None else differs
        second.end()

    def runs_within(self, settings: dict[str, Any], room: int | None, seconds: float) -> None:
        """Let the changed program take two steps, alone; raises NotTried where it does not, also for lack of memory:
        of the device, or of `room` bytes of the host."""
        with self._sides([settings], 2, room) as (side,):
            side.answer(monotonic() + seconds)

    def nursery(self, environment: dict[str, str]) -> Nursery:
        """The process whose children have this environment, which an allocator reads once."""
        key = tuple(environment.items())
        nursery = self.nurseries.get(key)
        if nursery is None:
            nursery = Nursery(environment, forks=not cuda_used())
            self.callback(nursery.end)
            self.enter_context(FLAG.before_exit(nursery.end))
            if not cuda_used():
                self.nurseries[key] = nursery
        return nursery

    @contextmanager
    def _sides(self, settings: list[dict[str, Any]], warm_ups: int, room: int | None = None) -> Iterator[list[Side]]:
        with ExitStack() as stack:
            sides = []
            for each in settings:
                nursery = self.nursery(each.get("keep_memory", {}))
                changed = {"sources": sources_of(each), **each}
                sides.append(Side(nursery, self.program, changed, warm_ups, self.folder, self.anywhere, room))
                stack.callback(sides[-1].end)
                # A signal that ends this process at once.
                stack.enter_context(FLAG.before_exit(sides[-1].end))
            yield sides


def _differs(losses: list[float], changed: list[float]) -> float | None:
    """The largest relative difference; infinite where only the changed program's losses are not finite."""
    broken = all(map(math.isfinite, losses)) and not all(map(math.isfinite, changed))
    return math.inf if broken else difference(losses, changed)


def _take_turns(plain: Side, altered: Side, each: int, deadline: float, most: int) -> list[tuple[int, int]]:
    """ns of turns of both sides, until their ratio is known or the program ends."""
    turns: list[tuple[int, int]] = []
    while len(turns) < most:
        try:
            # Who was second is first in the next turn.
            if len(turns) % 2 == 0:
                before = plain.turn(each, deadline)
                after = altered.turn(each, min(deadline, monotonic() + LONGER * before / 1e9 + PATIENCE_S))
            else:
                after = altered.turn(each, min(deadline, monotonic() + LONGER * turns[-1][0] / 1e9 + PATIENCE_S))
                before = plain.turn(each, deadline)
        except NotTried:
            if len(turns) < FEWEST:
                raise
            break
        turns.append((before, after))
        if len(turns) >= FEWEST:
            low, high = interval([math.log(before / after) for before, after in turns])
            if high - low < math.log(NARROW):
                break
    return turns
