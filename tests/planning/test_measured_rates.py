"""Rates from readings of a clock that the test holds: of the link between two ranks, of calls, products and copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from toy_plan import PLAIN, WIRES, work

from recperf.errors import MachineError
from recperf.planning import calibrate, link
from recperf.planning.calibrate import Calibration, card_name, measured_device
from recperf.planning.devices import KNOWN, Attention, KnownRates
from recperf.planning.link import Link
from recperf.planning.work import Shapes


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_link_is_latency_bandwidth_and_lateness(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message takes 2 ms and 1 s for 16 MB; the first twenty of everything are ten times as slow."""
    clock, sent = Clock(), []
    steps: list[float] = []

    def exchange(received: torch.Tensor, own: torch.Tensor) -> None:
        assert received.shape == own.shape
        sent.append(own.numel() * 4)
        factor = 10 if sent.count(sent[-1]) <= 20 else 1
        clock.now += factor * (2e-3 + (own.numel() * 4 / 2 / 8e6 if own.numel() > 4 else 0))

    def step() -> None:
        steps.append(1e-3 * (10 if len(steps) < 20 else 1 + len(steps) % 2))
        clock.now += steps[-1]

    def gathered(own: list[float]) -> list[list[float]]:
        return [own, [3e-3] * len(own)]

    monkeypatch.setattr(link, "perf_counter", clock)
    monkeypatch.setattr(link, "eager_step", lambda device: step)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: None)
    monkeypatch.setattr(torch.distributed, "all_to_all_single", exchange)
    found = link.between(SimpleNamespace(device="cpu", all_gather=gathered))  # type: ignore[arg-type]
    assert sent == [16] * 120 + [8 << 20] * 120
    assert len(steps) == 120
    assert (found.backend, found.latency_s) == ("gloo", pytest.approx(2e-3))
    assert found.bytes_per_s == pytest.approx(8e6)
    # One rank needs 1 and 2 ms in turn, the other 3: the later one is 1 and 0.5 ms behind the mean.
    assert found.late == pytest.approx(0.75e-3 / ((1.5e-3 + 3e-3) / 2))


def test_ranks_have_one_thread_and_the_environment_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    from torch import multiprocessing

    seen: dict[str, Any] = {}
    one = Link(backend="gloo", latency_s=1e-3, bytes_per_s=1e9, late=0.1)

    def spawn(function: Any, arguments: tuple[Any, ...], nprocs: int) -> None:
        seen.update(arguments=arguments, nprocs=nprocs, threads=os.environ["OMP_NUM_THREADS"])

    context = SimpleNamespace(SimpleQueue=lambda: SimpleNamespace(get=lambda: one))
    monkeypatch.setattr(multiprocessing, "spawn", spawn)
    monkeypatch.setattr(multiprocessing, "get_context", lambda kind: context)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    for name in link.LOCAL:
        monkeypatch.delenv(name, raising=False)
    assert link.measure("cpu") is one
    assert (seen["nprocs"], seen["threads"], seen["arguments"][0]) == (2, "1", "cpu")
    assert os.environ["OMP_NUM_THREADS"] == "7"
    assert not set(link.LOCAL) & set(os.environ)


def test_a_call_is_the_median_step_over_its_65_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """50 steps a reading: a first reading that warms up, then 3, 1, 2, 9 and 4 times 65 ms."""
    clock, steps, pace = Clock(), [0], [99.0, 3.0, 1.0, 2.0, 9.0, 4.0]

    def step() -> None:
        clock.now += 65e-3 * pace[steps[0] // 50]
        steps[0] += 1

    monkeypatch.setattr(calibrate, "perf_counter", clock)
    monkeypatch.setattr(calibrate, "eager_step", lambda device: step)
    monkeypatch.setattr(calibrate, "DEVICE", "cpu")
    assert calibrate.call_seconds() == pytest.approx(3e-3)
    assert steps == [300]


MODEL = work(lengths=(4.0, 8.0), shapes=Shapes(rows_per_sample=2.5, inputs=3, outputs=5, heads=2, qk=4, v=8))


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Calibration]:
    """Rates of a device on which every timed call takes 10 ns."""
    monkeypatch.setattr(calibrate, "DEVICE", "cpu")
    monkeypatch.setattr(calibrate, "COPIED", 4 * 101)
    monkeypatch.setattr(calibrate, "call_seconds", lambda: 7e-6)

    def rates(model: Any, batch: int, ns: Iterator[float] | None = None) -> Calibration:
        return calibrate._rates(model, batch, lambda once: next(ns) if ns else 10.0, name="card", memory=99)

    return rates


