"""Advice: one change with the gain that this machine's ceilings predict. Rules over what was observed. Torch-free.

The range of a prediction is half of the saving, and all of the time that goes with the change. No rule, no advice.
Here are the rules about the host: its threads, its workers, copies, values that are read or reported in every step, and
calls of operators; `advice_rules` has those about the work of operators.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from msgspec.structs import replace

from ..units import number, time
from .attribution import divided_ms
from .ceilings import Ceilings
from .limit_kinds import Evidence, limits_by
from .peaks.other_work import DISTURBED
from .places import place_text
from .program_facts import optimizer_of
from .program_records import ProgramFacts
from .records import Advice, DividedOperator, Observed, Place

NOTICEABLE = 0.05
"""A change that saves a smaller share of the step is not mentioned."""
CALLING = 4.0
"""Python that takes up to this many times the cost of the calls between which it runs only prepares these calls."""
LEAST = 0.02
"""Of a step, what remains at least in the best case."""
COMPILED = 20
"""Calls that the guards of a compiled function cost as much as. A convention: it depends on the function."""
HANDED_OVER = 100
"""Calls of operators that passing a tensor between processes costs as much as, on either side. A convention,
from timings on one machine."""
_WRITES = {"print", "log", "save", "dump", "savefig", "write", "flush", "fsync", "collect", "item"}
"""Functions that a program calls to report, where nothing uses their result."""
_REPORTS = {
    "logger",
    "logging",
    "metric",
    "metrics",
    "auc",
    "auroc",
    "accuracy",
    "score",
    "scalar",
    "tqdm",
    "wandb",
    "mlflow",
}
"""Words, whole ones, in the names of what programs compute or write about their steps."""
_READS = re.compile(r"\.(?:item|cpu|tolist|numpy)\(")
"""Calls that wait for a value of the device."""


@dataclass(frozen=True)
class AdviceFacts:
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
        """What `calls` calls of operators cost, whatever they compute."""
        if self.ceilings is None:
            return 0.0
        rates = self.ceilings.calls
        return calls * (rates.get("index", rates["elementwise"]) if self.on_cpu else self.ceilings.kernel_ns) / 1e6

    def stream_ms(self, moved: float, *, adamw: bool = False) -> float:
        """Time to read or write `moved` bytes; in a fused AdamW at the rate that this reaches."""
        if self.ceilings is None:
            return 0.0
        rate = self.ceilings.stream if moved > self.ceilings.stream_cache_bytes else self.ceilings.cached
        return moved / ((adamw and self.ceilings.adamw) or rate) * 1e3

    def rows_ms(self, accesses: float, row_bytes: int, table_bytes: float) -> float:
        """Time of this many accesses of random rows of tables of this size."""
        if self.ceilings is None:
            return 0.0
        return accesses * self.ceilings.row_ns(row_bytes, cached=table_bytes <= self.ceilings.cache_bytes) / 1e6

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
        """Host time of queueing `kernels` kernels from Python, and of calls that queue none."""
        if self.ceilings is None or not self.counts_host:
            return 0.0
        return (kernels * self.ceilings.queue_ns + calls * self.ceilings.calls.get("view", 0.0)) / 1e6

    def calls_host_ms(self, rows: Iterable[DividedOperator]) -> float:
        """Host time of the kernels of some rows, with the Python around them."""
        kernels = max(1.0, sum(row.kernels for row in self.operators))
        calling = max(0.0, self.host_ms - (self.observed.long_python_ms or 0.0))
        return calling * sum(row.kernels for row in rows) / kernels if self.counts_host else 0.0

    def python_ms(self, rows: Iterable[DividedOperator]) -> float:
        """CPU: the time of Python that calls some operators, by their number."""
        calls = sum(row.python_calls for row in self.operators)
        return self.ms("python") * sum(row.python_calls for row in rows) / calls if calls and self.on_cpu else 0.0

    def _after(self, saved: float, host: float) -> float:
        """The step without some time, with more or less time of the host. A device needs the time of its work, and the
        host that of its own, beside what it waits for."""
        step = self.step_ms
        if not self.counts_host:
            return max(LEAST * step, step - saved)
        busy = step - self.ms(*limits_by(Evidence.THREAD, Evidence.IDLE))
        waits = max(0.0, step - self.host_ms - saved)
        return max(self.queue_ms(1), busy - saved, max(0.0, self.host_ms + host) + waits)

    def on_all_cores(self) -> tuple[float, float]:
        """Time of arithmetic and random rows, and what remains of it with a thread on every core."""
        goes = self.ms("compute", "latency")
        return goes, goes * min(1.0, self.facts.threads / max(1, self.facts.cores))

    def from_pinned_memory(self) -> tuple[float, float]:
        """Time of copies between host and device, and what those of memory that is not pinned take once it is."""
        goes = self.ms("transfer") - sum(row.limits.get("transfer", 0.0) for row in self.operators)
        link = self.ceilings.link if self.ceilings else 0.0
        return goes, self.observed.pageable_bytes / link * 1e3 if link else 0.0

    def in_precision(self, products: Iterable[DividedOperator], precision: str) -> tuple[float, float]:
        """Arithmetic time of some products, and what remains of it at the ceiling of another precision."""
        goes = needs = 0.0
        for row in products:
            ms = row.limits.get("compute", 0.0)
            goes += ms
            if self.ceilings is not None:
                needs += ms * min(1.0, self.ceilings.product(row.precision) / self.ceilings.product(precision))
        return goes, needs

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
        gain = self.gains(goes, needs, host)
        return replace(advice, predicted_gain=gain[1], predicted_range=[min(gain), max(gain)])

    def gains(self, goes: float, needs: float, host: float) -> list[float]:
        """The gain with half of the saving, with the saving, and where the changed way needs nothing."""
        cases = ((goes - needs) / 2, host / 2), (goes - needs, host), (goes, host)
        return [self.step_ms / self._after(*case) for case in cases]


def best(suggestions: Iterable[Advice | None]) -> Advice | None:
    return max((one for one in suggestions if one), key=lambda advice: advice.predicted_gain or 0.0, default=None)


def names(rows: Iterable[DividedOperator]) -> str:
    names = list(dict.fromkeys(row.name.removeprefix("aten::") for row in rows))
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def threads(evidence: AdviceFacts) -> Advice | None:
    """Fewer threads than cores, or more."""
    now, cores = evidence.facts.threads, evidence.facts.cores
    if not evidence.on_cpu or not now or not cores or now == cores:
        return None
    change = f"torch.set_num_threads({cores})"
    if now > cores:
        seen = f"Operators use {now} threads on {cores} cores: threads of one operator wait for each other."
        return Advice("threads", seen, change, settings={"threads": cores})
    goes, needs = evidence.on_all_cores()
    seen = f"Operators use {now} of {cores} cores; arithmetic and random rows take {evidence.cost(goes)}."
    return evidence.advice("threads", seen, change, goes, needs, threads=cores)


def loader(evidence: AdviceFacts) -> Advice | None:
    """Batches that are made while the step waits, or by more processes than there are cores."""
    facts, waited = evidence.facts.loader, evidence.ms("input")
    cores = evidence.facts.cores
    if facts is None or not cores:
        return None
    if facts.workers > cores:
        seen = f"The DataLoader has {facts.workers} workers for {cores} cores."
        return Advice("workers", seen, f"DataLoader(..., num_workers={cores})", settings={"workers": cores})
    rest = evidence.step_ms - waited
    # A worker computes with one thread, and needs no core while it sleeps or waits for a disk.
    cores_used = evidence.observed.input_cores
    making = waited * max(1.0, cores_used) if not facts.workers else evidence.step_ms * facts.workers
    if not facts.workers:
        handing = (
            HANDED_OVER * facts.tensors * (evidence.ceilings.calls["elementwise"] / 1e6 if evidence.ceilings else 0.0)
        )
        making, rest = making + handing, rest + handing
    workers = max(1, min(cores - 1 or 1, round(making / max(rest, 1e-9) + 0.5)))
    # A thread that waits for a core holds up all others of its operator, so each gets a core beside the workers.
    before = evidence.facts.threads if evidence.on_cpu else 1
    threads = max(1, min(before, cores - round(workers * min(1.0, cores_used))))
    operators = sum(row.ms - row.limits.get("dispatch", 0.0) for row in evidence.operators)
    step = rest + operators * (before / threads - 1)
    after = max(step, making / workers, (making * min(1.0, cores_used) + step * threads) / cores)
    left = after - (evidence.step_ms - waited)
    made = f"by {facts.workers} workers" if facts.workers else "in the process of the step"
    seen = f"The step waits for its batch, which is made {made}: {evidence.cost(waited)}."
    change = f"DataLoader(..., num_workers={workers}, persistent_workers=True)"
    settings = {"workers": workers}
    if threads < before:
        change += f"; torch.set_num_threads({threads})"
        settings["threads"] = threads
    return evidence.advice("workers", seen, change, waited, left, **settings)


def copies(evidence: AdviceFacts) -> Advice | None:
    """Copies to the device that nothing hides."""
    if evidence.on_cpu:
        return None
    goes, needs = evidence.from_pinned_memory()
    facts = evidence.facts.loader
    pinned = not evidence.observed.pageable_bytes and facts is not None and facts.pinned
    change = "batch.to(device, non_blocking=True)" + ("" if pinned else " from DataLoader(..., pin_memory=True)")
    seen = f"Copies between host and device that no computation hides take {evidence.cost(goes)}."
    return evidence.advice("pinned", seen, change, goes, needs, **({"pinned": True} if facts and not pinned else {}))


def rows_on_the_host(evidence: AdviceFacts) -> Advice | None:
    """Rows of tables that a device reads from the memory of the host."""
    rows = [row for row in evidence.operators if row.host_bytes]
    goes, moved = sum(row.limits.get("transfer", 0.0) for row in rows), sum(row.host_bytes for row in rows)
    seen = f"{names(rows)} read {number(moved)}B of rows from host memory: {evidence.cost(goes, rows)}." if rows else ""
    change = "EmbeddingLocation.DEVICE where the table fits, else MANAGED_CACHING with a larger cache_load_factor"
    return evidence.advice("host rows", seen, change, goes, evidence.stream_ms(moved))


def waits_for_values(evidence: AdviceFacts) -> Advice | None:
    """Values that the host reads from the device in every step."""
    goes = evidence.ms("sync")
    reads = ("aten::_local_scalar_dense", "aten::item", "aten::nonzero")
    rows = [row for row in evidence.operators if row.name in reads]
    by = names(rows) or ".item() or .cpu()"
    seen = f"The device is idle while the host reads a value, by {by}: {evidence.cost(goes, rows)}."
    place = next((row.place for row in rows if row.place), None)
    lines = (row for row in evidence.observed.places if place and row.place.file == place.file)
    source = next((row.source for row in lines if place and row.place.line == place.line), "")
    where = f": {place_text(place)}" if place else ""
    later = f"if step % 100 == 0: {source}"
    change = later if _is_report(source) else f"read the value in every 100th step only{where}"
    return evidence.advice("item", seen, change, goes)


def reported_values(evidence: AdviceFacts) -> Advice | None:
    """Metrics, logging and checkpoints in every step, where the line that holds their time is known."""
    observed, lines = evidence.observed, defaultdict[tuple[Place, str], dict[str, float]](dict)
    for row in observed.places:
        ms = row.share * evidence.ms(row.limit)
        if row.limit == "python" and observed.long_python_ms is not None:
            # Samples count short stretches of Python for the long one after them.
            ms = min(ms, observed.long_python_ms)
        if row.limit in ("python", "blocked"):
            lines[row.place, row.source][row.limit] = ms
    suggestions = []
    for (place, source), times in lines.items():
        if _is_report(source):
            waited = evidence.ms("sync") if _READS.search(source) else 0.0
            host = sum(times.values())
            seen = f"{place_text(place)} computes or writes something in every step: {evidence.cost(host + waited)}."
            change = f"if step % 100 == 0: {source}"
            goes = waited if evidence.counts_host else waited + host
            suggestions.append(evidence.advice("reports", seen, change, 0.99 * goes, 0.0, -0.99 * host))
    return best(suggestions)


def _is_report(source: str) -> bool:
    """Whether a line is a statement of its own that reports about the step: a call whose result nothing uses, or a
    metric or a value of the device that gets a name. What a line returns or computes for the step stays."""
    try:
        (statement,) = ast.parse(source.strip()).body
    except (SyntaxError, ValueError):
        return False
    if not isinstance(statement, ast.Expr | ast.Assign | ast.AnnAssign | ast.AugAssign):
        return False
    calls = [node.func for node in ast.walk(statement) if isinstance(node, ast.Call)]
    last = {func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "") for func in calls}
    words = {word for func in calls for word in re.split(r"\W|_", ast.unparse(func))}
    if isinstance(statement, ast.Expr):
        return bool(last & _WRITES or words & (_REPORTS | _WRITES))
    return "item" in last or bool(words & {"auc", "auroc", "accuracy", "score"})


def small_operators(evidence: AdviceFacts) -> Advice | None:
    """Many operators that compute little."""
    if evidence.facts.compiled:
        return None
    calls = sum(row.kernels or row.calls for row in evidence.operators)
    goes = evidence.ms("dispatch") if evidence.on_cpu else evidence.ms("launch", "python", "dispatch")
    what = "operator calls" if evidence.on_cpu else "kernels, for which the device waits or which are empty"
    seen = f"{calls:,.0f} {what} take {evidence.cost(goes)}."
    stay = ("product", "index", "embedding_bag")
    products_and_lookups = sum(row.calls for row in evidence.operators if row.kind in stay)
    # Element-wise operators on cached data are fused: of all their passes one remains.
    small = (row for row in evidence.operators if row.limits.get("dispatch") and row.limits.get("cache"))
    fused = [row for row in small if row.kind == "elementwise" and not optimizer_of(row.part)]
    passes = sum(row.limits["cache"] for row in fused)
    python, python_calls = evidence.ms("python"), sum(row.python_calls for row in evidence.operators)
    call_ms = evidence.ceilings.calls["elementwise"] / 1e6 if evidence.ceilings else 0.0
    # Of the interpreter, the time between operators, where it does little else than calling them.
    goes += passes + (python if evidence.on_cpu and python <= CALLING * python_calls * call_ms else 0.0)
    left = COMPILED * evidence.step_ms / max(1.0, calls) if evidence.on_cpu else 0.0
    needs = evidence.calls_ms(products_and_lookups) + left + passes / max(1.0, sum(row.calls for row in fused))
    change = "model.compile()" if evidence.on_cpu else 'model.compile(mode="reduce-overhead")  # a CUDA graph'
    settings = {"compile": True} if evidence.facts.has_model else {}
    if evidence.counts_host:
        # A graph is one call of the host, whatever it holds; the optimizer stays outside.
        goes = evidence.ms("dispatch") + passes
        graph = [row for row in evidence.operators if not optimizer_of(row.part)]
        host = evidence.queue_ms(1, COMPILED) - evidence.calls_host_ms(graph)
        return evidence.advice("compile", seen, change, goes, min(goes, needs), host, **settings)
    return evidence.advice("compile", seen, change, goes, min(goes, needs), **settings)


def larger_batch(evidence: AdviceFacts) -> Advice | None:
    """What a step costs whatever its batch, shared by twice the samples."""
    size = evidence.facts.loader.batch_size if evidence.facts.loader else None
    fixed = evidence.ms("dispatch", "python", "launch")
    if size is None or fixed < 0.3 * evidence.step_ms:
        return None
    seen = f"Python, operator calls and launches take {evidence.cost(fixed)}, however large the batch ({size:,})."
    change = f"DataLoader(..., batch_size={2 * size})  # more samples per second; the learning rate may need tuning"
    settings = {"batch_size": 2 * size}
    if evidence.counts_host:
        return evidence.advice(
            "batch", seen, change, evidence.ms("dispatch") / 2, 0.0, -evidence.host_ms / 2, **settings
        )
    # At best nothing depends on the batch.
    whole = evidence.step_ms / 2
    return evidence.advice("batch", seen, change, whole, whole - fixed / 2, **settings)


RULES = (
    threads, loader, copies, rows_on_the_host, waits_for_values, reported_values, small_operators, larger_batch,
)  # fmt: skip
