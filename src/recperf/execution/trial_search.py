"""Which changes are tried and in what order, and what their measurements say. Who measures them is a subclass: a
program that runs again, or a step whose objects live.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import fmean, stdev
from time import monotonic
from typing import Any

import torch
from msgspec.structs import replace

from ..machine import usable_cores
from ..measure.clocks import cuda_used
from ..measure.records import Advice
from .change_settings import RESULTS, SEARCHED, changes_text, numbers_of

FEWEST, FEW, MOST = 4, 8, 24
"""Turns of either side: at least, at most where many changes are compared, and at most where one is measured."""
NARROW = 1.03
"""Ratio of the ends of an interval from which further turns would tell little."""
STUDENT = (1.960, 2.372, 2.823, 2.556)
"""The 97.5 % quantile of Student's t by powers of 1 / degrees of freedom (Cornish and Fisher), from three on."""
ROUNDING = 1e-4
"""Relative difference of a loss that another order of additions explains."""
KEPT = 0.4
"""Part of the time that what is printed first gets at most."""
ALL = "all together"


class NotTried(Exception):
    """Why a change could not be measured."""


@dataclass
class Compared:
    """A change measured in turns with what is unchanged."""

    gain: float
    range: list[float]
    step_ms: float
    differs: float | None
    """The largest relative difference of losses or weights; None where none were seen."""
    between: float | None = None
    """The standard deviation of the gain's logarithm from run to run; None where there were too few runs."""
    peak: list[int] | None = None
    """Bytes at the peak of what is unchanged and of what is changed; None where they were not measured."""


