"""Turns any trace of torch.profiler into plain figures about a step, as evidence.py does for steps that recperf runs.

A trace has the times and the sizes of operators, but no clock of the thread and no addresses: which bytes come from
memory follows from the size of an operator's tensors against the knee of the caches. Torch-free.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from platform import node
from statistics import median
from typing import Any

from ..units import number
from .attribution import EXPLAINED, attribute, kind_of_call
from .ceilings import Ceilings, ceilings_of
from .device_times import device_times
from .limits import UNCLEAR, Verdict, decide
from .trace.analyse import (
    UNKNOWN,
    Counted,
    analyse_steps,
    counted,
    device_name,
    facts_of,
    read_one,
    self_times,
    steps_of,
)
from .trace.collectives import collectives
from .trace.nesting import NONE, Cover, Nesting, merged
from .trace.read import Trace
from .trace.window import Window, spread
from .trace.work import creates, largest_tensor, precision, traffic

Json = dict[str, Any]

MAPPED = 32 << 20
"""Larger tensors may be new memory on a CPU whenever they are allocated: glibc never keeps blocks above its highest
mmap threshold."""
MAPS = 0.7
"""They were, if writing them took at least this part of what writing new memory costs."""
FEW_STEPS = 4
"""From this many steps on, only the typical ones are divided among limits."""
UNKNOWN_KINDS = 0.05
"""Share of events of unknown kinds, or without valid times, from which they may matter."""
NOTICEABLE = 0.05
"""Findings about a smaller share of the step are not mentioned."""
SLOW = " Far below the ceiling: look for page faults of newly allocated memory, denormal numbers, or too few threads."
USED = 0.1
"""A table of which a step uses fewer rows than this gains from updating only those."""
NEEDS_CEILINGS = ("compute", "bandwidth", "latency", "cache", "dispatch", "operator")
_WAITING = re.compile(r"sleep|acquire|select|poll|epoll|\bwait\b|\brecv|\bread\b|fsync")
"""Built-in functions in which a thread is off the processor."""


def analyse_file(path: Path, peaks: Json | None = None, *, chosen: bool = False) -> Json:
    """The analysis of a trace file with what limits its steps.

    `peaks` are the ceilings of this machine, or with `chosen` those of a machine that the user names.
    """
    trace = read_one(path)
    nesting, window = steps_of(trace)
    facts = facts_of(trace)
    device = device_name(facts, window)
    ceilings = ceilings_of(peaks, device=device)
    doubts = []
    if ceilings and device == "cpu" and not chosen and facts["host"] != node():
        doubts.append("the ceilings may be those of another machine than the one that recorded the trace")
    if trace.untimed > UNKNOWN_KINDS * trace.events:
        doubts.append("the trace has many events without valid times, which are left out")
    if trace.ignored - trace.untimed > UNKNOWN_KINDS * trace.events:
        doubts.append("the trace has many events of unknown kinds, perhaps of a device that recperf does not know")
    limit = limit_of(trace, nesting, window, ceilings, doubts)
    return {
        **facts,
        **analyse_steps(trace, nesting, window),
        "limit": {
            **limit,
            "notes": [*limit["notes"], *([trace.part] if trace.part else [])],
            "ceilings": whose(device, facts["host"], peaks, measured=ceilings is not None, chosen=chosen),
        },
    }


def whose(device: str, host: str | None, peaks: Json | None, *, measured: bool, chosen: bool) -> str:
    """Which machine's ceilings were used, or why none."""
    if peaks is None:
        return "no ceilings: those of this machine were not measured; recperf peaks measures them"
    machine = peaks["machine"]
    where = "the machine of --peaks" if chosen else "this machine"
    if not measured:
        return f"no ceilings: those of {device} are not among those of {where}; --peaks FILE takes those of its machine"
    name = f"{machine.get('cpu')}, {machine.get('cores')} cores" if device == "cpu" else device
    text = f"ceilings of {where} ({name}), measured {str(peaks.get('measured'))[:10]}"
    if device == "cpu":
        text += f", with {peaks['threads']} threads"
        if not chosen and host is not None and host != node():
            text += f"; the trace was recorded on the host {host}: --peaks FILE takes the ceilings of that machine"
    return text


