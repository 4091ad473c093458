"""What a profile says of several ranks: the slowest one, and what ranks wait for. Words and rows for text and page."""

from __future__ import annotations

from typing import Any

from ...measure.explain import ranks_sentence
from . import plots
from . import profile_words as say
from .blocks import Block, Cell, Table, Text, cells
from .words import component

OWN, LATE, BYTES, WAITS = "own work", "waiting for a rank", "waiting for bytes", "waiting"
DRAWN = 16
OPEN = 12
"""Rows of a table that are not folded away."""
HEAD = ("rank", "a step", "own work", "waits", "for a late rank", "for bytes", "others wait for it", "largest own part")
COLLECTIVES = ("in", "collective", "count", "handed in", "waits", "for a late rank", "for bytes", "most waited for")


def several(profile: dict[str, Any] | None) -> dict[str, Any] | None:
    """The section, where there were several ranks."""
    found = (profile or {}).get("communication")
    return found if isinstance(found, dict) and "each" in found else None


def sentence(profile: dict[str, Any]) -> str:
    return say.plain(ranks_sentence(profile))


def method(part: dict[str, Any]) -> str:
    """How it was measured."""
    if part["not_told_apart"]:
        split = f"Waiting for a rank and for bytes is not told apart: {say.plain(part['not_told_apart'])}."
    else:
        split = (
            "A clock is read when a rank comes to a collective and when its wait begins and ends; what passes before "
            "the last rank has come is waiting for that one, the rest is for bytes to move."
        )
    error = part["clock_error_ms"]
    clocks = "The ranks share one clock."
    if error:
        clocks = f"Clocks of {part['hosts']} hosts were compared by messages, to within {say.time(error)}."
    return (
        f"Every rank clocked the same steps, begun together; means of the {part['steps']} in the middle. {split} "
        f"{clocks} Budget, operators and tables are those of rank {part['slowest']}, the slowest."
    )


def rank_rows(part: dict[str, Any]) -> list[list[str]]:
    """A row a rank, the one with the most work of its own first."""
    names = ("step_ms", "own_ms", "exposed_ms", "late_ms", "moving_ms", "awaited_ms")
    listed = sorted(part["each"], key=lambda row: -row["own_ms"])
    return [
        [str(row["rank"]), *(say.time(row[name]) for name in names), component(say.plain(row["largest_part"]))]
        for row in listed
    ]


def collective_rows(part: dict[str, Any]) -> list[list[str]]:
    return [
        [
            component(say.plain(row["part"])), say.plain(row["what"]), say.counted(row["count"]),
            say.size(row["bytes"]), *(say.time(row[name]) for name in ("exposed_ms", "late_ms", "moving_ms")),
            f"rank {row['awaited_rank']}",
        ]
        for row in part["collectives"]
    ]  # fmt: skip


def blocks(key: str, profile: dict[str, Any]) -> list[Block]:
    part = several(profile)
    if part is None:
        return []
    rows = [
        (Cell(f"rank {row[0]}", "strong" if not n else ""), *cells(*row[1:])) for n, row in enumerate(rank_rows(part))
    ]
    found: list[Block] = [Text(sentence(profile), "lead"), _drawing(key, part)]
    found.append(Table(HEAD, rows[:OPEN], method(part), words=(7,)))
    if len(rows) > OPEN:
        found.append(Table(HEAD, rows[OPEN:], fold=f"{len(rows) - OPEN} more ranks", words=(7,)))
    collectives = [cells(*row) for row in collective_rows(part)]
    if collectives:
        note = "Per step, mean over the ranks. Most waited for: the rank for which the others waited longest there."
        found.append(Table(COLLECTIVES, collectives, note, words=(1, 7)))
    return found


def _drawing(key: str, part: dict[str, Any]) -> Block:
    """A bar a rank; of many, those with the most work of their own."""
    listed = sorted(part["each"], key=lambda row: -row["own_ms"])[:DRAWN]
    bars = []
    for row in sorted(listed, key=lambda row: int(row["rank"])):
        waits = [(WAITS, row["exposed_ms"])] if row["late_ms"] is None else [
            (LATE, row["late_ms"]), (BYTES, row["moving_ms"])
        ]  # fmt: skip
        pieces = [(OWN, row["own_ms"]), *waits]
        bars.append((f"rank {row['rank']}", [plots.Part(name, "", max(0.0, ms)) for name, ms in pieces]))
    said = "; ".join(
        f"rank {r['rank']} {say.time(r['own_ms'])} own, {say.time(r['exposed_ms'])} waiting" for r in listed
    )
    caption = "A step of each rank: its own work, then all it waits in collectives, for a late rank and for bytes."
    if len(part["each"]) > len(listed):
        caption += f" The {len(listed)} of {len(part['each'])} with the most work of their own."
    return plots.drawing(
        f"{key}-ranks", f"Own work and waiting of each rank: {said}", caption,
        lambda width: plots.stacked(width, bars, "ms"),
    )  # fmt: skip
