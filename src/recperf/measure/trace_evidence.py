"""Turns any trace of torch.profiler into plain figures about a step, as evidence.py does for steps that recperf runs.

A trace has the times and the sizes of operators, but no clock of the thread and no addresses: which bytes come from
memory follows from the size of an operator's tensors against the measured size of the caches. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from platform import node
from statistics import median

from msgspec.structs import replace

from .ceilings import Ceilings, ceilings_of
from .limit_kinds import Evidence, limits_by
from .limits import UNCLEAR, UNDECIDED
from .operators import CallWork
from .peaks.records import Peaks
from .place_shares import trace_places
from .profile import StepProfile, build_profile
from .program_facts import facts_of_rows
from .records import Observed, ObservedSteps, Verdict
from .rows import operator_rows, part_rows, traced_ms, unknown_work
from .timeline import OperatorCall, step_times, traced_step
from .trace.analyse import analyse, device_name, facts_of, read_one, steps_of
from .trace.idle import collectives, device_times, lateness, transfers
from .trace.nesting import NONE, Nesting, TracedSteps, spread
from .trace.read import Trace, facts_in, number_of
from .trace.records import TraceAnalysis
from .trace.work import counted, creates

MAPPED = 32 << 20
"""Larger tensors may be new memory on a CPU whenever they are allocated: glibc never keeps blocks above its highest
mmap threshold."""
MAPS = 0.7
"""They were, if writing them took at least this part of what writing new memory costs."""
FEW_STEPS = 4
"""From this many steps on, only the typical ones are divided among limits."""
UNKNOWN_KINDS = 0.05
"""Share of events of unknown kinds, or without valid times, from which they may matter."""


def analyse_file(path: Path, peaks: Peaks | None = None, *, chosen: bool = False) -> StepProfile:
    """The profile of the steps in a trace file.

    `peaks` are the ceilings of this machine, or with `chosen` those of a machine that the user names.
    """
    trace = read_one(path)
    nesting, window = steps_of(trace)
    facts = facts_of(trace)
    device = device_name(facts, window)
    ceilings = ceilings_of(peaks, device=device)
    doubts = []
    if ceilings and device == "cpu" and not chosen and facts.host != node():
        doubts.append("the ceilings may be those of another machine than the one that recorded the trace")
    if trace.untimed > UNKNOWN_KINDS * trace.events:
        doubts.append("the trace has many events without valid times, which are left out")
    if trace.ignored - trace.untimed > UNKNOWN_KINDS * trace.events:
        doubts.append("the trace has many events of unknown kinds, perhaps of a device that recperf does not know")
    seen = observed(trace, nesting, window, ceilings)
    machine = {name: value for name, value in (("torch", facts.torch), ("host", facts.host)) if value}
    profile = build_profile(seen, ceilings, facts_of_rows(seen.operators), None, machine)
    profile.verdict = qualified(profile.verdict, profile.shares, seen, ceilings, doubts)
    profile.device, profile.steps = device, ObservedSteps(window.count, 0, window.count)
    tables = analyse(trace, (nesting, window), facts)
    profile.kernels, profile.idle, profile.transfers = tables.kernels, tables.idle, tables.transfers
    profile.trace = TraceAnalysis(**{name: getattr(tables, name) for name in TraceAnalysis.__struct_fields__})
    profile.trace.ceilings_of = whose(device, facts.host, peaks, measured=ceilings is not None, chosen=chosen)
    profile.notes += [trace.part] if trace.part else []
    return profile


def whose(device: str, host: str | None, peaks: Peaks | None, *, measured: bool, chosen: bool) -> str:
    """Which machine's ceilings were used, or why none."""
    if peaks is None:
        return "no ceilings: those of this machine were not measured; recperf peaks measures them"
    machine = peaks.machine
    where = "the machine of --peaks" if chosen else "this machine"
    if not measured:
        return f"no ceilings: those of {device} are not among those of {where}; --peaks FILE takes those of its machine"
    name = f"{machine.get('cpu')}, {machine.get('cores')} cores" if device == "cpu" else device
    text = f"ceilings of {where} ({name}), measured {peaks.measured[:10]}"
    if device == "cpu":
        text += f", with {peaks.threads} threads"
        if not chosen and host is not None and host != node():
            text += f"; the trace was recorded on the host {host}: --peaks FILE takes the ceilings of that machine"
    return text


