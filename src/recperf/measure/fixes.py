"""Predicts what switching on a fix of a workload gains: from the operators of observed steps, by the kind of work of
the span that they belong to. What advice about any step predicts too, `AdviceFacts` predicts for both. Torch-free.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from ..machine import usable_cores
from .advice import AdviceFacts
from .advice import larger_batch as larger_batch_of
from .ceilings import ceilings_of_profile
from .peaks.other_work import DISTURBED
from .peaks.records import Peaks
from .profile_records import Component, WorkloadFigures
from .program_facts import optimizer_of
from .program_records import LoaderFacts, ProgramFacts
from .records import Advice, DividedOperator, Explanation, Observed, Percentiles
from .spans import kind_of

OF_CEILING = 0.5
"""Share of a ceiling that fused kernels reach. A convention."""
DRIFT = 0.15
"""Relative change of the plain step above which the machine may have drifted."""
DRAW_KERNELS = 5
"""Kernels that draw a batch on the device."""
FUSED_KERNELS = 2
"""Kernels of a fused span."""
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


class Predictor:
    """Predicts fixes of a profiled step. `doubt` is why no gain is predicted, None where it is."""

    def __init__(
        self,
        seen: Observed,
        profile: Explanation,
        figures: WorkloadFigures,
        peaks: Peaks | None,
        doubt: str | None = None,
    ) -> None:
        loader = LoaderFacts(0, False, figures.batch_size)
        facts = ProgramFacts(threads=figures.threads, cores=usable_cores(), loader=loader)
        self.evidence = AdviceFacts(seen, profile.operators, ceilings_of_profile(figures, peaks), facts)
        self.batch_size, self.components = figures.batch_size, figures.components
        self.doubt = doubt or too_busy(seen.other_work)

    def suggest(self, fixes: Sequence[Fix]) -> tuple[list[Fix], list[Advice]]:
        """Fixes by their predicted gain, with an advice about each; none without ceilings or observed operators."""
        if self.evidence.ceilings is None or not self.evidence.operators:
            return [], []
        ranked = []
        for fix in fixes:
            saving = self._saving([fix.name, *fix.implies])
            # Where launches hide the gain of a fix, the time of the device that it saves breaks the tie.
            ranked.append((-round(self.evidence.gains(*saving)[1], 3), saving[1] - saving[0], fix))
        ordered = [fix for *_, fix in sorted(ranked, key=lambda row: row[:2])]
        return ordered, [self.row(fix, [fix.name, *fix.implies]) for fix in ordered]

    def row(self, fix: Fix, names: Sequence[str]) -> Advice:
        """The advice about a fix, before it is tried; `names` are all fixes that it switches on."""
        evidence, rows = self.evidence, self._rows(fix.name)
        # The wait for input is no operator's.
        goes = evidence.ms("input") if fix.name == "input" else sum(row.ms for row in rows)
        listed = ", ".join(dict.fromkeys((row.part or "").replace("_", " ") for row in rows))
        share = goes / evidence.step_ms if evidence.step_ms else 0.0
        seen = f"{listed or 'input'}: {share:.0%} of the step; {fix.title}" if goes else fix.title
        advice = Advice(fix.name, f"{seen[0].upper()}{seen[1:]}.", fix.switch)
        if self.doubt or evidence.ceilings is None:
            return replace(advice, status="not judged", note=f"Not predicted: {self.doubt}" if self.doubt else None)
        low, gain, high = evidence.gains(*self._saving(names))
        return replace(advice, predicted_gain=gain, predicted_range=[min(low, gain), max(gain, high)])

    def larger_batch(self) -> Advice | None:
        """Twice the batch, where much of a step takes as long whatever its batch; its gain is in samples per second."""
        advice = larger_batch_of(self.evidence) if self.evidence.ceilings else None
        if advice is None:
            return None
        advice = replace(advice, change=f"--train.batch-size {2 * self.batch_size}", settings={},
                         note="In samples per second")  # fmt: skip
        if not self.doubt:
            return advice
        unknown = {"predicted_gain": None, "predicted_range": None, "note": f"Not predicted: {self.doubt}"}
        return replace(advice, status="not judged", **unknown)

    def _rows(self, fix: str) -> list[DividedOperator]:
        """The operators that a fix makes faster."""
        return [row for row in self.evidence.operators if fix in KINDS and _kind(row) == KINDS[fix]]

    def _saving(self, names: Collection[str]) -> tuple[float, float, float]:
        """The time that goes with some fixes, what the changed way needs, and what the host does more, in ms."""
        goes, needs, host = (sum(parts) for parts in zip(*map(self._change, names)))
        if "graph" in names and self.evidence.counts_host:
            host = self._change("graph")[2]
        return goes, needs, host

    def _change(self, fix: str) -> tuple[float, float, float]:
        evidence, ceilings, rows = self.evidence, self.evidence.ceilings, self._rows(fix)
        assert ceilings is not None
        if fix == "graph":
            # A graph is one call of the host, whatever it holds.
            return 0.0, 0.0, evidence.queue_ms(1) - evidence.calls_host_ms(evidence.operators)
        if fix == "input":
            drawn = evidence.stream_ms(sum(part.bytes or 0 for part in self.components if part.name == "data"))
            return evidence.ms("input", "transfer"), drawn + evidence.calls_ms(DRAW_KERNELS), 0.0
        if fix == "pinned":
            return *evidence.from_pinned_memory(), 0.0
        if fix == "threads":
            return *evidence.on_all_cores(), 0.0
        products = [row for row in rows if row.flops]
        if fix in ("precision", "bfloat16"):
            return *evidence.in_precision(products, "tf32" if fix == "precision" else "bfloat16"), 0.0
        if fix == "onednn":
            goes = sum(row.ms for row in products)
            least = sum(row.flops / ceilings.product(row.precision) for row in products) * 1e3
            return goes, min(goes, least / OF_CEILING), 0.0
        if fix == "mlp":
            # Separate passes for bias, ReLU and the bias gradient disappear; the products remain.
            rows = [row for row in rows if not row.flops]
        goes = sum(row.ms for row in rows) + evidence.python_ms(rows)
        parts = [] if fix == "mlp" else [part for part in self.components if kind_of(part.name) == KINDS.get(fix)]
        host = evidence.queue_ms(FUSED_KERNELS * len(parts)) - evidence.calls_host_ms(rows)
        return goes, min(goes, self._fused_ms(parts)), min(0.0, host)

    def _fused_ms(self, parts: list[Component]) -> float:
        """What fused kernels of some parts take for their counted work, and at least for being called."""
        moving = self.evidence.stream_ms(sum(part.bytes or 0 for part in parts)) / OF_CEILING
        return max(moving, self.evidence.calls_ms(FUSED_KERNELS * len(parts)))


def _kind(row: DividedOperator) -> str:
    """The kind of work of an operator's span."""
    if optimizer_of(row.part):
        return "dense update"
    name, _, backward = (row.part or "").partition(", ")
    return kind_of(f"{name}_{backward}" if backward else name)