def limit_of(
    trace: Trace, nesting: Nesting, window: Window, ceilings: Ceilings | None, doubts: Iterable[str] = ()
) -> Json:
    """What limits the steps of a trace: verdict, shares, operators with their limits, findings."""
    seen = observed(trace, nesting, window, ceilings)
    attribution = attribute(seen, ceilings)
    verdict = decide(attribution, seen, ceilings)
    return {
        "verdict": _qualified(verdict, attribution, seen, ceilings, doubts).as_json(),
        "shares": attribution["shares"],
        "operators": attribution["operators"],
        "findings": findings(seen, ceilings),
        "step_ms": seen["step_ms"],
        "notes": seen["notes"],
    }


def observed(trace: Trace, nesting: Nesting, window: Window, ceilings: Ceilings | None) -> Json:
    """The figures of a step, in ms; see attribution.py for how they are divided."""
    all_steps = window.step_ms()
    notes: list[str] = []
    if not window.work and window.count >= FEW_STEPS:
        typical = _typical(all_steps)
        notes.append(
            f"shares are those of the {len(typical)} of {window.count} steps nearest to the median of "
            f"{median(all_steps):.3g} ms; the slowest step took {max(all_steps):.3g} ms"
        )
        window = Window(trace, nesting, only=typical)
    own = self_times(nesting, window)
    works = counted(nesting, own)
    times = _Times(nesting, own, works)
    result: Json = {"device": "device" if window.work else "cpu", "step_ms": spread(all_steps), "notes": notes}
    waits = times.on_device(window) if window.work else times.on_host(trace, window)
    result["waits"] = {name: us / 1e3 / window.count for name, us in waits.items()}
    result["operators"] = times.rows(window, ceilings, _tf32(nesting, window))
    if not any(nesting.events[i].shapes for i in own) and own:
        notes.append("the trace has no sizes; record_shapes=True gives the work of operators")
    if not trace.python and not window.work:
        notes.append("python and blocked cannot be distinguished without stacks; with_stack=True records them")
    return result


