"""What fills each section of a profile's page. Strings are cleaned before they get here; the template escapes them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from . import plots, profile_plots, ranks, roofs
from . import profile_words as say
from .blocks import Block, Cell, Table, Text, cells
from .reading import shares
from .svg import family
from .words import component

TOP = 12
TABLES_DRAWN = 26
CAUSES = {"busy": "accent", "input wait": "data", "host wait": "embedding", "kernel gap": "hash", "sync": "loss"}
"""The colour of each state of the device."""


@dataclass(frozen=True)
class Page:
    profile: dict[str, Any]
    peaks: dict[str, Any] | None
    machine: dict[str, Any] | None


def titled(name: str, width: int) -> str:
    """A name shortened, with the whole of it to be seen on pointing at it; it may be broken where its words end."""
    from markupsafe import Markup

    shown = say.short(name, width)
    broken = Markup("<wbr>").join(re.findall(r"[^_:<]*[_:<]+|[^_:<]+", shown))
    return broken if shown == name else Markup('<span title="{}">{}</span>').format(name, broken)


def named(name: str, width: int, tone: str = "") -> Cell:
    return Cell(titled(name, width), tone)


def keyed(name: str, width: int = 30) -> Cell:
    hue, faint = family(name)
    return Cell(titled(component(name), width), swatch=hue, faint=faint)


def verdict(of: Page) -> list[Block]:
    found = say.verdict(of.profile)
    if not found:
        return [Text("Not measured: the profile names no regime.", "missing")]
    blocks: list[Block] = []
    if found.get("confidence"):
        why = f": {found['why_confidence']}" if found.get("why_confidence") else ""
        blocks.append(Text(f"Confidence is {found['confidence']}{why}.", "lead"))
    if found.get("second"):
        blocks.append(Text(f"What comes second: {found['second']}."))
    rows = [
        cells(
            e["what"], say.reading(e["value"], e.get("unit")), e.get("threshold") or say.NONE,
            Cell(e.get("says") or say.NONE, "strong"),
        )
        for e in found.get("evidence") or []
    ]  # fmt: skip
    if rows:
        note = f"Verdict: {found['name']}. The threshold is where a line would say something else."
        blocks.append(Table(("evidence", "found", "threshold", "says"), rows, note, words=(2, 3)))
    return blocks


def budget(of: Page) -> list[Block]:
    profile, whole = of.profile, say.total_share(of.profile)
    wall, parts = profile["step_ms"], shares(profile)
    rows = [
        (
            keyed(part.name),
            *cells(say.percent(part.share), say.time(part.share * wall["p50"])),
            *(cells(say.time(part.ms["p50"]), say.times(part.ms)) if part.ms else cells(say.NONE, say.NONE)),
            Cell(part.phase, "muted"),
        )
        for part in parts
    ]
    total = (say.percent(whole), say.time(whole * wall["p50"]), "", "", "")
    rows.append((Cell("sum of the parts", "strong"), *(Cell(text, "strong") for text in total)))
    rows.append((Cell("wall"), *cells("100.0%", say.time(wall["p50"]), say.time(wall["p50"]), say.times(wall), "")))
    listed = ", ".join(f"{component(part.name)} {say.percent(part.share)}" for part in parts)
    drawn = plots.drawing(
        "profile-budget", f"Share of each part in a step of {say.time(wall['p50'])}: {listed}",
        "Backward in the lighter shade of its part.",
        lambda width: plots.stacked(width, [("", [plots.Part(p.name, p.phase, p.share) for p in parts])], "share"),
    )  # fmt: skip
    note = "“Of the step” is the share of the median step; a part’s own median can differ from it a little."
    head = ("part", "share", "of the step", "p50", "p20 – p80", "phase")
    blocks: list[Block] = [drawn, Table(head, rows, note, words=(5,))]
    if abs(whole - 1) > 0.01:
        blocks.insert(
            0, Text(f"The parts sum to {whole:.1%} of the step: this budget is not to be trusted.", "warning")
        )
    return blocks


def operators(of: Page) -> list[Block]:
    listed = say.heavy_operators(of.profile)
    head = ("operator", "part", "calls", "CPU self", "device self", "FLOPs", "bytes", "shapes")

    def line(row: dict[str, Any]) -> tuple[Cell, ...]:
        times = (say.time(row["cpu_self_ms"]), say.time(row.get("device_self_ms")))
        work = (say.flops(row.get("flops")), say.size(row.get("bytes")))
        name, shapes = named(row["name"], 36), named(row.get("shapes") or say.NONE, 22, "muted")
        return cells(name, _part(row), say.counted(row["calls"]), *times, *work, shapes)

    return _longest(head, [line(row) for row in listed], "operators", words=(1, 7), note="Per step; self time only.")


def _part(row: dict[str, Any]) -> Cell:
    return Cell(titled(component(row["part"]), 24) if row.get("part") else say.NONE, "muted")


def _longest(
    head: tuple[str, ...], rows: list[tuple[Cell, ...]], what: str, *, words: tuple[int, ...] = (), note: str = ""
) -> list[Block]:
    """The first rows open, the others folded away."""
    blocks: list[Block] = [Table(head, rows[:TOP], note, words=words)]
    if len(rows) > TOP:
        blocks.append(Table(head, rows[TOP:], fold=f"{len(rows) - TOP} more {what}", words=words))
    return blocks


def kernels(of: Page) -> list[Block]:
    head = ("kernel", "part", "count", "total", "mean", "share", "launch delay")
    rows = []
    for row in say.heavy_kernels(of.profile):
        delay = row.get("launch_delay_us")
        times = (say.time(row["total_ms"]), say.time(row["mean_us"] / 1e3), say.percent(row["share"]))
        late = say.time(None if delay is None else delay / 1e3)
        rows.append(cells(named(row["name"], 44), _part(row), say.counted(row["count"]), *times, late))
    note = "Per step. Launch delay: from the end of the launching call to the start of the kernel."
    return [
        Text(say.kernel_sentence(of.profile), "lead"),
        *_longest(head, rows, "kernels", words=(1,), note=note),
        *_stalls(of),
    ]


def _stalls(of: Page) -> list[Block]:
    if of.profile.get("stalls") is None:
        return []
    why = say.missing(of.profile, "stalls")
    if why:
        return [Text(f"Stall reasons were not measured: {why}.", "missing")]
    rows = []
    for kernel in of.profile["stalls"]["kernels"]:
        reasons = sorted(kernel["reasons"].items(), key=lambda item: -item[1])[:5]
        said = ", ".join(f"{name} {say.percent(share, 0)}" for name, share in reasons)
        rows.append(cells(named(kernel["name"], 36), f"{kernel['samples']:,}", said))
    note = "Samples of the program counter by Nsight Compute, kernel by kernel, replayed: not times of the step."
    return [Table(("why warps stall", "samples", "reasons"), rows, note, words=(2,))]


def roofline(of: Page) -> list[Block]:
    listed = of.profile["roofline"]
    head = ("part", "FLOPs", "bytes", "FLOP/B", "FLOP/s", "B/s", "of the roof", "bound by")
    rows = []
    for number, row in enumerate(listed, 1):
        hue, faint = family(row["name"])
        name = titled(component(row["name"]), 30)
        work = (say.flops(row["flops"]), say.size(row["bytes"]))
        ratio = say.NONE if row.get("intensity") is None else say.three(row["intensity"])
        rates = (say.flop_rate(row["flops_per_s"]), say.byte_rate(row["bytes_per_s"]))
        end = (say.percent(row.get("share_of_roof"), 0), Cell(row["bound"], "muted"))
        rows.append(cells(Cell(_numbered(number, name), swatch=hue, faint=faint), *work, ratio, *rates, *end))
    note = "FLOPs and bytes are counted, times measured; ceilings are those of this machine, measured."
    if of.peaks:
        note += f" They were taken {str(of.peaks.get('measured', '')).replace('T', ' ').removesuffix('+00:00')} (UTC)"
        note += ", in quick mode." if of.peaks.get("quick") else "."
    return [*_roofs(of, listed), Table(head, rows, note, words=(7,))]


def _numbered(number: int, name: str) -> str:
    return type(name)(f"{number}. ") + name


def _roofs(of: Page, listed: list[dict[str, Any]]) -> list[Block]:
    """The roofline, and bytes a second of what does no arithmetic; neither where no ceiling was measured."""
    peak = max((row.get("ceiling_flops_per_s") or 0.0 for row in listed), default=0.0)
    streams = sorted({row["ceiling_bytes_per_s"] for row in listed if row.get("ceiling_bytes_per_s")}, reverse=True)[:3]
    if not peak or not streams:
        return []
    drawn = [
        roofs.Roof(f"{label} {say.byte_rate(rate)}", say.byte_rate(rate), rate, hue, main)
        for rate, label, hue, main in zip(
            streams, ("memory", "lower ceiling", "lowest ceiling"), ("ink", "embedding", "muted"), (True, False, False)
        )
    ]
    points = [
        roofs.Point(number, say.short(row["name"], 28), row["intensity"], row["flops_per_s"])
        for number, row in enumerate(listed, 1)
        if row.get("intensity") and row["flops_per_s"]
    ]
    said = "; ".join(f"{component(p.name)} {say.flop_rate(p.flops)} at {say.three(p.intensity)} FLOP/B" for p in points)
    top = (f"arithmetic {say.flop_rate(peak)}", peak)
    blocks: list[Block] = [
        plots.drawing(
            "profile-roofline", f"Roofline under {top[0]} and {drawn[0].label}. {said}",
            "A dot far below the roofs is held down by neither: launches or waiting. Open dots are backward; on a "
            "phone dots carry the number of their row below. Dashed: a lower ceiling, of some parts only.",
            lambda width: profile_plots.roofline(width, drawn, top, points),
        )
    ]  # fmt: skip
    quiet = [row for row in listed if not row["flops"] and row["bytes_per_s"]]
    if quiet:
        moved = [roofs.Moved(say.short(row["name"], 28), *_rates(of, row)) for row in quiet]
        said = "; ".join(f"{component(one.name)} {say.byte_rate(one.p50)}" for one in moved)
        blocks.append(
            plots.drawing(
                "profile-strip", f"Bytes a second of parts without arithmetic: {said}",
                "Parts without arithmetic have no place on the roofline: their bytes a second.",
                lambda width: roofs.strip(width, drawn, moved),
            )
        )  # fmt: skip
    return blocks


def _rates(of: Page, row: dict[str, Any]) -> tuple[float, float, float]:
    """Slow end, middle and fast end of a part's bytes a second; all the same where its spread is not known."""
    middle = row["bytes_per_s"]
    ms = next((part["ms"] for part in of.profile["components"] if part["name"] == row["name"]), None)
    if not ms or not ms["p20"] or not ms["p50"] or not ms["p80"]:
        return middle, middle, middle
    return middle * ms["p50"] / ms["p80"], middle, middle * ms["p50"] / ms["p20"]


