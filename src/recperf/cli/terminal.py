"""Output for people: messages, tables, a live progress line on a terminal and plain lines elsewhere.

Names from files of a user, such as operators of a trace, may contain control characters: here they become text.
"""

from __future__ import annotations

import io
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import monotonic
from typing import IO, TYPE_CHECKING, Any

from .. import errors
from ..errors import Interrupted, MachineError, RecperfError, Stopped, escape_controls
from ..machine import out_of_memory

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


def console(stream: IO[str]) -> Console:
    """Colour on a terminal, plain text elsewhere; long lines are left to the terminal, not cut at a guessed width."""
    from rich.console import Console

    class PlainConsole(Console):
        def print(self, *objects: Any, **options: Any) -> None:
            super().print(*(escape_controls(one) if isinstance(one, str) else one for one in objects), **options)

    return PlainConsole(file=stream, highlight=False, markup=False, soft_wrap=True, emoji=False)


class Output:
    """A standard stream that fails no command: once it cannot be written, the rest is dropped.

    A character that its encoding lacks is written as an escape.
    """

    def __init__(self, stream: IO[str] | None) -> None:
        self.stream = stream or open(os.devnull, "w")
        self.failure: OSError | ValueError | None = None
        if isinstance(self.stream, io.TextIOWrapper):
            self.stream.reconfigure(errors="backslashreplace")

    def write(self, text: str) -> int:
        self._try(lambda: self.stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self.stream.flush)

    def _try(self, work: Callable[[], object]) -> None:
        if self.failure is not None:
            return
        try:
            work()
        except (OSError, ValueError) as failure:
            self.failure = failure
            # What is buffered would fail again when the interpreter ends.
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def lost(self, code: int) -> MachineError | None:
        """The error that output of a command with this exit code is missing.

        None where the reader went away, as `head` does: it wanted no more.
        """
        if self.failure is None or isinstance(self.failure, BrokenPipeError):
            return None
        cause = getattr(self.failure, "strerror", None) or self.failure
        return MachineError(
            f"standard output could not be written: {cause}" + ("" if code else "; nothing else failed")
        )


@contextmanager
def outputs() -> Iterator[Output]:
    """Write both standard streams through an `Output` inside; yields that of stdout."""
    before, out = (sys.stdout, sys.stderr), Output(sys.stdout)
    sys.stdout, sys.stderr = out, Output(sys.stderr)
    try:
        yield out
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before


def print_text(text: str, *, end: str = "\n", stderr: bool = False) -> None:
    print(escape_controls(text), end=end, file=sys.stderr if stderr else sys.stdout)


def print_error(error: RecperfError, *, as_json: bool) -> None:
    first, *others = error.lines()
    screen = console(sys.stderr)
    screen.print("error:", style="bold red", end="")
    screen.print("\n".join([first.removeprefix("error:"), *others]))
    if as_json:
        print_text(json.dumps(error.as_json()))


def print_json(value: Any) -> None:
    print_text(json.dumps(value, indent=2, allow_nan=False))


def conclude(error: RecperfError | None, report: dict[str, Any] | None = None) -> int:
    """Print the report as JSON if there is one, then the error of a command that ran; returns the exit code."""
    if report is not None:
        # One object on stdout: the error goes into it instead of after it.
        print_json({**report, **(error.as_json() if error else {})})
    if error is None:
        return 0
    print_error(error, as_json=False)
    return error.exit_code


def table(rows: list[list[str]]) -> str:
    """Aligned columns, the first to the left and the others to the right; the first row is the header."""
    from rich.console import Console
    from rich.table import Table

    drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    for index, head in enumerate(rows[0]):
        drawn.add_column(head, justify="right" if index else "left", no_wrap=True)
    for row in rows[1:]:
        drawn.add_row(*(escape_controls(cell).replace("\n", "\\n") for cell in row))
    plain = Console(width=1000, color_system=None)
    with plain.capture() as captured:
        plain.print(drawn)
    return "\n".join("  " + line.rstrip() for line in captured.get().splitlines())


class Terminal:
    """Prints the progress of a run on stdout, on stderr when stdout is for JSON, or nothing when quiet."""

    def __init__(self, *, as_json: bool, quiet: bool) -> None:
        self.quiet = errors.quiet = quiet
        self.screen = console(sys.stderr if as_json else sys.stdout)
        self.live = not quiet and self.screen.is_terminal
        self._bar: Progress | None = None
        self._last = 0.0
        self._began = 0.0
        self._first = 0
        self._samples = 0
        self._total = 0
        self._label = ""

    def say(self, text: str = "") -> None:
        if not self.quiet:
            self.screen.print(text)

    def notice(self, text: str) -> None:
        self.say(f"note: {text}")

    def trial(self, seed: int, total_steps: int, done: int) -> None:
        self.close()
        self._label, self._total, self._first = f"seed {seed}", total_steps, done
        self._began, self._samples, self._last = monotonic(), 0, 0.0
        if self.live:
            self._bar = progress_bar(self.screen)
            self._bar.add_task(self._label, total=total_steps, completed=done)
            self._bar.start()

    def step(self, step: int, loss: float, samples: int) -> None:
        """A live line at most ten times a second, a plain line at most every five seconds."""
        self._samples += samples
        # Reading the clock at every step would cost more than some steps take.
        if self.quiet or step % 8:
            return
        now = monotonic()
        if now - max(self._last, self._began) < (0.1 if self.live else 5.0):
            return
        self._last = now
        line = self._line(step, loss, now)
        if self._bar:
            self._bar.update(self._bar.task_ids[0], completed=step, description=line, refresh=True)
        else:
            self.screen.print(line)

    def _line(self, step: int, loss: float, now: float) -> str:
        taken = max(1e-9, now - self._began)
        left = taken / max(1, step - self._first) * (self._total - step)
        shown = "" if math.isnan(loss) else f"  loss {loss:.4f}"
        return (
            f"{self._label}  step {step:,}/{self._total:,}{shown}  {self._samples / taken:,.0f} samples/s overall"
            f"  {left:.0f} s left"
        )

    def metric(self, step: int, epoch: int, metrics: dict[str, float]) -> None:
        shown = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        self.say(f"{self._label}  step {step:,}  epoch {epoch}  {shown}")

    def close(self) -> None:
        """Remove the live line."""
        if self._bar:
            self._bar.stop()
            self._bar = None


@contextmanager
def page_optional(terminal: Terminal) -> Iterator[None]:
    """Write a page inside. If that fails, the result is there nevertheless: one line says why there is no page."""
    try:
        yield
    except (Stopped, Interrupted):
        raise
    except RecperfError as error:
        terminal.notice(f"no page: {error.what}" + (f"; {error.fix}" if error.fix else ""))
    except Exception as error:
        cause = "out of memory" if out_of_memory(error) else f"{type(error).__name__}: {error}"
        print_text(f"error: no page, but the rest is complete: {cause}", stderr=True)


def progress_bar(screen: Console) -> Progress:
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (BarColumn(bar_width=24), TextColumn("{task.description}", markup=False))
    return Progress(*columns, console=screen, auto_refresh=False, transient=True)
