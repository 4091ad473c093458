"""Rows of figures about the operators of traced steps, as attribution.py divides and profile.json keeps them."""

from __future__ import annotations

from collections import defaultdict
from statistics import median
from typing import Any

from .attribution import kind_of_call, limit_of_kernel
from .timeline import COUNTED, GRAPH, Call, StepTimes
from .trace.work import CallWork

FUSED = ("CompiledFxGraph", "Torch-Compiled Region", "triton_")
"""Parts of the names under which the work of fused operators appears."""
OUTLIER = 4.0
"""A call that took this many times the median of its like was interrupted."""
MOST_ROWS = 60
"""Operators of a stored profile; the rest are joined."""


def operator_rows(times: StepTimes, works: list[CallWork]) -> list[dict[str, Any]]:
    """Operators per step, those of equal name, part and size of work together; `works` are the counted calls of a
    step."""
    fused = _fused(times, works)
    table = []
    for (name, part, *_), members in _groups(times, fused).items():
        counted = [work for _, work in members if work is not None]
        row: dict[str, Any] = {
            "name": name,
            "part": part,
            "kind": kind_of_call(name),
            "calls": len(members) / times.steps,
            "python_calls": sum(call.python for call, _ in members) / times.steps,
            "ms": sum(call.us for call, _ in members) / 1e3 / times.steps,
            "kernels": sum(call.kernels for call, _ in members) / times.steps,
        }
        if part == GRAPH:
            row["by_name"] = limit_of_kernel(name)
        for figure in COUNTED:
            row[figure] = sum(getattr(work, figure) for work in counted) / times.steps
        for fact in ("precision", "row_bytes", "table_rows"):
            row[fact] = next((getattr(work, fact) for work in counted if getattr(work, fact)), None)
        row["parallel"] = max(call.parallel for call, _ in members)
        row["counted"] = len(counted) == len(members)
        if any(id(call) in fused for call, _ in members):
            row["fused"] = True
        if counted and counted[0].largest:
            row["largest"] = list(counted[0].largest)
        table.append(row)
    return sorted(table, key=lambda row: -row["ms"])


def clip(times: StepTimes) -> float:
    """Cut calls that took many times as long as others of the same work: other work had their core meanwhile. Returns
    the us that were cut."""
    cut = 0.0
    for members in _groups(times, {}).values():
        if len(members) >= 3:
            most = OUTLIER * median(call.us for call, _ in members)
            for call, _ in members:
                cut += max(0.0, call.us - most)
                call.us = min(call.us, most)
    return cut


def compact(figures: dict[str, Any]) -> dict[str, Any]:
    """The figures with at most `MOST_ROWS` operators; the smaller ones are joined by their kind."""
    operators = figures["operators"]
    rest: defaultdict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in operators[MOST_ROWS:]:
        kind = row["kind"], bool(row["kernels"]), row.get("by_name"), bool(row.get("communication"))
        rest[*kind, row["precision"], row["row_bytes"]].append(row)
    joined = [{**group[0], **_joined(group)} for group in rest.values()]
    return {**figures, "operators": [*operators[:MOST_ROWS], *joined]}


def _joined(group: list[dict[str, Any]]) -> dict[str, Any]:
    if len(group) == 1:
        return {}
    summed = ("calls", "python_calls", "ms", "kernels", *COUNTED)
    return {
        "name": f"{len(group)} smaller operators ({group[0]['kind']})",
        "part": None,
        **{name: sum(row[name] for row in group) for name in summed},
        "counted": all(row["counted"] for row in group),
    }


def _groups(times: StepTimes, fused: dict[int, CallWork]) -> dict[tuple[Any, ...], list[tuple[Call, Any]]]:
    """Calls of equal name, part and size of work."""
    groups: defaultdict[tuple[Any, ...], list[tuple[Call, Any]]] = defaultdict(list)
    for call in times.calls:
        work = call.work or fused.get(id(call))
        sizes = (int(getattr(work, name, 0)).bit_length() for name in ("flops", "bytes", "beyond", "rows"))
        groups[call.name, call.part, getattr(work, "largest", ()), *sizes].append((call, work))
    return groups


def _fused(times: StepTimes, works: list[CallWork]) -> dict[int, CallWork]:
    """The work of operators that were counted but that the trace does not show: a compiler fused them."""
    regions = [call for call in times.calls if any(mark in call.name for mark in FUSED)]
    if not regions:
        return {}
    shown = {call.name for call in times.calls}
    hidden = [work for work in works if work.name not in shown]
    whole = sum(call.us for call in regions) or 1.0
    result = {}
    for call in regions:
        share = call.us / whole * times.steps
        work = CallWork(call.name)
        for figure in ("flops", "special", "bytes", "beyond", "rows", "missed"):
            setattr(work, figure, round(share * sum(getattr(item, figure) for item in hidden)))
        work.row_bytes = max((item.row_bytes for item in hidden), default=0)
        result[id(call)] = work
    return result
