"""What fixes are said to bring, on steps made by hand whose answers can be worked out on paper."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import pytest

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
    "dispatch": {"op": {"p50": 2000.0}},
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
    there = {name: Part(*figures) for name, figures in (parts or EAGER).items()}
    costs = {name: {"flops": 1e9 if "bottom" in name or "top" in name else 0.0, "bytes": 4e6} for name in there}
    step = input_ms + max(sum(p.host_ms for p in there.values()), sum(p.device_ms for p in there.values()))
    whole = Facts(
        step_ms=step, input_ms=input_ms, parts=there, costs=costs, gpu=GPU, precision="float32", batch_bytes=4e6
    )
    return replace(whole, **change)


@dataclass(frozen=True)
class Named:
    name: str
    implies: tuple[str, ...] = ()


def test_without_a_fix_the_model_gives_the_step_it_was_made_from() -> None:
    assert predict(made(), []) == pytest.approx(INPUT + 3.9)


def test_a_graph_removes_the_hosts_time_and_nothing_else() -> None:
    found = made()
    work = sum(max(part.device_ms, part.kernels * KERNEL_MS) for part in found.parts.values())
    assert predict(found, ["graph"]) == pytest.approx(INPUT + work + 0.004)
    slower_host = {name: (host * 10, device, count) for name, (host, device, count) in EAGER.items()}
    assert predict(made(slower_host), ["graph"]) == pytest.approx(predict(found, ["graph"]))


def test_a_graph_brings_nothing_where_the_device_is_the_slower_one() -> None:
    busy = {name: (host, device * 100, count) for name, (host, device, count) in EAGER.items()}
    found = made(busy)
    assert predict(found, ["graph"]) == pytest.approx(predict(found, []), rel=1e-3)


def test_batches_drawn_on_the_device_take_the_data_out_of_the_step() -> None:
    found = made()
    # Twenty launches and a wait, as a batch is cut to its ids outside a graph; the device draws as the host launches.
    assert predict(found, ["input"]) == pytest.approx(3.9 + 20 * 0.004 + 0.02)
    drawn = 5 * KERNEL_MS + 4e6 / (0.6 * 4e12) * 1e3
    assert predict(found, ["input", "graph"]) == pytest.approx(predict(found, ["graph"]) - INPUT + drawn)


def test_pinned_memory_saves_the_difference_of_the_copies_and_never_more_than_the_input() -> None:
    assert predict(made(), ["pinned"]) == pytest.approx(predict(made(), []) - (0.4 - 0.08))
    assert predict(made(input_ms=0.1), ["pinned"]) == pytest.approx(3.9)


@pytest.mark.parametrize("name", ["precision", "bfloat16"])
def test_faster_products_only_pay_once_the_host_is_out_of_the_way(name: str) -> None:
    found = made()
    assert predict(found, [name]) == predict(found, [])
    assert predict(found, [name, "graph"]) < predict(found, ["graph"]) - 0.1


def test_no_part_gets_faster_than_its_kernels_that_do_nothing() -> None:
    found = made(costs={})
    least = sum(part.kernels * KERNEL_MS for part in found.parts.values())
    assert predict(replace(found, input_ms=0.0), ["graph", "bfloat16"]) > least


def test_a_fused_kernel_is_one_launch_and_the_bytes_at_the_ceilings_share() -> None:
    found = made({"embedding": (1.0, 0.9, 100)}, input_ms=0.0, costs={"embedding": {"bytes": 2.4e9, "flops": 0}})
    # 2.4 GB at 60 % of 4 TB/s are 1 ms, more than it takes now: a prediction is never slower than what is there.
    assert predict(found, ["embedding"]) == pytest.approx(0.9)
    less = replace(found, costs={"embedding": {"bytes": 2.4e8, "flops": 0}})
    assert predict(less, ["embedding"]) == pytest.approx(0.1)


@pytest.mark.parametrize("slow", [1, 10, 100])
@pytest.mark.parametrize("count", [1, 2])
def test_all_together_is_never_slower_than_some_of_them(slow: float, count: int) -> None:
    busy = {name: (host, device * slow, kernels) for name, (host, device, kernels) in EAGER.items()}
    found, every = made(busy), [name for name in ALONE if name not in ("pinned", "precision")]
    together = predict(found, every)
    for some in combinations(every, count):
        assert together <= predict(found, some) * 1.001, some


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
    found = facts(profile(), traced(times=3.0), PEAKS)
    assert found is not None
    assert found.host_ms == pytest.approx(3.9)
    assert found.device_ms == pytest.approx(0.75)
    assert found.parts["embedding"].host_ms == pytest.approx(0.6)
    assert "data" not in found.parts
    assert found.batch_bytes == 1e6
    assert predict(found, []) == pytest.approx(4.9)
    quick = facts(profile(), traced(times=0.5), PEAKS)
    assert quick is not None
    assert quick.host_ms == pytest.approx(1.95)


def test_a_device_without_ceilings_has_no_facts() -> None:
    assert facts(profile("another"), traced(), PEAKS) is None
    assert facts(profile(), traced(), {**PEAKS, "gpu": None}) is None
    assert ranked([Named("graph")], profile("another"), traced(), PEAKS, 2) == []
    assert ranked([Named("graph")], profile(), traced(), None, 2) == []


def test_the_largest_gain_stands_first_and_what_a_fix_implies_counts() -> None:
    fixes = [Named("optimizer"), Named("graph", ("embedding",)), Named("embedding"), Named("interaction")]
    rows = ranked(fixes, profile(), traced(), PEAKS, 2)
    assert [fix.name for fix, _ in rows] == ["graph", "embedding", "interaction", "optimizer"]
    assert [ms for _, ms in rows] == sorted(ms for _, ms in rows)
    found = facts(profile(), traced(), PEAKS)
    assert found is not None
    assert rows[0][1] == predict(found, ["graph", "embedding"])


@pytest.mark.parametrize("turned", [False, True])
def test_equal_gains_are_settled_by_what_a_graph_would_show(turned: bool) -> None:
    """Neither precision shows while the host is the slower one; bfloat16 saves the device more."""
    dear = profile()
    for part in dear["components"]:
        part["flops"] = 4e9 if "top" in part["name"] or "bottom" in part["name"] else 0
    fixes = [Named("precision"), Named("bfloat16")]
    rows = ranked(fixes[::-1] if turned else fixes, dear, traced(), PEAKS, 2)
    assert rows[0][1] == rows[1][1]
    assert [fix.name for fix, _ in rows] == ["bfloat16", "precision"]


def test_threads_share_the_parts_with_arithmetic() -> None:
    cpu = profile("cpu")
    assert on_a_cpu(cpu, "threads", PEAKS, 2) == pytest.approx(4.9 - (0.2 + 0.3) / 2)
    assert on_a_cpu(cpu, "threads", PEAKS, 4) == pytest.approx(4.9 - (0.2 + 0.3) * 3 / 4)
    assert on_a_cpu({**cpu, "threads": 2}, "threads", PEAKS, 2) == pytest.approx(4.9)


def test_onednn_takes_products_to_the_ceiling() -> None:
    cpu = profile("cpu")
    # 40 MFLOP at 100 GFLOP/s are 0.4 ms of the 0.8 the products take.
    assert on_a_cpu(cpu, "onednn", PEAKS, 2) == pytest.approx(4.9 - 0.4)
    assert on_a_cpu(cpu, "onednn", None, 2) == 4.9


def test_c_takes_the_tables_to_half_of_the_copy_bandwidth() -> None:
    # 1 MB at 25 GB/s is 0.04 ms, three times.
    assert on_a_cpu(profile("cpu"), "embedding", PEAKS, 2) == pytest.approx(4.9 - 2.0 + 3 * 0.04)
    assert on_a_cpu(profile("cpu"), "unheard of", PEAKS, 2) == 4.9


def test_a_part_that_seems_longer_than_its_step_predicts_no_step_of_nothing() -> None:
    assert on_a_cpu(profile("cpu", plain=1.0), "embedding", PEAKS, 2) == pytest.approx(LEAST)


def test_on_a_cpu_fixes_are_ranked_without_a_trace() -> None:
    rows = ranked([Named("threads"), Named("interaction"), Named("embedding")], profile("cpu"), None, PEAKS, 2)
    assert [fix.name for fix, _ in rows] == ["embedding", "interaction", "threads"]


def test_a_part_keeps_its_arithmetic_on_a_cpu() -> None:
    """100 ms of products whose FLOPs alone take 90 cannot be fixed by more than 10, however few bytes they move."""
    peaks = {
        "machine": {"caches": {}},
        "gemm": {"float32": {"p50": 1e9}},
        "copy": {"p50": 1e12},
        "dispatch": {"op": {"p50": 1.0}},
        "gather": {"dram": {"rows": []}},
    }
    part = {"name": "top", "ms": {"p20": 100.0, "p50": 100.0, "p80": 100.0}, "flops": 9e7, "bytes": 1e3, "share": 1.0}
    profile = {"device": "cpu", "threads": 2, "overhead": {"plain_ms": 100.0}, "components": [part]}
    assert on_a_cpu(profile, "mlp", peaks, 2) == pytest.approx(90.0)