def idle(of: Page) -> list[Block]:
    part = of.profile["idle"]
    wall = part["wall_ms"]
    states = [("busy", part["busy_ms"]), *part["causes"].items()]
    slices = [profile_plots.Slice(name, max(0.0, ms), CAUSES.get(name, "other")) for name, ms in states]
    rows = [
        cells(Cell(one.label, swatch=one.tone), say.time(one.value), say.percent(one.value / wall if wall else None))
        for one in slices
    ]
    whole = math.fsum(one.value for one in slices)
    rows.append(
        tuple(Cell(text, "strong") for text in ("sum", say.time(whole), say.percent(whole / wall if wall else 0)))
    )
    said = ", ".join(f"{one.label} {say.time(one.value)}" for one in slices)
    blocks: list[Block] = [
        Text(say.idle_sentence(part), "lead"),
        plots.drawing(
            "profile-idle", f"The device in a step: {said}", "The device’s traced step, busy and idle by cause.",
            lambda width: profile_plots.split(width, slices),
        ),
        Table(("the device", "a step", "share"), rows, _CAUSES_NOTE),
    ]  # fmt: skip
    syncs = [
        cells(named(sync["what"], 40), named(sync["caller"], 44), say.counted(sync["count"]), say.time(sync["ms"]))
        for sync in sorted(part.get("syncs") or [], key=lambda sync: -sync["ms"])
    ]
    if syncs:
        blocks += _longest(("synchronises", "called by", "count", "waits"), syncs, "callers", words=(1,))
    return blocks


