"""The sections that say what limits a run: roofline, knee, matched pair, and the evidence of the regime."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...measure import explain
from ...units import size
from . import curves, plots, ranks, roofs
from .blocks import Block, Cell, Missing, Section, Table, Text, cells
from .reading import Reading, shares
from .svg import family
from .words import MEASURE, NOT_MEASURED, component, count, ms, number, percent, scaled, value

LOOKUPS = ("embedding", "sparse_update")
"""Components that touch random rows, by the beginning of their name."""


@dataclass(frozen=True)
class Ceilings:
    """The measured roofs of the device a profile ran on."""

    product: float
    product_label: str
    stream: float
    stream_label: str
    roofs: list[roofs.Roof]
    rows: float | None
    """Bytes a second of random rows of this workload's size, from where its rows live."""
    rows_label: str

    def share(self, name: str, flops: float, moved: float) -> tuple[float, str]:
        """How near a component comes to the roof above it, and which roof that is."""
        if name.startswith(LOOKUPS) and self.rows:
            return moved / self.rows, self.rows_label
        return max((flops / self.product, "matrix product"), (moved / self.stream, self.stream_label))


def ceilings(run: Reading) -> Ceilings | None:
    part = _device_peaks(run)
    if part is None:
        return None
    profile = run.profile or {}
    sharing = explain.sharing(profile)
    share = f" / {sharing} ranks" if sharing > 1 else ""
    product = explain.product_of(profile, part)
    streams = {name: part[name]["p50"] for name in ("copy", "read")}
    best = max(streams, key=lambda name: streams[name])
    drawn = [
        _roof(name, name, bandwidth, tone="ink" if name == best else "muted", main=name == best)
        for name, bandwidth in streams.items()
    ]
    place, row = _rows(run, part)
    bandwidth = row["bytes_per_s"]["p50"] if row else None
    if row and bandwidth:
        label = f"random rows of {row['row_bytes']} B, {place}"
        drawn.append(_roof(label, "random rows", bandwidth, tone="embedding"))
    return Ceilings(
        product=product,
        product_label=f"{profile.get('precision') or 'float32'} product{share} {scaled(product, 'FLOP/s')}",
        stream=streams[best],
        stream_label=best,
        roofs=drawn,
        rows=bandwidth,
        rows_label=f"random rows, {place}",
    )


def _roof(label: str, short: str, bandwidth: float, *, tone: str, main: bool = False) -> roofs.Roof:
    rate = scaled(bandwidth, "B/s")
    return roofs.Roof(f"{label} {rate}", f"{short} {rate}", bandwidth, tone, main)


def _device_peaks(run: Reading) -> dict[str, Any] | None:
    """The ceilings of the device that was profiled: the processor's, or the GPU's of that name."""
    named = {"device": run.result["performance"]["device"]}
    known = explain.device_part(run.profile or named, run.peaks) or explain.device_part(named, run.peaks)
    return known or next(iter(((run.peaks or {}).get("gpu") or {}).values()), None)


def _rows(run: Reading, part: dict[str, Any]) -> tuple[str, dict[str, Any] | None]:
    """Random rows of about this workload's row size, out of the cache while everything it touches fits there."""
    ids = (run.profile or {}).get("ids") or {}
    if not ids.get("row_bytes"):
        return "", None
    caches = run.machine.get("caches") or {"": 0}
    last = part.get("l2_bytes") or max(caches.values(), default=0) // explain.sharing(run.profile or {})
    touched = ids.get("touched_bytes")
    place = "cache" if touched is not None and touched <= last else "memory"
    rows = part["gather"]["cache" if place == "cache" else "dram"]["rows"]
    return place, min(rows, key=lambda row: (abs(row["row_bytes"] - ids["row_bytes"]), row["row_bytes"]))


@dataclass(frozen=True)
class Achieved:
    number: int
    name: str
    flops: float
    """A step."""
    bytes: float
    seconds: float
    spread: tuple[float, float]

    @property
    def rate(self) -> float:
        return self.flops / self.seconds

    @property
    def moved(self) -> float:
        return self.bytes / self.seconds


def achieved(run: Reading) -> list[Achieved]:
    """Components whose work was counted and whose time was measured."""
    found: list[Achieved] = []
    for part in run.profile["components"] if run.profile else []:
        if (part["bytes"] or part["flops"]) and part["ms"]["p20"] > 0:
            spread = (part["ms"]["p20"] / 1e3, part["ms"]["p80"] / 1e3)
            work = (part["flops"] or 0, part["bytes"] or 0)
            found.append(Achieved(len(found) + 1, part["name"], *work, part["ms"]["p50"] / 1e3, spread))
    return found


