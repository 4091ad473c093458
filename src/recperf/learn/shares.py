"""The parts of a distance: what each kept change gains, and what changes gain only together. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .diagnosis import Share
from .experiments import Change
from .gains import Gain, Scored, gain

INTERACTION = "interaction"


def shares_of(
    kept: Sequence[Change], scores: Sequence[Scored], alone: Mapping[str, Scored], removed: Mapping[str, Gain],
    seeds: tuple[float, int],
) -> list[Share]:  # fmt: skip
    """The share of each kept change; `scores` are those before all of them and after each, `alone` those of the run
    with one change, by its name."""
    shares, base = [], scores[0]
    for place, (change, before, after) in enumerate(zip(kept, scores, scores[1:])):
        step = gain(after, before, seeds)
        together = (
            _together(step, alone[change.name], base, before, after, seeds) if _apart(change, place, alone) else None
        )
        if together is None:
            shares.append(Share(change.limit, change.name, step, removed.get(change.name)))
            continue
        others = " and ".join(one.name for one in kept[:place])
        shares += [
            Share(change.limit, change.name, gain(alone[change.name], base, seeds), removed.get(change.name)),
            Share(INTERACTION, f"{change.name} with {others}", together),
        ]
    return shares


def _apart(change: Change, place: int, alone: Mapping[str, Scored]) -> bool:
    return place > 0 and change.name in alone


def _together(
    step: Gain, alone: Scored, base: Scored, before: Scored, after: Scored, seeds: tuple[float, int]
) -> Gain | None:
    """What a change gains on top of others and not alone; None where that may be chance."""
    value = step.value - gain(alone, base, seeds).value
    common = sorted(set.intersection(*(set(one.values) for one in (alone, base, before, after))))
    if not common:
        return None
    replicates = {
        seed: [b + a - c for b, a, c in zip(before.replicates[seed], alone.replicates[seed], base.replicates[seed])]
        for seed in common
        if all(seed in one.replicates for one in (before, alone, base))
    }
    expected = Scored(
        {seed: before.values[seed] + alone.values[seed] - base.values[seed] for seed in common}, replicates, {}
    )
    variance, freedom = seeds
    # A difference of two differences has twice the variance.
    spread = gain(after, expected, (2 * variance, freedom))
    half = (spread.high - spread.low) / 2
    if value <= half:
        return None
    return Gain(value=value, low=value - half, high=value + half, chance=spread.chance, seeds=len(common))
