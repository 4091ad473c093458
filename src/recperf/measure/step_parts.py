"""The part of a program that each event of a trace belongs to: a span, a named region or a module. Torch-free."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from .trace.nesting import NONE, Nesting
from .trace.read import PART, STEP, STEP_OF_TORCH

MODULE = "recperf.module."
"""Begins the ranges of modules."""
LOADER = "enumerate(DataLoader)"
"""The region that torch records around the next batch."""


class Parts:
    """The part of the program that every event belongs to: a span, a named region or a module.

    A node of the backward pass belongs to the part whose forward pass created it.
    """

    def __init__(self, nesting: Nesting) -> None:
        self.nesting = nesting
        self._names = [self._range(index) for index in range(len(nesting.events))]
        self._forward: dict[int, str] = {}
        for index, event in enumerate(nesting.events):
            if event.kind == "op" and event.sequence is not None and not _is_node(event.name):
                name = self._names[index]
                if name not in (None, "data") and not name.startswith(LOADER) and self._node(index) == NONE:
                    self._forward[event.sequence] = name

    def of(self, index: int) -> str | None:
        node = self._node(index)
        if node != NONE:
            sequence = self.nesting.events[node].sequence
            forward = self._forward.get(sequence) if sequence is not None else None
            if forward is not None:
                return f"{forward}, backward"
        return self._names[index]

    def _node(self, index: int) -> int:
        while index != NONE and not _is_node(self.nesting.events[index].name):
            index = self.nesting.parent[index]
        return index

    def _range(self, index: int) -> str | None:
        while index != NONE:
            event = self.nesting.events[index]
            if event.kind == "range" and not event.name.startswith((STEP, STEP_OF_TORCH)):
                return region_name(event.name)
            index = self.nesting.parent[index]
        return None


def _is_node(name: str) -> bool:
    return name.startswith("autograd::engine::evaluate_function")


def region_name(name: str) -> str:
    """The name of a region as its author knows it."""
    for prefix in (PART, MODULE, "Optimizer.step#", "Optimizer.zero_grad#"):
        if name.startswith(prefix):
            short = name.removeprefix(prefix)
            return {"Optimizer.step#": f"optimizer {short}", "Optimizer.zero_grad#": f"optimizer {short}"}.get(
                prefix, short
            )
    return name


def part_rows(operators: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Time of each part, largest first."""
    parts: defaultdict[str, float] = defaultdict(float)
    for row in operators:
        parts[row["part"] or "(no part)"] += row["ms"]
    whole = sum(parts.values()) or 1.0
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    return [{"name": name, "ms": ms, "share_of_operators": ms / whole} for name, ms in ordered]
