"""What follows from the figures of a step: its limit, how sure that is and why; its roofline and embedding tables.
Only counting ids needs torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ..errors import DataError
from ..units import percent, size, time
from .attribution import BELIEVED
from .ceilings import Ceilings, ceilings_of_profile
from .limit_kinds import DOES_NOT_APPLY, LIMITS, Evidence, limits_by
from .peaks.other_work import DISTURBED
from .peaks.records import Peaks
from .places import place_text
from .profile_records import (
    Communication,
    Component,
    EmbeddingShare,
    Missing,
    RooflinePoint,
    StepBudget,
    TableLookups,
    WorkloadFigures,
)
from .records import (
    Advice,
    Attribution,
    DividedOperator,
    Experiment,
    Observed,
    Percentiles,
    PlaceTime,
    StepMemory,
    Verdict,
)
from .trace.read import summed

if TYPE_CHECKING:
    from torch import Tensor

UNCLEAR, NOT_JUDGED = "unclear", "not judged"
UNDECIDED = (UNCLEAR, NOT_JUDGED)
CLEAR = 0.3
"""The largest share must reach this to be a verdict."""
FREES = 0.02
"""Of the peak of memory: a change that frees less makes no difference."""
FILLED = 0.5
"""Share of the memory that is there from which a terminal says what fills it."""
LEAD = 0.2
"""By how much it must lead the second for a high confidence."""
NOTICEABLE = 0.1
"""Smaller shares are not mentioned."""
DRIFT = 1.5
"""Traced steps may take this many times the plain ones, or the other way round, for a high confidence."""


def decide(
    attribution: Attribution,
    observed: Observed,
    ceilings: Ceilings | None,
    experiments: list[Experiment] | None = None,
    places: Sequence[PlaceTime] = (),
) -> Verdict:
    """The largest share is the verdict."""
    shares = attribution.shares
    ordered = sorted(shares, key=lambda limit: -shares[limit])
    first, second = ordered[0], ordered[1]
    doubts = _doubts(shares, first, second, observed, ceilings)
    by_name = sum(row.limits.get(first, 0.0) for row in attribution.operators if row.by_name)
    if first != "dispatch" and by_name > 0.5 * sum(row.limits.get(first, 0.0) for row in attribution.operators):
        doubts.append("kernels of a CUDA graph have no counted work and are classed by their names")
    doubts += [*_contradictions(experiments or []), *_of_place([row for row in places if row.limit == first])]
    confidence = ("high", "medium", "low")[min(2, len(doubts))]
    because = [
        _sentence(limit, attribution, observed, ceilings) for limit in ordered[:3] if shares[limit] >= NOTICEABLE
    ]
    if experiments is not None and all(row.outcome == "not run" for row in experiments):
        because.append("No experiment: the step was not run again.")
    others = observed.other_work or 0.0
    if others > DISTURBED and not _preemption_removed(observed, first):
        known = [f"{limit} {percent(shares[limit])}" for limit in limits_by(Evidence.THREAD)]
        reason = (
            f"Other work used {others:.0%} of the cores. Measure again while nothing else runs, or with one thread. "
            f"Shares of the step that do not depend on it: {', '.join(known)}."
        )
        return Verdict(NOT_JUDGED, shares[first], "low", [reason], doubts, None)
    if observed.waits.get("unknown") and first == "operator":
        reason = f"No step was traced: what takes {shares[first]:.0%} of the step is not known. A longer run may help."
        return Verdict(UNCLEAR, shares[first], "low", [reason, *because[1:]], doubts, None)
    if shares[first] < CLEAR:
        reason = (
            f"No limit reaches {CLEAR:.0%} of the step. The nearest are {first} ({shares[first]:.0%}) and "
            f"{second} ({shares[second]:.0%})."
        )
        return Verdict(UNCLEAR, shares[first], "low", [reason, *because], doubts, second)
    return Verdict(first, shares[first], confidence, because, doubts, second if shares[second] >= NOTICEABLE else None)


def _preemption_removed(observed: Observed, limit: str) -> bool:
    """Whether the share of a limit was measured without the time in which other work had the cores: by the clock of
    a GPU, by those of the only thread that ran operators, or, of Python, by its thread's. Other work makes the other
    shares larger, so that Python would lead without it too."""
    if observed.device != "cpu":
        return limit in limits_by(Evidence.COPIES, Evidence.WORK)
    return (limit == "python" or observed.threads == 1) and observed.preempted is not None


def _contradictions(experiments: list[Experiment]) -> list[str]:
    """The doubts that experiments raise: one for each that disagrees, or one where none of those that ran agrees."""
    ran = [row for row in experiments if row.outcome != "not run"]
    doubts = [
        f'the experiment "{row.name}" disagrees: expected {row.expected}, measured {row.measured}'
        for row in ran
        if row.outcome == "disagrees"
    ]
    if ran and not doubts and not any(row.outcome == "agrees" for row in ran):
        doubts = ["no experiment told this limit from the next one"]
    return doubts


def _of_place(places: Sequence[PlaceTime]) -> list[str]:
    """The doubt that another line might come first in a repeat; `places` are those of the limit, largest first."""
    if not places or places[0].low is None or places[0].high is None:
        return []
    first = places[0]
    width = (first.high or 0.0) - (first.low or 0.0)
    text = f"{place_text(first, short=True)} takes between {first.low:.0%} and {first.high:.0%} of the step"
    rivals = [row for row in places[1:] if (row.high or 0.0) > (first.low or 0.0)]
    if width > NOTICEABLE and rivals:
        return [f"{text}, {place_text(rivals[0], short=True)} perhaps more"]
    return [text] if width > LEAD else []


def ranks_sentence(communication: Communication | None) -> str:
    """The slowest rank and what waiting costs; empty for a single rank."""
    if communication is None or not communication.each:
        return ""
    own = {row.rank: row.own_ms for row in communication.each}
    slowest = own.pop(communication.slowest)
    others = sum(own.values()) / len(own)
    exposed = percent(communication.exposed_share)
    margin = ", by less than 5%" if slowest < 1.05 * others else ""
    split = ""
    if (late := communication.late_ms) is not None:
        split = f": {time(late)} for a late rank, {time(communication.moving_ms or 0.0)} for data transfer"
    return (
        f"Rank {communication.slowest} of {communication.ranks} is the slowest{margin}: its own work takes "
        f"{time(slowest)} per step, that of the others {time(others)}. Exposed communication: ranks wait in "
        f"collectives for {exposed} of a step, {time(communication.exposed_ms)}{split}."
        + (f" {communication.why}." if communication.why else "")
    )


def is_filled(memory: StepMemory) -> bool:
    return memory.peak_bytes > FILLED * memory.capacity_bytes


def memory_sentence(memory: StepMemory) -> str:
    """What fills the memory, and the largest batch that fits."""
    parts = sorted(memory.parts.items(), key=lambda item: -item[1])[:3]
    listed = ", ".join(f"{name} {size(count)} ({percent(count / memory.peak_bytes)})" for name, count in parts)
    asked = next((row for row in memory.lines if row.part == "asked for"), None)
    if asked is not None:
        where = f"{place_text(asked)} asked for {size(asked.bytes)}"
        return (
            f"Out of memory of the {memory.device}: {where}, {size(memory.capacity_bytes)} are there. Of all: {listed}."
        )
    text = f"Memory of the {memory.device}: {size(memory.peak_bytes)} at the peak of a step, of it {listed}."
    if memory.largest_batch and memory.batch and memory.largest_batch > 100 * memory.batch:
        text += " It does not limit the batch."
    elif memory.largest_batch and memory.batch and memory.largest_batch > memory.batch:
        note = f"; {memory.batch_note}" if memory.batch_note else ""
        if memory.fitting_batch:
            text += f" A batch of {memory.fitting_batch:,} fits, {memory.batch:,} now (tried{note})."
        else:
            text += f" A batch of about {memory.largest_batch:,} would fit, {memory.batch:,} now "
            text += f"(predicted, not tried{note})."
    text += _freeing(memory.advice)
    if memory.growth:
        row = memory.growth[0]
        text += f" It grows by {size(row.bytes)} a step: {place_text(row, short=True)}."
    return text


def _freeing(advice: list[Advice]) -> str:
    """What would free most, as trials have shown it, and what was not tried."""
    text, tried = "", [one for one in advice if one.measured_peak]
    best = max(tried, key=freed, default=None)
    if best is not None and best.measured_peak and freed(best):
        before, after = best.measured_peak
        gain = best.measured_gain or 1.0
        pace = f"a step takes {1 / gain:.2f} times as long" if gain < 1 else f"steps are {gain:.2f} times as fast"
        kept = f", {best.note}" if best.note else ""
        moved = f"{size(before)} becomes {size(after)}"
        text = f" Of what was tried this frees most, {moved}: {best.change} ({pace}{kept})."
    elif tried:
        text = f" Nothing that was tried frees more than {percent(FREES)}: {', '.join(one.name for one in tried)}."
    untried = [one.name + (f" ({one.note})" if one.note else "") for one in advice if not one.measured_peak]
    return text + (f" Not tried: {', '.join(untried)}." if untried else "")


def freed(one: Advice) -> int:
    """Bytes that a change frees at the peak, as far as a trial has shown it; 0 where that is no difference."""
    if one.measured_peak is None or one.status == "rejected":
        return 0
    before, after = one.measured_peak
    return before - after if before - after >= FREES * before else 0


def tables_sentence(figures: WorkloadFigures) -> str:
    """What moved between the tiers of tables and how long steps waited for it; empty where they lie on the device."""
    tables = figures.tables
    if tables is None:
        return ""
    moved, seconds = tables.fetched_bytes + tables.written_back_bytes, tables.placing_ms / 1e3
    rate = f", {size(moved / seconds)}/s" if moved and seconds else ""
    step = figures.step_ms.p50
    place = {"host": "host memory", "file": "files"}[tables.placement]
    text = (
        f"Tables in {place}: the cache of {size(tables.cache_bytes)} held {tables.hit_rate:.1%} of the "
        f"{tables.rows:,.0f} rows of a batch; {size(tables.fetched_bytes)} a step were fetched and "
        f"{size(tables.written_back_bytes)} written back in {time(tables.placing_ms)}{rate}, beside the step, "
        f"which waited {time(tables.exposed_ms)} for its batch."
    )
    if min(tables.exposed_ms, tables.placing_ms) > NOTICEABLE * step:
        text += " A larger cache (--tables.device-bytes, on a CPU --tables.resident) would move less."
    if process := tables.process:
        own, files, peak = (size(process[name]) for name in ("own", "files", "peak"))
        text += f" The process has {own} of its own in memory and {files} of libraries; at its peak it had {peak}."
    return text


def _doubts(
    shares: dict[str, float], first: str, second: str, observed: Observed, ceilings: Ceilings | None
) -> list[str]:
    doubts = []
    step = observed.step_ms
    spread = (step.p80 - step.p20) / (2 * step.p50) if step.p50 else 0.0
    lead = shares[first] - shares[second] - spread * shares[first]
    if lead < LEAD:
        doubts.append(
            f"{first} leads {second} by only {shares[first] - shares[second]:.2f} of a step; steps vary by {spread:.0%}"
        )
    if observed.steps is None and observed.other_work is None:
        doubts.append("a trace does not tell whether other work disturbed the steps")
    elif (observed.other_work or 0.0) > DISTURBED:
        doubts.append(f"other work used {observed.other_work:.0%} of the cores")
    elif observed.crowded > DISTURBED:
        doubts.append(f"worker processes used {observed.crowded:.0%} of the cores, which operators need as well")
    elif (observed.preempted or 0.0) > DISTURBED:
        doubts.append(f"the thread of the step waited for a core for {observed.preempted:.0%} of the time")
    if ceilings is None and observed.operators:
        doubts.append("the ceilings of this device were not measured")
    elif ceilings is not None and ceilings.other_work > DISTURBED:
        doubts.append(f"other work used {ceilings.other_work:.0%} of the cores while the ceilings were measured")
    scale = observed.scale
    if scale and not 1 / DRIFT <= scale <= DRIFT:
        doubts.append(f"the machine changed while it was measured: plain steps took {scale:.2f} times the traced ones")
    return doubts


def _sentence(limit: str, attribution: Attribution, observed: Observed, ceilings: Ceilings | None) -> str:
    declared, native = LIMITS[limit], observed.native
    share, detail = percent(attribution.shares[limit]), _detail(limit, attribution, observed, ceilings)
    if declared.native and native is not None and native.share > 0.5:
        modules = ", ".join(native.modules[:3]) or "of other libraries"
        return declared.native.format(share=share, detail=detail, modules=modules)
    return declared.sentence.format(share=share, detail=detail)


def _detail(limit: str, attribution: Attribution, observed: Observed, ceilings: Ceilings | None) -> str:
    """A clause with the number of calls, or the operator that matters most and its rate; the share of a wait says
    all."""
    declared = LIMITS[limit]
    reads_host_memory = any(row.host_bytes for row in attribution.operators)
    waits = declared.evidence in (Evidence.THREAD, Evidence.IDLE)
    if waits or (declared.evidence is Evidence.COPIES and not reads_host_memory):
        return ""
    rows = [row for row in attribution.operators if row.limits.get(limit)]
    if not rows:
        return ""
    if declared.evidence is Evidence.CALLS:
        kernels = sum(row.kernels for row in attribution.operators)
        if kernels and ceilings is not None:
            floor = time(ceilings.kernel_ns / 1e6)
            return f": {kernels:,.0f} kernels, each of which costs at least {floor} whatever it computes"
        calls = sum(row.calls for row in attribution.operators)
        return f": {calls:,.0f} operator calls"
    row, share = _busiest(rows, limit)
    text = f", {percent(share)} of it in {row.name}"
    return text if ceilings is None or not row.ms else text + declared.rate(row, ceilings)


def _busiest(rows: list[DividedOperator], limit: str) -> tuple[DividedOperator, float]:
    """The operator with most of a limit's time, over all of its rows that this limit explains, and its share."""
    by_name = summed((row.name, row.limits[limit]) for row in rows)
    name = max(by_name, key=lambda name: by_name[name])
    same = [row for row in rows if row.name == name and row.limits[limit] >= 0.5 * row.ms]
    same = same or [max((row for row in rows if row.name == name), key=lambda row: row.limits[limit])]
    largest = max(same, key=lambda row: row.ms)
    alike = [row for row in same if (row.precision, row.row_bytes) == (largest.precision, largest.row_bytes)]
    counted = ("ms", "calls", "flops", "bytes", "memory_bytes", "new_bytes", "rows", "memory_rows")
    figures = {name: sum(getattr(row, name) for row in alike) for name in counted}
    return replace(largest, **figures), by_name[name] / max(1e-12, sum(by_name.values()))


