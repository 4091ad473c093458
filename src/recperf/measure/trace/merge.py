"""The traces of several ranks as one file: a process a rank, and one clock. Torch-free.

Times of a trace are microseconds after a moment its header names, by the clock of its host. Ranks of one host share
that clock, and are moved together or not at all. Between hosts the ends of the same barriers, which every rank marked
when it began to record, say how far the clocks lie apart.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from ...errors import DataError, UsageError
from ...files import writing
from .cut import finite_text, opened
from .read import ABOUT, MARK
from .scan import Scan

MERGED = "merged"
Event = dict[str, Any]


@dataclass(kw_only=True)
class Source:
    """A rank's trace, as a first look at it shows."""

    path: Path
    rank: int
    ranks: int | None
    run: str | None
    host: str | None
    base_ns: int
    """The moment its times count from."""
    events: int = 0
    begin_us: float = math.inf
    end_us: float = -math.inf
    marks: dict[str, float] = field(default_factory=dict)
    """When each barrier ended, in us."""
    shift_ns: int = 0
    """To be added to its moments to make them those of the first rank."""

    def moment(self, us: float) -> int:
        """ns by the clock of the first rank."""
        return self.base_ns + round(us * 1e3) + self.shift_ns


def merge(paths: Sequence[Path], target: Path) -> dict[str, Any]:
    """Write one trace of the ranks' traces; what it holds, and how clocks were made one."""
    sources = sorted((look(path) for path in paths), key=lambda source: source.rank)
    _require_one_run(sources)
    if any(target.resolve() == source.path.resolve() for source in sources):
        raise UsageError("--output is one of the traces to be merged", where={"file": target})
    clock = _align(sources)
    _require_one_time(sources)
    size = _write(sources, target, clock["clock"])
    return {
        "file": str(target),
        "bytes": size,
        "events": sum(source.events for source in sources),
        "ranks": [
            {
                "rank": source.rank, "file": str(source.path), "events": source.events, "host": source.host,
                "shift_us": source.shift_ns / 1e3,
            }
            for source in sources
        ],
        "of": sources[0].ranks,
        **clock,
    }  # fmt: skip


def look(path: Path) -> Source:
    """Whose trace it is, and from when to when."""
    scan = Scan(path)
    count, begin, end, marks = 0, math.inf, -math.inf, {}
    for event in scan.events():
        count += 1
        start, length = event.get("ts"), event.get("dur", 0)
        if event.get("ph") != "X" or not isinstance(start, int | float) or not isinstance(length, int | float):
            continue
        begin, end = min(begin, start), max(end, start + length)
        name = str(event.get("name"))
        if name.startswith(MARK):
            marks[name] = start + length
    if not math.isfinite(begin):
        raise DataError(
            "the trace holds no event with a time", where={"file": path}, fix="give traces that torch.profiler exported"
        )
    about, told = (value if isinstance(value, dict) else {} for value in _headers(scan))
    if MERGED in about:
        raise DataError("this is a merged trace already", where={"file": path}, fix="give the traces of single ranks")
    rank = about.get("rank", told.get("rank"))
    if not isinstance(rank, int):
        raise DataError(
            "the trace does not say which rank it is of",
            where={"file": path},
            fix="recperf profile WORKLOAD --ranks N --trace writes traces that do",
        )
    base = scan.header.get("baseTimeNanoseconds")
    return Source(
        path=path,
        rank=rank,
        ranks=_whole(about.get("ranks", told.get("world_size"))),
        run=_word(about.get("run")),
        host=_word(about.get("host")),
        base_ns=base if isinstance(base, int) else 0,
        events=count,
        begin_us=begin,
        end_us=end,
        marks=marks,
    )


