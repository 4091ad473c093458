"""Analyses a trace per step: kernels, parts, idle time of the device by cause, transfers; and compares those of ranks.

All figures are sums over whole steps divided by the number of steps. A host event belongs to the step in which it
begins, device work to the step that launched it, however late it ran. Of a folder one trace is read at a time and only
its summary stays, so that memory depends on the largest trace.
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import asdict

from ...errors import DataError
from ..profile_records import Collective, Idle, Kernels, KernelTime, MeasuredRank, Missing, SmallKernels
from .file import looks_like_trace
from .idle import collectives, communication, idle, transfers
from .nesting import SMALL_US, Nesting, TracedSteps, merged, per_step
from .read import MERGED, Trace, facts_in, grouped, rank_in, read
from .records import ComparedRanks, RankFacts, StepTables, TraceFacts
from .regions import OTHER, parts, timings

NO_DEVICE = "no device in this trace"
NO_WORK = "the steps launched no device work"
_NUMBER = re.compile(r"(?:rank|worker|gpu|node)[-_.]?(\d{1,6})", re.IGNORECASE)


_ANY_NUMBER = re.compile(r"(\d{1,6})")
UNEQUAL = "the ranks have different numbers of {names}: only those that all ranks have are compared"


def analyse(
    trace: Trace, steps: tuple[Nesting, TracedSteps] | None = None, facts: TraceFacts | None = None
) -> StepTables:
    """The tables of the steps of a trace."""
    nesting, window = steps or steps_of(trace)
    missing = None if window.work else NO_WORK if trace.device else NO_DEVICE
    return StepTables(
        **asdict(facts or TraceFacts()),
        window=window.summary(),
        parts=parts(nesting, window),
        communication=communication(trace, nesting, window),
        kernels=Kernels(missing=missing) if missing else _kernels(nesting, window),
        idle=Idle(missing=missing) if missing else idle(trace, nesting, window),
        transfers=Missing(missing) if missing else transfers(window),
    )


def steps_of(trace: Trace) -> tuple[Nesting, TracedSteps]:
    """The nesting of the host events of a trace, and its steps.

    Steps are the ranges `recperf.step#N`, or torch's own `ProfilerStep#N`, or end with the optimizer's step; a trace
    with none of these counts as one step.
    """
    if not trace.host and not trace.device:
        raise DataError(
            "the trace has no events of torch.profiler with valid times",
            where={"file": trace.path, "events": f"{trace.events:,}, {trace.ignored:,} of unknown kind or time"},
            fix="record it with torch.profiler.profile(...) and export_chrome_trace",
        )
    nesting = Nesting(trace)
    return nesting, TracedSteps(trace, nesting)


class TimedTrace(NamedTuple):
    """The times of every single step of a trace file, with facts about the file."""

    facts: TraceFacts
    steps_from: str
    device: str
    steps: list[float]
    times: dict[str, dict[str, list[float]]]
    """By kind and name, in ms."""


def timed_file(path: Path) -> TimedTrace:
    trace = read_one(path)
    nesting, window = steps_of(trace)
    facts = facts_of(trace)
    device = device_name(facts, window)
    return TimedTrace(facts, window.steps_from, device, window.step_ms(), timings(nesting, window))


def device_name(facts: TraceFacts, window: TracedSteps) -> str:
    """The name of the busiest device; `cpu` where the steps launched no device work.

    The trace of an AMD machine counts its processors too: number 2 may be the first GPU of the list.
    """
    if window.device is None:
        return "cpu"
    names = facts.devices
    if len(set(names)) == 1:
        return names[0]
    return names[window.device] if window.device < len(names) else f"device {window.device}"


def read_one(path: Path) -> Trace:
    """The trace of one rank."""
    trace = read(path)
    if MERGED in facts_in(trace.header):
        raise DataError(
            "a merged trace contains the steps of several ranks", where={"file": path}, fix="use the trace of one rank"
        )
    return trace


def facts_of(trace: Trace) -> TraceFacts:
    """What the header of a trace says about its origin."""
    host = facts_in(trace.header).get("host") or trace.header.get("host_name")
    cuda, properties = (trace.header.get(name) for name in ("cuda_runtime_version", "deviceProperties"))
    devices = properties if isinstance(properties, list) else []
    ranks = facts_in(trace.header, "distributedInfo")
    return TraceFacts(
        host=str(host) if host else None,
        file=str(trace.path),
        bytes=trace.path.stat().st_size,
        events=trace.events,
        part=trace.part or None,
        ignored=trace.ignored,
        torch=_plain(trace.header.get("torch_version")),
        # 12080 is version 12.8.
        cuda=f"{cuda // 1000}.{cuda % 1000 // 10}" if isinstance(cuda, int) else None,
        devices=[str(item["name"]) for item in devices if isinstance(item, dict) and "name" in item],
        ranks=RankFacts(*map(_plain, map(ranks.get, ("rank", "world_size", "backend")))) if "rank" in ranks else None,
    )


def _plain(value: Any) -> str | int | None:
    """A text or an integer of the header; anything else is damage."""
    return value if isinstance(value, str | int) else None


def _kernels(nesting: Nesting, window: TracedSteps) -> Kernels:
    kernels = [work for work in window.work if work.kind == "kernel"]
    groups = grouped(kernels, lambda kernel: (kernel.name, nesting.part_of(nesting.origin(kernel))))
    total = sum(kernel.end - kernel.start for kernel in kernels)
    rows: list[KernelTime] = []
    for (name, part), members in groups.items():
        time = sum(kernel.end - kernel.start for kernel in members)
        delays = [delay for kernel in members if (delay := window.delay(kernel)) is not None]
        rows.append(
            KernelTime(
                name=name,
                part=part,
                count=per_step(len(members), window.count),
                total_ms=time / 1e3 / window.count,
                mean_us=time / len(members),
                share=time / total if total else 0.0,
                launch_delay_us=sum(delays) / len(delays) if delays else None,
            )
        )
    rows.sort(key=lambda row: (-row.total_ms, row.name))
    small = [kernel for kernel in kernels if kernel.end - kernel.start < SMALL_US]
    busy = sum(end - start for start, end in merged((kernel.start, kernel.end) for kernel in kernels))
    return Kernels(
        rows=rows,
        count=per_step(len(kernels), window.count),
        busy_ms=busy / 1e3 / window.count,
        small=SmallKernels(
            count=per_step(len(small), window.count),
            share_of_count=len(small) / len(kernels) if kernels else 0.0,
            total_ms=sum(kernel.end - kernel.start for kernel in small) / 1e3 / window.count,
        ),
        steps=window.count,
    )


@dataclass
class _Rank:
    """What remains of one rank's trace."""

    row: MeasuredRank
    path: Path
    steps: int
    of: int | None
    times: dict[tuple[str, int], list[float]]
    """How long every collective took in ms, by name and size, in order of time: those of different sizes may run at
    once, and in another order on another rank."""
    bytes: dict[str, float]
    """Bytes per step by name."""


