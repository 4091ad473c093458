"""Advice: one change with the gain that this machine's ceilings predict. Rules over what was observed. Torch-free.

The range of a prediction is half of the saving, and all of the time that goes with the change. No rule, no advice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from msgspec.structs import replace

from ..units import time
from .attribution import divided_ms
from .ceilings import Ceilings
from .peaks.other_work import DISTURBED
from .places import place_text
from .program_facts import optimizer_of
from .records import Advice, DividedOperator, Observed, ProgramFacts

NOTICEABLE = 0.05
"""A change that saves a smaller share of the step is not mentioned."""
CALLING = 4.0
"""Python that takes up to this many times the cost of the calls between which it runs only prepares these calls."""
LEAST = 0.02
"""Of a step, what remains at least in the best case."""


@dataclass(frozen=True)
class Evidence:
    """What rules look at."""

    observed: Observed
    operators: list[DividedOperator]
    """Rows of operators with their time by limit."""
    ceilings: Ceilings | None
    facts: ProgramFacts

    @cached_property
    def step_ms(self) -> float:
        return divided_ms(self.observed.waits, self.observed.operators)

    @property
    def on_cpu(self) -> bool:
        return self.observed.device == "cpu"

    def ms(self, *limits: str) -> float:
        """Time of a step under some limits."""
        waits = sum(self.observed.waits.get(limit, 0.0) for limit in limits)
        return waits + sum(row.limits.get(limit, 0.0) for row in self.operators for limit in limits)

    def optimizer_rows(self, kind: str) -> list[DividedOperator]:
        return [row for row in self.operators if optimizer_of(row.part) == kind]

    def optimizer_python(self, kind: str) -> float:
        """Time of Python in an optimizer: most of it releases gradients and results between operators."""
        return sum(ms for part, ms in self.observed.optimizer_python.items() if part.startswith(f"optimizer {kind}."))

    def calls_ms(self, calls: float) -> float:
        """What so many calls of operators cost, whatever they compute."""
        if self.ceilings is None:
            return 0.0
        rates = self.ceilings.calls
        return calls * (rates.get("index", rates["elementwise"]) if self.on_cpu else self.ceilings.kernel_ns) / 1e6

    def stream_ms(self, moved: float, *, adamw: bool = False) -> float:
        """Time to pass over so many bytes; in a fused AdamW at the rate that this reaches."""
        if self.ceilings is None:
            return 0.0
        rate = self.ceilings.stream if moved > self.ceilings.stream_knee else self.ceilings.cached
        return moved / ((adamw and self.ceilings.adamw) or rate) * 1e3

    @property
    def calling_ms(self) -> float:
        """Time of the interpreter between operators, where it does little else than calling them."""
        calls, python = sum(row.python_calls for row in self.operators), self.ms("python")
        if self.ceilings is None or python > CALLING * calls * self.ceilings.calls["elementwise"] / 1e6:
            return 0.0
        return python

    def product_ms(self, row: DividedOperator) -> float:
        """Time of a product at its ceiling."""
        return row.flops / self.ceilings.product(row.precision) * 1e3 if self.ceilings else 0.0

    def rows_ms(self, accesses: float, row_bytes: int, table_bytes: float) -> float:
        """Time of so many accesses of random rows of tables of this size."""
        if self.ceilings is None:
            return 0.0
        return accesses * self.ceilings.row_ns(row_bytes, cached=table_bytes <= self.ceilings.knee) / 1e6

    @property
    def busy(self) -> str:
        """Why operators took longer than they do alone; empty where they did not."""
        others = self.observed.other_work or 0.0
        return f"other work used {others:.0%} of the cores" if others > DISTURBED and self.on_cpu else ""

    def cost(self, ms: float, rows: Iterable[DividedOperator] = ()) -> str:
        """A time, its share of the step, and where the user's program calls the operators, if that is known."""
        place = next((f" ({place_text(row.place)})" for row in rows if row.place), "")
        return f"{time(ms)}, {ms / self.step_ms if self.step_ms else 0:.0%} of the step{place}"

    @property
    def counts_host(self) -> bool:
        """Whether it is known what calling an operator costs the host of a device."""
        return not self.on_cpu and self.ceilings is not None and self.ceilings.queue_ns > 0

    @cached_property
    def host_ms(self) -> float:
        """GPU: time that the host needs for a step: as measured, and no less than queueing its kernels costs."""
        waits = self.ms("launch", "python", "blocked")
        least = self.queue_ms(sum(row.kernels for row in self.operators))
        return min(self.step_ms, max(self.observed.host_ms or waits, least))

    def queue_ms(self, kernels: float, calls: float = 0.0) -> float:
        """Host time of queueing so many kernels from Python, and of calls that queue none."""
        if self.ceilings is None or not self.counts_host:
            return 0.0
        return (kernels * self.ceilings.queue_ns + calls * self.ceilings.calls.get("view", 0.0)) / 1e6

    def calls_host_ms(self, rows: Iterable[DividedOperator]) -> float:
        """Host time of the kernels of some rows, with the Python around them."""
        kernels = max(1.0, sum(row.kernels for row in self.operators))
        calling = max(0.0, self.host_ms - (self.observed.long_python_ms or 0.0))
        return calling * sum(row.kernels for row in rows) / kernels if self.counts_host else 0.0

    def _after(self, saved: float, host: float) -> float:
        """The step without some time, with more or less time of the host. A device needs the time of its work, and the
        host that of its own, beside what it waits for."""
        step = self.step_ms
        if not self.counts_host:
            return max(LEAST * step, step - saved)
        busy = step - self.ms("launch", "python", "blocked", "sync", "input")
        waits = max(0.0, step - self.host_ms - saved)
        return max(self.queue_ms(1), busy - saved, max(0.0, self.host_ms + host) + waits)

    def advice(
        self, name: str, seen: str, change: str, goes: float, needs: float = 0.0, host: float = 0.0, **settings: Any
    ) -> Advice | None:
        """Advice, if what goes less what the changed way needs is a noticeable part of the step; `host`: what the
        host of a device has to do more than now, in ms."""
        saved, step = goes - needs, self.step_ms
        if not step or step - self._after(saved, host) < NOTICEABLE * step:
            return None
        advice = Advice(name, seen, change, settings=settings)
        if self.ceilings is None:
            return advice
        gain = [step / self._after(*part) for part in ((saved / 2, host / 2), (saved, host), (goes, host))]
        return replace(advice, predicted_gain=gain[1], predicted_range=[min(gain), max(gain)])


def best(suggestions: Iterable[Advice | None]) -> Advice | None:
    return max((one for one in suggestions if one), key=lambda advice: advice.predicted_gain or 0.0, default=None)


def names(rows: Iterable[DividedOperator]) -> str:
    names = list(dict.fromkeys(row.name.removeprefix("aten::") for row in rows))
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
