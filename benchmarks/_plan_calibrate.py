"""Fits the efficiencies of a planned device to measured steps of one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from recperf.config import require, within
from recperf.measure.spans import phase_of
from recperf.plan.devices import Calls, Device
from recperf.plan.predict import PARTS, part_seconds, predict
from recperf.plan.sharding import Parallelism
from recperf.plan.work import PlannedWorkload, Work

GROUPS = ("input", "lookup", "forward", "backward", "update")
"""Parts of a step on one rank; several ranks have `reduce` too."""


@dataclass(frozen=True)
class Measured:
    """Steps of one batch size on one rank."""

    batch: int
    work: Work
    """Counted for that batch."""
    seconds: Mapping[str, float]
    """By span."""


def group_of(span: str) -> str:
    """The part of a step that a span belongs to; time outside of all spans counts as forward."""
    if span in ("data", "embedding", "reduce"):
        return {"data": "input", "embedding": "lookup", "reduce": "reduce"}[span]
    phase = phase_of(span)
    return phase if phase in ("backward", "update") else "forward"


def calibrated(
    workload: PlannedWorkload, device: Device, seconds: float, parallelism: Parallelism | None = None, **samples: Any
) -> Device:
    """The device with all its efficiencies scaled so that a step of one rank takes the measured time."""
    within(1e-9, seconds, 1e6, "seconds")
    plan = predict(workload, 1, device, parallelism=parallelism, **samples)
    of_device = sum(plan.exposed[name] for name in PARTS if "all" not in name and name != "input")
    factor = of_device / max(1e-9, seconds - (plan.seconds - of_device))
    origin = f"measured: a step of one rank takes {seconds * 1e3:,.3g} ms, {factor:.3g} times the assumed efficiency"
    return replace(device, efficiency=device.efficiency.scaled(factor, origin))


def calibrated_by_steps(device: Device, small: Measured, large: Measured) -> Device:
    """The device with the shares of its FLOP/s that the additional samples reached, and with the fixed cost of a step.

    Attention has one share, all other matrix products another. Parts that only move bytes are too short in such steps
    to separate bandwidth from operator overhead, so the share of the bandwidth does not change.
    """
    require(0 < small.batch < large.batch, "batch", small.batch, f"above 0, below the other's {large.batch}")
    peak = device.flops.of(large.work.precision)
    flops, seconds = ({"attention": 0.0, "products": 0.0} for _ in range(2))
    for sign, one in ((-1, small), (1, large)):
        for name, cost in one.work.parts(one.batch).items():
            if cost.flops:
                kind = "attention" if name.startswith("attention") else "products"
                flops[kind] += sign * cost.flops
                seconds[kind] += sign * one.seconds.get(name, 0.0)
    require(min(seconds.values()) > 0, "seconds", seconds, "longer for more samples, in attention and in products")
    shares = {kind: min(1.0, flops[kind] / seconds[kind] / peak) for kind in flops}
    origin = f"products and attention measured: steps of one rank with {small.batch:,} and {large.batch:,} samples"
    fitted = replace(device, efficiency=replace(device.efficiency, **shares, origin=origin))
    return replace(fitted, calls=Calls(**{group: _fixed_seconds(group, fitted, small) for group in GROUPS}))


def _fixed_seconds(group: str, device: Device, one: Measured) -> float:
    """The time of a small step that its work does not explain."""
    work = {
        name: part_seconds(name, cost, one.work, device)
        for name, cost in one.work.parts(one.batch).items()
        if group_of(name) == group
    }
    measured = sum(seconds for name, seconds in one.seconds.items() if group_of(name) == group)
    return max(0.0, measured - sum(work.values()))
