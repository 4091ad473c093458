"""Sections about the device and ranks: kernels, roofline, idle time, transfers, embedding tables, communication."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...measure.limits import ranks_sentence
from ...measure.peaks.records import Peaks
from ...measure.profile_records import (
    Collective,
    Communication,
    Embeddings,
    Idle,
    Kernels,
    RooflinePoint,
    StepBudget,
    Transfer,
)
from ...measure.trace.records import ComparedRanks, TracedCollective
from ...units import digits
from . import charts
from . import formats as fmt
from .blocks import Block, Cell, Figure, Table, Text, Tile, cells
from .formats import NONE, component
from .step_sections import TOP, keyed, last_name

IDLE_COLOURS = {"busy": "accent", "input wait": "data", "host wait": "embedding", "kernel gap": "hash", "sync": "loss"}


def kernels(kernels: Kernels, step: float, top: int = TOP) -> list[Block]:
    """The kernels of a step of `step` ms."""
    small = kernels.small
    share = f" ({fmt.percent(kernels.busy_ms / step, 0)} of the {fmt.time(step)} step)" if step else ""
    sentence = (
        f"{fmt.count(kernels.count)} kernels per step keep the device busy for {fmt.time(kernels.busy_ms)}"
        f"{share}. {fmt.count(small.count)} of them ({fmt.percent(small.share_of_count, 0)}) run for less than "
        f"10 µs, {fmt.time(small.total_ms)} in total."
    )
    listed = sorted(kernels.rows, key=lambda row: row.total_ms, reverse=True)
    rows = [
        cells(
            Cell(row.name, width=44),
            Cell(last_name(row.part) or NONE, "muted", width=24),
            fmt.count(row.count),
            fmt.time(row.total_ms),
            fmt.time(row.mean_us / 1e3),
            fmt.percent(row.share, 1),
            fmt.time(None if row.launch_delay_us is None else row.launch_delay_us / 1e3),
        )
        for row in listed
    ]
    rest = listed[top:]
    more = f"{len(rest)} more kernels take {fmt.time(math.fsum(row.total_ms for row in rest))}."
    head = ("kernel", "part", "count", "total", "mean", "share", "launch delay")
    note = "Per step. Launch delay: from the end of the launching call to the start of the kernel."
    return [Text(sentence, "lead"), Table(head, rows, note, left=(1,), top=top, rest=more)]


def roofline_blocks(points: list[RooflinePoint], peaks: Peaks | None, key: str) -> list[Block]:
    rows = [
        cells(
            keyed(point.name, f"{index}. {component(point.name)}"),
            fmt.scaled(point.flops),
            fmt.size(point.bytes),
            NONE if point.intensity is None else digits(point.intensity),
            fmt.flop_rate(point.flops_per_s),
            fmt.byte_rate(point.bytes_per_s),
            fmt.of_ceiling(point.share_of_roof, point.bound),
            Cell(point.bound, "muted"),
        )
        for index, point in enumerate(points, 1)
    ]
    note = "FLOPs and bytes are counted, times are measured."
    if peaks:
        quick = ", in quick mode" if peaks.quick else ""
        note += f" The ceilings were measured {fmt.timestamp(peaks.measured)} (UTC){quick}."
    head = ("part", "FLOPs", "bytes", "FLOP/B", "FLOP/s", "B/s", "of the roof", "bound by")
    return [*_roofline_figure(points, key), Table(head, rows, note, left=(7,))]


def _roofline_figure(points: list[RooflinePoint], key: str) -> list[Block]:
    if not points or not points[0].ceiling_flops_per_s:
        return []
    dots = [
        charts.Dot(index, fmt.short(point.name, 28), point.intensity, point.flops_per_s)
        for index, point in enumerate(points, 1)
        if point.intensity and point.flops_per_s > 0
    ]
    bandwidth, peak = points[0].ceiling_bytes_per_s, points[0].ceiling_flops_per_s
    return [charts.roofline_figure(f"{key}-roofline", bandwidth, peak, dots)]


def idle_tiles(idle: Idle) -> list[Tile]:
    if not idle.wall_ms:
        return []
    cause = max(idle.causes, key=lambda name: idle.causes[name], default="")
    return [Tile("device idle", fmt.percent(idle.idle_ms / idle.wall_ms, 0), f"main cause: {cause}")]


def idle(idle: Idle) -> list[Block]:
    wall = idle.wall_ms
    states = [("busy", idle.busy_ms), *idle.causes.items()]
    slices = [charts.BarPart(name, max(0.0, ms), tone=IDLE_COLOURS.get(name, "other")) for name, ms in states]

    def shares(ms: float) -> tuple[str, str]:
        return fmt.time(ms), fmt.percent(ms / wall if wall else None, 1)

    rows = [
        cells(Cell(part.name if part.name == "busy" else f"idle: {part.name}", swatch=part.tone), *shares(part.value))
        for part in slices
    ]
    rows.append(tuple(Cell(text, "strong") for text in ("sum", *shares(math.fsum(part.value for part in slices)))))
    rows.append(cells("whole step", *shares(wall)))
    share = f" ({fmt.percent(idle.idle_ms / wall, 0)})" if wall else ""
    sentence = (
        f"In a traced step of {fmt.time(wall)} the device is busy for {fmt.time(idle.busy_ms)} and idle for "
        f"{fmt.time(idle.idle_ms)}{share}."
    )
    listed = ", ".join(f"{part.name} {fmt.time(part.value)}" for part in slices)
    figure = Figure(
        "profile-idle",
        f"The device in a step: {listed}",
        "The device during a traced step: busy, and idle by cause.",
        lambda: charts.stacked([("", slices)], "ms"),
    )
    blocks: list[Block] = [Text(sentence, "lead"), figure, Table(("device", "per step", "share"), rows, _IDLE_NOTE)]
    syncs = [
        cells(
            Cell(sync.what, width=40), Cell(sync.caller, width=44), fmt.count(sync.count),
            fmt.time(sync.ms),
        )
        for sync in sorted(idle.syncs, key=lambda sync: -sync.ms)
    ]  # fmt: skip
    if syncs:
        blocks.append(Table(("synchronisation", "called by", "count", "host waits"), syncs, left=(1,), top=TOP))
    return blocks


_IDLE_NOTE = (
    "Input wait: the host was preparing the batch. Host wait: the host had not launched the next kernel yet. Kernel "
    "gap: the kernel was launched, but the device started it late. Sync: the host waited for the device to finish."
)


def transfers(transfers: list[Transfer]) -> list[Block]:
    if not transfers:
        return [Text("Nothing was copied or set.")]
    rows = [
        cells(
            row.kind,
            fmt.count(row.count),
            fmt.size(row.bytes),
            fmt.time(row.ms),
            fmt.byte_rate(row.gb_per_s * 1e9 if row.gb_per_s else None),
            Cell(fmt.yes_or_no(row.pinned), "bad" if row.pinned is False else ""),
            fmt.percent(row.overlapped_share, 0),
        )
        for row in transfers
    ]
    note = "Per step. Overlapped: the share of the time during which a kernel ran as well."
    return [Table(("kind", "count", "bytes", "time", "rate", "pinned", "overlapped"), rows, note)]


def embeddings(embeddings: Embeddings) -> list[Block]:
    tables = sorted(embeddings.tables, key=lambda row: row.lookups, reverse=True)
    blocks: list[Block] = [Text(" ".join(_embedding_sentences(embeddings)), "lead")]
    if not tables:
        return blocks
    rows = [
        cells(
            Cell(row.name, width=24),
            f"{row.rows:,}",
            fmt.size(row.row_bytes),
            fmt.count(row.lookups),
            fmt.count(row.unique),
            fmt.percent(row.unique_ratio, 1),
            fmt.size(row.touched_bytes),
            fmt.percent(row.busiest_share, 0),
        )
        for row in tables
    ]
    rest = tables[TOP:]
    more = f"{len(rest)} more tables with {fmt.count(sum(row.lookups for row in rest))} lookups."
    head = ("table", "rows", "row size", "lookups", "distinct", "distinct share", "touched", "busiest 1%")
    note = "Busiest 1%: the share of lookups that read the most frequent hundredth of the touched rows."
    return [*blocks, Table(head, rows, note, top=TOP, rest=more)]


def _embedding_sentences(embeddings: Embeddings) -> list[str]:
    rates, skew = embeddings.gb_per_s, embeddings.skew
    sentences = [
        f"{fmt.count(embeddings.lookups)} lookups per step read {fmt.count(embeddings.unique)} distinct rows "
        f"({fmt.percent(embeddings.unique_ratio, 1)})."
    ]
    passes = [
        f"{name.replace('_', ' ')} " + (f"{digits(rate)} GB/s" if (rate := rates.get(name)) else "not measured")
        for name in ("forward", "backward_and_update")
    ]
    sentences.append(f"Bandwidth: {', '.join(passes)}.")
    fits = {True: "Cached", False: "Not cached", None: "Cached or not: not measured"}[embeddings.cached.fits]
    sentences.append(f"{fits}: {embeddings.cached.why}.")
    sentences.append(
        f"The table with the most lookups gets {fmt.percent(skew.largest_table_share, 0)} of them; the Gini "
        f"coefficient over the tables is {max(0.0, skew.gini):.2f}."
    )
    return sentences


OWN, LATE, BYTES, WAITS = "own work", "waiting for a rank", "waiting for bytes", "waiting"
DRAWN = 16
RANKS = ("rank", "step", "own work", "waits", "for a late rank", "for bytes", "others wait for it", "largest own part")
WAITING = {"ms": "time", "exposed_ms": "exposed", "late_ms": "for a late rank", "moving_ms": "for bytes"}
"""The times of a collective, as far as they were measured."""
PER_STEP = "Per step, mean over the ranks. Most waited for: the rank for which the others waited longest there."


def of_several(profile: StepBudget) -> Communication | None:
    """The communication section, if the profile has several ranks."""
    return profile.communication if profile.communication and profile.communication.each else None


def exposed_tile(ms: float, share: float) -> Tile:
    return Tile("exposed communication", fmt.percent(share, 0), f"{fmt.time(ms)} of a step")


def communication(key: str, section: Communication) -> list[Block]:
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
        parts = [charts.BarPart(name, max(0.0, ms)) for name, ms in [(OWN, row.own_ms), *waits]]
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
        lambda: charts.stacked(bars, "ms"),
    )
