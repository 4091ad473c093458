"""Tries advice on a program after it was profiled: the unchanged and the changed program run beside each other, each in
a process of its own, and take turns of the same steps. Who has no turn stands still, with all of its processes.

Nothing of the user's changes: `why_not` says which programs run again, and `side_effects` ends one that would write.
"""

from __future__ import annotations

import gc
import math
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median, stdev
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

import torch
from msgspec.structs import replace

from ..files import write_atomic
from ..machine import available_bytes, usable_cores
from ..measure.clocks import cuda_used
from ..measure.records import Advice
from ..stop import FLAG
from .fixes import difference
from .program_changes import RESULTS, SEARCHED, changes_text
from .program_edits import diff, edited
from .script import Program, ScriptOutcome
from .source_rules import EDITS, sources_of
from .trial_processes import NotTried, Nursery, Side, refused

LEAST_S, PART = 60.0, 0.5
"""Time for all trials together: this, or this part of what the program ran if that is more."""
FEWEST, FEW, MOST = 4, 8, 24
"""Turns of either side: at least, at most where many changes are compared, and at most where one is measured."""
AT_ONCE = 3
"""Programs that the first trial runs beside each other."""
TURN_NS = 0.25e9
NARROW = 1.03
"""Ratio of the ends of an interval from which further turns would tell little."""
WARM_UPS, WARM_PART = 8, 3
"""Steps before the first turn: this many, or this part of a short program's."""
STUDENT = (1.960, 2.372, 2.823, 2.556)
"""The 97.5 % quantile of Student's t by powers of 1 / degrees of freedom (Cornish and Fisher), from three on."""
ROUNDING = 1e-4
"""Relative difference of a loss that another order of additions explains."""
LONGER = 3
"""A changed program that takes this many times as long is ended."""
PATIENCE_S = 2.0
STARTING_S = 60.0
"""Time that starting a process may take beside what the program needs."""
ALL = "all together"


