"""A device as one rank's steps show it: two sizes of batch tell what grows with the samples from what does not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..config import require
from .devices import Calls, Device
from .predict import UPDATE, part_seconds
from .work import Work

GROUPS = ("input", "lookup", "forward", "backward", "update")
"""Those that one rank's step has; several ranks have `reduce` too."""
UPDATES = ("update", UPDATE, "sparse_update")


@dataclass(frozen=True)
class Measured:
    """Steps of one batch size on one rank."""

    batch: int
    work: Work
    """Counted for that batch."""
    seconds: Mapping[str, float]
    """By span."""


def group_of(span: str) -> str:
    """The part of a step that a span belongs to; what lies between spans counts as forward."""
    if span == "data":
        return "input"
    if span == "reduce":
        return "reduce"
    if span == "embedding":
        return "lookup"
    if span in UPDATES:
        return "update"
    return "backward" if span.endswith("backward") or span == "recompute" else "forward"


def calibrated_by_steps(device: Device, small: Measured, large: Measured) -> Device:
    """The device with the shares of its FLOP/s that more samples reached, and with what a step costs beside them.

    Attention has one share, all else that multiplies matrices another. What only moves bytes is too short in such steps
    to tell a bandwidth from calls, and keeps its share.
    """
    require(0 < small.batch < large.batch, "batch", small.batch, f"above 0, below the other's {large.batch}")
    peak = device.flops.of(large.work.precision)
    flops, taken = ({"attention": 0.0, "products": 0.0} for _ in range(2))
    for sign, one in ((-1, small), (1, large)):
        for name, cost in one.work.parts(one.batch).items():
            if cost.flops:
                kind = "attention" if name.startswith("attention") else "products"
                flops[kind] += sign * cost.flops
                taken[kind] += sign * one.seconds.get(name, 0.0)
    require(min(taken.values()) > 0, "seconds", taken, "longer for more samples, in attention and in products")
    shares = {kind: min(1.0, flops[kind] / taken[kind] / peak) for kind in flops}
    told = f"products and attention measured: one rank's steps of {small.batch:,} and {large.batch:,} samples"
    fitted = replace(device, efficiency=replace(device.efficiency, **shares, origin=told))
    return replace(fitted, calls=Calls(**{group: _left(group, fitted, small) for group in GROUPS}))


def _left(group: str, device: Device, one: Measured) -> float:
    """Of a small step, what its work does not explain."""
    work = {
        name: part_seconds(name, cost, one.work, device)
        for name, cost in one.work.parts(one.batch).items()
        if group_of(name) == group
    }
    taken = sum(seconds for name, seconds in one.seconds.items() if group_of(name) == group)
    return max(0.0, taken - sum(work.values()))
