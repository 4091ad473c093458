"""recperf peaks"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import structs

from .. import locations
from ..errors import RecperfError
from ..measure import peaks
from ..measure.peaks.records import DeviceRates, Knee, PeakFigure, Peaks
from ..terminal import Terminal, print_json, table
from ..units import number, size, time
from .parse import OutputOptions, parse

DESCRIPTION = """Measure the ceilings of this machine and store them under its fingerprint.
Takes half a minute, up to three minutes beside other work, and some seconds with --quick."""

BAR = 40

STREAMS = {
    "copy": "copy of",
    "read": "read of",
    "update": "in-place update of",
    "first_touch": "new pages of",
    "cached": "cached addition of",
    "special": "functions such as exp on",
}
"""Figures in bytes per second, and how they are shown."""


@dataclass(frozen=True, kw_only=True)
class Options(OutputOptions):
    quick: bool = False
    """Fewer readings and fewer table sizes."""


def command(arguments: list[str]) -> int:
    options = parse(Options, arguments, prog="recperf peaks", description=DESCRIPTION)
    terminal = Terminal(as_json=options.json, quiet=options.quiet)
    locations.home()  # A cache folder that cannot be used is named before the measurement, not after it.
    terminal.say("measuring; other processes should be idle")
    measured = peaks.measure(quick=options.quick, say=lambda text: terminal.say(f"  {text}"))
    before, better = None, peaks.better_stored(measured)
    if peaks.path_of(measured.machine).exists():
        try:
            old = peaks.load(measured.machine)
            before = f"{'quick' if old.quick else 'full'} ceilings measured at {old.measured}" if old else None
        except RecperfError:
            before = "an unreadable file"
    path = peaks.save(measured)
    terminal.say(as_text(measured))
    if better is not None:
        now, then = (f"beside {one.other_work or 0.0:.0%} other work" for one in (measured, better))
        kind = "quick" if measured.quick else "full"
        terminal.say(f"\nnot stored, because {before} {then} are better than {kind} ones {now}")
    else:
        terminal.say(f"\nwritten to {path}" + (f", replacing {before}" if before else ""))
    if options.json:
        print_json(measured)
    return 0


def as_text(measured: Peaks) -> str:
    facts = measured.machine
    caches = ", ".join(f"{level} {size(count)}" for level, count in facts["caches"].items()) or "unknown"
    lines = [
        "",
        f"{facts['cpu']}, {facts['cores']} cores, {measured.threads} threads, torch {facts['torch']}"
        f"{' (quick)' if measured.quick else ''}, {measured.seconds:.0f} s",
        f"caches: {caches}; huge pages: {measured.huge_pages or 'unknown'}",
        *_device(measured, facts["caches"], "1 thread"),
    ]
    for name, gpu in (measured.gpu or {}).items():
        lines += ["", f"{name}, L2 {size(gpu.l2_bytes)}", *_device(gpu, {"L2": gpu.l2_bytes}, "GPU")]
    return "\n".join(lines)


def _device(part: DeviceRates, caches: dict[str, int], where: str) -> list[str]:
    """The ceilings of a device, what calling an operator on one element takes, and lookups of random rows."""
    rows = [["ceiling", "median", "p20", "p80", "readings"]]
    for dtype, figure in part.gemm.items():
        rows.append(_row(f"product of {dtype}, side {(figure.shape or [0])[0]:,}", figure))
    for name, label in STREAMS.items():
        if (stream := getattr(part, name)) is not None:
            rows.append(_row(f"{label} {size(stream.buffer_bytes)}, {stream.counted}", stream))
    for name, figure in part.transfer.items():
        rows.append(_row(f"{name.replace('_', ' ')}, {size(figure.buffer_bytes or 0)}", figure))
    launch = structs.asdict(part.launch) if part.launch else {}
    rows += [
        _row(f"{name.replace('_', ' ')}: {figure.what}", figure) for name, figure in {**launch, **part.calls}.items()
    ]
    heads = [
        f"{name} {size(one.table_bytes)}" for name, one in (("cache", part.gather.cache), ("memory", part.gather.dram))
    ]
    lookups = [["row", heads[0], "", heads[1], "", "memory / cache"]]
    for near, far in zip(part.gather.cache.rows, part.gather.dram.rows):
        ns = [one.ns.p50 for one in (near, far)]
        cells = [text for time in ns for text in (_value(time, "ns"), _value(near.row_bytes * 1e9 / time, "B/s"))]
        lookups.append([f"{near.row_bytes} B", *cells, f"{far.ns.p50 / near.ns.p50:.1f} x"])
    return ["", table(rows), "", "random rows", table(lookups), "", *_knee(part.knee, caches, where)]


def _row(name: str, figure: PeakFigure) -> list[str]:
    return [name, *(_value(value, figure.unit) for value in (figure.p50, figure.p20, figure.p80)), str(figure.n)]


def _value(value: float, unit: str) -> str:
    if unit.startswith("ns"):
        return time(value / 1e6)
    shown = number(value)
    return shown + unit if shown[-1].isalpha() else f"{shown} {unit}"


def _knee(knee: Knee, caches: dict[str, int], where: str) -> list[str]:
    """One bar per table size, with a line where each reported cache ends."""
    lines = [f"time of a lookup by table size ({where}, rows of {knee.row_bytes} B)"]
    ends = sorted(caches.items(), key=lambda item: item[1])
    longest = max(point.p50 for point in knee.points)
    for point in knee.points:
        while ends and ends[0][1] < point.table_bytes:
            level, bytes_ = ends.pop(0)
            lines.append(f"  {'':>8}  {'':>8}  -- {level} ends, {size(bytes_)}")
        bar = "#" * max(1, round(BAR * point.p50 / longest))
        lines.append(f"  {size(point.table_bytes):>8}  {_value(point.p50, 'ns'):>8}  {bar}")
    stream = f"; additions in the cache up to {size(knee.stream.bytes)}" if knee.stream else ""
    return [*lines, f"rows come from the cache up to a table of {size(knee.bytes)}{stream}"]
