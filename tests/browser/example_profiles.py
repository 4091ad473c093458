"""Profiles as `recperf profile` writes them, made by hand: a processor's, a GPU's eager and a GPU's graph one."""

from __future__ import annotations

import copy
from typing import Any

from example_runs import profile, spread, step

HOSTILE = "void <script>alert('kernel')</script>\x1b[31m" + "x" * 300
CUTLASS = (
    "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x256_16x3_tn_align4>"
    "(cutlass_80_tensorop_s1688gemm_128x256_16x3_tn_align4::Params)"
)
ADD = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul> >"
    "(int, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>)"
)

EAGER = {
    "data": 0.9, "bottom": 0.25, "embedding": 0.35, "interaction": 0.2, "top": 0.4, "loss": 0.1, "loss_backward": 0.05,
    "top_backward": 0.5, "interaction_backward": 0.3, "embedding_backward": 0.6, "bottom_backward": 0.3,
    "dense_update": 0.35, "sparse_update": 0.4, "other": 0.2,
}  # fmt: skip
GRAPH = {"step_graph": 0.26, "other": 0.02}
CPU = {
    "data": 4.0, "bottom": 60.0, "embedding": 2.0, "interaction": 9.0, "top": 110.0, "loss": 0.4, "loss_backward": 0.2,
    "top_backward": 214.0, "interaction_backward": 15.0, "embedding_backward": 3.0, "bottom_backward": 95.0,
    "dense_update": 9.0, "sparse_update": 1.5, "other": 1.2,
}  # fmt: skip
FLOPS = {"bottom": 1.3e9, "top": 8.4e9, "bottom_backward": 2.2e9, "top_backward": 16.8e9, "interaction": 4.2e6}


def base(parts: dict[str, float], device: str) -> dict[str, Any]:
    """What every profile of this workload has, a run's own one too."""
    precision = "float32" if device == "cpu" else "tf32"
    fields = {"steps": 48, "warmup": 12, "batch_size": 2048, "precision": precision, "other_work": 0.02}
    return profile(parts, FLOPS, device=device, **fields)


def full(parts: dict[str, float], device: str, verdict: str, sentence: str, **sections: Any) -> dict[str, Any]:
    wall = sum(parts.values())
    figures: dict[str, Any] = {
        **base(parts, device)["workload"],
        "name": "dlrm",
        "preset": "experiment",
        "switches": {"graph": "off: asked for", "tf32": "on: a CUDA device"},
        "embeddings": embeddings([("t0", 4, 9000.0, 4.0), ("t1", 3, 7000.0, 3.0), ("t2", 2, 4480.0, 2.0)]),
        "communication": {"missing": "one rank"},
        "roofline": None,
        "trust": {
            "tracing": {"plain_ms": wall, "clocked_ms": wall * 1.6, "share": 0.6},
            "seed": 42,
            "versions": {"torch": "2.11.0", "triton": "3.6.0", "cuda": "13.0", "python": "3.11.7"},
            "clocks": {"sm_mhz": 1980, "mem_mhz": 3201, "power_w": 231.0},
        },
        "trace": None,
    }
    made = {**step(device, spread(wall), verdict, sentence), "machine": {}, "workload": figures}
    for name, value in sections.items():
        (figures if name in figures else made)[name] = value
    return copy.deepcopy(made)


def embeddings(tables: list[tuple[str, int, float, float]]) -> dict[str, Any]:
    lookups, unique = sum(t[2] for t in tables), sum(t[3] for t in tables)
    return {
        "tables": [
            {"name": name, "rows": rows, "row_bytes": 256, "lookups": ids, "unique": different,
             "unique_ratio": different / ids, "touched_bytes": round(different * 256), "busiest_share": 0.31}
            for name, rows, ids, different in tables
        ],
        "lookups": lookups,
        "unique": unique,
        "unique_ratio": unique / lookups,
    }  # fmt: skip


