"""Rates of this machine for plans: what is measured, stored and used."""

from __future__ import annotations

import os
from dataclasses import replace
from time import perf_counter_ns

import pytest

from recperf.planning import calibrate
from recperf.planning.devices import KNOWN, NETWORKS, Attention, all_reduce
from recperf.planning.link import Link, measure
from recperf.planning.predict import predict
from recperf.planning.sharding import later
from recperf.workloads.dlrm_v4.config import laptop, mlperf
from recperf.workloads.dlrm_v4.plan import planned
from recperf.workloads.micro_dlrm.config import MICRO_DLRM

WORK = planned(mlperf()).work()
RATES = calibrate.Calibration(
    device="h200",
    product=600e12,
    copy=4e12,
    memory_bytes=1 << 37,
    attention=Attention(lengths=(2716,), forward=(300e12,), backward=(200e12,)),
    call_s=10e-6,
    measured="2030-01-01",
)


def test_measured_rates_replace_assumed_ones() -> None:
    device = RATES.applied(KNOWN["h200"], WORK.precision)
    assert device.product_rate("bfloat16") == 600e12
    assert device.attention_rate("bfloat16", 2716, backward=True) == 200e12
    assert predict(planned(mlperf()), 8, device).step.parts["calls"] == pytest.approx((1470 + 106) * 10e-6)
    assert device.pass_rate() == pytest.approx(KNOWN["h200"].efficiency.bytes * 4e12)
    slower, before = (predict(planned(mlperf()), 8, one) for one in (device, KNOWN["h200"]))
    assert slower.step.value > 1.3 * before.step.value
    assert "measured here at 2030-01-01" in slower.origins["efficiency"]


def test_a_measured_link_decides_how_long_ranks_wait() -> None:
    link = Link(backend="nccl", latency_s=1e-3, bytes_per_s=1e9, late=0.1)
    rates = replace(RATES, link=link)
    before, device = (one.applied(KNOWN["h200"], WORK.precision) for one in (RATES, rates))
    network = rates.connected(NETWORKS["ib400"])
    assert network.link_latency_s == 1e-3
    assert all_reduce(1e9, 2, device, network) == pytest.approx(1.0 + 2e-3)
    assert RATES.connected(NETWORKS["ib400"]) == NETWORKS["ib400"]
    slow, fast = (predict(planned(mlperf()), 8, one, network).step for one in (device, before))
    own = sum(slow.parts[name] for name in slow.parts if name.startswith(("dense", "lookup", "table")))
    assert slow.parts["late ranks"] - fast.parts["late ranks"] == pytest.approx(0.1 * own * later(8, 2))
    assert slow.shares["communication"] > fast.shares["communication"]
    assert "nccl messages measured here" in predict(planned(mlperf()), 8, device).origins["efficiency"]


def test_two_ranks_measure_their_link() -> None:
    pytest.importorskip("torch")
    link = measure("cpu")
    assert link.backend == "gloo"
    assert 1e-6 < link.latency_s < 1
    assert 1e6 < link.bytes_per_s < 1e12
    assert 0 < link.late < 2


def test_a_calibration_is_stored_for_its_model_and_a_damaged_file_is_ignored() -> None:
    say: list[str] = []
    assert calibrate.stored("h200", WORK) is None
    calibrate._store(RATES, WORK, say.append)
    assert calibrate.stored("h200", WORK) == RATES
    assert calibrate.stored("b200", WORK) is None
    assert calibrate.stored("h200", planned(laptop()).work()) is None
    path = calibrate._path("h200", WORK)
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"copy": 4', b'"copy": 5'))
    assert path.read_bytes() != content
    assert calibrate.stored("h200", WORK) is None
    path.unlink()
    os.mkfifo(path)
    assert calibrate.stored("h200", WORK) is None
    assert say == []


def test_rates_are_measured_at_the_shapes_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(calibrate, "COPIED", 1 << 20)
    monkeypatch.setattr(calibrate, "DEVICE", "cpu")

    def ns_of(once) -> float:  # type: ignore[no-untyped-def]
        began = perf_counter_ns()
        once()
        return perf_counter_ns() - began

    for work, lengths in (
        (planned(laptop()).work(), 3),
        (MICRO_DLRM.planned(MICRO_DLRM.presets["default"]()).work(), 0),
    ):
        rates = calibrate._rates(work, 8, ns_of, name="cpu", memory=1 << 30)
        assert min(rates.product, rates.copy) > 0
        assert rates.call_s is not None
        assert 0 < rates.call_s < 1
        assert len(rates.attention.lengths if rates.attention else ()) == lengths
        if rates.attention:
            shortest, own, longest = rates.attention.lengths
            assert shortest < own == round(work.attention_length) < longest, "--history changes the length"