class Search(ExitStack):
    """Tries advice within a time, inside its `with` block. `kept` trials at the end have time kept for them; `workers`
    and `batch_size` are those of the loader that most steps use."""

    runs = 1
    """Runs of the changed program in what is printed first: those of one machine differ by more than their turns."""
    what = "losses"
    """What shows whether a change keeps the results."""

    def __init__(self, seconds: float, *, workers: int = 0, batch_size: int | None = None, kept: int = 1) -> None:
        super().__init__()
        self.seconds, self.workers, self.batch_size, self.kept = seconds, workers, batch_size, kept
        self.repeats: float | None = None
        """The largest difference of a loss between two unchanged runs; NaN where they cannot be compared."""
        self.latest = 0.0
        """Time that the latest trial of one run took."""
        self.between = 0.0
        """The largest deviation from run to run that was seen."""
        self._repeated: set[int] = set()
        self.began = monotonic()

    def compare(self, settings: dict[str, Any], deadline: float, most: int = MOST) -> Compared:
        """Measure a change; raises NotTried."""
        raise NotImplementedError

    def try_each(self, advice: list[Advice], say: Callable[[str], None]) -> None:
        """Measure each change, then at more length the best of them: those together that gained, or the only one. The
        best of many was also lucky, so only what was measured in the end comes first."""
        for one in advice:
            if not one.settings:
                reasons = filter(None, ("only its author can make this change", one.note))
                one.status, one.note = "not tried", ". ".join(reasons)
            else:
                self.try_one(one, say)
        # What others advise is worth more than another number.
        for one in advice:
            if one.measured_gain and one.settings.keys() & set(SEARCHED):
                self.search(one, say)
        advice.sort(key=_order)
        gaining = [one for one in advice if one.status == "tried" and "batch_size" not in one.settings]
        if len(gaining) > 1:
            names = ", ".join(one.name for one in gaining)
            settings = {name: value for one in reversed(gaining) for name, value in one.settings.items()}
            whole = Advice(ALL, f"{names} together.", "; ".join(one.change for one in gaining), settings=settings)
            whole.changes = "; ".join(dict.fromkeys(filter(None, map(changes_of, gaining))))
            if self.try_one(whole, say, most=MOST):
                gaining.insert(0, whole)
            advice.append(whole)
        if gaining and (gaining[0].name != ALL or _order(gaining[1]) < _order(gaining[0])):
            self.try_one(gaining[gaining[0].name == ALL], say, most=MOST)
        for one in advice:
            self._widen(one)
        advice.sort(key=_order)

    def _widen(self, one: Advice) -> None:
        """Let the interval of what had one run cover what separates runs, as far as others have shown it."""
        if one.measured_range is None or self.runs == 1 or id(one) in self._repeated:
            return
        low, high = (math.log(end) for end in one.measured_range)
        half = math.hypot((high - low) / 2, quantile(self.runs - 1) * self.between)
        one.measured_range = [math.exp((low + high) / 2 - half), math.exp((low + high) / 2 + half)]
        if not self.between:
            one.note = f"{one.note}; measured in one run"
        if one.status == "tried" and one.measured_range[0] <= 1:
            one.status = "no gain"

    def search(self, one: Advice, say: Callable[[str], None]) -> None:
        """Measure other numbers than the advised one, upwards or else downwards, as long as it gets better; for workers
        also one thread. The advice becomes the best of them."""
        tried = [replace(one)]

        def measure(settings: dict[str, Any]) -> Advice:
            other = replace(one, settings=settings, change=changes_text(settings))
            self.try_one(other, say)
            tried.extend([other] if other.measured_gain else [])
            return other

        best = tried[0]
        name = next(name for name in SEARCHED if name in one.settings)
        now = {"workers": self.workers, "batch_size": self.batch_size, "threads": torch.get_num_threads()}[name]
        numbers = [number for number in numbers_of(name, usable_cores(), self.batch_size) if number != now]
        for step in (1, -1):
            number = one.settings[name]
            while following := [other for other in numbers if (other - number) * step > 0]:
                number = min(following, key=lambda other: abs(other - number))
                other = measure({**one.settings, name: number})
                if _gain(other) <= _gain(best):
                    break
                best = other
            if best is not tried[0]:
                break
        if name == "workers" and now and all(other.settings[name] for other in tried):
            # Without workers nothing is handed over, which one of them still does.
            best = max(best, measure({**one.settings, name: 0}), key=_gain)
        has_threads = "threads" in best.settings or torch.get_num_threads() == 1 or cuda_used()
        if name == "workers" and not has_threads:
            best = max(best, measure({**best.settings, "threads": 1}), key=_gain)
        for name in one.__struct_fields__:
            setattr(one, name, getattr(best, name))
        if others := [other for other in tried if other is not best]:
            labels = (", ".join(f"{name} {value}" for name, value in other.settings.items()) for other in others)
            gains = (f"{label}: {other.measured_gain:.2f}x" for label, other in zip(labels, others))
            one.seen += f" Measured beside it: {'; '.join(gains)}."

    def larger(self, settings: dict[str, Any]) -> float:
        """Samples of a step over those of an unchanged one."""
        size = settings.get("batch_size")
        return size / self.batch_size if size and self.batch_size else 1.0

    def try_one(
        self, one: Advice, say: Callable[[str], None], settings: dict[str, Any] | None = None, *, most: int = FEW
    ) -> bool:
        """Measure a change into its advice and return whether it gains; `settings` make it in another way."""
        began = monotonic()
        kept = min(self.kept * self.runs * self.latest, KEPT * self.seconds)
        left = self.began + self.seconds - began - (kept if most == FEW else 0.0)
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
                if most == FEW:
                    self.latest = monotonic() - began
                self._write(one, result)
                return one.status == "tried"
        if one.measured_gain is None:
            one.status, one.note = "not tried", problem
        return False

    def _write(self, one: Advice, result: Compared) -> None:
        factor = self.larger(one.settings)
        one.measured_gain, one.measured_ms = result.gain * factor, result.step_ms
        one.measured_peak = result.peak
        one.measured_range = [end * factor for end in result.range]
        if result.between is not None:
            self.between = max(self.between, result.between)
            self._repeated.add(id(one))
        changes = changes_of(one)
        differs = result.differs
        if differs is None:
            losses = f"no {self.what} were seen to compare"
        elif math.isinf(differs):
            losses = f"{self.what} become NaN or infinite"
        elif self.repeats is None or not self.repeats <= ROUNDING:
            losses = f"{self.what} cannot be compared, two unchanged runs differ"
        else:
            one.largest_difference, one.same_losses = differs, differs <= ROUNDING
            kind = "equal" if not differs else "within tolerance" if one.same_losses else "different"
            losses = f"{self.what} are {kind}" + (f" ({differs:.1g})" if differs else "")
        one.note = losses + (f"; it changes {changes}" if changes else "")
        rejected = (one.same_losses is False and not changes) or differs == math.inf
        one.status = "rejected" if rejected else "tried" if one.measured_range[0] > 1 else "no gain"


def _gain(one: Advice) -> float:
    return 0.0 if one.status == "rejected" else one.measured_gain or 0.0


def changes_of(one: Advice) -> str:
    """What a change does not keep; empty where it keeps the results."""
    return one.changes or next((text for what, text in RESULTS.items() if what in one.change + one.seen), "")


def _order(one: Advice) -> float:
    """What gains most comes first, and all else stays behind it as it is."""
    return -_gain(one) if one.status == "tried" else 0.0


def interval(values: list[float]) -> tuple[float, float]:
    """The 95 % interval of the mean of some values."""
    half = quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return fmean(values) - half, fmean(values) + half


def quantile(degrees: int) -> float:
    """Student's, at 97.5 %."""
    return math.fsum(factor / degrees**power for power, factor in enumerate(STUDENT))