def roofline(profile: StepBudget, peaks: Peaks | None) -> list[RooflinePoint] | Missing:
    """Each part with counted work, relative to the measured ceilings of the device."""
    ceilings = ceilings_of_profile(profile, peaks)
    if ceilings is None:
        return Missing("the ceilings of this device were not measured; run recperf peaks")
    product = ceilings.product(profile.precision)
    rows = [_point(part, product, ceilings.stream) for part in profile.components if part.flops or part.bytes]
    return [row for row in rows if row is not None] or Missing("no part with counted work was timed")


def _point(part: Component, product: float, stream: float) -> RooflinePoint | None:
    seconds = part.ms.p50 / 1e3
    if seconds <= 0:
        return None
    flops, moved = part.flops or 0, part.bytes or 0
    compute, memory = flops / product / seconds, moved / stream / seconds
    roof: float | None = max(compute, memory)
    bound = "neither" if max(compute, memory) < 0.5 else "compute" if compute >= memory else "memory"
    if max(compute, memory) > BELIEVED:
        roof, bound = None, DOES_NOT_APPLY
    return RooflinePoint(
        name=part.name,
        flops=flops,
        bytes=moved,
        intensity=flops / moved if moved else None,
        flops_per_s=flops / seconds,
        bytes_per_s=moved / seconds,
        ceiling_flops_per_s=product,
        ceiling_bytes_per_s=stream,
        share_of_roof=roof,
        bound=bound,
    )


