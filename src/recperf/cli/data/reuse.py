"""recperf data reuse NAME: how large a cache of table rows serves which share of the lookups of a training."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any

import tyro
from msgspec.structs import asdict

from ... import workloads
from ...config import require, within
from ...data import datasets
from ...data.reuse import FOLLOWED, SIZES_D, Reuse
from ...errors import UsageError
from ...execution.tables import Lookups
from ...execution.workload import load
from ...jsonfile import Struct
from ...units import byte_count, size
from ..help import SWITCHES
from ..options import C, WorkloadOptions, choose, read_options
from ..terminal import Terminal, print_json, table
from .output import progress_bars

DESCRIPTION = """Tell how large a cache of table rows serves which share of the lookups of a training, before it runs.

The batches of the training are read, no table is allocated. A row counts once in a step. Of large tables a sample of
rows is followed; the standard error is printed."""
GOAL = 0.99
"""The recommended cache serves this share of the lookups of rows that were used before."""
MOST_SIZES = 8
"""Cache sizes in the printed table."""


@dataclass(frozen=True, kw_only=True)
class Options(WorkloadOptions[C]):
    workload: str | None = None
    """The workload that trains on the dataset; by default the first that can and does not change all rows in a step."""
    memory: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """A size of the cache to report as well, as in 40GiB; can be repeated."""
    steps: int = 1000
    """Training steps to read, from the first one on; 0: all."""
    followed: int = FOLLOWED
    """Rows to follow at most."""


def reuse(arguments: list[str]) -> int:
    choice = choose(_as_workload(arguments))
    options = read_options(Options, choice, verb="data reuse", description=DESCRIPTION)
    within(0, options.steps, 1 << 40, "steps")
    memory = [byte_count(text) for text in options.memory]
    for text, count in zip(options.memory, memory):
        require(bool(count), "memory", text, "a size as in 512MiB or 40GiB")
    if choice.workload.lookups is None:
        raise UsageError(
            f"{choice.workload.name} changes all rows of its tables in every step: no smaller cache serves it",
            fix="recperf data reuse NAME --workload dlrm",
        )
    terminal = Terminal(as_json=options.json, quiet=options.quiet)
    lookups: Lookups = load(choice.workload.lookups)(options.values)
    counted = _count(lookups, options, terminal)
    depth = getattr(getattr(options.values, "tables", None), "depth", 2)
    curve = describe(choice.workload.name, counted, lookups, [m for m in memory if m], depth)
    if options.json:
        print_json(curve)
    else:
        terminal.say(as_text(curve))
    return 0


def _as_workload(arguments: list[str]) -> list[str]:
    """The arguments of a command about a workload: a dataset that comes first as --data, --workload as its name."""
    rest = list(arguments)
    workload = _take(rest, "--workload")
    if workload is not None:
        workloads.find(workload)
    first = rest[0] if rest and not rest[0].startswith("-") else None
    if first is not None and first not in workloads.names():
        kind = datasets.find(first).kind
        able = (name for name in workloads.able(kind) if workloads.find(name).lookups)
        return [workload or next(able, "dlrm"), "--data", *rest]
    flags = {argument.partition("=")[0] for argument in rest}
    if first is None and workload is None and flags & SWITCHES:
        workload = "dlrm-v4"
    if first is None and workload is None and "--config" not in flags:
        raise UsageError(
            "data reuse needs a dataset, or a workload for its own data",
            fix="recperf data reuse NAME, or recperf data reuse --workload dlrm",
        )
    return rest if workload is None else [workload, *rest]


def _take(arguments: list[str], flag: str) -> str | None:
    """Remove an option and return its value."""
    for place, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name == flag:
            following = [value] if equals else arguments[place + 1 : place + 2]
            del arguments[place : place + (1 if equals else 2)]
            return next(iter(following), "")
    return None


def _count(lookups: Lookups, options: Options[Any], terminal: Terminal) -> Reuse:
    counted = Reuse(list(lookups.tables.values()), followed=options.followed)
    steps = min(lookups.steps, options.steps or lookups.steps)
    with progress_bars(terminal, resumable=False) as bars, closing(lookups.rows()) as batches:  # type: ignore[type-var]
        show = bars("steps read", "steps")
        for step, tables in enumerate(islice(batches, steps)):
            show(step, steps)
            counted.add(tables)
    return counted


class CachePoint(Struct, kw_only=True):
    """What a cache of one size does."""

    rows: int
    bytes: int
    served: float
    """Share of the lookups that it serves."""
    error: float
    in_bytes_per_step: float
    out_bytes_per_step: float


class Recommended(CachePoint, kw_only=True):
    option: str


class StepsRead(Struct):
    read: int
    of: int


class CacheCurve(Struct, kw_only=True):
    workload: str
    data: str
    steps: StepsRead
    rows: int
    record_bytes: int
    table_bytes: int
    used_rows: int
    rows_per_step: float
    first_use_share: float
    followed_share: float
    batches_in_cache: int
    least_bytes: int
    curve: list[CachePoint]
    recommended: Recommended


def describe(workload: str, counted: Reuse, lookups: Lookups, memory: list[int], depth: int) -> CacheCurve:
    """The curve with everything that is printed; `depth` batches are fetched ahead of the current one."""
    record, steps, table_rows = lookups.record_bytes, max(1, counted.batches), sum(lookups.tables.values())
    least = min((depth + 1) * counted.most_in_batch, table_rows)

    def point(slots: int) -> CachePoint:
        misses = counted.misses(slots)
        return CachePoint(
            rows=slots,
            bytes=slots * record,
            served=counted.served(slots),
            error=counted.error(slots),
            # A row that was never used before has its initial value, which is computed and not copied.
            in_bytes_per_step=(misses - counted.first) * record / steps,
            out_bytes_per_step=max(0, misses - slots) * record / steps,
        )

    first_use_share = counted.first / max(1, counted.uses)
    best = point(max(least, counted.slots_for(GOAL * (1 - first_use_share)) or 0))
    sizes = {bytes_ // record for bytes_ in memory} | set(_sizes(least, counted.first, record))
    return CacheCurve(
        workload=workload,
        data=lookups.data,
        steps=StepsRead(counted.batches, lookups.steps),
        rows=table_rows,
        record_bytes=record,
        table_bytes=record * table_rows,
        used_rows=counted.first,
        rows_per_step=counted.uses / steps,
        first_use_share=first_use_share,
        followed_share=counted.rate,
        batches_in_cache=depth + 1,
        least_bytes=least * record,
        curve=[point(slots) for slots in sorted(sizes)],
        recommended=Recommended(**asdict(best), option=f"--tables.device-bytes {_rounded_up(best.bytes)}"),
    )


def _sizes(least: int, used: int, record: int) -> list[int]:
    """Caches in rows: powers of two in bytes, from those that the batches in flight need to those for all used rows."""
    powers = [1 << power for power in range(10, 60) if least * record <= 1 << power < used * record]
    every = -(-len(powers) // MOST_SIZES) or 1
    all_used = next((int(slots) for slots in SIZES_D if slots >= used), used)
    return [*(power // record for power in powers[::-1][::every][::-1]), max(least, all_used)]


def _rounded_up(count: int) -> str:
    """Bytes as an option takes them: whole MiB, from 10 GiB on whole GiB."""
    unit, name = (30, "GiB") if count >= 10 << 30 else (20, "MiB")
    return f"{max(1, -(-count >> unit))}{name}"


def as_text(curve: CacheCurve) -> str:
    steps, record = curve.steps, curve.record_bytes
    read = "" if steps.read == steps.of else f"the first {steps.read:,} of "
    all_followed = curve.followed_share == 1
    followed = "" if all_followed else f"; 1 of {1 / curve.followed_share:,.0f} rows was followed"
    used = f"{'' if all_followed else 'about '}{curve.used_rows:,} are used, {size(curve.used_rows * record)}"
    lines = [
        f"{curve.workload} on {curve.data}, {read}{steps.of:,} steps: {curve.rows_per_step:,.0f} distinct "
        "rows per step",
        f"tables {size(curve.table_bytes)}: {curve.rows:,} rows of {record:,} bytes with optimizer state; {used}",
        f"{curve.first_use_share:.1%} of the lookups are first uses, which no cache serves{followed}",
        "",
        table([["cache", "rows", "serves", "in per step", "out per step"], *map(_row, curve.curve)]),
        "",
        f"at least {size(curve.least_bytes)}: the rows of {curve.batches_in_cache} batches have to fit",
        _recommendation(curve),
    ]
    return "\n".join(lines)


def _row(point: CachePoint) -> list[str]:
    error = f" ± {100 * point.error:.1f}" if point.error else ""
    moved = (size(point.in_bytes_per_step), size(point.out_bytes_per_step))
    return [size(point.bytes), f"{point.rows:,}", f"{100 * point.served:.1f}{error} %", *moved]


def _recommendation(curve: CacheCurve) -> str:
    best = curve.recommended
    if curve.first_use_share == 1:
        return "no row is used twice in these steps: read more of them with --steps"
    if best.bytes >= curve.table_bytes:
        whole = size(curve.table_bytes)
        return f"recommended: --tables.placement device: nothing smaller than all tables, {whole}, serves {GOAL:.0%}"
    moved = (size(best.in_bytes_per_step), size(best.out_bytes_per_step))
    return (
        f"recommended: {best.option} (on a CPU --tables.resident): it serves {GOAL:.0%} of the lookups of rows that "
        f"were used before; {moved[0]} a step come from host memory or files, {moved[1]} go back"
    )
