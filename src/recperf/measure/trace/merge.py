"""Merges the traces of several ranks into one file with one process per rank and one clock. Torch-free.

Times in a trace are microseconds after a moment in its header, by the clock of its host.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import DataError, UsageError
from .file import Event, Scan, write_trace
from .read import ABOUT, MERGED, facts_in, number_of, rank_in, whole_of
from .records import MergedRank, MergedTraces

FlowIds = dict[tuple[int, str, str], int]
"""Ids that are unique in the whole file by rank, category and id: viewers connect flows with equal ids."""


@dataclass(kw_only=True)
class TraceSource:
    """The trace of one rank, as a first pass shows it."""

    path: Path
    rank: int
    ranks: int | None
    run: Any
    host: str | None
    base_ns: int
    """The moment from which its times count."""
    events: int
    begin_us: float
    end_us: float

    def moment(self, us: float) -> int:
        """ns by the clock of its host."""
        return self.base_ns + round(us * 1e3)


def merge(paths: Sequence[Path], target: Path) -> MergedTraces:
    """Write one trace from those of the ranks; returns what it holds and whose clocks it has."""
    sources = sorted((inspect(path) for path in paths), key=lambda source: source.rank)
    _require_one_run(sources)
    if any(target.resolve() == source.path.resolve() for source in sources):
        raise UsageError("the file to write is one of the traces to merge", where={"file": target})
    # A trace that names no host may come from any.
    one_host = sources[0].host is not None and len({source.host for source in sources}) == 1
    clock = "one host's clock" if one_host else "the hosts' own clocks, not verified"
    first = min(source.moment(source.begin_us) for source in sources)
    ids: FlowIds = {}
    header = {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": first,
        ABOUT: {MERGED: [source.rank for source in sources], "run": sources[0].run, "clock": clock},
    }
    events = (event for source in sources for event in _Track(source, first, ids).events())
    size = write_trace(target, events, header, fix="make the folder writable")
    return MergedTraces(
        file=str(target),
        bytes=size,
        events=sum(source.events for source in sources),
        ranks=[MergedRank(source.rank, str(source.path), source.events, source.host) for source in sources],
        of=sources[0].ranks,
        clock=clock,
    )


def inspect(path: Path) -> TraceSource:
    """The rank of a trace, and its first and last time."""
    scan = Scan(path)
    count, begin, end = 0, math.inf, -math.inf
    for event in scan.events():
        count += 1
        start, length = number_of(event.get("ts")), number_of(event.get("dur", 0))
        if event.get("ph") == "X" and start is not None and length is not None and length >= 0:
            begin, end = min(begin, start), max(end, start + length)
    ours, (rank, ranks) = facts_in(scan.header), rank_in(scan.header)
    what, fix = "", "use traces exported by torch.profiler"
    if not math.isfinite(begin):
        what = "the trace has no event with a valid time"
    elif MERGED in ours:
        what, fix = "this trace is already merged", "use the traces of single ranks"
    elif rank is None:
        what, fix = "the trace does not name its rank", "record it with recperf profile WORKLOAD --ranks N --save-trace"
    if what or rank is None:
        raise DataError(what, where={"file": path}, fix=fix)
    host = ours.get("host")
    return TraceSource(
        path=path,
        rank=rank,
        ranks=ranks,
        run=ours.get("run"),
        host=host if isinstance(host, str) else None,
        base_ns=whole_of(scan.header.get("baseTimeNanoseconds")) or 0,
        events=count,
        begin_us=begin,
        end_us=end,
    )


def _require_one_run(sources: list[TraceSource]) -> None:
    if len(sources) < 2:
        raise UsageError("merging needs the traces of at least two ranks", fix="recperf profile --trace FOLDER")
    for before, source in zip(sources, sources[1:]):
        where: dict[str, object] = {"one": before.path, "other": source.path}
        if before.rank == source.rank:
            raise DataError(
                f"two traces belong to rank {source.rank}", where=where, fix="give the trace of each rank once"
            )
        if before.run != source.run or before.ranks != source.ranks:
            raise DataError("the traces belong to different runs", where=where, fix="use the traces of one run")
    # Ranks of a run record at the same time.
    late = max(sources, key=lambda source: source.moment(source.begin_us))
    early = min(sources, key=lambda source: source.moment(source.end_us))
    apart = late.moment(late.begin_us) - early.moment(early.end_us)
    if apart > 0:
        raise DataError(
            f"the traces do not overlap in time: one ends {apart / 1e9:.3g} s before the other begins",
            where={"one": early.path, "other": late.path},
            fix="use the traces of one run, from hosts whose clocks agree",
        )


class _Track:
    """The events of a rank as one process; processes of its trace (host, devices) become groups of threads."""

    def __init__(self, source: TraceSource, first: int, ids: FlowIds) -> None:
        self.source, self.first, self.ids = source, first, ids
        # Some viewers reserve process 0 for the kernel.
        self.pid = source.rank + 1
        self._threads: dict[tuple[str, str], int] = {}
        self._names: dict[tuple[str, str], str] = {}
        self._kinds: dict[str, str] = {}

    def events(self) -> Iterator[Event]:
        where = f", {self.source.host}" if self.source.host else ""
        yield self._metadata("process_name", {"name": f"rank {self.source.rank}"})
        yield self._metadata("process_labels", {"labels": f"{self.source.path.name}{where}"})
        yield self._metadata("process_sort_index", {"sort_index": self.source.rank})
        for event in Scan(self.source.path).events():
            if event.get("ph") == "M":
                self._record_names(event)
            elif all(number_of(event[name]) is not None for name in ("ts", "dur") if name in event):
                yield self._moved(event)
        for (process, thread), number in self._threads.items():
            name = self._names.get((process, thread), thread)
            kind = self._kinds.get(process)
            yield self._metadata("thread_name", {"name": f"{kind}: {name}" if kind else name}, number)
            yield self._metadata("thread_sort_index", {"sort_index": number}, number)

    def _metadata(self, name: str, args: Event, thread: int = 0) -> Event:
        return {"ph": "M", "name": name, "pid": self.pid, "tid": thread, "ts": 0, "args": args}

    def _record_names(self, event: Event) -> None:
        args = event.get("args")
        if not isinstance(args, dict):
            return
        place = str(event.get("pid")), str(event.get("tid"))
        if event.get("name") == "thread_name" and "name" in args:
            self._names[place] = str(args["name"])
        elif event.get("name") == "process_labels" and args.get("labels") not in (None, "", "CPU"):
            self._kinds[place[0]] = str(args["labels"])

    def _moved(self, event: Event) -> Event:
        place = str(event.get("pid")), str(event.get("tid"))
        moved = {**event, "pid": self.pid, "tid": self._threads.setdefault(place, len(self._threads) + 1)}
        time = number_of(event.get("ts"))
        if time is not None:
            moved["ts"] = (self.source.moment(time) - self.first) / 1e3
        for name in ("id", "bind_id"):
            if name in event:
                key = self.source.rank, str(event.get("cat")), str(event[name])
                moved[name] = self.ids.setdefault(key, len(self.ids) + 1)
        return moved