def traces_in(folder: Path) -> list[Path]:
    """The traces of a folder, without one that combines the others."""
    names = (path for path in folder.iterdir() if path.name.endswith((".json", ".json.gz")) and path.is_file())
    paths = sorted(
        path for path in names if ".merged." not in path.name and path.name[0] != "." and looks_like_trace(path)
    )
    if len(paths) < 2:
        raise DataError(
            f"the folder contains {'one trace' if paths else 'no traces'}; comparing ranks needs one of each rank",
            where={"folder": folder},
            fix=f"recperf profile --trace {paths[0]}"
            if paths
            else "name a folder with one .json or .json.gz file per rank",
        )
    return paths


def compare_ranks(folder: Path) -> ComparedRanks:
    """The section `communication` of several ranks, with the file of the slowest one.

    The same occurrence of a collective ends on all ranks at about the same time, so the rank on which it took least
    arrived last, and what it took longer elsewhere is waiting for that rank.
    """
    ranks = sorted((_summary(path) for path in traces_in(folder)), key=lambda rank: (rank.row.rank, rank.path))
    each = [rank.row for rank in ranks]
    for one, other in pairwise(ranks):
        if one.row.rank == other.row.rank:
            raise DataError(
                f"two traces belong to rank {one.row.rank}",
                where={"one": one.path, "other": other.path},
                fix="leave one trace of each rank in the folder",
            )
    steps = np.array([[rank.steps] for rank in ranks])
    late_R = np.zeros(len(ranks))
    awaited_R: defaultdict[str, np.ndarray[Any, Any]] = defaultdict(lambda: np.zeros(len(ranks)))
    unequal: dict[str, None] = {}
    for key in dict.fromkeys(key for rank in ranks for key in rank.times):
        series = [rank.times.get(key, []) for rank in ranks]
        count = min(map(len, series))
        if max(map(len, series)) > count:
            unequal[key[0]] = None
        ms_RN = np.array([times[:count] for times in series])
        waited_RN = (ms_RN - ms_RN.min(0)) / steps if count else ms_RN
        late_R += waited_RN.sum(1)
        np.add.at(awaited_R[key[0]], ms_RN.argmin(0) if count else [], waited_RN.sum(0))
    for row, late, awaited in zip(each, late_R.tolist(), sum(awaited_R.values(), np.zeros(len(ranks))).tolist()):
        # A collective may wait in the background: only what the rank itself waits is a loss.
        row.late_ms, row.moving_ms, row.awaited_ms = min(late, row.exposed_ms), max(0.0, row.exposed_ms - late), awaited
    slowest = max(ranks, key=lambda rank: rank.row.own_ms)
    exposed, step = statistics.fmean(row.exposed_ms for row in each), statistics.fmean(row.step_ms for row in each)
    of = max(rank.of or 0 for rank in ranks)
    notes = [UNEQUAL.format(names=", ".join(unequal))] if unequal else []
    if of > len(ranks):
        notes.append(f"{of - len(ranks)} of {of} ranks have no trace in the folder")
    if len({rank.steps for rank in ranks}) > 1:
        notes.append("the ranks recorded different numbers of steps")
    rows = [_collective(name, ranks, awaited) for name, awaited in awaited_R.items()]
    return ComparedRanks(
        ranks=len(ranks),
        steps=min(rank.steps for rank in ranks),
        slowest=slowest.row.rank,
        file=str(slowest.path),
        step_ms=step,
        own_ms=statistics.fmean(row.own_ms for row in each),
        each=each,
        collectives=sorted(rows, key=lambda row: (-(row.late_ms or 0.0), -(row.ms or 0.0))),
        exposed_ms=exposed,
        exposed_share=exposed / step if step else 0.0,
        late_ms=statistics.fmean(row.late_ms or 0.0 for row in each),
        moving_ms=statistics.fmean(row.moving_ms or 0.0 for row in each),
        notes=notes,
    )


