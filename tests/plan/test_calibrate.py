"""A device from one rank's steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from recperf.errors import ConfigError
from recperf.plan.calibrate import GROUPS, Measured, calibrated_by_steps, group_of
from recperf.plan.devices import Device, Efficiency, Rates
from recperf.plan.predict import Choices, dense_seconds, predict
from recperf.plan.work import work_of
from recperf.workloads.dlrm_v4.config import laptop

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
BESIDE = {"data": 0.004, "embedding": 0.001, "head": 0.01, "backward": 0.02, "sparse_update": 0.003}


def measured(batch: int) -> Measured:
    """As a machine would that reaches the true shares, and takes some seconds beside."""
    work = work_of(laptop())
    seconds = dense_seconds(work, TRUE, batch)
    for name, more in BESIDE.items():
        seconds[name] = seconds.get(name, 0.0) + more
    return Measured(batch, work, seconds)


def test_two_sizes_tell_shares_and_calls() -> None:
    found = calibrated_by_steps(ASSUMED, measured(32), measured(128))
    assert found.efficiency.products == pytest.approx(0.3, rel=1e-6)
    assert found.efficiency.attention == pytest.approx(0.1, rel=1e-6)
    assert found.efficiency.bytes == ASSUMED.efficiency.bytes
    assert vars(found.calls) == pytest.approx(
        {"input": 0.004, "lookup": 0.001, "forward": 0.01, "backward": 0.02, "update": 0.003}, rel=1e-4
    )
    assert "32 and 128 samples" in found.efficiency.origin


def test_another_size_is_then_predicted() -> None:
    found = calibrated_by_steps(ASSUMED, measured(32), measured(128))
    true = sum(dense_seconds(work_of(laptop()), TRUE, 64).values()) + sum(BESIDE.values())
    config = replace(laptop(), train=replace(laptop().train, batch_size=64))
    assert predict(config, 1, found, choices=Choices(pipelined=False)).seconds == pytest.approx(true, rel=0.01)


def test_steps_that_tell_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="below the other's 32"):
        calibrated_by_steps(ASSUMED, measured(32), measured(32))
    alike = replace(measured(128), seconds=measured(32).seconds)
    with pytest.raises(ConfigError, match="longer for more samples"):
        calibrated_by_steps(ASSUMED, measured(32), alike)


def test_every_span_belongs_to_a_part() -> None:
    spans = {"data": "input", "embedding": "lookup", "head": "forward", "metrics": "forward", "other": "forward"}
    spans |= {"backward": "backward", "attention_backward": "backward", "recompute": "backward"}
    spans |= {"update": "update", "dense_update": "update", "sparse_update": "update"}
    assert {span: group_of(span) for span in spans} == spans
    assert group_of("reduce") == "reduce"
    assert set(spans.values()) == set(GROUPS)
