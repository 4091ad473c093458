"""What keeps a model from learning: rules over what was seen of a training loop. Torch-free.

`high` is for what is certain from what was seen, such as a gradient that never came; what depends on thresholds or on
what the author of the program meant is `medium` or `low`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from statistics import fmean, median, stdev

from ..units import number
from .learning_records import (
    HIGH,
    LOW,
    MEDIUM,
    Finding,
    InputSeen,
    LearningReport,
    LearningSeen,
    LossesSeen,
    NonFiniteSeen,
    ParameterSeen,
)

CERTAIN = 3
"""Looks from which what was the same in all of them is certain."""
ZERO_CERTAIN = 5
"""The same for a gradient that is there and zero."""
TINY, TINIER = 1e-3, 1e-6
"""Size of an update relative to that of the other parts, both relative to the weights."""
MANY_UNITS, MOST_UNITS, ENOUGH_ROWS = 0.5, 0.9, 100
"""Shares of dead or saturated units, and the rows that tell."""
FEW_SCORES = 4
BEFORE, FIRST = 64, 10
"""Losses that a loss is compared with, and how many there must be."""
SPIKE, RISE = 12.0, 10.0
"""Spreads by which a loss leaves those before it, and the factor by which it grows over a loop that diverges."""
IGNORED = 0.01
"""Effect of an input relative to that of the one that matters most."""

Findings = Iterator[Finding]


def report_of(seen: LearningSeen) -> LearningReport:
    """What follows from what was seen, the surest first."""
    found = [finding for rule in RULES for finding in rule(seen)]
    found.sort(key=lambda finding: (HIGH, MEDIUM, LOW).index(finding.confidence))
    notes = list(seen.notes)
    if seen.steps and seen.looks < CERTAIN:
        notes.append(f"only {seen.looks} of {seen.steps} steps were looked at: a longer loop tells more")
    return LearningReport(findings=found, steps=seen.steps, looks=seen.looks, cost=seen.cost, notes=notes)


def non_finite(seen: LearningSeen) -> Findings:
    if (loss := seen.nonfinite) is not None:
        yield Finding(
            name="non-finite",
            sentence=f"The loss is {loss.value} at step {loss.step} ({loss.place}){_why_non_finite(loss)}.",
            where=loss.where or loss.place,
            confidence=HIGH,
            evidence={"step": loss.step},
        )


def _why_non_finite(loss: NonFiniteSeen) -> str:
    at = f" at {loss.where}" if loss.where else ""
    if loss.cause == "operator":
        return f": {loss.operator}{at} made it from finite values"
    if loss.cause == "outside":
        return f": it comes out of {loss.operator}{at}, which may have read it from a batch"
    if loss.cause == "input":
        return f": {loss.operator}{at} read a batch that is not finite"
    if loss.cause == "weights":
        by = "a gradient that is not finite" if loss.gradient else "an update"
        return f": {loss.where} is not finite, by {by} of an earlier step"
    return ""


def zero_rate(seen: LearningSeen) -> Findings:
    for group in seen.rates:
        zeros = next((at for at, rate in enumerate(reversed(group.rates)) if rate), len(group.rates))
        if not zeros or (zeros < CERTAIN and zeros < len(group.rates)):
            continue
        always = zeros == len(group.rates)
        since = "" if always else f" since step {group.steps[-zeros]}"
        yield Finding(
            name="zero-rate",
            sentence=f"The learning rate of {group.name} is 0{since}, so it does not change.",
            where=group.name,
            confidence=LOW if zeros < CERTAIN else HIGH if always else MEDIUM,
            evidence={"looks": zeros, "since_step": group.steps[-zeros]},
        )


def not_optimized(seen: LearningSeen) -> Findings:
    def flawed(one: ParameterSeen) -> bool:
        return one.trainable and not one.optimized and not one.written and one.nonzero >= 2

    if not any(one.optimized for one in seen.parameters):
        return
    for part, inside in _parts(seen, flawed):
        looks = min(one.nonzero for one in inside)
        yield Finding(
            name="not-optimized",
            sentence=f"{_named(part, inside)} gets gradients, but no optimizer holds it.",
            where=part,
            confidence=HIGH if looks >= CERTAIN else MEDIUM,
            evidence={"parameters": len(inside), "values": _values(inside), "looks_with_gradient": looks},
        )


def not_cleared(seen: LearningSeen) -> Findings:
    for one in seen.clearing:
        if one.intervals >= 2 and not one.cleared:
            yield Finding(
                name="not-cleared",
                sentence=f"Gradients of {one.name} are not cleared between steps: each step adds to those of all "
                "before it.",
                where=one.name,
                confidence=HIGH if one.intervals >= CERTAIN else MEDIUM,
                evidence={"intervals": one.intervals, "cleared": 0},
            )


def eval_mode(seen: LearningSeen) -> Findings:
    modes = seen.training
    off = next((at for at, training in enumerate(reversed(modes)) if training), len(modes))
    if off >= CERTAIN and seen.differ_in_eval:
        since = "" if off == len(modes) else f", in the last {off} of {len(modes)} looks"
        yield Finding(
            name="eval-mode",
            sentence=f"{_upper(seen.model)} trains in eval mode{since}: {' and '.join(seen.differ_in_eval)} "
            f"{'does' if len(seen.differ_in_eval) == 1 else 'do'} not work as in training.",
            where=seen.model,
            confidence=HIGH,
            evidence={"looks": len(modes), "in_eval_mode": modes.count(False)},
        )


def no_gradient(seen: LearningSeen) -> Findings:
    def flawed(one: ParameterSeen) -> bool:
        return one.trainable and one.optimized and not one.written and one.looks >= 2 and not one.gradients

    for part, inside in _parts(seen, flawed):
        looks = min(one.looks for one in inside)
        yield Finding(
            name="no-gradient",
            sentence=f"{_named(part, inside)} never gets a gradient.",
            where=part,
            confidence=HIGH if looks >= CERTAIN else MEDIUM,
            evidence={"parameters": len(inside), "values": _values(inside), "looks": looks},
        )


def zero_gradient(seen: LearningSeen) -> Findings:
    tables = {table.name for table in seen.tables}

    def flawed(one: ParameterSeen) -> bool:
        return one.trainable and one.optimized and one.gradients >= CERTAIN and not one.nonzero

    for part, inside in _parts(seen, flawed):
        looks = min(one.gradients for one in inside)
        certain = looks >= ZERO_CERTAIN and not any(one.moved or one.name in tables for one in inside)
        # What follows may take the mean away, and a bias with it.
        only_biases = all(len(one.shape) < 2 for one in inside)
        yield Finding(
            name="zero-gradient",
            sentence=f"The gradient of {_named(part, inside, first=False)} is exactly zero at each of {looks} looks.",
            where=part,
            confidence=LOW if only_biases else HIGH if certain else MEDIUM,
            evidence={"parameters": len(inside), "values": _values(inside), "looks": looks},
        )


def dead_units(seen: LearningSeen) -> Findings:
    for one in seen.units:
        for count, what, state in (
            (one.dead, "dead-units", "zero in every row"),
            (one.saturated, "saturated-units", "at the end of their range in nearly every row"),
        ):
            share = count / max(1, one.units)
            if share < MANY_UNITS or one.rows < ENOUGH_ROWS or one.looks < CERTAIN:
                continue
            # A sigmoid at the end of a model is as sure as its labels allow.
            sure = share >= MOST_UNITS and "Sigmoid" not in one.kind
            yield Finding(
                name=what,
                sentence=f"{count:,} of {one.units:,} units of {one.name} ({one.kind}) are {state}.",
                where=one.name,
                confidence=HIGH if sure else MEDIUM,
                evidence={"share": round(share, 4), "units": one.units, "rows": one.rows, "looks": one.looks},
            )


def idle_units(seen: LearningSeen) -> Findings:
    """What dead units look like from their weights, where no module tells."""
    dead = any(one.dead >= MANY_UNITS * one.units for one in seen.units)
    for one in [] if dead else seen.parameters:
        if one.idle_units is not None and one.nonzero >= ZERO_CERTAIN and one.idle_units >= MANY_UNITS:
            yield Finding(
                name="idle-units",
                sentence=f"The weights of {one.idle_units:.0%} of the units of {one.name} never get a gradient that "
                "is not zero: the units are dead, or nothing uses them.",
                where=one.name,
                confidence=MEDIUM,
                evidence={"share": round(one.idle_units, 4), "looks": one.nonzero},
            )


def tiny_updates(seen: LearningSeen) -> Findings:
    sizes = {
        one.name: median(one.updates)
        for one in seen.parameters
        if len(one.shape) >= 2 and one.rate != 0 and len(one.updates) >= CERTAIN
    }
    compared = {name: _compared(name, sizes) for name in sizes}

    def flawed(one: ParameterSeen) -> bool:
        return compared.get(one.name, 1.0) < TINY

    for part, inside in _parts(seen, flawed, among=sizes.keys()):
        relative = max(compared[one.name] for one in inside)
        rates = {one.rate for one in inside}
        other = {one.rate for one in seen.parameters if one.name in sizes and not flawed(one)}
        because = ""
        if len(rates) == len(other) == 1 and rates != other and None not in rates | other:
            because = f"; its learning rate is {rates.pop():g}, theirs {other.pop():g}"
        size = max(sizes[one.name] for one in inside)
        name = _named(part, inside, first=False)
        yield Finding(
            name="tiny-updates",
            sentence=f"Updates of {name} relative to the weights are {relative:.1g} of those of other parts{because}."
            if relative
            else f"Steps leave {name} as it is, although it gets gradients: updates round to nothing{because}.",
            where=part,
            confidence=HIGH if relative < TINIER else MEDIUM,
            evidence={"update": size, "relative": relative, "parameters": len(inside)},
        )


def _compared(name: str, sizes: dict[str, float]) -> float:
    """An update beside those of the other parameters."""
    others = [size for other, size in sizes.items() if other != name]
    typical = median(others) if others else 0.0
    return sizes[name] / typical if typical else float(sizes[name] > 0)


def unused_rows(seen: LearningSeen) -> Findings:
    for table in seen.tables:
        share, times = table.unchanged / max(1, table.sampled), table.lookups / max(1, table.rows)
        if (share >= 0.5 and times >= 10) or (share >= 0.9 and times >= 2):
            yield Finding(
                name="unused-rows",
                sentence=f"No batch uses about {share:.0%} of the {table.rows:,} rows of {table.name}, after "
                f"{number(table.lookups)} lookups.",
                where=table.name,
                confidence=MEDIUM if times >= 10 else LOW,
                evidence={"share": round(share, 4), "sampled_rows": table.sampled, "lookups": table.lookups},
            )


def spikes(seen: LearningSeen) -> Findings:
    for one in seen.losses:
        if (rise := _rise(one)) is not None:
            yield rise
            continue
        outside = list(_outside(one))
        if not outside:
            continue
        step, value, before = max(outside, key=lambda spike: spike[1])
        times = f", and {len(outside) - 1} more times" if len(outside) > 1 else ""
        yield Finding(
            name="spike",
            sentence=f"The loss ({one.place}) jumps from {before:.3g} to {value:.3g} at step {step}{times}.",
            where=one.place,
            confidence=MEDIUM if value >= RISE * abs(before) else LOW,
            evidence={"step": step, "loss": value, "before": before, "spikes": len(outside)},
        )


def _outside(losses: LossesSeen) -> Iterator[tuple[int, float, float]]:
    """Step and value of losses that leave those before them, with the median of these."""
    finite = [(step, value) for step, value in zip(losses.steps, losses.values) if math.isfinite(value)]
    values = [value for _, value in finite]
    for at in range(FIRST, len(values)):
        # A spike shows against most of what is before it; most losses are ordinary at first sight.
        if values[at] <= 2 * abs(values[at - 1]) and values[at] <= 2 * abs(values[at - 2]):
            continue
        before = values[max(0, at - BEFORE) : at]
        middle = median(before)
        if _leaves(before, values[at]) and (
            min(before) <= 0 or _leaves([*map(math.log, before)], math.log(values[at]))
        ):
            yield finite[at][0], values[at], middle


def _leaves(before: list[float], value: float) -> bool:
    """Whether a value is above those before it, by their spread."""
    middle = median(before)
    spread = 1.4826 * median(abs(one - middle) for one in before)
    return value - middle > SPIKE * max(spread, 0.02 * abs(middle)) if middle > 0 else value - middle > SPIKE * spread


def _rise(losses: LossesSeen) -> Finding | None:
    """The loss at the end is far above that at the start."""
    finite = [value for value in losses.values if math.isfinite(value)]
    if len(finite) < 2 * FIRST:
        return None
    first, last = median(finite[:5]), median(finite[-FIRST:])
    if first <= 0 or last < RISE * first:
        return None
    return Finding(
        name="diverges",
        sentence=f"The loss ({losses.place}) rises from {first:.3g} to {last:.3g}.",
        where=losses.place,
        confidence=MEDIUM,
        evidence={"first": first, "last": last, "steps": len(finite)},
    )


def never_steps(seen: LearningSeen) -> Findings:
    if not seen.steps and seen.backward_calls >= 10:
        yield Finding(
            name="no-step",
            sentence=f"No optimizer stepped in {seen.backward_calls} backward passes.",
            where=seen.model,
            confidence=HIGH if seen.backward_calls >= 100 else MEDIUM,
            evidence={"backward_calls": seen.backward_calls},
        )


def ignored_inputs(seen: LearningSeen) -> Findings:
    effects = {one.name: _effects(one) for one in seen.inputs}
    largest = max((abs(fmean(effect)) for effect in effects.values() if effect), default=0.0)
    for one in seen.inputs:
        effect = effects[one.name]
        if not effect:
            continue
        mean, count = fmean(effect), len(effect)
        evidence: dict[str, float] = {"batches": count, "effect": mean, "largest_effect": largest}
        confidence = ""
        if one.constant:
            confidence, sentence = MEDIUM, f"Input {one.name} is the same in all rows of each held-out batch."
        elif not any(effect):
            confidence = HIGH if count >= 2 else MEDIUM
            sentence = f"Input {one.name} does not matter: permuted, no score changes at all."
        elif count >= FEW_SCORES and abs(mean) + 2 * stdev(effect) / math.sqrt(count) < IGNORED * largest:
            confidence = MEDIUM
            sentence = f"Input {one.name} hardly matters: permuted, the score changes by {mean:.2g}."
        if confidence:
            yield Finding(
                name="ignored-input", sentence=sentence, where=one.name, confidence=confidence, evidence=evidence
            )


def _effects(one: InputSeen) -> list[float]:
    """How permuting changes the score of each batch."""
    pairs = zip(one.scores, one.permuted)
    return [after - before for before, after in pairs if math.isfinite(before) and math.isfinite(after)]


RULES: tuple[Callable[[LearningSeen], Findings], ...] = (
    non_finite, zero_rate, not_optimized, not_cleared, eval_mode, never_steps, no_gradient, dead_units, zero_gradient,
    idle_units, tiny_updates, unused_rows, spikes, ignored_inputs,
)  # fmt: skip


def _parts(
    seen: LearningSeen, flawed: Callable[[ParameterSeen], bool], *, among: Iterable[str] | None = None
) -> list[tuple[str, list[ParameterSeen]]]:
    """The parameters with a flaw, in the largest modules in which all trainable parameters have it; with `among`, all
    of these."""
    names = None if among is None else set(among)
    every = [one for one in seen.parameters if one.trainable and (names is None or one.name in names)]
    right = [one.name for one in every if not flawed(one)]
    parts: dict[str, list[ParameterSeen]] = {}
    for one in every:
        if flawed(one):
            part = one.name
            while part and not any(_is_in(name, part.rpartition(".")[0]) for name in right):
                part = part.rpartition(".")[0]
            parts.setdefault(part or seen.model, []).append(one)
    # A module of one parameter says less than the parameter.
    return [(inside[0].name if len(inside) == 1 else part, inside) for part, inside in parts.items()]


def _is_in(name: str, part: str) -> bool:
    return not part or name.startswith(f"{part}.")


def _named(part: str, inside: list[ParameterSeen], *, first: bool = True) -> str:
    """A part, at the beginning of a sentence or not."""
    if len(inside) == 1:
        return inside[0].name
    name = _upper(part) if first and part.startswith("the ") else part
    return f"{name} ({len(inside)} parameters)"


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]


def _values(inside: list[ParameterSeen]) -> int:
    return sum(math.prod(one.shape) for one in inside)