def _typical(times: list[float]) -> list[int]:
    """The half of the steps that are nearest to the median: new memory or other work makes single steps slow."""
    middle = median(times)
    ordered = sorted(range(len(times)), key=lambda number: abs(times[number] - middle))
    return ordered[: (len(times) + 1) // 2]


class _Times:
    """Divides the steps among operators. Time inside an operator with known work belongs to it."""

    def __init__(self, nesting: Nesting, own: dict[int, float], works: dict[int, Counted]) -> None:
        self.nesting, self.works = nesting, works
        self.us: defaultdict[int, float] = defaultdict(float)
        self.kernels: defaultdict[int, int] = defaultdict(int)
        self.parallel: defaultdict[int, float] = defaultdict(lambda: 1.0)
        self.extra: list[tuple[str, float, int]] = []
        """Kernels that no operator launched: (name, us, count)."""
        self._own = own
        self._owner: dict[int, int] = {}
        for i in own:
            above = nesting.above(nesting.parent[i], "op")
            outer = self._owner.get(above, NONE)
            inherits = works[i] == UNKNOWN and outer != NONE and works[outer] != UNKNOWN
            self._owner[i] = outer if inherits else i

    def on_device(self, window: Window) -> dict[str, float]:
        device = device_times(self.nesting, window)
        for origin, (us, kernels) in device.by_origin.items():
            owner = self._owner.get(origin, NONE)
            if owner == NONE:
                name = self.nesting.events[origin].name if origin != NONE else "(launched by no operator)"
                self.extra.append((name, us, kernels))
            else:
                self.us[owner] += us
                self.kernels[owner] += kernels
        self.extra += [(name, us, kernels) for name, (us, kernels) in device.graph.items()]
        return device.waits

    def on_host(self, trace: Trace, window: Window) -> dict[str, float]:
        """Operators of the step's thread; those of other threads where the step's thread runs none."""
        nesting = self.nesting
        inputs = [(start, end) for start, end in nesting.inputs if window.holds(start)]
        loading = Cover(inputs)
        inside = [i for i in self._own if not loading.of(nesting.events[i].start, nesting.events[i].end)]
        main = [i for i in inside if nesting.events[i].thread == nesting.thread]
        beside = [i for i in inside if nesting.events[i].thread != nesting.thread]
        for i in main:
            self.us[self._owner[i]] += self._own[i]
        covered = merged([*inputs, *((nesting.events[i].start, nesting.events[i].end) for i in main)])
        waits = {"input": sum(end - start for start, end in inputs)}
        outside = max(0.0, window.host_us - sum(end - start for start, end in covered))
        steps = (event for event in trace.python if event.thread == nesting.thread and window.holds(event.start))
        others = {
            "communication": [(item.start, item.end) for item in collectives(nesting, window)],
            "beside": [(nesting.events[i].start, nesting.events[i].end) for i in beside],
            "blocked": [(event.start, event.end) for event in steps if _is_wait(event.name)],
        }
        spent: dict[str, float] = {}
        for name, intervals in others.items():
            before = Cover(covered)
            spent[name] = sum(end - start - before.of(start, end) for start, end in merged(intervals))
            covered = merged([*covered, *intervals])
        self._share(beside, spent["beside"])
        rest = max(0.0, outside - sum(spent.values()))
        return {**waits, "communication": spent["communication"], "blocked": spent["blocked"], "python": rest}

    def _share(self, beside: list[int], us: float) -> None:
        """Several threads at once share the time for which the step's thread waited."""
        whole = sum(self._own[i] for i in beside)
        for i in beside:
            owner = self._owner[i]
            self.us[owner] += self._own[i] * us / whole if whole else 0.0
            self.parallel[owner] = max(1.0, whole / us) if us else 1.0

    def rows(self, window: Window, ceilings: Ceilings | None, tf32: set[int]) -> list[Json]:
        """Operators per step, those of equal name, part and sizes together."""
        events, groups = self.nesting.events, defaultdict(list)
        for i, us in self.us.items():
            if us > 0:
                groups[events[i].name, self.nesting.part[i], events[i].shapes].append(i)
        steps = window.count
        knees = (ceilings.knee, ceilings.stream_knee) if ceilings else (MAPPED, MAPPED)
        rows: list[Json] = []
        for (name, part, shapes), members in groups.items():
            row = _row(name, part, sum(self.us[i] for i in members) / 1e3 / steps)
            row["calls"] = len(members) / steps
            row["python_calls"] = sum(self.nesting.above(self.nesting.parent[i], "op") == NONE for i in members) / steps
            row["kernels"] = sum(self.kernels[i] for i in members) / steps
            row["parallel"] = max(self.parallel[i] for i in members)
            row["largest"] = list(largest_tensor(shapes))
            row["precision"] = "tf32" if tf32.intersection(members) else precision(shapes)
            for i in members:
                for figure, amount in _work(self.works[i], *knees).items():
                    row[figure] += amount / steps
                if ceilings and not window.work:
                    row["fresh"] += self._fresh(i, ceilings) / steps
            work = self.works[members[0]]
            row["counted"] = work != UNKNOWN
            if work.rows:
                row["row_bytes"], row["table_rows"] = work.rows.row_bytes, work.rows.table_rows
            rows.append(row)
        for name, us, kernels in self.extra:
            rows.append({**_row(name, None, us / 1e3 / steps), "calls": kernels / steps, "kernels": kernels / steps})
        return sorted(rows, key=lambda row: -row["ms"])

    def _fresh(self, index: int, ceilings: Ceilings) -> int:
        """Bytes that an operator writes into new memory: it allocates them, and takes as long as that costs."""
        event = self.nesting.events[index]
        sizes = traffic(event.name, event.shapes)
        if sizes is None or sizes[1] < MAPPED or self.us[index] < MAPS * sizes[1] / ceilings.first_touch * 1e6:
            return 0
        above = self.nesting.above(self.nesting.parent[index], "op")
        while above != NONE and not creates(self.nesting.events[above].name):
            above = self.nesting.above(self.nesting.parent[above], "op")
        return sizes[1] if above != NONE or not event.name.endswith("_") else 0


def _row(name: str, part: str | None, ms: float) -> Json:
    figures = dict.fromkeys(("flops", "bytes", "beyond", "fresh", "rows", "missed"), 0.0)
    facts: Json = {"precision": None, "row_bytes": None, "table_rows": None, "largest": [], "counted": False}
    counts = {"calls": 0.0, "python_calls": 0.0, "kernels": 0.0, "parallel": 1.0}
    return {"name": name, "part": part, "kind": kind_of_call(name), "ms": ms, **counts, **figures, **facts}


def _work(work: Counted, knee: int, stream_knee: int) -> dict[str, float]:
    """The work of one call, and how much of it comes from memory."""
    moved, rows = work.bytes or 0, work.rows
    in_rows = rows.number * rows.row_bytes if rows else 0
    table = rows.table_rows * rows.row_bytes if rows else 0
    return {
        "flops": work.flops or 0,
        "bytes": moved,
        "beyond": moved - in_rows if moved - in_rows > stream_knee else 0,
        "rows": rows.number if rows else 0,
        "missed": rows.number * (1 - knee / table) if rows and table > knee else 0,
    }


def _tf32(nesting: Nesting, window: Window) -> set[int]:
    named = (work for work in window.work if "tf32" in work.name.lower())
    return {nesting.above(nesting.origin(work), "op") for work in named}


def _is_wait(name: str) -> bool:
    return name.startswith("<built-in") and _WAITING.search(name) is not None


def _qualified(
    verdict: Verdict, attribution: Json, seen: Json, ceilings: Ceilings | None, more: Iterable[str]
) -> Verdict:
    """What a trace alone cannot know lowers the confidence, or makes the verdict unclear."""
    if ceilings is None:
        inside = attribution["shares"]["operator"]
        reason = f"Operators take {inside:.0%} of the step; dividing them among limits needs measured ceilings."
        others = [sentence for sentence in verdict.because if not sentence.startswith("Operators that no ceiling")]
        if verdict.limit in NEEDS_CEILINGS:
            shares = {limit: share for limit, share in attribution["shares"].items() if limit != "operator"}
            first, second = sorted(shares, key=lambda limit: -shares[limit])[:2]
            reason += (
                f" Outside of them the nearest are {first} ({shares[first]:.0%}) and {second} ({shares[second]:.0%})."
            )
            advice = "Run recperf peaks on the machine that recorded the trace, and name its file with --peaks."
            verdict = replace(verdict, because=[reason, *others], doubts=[*verdict.doubts, *more])
            return replace(verdict, limit=UNCLEAR, share=inside, confidence="low", advice=advice)
        verdict = replace(verdict, because=[*others, reason])
    unknown = sum(row["ms"] for row in seen["operators"] if not row["counted"])
    doubts = [*verdict.doubts, *more]
    if verdict.limit in ("operator", "dispatch") and unknown > 0.5 * sum(row["ms"] for row in seen["operators"]):
        doubts.append("the work of most operators is not known from the trace")
    if verdict.limit in ("python", "blocked") and any("cannot be distinguished" in note for note in seen["notes"]):
        doubts.append("a trace without stacks does not tell Python code from waits outside of operators")
    confidence = verdict.confidence if doubts == verdict.doubts else ("medium", "low")[len(doubts) > 1]
    return replace(verdict, doubts=doubts, confidence=verdict.confidence if verdict.limit == UNCLEAR else confidence)


def findings(seen: Json, ceilings: Ceilings | None) -> list[Json]:
    """What the sizes tell beside the shares: passes over memory by region, and tables of which few rows are used."""
    step = sum(seen["waits"].values()) + sum(row["ms"] for row in seen["operators"])
    return [*_passes(seen["operators"], step, ceilings), *_tables(seen["operators"], step)] if step else []


def _passes(operators: list[Json], step: float, ceilings: Ceilings | None) -> list[Json]:
    """The region whose element-wise operators stream most through memory."""
    regions: defaultdict[str | None, list[Json]] = defaultdict(list)
    for row in operators:
        if row["beyond"] and not row["flops"] and not row["rows"]:
            regions[row["part"]].append(row)
    result = []
    for part, rows in regions.items():
        ms, moved = (sum(row[name] for row in rows) for name in ("ms", "bytes"))
        if ms / step >= NOTICEABLE:
            rate = moved / ms * 1e3
            far_below = ceilings is not None and rate < EXPLAINED * ceilings.copy
            ceiling = f"; this machine copies at {number(ceilings.copy)}B/s" if ceilings else ""
            calls = sum(row["calls"] for row in rows)
            names = list(dict.fromkeys(row["name"].removeprefix("aten::") for row in rows))
            listed = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            place = f"of {part.rpartition('/')[2]}" if part else "outside of all regions"
            fuse = "a fused optimizer (fused=True)" if "optim" in (part or "").lower() else "torch.compile"
            result.append(
                {
                    "what": "element-wise passes",
                    "part": part,
                    "ms": ms,
                    "share": ms / step,
                    "bytes_per_s": rate,
                    "ceiling_bytes_per_s": ceilings.copy if ceilings else None,
                    "sentence": f"{calls:,.0f} element-wise passes {place} ({listed}) take {ms:.3g} ms, "
                    f"{ms / step:.0%} of the step, and move {number(moved)}B at {number(rate)}B/s{ceiling}.",
                    "advice": f"Fuse them: {fuse} passes over the data once." + (SLOW if far_below else ""),
                }
            )
    return sorted(result, key=lambda finding: -finding["ms"])


def _tables(operators: list[Json], step: float) -> list[Json]:
    """Tables of which a step uses few rows while other operators pass over all of them."""
    lookups: defaultdict[tuple[int, int], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for row in operators:
        if row["rows"] and row["table_rows"]:
            lookups[row["table_rows"], row["row_bytes"]][row["name"]] += row["rows"]
    result = []
    for (table_rows, row_bytes), by_name in lookups.items():
        # The backward pass looks up the same rows as the forward pass.
        used = max(by_name.values())
        dense = [
            row
            for row in operators
            if row["bytes"] and not row["rows"] and row["largest"][:1] == [table_rows] and len(row["largest"]) > 1
        ]
        ms = sum(row["ms"] for row in dense)
        share = used / table_rows
        if share < USED and ms / step >= NOTICEABLE:
            parts = dict.fromkeys((row["part"] or "no region").rpartition("/")[2] for row in dense)
            result.append(
                {
                    "what": "dense update of a table",
                    "table_rows": table_rows,
                    "row_bytes": row_bytes,
                    "lookups": used,
                    "used_share": share,
                    "ms": ms,
                    "share": ms / step,
                    "sentence": f"A step looks up {used:,.0f} of the {table_rows:,} rows of a table, at most "
                    f"{share:.1%}, but operators over all of its rows ({', '.join(parts)}) take {ms:.3g} ms, "
                    f"{ms / step:.0%} of the step.",
                    "advice": "Update only the rows that were used: sparse gradients (nn.Embedding(sparse=True)) with "
                    "torch.optim.SparseAdam, or a row-wise optimizer.",
                }
            )
    return sorted(result, key=lambda finding: -finding["ms"])
