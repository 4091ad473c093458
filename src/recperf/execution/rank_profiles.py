"""Profiles the ranks of a program together: each observes the same steps of its own, the first one compares all.

Ranks meet in the store of the program's process group, which knows all hosts. Ranks that a program starts as child
processes write into a folder of the process that started them; those that it starts as programs, as Lightning does,
become profiles too.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from torch import distributed
from torch.distributed import distributed_c10d

from ..errors import DataError
from ..folders import temporary_folder
from ..measure.child_sampler import Sampled
from ..measure.clocks import TRACED, Counts
from ..measure.places import place_text
from ..measure.profile_records import Communication
from ..measure.records import PlaceTime
from ..measure.trace.analyse import compare_ranks
from ..runs.step_report import Report
from ..units import time
from .program_hooks import Hooks, ProgramStopped, patched
from .step_profile import Profiler

COUNTS = Counts(3, 20, TRACED, 3, again=60)
"""Steps that all ranks observe, so that they stop after the same one."""
SECONDS = 60.0
"""How long the first rank waits for the profile of another one after its own program has ended."""


class RankFile(NamedTuple):
    """What one rank saw."""

    rank: int
    size: int
    report: bytes
    trace: bytes

    @classmethod
    def of(cls, rank: int, size: int, report: Report, profiler: Profiler) -> RankFile:
        trace = b""
        if (recording := profiler.observer.recording) is not None and profiler.observer.traced:
            with temporary_folder() as folder:
                recording.save(folder / "trace.json.gz")
                trace = (folder / "trace.json.gz").read_bytes()
        return cls(rank, size, msgspec.msgpack.encode(report), trace)


class Meeting:
    """The process group that the program joins inside `watched`. Where the program starts itself as a further rank, the
    command is `profile`, followed by its own arguments, instead."""

    def __init__(self, script: Path | None = None, profile: Sequence[str] = ()) -> None:
        self.rank, self.size = 0, 1
        self._script, self._profile = script, profile
        self._store: Any = None

    @contextmanager
    def watched(self, joined: Callable[[], None] = lambda: None) -> Iterator[None]:
        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(original)
            def join(*arguments: Any, **named: Any) -> Any:
                result = original(*arguments, **named)
                self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
                self._store = distributed_c10d.PrefixStore("recperf", distributed_c10d._get_default_store())
                # Launchers of trainers start further ranks as plain programs, which send nothing.
                self._store.set(f"profiled {self.rank}", b"1")
                joined()
                return result

            return join

        with (
            patched(distributed, "init_process_group", wrap),
            patched(distributed_c10d, "init_process_group", wrap),
            patched(subprocess.Popen, "__init__", self._profiled),
        ):
            yield

    def _profiled(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def start(process: Any, args: Any, *rest: Any, **named: Any) -> None:
            environment = named.get("env") or os.environ
            if self._is_rank(args, environment):
                args = [*self._profile, *args[2:]]
            original(process, args, *rest, **named)

        return start

    def _is_rank(self, args: Any, environment: Any) -> bool:
        if self._script is None or not isinstance(args, list) or args[:1] != [sys.executable] or len(args) < 2:
            return False
        return Path(args[1]).resolve() == self._script and int(environment.get("LOCAL_RANK") or 0) > 0

    def gather(self, mine: RankFile) -> list[RankFile]:
        """Those of all ranks that arrive, on rank 0; elsewhere none."""
        if self.rank:
            # The first rank may have failed, and the store with it.
            with suppress(RuntimeError):
                self._store.set(f"{self.rank}", pickle.dumps(tuple(mine)))
                self._store.wait(["read"], timedelta(seconds=SECONDS))
            return []
        every = [mine]
        for rank in range(1, self.size):
            with suppress(RuntimeError):
                if not self._store.check([f"profiled {rank}"]):
                    continue
                self._store.wait([f"{rank}"], timedelta(seconds=SECONDS))
                every.append(RankFile(*pickle.loads(self._store.get(f"{rank}"))))
        with suppress(RuntimeError):
            self._store.set("read", b"1")
        return every


def together(files: list[RankFile]) -> Report:
    """The report of the slowest rank with the comparison of all; of the first one where they cannot be compared."""
    files = sorted(files)
    reports = {one.rank: msgspec.msgpack.decode(one.report, type=Report) for one in files}
    size, first = files[0].size, reports[files[0].rank]
    if len(files) < size:
        first.notes.append(f"{size - len(files)} of {size} ranks sent no profile")
    with temporary_folder() as folder:
        for one in files:
            if one.trace:
                (folder / f"trace.rank{one.rank}.json.gz").write_bytes(one.trace)
        try:
            compared = compare_ranks(folder)
        except DataError as error:
            first.notes.append(f"the ranks are not compared: {error.what}")
            return first
    report = reports[compared.slowest]
    names = Communication.__struct_fields__
    report.ranks = Communication(**{name: getattr(compared, name) for name in names})
    report.ranks.why = _why(compared.slowest, reports)
    # What one trace alone cannot tell.
    report.notes = [note for note in report.notes if not note.startswith("collective ")]
    report.notes += [*compared.notes, f"figures beside those of ranks are those of rank {compared.slowest}"]
    return report


def _why(slowest: int, reports: dict[int, Report]) -> str:
    """The line in which the slowest rank takes most more time than the others do."""
    times: dict[int, defaultdict[Any, float]] = {rank: defaultdict(float) for rank in reports}
    limits: dict[Any, PlaceTime] = {}
    for rank, report in reports.items():
        for row in report.places:
            if row.limit != "communication":
                place = row.file, row.line, row.backward
                times[rank][place] += row.ms
                if rank == slowest:
                    limits.setdefault(place, row)
    others = [rank for rank in reports if rank != slowest]
    more = {
        place: ms - sum(times[rank][place] for rank in others) / len(others) for place, ms in times[slowest].items()
    }
    if not more or max(more.values()) <= 0:
        return ""
    place = max(more, key=lambda one: more[one])
    row = limits[place]
    return f"{place_text(row)} takes {time(more[place])} more there than on the others ({row.limit})"


class RankProfiler(ExitStack):
    """Profiles this process from the moment at which it joins a process group of several ranks, to its end."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder, self._meeting = folder, Meeting()
        self._profiler: Profiler | None = None
        self._hooks: Hooks | None = None

    def __enter__(self) -> RankProfiler:
        super().__enter__()
        self.enter_context(self._meeting.watched(self._joined))
        return self

    def _joined(self) -> None:
        if self._meeting.size > 1 and self._profiler is None:
            self._profiler = Profiler(quiet=True, peaks=False)
            self._profiler.counts = COUNTS
            self._profiler.__enter__()
            self._hooks = self.enter_context(Hooks(self._profiler, to_the_end=True))

    def finish(self) -> None:
        """Leave what was seen in the folder."""
        if self._profiler is None:
            return
        self._profiler.close()
        if self._profiler.observer.plain:
            one = RankFile.of(self._meeting.rank, self._meeting.size, self._profiler.build(), self._profiler)
            (self._folder / f"{one.rank}.rank").write_bytes(pickle.dumps(tuple(one)))


class SampledRank(Sampled):
    """The function of a process that may become a rank."""

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        with RankProfiler(self.folder) as profiler:
            try:
                return super().__call__(*arguments, **named)
            except ProgramStopped:
                return None
            finally:
                profiler.finish()


def of_children(profiler: Profiler) -> list[RankFile]:
    """What the ranks saw that this process started."""
    ranks = profiler.children.ranks if profiler.children is not None else []
    return [RankFile(*pickle.loads(content)) for content in ranks]


def world_size() -> int:
    """How many processes a launcher started."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def is_first() -> bool:
    return int(os.environ.get("RANK") or 0) == 0
