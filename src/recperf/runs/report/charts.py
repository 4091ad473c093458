"""Figures: bars of the parts of a step, curves over the steps and the roofline."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from ...measure.profile_records import Component, RooflinePoint
from ...measure.spans import PHASES
from ...units import digits
from .blocks import Figure
from .formats import byte_rate, component, flop_rate, percent, plus_minus, scaled, short
from .page import Sheet, columns_of, decades, evenly, family, round_steps, ticks, tone

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CHARACTER = 6.6
"""Pixels of a character at the size of labels, a little generous."""


@dataclass(frozen=True)
class BarPart:
    name: str
    value: float
    tone: str = ""
    """Colour; empty: the one that the name has in every figure."""


def in_order(parts: Iterable[Component]) -> list[Component]:
    """The parts of a step by phase; within a phase, as they were measured."""
    return sorted(parts, key=lambda part: PHASES.index(part.phase) if part.phase in PHASES else len(PHASES))


def budget_figure(key: str, parts: Sequence[Component], of: str) -> Figure:
    """The share of each part in one step."""
    listed = ", ".join(f"{component(part.name)} {percent(part.share, 1)}" for part in parts)
    bar = [("", [BarPart(part.name, part.share) for part in parts])]
    backward = any(part.name.endswith("_backward") for part in parts)
    caption = "Backward passes have the lighter shade of their forward pass." if backward else ""
    return Figure(key, f"Share of each part in {of}: {listed}", caption, lambda: stacked(bar, "share"))


def stacked(bars: Sequence[tuple[str, Sequence[BarPart]]], unit: str) -> Sheet:
    """One stacked bar per row: shares of a step, or milliseconds. A single bar has no label and no axis.

    A part too thin for its label is named in the table below the figure.
    """
    single = len(bars) == 1 and not bars[0][0]
    most = 220 if columns_of(2) == 2 else 120
    names = 0.0 if single else min(most, 18 + CHARACTER * max(len(label) for label, _ in bars))
    foot, inset = (0, 0) if single else (30 if unit == "share" else 42, 16)
    tall = 40 if single else 50 * len(bars)
    sheet = Sheet(tall + foot)
    axes = sheet.axes(names + inset, 0, inset, foot)
    longest = max(sum(part.value for part in parts) for _, parts in bars) or 1.0
    axes.set_xlim(0, longest)
    axes.set_ylim(tall, 0)
    pixels = (sheet.width - names - 2 * inset) / longest
    for row, (label, parts) in enumerate(bars):
        if label:
            sheet.text(0, 50 * row + 20, short(label, round((names - 18) / CHARACTER)), va="center", color="ink")
        _segments(axes, parts, 50 * row, 40, pixels)
    axes.spines["bottom"].set_visible(not single)
    if not single:
        marked = round_steps(0, longest, 5)
        ticks(axes, "x", marked, percent if unit == "share" else evenly(marked))
        if unit != "share":
            axes.set_xlabel("ms per step", color=tone("muted"), fontsize=11, labelpad=2)
    return sheet


def _segments(axes: Axes, parts: Sequence[BarPart], top: float, height: float, pixels: float) -> None:
    start = 0.0
    for part in parts:
        hue, faint = (part.tone, False) if part.tone else family(part.name)
        color = tone(hue)
        axes.barh(
            top + height / 2, part.value, left=start, height=height, color=color, alpha=0.45 if faint else 1.0,
            edgecolor=tone("surface"), linewidth=1.5,
        )  # fmt: skip
        name = component(part.name).removesuffix(", backward")
        if part.value * pixels > 6.9 * len(name) + 10:
            ink = tone("ink" if faint or hue == "other" else "on-fill")
            axes.text(start + part.value / 2, top + height / 2, name, ha="center", va="center", fontsize=11, color=ink)
        start += part.value


@dataclass(frozen=True)
class Dot:
    """A value with its interval, where that is known."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None
    is_model: bool = False