def _headers(scan: Scan) -> tuple[Any, Any]:
    """What recperf and what torch wrote beside the events."""
    return scan.header.get(ABOUT), scan.header.get("distributedInfo")


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _word(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _require_one_run(sources: list[Source]) -> None:
    if len(sources) < 2:
        raise UsageError("merging needs the traces of at least two ranks", fix="recperf trace merge RUN")
    for before, source in zip(sources, sources[1:]):
        where: dict[str, object] = {"one": before.path, "other": source.path}
        if before.rank == source.rank:
            raise DataError(f"two traces are of rank {source.rank}", where=where, fix="give each rank's trace once")
        if before.run != source.run or before.ranks != source.ranks:
            raise DataError("the traces are of different runs", where=where, fix="give the traces of one run")


def _require_one_time(sources: list[Source]) -> None:
    """Ranks of a run were traced at the same time; traces that do not overlap are of different runs."""
    begins = [(source.moment(source.begin_us), source) for source in sources]
    ends = [(source.moment(source.end_us), source) for source in sources]
    begin, late = max(begins, key=lambda pair: pair[0])
    end, early = min(ends, key=lambda pair: pair[0])
    if begin > end:
        raise DataError(
            f"the traces are of different moments: one ends {(begin - end) / 1e9:.3g} s before the other begins",
            where={"one": early.path, "other": late.path},
            fix="give the traces of one run",
        )


def _align(sources: list[Source]) -> dict[str, Any]:
    """Give every source its shift; how it was found, and by how much the same barrier still ends apart."""
    first = sources[0]
    shared = sorted(set(first.marks).intersection(*(source.marks for source in sources)))
    hosts: defaultdict[str | int, list[Source]] = defaultdict(list)
    for source in sources:
        # A trace that names no host may be of any.
        hosts[source.rank if source.host is None else source.host].append(source)
    apart = [0.0]
    for ranks in hosts.values():
        late = [_late(source, first, mark) for source in ranks for mark in shared]
        if late and first not in ranks:
            # Any of the ends may be late on one rank; the one in the middle is the most likely to be at the same time.
            shift = -round(statistics.median(late))
            for source in ranks:
                source.shift_ns = shift
        apart += [abs(_late(source, first, mark)) / 1e3 for source in ranks for mark in shared]
    one_host = len(hosts) == 1
    how = "one host's clock" if one_host else "barriers" if shared else "the hosts' clocks, which were trusted"
    return {"clock": how, "barriers": len(shared), "apart_us": max(apart) if shared else None}


def _late(source: Source, first: Source, mark: str) -> int:
    """ns by which a barrier ended later here than on the first rank."""
    return source.moment(source.marks[mark]) - first.moment(first.marks[mark])


def _write(sources: list[Source], target: Path, clock: str) -> int:
    """The size of the file, which appears whole or not at all."""
    beside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    first = min(source.moment(source.begin_us) for source in sources)
    with writing(target, fix="choose another --output"):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with opened(beside, packed=target.suffix == ".gz") as file:
                _write_all(sources, file, first, clock, target.name)
            size = beside.stat().st_size
            os.replace(beside, target)
        finally:
            beside.unlink(missing_ok=True)
    return size


def _write_all(sources: list[Source], file: IO[str], first: int, clock: str, name: str) -> None:
    file.write('{"traceEvents":[')
    between = "\n"
    ids = _Ids()
    for source in sources:
        for event in _Track(source, first, ids).events():
            file.write(between + finite_text(event))
            between = ",\n"
    header = {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": first,
        ABOUT: {MERGED: [source.rank for source in sources], "run": sources[0].run, "clock": clock},
        "traceName": name,
    }
    file.write("\n],\n" + json.dumps(header)[1:] + "\n")


class _Ids:
    """Numbers that are given once in the whole file; viewers join arrows of all processes that have the same."""

    def __init__(self) -> None:
        self._given: dict[tuple[int, str, str], int] = {}

    def of(self, rank: int, category: Any, given: Any) -> int:
        return self._given.setdefault((rank, str(category), str(given)), len(self._given) + 1)


class _Track:
    """A rank's events as those of one process. What were processes (its host's, its devices') become groups of
    threads."""

    def __init__(self, source: Source, first: int, ids: _Ids) -> None:
        self.source, self.first, self.ids = source, first, ids
        # 0 is the kernel's own process to some viewers.
        self.pid = source.rank + 1
        self._threads: dict[tuple[str, str], int] = {}
        self._names: dict[tuple[str, str], str] = {}
        self._kinds: dict[str, str] = {}

    def events(self) -> Iterator[Event]:
        where = f", {self.source.host}" if self.source.host else ""
        yield self._told("process_name", {"name": f"rank {self.source.rank}"})
        yield self._told("process_labels", {"labels": f"{self.source.path.name}{where}"})
        yield self._told("process_sort_index", {"sort_index": self.source.rank})
        for event in Scan(self.source.path).events():
            if event.get("ph") == "M":
                self._learn(event)
            else:
                yield self._moved(event)
        for (process, thread), number in self._threads.items():
            name = self._names.get((process, thread), thread)
            kind = self._kinds.get(process)
            yield self._told("thread_name", {"name": f"{kind}: {name}" if kind else name}, number)
            yield self._told("thread_sort_index", {"sort_index": number}, number)

    def _told(self, name: str, args: Event, thread: int = 0) -> Event:
        return {"ph": "M", "name": name, "pid": self.pid, "tid": thread, "ts": 0, "args": args}

    def _learn(self, event: Event) -> None:
        """Names that the trace gives its threads and processes."""
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
        time = event.get("ts")
        if isinstance(time, int | float) and math.isfinite(time):
            moved["ts"] = (self.source.moment(time) - self.first) / 1e3
        for name in ("id", "bind_id"):
            if name in event:
                moved[name] = self.ids.of(self.source.rank, event.get("cat"), event[name])
        return moved
