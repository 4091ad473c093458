"""What a person sees: messages, tables, a live progress line on a terminal and plain lines elsewhere."""

from __future__ import annotations

import json
import math
import sys
from time import monotonic
from typing import IO, Any

from ..errors import RecperfError


def print_error(error: RecperfError, *, as_json: bool) -> None:
    print("\n".join(error.lines()), file=sys.stderr)
    if as_json:
        print(json.dumps(error.as_json()))


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, allow_nan=False))


def number(value: float) -> str:
    """A count in the unit a person would say it in."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g} {unit}"
    return f"{value:.3g}"


def size(count: float) -> str:
    for limit, unit in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= limit:
            return f"{count / limit:.3g} {unit}"
    return f"{count:.0f} B"


def table(rows: list[list[str]], *, indent: str = "  ") -> str:
    """Columns aligned, the first to the left and the others to the right; the first row is the head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:])]
        lines.append(indent + "  ".join(cells).rstrip())
    return "\n".join(lines)


class Terminal:
    """The reporter of a run: says things on stdout, or on stderr when stdout is for JSON, or nothing when quiet."""

    def __init__(self, *, as_json: bool, quiet: bool) -> None:
        self.stream: IO[str] = sys.stderr if as_json else sys.stdout
        self.quiet = quiet
        self.live = not quiet and self.stream.isatty()
        self._shown = False
        self._last = 0.0
        self._began = 0.0
        self._first = 0
        self._samples = 0
        self._total = 0
        self._label = ""

    def say(self, text: str = "") -> None:
        if not self.quiet:
            self._clear()
            print(text, file=self.stream, flush=True)

    def notice(self, text: str) -> None:
        self.say(f"note: {text}")

    def trial(self, seed: int, total_steps: int, done: int) -> None:
        self._label, self._total, self._first = f"seed {seed}", total_steps, done
        self._began, self._samples, self._last = monotonic(), 0, 0.0

    def step(self, step: int, loss: float, samples: int) -> None:
        """A live line at most ten times a second, a plain line at most every five seconds."""
        self._samples += samples
        # Asking the clock every step would cost more than some steps; every eighth is often enough.
        if self.quiet or step % 8:
            return
        now = monotonic()
        if now - max(self._last, self._began) < (0.1 if self.live else 5.0):
            return
        self._last = now
        line = self._line(step, loss, now)
        if self.live:
            print(f"\r\x1b[2K{line}", end="", file=self.stream, flush=True)
            self._shown = True
        else:
            print(line, file=self.stream, flush=True)

    def _line(self, step: int, loss: float, now: float) -> str:
        taken = max(1e-9, now - self._began)
        left = taken / max(1, step - self._first) * (self._total - step)
        shown = "" if math.isnan(loss) else f"  loss {loss:.4f}"
        return (
            f"{self._label}  step {step:,}/{self._total:,}{shown}  {self._samples / taken:,.0f} samples/s"
            f"  {left:.0f} s left"
        )

    def metric(self, epoch: int, metrics: dict[str, float]) -> None:
        shown = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        self.say(f"{self._label}  epoch {epoch}  {shown}")

    def _clear(self) -> None:
        if self._shown:
            print("\r\x1b[2K", end="", file=self.stream)
            self._shown = False

    def close(self) -> None:
        if not self.quiet:
            self._clear()
            self.stream.flush()