def test_rates_are_counted_work_over_time(timed: Callable[..., Calibration]) -> None:
    """10 rows of 3 x 5 in three products; rows of 4, 4, 8 and 8 tokens in attention; 50 numbers copied."""
    found = timed(MODEL, 4)
    assert (found.device, found.memory_bytes, found.call_s) == ("card", 99, 7e-6)
    assert found.product == pytest.approx(3 * 2 * 10 * 3 * 5 / 10e-9)
    assert found.copy == pytest.approx(2 * 4 * 50 / 10e-9)
    attention = found.attention
    assert attention is not None
    # The mean of the lengths, weighted by their squares, is 7.2; a quarter of it and half as much again.
    assert attention.lengths == (2, 7, 11)
    squares = [2 * 1 + 2 * 4, 2 * 16 + 2 * 64, 2 * 36 + 2 * 144]
    assert attention.forward == pytest.approx([count * 2 * (4 + 8) / 10e-9 for count in squares])
    assert attention.backward == pytest.approx([2.5 * count * 2 * (4 + 8) / 10e-9 for count in squares])
    assert attention.precision == "float32"
    readings = timed(MODEL, 4, iter([1.0, *6 * [2.0], 4.0]))
    assert (readings.product, readings.copy) == pytest.approx((10 * found.product, found.copy / 0.4))
    assert timed(replace(MODEL, shapes=Shapes(rows_per_sample=0.01, inputs=3, outputs=5)), 4).attention is None
    tiny = timed(replace(MODEL, lengths=(1.0,), shapes=replace(MODEL.shapes, rows_per_sample=0.01)), 4)
    assert tiny.product == pytest.approx(6 * 1 * 15 / 10e-9), "at least a row"
    assert tiny.attention is not None
    assert tiny.attention.lengths == (1, 2), "a quarter of one token is one"


def test_large_batches_fill_the_device_and_no_more(
    timed: Callable[..., Calibration], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (calibrate.MOST_ROWS, calibrate.MOST_SEQUENCES) == (262_144, 128)
    monkeypatch.setattr(calibrate, "MOST_ROWS", 6)
    assert timed(MODEL, 4).product == pytest.approx(6 * 6 * 15 / 10e-9)


def test_a_gpu_is_the_known_one_if_its_memory_is_nearly_that() -> None:
    memory = KNOWN["h200"].memory_bytes
    for name, share, expected in (
        ("NVIDIA H200", 1.0, "h200"), ("NVIDIA H200", 1.04, "h200"), ("NVIDIA H200", 0.96, "h200"),
        ("NVIDIA H200", 1.06, "NVIDIA H200"), ("NVIDIA H200", 0.94, "NVIDIA H200"), ("NVIDIA-H200-NVL", 1.0, "h200"),
        ("Quadro 9", 1.0, "Quadro 9"),
    ):  # fmt: skip
        assert card_name(name, round(share * memory)) == expected


RATES = Calibration(device="h200", product=2e12, copy=3e12, memory_bytes=1 << 30, measured="now")


def test_measured_rates_and_links_are_all_of_what_is_reached() -> None:
    device = replace(PLAIN, gemm=KnownRates(float32=1e12, bfloat16=9e12), call_s=1e-6)
    attention = Attention(lengths=(1,), forward=(5e12,), backward=(6e12,))
    full = replace(
        RATES, attention=attention, call_s=4e-6, link=Link(backend="nccl", latency_s=0.5, bytes_per_s=6e9, late=0.2)
    )
    halved = replace(device, efficiency=replace(device.efficiency, link=0.5, bytes=0.25, products=0.5))
    found = full.applied(halved, "bfloat16")
    assert (found.product_rate("bfloat16"), found.product_rate("float32")) == (2e12, 1e12)
    assert (found.pass_rate(), found.memory_bytes, found.call_s) == (0.75e12, 1 << 30, 4e-6)
    assert found.link_bytes_per_s * found.efficiency.link == pytest.approx(6e9), "the measured bandwidth is reached"
    assert (found.late, found.calibrated, found.attention) == (0.2, True, attention)
    assert full.applied(halved, "tf32").product_rate("float32") == 2e12, "it is computed in float32"
    plain = RATES.applied(halved, "float32")
    assert (plain.late, plain.call_s, plain.attention) == (0.0, 1e-6, PLAIN.attention)
    assert plain.link_bytes_per_s == PLAIN.link_bytes_per_s
    assert full.connected(WIRES).link_latency_s == 0.5
    assert RATES.connected(WIRES) is WIRES


def test_a_measured_gpu_becomes_a_device() -> None:
    known = measured_device(replace(RATES, device="NVIDIA H200 NVL"))
    assert (known.name, known.memory_bytes, known.bytes_per_s) == ("NVIDIA H200 NVL", 1 << 30, 4.8e12)
    other = measured_device(replace(RATES, device="Quadro 9"))
    assert (other.name, other.memory_bytes, other.bytes_per_s) == ("Quadro 9", 1 << 30, 3e12)
    assert (other.flops.of("float32"), other.flops.has("bfloat16"), other.link_bytes_per_s) == (2e12, False, 32e9)


@pytest.mark.parametrize("count", [1, 2])
def test_messages_are_measured_between_two_gpus(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Link(backend="nccl", latency_s=0.5, bytes_per_s=6e9, late=0.2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda number: SimpleNamespace(total_memory=(1 << 30) + number)
    )
    monkeypatch.setattr(calibrate.links, "measure", lambda device: one)
    monkeypatch.setattr(
        calibrate, "_rates", lambda work, batch, ns_of, *, name, memory: replace(
            RATES, device=name, memory_bytes=memory, product=1e12 * batch
        )
    )  # fmt: skip
    monkeypatch.setattr("recperf.measure.peaks.gpu.Gpu", lambda *_: None)
    said: list[str] = []
    found = calibrate.measure(MODEL, 1000, said.append)
    assert (found.link, found.memory_bytes) == (one if count == 2 else None, 1 << 30)
    assert (found.device, found.product) == ("NVIDIA H200", 128e12), "an H200 with another memory; 128 rows at most"
    assert calibrate.stored("NVIDIA H200", MODEL) == found
    assert len(said) == 1
    assert ("this host has one GPU" in said[0]) == (count == 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MachineError):
        calibrate.measure(MODEL, 8, said.append)
