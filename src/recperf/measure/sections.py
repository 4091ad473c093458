"""Sections of a profile that follow from its readings: verdict, roofline, tables. Torch-free but for counting ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .explain import RULES, UNCLEAR, Ceilings, ceilings, explain, read

if TYPE_CHECKING:
    from torch import Tensor

SECOND = {
    "input": "input: {:.0%} of the step waits for data",
    "communication": "other ranks: {:.0%} of the step waits in collectives",
    "launch": "launches: the device waits for the host for {:.0%} of the step",
    "compute": "arithmetic: the counted FLOPs alone would take {:.0%} of the step",
    "stream": "memory bandwidth: the counted bytes alone would take {:.0%} of the step",
    "table": "the tables: {:.0%} of the step",
}
FIRST = {
    "input-bound": "input", "communication-bound": "communication", "launch-bound": "launch",
    "dispatch-bound": "launch", "compute-bound": "compute", "bandwidth-bound": "stream",
    "latency-bound": "table", "cache-bound": "table",
}  # fmt: skip
NOTICED = 0.15
"""Shares below this are not worth naming as what comes second."""


def verdict(profile: dict[str, Any], peaks: dict[str, Any] | None) -> dict[str, Any]:
    """The regime with how sure it is, and what comes second."""
    regime, readings = explain(profile, peaks), read(profile, peaks)
    name = regime["name"]
    rest = {key: readings[key] or 0.0 for key in SECOND if key != FIRST.get(name)}
    largest = max(rest, key=lambda key: rest[key])
    confidence, why = _confidence(profile, name, readings)
    return {
        **regime,
        "confidence": confidence,
        "why_confidence": why,
        "second": SECOND[largest].format(rest[largest]) if rest[largest] >= NOTICED else None,
    }


def _confidence(profile: dict[str, Any], name: str, readings: dict[str, float | None]) -> tuple[str, str]:
    if name == UNCLEAR:
        return "low", "no single regime's conditions hold, or one could not be measured"
    doubts = []
    for condition in RULES[name]:
        value = readings[condition.reading]
        if value is not None and abs(value - condition.threshold) < 0.1 * condition.threshold:
            doubts.append(f"a reading is within 10 % of its threshold ({value:.2f}, {condition.text})")
    step, share = profile["step_ms"], profile["overhead"]["share"]
    if step["p80"] > 1.25 * step["p20"]:
        doubts.append(f"steps vary: p80 is {step['p80'] / step['p20']:.2f} times p20")
    if abs(share) > 0.1:
        doubts.append(f"clocking changed the step by {share:.0%}")
    if not doubts:
        return "high", "every reading is clear of its threshold, steps are even, and clocking hardly changed them"
    return ("medium" if len(doubts) == 1 else "low"), "; ".join(doubts)


def roofline(profile: dict[str, Any], peaks: dict[str, Any] | None) -> list[dict[str, Any]] | dict[str, str]:
    """Each part with counted work against the device's measured ceilings."""
    found = ceilings(profile, peaks)
    if found is None:
        return {"missing": "no ceilings of this device; recperf peaks measures them"}
    rows = [_point(part, found) for part in profile["components"] if part["flops"] or part["bytes"]]
    return [row for row in rows if row is not None] or {"missing": "no part with counted work was timed"}


def _point(part: dict[str, Any], found: Ceilings) -> dict[str, Any] | None:
    seconds = part["ms"]["p50"] / 1e3
    if seconds <= 0:
        return None
    flops, moved = part["flops"] or 0, part["bytes"] or 0
    compute, memory = flops / found.flops_per_s / seconds, moved / found.bytes_per_s / seconds
    roof = max(compute, memory)
    bound = "neither" if roof < 0.5 else "compute" if compute >= memory else "memory"
    return {
        "name": part["name"],
        "flops": flops,
        "bytes": moved,
        "intensity": flops / moved if moved else None,
        "flops_per_s": flops / seconds,
        "bytes_per_s": moved / seconds,
        "ceiling_flops_per_s": found.flops_per_s,
        "ceiling_bytes_per_s": found.bytes_per_s,
        "share_of_roof": roof,
        "bound": bound,
    }


def embeddings(
    profile: dict[str, Any], peaks: dict[str, Any] | None, tables: list[tuple[str, int]], batches: list[Tensor]
) -> dict[str, Any]:
    """What the lookups of some batches touched, table by table; `batches` hold the stacked rows of each."""
    import torch

    row_bytes, count = profile["ids"]["row_bytes"], len(batches)
    used, counts = torch.unique(torch.cat(batches).cpu(), return_counts=True)
    different = [torch.unique(batch).cpu() for batch in batches]
    found, start = [], 0
    for name, rows in tables:
        inside = (used >= start) & (used < start + rows)
        lookups = float(counts[inside].sum()) / count
        unique = sum(int(((one >= start) & (one < start + rows)).sum()) for one in different) / count
        here = counts[inside].sort(descending=True).values
        head = int(here[: max(1, len(here) // 100)].sum()) if len(here) else 0
        found.append(
            {
                "name": name,
                "rows": rows,
                "row_bytes": row_bytes,
                "lookups": lookups,
                "unique": unique,
                "unique_ratio": unique / lookups if lookups else 0.0,
                "touched_bytes": int(inside.sum()) * row_bytes,
                "busiest_share": head / max(1, int(here.sum())),
            }
        )
        start += rows
    lookups, unique = sum(t["lookups"] for t in found), sum(t["unique"] for t in found)
    return {
        "tables": found,
        "lookups": lookups,
        "unique": unique,
        "unique_ratio": unique / lookups if lookups else 0.0,
        "gb_per_s": _rates(profile),
        "cached": _cached(profile, peaks),
        "skew": {
            "largest_table_share": max(t["lookups"] for t in found) / lookups if lookups else 0.0,
            "gini": _gini([t["lookups"] for t in found]),
        },
    }


def _gini(values: list[float]) -> float:
    """How unevenly a sum is shared: 0 for equal parts, towards 1 where one of many has all."""
    count, whole = len(values), sum(values)
    if not whole:
        return 0.0
    return 2 * sum(rank * value for rank, value in enumerate(sorted(values), 1)) / (count * whole) - 1 - 1 / count


def _rates(profile: dict[str, Any]) -> dict[str, float | None]:
    """Counted bytes over the time of the parts that move them."""
    parts = {part["name"]: part for part in profile["components"]}

    def rate(*names: str) -> float | None:
        there = [parts[name] for name in names if name in parts]
        seconds = sum(part["ms"]["p50"] for part in there) / 1e3
        return sum(part["bytes"] or 0 for part in there) / seconds / 1e9 if seconds else None

    return {"forward": rate("embedding"), "backward_and_update": rate("embedding_backward", "sparse_update")}


def _cached(profile: dict[str, Any], peaks: dict[str, Any] | None) -> dict[str, Any]:
    found, touched = ceilings(profile, peaks), profile["ids"]["touched_bytes"]
    if found is None or not found.last_level:
        return {"fits": None, "why": "the size of the last cache is not known"}
    times = touched / found.last_level
    return {"fits": times < 1, "why": f"the rows the window touched would fill {times:.2g} last-level caches"}
