"""Output for people: messages, tables, and the progress of a training.

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
from time import monotonic, thread_time
from typing import IO, TYPE_CHECKING, Any

from . import errors
from .errors import Interrupted, MachineError, RecperfError, Stopped, escape_controls
from .files import plain_json
from .machine import out_of_memory
from .units import time

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from .runs.report.blocks import Report

LINE_S = 30.0
"""Seconds between two lines of a training where there is no terminal."""
DRAW_S = 0.5
"""Seconds between two drawings on a terminal, at least."""
SHARE = 200
"""Drawing takes at most 1 / SHARE of the time."""
BAR_WIDTH = 12


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
    try:
        screen = console(sys.stderr)
    except ModuleNotFoundError:
        # Without rich the error still has to be told.
        print_text("\n".join([first, *others]), stderr=True)
    else:
        screen.print("error:", style="bold red", end="")
        screen.print("\n".join([first.removeprefix("error:"), *others]))
    if as_json:
        print_text(json.dumps(error.as_json()))


def print_json(value: Any) -> None:
    print_text(json.dumps(value, indent=2, allow_nan=False, default=plain_json))


def conclude(error: RecperfError | None, report: Any = None) -> int:
    """Print the report as JSON if there is one, then the error of a command that ran; returns the exit code."""
    if report is not None:
        # One object on stdout: the error goes into it instead of after it.
        value = report if isinstance(report, dict) else plain_json(report)
        print_json({**value, **(error.as_json() if error else {})})
    if error is None:
        return 0
    print_error(error, as_json=False)
    return error.exit_code


def table(rows: list[list[str]]) -> str:
    """Aligned columns, the first to the left and the others to the right; the first row is the header."""
    from .runs.report.blocks import columns

    return "\n".join(columns([[escape_controls(cell).replace("\n", "\\n") for cell in row] for row in rows]))


class Training:
    """How far one training is; updated after every step."""

    def __init__(self, label: str, total: int, done: int) -> None:
        self.label, self.total, self.first, self.step = label, total, done, done
        self.began = self.marked = monotonic()
        self.samples = self._marked_samples = 0
        self.loss = math.nan
        self.score = ""
        self.rate = 0.0
        """Samples per second since the last mark."""

    def mark(self, now: float, step: int, loss: float) -> None:
        """Remember where training is; the rate is that since the last mark."""
        self.rate = (self.samples - self._marked_samples) / max(1e-9, now - self.marked)
        self.marked, self._marked_samples, self.step, self.loss = now, self.samples, step, loss

    @property
    def line(self) -> str:
        place = f"step {self.step:,}/{self.total:,} ({math.floor(100 * self.step / max(1, self.total))}%)"
        loss = f"  loss {self.loss:.4f}" if math.isfinite(self.loss) else ""
        # Over the whole training so far, evaluations and saves included.
        step_s = (self.marked - self.began) / max(1, self.step - self.first)
        left = time(1e3 * step_s * (self.total - self.step))
        return f"{self.label}  {place}{loss}  {self.rate:,.0f} samples/s  {left} left{self.score}"


class Terminal:
    """Prints the progress of a run on stdout, on stderr when stdout is for JSON, or nothing when quiet."""

    def __init__(self, *, as_json: bool, quiet: bool, verbose: bool = False) -> None:
        self.quiet = errors.quiet = quiet
        self.verbose = verbose
        self.screen = console(sys.stderr if as_json else sys.stdout)
        self.live = not quiet and self.screen.is_terminal and not self.screen.is_dumb_terminal
        self._training: Training | None = None
        self._bar: Progress | None = None
        self._next = 0.0
        """When to draw or print again."""
        self._said, self._again = "", 0.0
        """The last line about work that takes long, and after how many seconds of it there is another."""
        self._unchecked = 0
        """Steps until the clock is read again: reading it at every step would cost more than some steps take."""

    def say(self, text: str = "") -> None:
        if not self.quiet:
            self.screen.print(text)

    def notice(self, text: str) -> None:
        self.say(f"note: {text}")

    def detail(self, text: str) -> None:
        """A notice that few people need."""
        if self.verbose:
            self.notice(text)

    def show(self, report: Report) -> None:
        from .runs.report.blocks import render

        self.say(render(report, verbose=self.verbose))

    def facts(self, *facts: tuple[str, str]) -> None:
        """Add facts to a report that was shown."""
        from .runs.report.blocks import Cell, fact_lines

        self.say("\n".join(fact_lines([(name, Cell(text)) for name, text in facts])))

    def trial(self, seed: int, total_steps: int, done: int) -> None:
        self.close()
        self._training = Training(f"seed {seed}", total_steps, done)
        self._unchecked, self._next = 1, self._training.began + (DRAW_S if self.live else LINE_S)

    def step(self, step: int, loss: float, samples: int) -> None:
        """Draw the progress, or print a line, where it is time to."""
        training = self._training
        if training is None or self.quiet:
            return
        training.samples += samples
        self._unchecked -= 1
        if self._unchecked > 0 and step < training.total:
            return
        now = monotonic()
        pace = (step - training.first) / max(1e-9, now - training.began)
        self._unchecked = round(pace * (DRAW_S if self.live else 1.0) / 4)
        if now < self._next and not (self.live and step == training.total):
            return
        training.mark(now, step, loss)
        worked = thread_time()
        self.draw(training.line, step, training.total)
        self._next = now + (max(DRAW_S, SHARE * (thread_time() - worked)) if self.live else LINE_S)

    def draw(self, line: str, done: int, total: int) -> None:
        """Draw the work under way as a bar with a line of text, or print the line where there is no terminal."""
        if not self.live:
            self.say(line)
            return
        if self._bar is None:
            from rich.progress import BarColumn, Progress, TextColumn

            columns = (BarColumn(bar_width=BAR_WIDTH), TextColumn("{task.description}", markup=False))
            self._bar = Progress(*columns, console=self.screen, auto_refresh=False, transient=True)
            self._bar.add_task("", total=None)
            self._bar.start()
            # A process that is killed leaves the terminal as it was.
            self.screen.show_cursor(True)
        # Room for the ^C that a terminal writes behind the last line, which must not make it two.
        text = line[: max(0, self.screen.width - BAR_WIDTH - 4)]
        self._bar.update(self._bar.task_ids[0], completed=done, total=total or None, description=text, refresh=True)

    def working(self, text: str, seconds: float) -> None:
        """Show work that takes long; without a terminal a line now and then."""
        if self.live and text:
            self.draw(f"{text}  {seconds:.0f} s", 0, 0)
        elif self.live:
            self.close()
        elif text and (text != self._said or seconds >= self._again):
            self._said, self._again = text, seconds + LINE_S
            self.say(f"{text} ({seconds:.0f} s so far)")

    def metric(self, step: int, epoch: int, metrics: dict[str, float]) -> None:
        if self._training is None:
            return
        shown = "".join(f"  {name} {value:.4f}" for name, value in metrics.items())
        self._training.score = shown
        if self.verbose:
            self.say(f"{self._training.label}  step {step:,}  epoch {epoch}{shown}")

    def close(self) -> None:
        """Remove the progress from the terminal."""
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
