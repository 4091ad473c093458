"""What a profile of several ranks shows: the slowest rank, and what the other ranks wait for."""

from __future__ import annotations

from collections.abc import Sequence

from ...measure.limits import ranks_sentence
from ...measure.profile_records import Collective, Communication, StepBudget
from ...measure.trace.records import ComparedRanks, TracedCollective
from . import formats as fmt
from . import plots
from .blocks import Block, Cell, Figure, Table, Text, Tile, cells
from .formats import component

OWN, LATE, BYTES, WAITS = "own work", "waiting for a rank", "waiting for bytes", "waiting"
DRAWN = 16
TOP = 12
RANKS = ("rank", "step", "own work", "waits", "for a late rank", "for bytes", "others wait for it", "largest own part")
WAITING = {"ms": "time", "exposed_ms": "exposed", "late_ms": "for a late rank", "moving_ms": "for bytes"}
"""The times of a collective, as far as they were measured."""
PER_STEP = "Per step, mean over the ranks. Most waited for: the rank for which the others waited longest there."


def of_several(profile: StepBudget) -> Communication | None:
    """The communication section, if the profile has several ranks."""
    return profile.communication if profile.communication and profile.communication.each else None


def exposed_tile(ms: float, share: float) -> Tile:
    return Tile("exposed communication", fmt.percent(share, 0), f"{fmt.time(ms)} of a step")


def blocks(key: str, section: Communication) -> list[Block]:
    return [
        Text(fmt.printable(ranks_sentence(section)), "lead"),
        *rank_blocks(key, section, _method(section)),
        *collective_blocks(section.collectives, PER_STEP),
    ]


def _rank(number: int | None) -> str:
    return fmt.NONE if number is None else f"rank {number}"


def collective_blocks(collectives: Sequence[Collective | TracedCollective], note: str) -> list[Block]:
    """A row for every kind of collective, with the times that are known of it."""
    if not collectives:
        return []
    first = collectives[0]
    times = [name for name in WAITING if getattr(first, name) is not None]
    compared = first.late_ms is not None
    rows = [
        cells(
            Cell(row.what if isinstance(row, Collective) else row.name, width=40),
            *([component(row.part)] if isinstance(row, Collective) else []),
            fmt.count(row.count),
            fmt.size(row.bytes or None),
            *(fmt.time(getattr(row, name)) for name in times),
            *([_rank(row.awaited_rank)] if compared else []),
        )
        for row in collectives
    ]
    where, awaited = ("in",) * isinstance(first, Collective), ("most waited for",) * compared
    head = ("collective", *where, "count", "sent", *(WAITING[name] for name in times), *awaited)
    return [Table(head, rows, note, left=tuple(map(head.index, (*where, *awaited))))]


def rank_blocks(key: str, section: Communication | ComparedRanks, method: str) -> list[Block]:
    """A bar and a row for every rank: its own work and its waits."""
    each = sorted(section.each, key=lambda row: -row.own_ms)
    names = ("step_ms", "own_ms", "exposed_ms", "late_ms", "moving_ms", "awaited_ms")
    rows = [
        cells(
            Cell(f"rank {row.rank}", "" if index else "strong"),
            *(fmt.time(getattr(row, name)) for name in names),
            component(row.largest_part),
        )
        for index, row in enumerate(each)
    ]
    more = f"{len(rows) - TOP} more ranks have less work of their own."
    return [_figure(key, section), Table(RANKS, rows, method, left=(7,), top=TOP, rest=more)]


def _method(section: Communication) -> str:
    """How the times were measured."""
    if section.not_told_apart:
        split = f"Waiting for a rank and waiting for bytes could not be separated: {section.not_told_apart}."
    else:
        split = (
            "A rank reads its clock when it reaches a collective and when its wait begins and ends. The time until the "
            "last rank has arrived is waiting for that rank; the rest is waiting for bytes."
        )
    clocks = "The ranks share one clock."
    if section.clock_error_ms:
        error = fmt.time(section.clock_error_ms)
        clocks = f"Clocks of {section.hosts} hosts were compared by messages, to within {error}."
    return (
        f"Every rank timed the same steps, started together; means of the {section.steps} middle ones. {split} "
        f"{clocks} Budget, operators and tables are those of rank {section.slowest}, the slowest."
    )


def _figure(key: str, section: Communication | ComparedRanks) -> Figure:
    """One bar per rank; of many ranks, those with the most work of their own."""
    shown = sorted(section.each, key=lambda row: -row.own_ms)[:DRAWN]
    bars = []
    for row in sorted(shown, key=lambda row: int(row.rank)):
        separated = row.late_ms is not None
        waits = [(LATE, row.late_ms), (BYTES, row.moving_ms)] if separated else [(WAITS, row.exposed_ms)]
        parts = [plots.BarPart(name, max(0.0, ms)) for name, ms in [(OWN, row.own_ms), *waits]]
        bars.append((f"rank {row.rank}", parts))
    listed = "; ".join(
        f"rank {row.rank} {fmt.time(row.own_ms)} own, {fmt.time(row.exposed_ms)} waiting" for row in shown
    )
    caption = "A step of each rank: its own work, then its waits in collectives for a late rank and for bytes."
    if len(section.each) > len(shown):
        caption += f" The {len(shown)} of {len(section.each)} ranks with the most work of their own."
    return Figure(
        f"{key}-ranks",
        f"Own work and waiting of each rank: {listed}",
        caption,
        lambda: plots.stacked(bars, "ms"),
    )
