"""recperf peaks"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import MachineError, RecperfError
from ..measure import peaks
from ..units import number, size
from .parse import parse
from .terminal import Terminal, print_json, table

DESCRIPTION = """Measure what this machine can do at best and keep it under the machine's fingerprint.
Takes about half a minute, twice that while other work is going on, and some seconds with --quick."""

BAR = 40


@dataclass(frozen=True, kw_only=True)
class Options:
    quick: bool = False
    """Fewer readings and fewer table sizes."""
    json: bool = False
    """Print the ceilings as one JSON object on stdout, everything else on stderr."""
    quiet: bool = False
    """Say nothing but errors."""


def command(words: list[str]) -> int:
    options = parse(Options, words, prog="recperf peaks", description=DESCRIPTION, default=Options())
    terminal = Terminal(as_json=options.json, quiet=options.quiet)
    terminal.say("measuring; the quieter the machine, the better")
    found = peaks.measure(quick=options.quick, say=lambda text: terminal.say(f"  {text}"))
    before = replaced(found)
    path = peaks.save(found)
    terminal.say(as_text(found))
    terminal.say(f"\nkept in {path}" + (f", in place of {before}" if before else ""))
    if options.json:
        print_json(found)
    return 0


def at_hand(terminal: Terminal) -> dict[str, Any]:
    """This machine's kept ceilings; where there are none, a quick measurement that is kept."""
    found = peaks.load()
    if found is not None:
        terminal.notice(f"reads against the ceilings of {found['measured']} ({'quick' if found['quick'] else 'full'})")
        return found
    terminal.notice("measuring this machine's ceilings first, once; recperf peaks takes them more carefully")
    found = peaks.measure(quick=True, say=lambda text: None)
    try:
        peaks.save(found)
    except MachineError as error:
        terminal.notice(f"the ceilings are not kept: {error.what}")
    return found


def replaced(found: dict[str, Any]) -> str | None:
    """What stood in the machine's file until now."""
    if not peaks.path_of(found["machine"]).exists():
        return None
    try:
        old = peaks.load(found["machine"])
    except RecperfError:
        return "a file that could not be read"
    return f"{'quick' if old.get('quick') else 'full'} ceilings of {old.get('measured')}" if old else None


def as_text(found: dict[str, Any]) -> str:
    facts = found["machine"]
    caches = ", ".join(f"{level} {size(count)}" for level, count in facts["caches"].items()) or "unknown"
    lines = [
        "",
        f"{facts['cpu']}, {facts['cores']} cores, {found['threads']} threads, torch {facts['torch']}"
        f"{' (quick)' if found['quick'] else ''}, {found['seconds']:.0f} s",
        f"caches: {caches}; huge pages: {found['huge_pages'] or 'unknown'}",
        "",
        table(_ceilings(found)),
        "",
        "random rows, fresh ids",
        table(_gather(found["gather"])),
        "",
        *_knee(found["knee"], facts["caches"]),
    ]
    for name, gpu in (found["gpu"] or {}).items():
        lines += ["", f"{name}, L2 {size(gpu['l2_bytes'])}", "", table(_ceilings(gpu)), ""]
        lines += ["random rows, fresh ids", table(_gather(gpu["gather"]))]
    return "\n".join(lines)


def _ceilings(part: dict[str, Any]) -> list[list[str]]:
    rows = [["ceiling", "median", "p20", "p80", "readings"]]
    for dtype, figure in part["gemm"].items():
        rows.append(_row(f"product of {dtype}, side {figure['shape'][0]:,}", figure))
    copy, read = part["copy"], part["read"]
    rows.append(_row(f"copy of {size(copy['buffer_bytes'])}, {copy['counted']}", copy))
    rows.append(_row(f"read of {size(read['buffer_bytes'])}, {read['method']}", read))
    for name, figure in part.get("transfer", {}).items():
        rows.append(_row(f"{name.replace('_', ' ')}, {size(figure['buffer_bytes'])}", figure))
    for name, figure in {**part.get("dispatch", {}), **part.get("launch", {})}.items():
        rows.append(_row(f"{name.replace('_', ' ')}: {figure['what']}", figure))
    return rows


def _row(name: str, figure: dict[str, Any]) -> list[str]:
    return [name, *(_value(figure[key], figure["unit"]) for key in ("p50", "p20", "p80")), str(figure["n"])]


def _value(value: float, unit: str) -> str:
    if unit.startswith("ns"):
        return f"{value:,.3g} ns" if value < 1000 else f"{value / 1000:,.3g} us"
    shown = number(value)
    return shown + unit if shown[-1].isalpha() else f"{shown} {unit}"


def _gather(gather: dict[str, Any]) -> list[list[str]]:
    cache, dram = gather["cache"], gather["dram"]
    heads = [f"{name} {size(part['table_bytes'])}" for name, part in (("cache", cache), ("memory", dram))]
    rows = [["row", heads[0], "", heads[1], "", "memory / cache"]]
    for near, far in zip(cache["rows"], dram["rows"]):
        cells = [_value(one[key]["p50"], one[key]["unit"]) for one in (near, far) for key in ("ns", "bytes_per_s")]
        rows.append([f"{near['row_bytes']} B", *cells, f"{far['ns']['p50'] / near['ns']['p50']:.1f} x"])
    return rows


def _knee(knee: dict[str, Any], caches: dict[str, int]) -> list[str]:
    """A bar a table size, with a line where each cache ends."""
    lines = [f"one lookup by table size ({knee['threads']} thread, rows of {knee['row_bytes']} B, fresh ids)"]
    ends = sorted(caches.items(), key=lambda item: item[1])
    longest = max(point["p50"] for point in knee["points"])
    for point in knee["points"]:
        while ends and ends[0][1] < point["table_bytes"]:
            level, bytes_ = ends.pop(0)
            lines.append(f"  {'':>8}  {'':>8}  -- {level} ends, {size(bytes_)}")
        bar = "#" * max(1, round(BAR * point["p50"] / longest))
        lines.append(f"  {size(point['table_bytes']):>8}  {_value(point['p50'], 'ns'):>8}  {bar}")
    return lines