def roofline(run: Reading, key: str) -> Section:
    title = "Against this machine’s roofs"
    known, work = ceilings(run), achieved(run)
    blocks: list[Block] = []
    if known is None:
        blocks.append(Missing("The roofs of this machine", MEASURE["peaks"].format(run=run.quoted)))
    if not work:
        blocks.append(Missing("What each component achieves", MEASURE["profile"].format(run=run.quoted)))
    if known is None:
        return Section("roofline", title, blocks + ([_achieved_table(work, None, run)] if work else []))
    points = [
        roofs.Point(one.number, one.name, one.flops / one.bytes, one.rate) for one in work if one.flops > 0 < one.bytes
    ]
    said = "; ".join(f"{component(p.name)} {scaled(p.flops, 'FLOP/s')} at {number(p.intensity)} FLOP/B" for p in points)
    label = f"Roofline. Roofs: {known.product_label}, {', '.join(roof.label for roof in known.roofs)}. {said}"
    caption = (
        "Solid: the roofs that bound every component. Dashed: lower ceilings, random rows among them. Filled dots are "
        "forward and update, open dots backward; on a phone dots carry the number of their row below."
    )
    peak = (known.product_label, known.product)
    drawn = plots.drawing(
        f"{key}-roofline",
        label,
        caption,
        lambda width: roofs.roofline(width, known.roofs, peak, points),
    )
    blocks.append(drawn)
    idle = [one for one in work if not one.flops and one.bytes]
    if idle:
        moved = [roofs.Moved(one.name, one.bytes / one.spread[1], one.moved, one.bytes / one.spread[0]) for one in idle]
        said = "; ".join(f"{component(one.name)} {scaled(one.moved, 'B/s')}" for one in idle)
        blocks.append(
            plots.drawing(
                f"{key}-strip", f"Bandwidth of components without arithmetic: {said}",
                "Components that do no arithmetic have no place on the roofline: bytes a second, with p20 – p80.",
                lambda width: roofs.strip(width, known.roofs, moved),
            )
        )  # fmt: skip
    if work:
        blocks.append(_achieved_table(work, known, run))
    return Section("roofline", title, blocks)


def _achieved_table(work: list[Achieved], known: Ceilings | None, run: Reading) -> Table:
    head: tuple[str, ...] = ("component", "FLOPs", "bytes", "FLOP/B", "FLOP/s", "B/s")
    head += ("of the roof", "which roof") if known else ()
    rows = []
    for one in work:
        hue, faint = family(one.name)
        share = known.share(one.name, one.rate, one.moved) if known else None
        rows.append(
            cells(
                Cell(f"{one.number}. {component(one.name)}", swatch=hue, faint=faint),
                scaled(one.flops, "") if one.flops else "0",
                size(one.bytes),
                number(one.flops / one.bytes) if one.bytes else "–",
                scaled(one.rate, "") if one.flops else "–",
                scaled(one.moved, "") if one.bytes else "–",
                *((percent(share[0]), Cell(share[1], "muted")) if share else ()),
            )
        )
    note = "FLOPs and bytes are counted from shapes for one step, not measured; rates divide them by the median time."
    if known:
        note += _roof_note(run)
    return Table(head, rows, note, words=(7,))


def _roof_note(run: Reading) -> str:
    peaks = run.peaks or {}
    note = f" Roofs are medians measured with {peaks.get('threads', '?')} threads"
    threads = run.result["performance"]["settings"].get("threads")
    note += f" (the run’s threads: {threads})" if threads else ""
    note += ", in quick mode." if peaks.get("quick") else "."
    note += " Copy and read are memory’s: small tensors come from caches and can exceed them, and so can "
    note += "rows that a step touches twice. Random rows are the fastest plain gather; a lookup that asks for its rows "
    note += "ahead of time exceeds it."
    if (peaks.get("other_work") or 0) > 0.05:
        note += f" Other work took {percent(peaks['other_work'])} of the cores meanwhile, so roofs may be low."
    return note


