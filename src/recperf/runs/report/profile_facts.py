"""What several sections of a report need from a profile: its verdict, missing sections, and the cell of a component."""

from __future__ import annotations

from typing import Any

from . import formats as fmt
from .blocks import Block, Cell, Table, cells
from .formats import NONE, component
from .svg import family

Profile = dict[str, Any]

TOP = 12
"""Rows of a long table that are always visible."""
ABSENT = "this profile has no such section; recperf profile WORKLOAD measures it"


def why_missing(profile: Profile, key: str) -> str | None:
    """Why a section was not measured; None if it was."""
    part = profile.get(key)
    if part is None:
        return ABSENT
    if isinstance(part, dict) and "missing" in part:
        return fmt.printable(part["missing"])
    return None


def verdict_of(profile: Profile) -> dict[str, Any] | None:
    """The verdict; the profile that a run takes of itself has the regime instead, without a confidence."""
    verdict = profile.get("verdict") or profile.get("regime")
    return dict(verdict) if verdict else None


def evidence_table(verdict: dict[str, Any]) -> list[Block]:
    """The measured values behind a verdict, each with its threshold."""
    rows = [
        cells(
            item["what"],
            fmt.evidence_value(item["value"], item.get("unit")),
            item.get("threshold") or NONE,
            Cell(item.get("says") or NONE, "strong"),
        )
        for item in verdict.get("evidence") or []
    ]
    note = f"Verdict: {verdict['name']}. A value on the other side of its threshold would change the result."
    return [Table(("evidence", "measured", "threshold", "result"), rows, note, left=(2, 3))] if rows else []


def keyed(name: str, text: str = "") -> Cell:
    """The name of a component with the colour that it has in figures."""
    hue, faint = family(name)
    return Cell(text or component(name), swatch=hue, faint=faint, width=30)
