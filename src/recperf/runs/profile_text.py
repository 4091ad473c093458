"""A profile as a performance engineer reads it in a terminal: the verdict first, then what it rests on.

Plain text, at most `WIDTH` columns. A section that was not measured says so and why, in one line.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from .report import profile_words as say
from .report import ranks
from .report.words import component

WIDTH = 110
TOP = 12
"""Rows shown of a long table."""

Profile = dict[str, Any]


def text(profile: Profile) -> str:
    """The whole report."""
    lines = [headline(profile)]
    for title, key, section in SECTIONS:
        why = say.missing(profile, key) if key else None
        lines += ["", title, *(wrapped(f"not measured: {why}") if why else section(profile))]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def headline(profile: Profile) -> str:
    name = say.plain(profile.get("workload") or "profile")
    preset = f" ({say.plain(profile['preset'])})" if profile.get("preset") else ""
    mode = f", {say.plain(profile['mode'])} mode" if profile.get("mode") else ""
    step = f"{say.time(profile['step_ms']['p50'])} a step"
    return f"{name}{preset} on {say.plain(profile['device'])}: {step} of {profile['batch_size']:,} samples{mode}"


def _verdict(profile: Profile) -> list[str]:
    found = say.verdict(profile)
    if not found:
        return ["  not measured: the profile names no regime"]
    named = found["sentence"].lower().startswith(found["name"].lower())
    lines = wrapped(found["sentence"] if named else f"{found['name']}: {found['sentence']}")
    if found.get("confidence"):
        why = f", because {found['why_confidence']}" if found.get("why_confidence") else ""
        lines += wrapped(f"confidence: {found['confidence']}{why}")
    if found.get("second"):
        lines += wrapped(f"what comes second: {found['second']}")
    rows = [
        [say.plain(e["what"]), say.reading(e["value"], e.get("unit")), e.get("threshold") or "", e.get("says") or ""]
        for e in found.get("evidence") or []
    ]
    return [*lines, "", *columns([["evidence", "found", "threshold", "says"], *rows], words=(2, 3))] if rows else lines


def _budget(profile: Profile) -> list[str]:
    wall, whole = profile["step_ms"], say.total_share(profile)
    rows = [["part", "share", "of the step", "p50", "p20 – p80", "phase"]]
    for part in sorted(profile["components"], key=lambda part: -part["share"]):
        share = part["share"]
        figures = [
            say.percent(share),
            say.time(share * wall["p50"]),
            say.time(part["ms"]["p50"]),
            say.times(part["ms"]),
        ]
        rows.append([component(say.plain(part["name"])), *figures, say.plain(part["phase"])])
    rows.append(["sum", say.percent(whole), say.time(whole * wall["p50"]), "", "", ""])
    rows.append(["wall", "100.0%", say.time(wall["p50"]), say.time(wall["p50"]), say.times(wall), ""])
    lines = columns(rows, words=(5,))
    if abs(whole - 1) > 0.01:
        lines += wrapped(f"WARNING: the parts sum to {whole:.1%} of the step, so this budget is not to be trusted.")
    return lines


def _operators(profile: Profile) -> list[str]:
    listed = say.heavy_operators(profile)
    rows = [["operator", "part", "calls", "CPU self", "device self", "FLOPs", "bytes", "shapes"]]
    for row in listed[:TOP]:
        times = [say.time(row["cpu_self_ms"]), say.time(row.get("device_self_ms"))]
        work = [say.flops(row.get("flops")), say.size(row.get("bytes"))]
        shapes = say.short(row.get("shapes") or "", 20)
        rows.append([say.short(row["name"], 48), _part(row), say.counted(row["calls"]), *times, *work, shapes])
    return [
        *columns(rows, words=(1, 7), names=True),
        *(["  " + say.operator_rest(listed[TOP:])] if len(listed) > TOP else []),
    ]


def _part(row: dict[str, Any]) -> str:
    return say.short(component(row["part"]), 20) if row.get("part") else say.NONE


def _kernels(profile: Profile) -> list[str]:
    listed = say.heavy_kernels(profile)
    rows = [["kernel", "part", "count", "total", "mean", "share", "launch delay"]]
    for row in listed[:TOP]:
        delay = row.get("launch_delay_us")
        times = [say.time(row["total_ms"]), say.time(row["mean_us"] / 1e3), say.percent(row["share"])]
        late = say.time(None if delay is None else delay / 1e3)
        rows.append([say.short(row["name"], 64), _part(row), say.counted(row["count"]), *times, late])
    lines = [*wrapped(say.kernel_sentence(profile)), *columns(rows, words=(1,), names=True)]
    rest = listed[TOP:]
    if rest:
        lines.append(f"  {len(rest)} more names take {say.time(math.fsum(row['total_ms'] for row in rest))}.")
    return lines + _stalls(profile)


def _stalls(profile: Profile) -> list[str]:
    if profile.get("stalls") is None:
        return []
    why = say.missing(profile, "stalls")
    if why:
        return wrapped(f"stall reasons not measured: {why}")
    lines = ["  why warps of the top kernels stall:"]
    for kernel in profile["stalls"]["kernels"]:
        reasons = sorted(kernel["reasons"].items(), key=lambda item: -item[1])[:4]
        said = ", ".join(f"{say.plain(name)} {say.percent(share, 0)}" for name, share in reasons)
        lines += wrapped(f"{say.short(kernel['name'], 40)}: {said} ({kernel['samples']:,} samples)", indent=4)
    return lines


def _roofline(profile: Profile) -> list[str]:
    rows = [["part", "FLOPs", "bytes", "FLOP/B", "reached", "", "of the roof", "bound by"]]
    for row in profile["roofline"]:
        intensity, share = row.get("intensity"), row.get("share_of_roof")
        work = [
            say.flops(row["flops"]),
            say.size(row["bytes"]),
            say.NONE if intensity is None else say.three(intensity),
        ]
        reached = [say.flop_rate(row["flops_per_s"]), say.byte_rate(row["bytes_per_s"])]
        name = say.short(component(say.plain(row["name"])), 28)
        rows.append([name, *work, *reached, say.percent(share, 0), say.plain(row["bound"])])
    lines = columns(rows, words=(7,))
    flops, moved = (
        sorted({row[name] for row in profile["roofline"] if row.get(name)}, reverse=True)
        for name in ("ceiling_flops_per_s", "ceiling_bytes_per_s")
    )
    ceilings = [*(say.flop_rate(value) for value in flops[:3]), *(say.byte_rate(value) for value in moved[:3])]
    return [*lines, *wrapped(f"Measured ceilings of this machine: {', '.join(ceilings) or 'none'}.")]


def _idle(profile: Profile) -> list[str]:
    idle = profile["idle"]
    wall = idle["wall_ms"]

    def line(name: str, ms: float) -> list[str]:
        return [say.plain(name), say.time(ms), say.percent(ms / wall if wall else None)]

    rows = [["", "a step", "share"], line("busy", idle["busy_ms"])]
    rows += [line(f"idle: {name}", ms) for name, ms in idle["causes"].items()]
    whole = idle["busy_ms"] + math.fsum(idle["causes"].values())
    rows += [line("sum", whole), line("wall", wall)]
    lines = [*wrapped(say.idle_sentence(idle)), *columns(rows)]
    syncs = sorted(idle.get("syncs") or [], key=lambda sync: -sync["ms"])
    if syncs:
        called = [
            [
                say.short(sync["what"], 34),
                say.short(sync["caller"], 44),
                say.counted(sync["count"]),
                say.time(sync["ms"]),
            ]
            for sync in syncs[:TOP]
        ]
        lines += ["", *columns([["synchronises", "called by", "count", "waits"], *called], words=(1,))]
    return lines


def _transfers(profile: Profile) -> list[str]:
    if not profile["transfers"]:
        return ["  none: nothing was copied or set"]
    rows = [["kind", "count", "bytes", "time", "rate", "pinned", "overlapped"]]
    for row in profile["transfers"]:
        rate = say.byte_rate(row["gb_per_s"] * 1e9 if row.get("gb_per_s") else None)
        figures = [say.counted(row["count"]), say.size(row["bytes"]), say.time(row["ms"]), rate]
        rows.append(
            [say.plain(row["kind"]), *figures, say.yes(row.get("pinned")), say.percent(row["overlapped_share"], 0)]
        )
    return columns(rows)


def _embeddings(profile: Profile) -> list[str]:
    listed = say.heavy_tables(profile)
    rows = [["table", "rows", "row", "lookups", "different", "unique ratio", "touched", "busiest 1%"]]
    for row in listed[:TOP]:
        name, reached = say.short(row["name"], 24), [say.counted(row["lookups"]), say.counted(row["unique"])]
        ends = [say.percent(row["unique_ratio"]), say.size(row["touched_bytes"]), say.percent(row["busiest_share"], 0)]
        rows.append([name, f"{row['rows']:,}", say.size(row["row_bytes"]), *reached, *ends])
    lines = [line for said in say.embedding_sentences(profile["embeddings"]) for line in wrapped(said)]
    lines += columns(rows)
    rest = listed[TOP:]
    if rest:
        lines.append(f"  {len(rest)} more tables with {say.counted(sum(row['lookups'] for row in rest))} lookups.")
    return lines


def _communication(profile: Profile) -> list[str]:
    part = profile["communication"]
    lines = wrapped(ranks.sentence(profile))
    listed = ranks.rank_rows(part)
    lines += ["", *columns([list(ranks.HEAD), *listed[:TOP]], words=(7,))]
    if len(listed) > TOP:
        lines.append(f"  {len(listed) - TOP} more ranks have less work of their own.")
    collectives = ranks.collective_rows(part)
    if collectives:
        lines += ["", *columns([list(ranks.COLLECTIVES), *collectives[:TOP]], words=(1, 7))]
    return [*lines, "", *wrapped(ranks.method(part))]


def _fixes(profile: Profile) -> list[str]:
    fixes = profile["fixes"]
    if not fixes:
        return ["  none: nothing that recperf can switch would help this step"]
    rows = [["fix", "predicted", "gain", "measured", "gain", "same numbers", "status"]]
    for fix in fixes:
        predicted = [say.time(fix.get("predicted_ms")), say.gain(fix.get("predicted_gain"))]
        measured = [say.time(fix.get("measured_ms")), say.gain(fix.get("measured_gain"))]
        rows.append([say.short(fix["title"], 34), *predicted, *measured, say.same(fix), say.plain(fix["status"])])
    lines = columns(rows, words=(6,))
    for fix in fixes:
        switch = f" [{fix['switch']}]" if fix.get("switch") else ""
        said = "; ".join(str(fix[name]).rstrip(".") for name in ("why", "note") if fix.get(name))
        lines += wrapped(f"{fix['title']}{switch}: {said or fix['status']}")
    return lines


def _trust(profile: Profile) -> list[str]:
    rows = [[name, value] for name, value in say.trust_rows(profile)]
    return columns([["", ""], *rows], words=(1,))[1:]


SECTIONS: tuple[tuple[str, str, Callable[[Profile], list[str]]], ...] = (
    ("Verdict", "", _verdict),
    ("Step budget", "", _budget),
    ("Operators", "operator_table", _operators),
    ("Kernels", "kernels", _kernels),
    ("Roofline", "roofline", _roofline),
    ("Device idle", "idle", _idle),
    ("Transfers", "transfers", _transfers),
    ("Embeddings", "embeddings", _embeddings),
    ("Communication", "communication", _communication),
    ("Fixes ranked", "fixes", _fixes),
    ("Trust", "", _trust),
)
"""Title, the key whose absence the section must explain, and what fills it."""


def wrapped(words: str, *, indent: int = 2) -> list[str]:
    space = " " * indent
    return textwrap.wrap(say.plain(words), WIDTH, initial_indent=space, subsequent_indent=space + "  ")


def columns(rows: Sequence[Sequence[str]], *, words: tuple[int, ...] = (), names: bool = False) -> list[str]:
    """Aligned columns, the first and those in `words` to the left.

    Where all together are wider than the terminal, the widest of these is wrapped; `names` in the first column are
    shortened instead.
    """
    left = {0, *words}
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    over = 2 + sum(widths) + 2 * (len(widths) - 1) - WIDTH
    if over > 0:
        widest = 0 if names else max(left, key=lambda index: widths[index])
        widths[widest] = max(16, widths[widest] - over)
    lines = []
    for row in rows:
        first = say.short(row[0], widths[0]) if names else row[0]
        cells = [_folded(cell, width) for cell, width in zip([first, *row[1:]], widths)]
        for number in range(max(map(len, cells))):
            parts = [cell[number] if number < len(cell) else "" for cell in cells]
            aligned = (
                part.ljust(width) if index in left else part.rjust(width)
                for index, (part, width) in enumerate(zip(parts, widths))
            )
            lines.append(f"  {'  '.join(aligned)}".rstrip())
    return lines


def _folded(cell: str, width: int) -> list[str]:
    return textwrap.wrap(cell, width) if len(cell) > width else [cell]