def embeddings(row_bytes: int, tables: list[tuple[str, int]], batches: list[Tensor]) -> EmbeddingShare:
    """What the lookups of some batches touched, by table; `batches` hold the row numbers over all tables."""
    import torch

    count = len(batches)
    touched, counts = torch.unique(torch.cat(batches).cpu(), return_counts=True)
    distinct = [torch.unique(batch).cpu() for batch in batches]
    by_table, start = [], 0
    for name, rows in tables:
        inside = (touched >= start) & (touched < start + rows)
        lookups = float(counts[inside].sum()) / count
        unique = sum(int(((one >= start) & (one < start + rows)).sum()) for one in distinct) / count
        descending = counts[inside].sort(descending=True).values
        head = int(descending[: max(1, len(descending) // 100)].sum())
        by_table.append(
            TableLookups(
                name=name,
                rows=rows,
                row_bytes=row_bytes,
                lookups=lookups,
                unique=unique,
                unique_ratio=unique / lookups if lookups else 0.0,
                touched_bytes=int(inside.sum()) * row_bytes,
                busiest_share=head / max(1, int(descending.sum())),
            )
        )
        start += rows
    lookups, unique = sum(table.lookups for table in by_table), sum(table.unique for table in by_table)
    return EmbeddingShare(
        tables=by_table,
        lookups=lookups,
        unique=unique,
        unique_ratio=unique / lookups if lookups else 0.0,
    )


def part_ms(profile: StepBudget, name: str) -> Percentiles:
    """p20, p50 and p80 of a part of the step, or of the whole "step"."""
    if name == "step":
        return profile.step_ms
    parts = {part.name: part.ms for part in profile.components}
    if name not in parts:
        raise DataError(f"the profile has no part {name!r}", where={"parts": ", ".join(parts)})
    return parts[name]