def fix(
    name: str, title: str, predicted: float, wall: float, measured: float | None = None, **more: Any
) -> dict[str, Any]:
    return {
        "name": name,
        "seen": f"Launches of small kernels take longer than the kernels: {title}.",
        "change": f"--fast.{name} on",
        "predicted_gain": wall / predicted,
        "predicted_range": [wall / predicted * 0.9, wall / predicted * 1.2],
        "measured_ms": measured,
        "measured_gain": wall / measured if measured else None,
        "measured_range": [wall / measured * 0.95, wall / measured * 1.1] if measured else None,
        "same_losses": None if measured is None else True,
        "largest_difference": None if measured is None else 3e-6,
        "status": "suggested" if measured is None else "tried",
        "note": None,
        **more,
    }


def roof(name: str, flops: float, moved: float, ms: float, bound: str) -> dict[str, Any]:
    rates = (flops / ms * 1e3, moved / ms * 1e3)
    return {
        "name": name,
        "flops": flops,
        "bytes": moved,
        "intensity": flops / moved if flops else None,
        "flops_per_s": rates[0],
        "bytes_per_s": rates[1],
        "ceiling_flops_per_s": 3.99e14,
        "ceiling_bytes_per_s": 4.25e12,
        "share_of_roof": max(rates[0] / 3.99e14, rates[1] / 4.25e12),
        "bound": bound,
    }


def kernel(name: str, count: float, mean_us: float, busy: float, delay: float | None = 6.0) -> dict[str, Any]:
    total = count * mean_us / 1e3
    return {"name": name, "part": "top", "count": count, "total_ms": total, "mean_us": mean_us, "share": total / busy,
            "launch_delay_us": delay}  # fmt: skip


def cpu() -> dict[str, Any]:
    """A processor: no kernels, no idle, no transfers."""
    wall = sum(CPU.values())
    gone = {"missing": "no device in this trace"}
    return full(
        CPU, "cpu", "compute", "Arithmetic dominates: the counted FLOPs alone take 78 % of the step.",
        kernels=gone, idle=gone, transfers=gone,
        roofline=[{**roof("top", 8.4e9, 4e7, 110.0, "compute"), "ceiling_flops_per_s": 9e10,
                   "ceiling_bytes_per_s": 2.1e10, "share_of_roof": 0.85}],
        advice=[fix("interaction", "cached triangle indices", wall * 0.97, wall),
               fix("mlp", "fused products", wall * 0.8, wall, wall * 0.7, status="not judged",
                   predicted_gain=None, predicted_range=None, measured_gain=None, measured_range=None,
                   note="Gain not judged: machine too busy, other work took 60 % of the cores")],
    )  # fmt: skip


def eager() -> dict[str, Any]:
    """A GPU that waits for its host."""
    wall = sum(EAGER.values())
    names = [(CUTLASS, 12, 21.0), (ADD, 64, 2.1), (HOSTILE, 20, 3.0)]
    names += [(f"reduce_kernel_{index}", 4, 2.0 + index / 10) for index in range(14)]
    busy = sum(count * mean / 1e3 for _, count, mean in names)
    causes = {"input": 0.82, "launch": 2.4, "dispatch": 0.21, "sync": 0.45}
    idle = sum(causes.values())
    return full(
        EAGER, "NVIDIA H200", "launch", "The device waits for launches: it works 21 % of the step.",
        kernels={"rows": [kernel(*one, busy=busy) for one in names], "count": sum(n[1] for n in names), "busy_ms": busy,
                 "small": {"count": 140, "share_of_count": 0.92, "total_ms": 0.31}, "steps": 8},
        roofline=[roof("bottom", 1.3e9, 2e7, 0.25, "neither"), roof("top", 8.4e9, 4e7, 0.4, "neither"),
                  roof("top_backward", 1.68e10, 9e7, 0.5, "compute"), roof("embedding", 0.0, 5e6, 0.35, "neither")],
        idle={"wall_ms": wall, "busy_ms": wall - idle, "idle_ms": idle, "causes": causes,
              "syncs": [{"what": "cudaStreamSynchronize", "caller": "aten::item in loss", "count": 1, "ms": 0.4}]},
        transfers=[{"kind": "host to device", "count": 5, "bytes": 4.3e6, "ms": 0.31, "gb_per_s": 13.9, "pinned": False,
                    "overlapped_share": 0.0},
                   {"kind": "memset", "count": 3, "bytes": 9e3, "ms": 0.004, "gb_per_s": 2.2, "pinned": None,
                    "overlapped_share": 0.4}],
        advice=[fix("graph", "whole step as a CUDA graph", 1.3, wall, 1.5),
               fix("embedding", "fused tables", 3.4, wall, 3.9),
               fix("bf16", "bf16 products", 4.5, wall, 4.6, same_losses=False, largest_difference=0.02,
                   status="rejected", note="Numbers differ beyond 1e-3"),
               fix("pin", "pinned input", 4.7, wall), fix("all", "all together", 0.9, wall, 1.0)],
        trace={"file": "trace.json", "bytes": 41_000_000, "steps": 8},
    )  # fmt: skip


