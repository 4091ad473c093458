"""What limits the quality of a run, from the experiments of its diagnosis. Torch-free."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from .curve import LearningCurve
from .diagnosis import Sum, Tried
from .gains import Gain
from .records import NOT_MEASURED, UNCLEAR, QualityLimit

ALONE = ("leak", "protocol", "dead", "ignored", "unseen", "drift")
"""Limits that no change of a config removes: evidence names them."""
SURELY = 2.0
"""What no change confirms must gain so many times what another seed does."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the experiments of a diagnosis came to."""

    free: QualityLimit | None
    """What the run itself named."""
    tried: Sequence[Tried]
    left_out: Sequence[str]
    below: str
    """The best baseline, where it is better than the run."""
    noise: float
    """How much the leading metric differs between seeds."""
    curve: LearningCurve | None
    sums: Sequence[Sum]
    whole: Gain
    """Of the best config."""
    fresh: Gain
    """The same over seeds that did not choose it."""
    enough_seeds: bool


def verdict(seen: Outcome) -> QualityLimit:
    """The limit that the experiments confirm."""
    free = seen.free
    if free and free.limit in ALONE:
        # The cause explains what changes of a config may gain beside it.
        return _lost(seen, free) if free.limit == "leak" else free
    kept = [one for one in seen.tried if one.kept]
    if free and free.limit == "popularity" and kept and all(one.limit == "complement" for one in kept):
        # Counting gives each user a list; that of the model remains the same for all.
        gains = f"{kept[0].name} ({kept[0].change}) gains {_bounds(kept[0].gain)}"
        return QualityLimit(
            limit=free.limit, confidence=free.confidence, because=[*free.because, gains], doubts=free.doubts,
            second="complement",
        )  # fmt: skip
    full = [one for one in seen.tried if not one.screened]
    doubts = [f"no time for {name}" for name in seen.left_out]
    if kept:
        return _named(seen, kept, doubts)
    if not full:
        because = [*(free.because if free else []), "there was no time for an experiment in full"]
        return QualityLimit(
            limit=free.limit if free else NOT_MEASURED, confidence="low", because=because, doubts=doubts
        )
    if beside := _beside(seen, doubts):
        return beside
    if free and free.limit not in ("noise", UNCLEAR, NOT_MEASURED):
        return _unconfirmed(seen, free, doubts)
    if seen.below:
        because = [f"{seen.below.replace('_', ' ')} is better, and none of {len(full)} changes gained"]
        because += said(seen.curve, seen.sums)
        return QualityLimit(limit=UNCLEAR, confidence="low", because=because, doubts=doubts)
    because = [f"none of {len(full)} changes gained more than another seed does", *said(seen.curve, seen.sums)]
    return QualityLimit(limit="noise", confidence="low" if doubts else "medium", because=because, doubts=doubts)


def _lost(seen: Outcome, free: QualityLimit) -> QualityLimit:
    """A leak, with what the score loses without it."""
    lost = [one for one in seen.tried if one.limit == "leak" and not one.screened]
    sure = any(one.confirmed and one.gain.certain and one.gain.value < 0 for one in lost)
    texts = [f"{one.name} ({one.change}) the score changes by {_bounds(one.gain)}" for one in lost]
    return QualityLimit(
        limit=free.limit, confidence="medium" if sure else free.confidence, because=[*free.because, *texts],
        doubts=free.doubts, second=free.second,
    )  # fmt: skip


def _unconfirmed(seen: Outcome, free: QualityLimit, doubts: list[str]) -> QualityLimit:
    """The limit that the run's evidence names, where no change gained surely: low if its own change gained, or none was
    tried."""
    own = max((one for one in seen.tried if one.limit == free.limit), key=_telling, default=None)
    doubts, rest = [*free.doubts, *doubts], said(seen.curve, seen.sums)
    if own is None:
        found = "no change that would confirm it was tried"
    elif own.chosen > 0 and own.gain.value > 0:
        found = f"{own.name} ({own.change}) gains {_bounds(own.gain)}"
        doubts = ["seeds differ by as much", *doubts]
    else:
        because = [f"{free.because[0]}, but no change of the config gained", *rest]
        return QualityLimit(limit=UNCLEAR, confidence="low", because=because, doubts=doubts, second=free.limit)
    because = [*free.because, found, *rest]
    return QualityLimit(limit=free.limit, confidence="low", because=because, doubts=doubts, second=free.second)


def _telling(one: Tried) -> tuple[bool, float]:
    return not one.screened, one.chosen


def _beside(seen: Outcome, doubts: list[str]) -> QualityLimit | None:
    """More rows or something simple, which are no changes of a config. Their gains are predicted, or were not chosen by
    other rows than those that tell them: the confidence is low."""
    options = [("complement", one.gain) for one in seen.sums if one.simple]
    if seen.curve is not None and seen.curve.last.low > 0:
        options.append(("data", seen.curve.doubled))
    sure = [(limit, one) for limit, one in options if one.low > 0 and one.value > SURELY * seen.noise]
    if not sure:
        return None
    limit, leading = max(sure, key=lambda pair: pair[1].value)
    because = said(seen.curve if limit == "data" else None, seen.sums if limit == "complement" else [])
    return QualityLimit(limit=limit, confidence="low", because=because, gain=leading.value, doubts=doubts)


def _named(seen: Outcome, kept: Sequence[Tried], doubts: list[str]) -> QualityLimit:
    """The limit whose kept changes gain most together."""
    sums = defaultdict[str, float](float)
    for one in kept:
        sums[one.limit] += one.gain.value
    limit, confidence = max(sums, key=lambda name: sums[name]), "low"
    leading = max((one for one in kept if one.limit == limit), key=lambda one: one.gain.value)
    rivals = [
        one for one in seen.tried
        if one.limit != limit and one.on_top == leading.on_top and not one.screened
        and one.gain.value > leading.gain.value - SURELY * math.sqrt(2) * seen.noise
        and one.gain.value > SURELY * seen.noise
    ]  # fmt: skip
    if rivals:
        # What makes a model learn faster also makes up for too few steps, or for steps that are too small.
        doubts = [f"{one.name} alone gains {one.gain.value:+.4f}" for one in rivals] + doubts
    elif leading.gain.certain and leading.gain.value > 0 and leading.confirmed:
        # The seed by which a change was chosen flatters it.
        sure = seen.whole.certain and seen.enough_seeds and seen.fresh.certain and seen.fresh.value > 0
        confidence = "high" if sure else "medium"
    half = (leading.gain.high - leading.gain.low) / 2
    because = [
        f"{leading.name} ({leading.change}) gains {leading.gain.value:+.4f} ± {half:.4f}", *said(seen.curve, seen.sums)
    ]  # fmt: skip
    others = [one for one in kept if one.limit != leading.limit]
    second = max(others, key=lambda one: one.gain.value).limit if others else None
    return QualityLimit(
        limit=limit, confidence=confidence, because=because, gain=sums[limit], doubts=doubts, second=second,
    )  # fmt: skip


def said(curve: LearningCurve | None, sums: Sequence[Sum]) -> list[str]:
    """Sentences about the learning curve and sums."""
    texts = []
    if curve is not None:
        last, doubled = _bounds(curve.last), _bounds(curve.doubled)
        texts.append(f"all rows gain {last} over half of them, and twice as many would gain about {doubled}")
    texts += [f"the sum with {one.name} gains {_bounds(one.gain)} over the better part" for one in sums]
    return texts


def _bounds(one: Gain) -> str:
    return f"{one.value:+.4f} ({one.low:+.4f} to {one.high:+.4f})"