def _collective(name: str, ranks: list[_Rank], awaited_R: np.ndarray[Any, Any]) -> Collective:
    """A collective per step, mean over the ranks; `awaited_R` is the time that the others waited for each."""
    per_step = [
        (len(times) / rank.steps, sum(times) / rank.steps)
        for rank in ranks
        for (own, _), times in rank.times.items()
        if own == name
    ]
    count, ms = (sum(figures) / len(ranks) for figures in zip(*per_step))
    late = float(awaited_R.sum()) / len(ranks)
    return Collective(
        what=name,
        count=count,
        bytes=statistics.fmean(rank.bytes.get(name, 0.0) for rank in ranks),
        ms=ms,
        late_ms=late,
        moving_ms=max(0.0, ms - late),
        awaited_rank=ranks[int(awaited_R.argmax())].row.rank if late else None,
    )


def _summary(path: Path) -> _Rank:
    trace = read_one(path)
    nesting, window = steps_of(trace)
    analysis = analyse(trace, (nesting, window))
    times: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for item in collectives(nesting, window):
        times[item.name, item.bytes].append((item.end - item.start) / 1e3)
    parts = [part for part in analysis.parts if part.name != OTHER] or analysis.parts
    largest = max(parts, key=lambda part: max(part.host_ms, part.device_ms or 0.0))
    rank, of = rank_in(trace.header)
    if rank is None:
        match = _NUMBER.search(path.name) or _ANY_NUMBER.search(path.name)
        if match is None:
            raise DataError(
                "the trace does not name its rank",
                where={"file": path},
                fix="name the file after its rank, such as rank0.json.gz",
            )
        rank, of = int(match[1]), None
    step_ms, exposed = analysis.window.wall_ms, analysis.communication.exposed_ms
    own = max(0.0, step_ms - exposed)
    row = MeasuredRank(step_ms, own, exposed, None, None, rank, None, largest.name, path.name)
    sent = {row.what: row.bytes for row in analysis.communication.rows}
    return _Rank(row, path, window.count, of, dict(times), sent)
