"""The sections that explain what limits a run: roofline, cache curve, hot and cold ids, what limits a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...measure.ceilings import device_peaks, missed_share, product_flops, ranks_sharing
from . import curves, plots, ranks, roofs
from . import formats as fmt
from .blocks import Block, Cell, Figure, Missing, Section, Table, Text, cells
from .formats import NONE, NOT_MEASURED, component, count, percent, size
from .profile_facts import from_profile, keyed, limit_blocks
from .reading import Reading

LOOKUPS = ("embedding", "sparse_update")
"""Components that read random rows, by the beginning of their name."""
PAIR_COMMAND = "recperf pair micro-dlrm-dram"


@dataclass(frozen=True)
class Ceilings:
    """The measured ceilings of the device that was profiled."""

    product: float
    """FLOP/s of a matrix product."""
    product_label: str
    stream: float
    """Bytes per second of the faster of copy and read."""
    stream_label: str
    roofs: list[roofs.Roof]
    rows: float | None
    """Bytes per second of random rows of this workload's row size, from the memory level where its rows are."""
    rows_label: str

    def share(self, name: str, flops: float, moved: float) -> tuple[float, str]:
        """How close a component comes to its ceiling, and which ceiling that is."""
        if name.startswith(LOOKUPS) and self.rows:
            return moved / self.rows, self.rows_label
        return max((flops / self.product, "matrix product"), (moved / self.stream, self.stream_label))


def ceilings(run: Reading) -> Ceilings | None:
    part = _device_peaks(run)
    if part is None:
        return None
    profile = run.profile or {}
    sharing = ranks_sharing(profile)
    share = f" / {sharing} ranks" if sharing > 1 else ""
    precision, product = product_flops(profile, part)
    streams = {name: part[name]["p50"] for name in ("copy", "read")}
    best = max(streams, key=lambda name: streams[name])
    slopes = [
        _roof(name, name, bandwidth, tone="ink" if name == best else "muted", main=name == best)
        for name, bandwidth in streams.items()
    ]
    level, row = _random_rows(run, part)
    bandwidth = row["bytes_per_s"]["p50"] if row else None
    if row and bandwidth:
        label = f"random rows of {row['row_bytes']} B, {level}"
        slopes.append(_roof(label, "random rows", bandwidth, tone="embedding"))
    return Ceilings(
        product=product,
        product_label=f"{precision} product{share} {fmt.flop_rate(product)}",
        stream=streams[best],
        stream_label=best,
        roofs=slopes,
        rows=bandwidth,
        rows_label=f"random rows, {level}",
    )


def _roof(label: str, short: str, bandwidth: float, *, tone: str, main: bool = False) -> roofs.Roof:
    rate = fmt.byte_rate(bandwidth)
    return roofs.Roof(f"{label} {rate}", f"{short} {rate}", bandwidth, tone, main)


def _device_peaks(run: Reading) -> dict[str, Any] | None:
    """The ceilings of the device that was profiled: the CPU, or the GPU of that name."""
    return device_peaks(run.profile or {"device": run.result["performance"]["device"]}, run.peaks)


def _random_rows(run: Reading, part: dict[str, Any]) -> tuple[str, dict[str, Any] | None]:
    """The ceiling of random rows nearest in size, from the cache if most rows of a step come from there."""
    ids = (run.profile or {}).get("ids") or {}
    if not ids.get("row_bytes"):
        return "", None
    missed = missed_share(run.profile or {})
    if missed is None:
        missed = float((ids.get("working_set_bytes") or 0) > part["knee"]["bytes"])
    level = "cache" if missed < 0.5 else "memory"
    rows = part["gather"]["cache" if level == "cache" else "dram"]["rows"]
    return level, min(rows, key=lambda row: (abs(row["row_bytes"] - ids["row_bytes"]), row["row_bytes"]))


@dataclass(frozen=True)
class Achieved:
    """The counted work and the measured time of one component in a step."""

    number: int
    name: str
    flops: float
    bytes: float
    ms: dict[str, float]
    """p20, p50 and p80."""

    @property
    def rate(self) -> float:
        return self.flops / self.ms["p50"] * 1e3

    @property
    def moved(self) -> float:
        return self.bytes / self.ms["p50"] * 1e3


