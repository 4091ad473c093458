"""Benchmarks of `recperf plan`: efficiencies of a device are fitted to measured steps of one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from recperf.plan.devices import NETWORKS, Device, Efficiency, Rates
from recperf.plan.predict import dense_seconds, predict
from recperf.plan.sharding import Parallelism
from recperf.workloads.dlrm_v4.config import laptop
from recperf.workloads.dlrm_v4.plan import planned

ASSUMED = Device(
    name="core",
    memory_bytes=1 << 36,
    bytes_per_s=1e15,
    flops=Rates(float32=1e10),
    link_bytes_per_s=1e9,
    shared=True,
    cores=2,
    efficiency=Efficiency(products=0.9, attention=0.9, bytes=0.5, link=1.0, origin="assumed"),
)
TRUE = replace(ASSUMED, efficiency=replace(ASSUMED.efficiency, products=0.3, attention=0.1, origin="true"))
FIXED = {"data": 0.004, "embedding": 0.001, "head": 0.01, "backward": 0.02, "sparse_update": 0.003}


@pytest.fixture
def calibrate(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("_plan_calibrate")


def steps(calibrate: ModuleType, batch: int) -> Any:
    """As measured on a machine that reaches the true shares and has a fixed cost per step."""
    work = planned(laptop()).work()
    seconds = dense_seconds(work, TRUE, batch)
    for name, more in FIXED.items():
        seconds[name] = seconds.get(name, 0.0) + more
    return calibrate.Measured(batch, work, seconds)


def test_steps_of_two_sizes_give_shares_and_fixed_costs(calibrate: ModuleType) -> None:
    fitted = calibrate.calibrated_by_steps(ASSUMED, steps(calibrate, 32), steps(calibrate, 128))
    assert fitted.efficiency.products == pytest.approx(0.3, rel=1e-6)
    assert fitted.efficiency.attention == pytest.approx(0.1, rel=1e-6)
    assert fitted.efficiency.bytes == ASSUMED.efficiency.bytes
    assert vars(fitted.calls) == pytest.approx(
        {"input": 0.004, "lookup": 0.001, "forward": 0.01, "backward": 0.02, "update": 0.003}, rel=1e-4
    )
    assert "32 and 128 samples" in fitted.efficiency.origin
    expected = sum(dense_seconds(planned(laptop()).work(), TRUE, 64).values()) + sum(FIXED.values())
    workload = replace(planned(laptop()), batch_size=64)
    predicted = predict(workload, 1, fitted, parallelism=Parallelism(pipelined=False)).seconds
    assert predicted == pytest.approx(expected, rel=0.01)


def test_one_measured_step_scales_all_efficiencies(calibrate: ModuleType) -> None:
    efficiency = Efficiency(products=0.5, attention=0.1, bytes=0.5, link=0.5)
    device, workload = replace(ASSUMED, cores=None, efficiency=efficiency), planned(laptop())
    before = predict(workload, 1, device).seconds
    fitted = calibrate.calibrated(workload, device, 3 * before)
    assert predict(workload, 1, fitted).seconds == pytest.approx(3 * before, rel=1e-6)
    two = predict(workload, 2, fitted, NETWORKS["loopback"])
    assert two.seconds > 2.9 * before, "two ranks on one host share its rates: half the batch takes as long"
