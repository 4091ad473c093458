"""Facts about a dataset as text: one line per fact, and how every import ends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ...units import size
from ..terminal import Terminal

_SHOWN = 5
"""Bad rows that the end of an import shows."""


def print_facts(facts: dict[str, Any], terminal: Terminal) -> None:
    """Print all facts that are not empty; bytes also in a human unit."""
    width = max([20, *map(len, facts)])
    for name, value in facts.items():
        if value is not None and value not in ([], {}):
            text = f"{size(value)} ({value:,} bytes)" if name.endswith("bytes") else as_text(value)
            terminal.say(f"{name:<{width}} {text}")


def print_import(
    facts: Mapping[str, Any],
    terminal: Terminal,
    *,
    counts: str,
    dates: tuple[str, str] | None,
    columns: Mapping[str, str],
    lines: Mapping[str, str],
    notes: Iterable[str] = (),
) -> None:
    """A sentence of what was imported, its columns, a few further facts, and the next command."""
    verb = "imported" if facts["imported"] else "already imported"
    terminal.say(f"{verb} {facts['name']}: {counts}{f', {dates[0]} to {dates[1]}' if dates else ''}")
    terminal.say("  columns")
    width = max(map(len, columns))
    for name, text in columns.items():
        terminal.say(f"    {name:<{width}}  {text}")
    skipped = facts.get("skipped_rows")
    if skipped:
        more = f"; and {skipped['count'] - _SHOWN:,} more" * (skipped["count"] > _SHOWN)
        shown = "; ".join(skipped["first"][:_SHOWN]) + more
        lines = {**lines, "skipped": f"{count_of(skipped['count'], 'bad row')}: {shown}"}
    written = f", written in {facts['seconds']:.1f} s" if facts["imported"] else ""
    for name, text in {**lines, "store": f"{facts['folder']}, {size(facts['store_bytes'])}{written}"}.items():
        terminal.say(f"  {name:<9}  {text}")
    for note in notes:
        terminal.notice(note)
    terminal.say(f"next: {facts['next']}")


def count_of(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def as_text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {as_text(inner)}" for key, inner in value.items() if inner is not None)
    if isinstance(value, (list, tuple)):
        return ", ".join(map(as_text, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else str(value)
