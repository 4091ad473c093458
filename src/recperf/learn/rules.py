"""What limits the quality of a model, from what its training showed: a gain is predicted for each limit, and one is
named where it leads. Torch-free.

Gains are in the metric that chooses the epoch: nats of log loss, or NDCG@10. The bounds were set on the small planted
logs of seed 0 (tests/learn/planted_quality.py). Rules and logs were also changed after wrong answers on seed 1, so that
rates measured there flatter them; no rule was set or changed by other seeds or the large logs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

from ..tasks import Task, signed
from .records import NOT_MEASURED, UNCLEAR, Mean, PartSeen, QualityEvidence, QualityLimit, RepeatsSeen

LEAST = 0.005
"""A smaller gain is not worth a word."""
LEADS = 1.5
"""A limit is named where its predicted gain is so many times that of the next."""
UNMOVED, STILL, MOVED_LITTLE, MOVED_FAR = 1e-3, 0.15, 0.2, 3.0
"""Weights that changed by a smaller share of themselves have not left their random start, whatever the number of
epochs; have hardly left it; the third where they still get better; by a larger multiple they were thrown about."""
RISING = 0.05
"""It still gets better where the last quarter of the evaluations brought this share of all that was gained."""
WORSE = 0.02
"""A training loss that ends so much above its lowest value went up."""
SURE = 3.0
"""Standard errors that a difference must have."""
REPEATED, LABELLED_ALIKE, LEAST_REPEATED = 0.01, 0.99, 20
ALONE = 0.97
"""AUC of one input alone from which it hardly can be something that is known before the label."""
SAME_TARGET = 0.5
FEW_UNITS, WIDE = 200, 0.25
"""Users or rows below which too few are held out, where the interval is this share of the distance from chance."""
EARLY, MEMORISED = 0.6, 0.1
"""Part of the training before which it was best, and the share by which the loss of training rows is then lower."""
FEW_EPOCHS = 4
SAME_LISTS, UNUSED = 0.95, 0.02
"""Share of a list that two users have in common from which all have the same, and what an exchanged history then
changes at most."""


def distance_of(parts: Sequence[PartSeen]) -> float | None:
    """How far matrices of weights moved, relative to their start; None where none did."""
    moved = [part.distance for part in parts if part.kind == "weight" and part.distance]
    return statistics.median(moved) if moved else None


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What the rules read of a training with one seed beside its evidence."""

    task: Task
    evidence: QualityEvidence
    curve: Sequence[float]
    """The choosing metric of the evaluations, higher is better."""
    epochs: int
    """Passes over the training rows."""
    losses: Sequence[float]
    """Training losses, in eight parts of the training."""
    value: float
    """The leading metric."""
    half: float
    """Half of its 95 % interval."""
    units: int
    """Users or rows that the interval draws."""
    rules: dict[str, float] = field(default_factory=dict)
    """The leading metric of the baselines."""
    behind: float = 0.0
    """How far the model is below the best baseline in the choosing metric; negative: above."""
    below: bool = False
    """Whether it is below the best baseline by more than the interval of the difference."""

    drawn: int = 0
    """Items that a ranking beside the leading metric draws; 0: it is among all, or there is none."""

    @property
    def best_rule(self) -> str:
        return max(self.rules, key=lambda name: signed(self.task.leading, self.rules[name]), default="")

    @property
    def trained(self) -> Mean | None:
        parts = self.evidence.trained
        if not parts:
            return None
        rows = sum(part.rows for part in parts)
        value = sum(part.value * part.rows for part in parts) / rows
        error = math.sqrt(sum((part.error * part.rows) ** 2 for part in parts)) / rows
        return Mean(value=value, error=error, rows=rows)

    @property
    def gap(self) -> tuple[float, float]:
        """How much larger the loss of the rows that choose the epoch is than that of training rows, and its error."""
        held, trained = self.evidence.held, self.trained
        if held is None or trained is None:
            return 0.0, 0.0
        return held.value - trained.value, math.hypot(held.error, trained.error)

    @property
    def distance(self) -> float | None:
        """How far matrices of weights moved, relative to their start."""
        return distance_of(self.evidence.parts)

    @property
    def unmoved(self) -> bool:
        """Whether hardly any weight moved."""
        return self.distance is not None and self.distance < UNMOVED

    @property
    def rose(self) -> bool:
        """Whether the training loss went up for most of the training."""
        losses, lowest = self.losses, min(self.losses, default=0.0)
        if self.unmoved:
            # Batches differ, not the model.
            return False
        return 0 < lowest * (1 + WORSE) < losses[-1] and losses.index(lowest) < EARLY * len(losses) if losses else False

    @property
    def rising(self) -> float:
        """What the last quarter of the evaluations brought, where it is more than little."""
        curve = self.curve
        if len(curve) < 2 or max(curve) > curve[-1] or (len(curve) > 3 and curve[-2] < curve[-3]):
            return 0.0
        recent = curve[-1] - curve[-1 - max(1, len(curve) // 4)]
        start = 0.0 if self.task.ranks_items else curve[0]
        whole = curve[-1] - min(start, curve[0])
        return recent if recent > RISING * max(whole, 1e-12) else 0.0


@dataclass(frozen=True)
class Hint:
    """What speaks for a limit."""

    limit: str
    gain: float | None
    """Predicted; None: it is certain whatever its size."""
    because: str


Rule = Callable[[Trained], Iterator[Hint]]


def _leak(seen: Trained) -> Iterator[Hint]:
    evidence = seen.evidence
    repeats, targets = evidence.repeats, evidence.targets
    if text := repeated_text(repeats):
        yield Hint("leak", None, text)
    for text in leaking_inputs(evidence).values():
        yield Hint("leak", None, text)
    for name, share in evidence.known_users.items():
        yield Hint("leak", None, known_text(name, share))
    if targets and targets.last >= SAME_TARGET:
        text = f"{targets.last:.0%} of the held-out items are the last item of their history"
        yield Hint("leak", None, text)


def leaking_inputs(evidence: QualityEvidence) -> dict[str, str]:
    """The inputs that tell what cannot be known, by their names, with what shows it."""
    found, strongest = {}, evidence.strongest
    if strongest and strongest.alone and strongest.alone >= ALONE:
        found[strongest.name] = f"{strongest.name} alone reaches an AUC of {strongest.alone:.3f}"
    used = {one.name for one in evidence.inputs if one.costs.value > SURE * one.costs.error}
    for name in used & evidence.later.keys():
        found[name] = f"{later_text(name, evidence.later[name])}, and scores depend on it"
    return found


def later_text(name: str, share: float) -> str:
    return f"{name} is a time, in {share:.0%} of the rows later than the row's own"


def known_text(name: str, share: float) -> str:
    return f"split cold promises users that never train, but by {name} {share:.0%} of the held-out rows have others"


def repeated_text(seen: RepeatsSeen | None) -> str:
    """What is wrong with rows on both sides; empty where nothing is."""
    if seen is None or seen.rows < max(LEAST_REPEATED, REPEATED * seen.of) or seen.agree < LABELLED_ALIKE:
        return ""
    share = f"{seen.rows:,} of {seen.of:,} scored rows"
    return f"{share} are training rows too, {seen.agree:.0%} of them with the same label"


def _protocol(seen: Trained) -> Iterator[Hint]:
    best = max([seen.value, *seen.rules.values()], key=lambda value: signed(seen.task.leading, value))
    distance = abs(best - seen.task.chance)
    # Near chance there may be nothing to tell.
    if seen.half > WIDE * max(distance, (1 - seen.task.chance) / 3) and seen.units < FEW_UNITS:
        what = f"the interval is ± {seen.half:.3f}, from {seen.units:,} held-out users or rows"
        yield Hint("protocol", None, f"{what}; the best score is {distance:.3f} from chance")


def _dead(seen: Trained) -> Iterator[Hint]:
    if seen.unmoved:
        # All parts alike: that is no part's fault.
        return
    still = [part.name for part in seen.evidence.parts if part.kind != "vector" and part.rows > 1 and not part.moved]
    if still:
        more = f" and {len(still) - 1} more" if len(still) > 1 else ""
        yield Hint("dead", None, f"{still[0]}{more} did not move, or only by weight decay")


def _rate(seen: Trained) -> Iterator[Hint]:
    distance = seen.distance
    if seen.rose:
        text = f"the training loss went up from {min(seen.losses):.3f} to {seen.losses[-1]:.3f}: steps are too large"
        yield Hint("rate", max(seen.behind, _drop(seen)), text)
    elif distance is not None and distance > MOVED_FAR:
        text = f"weights moved by {distance:.1f} times their size: steps are too large"
        yield Hint("rate", max(seen.behind, _noise(seen)), text)
    little = distance is not None and (distance < MOVED_LITTLE if seen.rising else distance < STILL and seen.below)
    if little and distance is not None:
        share = f"{distance:.0%}" if distance >= 0.005 else "less than 0.5%"
        text = f"weights moved by {share} of their size in {seen.epochs} epochs"
        if seen.epochs >= FEW_EPOCHS or seen.unmoved:
            yield Hint("rate", max(seen.behind, seen.rising), f"{text}: steps are too small")
        else:
            yield Hint("steps", max(seen.behind, seen.rising), f"{text}, and it still got better")


def _drop(seen: Trained) -> float:
    """How much worse the last evaluation is than the best."""
    return max(seen.curve) - seen.curve[-1] if seen.curve else 0.0


def _noise(seen: Trained) -> float:
    """How much evaluations differ from the ones before."""
    curve = seen.curve
    return statistics.fmean(abs(one - other) for one, other in zip(curve, curve[1:])) if len(curve) > 1 else 0.0


def _steps(seen: Trained) -> Iterator[Hint]:
    distance = seen.distance
    if seen.rising and (distance is None or distance >= MOVED_LITTLE):
        yield Hint(
            "steps", max(seen.rising, seen.behind / 2), f"it was still getting better: {seen.rising:+.4f} lately"
        )


def _overfit(seen: Trained) -> Iterator[Hint]:
    gap, error = seen.gap
    curve, losses = seen.curve, seen.losses
    place = max(range(len(curve)), key=lambda at: curve[at], default=0)
    falls = bool(losses) and losses[-1] <= (1 + WORSE) * min(losses)
    worse = _drop(seen) > (1 if gap > SURE * error else SURE) * error
    held = seen.evidence.held
    large = held is not None and gap > MEMORISED * held.value
    if len(curve) > 2 and place < EARLY * len(curve) and falls and large and worse:
        text = f"the loss of training rows is {gap:.3f} lower than of others, which got worse after epoch {place + 1}"
        yield Hint("overfit", gap / 2, text)


def _ignored(seen: Trained) -> Iterator[Hint]:
    inputs = seen.evidence.inputs
    if inputs and all(not one.costs.value and not one.costs.error for one in inputs):
        # A model that gives all rows one score uses no input at all: that is something else.
        return
    for one in inputs:
        unused = not one.costs.value and not one.costs.error
        if seen.task.ranks_items:
            if unused:
                yield Hint("ignored", max(seen.behind, seen.half), f"exchanging {one.name} changes no score")
            continue
        tells = _information(one.alone, one.costs.rows)
        if tells and one.costs.value + 2 * one.costs.error < tells / 2:
            text = f"exchanging {one.name} changes {'no' if unused else 'hardly any'} score"
            yield Hint("ignored", max(tells, seen.behind if unused else 0), f"{text}, its own AUC is {one.alone:.3f}")


def _information(alone: float | None, rows: int) -> float:
    """About how much an input of this AUC lowers the log loss of a balanced label; 0 where that may be chance."""
    if alone is None or not rows or alone - 0.5 < SURE / math.sqrt(3 * rows):
        return 0.0
    return NormalDist().inv_cdf(min(alone, 0.999)) ** 2 / 4


def _unseen(seen: Trained) -> Iterator[Hint]:
    groups = seen.evidence.groups
    for name in {group.name: None for group in groups}:
        own = [group for group in groups if group.name == name]
        rest = next((group.loss for group in own if group.at_most is None), None)
        few = [group for group in own if group.at_most is not None]
        if rest is None or not few:
            continue
        rows = sum(group.loss.rows for group in own)
        gain = sum(group.loss.rows * (group.loss.value - rest.value) for group in few) / rows
        error = math.hypot(rest.error, *(group.loss.error for group in few[:1])) * few[0].loss.rows / rows
        count = sum(group.loss.rows for group in few)
        if gain > SURE * error:
            what = f"{count:,} of {rows:,} scored rows have a {name} with at most {few[-1].at_most} training rows"
            yield Hint("unseen", gain, f"{what}, and a loss {gain * rows / count:.3f} higher than the others")


def _drift(seen: Trained) -> Iterator[Hint]:
    ages, parts, held = seen.evidence.ages, seen.evidence.trained, seen.evidence.held
    if len(ages) < 4 or len(parts) < 4 or held is None:
        return
    curve, losses = seen.curve, seen.losses
    if len(curve) > 3 and max(curve) in curve[: len(curve) // 4] and losses and losses[-1] < min(losses) * (1 + WORSE):
        drop = _drop(seen)
        if drop > SURE * held.error:
            text = f"what it learned of the training time made later rows {drop:.3f} worse from epoch "
            yield Hint("drift", drop / 2, f"{text}{curve.index(max(curve)) + 1} on")
            return
    late = _pooled([held, *ages])
    # A model of the whole time fits the middle of it; what it memorises it knows of all training rows alike.
    last, middle = parts[-1], _pooled(parts[1:-1])
    trend, error = last.value - middle.value, math.hypot(last.error, middle.error)
    onwards, later = _pooled(ages[2:]).value - _pooled(ages[:2]).value, _pooled(ages).error * 2
    if trend > SURE * error or (onwards > SURE * later and trend > 0):
        text = f"the loss grows with time: {middle.value:.3f} in the middle of the training rows, {last.value:.3f} in "
        yield Hint("drift", max(late.value - middle.value, trend), f"{text}the last, {late.value:.3f} after them")


def _pooled(means: Sequence[Mean]) -> Mean:
    rows = sum(one.rows for one in means)
    value = sum(one.value * one.rows for one in means) / rows
    error = math.sqrt(sum((one.error * one.rows) ** 2 for one in means)) / rows
    return Mean(value=value, error=error, rows=rows)


def _capacity(seen: Trained) -> Iterator[Hint]:
    gap, error = seen.gap
    if not seen.below or seen.behind < seen.half or gap > min(SURE * error, seen.behind / 2):
        return
    rule = seen.best_rule.replace("_", " ")
    if seen.epochs < FEW_EPOCHS:
        yield Hint("steps", seen.behind, f"it read the training rows {seen.epochs} times, and {rule} is better")
    else:
        yield Hint("capacity", seen.behind, f"training rows have as high a loss as others, and {rule} is better")


def _negatives(seen: Trained) -> Iterator[Hint]:
    trained = seen.trained
    if not seen.task.ranks_items or trained is None or not seen.losses:
        return
    # A softmax over all items that gives the target the probability p ranks it at most at 1 / p.
    confused = math.exp(min(50.0, seen.losses[-1]))
    possible, reached = 1 / math.log2(1 + confused), 1 - trained.value
    if confused < 5 and reached < possible / 2:
        text = f"the training loss of {seen.losses[-1]:.2f} means {confused:.1f} items to choose from, but NDCG@10 of "
        yield Hint("negatives", possible - reached, f"{text}training targets is {reached:.3f}")


def _popularity(seen: Trained) -> Iterator[Hint]:
    overlap, popular = seen.evidence.lists.get("overlap", 0.0), seen.rules.get("popularity")
    used = max((one.costs.value for one in seen.evidence.inputs), default=0.0)
    if overlap < SAME_LISTS or used > UNUSED or popular is None:
        return
    if max(seen.rules.values()) > popular + seen.half / 2:
        rule = seen.best_rule.replace("_", " ")
        text = f"two users share {overlap:.0%} of their lists, but {rule} tells users apart"
        yield Hint("popularity", max(seen.behind, max(seen.rules.values()) - popular), text)


CERTAIN: tuple[Rule, ...] = (_leak, _protocol, _dead, _negatives, _popularity)
"""Those that explain what others see too, the first one first."""
COMPARED: tuple[Rule, ...] = (_rate, _steps, _overfit, _ignored, _unseen, _drift)


def limit_of(seen: Trained) -> QualityLimit:
    """What limits the quality of a model most, as far as its training shows it."""
    evidence, doubts = seen.evidence, list(seen.evidence.notes)
    if seen.drawn:
        doubts.append(
            f"NDCG@10 is among {seen.drawn:,} drawn items: among all it is lower, and models may change places"
        )
    if evidence.held is None:
        return QualityLimit(limit=NOT_MEASURED, confidence="low", because=evidence.notes or ["nothing was looked at"])
    for rule in CERTAIN:
        for hint in rule(seen):
            return QualityLimit(
                limit=hint.limit, confidence="low", because=[hint.because], gain=hint.gain, doubts=doubts
            )
    hints = [hint for rule in COMPARED for hint in rule(seen) if (hint.gain or 0.0) > LEAST]
    if any(hint.limit == "unseen" for hint in hints):
        # Nothing can be known of what was not there: that training rows are known better is no fault.
        hints = [hint for hint in hints if hint.limit != "overfit"]
    # Every fault makes a model worse than one without it: too small is what remains.
    if hints := hints or list(_capacity(seen)):
        return _leading(sorted(hints, key=lambda hint: -(hint.gain or 0.0)), doubts)
    if seen.below:
        text = f"{seen.best_rule.replace('_', ' ')} is better, and nothing that was measured says why"
        return QualityLimit(limit=UNCLEAR, confidence="low", because=[text], doubts=doubts)
    text = "it no longer gets better, knows training rows no better than it should, and no baseline beats it"
    because = [text]
    if evidence.at_most is not None:
        because.append(
            f"labels of equal rows differ: no scores of these inputs exceed an AUC of {evidence.at_most:.4f}"
        )
    return QualityLimit(limit="noise", confidence="low", because=because, doubts=doubts)


def _leading(hints: Sequence[Hint], doubts: list[str]) -> QualityLimit:
    first = hints[0]
    others = [hint for hint in hints if hint.limit != first.limit]
    second = others[0] if others else None
    leads = second is None or (first.gain or 0.0) >= LEADS * (second.gain or 0.0)
    return QualityLimit(
        limit=first.limit if leads else UNCLEAR,
        confidence="low",
        because=[first.because, *([second.because] if second else [])],
        gain=first.gain,
        doubts=doubts,
        second=second.limit if second else None,
    )
