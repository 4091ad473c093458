"""The figures that only a profile has: busy and idle device time, gains of fixes, lookups by table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .formats import count, time
from .svg import Sheet, evenly, round_steps, ticks, tone

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CHARACTER = 6.6
"""Pixels of a character at the size of labels, a little generous."""


@dataclass(frozen=True)
class Slice:
    label: str
    value: float
    tone: str


def split(width: int, slices: Sequence[Slice]) -> Sheet:
    """One bar that sums to the wall time; a slice too thin for its label is named in the table below."""
    sheet = Sheet(width, 62)
    axes = sheet.axes(0, 0, 0, 22)
    whole = sum(part.value for part in slices) or 1.0
    axes.set_xlim(0, whole)
    axes.set_ylim(40, 0)
    start = 0.0
    for part in slices:
        axes.barh(
            20, part.value, left=start, height=40, color=tone(part.tone), edgecolor=tone("surface"), linewidth=1.5
        )
        if part.value / whole * width > CHARACTER * len(part.label) + 10:
            ink = tone("ink" if part.tone == "other" else "on-fill")
            axes.text(start + part.value / 2, 20, part.label, ha="center", va="center", fontsize=11, color=ink)
        start += part.value
    axes.spines["bottom"].set_visible(False)
    sheet.text(0, 54, "0", va="center")
    sheet.text(width, 54, f"wall {time(whole)}", ha="right", va="center")
    return sheet


@dataclass(frozen=True)
class Gain:
    label: str
    predicted: float | None
    measured: float | None
    status: str = "suggested"
    predicted_range: Sequence[float] | None = None
    measured_range: Sequence[float] | None = None


def gains(width: int, rows: Sequence[Gain]) -> Sheet:
    """Two bars per fix, predicted and measured: how many times faster the step becomes."""
    each, head, foot = (46, 0, 34) if width > 600 else (62, 18, 34)
    names = 18 + CHARACTER * max(len(row.label) for row in rows) if width > 600 else 20.0
    sheet = Sheet(width, each * len(rows) + foot)
    axes = sheet.axes(names, 0, 12, foot)
    ends = [end for row in rows for end in (*(row.predicted_range or ()), *(row.measured_range or ()))]
    longest = max(value for row in rows for value in (row.predicted, row.measured, 1.0, *ends) if value)
    # Room on the right for the longest label beside its bar.
    axes.set_xlim(0, longest * (1 + 118 / max(60.0, width - names - 130)))
    axes.set_ylim(each * len(rows), 0)
    for index, row in enumerate(rows):
        top = each * index + head
        sheet.text(0, top + 21 if width > 600 else top - 7, row.label, color="ink", va="center")
        axes.plot([1, 1], [top + 2, top + 40], color=tone("muted"), lw=1, ls=(0, (4, 3)), zorder=3)
        _bar(axes, top + 12, row.predicted, "other", "predicted", row.predicted_range)
        label = {"rejected": "measured, rejected", "not judged": "judged"}.get(row.status, "measured")
        colour = "bad" if row.status == "rejected" else "accent"
        _bar(axes, top + 30, row.measured, colour, label, row.measured_range)
    marked = round_steps(0, longest, 6)
    ticks(axes, "x", marked, lambda value: f"{evenly(marked)(value)}x")
    return sheet


def _bar(axes: Axes, y: float, value: float | None, colour: str, label: str, range_: Sequence[float] | None) -> None:
    text = f"{value:.2f}x {label}" if value else f"not {label}"
    if value:
        axes.barh(y, value, height=15, color=tone(colour))
        if range_:
            axes.plot(range_, [y, y], color=tone("ink"), lw=1.5, solid_capstyle="butt", zorder=4)
    axes.annotate(
        text, (max(value or 0, *(range_ or (0,))), y), (6, 0), textcoords="offset points", va="center", fontsize=10.5,
        color=tone("ink" if value else "muted"),
    )  # fmt: skip


@dataclass(frozen=True)
class Lookups:
    """The lookups of one table in a step, and the number of distinct rows that they read."""

    label: str
    lookups: float
    unique: float


def lookups(width: int, rows: Sequence[Lookups]) -> Sheet:
    """One bar per table: all lookups in a light colour, the distinct rows in the full colour."""
    each, foot = 24, 26
    names = 16 + CHARACTER * max(len(row.label) for row in rows)
    sheet = Sheet(width, each * len(rows) + foot)
    axes = sheet.axes(names, 0, 74, foot)
    longest = max(row.lookups for row in rows) or 1.0
    axes.set_xlim(0, longest)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    for index, row in enumerate(rows):
        axes.barh(index, row.lookups, height=0.66, color=tone("embedding"), alpha=0.35)
        axes.barh(index, row.unique, height=0.66, color=tone("embedding"))
        sheet.text(0, each * index + each / 2, row.label, color="ink", va="center")
        axes.annotate(
            count(row.lookups), (row.lookups, index), (6, 0), textcoords="offset points", va="center",
            fontsize=10.5, color=tone("ink"), annotation_clip=False,
        )  # fmt: skip
    ticks(axes, "x", round_steps(0, longest, 5 if width > 600 else 2), lambda value: f"{value:,.0f}")
    return sheet