def graph() -> dict[str, Any]:
    """The same GPU with a whole step as one graph: few gaps, little left to fix."""
    wall = sum(GRAPH.values())
    names = [(CUTLASS, 12, 12.0), ("_bag_forward", 1, 9.0), ("_bag_update", 1, 21.0), (ADD, 6, 2.0)]
    busy = sum(count * mean / 1e3 for _, count, mean in names)
    causes = {"input": 0.0, "launch": 0.01, "dispatch": wall - busy - 0.01, "sync": 0.0}
    return full(
        GRAPH, "NVIDIA H200", "compute", "Arithmetic dominates.",
        switches={"graph": "on: a CUDA device, shapes fixed", "tf32": "on: a CUDA device"},
        kernels={"rows": [kernel(*one, busy=busy, delay=None) for one in names], "count": 20, "busy_ms": busy,
                 "small": {"count": 7, "share_of_count": 0.35, "total_ms": 0.021}, "steps": 8},
        roofline=[roof("step_graph", 2.9e10, 2e8, 0.26, "neither")],
        idle={"wall_ms": wall, "busy_ms": busy, "idle_ms": wall - busy, "causes": causes, "syncs": []},
        transfers=[],
        embeddings=embeddings([(f"table_{i}", 10**6, 1e5 / (i + 1), 8e4 / (i + 1)) for i in range(26)]),
    )  # fmt: skip


def budget() -> dict[str, Any]:
    """Spans only: what needs a trace was not asked for."""
    lacking = {key: {"missing": "no step was traced"} for key in ("kernels", "idle", "transfers")}
    return full(CPU, "cpu", "unclear", "Unclear.", roofline={"missing": "no ceilings"}, **lacking)


def ranks() -> dict[str, Any]:
    """A processor that two ranks share, the second of which comes late."""
    rows = [(0, 300.0, 230.0, 205.0, 12.0), (1, 478.0, 52.0, 12.0, 205.0)]
    each = [
        {
            "rank": rank,
            "step_ms": own + waits,
            "own_ms": own,
            "exposed_ms": waits,
            "late_ms": late,
            "moving_ms": waits - late,
            "awaited_ms": awaited,
            "largest_part": "data",
        }
        for rank, own, waits, late, awaited in rows
    ]
    communication = {
        "ranks": 2, "hosts": 1, "slowest": 1, "steps": 30, "step_ms": 530.0, "own_ms": 389.0, "exposed_ms": 141.0,
        "late_ms": 108.5, "moving_ms": 32.5, "exposed_share": 141 / 530,
        "not_told_apart": None, "sharing": 2, "each": each,
        "collectives": [
            {"part": "embedding", "what": "all_to_all_single", "count": 4.0, "bytes": 9.5e3, "exposed_ms": 120.0,
             "late_ms": 100.0, "moving_ms": 20.0, "awaited_rank": 1},
            {"part": "reduce", "what": "all_reduce", "count": 1.0, "bytes": 1.5e4, "exposed_ms": 21.0, "late_ms": 8.5,
             "moving_ms": 12.5, "awaited_rank": 1},
        ],
    }  # fmt: skip
    parts = {**CPU, "embedding_exchange": 40.0, "reduce": 3.0, "reduce_exchange": 12.0}
    lone = {"missing": "fixes are predicted and tried in one process"}
    timed = {**base(parts, "cpu")["workload"], "communication": communication, "no_advice": lone}
    several = cpu()
    return {**several, "advice": [], "workload": {**several["workload"], **timed}}
