"""Predicts the gain of a fix from a profile, before it is tried, or says why it cannot be predicted. Torch-free.

Parts come from clocked or traced steps, which are slower than plain ones: they are scaled so that they sum to the plain
step. On a CPU a step takes the sum of its parts. On a GPU a step of an eager program takes the time of its input plus
the longer of two: the host launching and the device executing; a CUDA graph leaves only the device time. The time of a
fused kernel follows from its counted bytes or FLOPs at a share of the measured ceilings, and is at least that of an
empty kernel.

A prediction has three cases. 0: every figure at its median. 1, the best case for the fix: the step and the parts that
the fix affects at p80, other parts at p20, rates at p80 and the whole ceiling reached. -1, the worst: the reverse.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..machine import usable_cores
from .peaks.other_work import DISTURBED
from .peaks.records import DeviceRates, Peaks
from .profile_records import Component, Profile, StepBudget, TracedPart
from .records import Advice, Percentiles
from .spans import kind_of, phase_of

PERCENTILES = ("p50", "p80", "p20")
"""By case: 0, 1 and -1."""
OF_CPU = 0.5
"""On a CPU: share of a ceiling that operators reach, except in the best case, where they reach all of it; and share of
its saving that a fix has in the worst case."""
OF_MEMORY, OF_PRODUCTS = 0.6, 0.35
"""Shares of the ceilings that kernels reach on streams of a few MB and products of a few GFLOP."""
MUCH_ARITHMETIC = 1e7
"""FLOPs above which a part gains from more threads."""
DRIFT = 0.15
"""Relative change of the plain step above which the machine may have drifted."""
UNLIKE = 2.0
"""Ratio of clocked to plain steps, or its inverse, above which parts do not describe the plain step: less than half of
what was measured is in it."""
LARGE_PART = 0.3
"""Share of a step that does not depend on its batch, above which a larger batch is advised."""
IN_SAMPLES = "In samples per second"
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
    "precision": "products", "bfloat16": "products", "embedding": "tables", "interaction": "interaction",
    "mlp": "products", "optimizer": "dense update", "onednn": "products",
}  # fmt: skip
"""The kind of work that a fix makes faster, where it is one kind of span."""


@dataclass(frozen=True, kw_only=True)
class Fix:
    """A switch that could make a step faster."""

    name: str
    """By which its gain is predicted."""
    title: str
    switch: str
    """The options that switch it on."""
    config: Any
    """The config with the switch on."""
    tolerance: float
    """Largest relative difference of a loss that rounding explains."""
    implies: tuple[str, ...] = ()
    """Fixes that its options switch on too."""


@dataclass(frozen=True)
class Prediction:
    ms: float
    """Time of a step with the fix."""
    gain: float
    low: float
    high: float
    """The gain in the worst and in the best case."""


@dataclass(frozen=True)
class PartTimes:
    host_ms: float
    device_ms: float
    kernels: float


@dataclass(frozen=True)
class Facts:
    """The facts about a step on a GPU that a prediction uses, in one case."""

    input_ms: float
    parts: dict[str, PartTimes]
    costs: dict[str, Component]
    gpu: DeviceRates
    """Ceilings of the device."""
    precision: str
    batch_bytes: float
    case: int = 0

    @property
    def kernel_ms(self) -> float:
        """Time of a small kernel inside a graph, including the gap after it."""
        return self.latency_ms("kernel")

    def latency_ms(self, name: str) -> float:
        return _at(getattr(self.gpu.launch, name), -self.case) / 1e6

    def memory_ms(self, moved: float) -> float:
        """Time to stream that many bytes."""
        return moved / (OF_MEMORY ** (1 - self.case) * _at(self.gpu.copy, self.case)) * 1e3

    def products_ms(self, flops: float, precision: str) -> float:
        return flops / (OF_PRODUCTS ** (1 - self.case) * _at(self.gpu.gemm[precision], self.case)) * 1e3


def too_busy(others: float | None) -> str | None:
    """Why nothing is judged beside so much other work, a share of the cores; None where it may be."""
    if others is None or others <= DISTURBED:
        return None
    return f"machine too busy, other work took {100 * others:.0f} % of the cores"


def drifted(before: Percentiles, after: Percentiles) -> str | None:
    """Why two measurements (p20, p50, p80) of the same plain step cannot be compared; None where they can.

    The medians must differ by more than the spread of both explains, and by more than `DRIFT`.
    """
    first, second = before.p50, after.p50
    spread = sum(figure.p80 - figure.p20 for figure in (before, after)) / 2
    if abs(first - second) <= max(spread, DRIFT * min(first, second)):
        return None
    return f"machine drifted, a step without any fix took {first:.3g} ms and later {second:.3g} ms"


def doubt(profile: StepBudget, others: float | None) -> str | None:
    """Why no gain is predicted from this profile, taken beside that share of other work; None where one is."""
    plain, clocked = plain_ms(profile), sum(part.ms.p50 for part in profile.components)
    # On a GPU clocked steps may wait for the device and parts come from a trace: only their shares are used.
    unlike = profile.device == "cpu" and not plain / UNLIKE <= clocked <= plain * UNLIKE
    drift = f"machine drifted, parts sum to {clocked:.3g} ms beside plain steps of {plain:.3g} ms"
    return too_busy(others) or (drift if unlike else None)


def _at(figure: Percentiles, case: int) -> float:
    return float(getattr(figure, PERCENTILES[case]))


def plain_ms(profile: StepBudget, case: int = 0) -> float:
    """The step without any clock."""
    return _at(profile.overhead.plain, case)


def scaled(profile: StepBudget, affected: Collection[str], case: int = 0) -> dict[str, float]:
    """ms of each part of the budget, such that all sum to the plain step."""
    parts = {part.name: part.ms for part in profile.components}
    times = {name: _at(ms, case if name in affected else -case) for name, ms in parts.items()}
    scale = plain_ms(profile, case) / sum(times.values())
    return {name: ms * scale for name, ms in times.items()}


def facts(
    profile: StepBudget,
    parts: list[TracedPart],
    peaks: Peaks,
    names: Collection[str] = (),
    case: int = 0,
) -> Facts | None:
    """From the budget (untraced times) and the parts of the trace (launches); None without ceilings of the device."""
    gpu = (peaks.gpu or {}).get(profile.device)
    if gpu is None:
        return None
    budget = {part.name: part for part in profile.components}
    traced = {part.name: part for part in parts if part.name != "data"}
    affected = {part for name in names for part in _affected(name, {**budget, **traced})}
    input_ms = scaled(profile, affected, case).get("data", 0.0)
    rest = plain_ms(profile, case) - input_ms
    host = {name: part.host_ms for name, part in traced.items()}
    for name in host.keys() & budget.keys():
        # Relative to its median.
        ms = budget[name].ms
        host[name] *= _at(ms, case if name in affected else -case) / ms.p50 if ms.p50 else 1.0
    # Tracing slows the host down, not the kernels. What neither explains is spread over all parts.
    untraced = min(1.0, rest / max(sum(host.values()), 1e-9))
    longest = max(sum(host.values()) * untraced, sum(part.device_ms or 0.0 for part in traced.values()))
    scale = rest / longest if longest else 0.0
    return Facts(
        input_ms=input_ms,
        parts={
            name: PartTimes(host[name] * untraced * scale, (part.device_ms or 0.0) * scale, part.kernels)
            for name, part in traced.items()
        },
        costs=budget,
        gpu=gpu,
        precision=profile.precision,
        batch_bytes=(budget["data"].bytes or 0) if "data" in budget else 0.0,
        case=case,
    )


def predict(step: Facts, names: Sequence[str]) -> float:
    """ms per step with these fixes, on a GPU."""
    parts = dict(step.parts)
    precision = "bfloat16" if "bfloat16" in names else "tf32" if "precision" in names else step.precision
    for name in names:
        for part in set(_affected(name, parts)) & parts.keys():
            parts[part] = _changed(step, name, part, parts[part], precision)
    input_ms, drawn_ms = step.input_ms, 0.0
    if "input" in names:
        drawn_ms = DRAW_KERNELS * step.kernel_ms + step.memory_ms(step.batch_bytes)
        # Outside a graph a drawn batch is cut to its number of ids, which waits for the device.
        outside = 20 * step.latency_ms("queue") + step.latency_ms("round_trip")
        input_ms = 0.0 if "graph" in names else outside
    elif "pinned" in names:
        slow, fast = (_at(step.gpu.transfer[f"host_to_device_{kind}"], 0) for kind in ("pageable", "pinned"))
        input_ms = max(0.0, input_ms - step.batch_bytes * (1 / slow - 1 / fast) * 1e3)
    device = sum(part.device_ms for part in parts.values())
    if "graph" in names:
        work = sum(max(part.device_ms, part.kernels * step.kernel_ms) for part in parts.values())
        return input_ms + drawn_ms + work + step.latency_ms("queue")
    return input_ms + max(sum(part.host_ms for part in parts.values()), device + drawn_ms)


def _affected(fix: str, parts: Iterable[str]) -> list[str]:
    """The parts that a fix makes faster."""
    if fix in ("input", "pinned"):
        return ["data"]
    return [part for part in parts if fix in KINDS and kind_of(part) == KINDS[fix]]


def _changed(step: Facts, fix: str, name: str, part: PartTimes, precision: str) -> PartTimes:
    """A part with a fix applied."""
    cost = step.costs.get(name)
    flops, moved = ((cost.flops or 0), (cost.bytes or 0)) if cost else (0, 0)
    if fix in ("precision", "bfloat16"):
        least = max(step.products_ms(flops, precision), part.kernels * step.kernel_ms)
        return PartTimes(part.host_ms, min(part.device_ms, least), part.kernels)
    if fix == "mlp":
        # Separate kernels for bias, ReLU and the bias gradient disappear; the products remain.
        kernels = part.kernels * 0.7
        saved = (part.kernels - kernels) * step.kernel_ms
        return PartTimes(part.host_ms * 0.7, max(part.device_ms * 0.5, part.device_ms - saved), kernels)
    kernels = min(part.kernels, FUSED_KERNELS.get((kind_of(name), phase_of(name)), 2))
    device = min(part.device_ms, max(step.memory_ms(moved), kernels * step.kernel_ms))
    all_parts = step.parts.values()
    launch_ms = sum(one.host_ms for one in all_parts) / max(1.0, sum(one.kernels for one in all_parts))
    return PartTimes(min(part.host_ms, kernels * launch_ms), device, kernels)


def on_a_cpu(profile: StepBudget, names: Collection[str], peaks: Peaks, cores: int, case: int = 0) -> float:
    """ms per step with these fixes, on a CPU. Of several that affect one part, the fastest counts."""
    parts = {part.name: part for part in profile.components}
    costly = [name for name, part in parts.items() if (part.flops or 0) > MUCH_ARITHMETIC]
    affected = {fix: costly if fix == "threads" else _affected(fix, parts) for fix in names}
    before = scaled(profile, {part for reached in affected.values() for part in reached}, case)
    after = dict(before)
    for fix, reached in affected.items():
        for name in reached:
            shared = before[name] * profile.threads / cores
            fixed = shared if fix == "threads" else _part_on_a_cpu(fix, before[name], parts[name], profile, peaks, case)
            if case < 0:
                fixed = before[name] - OF_CPU * (before[name] - fixed)
            after[name] = min(after[name], fixed)
    return sum(after.values())


def _part_on_a_cpu(fix: str, ms: float, part: Component, profile: StepBudget, peaks: Peaks, case: int) -> float:
    """ms of a part with a fix: at the ceilings of its number of threads, and at least one call of an operator.

    Where no work was counted, nothing says how fast it may become.
    """
    rates = peaks.other_threads.get(str(profile.threads), peaks)
    products = rates.gemm.get(profile.precision, rates.gemm["float32"])
    reached = 1.0 if case > 0 else OF_CPU
    arithmetic_ms = (part.flops or 0) / _at(products, case) * 1e3
    least = max(arithmetic_ms, _at(peaks.calls["elementwise"], -case) / 1e6)
    moved = part.bytes or 0
    if fix == "onednn":
        return max(least, arithmetic_ms / reached) if arithmetic_ms else ms
    if fix == "mlp":
        # The products remain. Passes for ReLU and bias gradients move about what the products do; the slower, the more
        # is saved.
        passes_ms = moved / (OF_CPU**2 / reached * _at(rates.copy, -case)) * 1e3
        return max(least, ms - passes_ms)
    moving_ms = moved / (reached * _at(rates.copy, case)) * 1e3
    return max(least, moving_ms) if arithmetic_ms or moved else ms


def prediction(
    profile: StepBudget,
    names: Sequence[str],
    parts: list[TracedPart] | None,
    peaks: Peaks,
) -> Prediction | None:
    """The step with these fixes; None on a GPU without a trace (`parts`) or without ceilings of the device."""
    times = []
    for case in (0, 1, -1):
        if profile.device == "cpu":
            times.append(on_a_cpu(profile, names, peaks, usable_cores(), case))
            continue
        step = facts(profile, parts, peaks, names, case) if parts is not None else None
        if step is None:
            return None
        times.append(predict(step, names))
    gains = [plain_ms(profile, case) / times[case] for case in (0, 1, -1)]
    return Prediction(times[0], gains[0], min(gains), max(gains))


def suggest(
    fixes: Sequence[Fix],
    profile: StepBudget,
    parts: list[TracedPart] | None,
    peaks: Peaks | None,
    doubt: str | None,
) -> tuple[list[Fix], list[Advice]]:
    """Rank fixes by their predicted gain, with an advice about each; none without ceilings. `doubt`: why no gain is
    predicted."""
    rows: list[tuple[Fix, Prediction, float]] = []
    for fix in fixes:
        if peaks is None:
            break
        names = [fix.name, *fix.implies]
        # Where launch overhead hides the gain of a fix, the prediction with a graph breaks the tie.
        alone, beside_graph = (prediction(profile, [*names, *more], parts, peaks) for more in ((), ("graph",)))
        if alone is not None and beside_graph is not None:
            rows.append((fix, alone, beside_graph.ms))
    rows.sort(key=lambda row: (round(row[1].ms, 3), row[2]))
    return [fix for fix, *_ in rows], [row_of(fix, prediction, doubt, profile) for fix, prediction, _ in rows]


def row_of(fix: Fix, prediction: Prediction | None, doubt: str | None, profile: StepBudget) -> Advice:
    """The advice about a fix in a profile, before it is tried."""
    prediction, times = None if doubt else prediction, scaled(profile, ())
    affected = _affected(fix.name, times)
    share = sum(times[name] for name in affected) / sum(times.values())
    listed = ", ".join(name.replace("_", " ") for name in affected)
    seen = f"{listed}: {share:.0%} of the step; {fix.title}" if listed else fix.title
    return Advice(
        fix.name,
        f"{seen[0].upper()}{seen[1:]}.",
        fix.switch,
        predicted_gain=prediction.gain if prediction else None,
        predicted_range=[prediction.low, prediction.high] if prediction else None,
        status="suggested" if prediction else "not judged",
        note=doubt and f"Not predicted: {doubt}",
    )


def larger_batch(profile: Profile, doubt: str | None) -> Advice | None:
    """Twice the batch, where much of a step takes as long whatever its batch; its gain is in samples per second."""
    fixed = sum(profile.shares.get(limit, 0.0) for limit in ("python", "dispatch", "launch"))
    if fixed < LARGE_PART:
        return None
    gains = [2 / (2 - share) for share in (fixed, fixed / 2)]
    return Advice(
        "batch",
        f"Python, operator calls and launches take {fixed:.0%} of the step, however large its batch is. The learning "
        "rate may need tuning.",
        f"--train.batch-size {2 * profile.batch_size}",
        predicted_gain=None if doubt else gains[0],
        predicted_range=None if doubt else [gains[1], 2.0],
        status="not judged" if doubt else "suggested",
        note=f"Not predicted: {doubt}" if doubt else IN_SAMPLES,
    )