def dots(rows: Sequence[Dot]) -> Sheet:
    """One value with its interval per row."""
    names = min(260 if columns_of(2) == 2 else 132, 18 + CHARACTER * max(len(row.name) for row in rows))
    each, foot, inset = 28, 30, 16
    sheet = Sheet(each * len(rows) + foot)
    axes = sheet.axes(names + inset, 0, inset, foot)
    ends = [end for row in rows for end in (row.value, row.low, row.high) if end is not None]
    least, most = min(ends), max(ends)
    room = (most - least or abs(most) or 1.0) * 0.06
    axes.set_xlim(least - room, most + room)
    axes.set_ylim(each * len(rows), 0)
    marked = round_steps(least - room, most + room, 3 * columns_of(2))
    ticks(axes, "x", marked, evenly(marked), grid=True)
    for place, row in enumerate(rows):
        middle, color = each * (place + 0.5), tone("accent" if row.is_model else "muted")
        label = short(row.name, round((names - 18) / CHARACTER))
        sheet.text(0, middle, label, va="center", color="ink", weight="bold" if row.is_model else "normal")
        if row.low is not None and row.high is not None:
            axes.plot([row.low, row.high], [middle, middle], color=color, lw=2.2, solid_capstyle="round")
        axes.plot(row.value, middle, "o", ms=7, color=color)
    return sheet


def dots_figure(key: str, title: str, rows: Sequence[Dot], caption: str = "") -> Figure:
    """Values of a metric with their intervals, the best first."""
    listed = ", ".join(
        f"{row.name} {plus_minus(row.value, row)}" if row.low is not None else f"{row.name} {row.value:.4f}"
        for row in rows
    )
    return Figure(key, f"{title}: {listed}", caption or f"{title}, with 95 % intervals.", lambda: dots(rows))


GROUPS = 160
"""Points of a curve over the steps; more would not be visible."""
FEW_POINTS = 40
"""A curve with at most this many points shows each of them and is not smoothed."""


Series = dict[int, list[tuple[int, float]]]
"""Pairs of step and value by seed."""


