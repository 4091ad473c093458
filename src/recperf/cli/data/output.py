"""What `recperf data` prints: facts about a dataset, the end of an import, and progress bars."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal

from ...stop import FLAG
from ...terminal import Terminal
from ...units import number, size

if TYPE_CHECKING:
    from ...data.files.text_rows import SkippedRows

Unit = Literal["events", "rows", "users", "bytes", "share"]
_SHOWN = 5
"""Bad rows that the end of an import shows."""


def print_facts(facts: dict[str, Any], terminal: Terminal) -> None:
    """Print all facts that are not empty; bytes also in a human unit."""
    width = max([20, *map(len, facts)])
    for name, value in facts.items():
        if value is not None and value not in ([], {}):
            counted = name.endswith("bytes") and isinstance(value, int)
            text = f"{size(value)} ({value:,} bytes)" if counted else as_text(value)
            terminal.say(f"{name:<{width}} {text}")


def print_import(
    facts: dict[str, Any],
    terminal: Terminal,
    *,
    counts: str,
    dates: tuple[str, str] | None,
    columns: Mapping[str, str],
    lines: Mapping[str, str],
    skipped: SkippedRows | None,
) -> None:
    """A sentence of what was imported, its columns, a few further facts, and the next command."""
    verb = {True: "imported ", False: "already imported ", None: ""}[facts.get("imported")]
    terminal.say(f"{verb}{facts['name']}: {counts}{f', {dates[0]} to {dates[1]}' if dates else ''}")
    terminal.say("  columns")
    width = max(map(len, columns))
    for name, text in columns.items():
        terminal.say(f"    {name:<{width}}  {text}")
    if skipped:
        more = f"; and {skipped.count - _SHOWN:,} more" * (skipped.count > _SHOWN)
        shown = "; ".join(skipped.first[:_SHOWN])
        lines = {**lines, "skipped": f"{count_of(skipped.count, 'bad row')}: {shown}{more}"}
    written = f", written in {facts['seconds']:.1f} s" if facts.get("imported") else ""
    for name, text in {**lines, "store": f"{facts['folder']}, {size(facts['store_bytes'])}{written}"}.items():
        terminal.say(f"  {name:<10}  {text}")
    for note in facts.get("notes", ()):
        terminal.notice(note)
    terminal.say(f"next: {facts['next']}")


def count_of(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def as_text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {as_text(inner)}" for key, inner in value.items() if inner is not None)
    if isinstance(value, (list, tuple)):
        return ", ".join(map(as_text, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else str(value)


class Bar:
    """A live progress bar on a terminal, elsewhere a line every five seconds."""

    def __init__(self, terminal: Terminal, label: str, unit: Unit) -> None:
        self.terminal, self.label, self.unit = terminal, label, unit
        self.began = self.last = monotonic()
        self.first: int | None = None
        self.latest = 0

    def __call__(self, done: int, total: int) -> None:
        now = monotonic()
        if self.first is None or done < self.latest:
            # Work of several parts counts each from its start, where no rate is known yet.
            self.first, self.began, self.latest = done, now, done
            return
        self.latest = done
        if self.terminal.quiet or now - self.last < (0.1 if self.terminal.live else 5.0):
            return
        self.last = now
        rate = max(1, done - self.first) / max(1e-9, now - self.began)
        left = f"  {(total - done) / rate:,.0f} s left" if total else ""
        if self.unit in ("bytes", "share"):
            amount = f"{done / max(1, total):.0%}" if self.unit == "share" else f"{size(done)} of {size(total)}"
        else:
            of = f" of {number(total)}" if total else ""
            amount = f"{number(done)}{of} {self.unit}  {number(rate)} {self.unit}/s"
        self.terminal.draw(f"{self.label}  {amount}{left}", done, total)


@contextmanager
def progress_bars(terminal: Terminal, *, resumable: bool) -> Iterator[Callable[..., Callable[..., None]]]:
    """A function that makes progress bars, which are removed at the end. Each progress polls for signals."""

    def make(label: str, unit: Unit = "events") -> Callable[..., None]:
        bar = Bar(terminal, label, unit)

        def show(*progress: int) -> None:
            FLAG.poll()
            bar(*progress)

        return show

    text, fix = ("; finished work is saved", "run the same command again; it resumes") if resumable else ("", None)
    try:
        with FLAG.explained(text, fix):
            yield make
    finally:
        terminal.close()