@dataclass
class Compared:
    """A change measured in turns with the unchanged program."""

    gain: float
    range: list[float]
    step_ms: float
    losses: list[float]
    unchanged_losses: list[float]


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
    `anywhere` time is not limited, and programs that write files run again too. What gains is written to `patch`, and
    the program with it is measured as well.
    """
    assert outcome.report is not None
    advice = outcome.report.advice or []
    if problem := why_not(outcome, anywhere=anywhere):
        for one in advice:
            one.status, one.note = "not tried", problem
        return
    if seconds is None:
        seconds = max(LEAST_S, PART * outcome.wall_s)
    temporary = TemporaryDirectory(prefix="recperf-trial-", ignore_cleanup_errors=True)
    with temporary as folder, FLAG.before_exit(temporary.cleanup):
        seconds = math.inf if anywhere else seconds
        trials = Trials(program, outcome, Path(folder), seconds, anywhere, kept=1 + (patch is not None))
        with suppress(KeyboardInterrupt), trials:
            if seconds > 0 and any(one.settings for one in advice):
                # Its start is not the time of a trial.
                trials.nursery({})
            trials.try_each(advice, say)
            if patch is not None:
                trials.write_patch(patch, advice, say)
    for one in advice:
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
class Trials(ExitStack):
    """The trials of a program, inside its `with` block."""

    program: Program
    outcome: ScriptOutcome
    folder: Path
    seconds: float
    anywhere: bool
    repeats: float | None = None
    """The largest difference of a loss between two unchanged runs; NaN where they cannot be compared."""
    kept: int = 1
    """Trials at the end for which time is kept."""
    latest: float = 0.0
    """Time that the latest trial took."""
    began: float = field(default_factory=monotonic)
    nurseries: dict[tuple[tuple[str, str], ...], Nursery] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()

    def try_each(self, advice: list[Advice], say: Callable[[str], None]) -> None:
        """Measure each change, then at more length the best of them: those together that gained, or the only one. The
        best of many was also lucky, so only what was measured in the end comes first."""
        for one in advice:
            if not one.settings:
                reasons = filter(None, ("only its author can make this change", one.note))
                one.status, one.note = "not tried", ". ".join(reasons)
            elif one.settings.keys() & SEARCHED.keys():
                self.search(one, say)
            else:
                self.try_one(one, say)
        advice.sort(key=_order)
        gaining = [one for one in advice if one.status == "tried"]
        if len(gaining) > 1:
            names = ", ".join(one.name for one in gaining)
            settings = {name: value for one in reversed(gaining) for name, value in one.settings.items()}
            whole = Advice(ALL, f"{names} together.", "; ".join(one.change for one in gaining), settings=settings)
            whole.changes = "; ".join(dict.fromkeys(filter(None, map(_changes, gaining))))
            if self.try_one(whole, say, most=MOST):
                gaining.insert(0, whole)
            advice.append(whole)
        if gaining and (gaining[0].name != ALL or _order(gaining[1]) < _order(gaining[0])):
            self.try_one(gaining[gaining[0].name == ALL], say, most=MOST)
        advice.sort(key=_order)

    def search(self, one: Advice, say: Callable[[str], None]) -> None:
        """Measure other numbers than the advised one, upwards or else downwards, as long as it gets better; for workers
        also one thread. The advice becomes the best of them."""
        tried: list[Advice] = []

        def measure(settings: dict[str, Any]) -> Advice:
            other = replace(one, settings=settings, change=changes_text(settings))
            self.try_one(other, say)
            tried.extend([other] if other.measured_gain else [])
            return other

        best = measure(one.settings)
        name = next(name for name in SEARCHED if name in one.settings)
        now = self.outcome.workers if name == "workers" else torch.get_num_threads()
        numbers = [number for number in SEARCHED[name](usable_cores()) if number != now]
        for step in (1, -1) if tried else ():
            number = one.settings[name]
            while following := [other for other in numbers if (other - number) * step > 0]:
                number = min(following, key=lambda other: abs(other - number))
                other = measure({**one.settings, name: number})
                if _gain(other) <= _gain(best):
                    break
                best = other
            if best is not tried[0]:
                break
        if tried and name == "workers" and now and all(other.settings[name] for other in tried):
            # Without workers nothing is handed over, which one of them still does.
            best = max(best, measure({**one.settings, name: 0}), key=_gain)
        has_threads = "threads" in best.settings or torch.get_num_threads() == 1 or cuda_used()
        if tried and name == "workers" and not has_threads:
            best = max(best, measure({**best.settings, "threads": 1}), key=_gain)
        for name in one.__struct_fields__:
            setattr(one, name, getattr(best, name))
        if others := [other for other in tried if other is not best]:
            labels = (", ".join(f"{name} {value}" for name, value in other.settings.items()) for other in others)
            gains = (f"{label}: {other.measured_gain:.2f}x" for label, other in zip(labels, others))
            one.seen += f" Measured beside it: {'; '.join(gains)}."

    def write_patch(self, patch: Path, advice: list[Advice], say: Callable[[str], None]) -> None:
        """Write what gains most, as far as it is an edit of the program's own files, and measure the edited program."""
        best = next((one for one in advice if one.status == "tried"), None)
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
        self.try_one(whole, say, {"sources": sources}, most=MOST)
        advice.append(whole)

    def try_one(
        self, one: Advice, say: Callable[[str], None], settings: dict[str, Any] | None = None, *, most: int = FEW
    ) -> bool:
        """Measure a change into its advice and return whether it gains; `settings` make it in another way."""
        began = monotonic()
        left = self.began + self.seconds - began - (self.kept * self.latest if most == FEW else 0.0)
        # A trial that would not end is not begun.
        if left <= (self.latest if most == FEW else 0.0):
            problem = f"the time for trials, {self.seconds:.0f} s, was over"
        else:
            again = one.measured_gain is not None
            say(f"trying {one.change}" + (" at more length" if again else ""))
            try:
                result = self.compare(settings or one.settings, began + left, most)
            except NotTried as error:
                problem = str(error)
            else:
                self.latest = monotonic() - began
                self._write(one, result)
                return one.status == "tried"
        if one.measured_gain is None:
            one.status, one.note = "not tried", problem
        return False

    def _write(self, one: Advice, result: Compared) -> None:
        one.measured_gain, one.measured_range, one.measured_ms = result.gain, result.range, result.step_ms
        changes = _changes(one)
        differs = difference(result.unchanged_losses, result.losses) if result.losses else None
        if differs is None:
            losses = "no losses were seen to compare"
        elif self.repeats is None or not self.repeats <= ROUNDING:
            losses = "losses cannot be compared, two runs of the unchanged program differ"
        else:
            one.largest_difference, one.same_losses = differs, differs <= ROUNDING
            kind = "equal" if not differs else "within tolerance" if one.same_losses else "different"
            losses = f"losses are {kind}" + (f" ({differs:.1g})" if differs else "")
        one.note = losses + (f"; it changes {changes}" if changes else "")
        rejected = one.same_losses is False and not changes
        one.status = "rejected" if rejected else "tried" if result.range[0] > 1 else "no gain"

    def compare(self, settings: dict[str, Any], deadline: float, most: int = MOST) -> Compared:
        """Let the unchanged and the changed program take turns. The first trial has a second unchanged one, whose
        losses show whether those of two runs can be compared."""
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
            each = max(1, min(each, (max(steps, first["steps"]) - warm_ups) // FEWEST))
            turns = _take_turns(plain, altered, each, deadline, most)
            gains = [math.log(before / after) for before, after in turns]
            return Compared(
                gain=math.exp(fmean(gains)),
                range=[math.exp(end) for end in interval(gains)],
                step_ms=median(after for _, after in turns) / each / 1e6,
                losses=other["losses"],
                unchanged_losses=first["losses"],
            )

    def _compare_repeats(self, losses: list[float], second: Side, deadline: float) -> None:
        try:
            again = second.answer(deadline)["losses"]
            differs = difference(losses, again)
        except NotTried:
            differs = None
        self.repeats = math.nan if differs is None else differs
        second.end()

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
    def _sides(self, settings: list[dict[str, Any]], warm_ups: int) -> Iterator[list[Side]]:
        with ExitStack() as stack:
            sides = []
            for each in settings:
                nursery = self.nursery(each.get("keep_memory", {}))
                changed = {"sources": sources_of(each), **each}
                sides.append(Side(nursery, self.program, changed, warm_ups, self.folder, self.anywhere))
                stack.callback(sides[-1].end)
                # A signal that ends this process at once.
                stack.enter_context(FLAG.before_exit(sides[-1].end))
            yield sides


def _gain(one: Advice) -> float:
    return 0.0 if one.status == "rejected" else one.measured_gain or 0.0


def _changes(one: Advice) -> str:
    """What a change does not keep; empty where it keeps the results."""
    return one.changes or next((text for what, text in RESULTS.items() if what in one.change + one.seen), "")


def _order(one: Advice) -> float:
    """What gains most comes first, and all else stays behind it as it is."""
    return -_gain(one) if one.status == "tried" else 0.0


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


def interval(values: list[float]) -> tuple[float, float]:
    """The 95 % interval of the mean of at least four values."""
    quantile = sum(factor / (len(values) - 1) ** power for power, factor in enumerate(STUDENT))
    half = quantile * stdev(values) / math.sqrt(len(values))
    return fmean(values) - half, fmean(values) + half