def knee(run: Reading, key: str) -> Section:
    title = "Where tables stop being cached"
    device = run.profile["device"] if run.profile else run.result["performance"]["device"]
    if device != "cpu":
        return Section(
            "knee", title, [Text("Not measured: the knee is a curve of processors, this run used a GPU.", "note")]
        )
    if run.peaks is None:
        return Section("knee", title, [Missing("The knee of this machine", MEASURE["peaks"].format(run=run.quoted))])
    measured, ids = run.peaks["knee"], (run.profile or {}).get("ids") or {}
    marks = [
        curves.Mark(label, ids[name], tone)
        for label, name, tone in (("touched", "touched_bytes", "bad"), ("tables", "working_set_bytes", "embedding"))
        if ids.get(name)
    ]
    points, caches = measured["points"], run.machine.get("caches") or {}
    ends = [points[0], points[-1]]
    label = "Time of one lookup against table size: " + " to ".join(
        f"{point['p50']:.3g} ns at {size(point['table_bytes'])}" for point in ends
    )
    label += "".join(f"; {mark.label} {size(mark.bytes)}" for mark in marks)
    caption = (
        f"Random rows of {measured['row_bytes']} B, {measured['threads']} thread, {measured['method']}; the line is "
        f"the median of at least {min(p['n'] for p in points)} readings, the band p20 – p80. "
        "Dotted: where a cache ends."
    )
    if any(mark.bytes > points[-1]["table_bytes"] for mark in marks):
        caption += " Beyond the largest table measured, dots stand at the height of its last point."
    draw = lambda width: curves.knee(width, points, caches, marks)  # noqa: E731
    blocks: list[Block] = [plots.drawing(f"{key}-knee", label, caption, draw)]
    blocks.append(
        _ids_table(ids) if ids else Missing("This workload’s working set", MEASURE["profile"].format(run=run.quoted))
    )
    return Section("knee", title, blocks)


def _ids_table(ids: dict[str, Any]) -> Table:
    said = (
        ("lookups a step", "lookups", count),
        ("different rows a step", "unique_rows", count),
        ("bytes a row", "row_bytes", count),
        ("tables allocated", "working_set_bytes", size),
        ("touched while profiled", "touched_bytes", size),
    )
    rows = [cells(label, NOT_MEASURED if ids.get(name) is None else say(ids[name])) for label, name, say in said]
    return Table(("this workload", ""), rows, "Counted from the ids of the profiled steps.")


def pair(run: Reading, key: str) -> Section:
    title = "The matched pair: only the ids change"
    if run.pair is None:
        return Section("pair", title, [Missing("Hot against cold ids", MEASURE["pair"])])
    halves = {name: run.pair[name] for name in ("hot", "cold")}
    ids = run.pair["ids"]
    names = {name: f"{name}, {count(ids[name])} rows" for name in halves}
    bars = [
        (names[name], [plots.Part(part.name, part.phase, part.ms["p50"]) for part in shares(half) if part.ms])
        for name, half in halves.items()
    ]
    ratios = ", ".join(f"{component(name)} {ratio:.2g} x" for name, ratio in run.pair["ratio"].items() if ratio)
    drawn = plots.drawing(
        f"{key}-pair", f"Milliseconds of a step with hot and with cold ids. Cold over hot: {ratios}",
        "Median time of each part; same model, same shapes, fresh ids every step. Backward in the lighter shade.",
        lambda width: plots.stacked(width, bars, "ms"),
    )  # fmt: skip
    hot, cold = ({part.name: part.ms["p50"] for part in shares(half) if part.ms} for half in halves.values())
    rows = [
        (Cell("whole step", "strong"), *_pair_cells(halves["hot"]["step_ms"]["p50"], halves["cold"]["step_ms"]["p50"]))
    ]
    for name in dict.fromkeys([*hot, *cold]):
        hue, faint = family(name)
        rows.append((Cell(component(name), swatch=hue, faint=faint), *_pair_cells(hot.get(name), cold.get(name))))
    steps = halves["hot"].get("steps")
    note = "Medians" + (f" over {count(steps)} steps" if isinstance(steps, int) else "") + ", warm-up excluded."
    table = Table(("part", "cold / hot", "hot", "cold"), rows, note)
    return Section("pair", title, [Text(run.pair["verdict"], "lead"), drawn, table])


def _pair_cells(hot: float | None, cold: float | None) -> tuple[Cell, ...]:
    ratio = f"{cold / hot:.2f} x" if hot and cold else "–"
    return cells(ratio, *(ms(time) if time is not None else "–" for time in (hot, cold)))


def between_ranks(run: Reading, key: str) -> list[Section]:
    """The slowest rank and what ranks wait for; nothing of one rank."""
    found = ranks.blocks(key, run.profile) if run.profile else []
    return [Section("ranks", "Between the ranks", found)] if found else []


def evidence(run: Reading) -> Section:
    title = "The evidence"
    regime = run.profile["regime"] if run.profile else None
    if not regime:
        return Section("evidence", title, [Missing("What limits this run", MEASURE["profile"].format(run=run.quoted))])
    rows = [
        cells(
            item["what"],
            value(item["value"], item["unit"]),
            item["threshold"] or "–",
            Cell(item["says"] or "–", "strong"),
        )
        for item in regime["evidence"]
    ]
    note = f"Verdict: {regime['name']}. Found on this run; the threshold is where a line would say something else."
    return Section("evidence", title, [Table(("what", "found", "threshold", "says"), rows, note, words=(2, 3))])