def achieved(run: Reading) -> list[Achieved]:
    """Components with counted work and a measured time."""
    parts = [
        part
        for part in (run.profile["components"] if run.profile else [])
        if (part["bytes"] or part["flops"]) and part["ms"]["p20"] > 0
    ]
    return [
        Achieved(number, part["name"], part["flops"] or 0, part["bytes"] or 0, part["ms"])
        for number, part in enumerate(parts, 1)
    ]


def roofline(run: Reading, key: str) -> Section:
    known, work = ceilings(run), achieved(run)
    blocks: list[Block] = []
    if known is None:
        blocks.append(Missing("The ceilings of this machine", run.peaks_command))
    if not work:
        blocks.append(Missing("The rate of each component", run.profile_command))
    if known is not None:
        points = [
            roofs.Point(one.number, one.name, one.flops / one.bytes, one.rate)
            for one in work
            if one.flops > 0 < one.bytes
        ]
        peak = (known.product_label, known.product)
        blocks.append(roofs.roofline_figure(f"{key}-roofline", known.roofs, peak, points))
        quiet = [one for one in work if not one.flops and one.bytes]
        if quiet:
            moved = [
                roofs.Moved(one.name, one.bytes / one.ms["p80"] * 1e3, one.moved, one.bytes / one.ms["p20"] * 1e3)
                for one in quiet
            ]
            blocks.append(roofs.strip_figure(f"{key}-strip", known.roofs, moved))
    if work:
        blocks.append(_achieved_table(work, known, run))
    return Section("roofline", "Against this machine’s ceilings", blocks)


def _achieved_table(work: list[Achieved], known: Ceilings | None, run: Reading) -> Table:
    head: tuple[str, ...] = ("component", "FLOPs", "bytes", "FLOP/B", "FLOP/s", "B/s")
    head += ("of the ceiling", "which ceiling") if known else ()
    rows = []
    for one in work:
        share = known.share(one.name, one.rate, one.moved) if known else None
        rows.append(
            cells(
                keyed(one.name, f"{one.number}. {component(one.name)}"),
                fmt.scaled(one.flops),
                size(one.bytes),
                fmt.number(one.flops / one.bytes) if one.bytes else NONE,
                fmt.scaled(one.rate) if one.flops else NONE,
                fmt.scaled(one.moved) if one.bytes else NONE,
                *((percent(share[0]), Cell(share[1], "muted")) if share else ()),
            )
        )
    note = "FLOPs and bytes of one step are counted from shapes, not measured; rates divide them by the median time."
    return Table(head, rows, note + (_ceilings_note(run) if known else ""), left=(7,))


def _ceilings_note(run: Reading) -> str:
    peaks, figures = run.peaks or {}, _device_peaks(run) or {}
    threads = figures.get("threads")
    note = " Ceilings are medians" + (f" measured with {threads} thread{'s' * (threads > 1)}" if threads else "")
    note += ", in quick mode." if peaks.get("quick") else "."
    note += (
        " Copy and read are rates of main memory: small tensors in caches, and rows that a step reads twice, can be "
        "faster. Random rows is the fastest plain gather: a lookup that prefetches its rows exceeds it."
    )
    if (figures.get("other_work") or 0) > 0.05:
        share = percent(figures["other_work"])
        note += f" Other processes used {share} of the cores meanwhile, so the ceilings may be too low."
    return note


