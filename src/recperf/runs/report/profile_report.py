"""The report of a profile of a workload, and the sections about the device and ranks: kernels, roofline, idle time,
transfers, embedding tables, communication."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ...config import flatten
from ...measure.attribution import divided_ms
from ...measure.limit_kinds import LIMITS
from ...measure.limits import ranks_sentence
from ...measure.peaks.other_work import DISTURBED
from ...measure.peaks.records import Peaks
from ...measure.profile import StepProfile
from ...measure.profile_records import (
    Collective,
    Communication,
    EmbeddingShare,
    Idle,
    Kernels,
    RooflinePoint,
    Transfer,
    Trust,
    WorkloadFigures,
)
from ...measure.records import Advice
from ...units import digits
from . import charts
from . import formats as fmt
from .blocks import Block, Cell, Figure, Report, Section, Table, Text, cells, definitions, table_of
from .charts import in_order
from .formats import NONE, component
from .step_sections import (
    TOP,
    experiment_blocks,
    keyed,
    last_name,
    measured_sections,
    report_of_step,
    sections_of,
    unseen,
)

SHARES_NOTE = "Shares are of the sum of the parts’ medians, which may differ slightly from the step’s."


def report(profile: StepProfile, figures: WorkloadFigures, peaks: Peaks | None = None) -> Report:
    """The report of a workload, whose `figures` its profile has beside those of any step."""
    torch = figures.trust.versions.get("torch") if figures.trust else None
    length = f"{fmt.time(figures.overhead.plain_ms)} a step of {figures.batch_size:,} samples"
    measured, missing = step_sections(profile, figures, peaks)
    return report_of_step(
        profile,
        advice_of(profile, figures),
        figures.name or "profile",
        [figures.preset, profile.device, length, torch and f"torch {torch}"],
        [*measured, Section("trust", "Trust", _trust(profile, figures, missing))],
        unseen=("not seen", unseen(missing)),
        ranks=ranks_sentence(figures.communication),
    )


def advice_of(profile: StepProfile, figures: WorkloadFigures) -> list[Advice] | None:
    """None: not measured."""
    return profile.advice if figures.no_advice is None else None


def step_sections(
    profile: StepProfile, figures: WorkloadFigures, peaks: Peaks | None
) -> tuple[list[Section], dict[str, list[str]]]:
    """The sections about a step of a workload, and the titles of those that were not measured, by reason."""
    measured, missing = measured_sections(
        (
            ("budget", "Step budget", figures, lambda _: budget_blocks(figures)),
            ("kernels", "Kernels", profile.kernels, lambda one: kernels(one, figures.step_ms.p50)),
            ("roofline", "Roofline", figures.roofline, lambda points: roofline_blocks(points, peaks)),
            ("idle", "Device idle", profile.idle, idle),
            ("transfers", "Transfers", profile.transfers, transfers),
            ("embeddings", "Embeddings", figures.embeddings, embeddings),
            ("communication", "Communication", figures.communication, lambda several: communication(several)),
        )
    )
    waited = profile.preempted or 0.0
    without = f"; the {waited:.0%} in which other work held their core is left out" if waited >= 0.01 else ""
    observed = f"{fmt.count(profile.steps.plain)} observed steps of {fmt.time(profile.step_ms.p50)}"
    evidence = [
        Text(f"From {observed}{without}.", "note"),
        *experiment_blocks(profile.experiments),
        *(Text(fmt.sentence(note), "note") for note in profile.notes if note),
    ]
    whole = divided_ms(profile.waits, profile.operators)
    if figures.no_advice is not None:
        missing.setdefault(figures.no_advice.missing, []).append("what to change")
    return [*sections_of(profile, whole, advice_of(profile, figures), evidence), *measured], missing


def budget_blocks(profile: WorkloadFigures) -> list[Block]:
    """The parts of a step as a bar and a table."""
    step, parts = profile.step_ms, in_order(profile.components)
    total = math.fsum(part.share for part in parts)
    rows = [
        cells(
            keyed(part.name), fmt.percent(part.share, 1), fmt.time(part.ms.p50), fmt.spread(part.ms),
            Cell(part.phase, "muted"),
        )
        for part in parts
    ]  # fmt: skip
    whole = ("whole step", fmt.percent(total, 1), fmt.time(step.p50), fmt.spread(step), "")
    rows.append(tuple(Cell(text, "strong") for text in whole))
    figure = charts.budget_figure(parts, f"a step of {fmt.time(step.p50)}")
    table = Table(("part", "share", "p50", "p20 – p80", "phase"), rows, f"Steps with timers. {SHARES_NOTE}", left=(4,))
    if abs(total - 1) > 0.01:
        warning = Text(f"The parts sum to {total:.1%} of the step, so do not trust this budget.", "warning")
        return [warning, figure, table]
    return [figure, table]


def _trust(profile: StepProfile, figures: WorkloadFigures, missing: dict[str, list[str]]) -> list[Block]:
    """What a reader must know to believe the other sections."""
    trust = figures.trust or Trust()
    steps = f"{figures.steps} measured after {figures.warmup} of warm-up, batch {figures.batch_size:,}"
    rows: list[tuple[str, str | Cell]] = [("steps", steps)]
    for name, cost in (("budget", figures.overhead), ("full", trust.tracing)):
        text = fmt.NOT_MEASURED
        if cost:
            plain, clocked = fmt.time(cost.plain_ms), fmt.time(cost.clocked_ms)
            share = fmt.measuring_cost(cost.share, figures.step_ms)
            text = f"{share}: a step takes {plain} without, {clocked} with it"
        rows.append((f"cost of measuring ({name})", text))
    clocks = trust.clocks or {}
    units = (("sm_mhz", "SM", "MHz"), ("mem_mhz", "memory", "MHz"), ("power_w", "power", "W"))
    listed = [f"{label} {clocks[name]:,.0f} {unit}" for name, label, unit in units if clocks.get(name) is not None]
    rows.append(("clocks", ", ".join(listed) or fmt.NOT_MEASURED))
    versions = ", ".join(f"{name} {text}" for name, text in trust.versions.items() if text)
    rows.append(("versions", versions or "not recorded"))
    if trust.seed is not None:
        rows.append(("seed", str(trust.seed)))
    busy = profile.other_work
    if busy is not None:
        doubt = "; too much for the times to be trusted" if busy > DISTURBED else ""
        rows.append(("other processes", f"{busy:.0%} of all cores{doubt}"))
    rows += [(f"switch {name}", why) for name, why in figures.switches.items()]
    if trace := figures.trace:
        rows.append(("trace", f"{trace.file}, {fmt.size(trace.bytes)}, {trace.steps} steps"))
    rows += [(f"not measured: {', '.join(titles)}", reason) for reason, titles in missing.items()]
    return [definitions([*rows, *machine_rows(profile.machine)])]


def machine_rows(facts: dict[str, Any]) -> list[tuple[str, str | Cell]]:
    """The facts about a machine that are known."""
    known = {name: value for name, value in facts.items() if name not in ("caches", "gpus") and value}
    known["caches"] = ", ".join(f"{level} {fmt.size(count)}" for level, count in (facts.get("caches") or {}).items())
    known["GPUs"] = ", ".join(str(gpu.get("name")) for gpu in facts.get("gpus") or [] if isinstance(gpu, dict))
    return [(f"machine: {name}", fmt.setting(value)) for name, value in flatten(known).items() if value]


DRAWN = 16
"""Ranks of a figure."""
RANKS = ("rank", "step", "own work", "waits", "for a late rank", "for bytes", "others wait for it", "largest own part")
WAITING = {"ms": "time", "exposed_ms": "exposed", "late_ms": "for a late rank", "moving_ms": "for bytes"}
"""The times of a collective, as far as they were measured."""
PER_STEP = "Per step, mean over the ranks. Most waited for: the rank for which the others waited longest there."


def kernels(kernels: Kernels, step: float) -> list[Block]:
    """The kernels of a step of `step` ms."""
    small = kernels.small
    share = f" ({fmt.percent(kernels.busy_ms / step, 0)} of the {fmt.time(step)} step)" if step else ""
    sentence = (
        f"{fmt.count(kernels.count)} kernels per step keep the device busy for {fmt.time(kernels.busy_ms)}"
        f"{share}. {fmt.count(small.count)} of them ({fmt.percent(small.share_of_count, 0)}) run for less than "
        f"10 µs, {fmt.time(small.total_ms)} in total."
    )
    listed = sorted(kernels.rows, key=lambda row: row.total_ms, reverse=True)
    rest = listed[TOP:]
    table = table_of(
        listed,
        {
            "kernel": lambda row: Cell(row.name, width=44),
            "part": lambda row: Cell(last_name(row.part) or NONE, "muted", width=24),
            "count": lambda row: fmt.count(row.count),
            "total": lambda row: fmt.time(row.total_ms),
            "mean": lambda row: fmt.time(row.mean_us / 1e3),
            "share": lambda row: fmt.percent(row.share, 1),
            "launch delay": lambda row: fmt.time(None if row.launch_delay_us is None else row.launch_delay_us / 1e3),
        },
        "Per step. Launch delay: from the end of the launching call to the start of the kernel.",
        left=(1,),
        top=TOP,
        rest=f"{len(rest)} more kernels take {fmt.time(math.fsum(row.total_ms for row in rest))}.",
    )
    return [Text(sentence, "lead"), table]


def roofline_blocks(points: list[RooflinePoint], peaks: Peaks | None) -> list[Block]:
    note = "FLOPs and bytes are counted, times are measured."
    if peaks:
        quick = ", in quick mode" if peaks.quick else ""
        note += f" The ceilings were measured {fmt.timestamp(peaks.measured)} (UTC){quick}."
    table = table_of(
        enumerate(points, 1),
        {
            "part": lambda row: keyed(row[1].name, f"{row[0]}. {component(row[1].name)}"),
            "FLOPs": lambda row: fmt.scaled(row[1].flops),
            "bytes": lambda row: fmt.size(row[1].bytes),
            "FLOP/B": lambda row: NONE if row[1].intensity is None else digits(row[1].intensity),
            "FLOP/s": lambda row: fmt.flop_rate(row[1].flops_per_s),
            "B/s": lambda row: fmt.byte_rate(row[1].bytes_per_s),
            "of the roof": lambda row: fmt.of_ceiling(row[1].share_of_roof, row[1].bound),
            "bound by": lambda row: Cell(row[1].bound, "muted"),
        },
        note,
        left=(7,),
    )
    return [*charts.roofline_figure(points), table]


def idle(idle: Idle) -> list[Block]:
    wall = idle.wall_ms
    states = [("busy", idle.busy_ms), *idle.causes.items()]
    slices = [
        charts.BarPart(name, max(0.0, ms), LIMITS[name].colour if name in LIMITS else "accent") for name, ms in states
    ]

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
        f"The device in a step: {listed}",
        "The device during a traced step: busy, and idle by limit.",
        lambda: charts.stacked([("", slices)], "ms"),
    )
    syncs = table_of(
        sorted(idle.syncs, key=lambda sync: -sync.ms),
        {
            "synchronisation": lambda sync: Cell(sync.what, width=40),
            "called by": lambda sync: Cell(sync.caller, width=44),
            "count": lambda sync: fmt.count(sync.count),
            "host waits": lambda sync: fmt.time(sync.ms),
        },
        left=(1,),
        top=TOP,
    )
    table = Table(("device", "per step", "share"), rows, "What idle time waits for: the limits of a step.")
    return [Text(sentence, "lead"), figure, table, *([syncs] if syncs.rows else [])]


def transfers(transfers: list[Transfer]) -> list[Block]:
    if not transfers:
        return [Text("Nothing was copied or set.")]
    table = table_of(
        transfers,
        {
            "kind": lambda row: row.kind,
            "count": lambda row: fmt.count(row.count),
            "bytes": lambda row: fmt.size(row.bytes),
            "time": lambda row: fmt.time(row.ms),
            "rate": lambda row: fmt.byte_rate(row.gb_per_s * 1e9 if row.gb_per_s else None),
            "pinned": lambda row: Cell(fmt.yes_or_no(row.pinned), "bad" if row.pinned is False else ""),
            "overlapped": lambda row: fmt.percent(row.overlapped_share, 0),
        },
        "Per step. Overlapped: the share of the time during which a kernel ran as well.",
    )
    return [table]


def embeddings(embeddings: EmbeddingShare) -> list[Block]:
    sentence = (
        f"{fmt.count(embeddings.lookups)} lookups per step read {fmt.count(embeddings.unique)} distinct rows "
        f"({fmt.percent(embeddings.unique_ratio, 1)})."
    )
    tables = sorted(embeddings.tables, key=lambda row: row.lookups, reverse=True)
    rest = tables[TOP:]
    table = table_of(
        tables,
        {
            "table": lambda row: Cell(row.name, width=24),
            "rows": lambda row: f"{row.rows:,}",
            "row size": lambda row: fmt.size(row.row_bytes),
            "lookups": lambda row: fmt.count(row.lookups),
            "distinct": lambda row: fmt.count(row.unique),
            "distinct share": lambda row: fmt.percent(row.unique_ratio, 1),
            "touched": lambda row: fmt.size(row.touched_bytes),
            "busiest 1%": lambda row: fmt.percent(row.busiest_share, 0),
        },
        "Busiest 1%: the share of lookups that read the most frequent hundredth of the touched rows.",
        top=TOP,
        rest=f"{len(rest)} more tables with {fmt.count(sum(row.lookups for row in rest))} lookups.",
    )
    return [Text(sentence, "lead"), *([table] if tables else [])]


def communication(section: Communication) -> list[Block]:
    """The slowest rank of several, and what the others wait for."""
    split = (
        "A rank reads its clock when it reaches a collective and when its wait begins and ends. The time until the "
        "last rank has arrived is waiting for that rank; the rest is waiting for bytes."
    )
    if section.not_told_apart:
        split = f"Waiting for a rank and waiting for bytes could not be separated: {section.not_told_apart}."
    method = (
        f"Every rank timed the same steps, started together; means of the {section.steps} middle ones. {split} "
        f"Budget, operators and tables are those of rank {section.slowest}, the slowest."
    )
    return [
        Text(fmt.printable(ranks_sentence(section)), "lead"),
        *rank_blocks(section, method),
        *collective_blocks(section.collectives, PER_STEP),
    ]


def collective_blocks(collectives: Sequence[Collective], note: str) -> list[Block]:
    """A row for every kind of collective, with the times that are known of it."""
    if not collectives:
        return []
    first = collectives[0]
    times = [name for name in WAITING if getattr(first, name) is not None]
    compared = first.late_ms is not None
    rows = [
        cells(
            Cell(row.what, width=40),
            *([component(row.part)] if row.part else []),
            fmt.count(row.count),
            fmt.size(row.bytes or None),
            *(fmt.time(getattr(row, name)) for name in times),
            *([NONE if row.awaited_rank is None else f"rank {row.awaited_rank}"] if compared else []),
        )
        for row in collectives
    ]
    where, awaited = ("in",) * (first.part is not None), ("most waited for",) * compared
    head = ("collective", *where, "count", "sent", *(WAITING[name] for name in times), *awaited)
    return [Table(head, rows, note, left=tuple(map(head.index, (*where, *awaited))))]


def rank_blocks(section: Communication, method: str) -> list[Block]:
    """A bar and a row for every rank: its own work and its waits; of many ranks, bars of those with most own work."""
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
    shown, bars = each[:DRAWN], []
    for row in sorted(shown, key=lambda row: int(row.rank)):
        waits = {"waiting": row.exposed_ms}
        if row.late_ms is not None:
            waits = {"waiting for a rank": row.late_ms, "waiting for bytes": row.moving_ms or 0.0}
        parts = [charts.BarPart(name, max(0.0, ms)) for name, ms in {"own work": row.own_ms, **waits}.items()]
        bars.append((f"rank {row.rank}", parts))
    listed = "; ".join(
        f"rank {row.rank} {fmt.time(row.own_ms)} own, {fmt.time(row.exposed_ms)} waiting" for row in shown
    )
    caption = "A step of each rank: its own work, then its waits in collectives for a late rank and for bytes."
    if len(each) > len(shown):
        caption += f" The {len(shown)} of {len(each)} ranks with the most work of their own."
    label = f"Own work and waiting of each rank: {listed}"
    figure = Figure(label, caption, lambda: charts.stacked(bars, "ms"))
    more = f"{len(rows) - TOP} more ranks have less work of their own."
    return [figure, Table(RANKS, rows, method, left=(7,), top=TOP, rest=more)]