_CAUSES_NOTE = (
    "Input wait: the host was making the batch. Host wait: the host had not launched the next kernel yet. Kernel gap: "
    "it had, and the device started it late. Sync: the host was blocked waiting for the device."
)


def transfers(of: Page) -> list[Block]:
    if not of.profile["transfers"]:
        return [Text("None: nothing was copied or set.")]
    rows = []
    for row in of.profile["transfers"]:
        rate = say.byte_rate(row["gb_per_s"] * 1e9 if row.get("gb_per_s") else None)
        pinned = Cell(say.yes(row.get("pinned")), "bad" if row.get("pinned") is False else "")
        figures = (say.counted(row["count"]), say.size(row["bytes"]), say.time(row["ms"]), rate)
        rows.append(cells(row["kind"], *figures, pinned, say.percent(row["overlapped_share"], 0)))
    note = "Per step. Overlapped: the share of the time during which a kernel ran as well."
    return [Table(("kind", "count", "bytes", "time", "rate", "pinned", "overlapped"), rows, note)]


def embeddings(of: Page) -> list[Block]:
    part, listed = of.profile["embeddings"], say.heavy_tables(of.profile)
    blocks: list[Block] = [Text(" ".join(say.embedding_sentences(part)), "lead")]
    drawn = [profile_plots.Reach(say.short(row["name"], 18), row["lookups"], row["unique"]) for row in listed]
    if drawn:
        said = "; ".join(f"{one.label} {say.counted(one.lookups)}" for one in drawn[:TABLES_DRAWN])
        caption = "Lookups a step, by table; the full colour is how many different rows they reach."
        if len(drawn) > TABLES_DRAWN:
            caption += f" The {TABLES_DRAWN} busiest of {len(drawn)}."
        blocks.append(
            plots.drawing(
                "profile-tables", f"Lookups by table: {said}", caption,
                lambda width: profile_plots.reach(width, drawn[:TABLES_DRAWN]),
            )
        )  # fmt: skip
    rows = []
    for row in listed:
        reached = (say.counted(row["lookups"]), say.counted(row["unique"]), say.percent(row["unique_ratio"]))
        ends = (say.size(row["touched_bytes"]), say.percent(row["busiest_share"], 0))
        rows.append(cells(named(row["name"], 24), f"{row['rows']:,}", say.size(row["row_bytes"]), *reached, *ends))
    head = ("table", "rows", "row", "lookups", "different", "unique ratio", "touched", "busiest 1%")
    note = "Busiest 1%: the share of lookups that go to the commonest hundredth of the touched rows."
    return [*blocks, *(_longest(head, rows, "tables", note=note) if rows else [])]


