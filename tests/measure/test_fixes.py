"""Predicted gains of fixes, on synthetic steps with known answers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import pytest

import recperf.models.config  # noqa: F401  declares the spans of the synthetic steps
from recperf.measure.fixes import KERNEL_MS, LEAST, Facts, Part, facts, on_a_cpu, predict, ranked

GPU: dict[str, Any] = {
    "l2_bytes": 50 << 20,
    "copy": {"p50": 4e12},
    "gemm": {"float32": {"p50": 5e13}, "tf32": {"p50": 4e14}, "bfloat16": {"p50": 7e14}},
    "gather": {"dram": {"rows": []}},
    "launch": {"queue": {"p50": 4000.0}, "round_trip": {"p50": 20_000.0}},
    "transfer": {"host_to_device_pageable": {"p50": 1e10}, "host_to_device_pinned": {"p50": 5e10}},
}
PEAKS: dict[str, Any] = {
    "gemm": {"float32": {"p50": 1e11}},
    "copy": {"p50": 5e10},
    "calls": {"elementwise": {"p50": 2000.0}},
    "machine": {"caches": {"L3": 32 << 20}},
    "gather": {"dram": {"rows": []}},
    "gpu": {"H": GPU},
}
# Host and device ms and kernels; the host takes 3.9 ms for what the device does in 0.75.
EAGER = {
    "embedding": (0.6, 0.06, 12), "embedding_backward": (0.9, 0.12, 30), "sparse_update": (0.5, 0.05, 10),
    "interaction": (0.3, 0.02, 6), "interaction_backward": (0.5, 0.04, 10), "bottom": (0.1, 0.05, 4),
    "top": (0.2, 0.12, 6), "bottom_backward": (0.2, 0.09, 8), "top_backward": (0.3, 0.18, 12),
    "dense_update": (0.3, 0.02, 16),
}  # fmt: skip
INPUT = 1.0
ALONE = ("input", "pinned", "graph", "precision", "bfloat16", "embedding", "interaction", "mlp", "optimizer")


def made(
    parts: dict[str, tuple[float, float, float]] | None = None, *, input_ms: float = INPUT, **change: Any
) -> Facts:
    by_name = {name: Part(*figures) for name, figures in (parts or EAGER).items()}
    costs = {name: {"flops": 1e9 if "bottom" in name or "top" in name else 0.0, "bytes": 4e6} for name in by_name}
    step = input_ms + max(sum(p.host_ms for p in by_name.values()), sum(p.device_ms for p in by_name.values()))
    whole = Facts(
        step_ms=step, input_ms=input_ms, parts=by_name, costs=costs, gpu=GPU, precision="float32", batch_bytes=4e6
    )
    return replace(whole, **change)


@dataclass(frozen=True)
class AnyFix:
    name: str
    implies: tuple[str, ...] = ()


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


def test_pinned_memory_saves_at_most_the_input_time() -> None:
    assert predict(made(), ["pinned"]) == pytest.approx(predict(made(), []) - (0.4 - 0.08))
    assert predict(made(input_ms=0.1), ["pinned"]) == pytest.approx(3.9)


@pytest.mark.parametrize("name", ["precision", "bfloat16"])
def test_faster_products_gain_only_with_a_graph(name: str) -> None:
    step = made()
    assert predict(step, [name]) == predict(step, [])
    assert predict(step, [name, "graph"]) < predict(step, ["graph"]) - 0.1


def test_a_fused_kernel_takes_one_launch_and_its_bytes() -> None:
    step = made({"embedding": (1.0, 0.9, 100)}, input_ms=0.0, costs={"embedding": {"bytes": 2.4e9, "flops": 0}})
    # 2.4 GB at 60 % of 4 TB/s are 1 ms, more than it takes now: a prediction is never slower than what is by_name.
    assert predict(step, ["embedding"]) == pytest.approx(0.9)
    less = replace(step, costs={"embedding": {"bytes": 2.4e8, "flops": 0}})
    assert predict(less, ["embedding"]) == pytest.approx(0.1)


@pytest.mark.parametrize("slow", [1, 10, 100])
@pytest.mark.parametrize("count", [1, 2])
def test_all_fixes_together_are_never_slower_than_some(slow: float, count: int) -> None:
    busy = {name: (host, device * slow, kernels) for name, (host, device, kernels) in EAGER.items()}
    step, every = made(busy), [name for name in ALONE if name not in ("pinned", "precision")]
    together = predict(step, every)
    for some in combinations(every, count):
        assert together <= predict(step, some) * 1.001, some


def profile(device: str = "H", *, data: float = 1.0, plain: float = 4.9) -> dict[str, Any]:
    parts = {"data": data, **{name: host for name, (host, _, _) in EAGER.items()}}
    return {
        "device": device,
        "threads": 1,
        "overhead": {"plain_ms": plain},
        "components": [
            {"name": name, "ms": {"p50": ms}, "flops": 2e7 if "top" in name else 0, "bytes": 1e6}
            for name, ms in parts.items()
        ],
    }


def traced(times: float = 1.0) -> list[dict[str, Any]]:
    rows = {"data": (1.0, 0.1, 3), **EAGER}
    return [
        {"name": name, "host_ms": host * times, "device_ms": device, "kernels": kernels}
        for name, (host, device, kernels) in rows.items()
    ]


def test_a_traced_host_is_scaled_back_to_the_untraced_step() -> None:
    step = facts(profile(), traced(times=3.0), PEAKS)
    assert step is not None
    assert step.host_ms == pytest.approx(3.9)
    assert step.device_ms == pytest.approx(0.75)
    assert step.parts["embedding"].host_ms == pytest.approx(0.6)
    assert "data" not in step.parts
    assert step.batch_bytes == 1e6
    assert predict(step, []) == pytest.approx(4.9)
    quick = facts(profile(), traced(times=0.5), PEAKS)
    assert quick is not None
    assert quick.host_ms == pytest.approx(1.95)


def test_a_device_without_ceilings_has_no_facts() -> None:
    assert facts(profile("another"), traced(), PEAKS) is None
    assert facts(profile(), traced(), {**PEAKS, "gpu": None}) is None
    assert ranked([AnyFix("graph")], profile("another"), traced(), PEAKS, 2) == []
    assert ranked([AnyFix("graph")], profile(), traced(), None, 2) == []


def test_fixes_are_sorted_by_gain_including_those_they_imply() -> None:
    fixes = [AnyFix("optimizer"), AnyFix("graph", ("embedding",)), AnyFix("embedding"), AnyFix("interaction")]
    rows = ranked(fixes, profile(), traced(), PEAKS, 2)
    assert [fix.name for fix, _ in rows] == ["graph", "embedding", "interaction", "optimizer"]
    assert [ms for _, ms in rows] == sorted(ms for _, ms in rows)
    step = facts(profile(), traced(), PEAKS)
    assert step is not None
    assert rows[0][1] == predict(step, ["graph", "embedding"])


@pytest.mark.parametrize("reverse", [False, True])
def test_equal_gains_are_sorted_by_the_gain_with_a_graph(reverse: bool) -> None:
    """Neither precision shows while the host is the slower one; bfloat16 saves the device more."""
    costly = profile()
    for part in costly["components"]:
        part["flops"] = 4e9 if "top" in part["name"] or "bottom" in part["name"] else 0
    fixes = [AnyFix("precision"), AnyFix("bfloat16")]
    rows = ranked(fixes[::-1] if reverse else fixes, costly, traced(), PEAKS, 2)
    assert rows[0][1] == rows[1][1]
    assert [fix.name for fix, _ in rows] == ["bfloat16", "precision"]


def test_threads_speed_up_parts_with_arithmetic() -> None:
    cpu = profile("cpu")
    assert on_a_cpu(cpu, "threads", PEAKS, 2) == pytest.approx(4.9 - (0.2 + 0.3) / 2)
    assert on_a_cpu(cpu, "threads", PEAKS, 4) == pytest.approx(4.9 - (0.2 + 0.3) * 3 / 4)
    assert on_a_cpu({**cpu, "threads": 2}, "threads", PEAKS, 2) == pytest.approx(4.9)


def test_onednn_takes_products_to_the_ceiling() -> None:
    cpu = profile("cpu")
    # 40 MFLOP at 100 GFLOP/s are 0.4 ms of the 0.8 the products take.
    assert on_a_cpu(cpu, "onednn", PEAKS, 2) == pytest.approx(4.9 - 0.4)
    assert on_a_cpu(cpu, "onednn", None, 2) == 4.9


def test_fused_tables_reach_half_of_the_copy_bandwidth() -> None:
    # 1 MB at 25 GB/s is 0.04 ms, three times.
    assert on_a_cpu(profile("cpu"), "embedding", PEAKS, 2) == pytest.approx(4.9 - 2.0 + 3 * 0.04)
    assert on_a_cpu(profile("cpu"), "unheard of", PEAKS, 2) == 4.9


def test_a_prediction_is_never_zero() -> None:
    assert on_a_cpu(profile("cpu", plain=1.0), "embedding", PEAKS, 2) == pytest.approx(LEAST)


def test_a_part_is_never_faster_than_its_arithmetic() -> None:
    """100 ms of products whose FLOPs alone take 90 cannot be fixed by more than 10, however few bytes they move."""
    peaks = {
        "machine": {"caches": {}},
        "gemm": {"float32": {"p50": 1e9}},
        "copy": {"p50": 1e12},
        "calls": {"elementwise": {"p50": 1.0}},
        "gather": {"dram": {"rows": []}},
    }
    part = {"name": "top", "ms": {"p20": 100.0, "p50": 100.0, "p80": 100.0}, "flops": 9e7, "bytes": 1e3, "share": 1.0}
    profile = {"device": "cpu", "threads": 2, "overhead": {"plain_ms": 100.0}, "components": [part]}
    assert on_a_cpu(profile, "mlp", peaks, 2) == pytest.approx(90.0)
