"""The published reference convergence points (RCPs): the samples that runs of the reference needed to the target."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ... import jsonfile
from .library import BENCHMARK, RULESET, TARGET, USAGE, official

TRAIN_SAMPLES = 2_290_835_423
"""Of the benchmark's data."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Samples to the target of reference runs with one batch size."""

    batch_size: int
    fastest: float
    mean: float
    """Without the fastest and the slowest run, as the official checker computes it."""
    slowest: float


@cache
def references() -> tuple[Reference, ...]:
    """The published points, by batch size."""
    folder = Path(official("rcp_checker").__file__).parent / f"{USAGE}_{RULESET}"
    points = []
    for record in jsonfile.read(folder / f"rcps_{BENCHMARK}.json").values():
        runs = sorted(float(samples) for samples in record["Epochs to converge"])
        mean = sum(runs[1:-1]) / len(runs[1:-1])
        points.append(Reference(batch_size=record["BS"], fastest=runs[0], mean=mean, slowest=runs[-1]))
    return tuple(sorted(points, key=lambda point: point.batch_size))


def reference(batch_size: int) -> Reference | None:
    """The point of a batch size, between two published ones by linear interpolation; none outside them."""
    for low, high in zip(references(), references()[1:]):
        if low.batch_size <= batch_size <= high.batch_size:
            share = (batch_size - low.batch_size) / (high.batch_size - low.batch_size)

            def between(one: float, other: float, share: float = share) -> float:
                return one + share * (other - one)

            return Reference(
                batch_size=batch_size,
                fastest=between(low.fastest, high.fastest),
                mean=between(low.mean, high.mean),
                slowest=between(low.slowest, high.slowest),
            )
    return None


def standing(samples: int, auc: float, batch_size: int, train_samples: int) -> str:
    """One sentence: where a training stands between the reference's points."""
    now = f"AUC {auc:.4f} after {samples:,} samples, the target is {TARGET}"
    point = reference(batch_size)
    if point is None:
        published = ", ".join(f"{one.batch_size:,}" for one in references())
        return f"{now}; no reference runs have a batch of {batch_size:,} (published: {published})"
    if samples < point.fastest:
        place = f"{samples / point.fastest:.0%} of the way to the fastest"
    elif samples < point.mean:
        place = "between the fastest and their mean"
    elif samples <= point.slowest:
        place = "between their mean and the slowest"
    else:
        place = "beyond the slowest"
    runs = f"{point.fastest:,.0f} to {point.slowest:,.0f}, on average {point.mean:,.0f}"
    other = "" if train_samples == TRAIN_SAMPLES else ", which had other data"
    return f"{now}; reference runs with a batch of {batch_size:,} needed {runs}{other}: {place}"
