"""The progress of a training for people: a live view on a terminal, a line every 30 seconds elsewhere."""

from __future__ import annotations

import math
from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

LINE_S = 30.0
"""Seconds between two lines where there is no terminal."""
DRAW_S = 0.5
"""Seconds between two drawings of the view, at least."""
SHARE = 200
"""Drawing takes at most one part in so many of the time."""
LOSSES = 256
"""Losses that are remembered for the sparkline; when full, each pair becomes its mean."""
BLOCKS, ASCII = "▁▂▃▄▅▆▇█", "_.-=*#"


class Training:
    """How far one training is; updated after every step."""

    def __init__(self, label: str, total: int, done: int) -> None:
        self.label, self.total, self.first, self.step = label, total, done, done
        self.began = self.marked = monotonic()
        self.samples = self._marked_samples = 0
        self.loss = math.nan
        self.losses: list[float] = []
        self._each, self._skipped = 1, 0
        self.score = self.limit = ""
        self.rate = 0.0
        """Samples per second since the last mark."""

    def mark(self, now: float, step: int, loss: float) -> None:
        """Remember where training is; the rate is that since the last mark."""
        self.rate = (self.samples - self._marked_samples) / max(1e-9, now - self.marked)
        self.marked, self._marked_samples, self.step = now, self.samples, step
        self.loss = loss
        self._skipped += 1
        if math.isfinite(loss) and self._skipped >= self._each:
            self._skipped = 0
            self.losses.append(loss)
            if len(self.losses) >= LOSSES:
                self.losses = means(self.losses, LOSSES // 2)
                self._each *= 2

    @property
    def share(self) -> float:
        return self.step / max(1, self.total)

    @property
    def left(self) -> str:
        """The time that is left at the pace of the whole training so far, evaluations and saves included."""
        each = (self.marked - self.began) / max(1, self.step - self.first)
        return f"{duration(each * (self.total - self.step))} left"

    @property
    def line(self) -> str:
        loss = f"  loss {self.loss:.4f}" if math.isfinite(self.loss) else ""
        place = f"step {self.step:,}/{self.total:,} ({math.floor(100 * self.share)}%)"
        return f"{self.label}  {place}{loss}  {self.rate:,.0f} samples/s  {self.left}"


class LiveView:
    """Some lines at the bottom of a terminal that follow a training.

    The cursor stays visible, so that a process that is killed leaves the terminal as it was.
    """

    def __init__(self, screen: Console, training: Training) -> None:
        from rich.live import Live
        from rich.text import Text

        self.screen, self.training = screen, training
        self._live: Live = Live(Text(""), console=screen, auto_refresh=False, transient=True, vertical_overflow="crop")
        self._live.start()
        self.screen.show_cursor(True)

    def draw(self) -> None:
        size = self.screen.size
        # Room for the ^C that a terminal writes behind the last line, which must not make it two.
        lines = view(self.training, size.width - 3, ascii_only=self.screen.options.ascii_only)
        self._live.update(_joined(lines[: max(1, size.height - 1)]), refresh=True)

    def close(self) -> None:
        self._live.stop()


def _joined(lines: list[Text]) -> Text:
    from rich.text import Text

    return Text("\n").join(lines)


def view(training: Training, width: int, *, ascii_only: bool) -> list[Text]:
    """The lines of the view, none wider than `width`."""
    from rich.text import Text

    loss = f"{training.loss:.4f} " if math.isfinite(training.loss) else "not logged yet"
    step = (training.marked - training.began) / max(1, training.step - training.first)
    rows = {
        "loss": loss + sparkline(training.losses, max(0, min(40, width - 16)), ASCII if ascii_only else BLOCKS),
        "speed": f"{training.rate:,.0f} samples/s, {1000 * step:,.3g} ms a step",
        "limit": training.limit or "not measured yet",
        "score": training.score or "not evaluated yet",
    }
    lines = [_bar(training, width, ascii_only), *(Text(f"{name:<6} {value}") for name, value in rows.items())]
    for line in lines:
        line.truncate(width, overflow="crop" if ascii_only else "ellipsis")
    return lines


def _bar(training: Training, width: int, ascii_only: bool) -> Text:
    """A bar as wide as there is room for, then share, time left and, where there is room, the step."""
    from rich.text import Text

    text = f" {math.floor(100 * training.share):>3}%  {training.left}"
    step = f"  step {training.step:,}/{training.total:,}"
    if len(training.label) + len(text) + len(step) < width:
        text += step
    room = max(0, min(40, width - len(text) - len(training.label) - 1))
    filled = round(room * min(1.0, training.share))
    done, rest = ("#", "-") if ascii_only else ("━", "─")
    return Text.assemble(f"{training.label} ", (done * filled, "cyan"), (rest * (room - filled), "dim"), text)


def sparkline(values: list[float], width: int, levels: str) -> str:
    """Values as characters of rising height; where there are more than fit, each stands for the mean of several."""
    if not values or width < 2:
        return ""
    values = means(values, width)
    low, high = min(values), max(values)
    scale = (len(levels) - 1) / (high - low) if high > low else 0.0
    return "".join(levels[round((value - low) * scale)] for value in values)


def means(values: list[float], count: int) -> list[float]:
    """At most `count` means of neighbouring values."""
    if len(values) <= count:
        return values
    edges = [len(values) * index // count for index in range(count + 1)]
    return [math.fsum(values[start:stop]) / (stop - start) for start, stop in zip(edges, edges[1:])]


def duration(seconds: float) -> str:
    """A time in the two largest units that say something: `12 s`, `3 min 20 s`, `2 h 5 min`, `4 d 1 h`."""
    whole = max(0, round(seconds))
    for unit, larger, smaller in ((86_400, "d", "h"), (3_600, "h", "min"), (60, "min", "s")):
        if whole >= unit:
            rest = whole % unit // {"h": 3_600, "min": 60, "s": 1}[smaller]
            return f"{whole // unit} {larger}" + (f" {rest} {smaller}" if rest else "")
    return f"{whole} s"