def training(panels: dict[str, Series], targets: dict[str, float]) -> Sheet:
    """Curves over the steps side by side; `targets` are drawn as dashed lines."""
    columns, tall = columns_of(len(panels)), 250
    sheet = Sheet(tall * len(panels) // columns)
    each = (sheet.width - 56 * (columns - 1)) / columns
    for index, (title, series) in enumerate(panels.items()):
        left, top = index % columns * (each + 56), tall * (index // columns)
        axes = sheet.axes(left + 40, top + 34, sheet.width - left - each + 6, sheet.height - top - tall + 34)
        sheet.text(left, top + 12, title, color="ink", size=12, weight="bold", va="center")
        _curve(axes, series, targets.get(title))
        sheet.text(left + each - 6, top + 242, "steps", ha="right", va="center")
    return sheet


class Group(NamedTuple):
    """Neighbouring steps of all seeds: their mean step, and the mean, smallest and largest value."""

    step: float
    mean: float
    low: float
    high: float


def grouped(series: Series) -> list[Group]:
    """A curve in at most `GROUPS` groups of steps."""
    points = sorted(point for by_step in series.values() for point in by_step)
    width = max(1.0, (points[-1][0] + 1) / GROUPS)
    groups = []
    for _, members in itertools.groupby(points, key=lambda point: int(point[0] / width)):
        steps, values = zip(*members)
        groups.append(Group(fmean(steps), fmean(values), min(values), max(values)))
    return groups


def _curve(axes: Axes, series: Series, target: float | None) -> None:
    """The mean of all seeds, smoothed where it has many points, with a band from the smallest to the largest value."""
    groups = grouped(series)
    steps, low, high = ([getattr(group, name) for group in groups] for name in ("step", "low", "high"))
    weight, means = 0.15 if len(groups) > FEW_POINTS else 1.0, [groups[0].mean]
    for group in groups[1:]:
        means.append(means[-1] + weight * (group.mean - means[-1]))
    axes.fill_between(steps, low, high, color=tone("accent"), alpha=0.25, lw=0)
    axes.plot(steps, means, color=tone("accent"), lw=1.8, marker="o" if weight == 1.0 else None, ms=4)
    bounds = [*low, *high, *([target] if target is not None else [])]
    least, most = min(bounds), max(bounds)
    room = (most - least or abs(most) or 1.0) * 0.08
    axes.set_xlim(0, steps[-1] * 1.02)
    axes.set_ylim(least - room, most + room)
    marked = round_steps(least - room, most + room, 5)
    ticks(axes, "y", marked, evenly(marked), grid=True)
    ticks(axes, "x", round_steps(0, steps[-1] * 1.02, 4), lambda v: f"{v:,.0f}")
    if target is not None:
        axes.axhline(target, color=tone("ink"), lw=1, ls=(0, (4, 3)))
        _note(axes, "target", (steps[-1], target), (0, 4), "right")


Point = tuple[int, str, float, float]
"""A part of a step on the roofline: the number of its row in the table, its name, FLOP per byte and FLOP/s."""


def roofline_figure(key: str, points: list[RooflinePoint]) -> list[Figure]:
    if not points or not points[0].ceiling_flops_per_s:
        return []
    bandwidth, peak = points[0].ceiling_bytes_per_s, points[0].ceiling_flops_per_s
    dots = [
        (index, short(point.name, 28), point.intensity, point.flops_per_s)
        for index, point in enumerate(points, 1)
        if point.intensity and point.flops_per_s > 0
    ]
    listed = "; ".join(f"{component(dot[1])} {flop_rate(dot[3])} at {digits(dot[2])} FLOP/B" for dot in dots)
    return [
        Figure(
            key,
            f"Roofline under arithmetic {flop_rate(peak)} and memory {byte_rate(bandwidth)}. {listed}",
            "Dots carry the number of their row in the table; open ones are backward passes. A dot far below the roof "
            "is limited by neither arithmetic nor memory, but by overhead or waiting.",
            lambda: roofline(bandwidth, peak, dots),
        )
    ]


def roofline(bandwidth: float, peak: float, dots: list[Point]) -> Sheet:
    """FLOP/s against FLOP per byte on logarithmic axes: the slope is the bandwidth, the flat line the peak FLOP/s."""
    sheet = Sheet(360)
    axes = sheet.axes(58, 40, 16, 42)
    ridge = peak / bandwidth
    low, high = (ends([dot[2] for dot in dots] + [ridge]) for ends in (min, max))
    low, high = low / 10, high * 8
    floor = min([dot[3] for dot in dots] + [low * bandwidth]) / 3
    ceiling = max([peak * 3.5, *(dot[3] * 2 for dot in dots)])
    axes.set_xlim(math.log10(low), math.log10(high))
    axes.set_ylim(math.log10(floor), math.log10(ceiling))
    ticks(axes, "x", decades(low, high, 4 * columns_of(2)), lambda v: f"{10**v:g}", grid=True)
    ticks(axes, "y", decades(floor, ceiling, 7), lambda v: scaled(10**v), grid=True)
    sheet.text(0, 28, "FLOP/s", va="center")
    sheet.text(sheet.width - 16, sheet.height - 8, "FLOP per byte", ha="right", va="center")
    start = max(low, floor / bandwidth)
    roof = [(start, start * bandwidth), (ridge, peak), (high, peak)]
    axes.plot([math.log10(x) for x, _ in roof], [math.log10(y) for _, y in roof], lw=2.2, color=tone("ink"))
    label = f"arithmetic {flop_rate(peak)}, memory {byte_rate(bandwidth)}"
    _note(axes, label, (math.log10(high), math.log10(peak)), (-2, 6), "right")
    for number, name, intensity, flops in dots:
        at, (hue, faint) = (math.log10(intensity), math.log10(flops)), family(name)
        fill = tone("surface" if faint else hue)
        axes.plot(*at, "o", ms=8, mew=2, mec=tone(hue), mfc=fill, zorder=4)
        # The two passes of a part often lie close together.
        _note(axes, str(number), at, (-7 if faint else 7, -4), "right" if faint else "left")
    return sheet


def _note(axes: Axes, text: str, at: tuple[float, float], offset: tuple[float, float], aside: str) -> None:
    axes.annotate(text, at, offset, textcoords="offset points", ha=aside, fontsize=10.5, color=tone("ink"))
