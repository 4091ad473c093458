"""Progress of reading and writing files."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

from ...units import number, size
from ..terminal import Terminal

if TYPE_CHECKING:
    from rich.progress import Progress


class Bar:
    """Progress of reading: a live bar on a terminal, elsewhere a line every five seconds."""

    def __init__(self, terminal: Terminal, label: str) -> None:
        self.terminal, self.label = terminal, label
        self.began = self.last = monotonic()
        self.first: int | None = None
        self.latest = 0
        self.bar: Progress | None = None

    def __call__(self, done: int, total: int, rows: int = 0) -> None:
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
        line = f"{self.label}  {self.words(done, total, rows, rate)}  {(total - done) / rate:,.0f} s left"
        if not self.terminal.live:
            self.terminal.say(line)
            return
        if self.bar is None:
            self.bar = self._made(total)
        self.bar.update(self.bar.task_ids[0], completed=done, total=total, description=line, refresh=True)

    def words(self, done: int, total: int, rows: int, rate: float) -> str:
        return f"{size(done)} of {size(total)}" + (f"  {number(rows)} rows" if rows else "")

    def _made(self, total: int) -> Progress:
        from rich.progress import BarColumn, Progress, TextColumn

        columns = (BarColumn(bar_width=24), TextColumn("{task.description}", markup=False))
        bar = Progress(*columns, console=self.terminal.screen, auto_refresh=False, transient=True)
        bar.add_task(self.label, total=total)
        bar.start()
        return bar

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


class EventBar(Bar):
    """The same where events are counted instead of bytes."""

    def words(self, done: int, total: int, rows: int, rate: float) -> str:
        return f"{number(done)} of {number(total)} events  {number(rate)} events/s"


class ShareBar(Bar):
    """The same where what is counted is not one thing."""

    def words(self, done: int, total: int, rows: int, rate: float) -> str:
        return f"{100 * done / max(1, total):.0f} %"


BARS = {"events": EventBar, "bytes": Bar, "share": ShareBar}
"""The bar for what is counted."""
