"""Predicts the gain of a fix from a profile, before it is tried. Torch-free.

A step of an eager program takes the time of its input plus the longer of two: the host launching and the device
executing. A CUDA graph leaves only the device time. The time of a fused kernel follows from its counted bytes or
FLOPs at a share of the measured ceilings, and is at least that of an empty kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .ceilings import ceilings
from .spans import kind_of, phase_of

KERNEL_MS = 0.0025
"""Time of a small kernel inside a graph, including the gap after it."""
OF_MEMORY, OF_PRODUCTS = 0.6, 0.35
"""Shares of the ceilings that kernels reach on streams of a few MB and products of a few GFLOP."""
LEAST = 0.05
"""Smallest share of a CPU step that a fix is predicted to leave."""
DRAW_KERNELS = 5
"""Kernels that draw a batch on the device."""
FUSED_KERNELS = {
    ("tables", "forward"): 1,
    ("tables", "backward"): 8,
    ("interaction", "forward"): 1,
    ("interaction", "backward"): 1,
}
"""Kernels of a fused span by the kind of its work and its phase; 2 for any other."""
KINDS = {
    "embedding": "tables",
    "interaction": "interaction",
    "mlp": "products",
    "onednn": "products",
    "precision": "products",
    "bfloat16": "products",
    "optimizer": "dense update",
}
"""The kind of work that a fix makes faster."""


class Named(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def implies(self) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class Part:
    host_ms: float
    device_ms: float
    kernels: float


@dataclass(frozen=True)
class Facts:
    """The facts about a step that the prediction uses."""

    step_ms: float
    input_ms: float
    parts: dict[str, Part]
    costs: dict[str, dict[str, Any]]
    gpu: dict[str, Any]
    """Ceilings of the device."""
    precision: str
    batch_bytes: float

    @property
    def host_ms(self) -> float:
        return sum(part.host_ms for part in self.parts.values())

    @property
    def device_ms(self) -> float:
        return sum(part.device_ms for part in self.parts.values())

    @property
    def launch_ms(self) -> float:
        """Host time per kernel."""
        return self.host_ms / max(1.0, sum(part.kernels for part in self.parts.values()))


def facts(profile: dict[str, Any], parts: list[dict[str, Any]], peaks: dict[str, Any]) -> Facts | None:
    """From the budget (untraced times) and the parts of the trace (launches); None without ceilings of the device."""
    gpu = (peaks.get("gpu") or {}).get(profile["device"])
    if gpu is None:
        return None
    budget = {part["name"]: part for part in profile["components"]}
    input_ms = budget["data"]["ms"]["p50"] if "data" in budget else 0.0
    traced = {part["name"]: part for part in parts if part["name"] != "data"}
    host = sum(part["host_ms"] for part in traced.values())
    # Tracing slows the host down: scale its parts to the time of the untraced step without input.
    rest = max(0.0, profile["overhead"]["plain_ms"] - input_ms)
    scale = min(1.0, rest / host) if host else 0.0
    return Facts(
        step_ms=profile["overhead"]["plain_ms"],
        input_ms=input_ms,
        parts={
            name: Part(part["host_ms"] * scale, part["device_ms"], part["kernels"]) for name, part in traced.items()
        },
        costs=budget,
        gpu=gpu,
        precision=profile.get("precision") or "float32",
        batch_bytes=float((budget.get("data") or {}).get("bytes") or 0),
    )


def predict(step: Facts, names: Sequence[str]) -> float:
    """ms per step with these fixes."""
    parts = dict(step.parts)
    precision = "bfloat16" if "bfloat16" in names else "tf32" if "precision" in names else step.precision
    for name in names:
        for part in _affected(name, parts):
            parts[part] = _changed(step, name, part, parts[part], precision)
    input_ms, drawn_ms = step.input_ms, 0.0
    launch = step.gpu["launch"]
    if "input" in names:
        drawn_ms = DRAW_KERNELS * KERNEL_MS + step.batch_bytes / (OF_MEMORY * step.gpu["copy"]["p50"]) * 1e3
        # Outside a graph a drawn batch is cut to its number of ids, which waits for the device.
        outside = 20 * launch["queue"]["p50"] / 1e6 + launch["round_trip"]["p50"] / 1e6
        input_ms = 0.0 if "graph" in names else outside
    elif "pinned" in names:
        slow, fast = (step.gpu["transfer"][f"host_to_device_{kind}"]["p50"] for kind in ("pageable", "pinned"))
        input_ms = max(0.0, input_ms - step.batch_bytes * (1 / slow - 1 / fast) * 1e3)
    device = sum(part.device_ms for part in parts.values())
    if "graph" in names:
        work = sum(max(part.device_ms, part.kernels * KERNEL_MS) for part in parts.values())
        return float(input_ms + drawn_ms + work + launch["queue"]["p50"] / 1e6)
    return float(input_ms + max(sum(part.host_ms for part in parts.values()), device + drawn_ms))


def _affected(fix: str, parts: Iterable[str]) -> list[str]:
    """The parts that a fix makes faster."""
    return [part for part in parts if fix in KINDS and kind_of(part) == KINDS[fix]]


def _changed(step: Facts, fix: str, name: str, part: Part, precision: str) -> Part:
    """A part with a fix applied."""
    cost = step.costs.get(name) or {}
    moved, flops = cost.get("bytes") or 0, cost.get("flops") or 0
    memory_ms = moved / (OF_MEMORY * step.gpu["copy"]["p50"]) * 1e3
    if fix in ("precision", "bfloat16"):
        products_ms = flops / (OF_PRODUCTS * step.gpu["gemm"][precision]["p50"]) * 1e3
        return Part(part.host_ms, min(part.device_ms, max(products_ms, part.kernels * KERNEL_MS)), part.kernels)
    if fix == "mlp":
        # Separate kernels for bias, ReLU and the bias gradient disappear; the products remain.
        kernels = part.kernels * 0.7
        saved = (part.kernels - kernels) * KERNEL_MS
        return Part(part.host_ms * 0.7, max(part.device_ms * 0.5, part.device_ms - saved), kernels)
    kernels = min(part.kernels, FUSED_KERNELS.get((kind_of(name), phase_of(name)), 2))
    device = min(part.device_ms, max(memory_ms, kernels * KERNEL_MS))
    return Part(min(part.host_ms, kernels * step.launch_ms), device, kernels)


def on_a_cpu(profile: dict[str, Any], name: str, peaks: dict[str, Any] | None, cores: int) -> float:
    """ms per step with a fix, on a CPU."""
    # Parts come from clocked steps, the step from plain ones: a part may seem longer than its step.
    step = float(profile["overhead"]["plain_ms"])
    return max(LEAST * step, _on_a_cpu(profile, step, name, peaks, cores))


def _on_a_cpu(profile: dict[str, Any], step: float, name: str, peaks: dict[str, Any] | None, cores: int) -> float:
    budget = {part["name"]: part for part in profile["components"]}
    limits = ceilings(profile, peaks)
    if name == "threads":
        # Only parts with much arithmetic gain from more threads.
        shared: float = sum(part["ms"]["p50"] for part in budget.values() if (part["flops"] or 0) > 1e7)
        return step - float(shared * (1 - profile["threads"] / cores))
    if name == "onednn" and limits is not None:
        products = [budget[part] for part in _affected(name, budget)]
        best = sum((part["flops"] or 0) / limits.flops_per_s * 1e3 for part in products)
        return step - float(max(0.0, sum(part["ms"]["p50"] for part in products) - best))
    if name in KINDS and limits is not None:
        gained = 0.0
        for part in _affected(name, budget):
            # A part cannot go below its bytes at half the copy bandwidth or its FLOPs at the rate of products.
            moved, flops = budget[part]["bytes"] or 0, budget[part]["flops"] or 0
            least = max(moved / (0.5 * limits.bytes_per_s), flops / limits.flops_per_s) * 1e3
            gained += max(0.0, budget[part]["ms"]["p50"] - least)
        return step - gained
    return step


def ranked(
    fixes: Sequence[Named], profile: dict[str, Any], parts: list[dict[str, Any]] | None, peaks: dict[str, Any] | None,
    cores: int,
) -> list[tuple[Any, float]]:  # fmt: skip
    """Each fix with its predicted step time, the largest gain first; empty without ceilings."""
    if peaks is None:
        return []
    step = facts(profile, parts, peaks) if parts is not None and profile["device"] != "cpu" else None
    rows: list[tuple[Any, float, float]] = []
    for fix in fixes:
        if step is not None:
            names = [fix.name, *fix.implies]
            # Where launch overhead hides the gain of a fix, the prediction with a graph breaks the tie.
            rows.append((fix, predict(step, names), predict(step, [*names, "graph"])))
        elif profile["device"] == "cpu":
            rows.append((fix, on_a_cpu(profile, fix.name, peaks, cores), 0.0))
    return [(fix, ms) for fix, ms, _ in sorted(rows, key=lambda row: (round(row[1], 3), row[2]))]
