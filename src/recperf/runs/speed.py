"""How fast a training was, from the timing events of its log: those of every process that a resumed run had.

Steady throughput is the samples of all stretches of training after the warm-up over their wall time, each measured
between two moments at which the device was idle. Overall throughput is all samples over all time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from ..measure.peaks.other_work import DISTURBED
from ..measure.spans import budget_part
from .result import Overall, Percentiles, Throughput

FEWEST = 5
"""Timed steps below which no percentiles are reported."""
CLOSE = 0.1
"""Steady throughput and batch / p50 may differ by this share without a reason being stated."""
MINOR = 0.02
"""Causes of a smaller difference are not mentioned."""

Json = dict[str, Any]


def speed_of(events: Iterable[Json]) -> Json:
    """The fields of a result's performance that follow from the log."""
    timed = [event for event in events if event["kind"] == "timing"]
    steady = [event for event in timed if event["part"] == "steady"]
    times = [ms for event in steady for ms in event["step_ms"]]
    step_ms = None
    if len(times) >= FEWEST:
        step_ms = Percentiles(*(percentile(times, share) for share in (20, 50, 80)))
    rate = _rate(steady)
    return {
        "steady": Throughput(**rate) if rate else None,
        "overall": _overall(timed),
        "step_ms": step_ms,
        "steps_timed": len(times),
        "difference": difference(Throughput(**rate), steady, times, step_ms.p50) if rate and step_ms else None,
    }


def _rate(stretches: list[Json]) -> Json | None:
    total = {name: sum(event.get(name, 0) for event in stretches) for name in ("samples", "steps", "seconds")}
    return {"samples_per_s": total["samples"] / total["seconds"], **total} if total["steps"] else None


def _overall(timed: list[Json]) -> Overall | None:
    rate = _rate(timed)
    if rate is None:
        return None
    parts: Json = {
        f"{part}_s": math.fsum(event["seconds"] for event in timed if event["part"] == part)
        for part in ("steady", "warmup", "evaluation", "save")
    }
    return Overall(**rate, **parts, shuffle_s=math.fsum(event.get("shuffle_s", 0.0) for event in timed))


def difference(rate: Throughput, steady: list[Json], times: list[float], p50: float) -> str | None:
    """Why steady throughput is not a batch per median step; None where the two are close."""
    batch, mean = max(event["batch"] for event in steady), sum(times) / len(times)
    ratio = rate.samples_per_s / (batch / p50 * 1e3)
    if abs(ratio - 1) <= CLOSE:
        return None
    seconds, shuffle = rate.seconds, sum(event["shuffle_s"] for event in steady)
    between = max(0.0, seconds - shuffle - sum(times) / 1e3)
    causes = {
        f"the mean step takes {mean / p50:.2f} times the median": abs(math.log(mean / p50)),
        f"batches have {rate.samples / rate.steps:,.0f} samples on average": math.log(
            batch * rate.steps / rate.samples
        ),
        f"shuffling takes {shuffle / seconds:.0%} of the time": shuffle / seconds,
        f"the time between steps is {between / seconds:.0%}": between / seconds,
    }
    stated = [text for text, size in sorted(causes.items(), key=lambda item: -item[1]) if size >= MINOR]
    others = sum((event.get("other_work") or 0.0) * event["seconds"] for event in steady) / seconds
    stated += [f"other work took {others:.0%} of the cores"] if others > DISTURBED else []
    sense = "below" if ratio < 1 else "above"
    return f"{abs(ratio - 1):.0%} {sense} {batch:,} samples per median step: {'; '.join(stated)}"


def percentile(values: Sequence[float], share: float) -> float:
    """With linear interpolation between the two nearest values."""
    ordered = sorted(values)
    place = share / 100 * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def budget_of(profile: Json | None) -> dict[str, float] | None:
    """The share of each part of a step, from the steps measured after training: the one source for every report."""
    budget: dict[str, float] = {}
    for row in (profile or {}).get("components", ()):
        # The spans of a model are declared only where its workload is loaded.
        part = budget_part(row["name"], default="backward" if row["phase"] == "backward" else row["name"])
        budget[part] = budget.get(part, 0.0) + row["share"]
    return budget or None