def knee(run: Reading, key: str) -> Section:
    title = "Where tables outgrow the caches"
    device = run.profile["device"] if run.profile else run.result["performance"]["device"]
    if device != "cpu":
        return Section(
            "knee", title, [Text("Not measured: this curve is measured on CPUs, the run used a GPU.", "note")]
        )
    if run.peaks is None:
        return Section("knee", title, [Missing("Lookup time against table size", run.peaks_command)])
    measured, ids = run.peaks["knee"], (run.profile or {}).get("ids") or {}
    marks = [
        curves.Mark(label, ids[name], tone)
        for label, name, tone in (("touched", "touched_bytes", "bad"), ("tables", "working_set_bytes", "embedding"))
        if ids.get(name)
    ]
    points, caches = measured["points"], run.machine.get("caches") or {}
    label = "Time of one lookup against table size: " + " to ".join(
        f"{point['p50']:.3g} ns at {size(point['table_bytes'])}" for point in (points[0], points[-1])
    )
    label += "".join(f"; {mark.label} {size(mark.bytes)}" for mark in marks)
    caption = (
        f"Random rows of {measured['row_bytes']} B, {measured['threads']} thread, {measured['method']}; the line is "
        f"the median of at least {min(p['n'] for p in points)} measurements, the band p20 – p80. "
        "Dotted: the size of each cache."
    )
    if any(mark.bytes > points[-1]["table_bytes"] for mark in marks):
        caption += " Dots beyond the largest measured table have the height of its last point."
    draw = lambda width: curves.knee(width, points, caches, marks)  # noqa: E731
    table = _ids_table(ids) if ids else Missing("The working set of this workload", run.profile_command)
    return Section("knee", title, [Figure(f"{key}-knee", label, caption, draw), table])


def _ids_table(ids: dict[str, Any]) -> Table:
    fields = (
        ("lookups per step", "lookups", count),
        ("distinct rows per step", "unique_rows", count),
        ("bytes per row", "row_bytes", count),
        ("tables allocated", "working_set_bytes", size),
        ("touched while profiled", "touched_bytes", size),
    )
    rows = [cells(label, NOT_MEASURED if ids.get(name) is None else show(ids[name])) for label, name, show in fields]
    return Table(("this workload", ""), rows, "Counted from the ids of the profiled steps.")


def pair(run: Reading, key: str) -> Section:
    title = "Hot against cold ids: only the ids change"
    if run.pair is None:
        return Section("pair", title, [Missing("Hot against cold ids", PAIR_COMMAND)])
    arms = {name: run.pair[name] for name in ("hot", "cold")}
    times = {name: {p.name: p.ms["p50"] for p in from_profile(arm) if p.ms} for name, arm in arms.items()}
    bars = [
        (
            f"{name}, {count(run.pair['ids'][name])} rows",
            [plots.Part(part.name, part.phase, part.ms["p50"]) for part in from_profile(arm) if part.ms],
        )
        for name, arm in arms.items()
    ]
    ratios = ", ".join(f"{component(name)} {ratio:.2g} x" for name, ratio in run.pair["ratio"].items() if ratio)
    figure = Figure(
        f"{key}-pair",
        f"Milliseconds of a step with hot and with cold ids. Cold over hot: {ratios}",
        "Median time of each part, for the same model and shapes with new ids every step. Backward passes have the "
        "lighter shade.",
        lambda width: plots.stacked(width, bars, "ms"),
    )
    rows = [(Cell("whole step", "strong"), *_pair_cells(*(arm["step_ms"]["p50"] for arm in arms.values())))]
    for name in dict.fromkeys([*times["hot"], *times["cold"]]):
        rows.append((keyed(name), *_pair_cells(times["hot"].get(name), times["cold"].get(name))))
    steps = arms["hot"].get("steps")
    note = "Medians" + (f" over {count(steps)} steps" if isinstance(steps, int) else "") + ", warm-up excluded."
    table = Table(("part", "cold / hot", "hot", "cold"), rows, note)
    return Section("pair", title, [Text(run.pair["verdict"], "lead"), figure, table])


def _pair_cells(hot: float | None, cold: float | None) -> tuple[Cell, ...]:
    return cells(fmt.gain(cold / hot if hot and cold else None), fmt.time(hot), fmt.time(cold))


def between_ranks(run: Reading, key: str) -> list[Section]:
    """The slowest rank and what the others wait for; no section for a run of one rank."""
    blocks = ranks.blocks(key, run.profile) if run.profile else []
    return [Section("ranks", "Between the ranks", blocks)] if blocks else []


def evidence(run: Reading) -> Section:
    if not run.profile or not run.profile["verdict"]:
        return Section("evidence", "The evidence", [Missing("What limits this run", run.profile_command)])
    return Section("evidence", "What limits a step", limit_blocks(run.profile, run.peaks))