def communication(of: Page) -> list[Block]:
    return ranks.blocks("profile", of.profile)


def fixes(of: Page) -> list[Block]:
    listed = of.profile["fixes"]
    if not listed:
        return [Text("None: nothing that recperf can switch would help this step.")]
    bars = [
        profile_plots.Gain(
            say.short(fix["title"], 34),
            fix.get("predicted_gain"),
            fix.get("measured_gain"),
            fix["status"] == "rejected",
        )
        for fix in listed
    ]
    said = "; ".join(f"{b.label}: predicted {say.gain(b.predicted)}, measured {say.gain(b.measured)}" for b in bars)
    drawn = plots.drawing(
        "profile-fixes", f"What each fix gains. {said}",
        "How many times faster the step becomes; dashed: as it is now.",
        lambda width: profile_plots.gains(width, bars),
    )  # fmt: skip
    rows = []
    for fix in listed:
        tone = {"tried": "good", "rejected": "bad"}.get(fix["status"], "muted")
        hit = fix["measured_ms"] / fix["predicted_ms"] if fix.get("measured_ms") and fix.get("predicted_ms") else None
        figures = [say.time(fix.get("predicted_ms")), say.time(fix.get("measured_ms")), say.gain(hit), say.same(fix)]
        rows.append(cells(named(fix["title"], 40), *figures, Cell(fix["status"], tone)))
    head = ("fix", "predicted", "measured", "measured / predicted", "same numbers", "status")
    reasons = []
    for fix in listed:
        why = ". ".join(str(fix[name]).rstrip(".") for name in ("why", "note") if fix.get(name))
        reasons.append(
            cells(named(fix["title"], 40), Cell(fix.get("switch") or say.NONE, "code"), f"{why}." if why else "")
        )
    return [
        drawn,
        Table(head, rows, "Times of a step.", words=(5,)),
        Table(("fix", "switch", "why"), reasons, words=(1, 2)),
    ]


def trust(of: Page) -> list[Block]:
    rows = [cells(name, text) for name, text in say.trust_rows(of.profile)]
    facts = of.machine or {}
    for name in ("cpu", "cores", "memory_gib", "system", "fingerprint"):
        if facts.get(name) is not None:
            rows.append(cells(f"machine: {name.replace('_gib', ' (GiB)')}", Cell(str(facts[name]))))
    gpus = ", ".join(str(gpu.get("name")) for gpu in facts.get("gpus") or [] if isinstance(gpu, dict))
    if gpus:
        rows.append(cells("machine: GPUs", gpus))
    return [Table(("", ""), rows, words=(1,))]
