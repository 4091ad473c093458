"""Predicted gains of fixes, on synthetic steps with known answers."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import example_runs as examples
import pytest
from msgspec import convert
from msgspec.structs import replace as changed

import recperf.models.config  # noqa: F401  declares the spans of the synthetic steps
from recperf.measure import fixes as module
from recperf.measure.fixes import (
    Facts,
    Fix,
    PartTimes,
    doubt,
    drifted,
    facts,
    larger_batch,
    on_a_cpu,
    plain_ms,
    predict,
    prediction,
    scaled,
    suggest,
    too_busy,
)
from recperf.measure.peaks.records import DeviceRates, Figure, Launch, Peaks
from recperf.measure.profile_records import Component, Ids, Overhead, StepBudget, TracedPart
from recperf.measure.records import Percentiles


def even(value: float) -> Figure:
    return Figure(value, value, value, n=9)


def peaks_of(product: float, copy: float, call_ns: float, **more: Any) -> Peaks:
    """The ceilings of a machine that streams, multiplies and calls at these rates."""
    known = convert(examples.peaks(), Peaks)
    rates = {"gemm": {"float32": even(product)}, "copy": even(copy), "calls": {"elementwise": even(call_ns)}}
    return changed(known, **rates, **more)


RATES = ("read", "fresh", "cached", "gather", "knee", "calls")
GPU = DeviceRates(
    **{name: getattr(peaks_of(1.0, 1.0, 1.0), name) for name in RATES},
    copy=even(4e12),
    gemm={"float32": even(5e13), "tf32": even(4e14), "bfloat16": even(7e14)},
    launch=Launch(queue=even(4000.0), round_trip=even(20_000.0), kernel=even(2500.0)),
    transfer={"host_to_device_pageable": even(1e10), "host_to_device_pinned": even(5e10)},
)
PEAKS = peaks_of(1e11, 5e10, 2000.0, gpu={"H": GPU})
# Host and device ms and kernels; the host takes 3.9 ms for what the device does in 0.75.
EAGER = {
    "embedding": (0.6, 0.06, 12), "embedding_backward": (0.9, 0.12, 30), "sparse_update": (0.5, 0.05, 10),
    "interaction": (0.3, 0.02, 6), "interaction_backward": (0.5, 0.04, 10), "bottom": (0.1, 0.05, 4),
    "top": (0.2, 0.12, 6), "bottom_backward": (0.2, 0.09, 8), "top_backward": (0.3, 0.18, 12),
    "dense_update": (0.3, 0.02, 16),
}  # fmt: skip
INPUT, KERNEL_MS = 1.0, 0.0025


def around(middle: float, spread: float = 0.0) -> Percentiles:
    return Percentiles(middle * (1 - spread), middle, middle * (1 + spread))


def part(name: str, ms: float = 1.0, spread: float = 0.0, flops: float = 0, bytes: float = 1e6) -> Component:
    return Component(name, "", around(ms, spread), 0.1, flops, bytes)


def made(
    parts: dict[str, tuple[float, float, float]] | None = None, *, input_ms: float = INPUT, **change: Any
) -> Facts:
    by_name = {name: PartTimes(*figures) for name, figures in (parts or EAGER).items()}
    costs = {name: part(name, flops=1e9 if "bottom" in name or "top" in name else 0.0, bytes=4e6) for name in by_name}
    whole = Facts(input_ms=input_ms, parts=by_name, costs=costs, gpu=GPU, precision="float32", batch_bytes=4e6)
    return replace(whole, **change)


def any_fix(name: str, implies: tuple[str, ...] = ()) -> Fix:
    return Fix(name=name, title=name, switch=f"--{name} on", config=None, tolerance=0.0, implies=implies)


def test_a_graph_removes_only_the_host_time() -> None:
    step = made()
    work = sum(max(part.device_ms, part.kernels * KERNEL_MS) for part in step.parts.values())
    assert predict(step, ["graph"]) == pytest.approx(INPUT + work + 0.004)
    slower_host = {name: (host * 10, device, count) for name, (host, device, count) in EAGER.items()}
    assert predict(made(slower_host), ["graph"]) == pytest.approx(predict(step, ["graph"]))


def test_batches_drawn_on_the_device_remove_the_input_time() -> None:
    step = made()
    # Twenty launches and a wait, as a batch is cut to its ids outside a graph; the device draws as the host launches.
    assert predict(step, ["input"]) == pytest.approx(3.9 + 20 * 0.004 + 0.02)
    drawn = 5 * KERNEL_MS + 4e6 / (0.6 * 4e12) * 1e3
    assert predict(step, ["input", "graph"]) == pytest.approx(predict(step, ["graph"]) - INPUT + drawn)


def test_a_fused_kernel_takes_one_launch_and_its_bytes() -> None:
    step = made({"embedding": (1.0, 0.9, 100)}, input_ms=0.0, costs={"embedding": part("embedding", bytes=2.4e9)})
    # 2.4 GB at 60 % of 4 TB/s are 1 ms, more than it takes now: a prediction is never slower than what is by_name.
    assert predict(step, ["embedding"]) == pytest.approx(0.9)
    less = replace(step, costs={"embedding": part("embedding", bytes=2.4e8)})
    assert predict(less, ["embedding"]) == pytest.approx(0.1)


def profile(device: str = "H", *, data: float = 1.0, plain: float = 4.9, spread: float = 0.0) -> StepBudget:
    """Clocked steps of 4.9 ms, beside plain ones."""
    parts = {"data": data, **{name: host for name, (host, _, _) in EAGER.items()}}
    components = [part(name, ms, spread, flops=2e7 if "top" in name else 0) for name, ms in parts.items()]
    return budget(device, components, around(plain, spread))


def budget(device: str, components: list[Component], plain: Percentiles, threads: int = 1) -> StepBudget:
    return StepBudget(
        schema=2, device=device, steps=9, warmup=9, batch_size=64, step_ms=around(4.9), components=components,
        overhead=Overhead(plain.p50, 4.9, 0.0, plain), ids=Ids(1, 1, 4, 4, 4), threads=threads,
    )  # fmt: skip


def traced(times: float = 1.0) -> list[TracedPart]:
    rows = {"data": (1.0, 0.1, 3), **EAGER}
    return [
        TracedPart(name, 1, host * times, host * times, device, kernels)
        for name, (host, device, kernels) in rows.items()
    ]


@pytest.mark.parametrize(("plain", "times"), [(2.45, 0.1), (9.8, 3.0)])
def test_parts_are_scaled_to_the_plain_step(plain: float, times: float) -> None:
    """However much slower or faster clocked and traced steps were: without a fix the prediction is the plain step."""
    assert sum(scaled(profile("cpu", plain=plain), ()).values()) == pytest.approx(plain)
    assert on_a_cpu(profile("cpu", plain=plain), ["unheard of"], PEAKS, 2) == pytest.approx(plain)
    step = facts(profile(plain=plain), traced(times), PEAKS)
    assert predict(step, []) == pytest.approx(plain)
    assert step.input_ms == pytest.approx(plain / 4.9)
    assert step.batch_bytes == 1e6
    assert "data" not in step.parts
    host = sum(part.host_ms for part in step.parts.values())
    assert step.parts["embedding"].host_ms == pytest.approx(host * 0.6 / 3.9)


def test_fixes_are_sorted_by_gain_including_those_they_imply() -> None:
    fixes = [any_fix("optimizer"), any_fix("graph", ("embedding",)), any_fix("embedding"), any_fix("interaction")]
    ordered, rows = suggest(fixes, profile(), traced(), PEAKS, None)
    assert [fix.name for fix in ordered] == ["graph", "embedding", "interaction", "optimizer"]
    step = facts(profile(), traced(), PEAKS)
    assert rows[0].predicted_gain == pytest.approx(4.9 / predict(step, ["graph", "embedding"]))
    assert suggest(fixes, profile("another"), traced(), PEAKS, None) == suggest(fixes, profile(), None, None, None)


def test_threads_speed_up_parts_with_arithmetic() -> None:
    cpu = profile("cpu")
    assert on_a_cpu(cpu, ["threads"], PEAKS, 2) == pytest.approx(4.9 - (0.2 + 0.3) / 2)
    assert on_a_cpu(cpu, ["threads"], PEAKS, 4) == pytest.approx(4.9 - (0.2 + 0.3) * 3 / 4)
    assert on_a_cpu(changed(cpu, threads=2), ["threads"], PEAKS, 2) == pytest.approx(4.9)
    # At half the plain step the same parts have half to gain.
    assert on_a_cpu(profile("cpu", plain=2.45), ["threads"], PEAKS, 2) == pytest.approx(2.45 - 0.25 / 2)


def test_onednn_takes_products_to_half_the_ceiling_of_their_number_of_threads() -> None:
    # 20 MFLOP at 100 GFLOP/s are 0.2 ms, which top takes and top_backward exceeds by 0.1; bottom counts none.
    assert on_a_cpu(profile("cpu"), ["onednn"], PEAKS, 2) == pytest.approx(4.9)
    assert on_a_cpu(profile("cpu"), ["onednn"], PEAKS, 2, case=1) == pytest.approx(4.9 - 0.1)
    faster = changed(PEAKS, other_threads={"1": peaks_of(4e11, 5e10, 2000.0)})
    assert on_a_cpu(profile("cpu"), ["onednn"], faster, 2) == pytest.approx(4.9 - 0.3)
    assert on_a_cpu(profile("cpu"), ["onednn"], faster, 2, case=-1) == pytest.approx(4.9 - 0.15)


REACHES = {"embedding": ("embedding", "sparse_update"), "interaction": ("interaction",), "mlp": ("bottom", "top"),
           "onednn": ("bottom", "top"), "optimizer": ("dense_update",), "threads": ("top",)}  # fmt: skip


def test_a_range_covers_the_exact_gain() -> None:
    """Tables of 2 ms beside 2 ms, both within 10 %, which fused take their bytes at some share of the copy rate."""
    rows = [("embedding", 2.0), ("top", 2.0)]
    cpu = profile("cpu", plain=4.0, spread=0.1)
    cpu.components = [part(name, ms, 0.1) for name, ms in rows]
    result = prediction(cpu, ["embedding"], None, PEAKS)
    assert result.gain == pytest.approx(4.0 / 2.04)
    for tables in (1.8, 2.0, 2.2):
        for rest in (1.8, 2.0, 2.2):
            for fused in (0.02, 0.04, 0.2, tables / 2):
                exact = (tables + rest) / (rest + fused)
                assert result.low - 1e-9 <= exact <= result.high + 1e-9
    # Best: 2.2 of 4 parts at a step of 4.4, and the whole ceiling; worst: 1.8 of 4 at 3.6, and half of the saving.
    assert result.high == pytest.approx(4.4 / (4.4 * 1.8 / 4.0 + 0.02))
    assert result.low == pytest.approx(3.6 / (3.6 * 2.2 / 4.0 + (3.6 * 1.8 / 4.0 + 0.04) / 2))


def test_a_larger_batch_shares_what_does_not_depend_on_it() -> None:
    """0.8 of the step stay as they are, 0.2 are done twice: 1.2 times the step for twice the samples."""
    profile: Any = SimpleNamespace(shares={"python": 0.5, "dispatch": 0.3, "compute": 0.2}, batch_size=256)
    advice = larger_batch(profile, None)
    assert advice.change == "--train.batch-size 512"
    assert advice.predicted_gain == pytest.approx(2 / 1.2)
    busy = larger_batch(profile, "machine too busy")
    assert (busy.predicted_gain, busy.status) == (None, "not judged")
    profile.shares = {"python": 0.2, "compute": 0.8}
    assert larger_batch(profile, None) is None


def test_a_noisy_machine_is_refused() -> None:
    """Parts from slow steps, compared with fast plain ones, made a gain of 20; 0.89 was measured."""
    noisy = profile("cpu", plain=0.5)
    assert sum(component.ms.p50 for component in noisy.components) - 2.0 > 0.5
    assert doubt(noisy, 0.0) == "machine drifted, parts sum to 4.9 ms beside plain steps of 0.5 ms"
    assert doubt(profile("cpu", plain=50.0), None) is not None
    assert doubt(profile("cpu", plain=4.5), 0.6) == "machine too busy, other work took 60 % of the cores"
    assert doubt(profile("cpu", plain=4.5), 0.15) is None
    # Measured in the same minute the same parts give what removing them gives at most.
    tables = prediction(noisy, ["embedding"], None, PEAKS)
    assert tables.gain <= 4.9 / 2.9


def test_drift_is_more_than_the_spread_and_more_than_a_seventh() -> None:
    assert drifted(around(4.0, 0.0), around(2.0, 0.0)) == (
        "machine drifted, a step without any fix took 4 ms and later 2 ms"
    )
    assert drifted(around(2.0, 0.0), around(4.0, 0.0)) is not None
    # A change of 3 ms within half-spreads of 1.2 and 2.1 ms; and one of 14 % of steps that hardly vary.
    assert drifted(around(4.0, 0.3), around(7.0, 0.3)) is None
    assert drifted(around(4.0, 0.01), around(4.56, 0.01)) is None
    assert drifted(around(4.0, 0.01), around(4.64, 0.01)) is not None
    assert too_busy(None) is None
    assert too_busy(module.DISTURBED + 0.01) is not None
    assert plain_ms(profile(plain=2.0, spread=0.5), 1) == 3.0