def observed(trace: Trace, nesting: Nesting, window: TracedSteps, ceilings: Ceilings | None) -> Observed:
    """The figures of a step, in ms; see attribution.py for how they are divided."""
    all_steps = window.step_ms()
    notes: list[str] = []
    if not window.work and window.count >= FEW_STEPS:
        # The half of the steps that are nearest to the median: new memory or other work makes single steps slow.
        middle = median(all_steps)
        ordered = sorted(range(window.count), key=lambda number: abs(all_steps[number] - middle))
        typical = ordered[: (window.count + 1) // 2]
        notes.append(
            f"shares are those of the {len(typical)} of {window.count} steps nearest to the median of "
            f"{middle:.3g} ms; the slowest step took {max(all_steps):.3g} ms"
        )
        window = TracedSteps(trace, nesting, only=typical)
    works = _Works(nesting, window, ceilings)
    times = step_times(trace, nesting, window, works.of, nesting.part_of)
    places = trace_places(trace, nesting, window, times.calls)
    if window.work:
        device = device_times(nesting, window)
        times.on_device(nesting, device, {})
        waits = dict(device.waits)
    else:
        works.add_first_touches(times.calls)
        waits = {
            "input": times.input_us, "communication": times.communication_us, "blocked": times.blocked_us,
            "python": times.outside_us,
        }  # fmt: skip
    others = number_of(facts_in(trace.header).get("other_work"))
    if not works.sized and times.calls:
        notes.append("the trace has no sizes; record_shapes=True gives the work of operators")
    operators = operator_rows(times, [], window)
    notes += [*(unknown_work(operators) if works.sized else ()), *lateness(collectives(nesting, window))]
    if not trace.python and not window.work:
        notes.append("python and blocked cannot be distinguished without stacks; with_stack=True records them")
    return Observed(
        device="device" if window.work else "cpu",
        threads=0,
        step_ms=spread(all_steps),
        waits={name: us / 1e3 / window.count for name, us in waits.items()},
        operators=operators,
        parts=part_rows(operators),
        other_work=others,
        notes=notes,
        places=places,
        pageable_bytes=sum(row.bytes for row in transfers(window) if row.pinned is False),
        traced_ms=traced_ms(window),
        timeline=traced_step(nesting, window, times, operators),
    )


class _Works:
    """The work of operators from their sizes, and how much of it comes from memory."""

    def __init__(self, nesting: Nesting, window: TracedSteps, ceilings: Ceilings | None) -> None:
        self._nesting, self._ceilings = nesting, ceilings
        self._cache_sizes = (ceilings.cache_bytes, ceilings.stream_cache_bytes) if ceilings else (MAPPED, MAPPED)
        inside = [i for i, event in enumerate(nesting.events) if event.kind == "op" and window.holds(event.start)]
        self.sized = any(nesting.events[i].shapes for i in inside)
        self._works = counted(nesting, inside)
        named = (work for work in window.work if "tf32" in work.name.lower())
        self._tf32 = {nesting.above(nesting.origin(work), "op") for work in named}
        self._known: dict[tuple[int, bool], CallWork] = {}

    def of(self, index: int, inside: bool) -> CallWork | None:
        work, tf32 = self._works[index], index in self._tf32
        if work is None:
            return None
        if (id(work), tf32) not in self._known:
            cache_bytes, stream_cache_bytes = self._cache_sizes
            streamed, table = work.bytes - work.rows * work.row_bytes, work.table_rows * work.row_bytes
            self._known[id(work), tf32] = replace(
                work,
                precision="tf32" if tf32 else work.precision,
                memory_bytes=streamed if streamed > stream_cache_bytes else 0,
                memory_rows=work.rows * (1 - cache_bytes / table) if table > cache_bytes else 0,
            )
        return self._known[id(work), tf32]

    def add_first_touches(self, calls: Iterable[OperatorCall]) -> None:
        """Find the calls that write into new memory: they allocate it, and take as long as that costs."""
        for call in calls:
            written = call.work.written if call.work and self._ceilings else 0
            if written < MAPPED or call.us < MAPS * written / self._ceilings.first_touch * 1e6:  # type: ignore[union-attr]
                continue
            above = self._nesting.above(self._nesting.parent[call.index], "op")
            while above != NONE and not creates(self._nesting.events[above].name):
                above = self._nesting.above(self._nesting.parent[above], "op")
            if above != NONE or not call.name.endswith("_"):
                call.work = replace(call.work, new_bytes=written)  # type: ignore[type-var]


def qualified(
    verdict: Verdict, shares: dict[str, float], seen: Observed, ceilings: Ceilings | None, more: Iterable[str]
) -> Verdict:
    """What a trace alone cannot know lowers the confidence, or makes the verdict unclear."""
    if ceilings is None:
        inside = shares["operator"]
        reason = f"Operators take {inside:.0%} of the step; dividing them among limits needs measured ceilings."
        others = [sentence for sentence in verdict.because if not sentence.startswith("Operators that no ceiling")]
        if verdict.limit in limits_by(Evidence.CALLS, Evidence.WORK):
            outside = (limit for limit in shares if limit != "operator")
            first, second = sorted(outside, key=lambda limit: -shares[limit])[:2]
            reason += (
                f" Outside of them the nearest are {first} ({shares[first]:.0%}) and {second} ({shares[second]:.0%})."
            )
            reason += " recperf peaks measures them on the machine that recorded the trace; --peaks names its file."
            verdict = replace(verdict, because=[reason, *others], doubts=[*verdict.doubts, *more])
            return replace(verdict, limit=UNCLEAR, share=inside, confidence="low")
        verdict = replace(verdict, because=[*others, reason])
    unknown = sum(row.ms for row in seen.operators if not row.counted)
    doubts = [*verdict.doubts, *more]
    if verdict.limit in ("operator", "dispatch") and unknown > 0.5 * sum(row.ms for row in seen.operators):
        doubts.append("the work of most operators is not known from the trace")
    if verdict.limit in ("python", "blocked") and any("cannot be distinguished" in note for note in seen.notes):
        doubts.append("a trace without stacks does not tell Python code from waits outside of operators")
    confidence = verdict.confidence if doubts == verdict.doubts else ("medium", "low")[len(doubts) > 1]
    return replace(verdict, doubts=doubts, confidence=verdict.confidence if verdict.limit in UNDECIDED else confidence)
