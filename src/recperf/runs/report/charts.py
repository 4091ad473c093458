"""Figures: bars of the parts of a step, curves over the steps and the roofline."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from ...measure.profile_records import Component, RooflinePoint
from ...measure.spans import PHASES
from ...units import digits
from .blocks import Figure
from .formats import byte_rate, component, flop_rate, percent, plus_minus, scaled, short
from .svg import Axes, Point, Sheet, columns_of, decades, evenly, family, labelled, round_steps

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


def budget_figure(parts: Sequence[Component], of: str) -> Figure:
    """The share of each part in one step."""
    listed = ", ".join(f"{component(part.name)} {percent(part.share, 1)}" for part in parts)
    bar = [("", [BarPart(part.name, part.share) for part in parts])]
    backward = any(part.name.endswith("_backward") for part in parts)
    caption = "Backward passes have the lighter shade of their forward pass." if backward else ""
    return Figure(f"Share of each part in {of}: {listed}", caption, lambda: stacked(bar, "share"))


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
    longest = max(sum(part.value for part in parts) for _, parts in bars) or 1.0
    axes = Axes(sheet, (names + inset, 0, inset, foot), (0, longest), (tall, 0))
    if not single:
        axes.base()
        marked = round_steps(0, longest, 5)
        axes.x_ticks(labelled(marked, percent) if unit == "share" else evenly(marked))
        if unit != "share":
            sheet.text((axes.left + axes.right) / 2, sheet.height - 9, "ms per step", anchor="middle")
    for row, (label, parts) in enumerate(bars):
        if label:
            sheet.text(0, 50 * row + 20, short(label, round((names - 18) / CHARACTER)), color="ink")
        _segments(axes, parts, 50 * row, 40)
    return sheet


def _segments(axes: Axes, parts: Sequence[BarPart], top: float, height: float) -> None:
    start = 0.0
    for part in parts:
        hue, faint = (part.tone, False) if part.tone else family(part.name)
        left, right = axes.at(start, 0).x, axes.at(start + part.value, 0).x
        axes.sheet.rect(left, top, right - left, height, color=hue, faint=faint)
        name = component(part.name).removesuffix(", backward")
        if right - left > 6.9 * len(name) + 10:
            ink = "ink" if faint or hue == "other" else "on-fill"
            axes.sheet.text((left + right) / 2, top + height / 2, name, anchor="middle", color=ink)
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
    ends = [end for row in rows for end in (row.value, row.low, row.high) if end is not None]
    least, most = min(ends), max(ends)
    room = (most - least or abs(most) or 1.0) * 0.06
    axes = Axes(sheet, (names + inset, 0, inset, foot), (least - room, most + room), (0, 1))
    axes.x_ticks(evenly(round_steps(*axes.xs, 3 * columns_of(2))), grid=True)
    axes.base()
    for place, row in enumerate(rows):
        middle, color = each * (place + 0.5), "accent" if row.is_model else "muted"
        label = short(row.name, round((names - 18) / CHARACTER))
        sheet.text(0, middle, label, color="ink", bold=row.is_model)
        at = {
            value: Point(axes.at(value, 0).x, middle) for value in (row.low, row.value, row.high) if value is not None
        }
        if row.low is not None and row.high is not None:
            sheet.line([at[row.low], at[row.high]], color=color, width=2.2, round=True)
        sheet.dot(at[row.value], color=color, radius=3.5)
    return sheet


def dots_figure(title: str, rows: Sequence[Dot], caption: str = "") -> Figure:
    """Values of a metric with their intervals, the best first."""
    listed = ", ".join(
        f"{row.name} {plus_minus(row.value, row)}" if row.low is not None else f"{row.name} {row.value:.4f}"
        for row in rows
    )
    return Figure(f"{title}: {listed}", caption or f"{title}, with 95 % intervals.", lambda: dots(rows))


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
        margins = (left + 40, top + 34, sheet.width - left - each + 6, sheet.height - top - tall + 34)
        sheet.text(left, top + 12, title, color="ink", size=12, bold=True)
        _curve(sheet, margins, series, targets.get(title))
        sheet.text(left + each - 6, top + 242, "steps", anchor="end")
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


def _curve(sheet: Sheet, margins: tuple[float, float, float, float], series: Series, target: float | None) -> None:
    """The mean of all seeds, smoothed where it has many points, with a band from the smallest to the largest value."""
    groups = grouped(series)
    weight, means = 0.15 if len(groups) > FEW_POINTS else 1.0, [groups[0].mean]
    for group in groups[1:]:
        means.append(means[-1] + weight * (group.mean - means[-1]))
    bounds = [end for group in groups for end in (group.low, group.high)] + ([] if target is None else [target])
    least, most = min(bounds), max(bounds)
    room = (most - least or abs(most) or 1.0) * 0.08
    axes = Axes(sheet, margins, (0, groups[-1].step * 1.02 or 1.0), (least - room, most + room))
    axes.y_ticks(evenly(round_steps(*axes.ys, 5)))
    axes.x_ticks(labelled(round_steps(*axes.xs, 4), lambda step: f"{step:,.0f}"))
    axes.base()
    band = [axes.at(group.step, group.low) for group in groups]
    sheet.area(band + [axes.at(group.step, group.high) for group in reversed(groups)], color="accent")
    curve = [axes.at(group.step, mean) for group, mean in zip(groups, means)]
    sheet.line(curve, color="accent", width=1.8)
    if weight == 1.0:
        for point in curve:
            sheet.dot(point, color="accent", radius=2)
    if target is not None:
        level = axes.at(0, target).y
        sheet.line([Point(axes.left, level), Point(axes.right, level)], color="ink", width=1, dashed=True)
        sheet.text(axes.right, level - 8, "target", anchor="end", color="ink")


Placed = tuple[int, str, float, float]
"""A part of a step on the roofline: the number of its row in the table, its name, FLOP per byte and FLOP/s."""


def roofline_figure(points: list[RooflinePoint]) -> list[Figure]:
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
            f"Roofline under arithmetic {flop_rate(peak)} and memory {byte_rate(bandwidth)}. {listed}",
            "Dots carry the number of their row in the table; open ones are backward passes. A dot far below the roof "
            "is limited by neither arithmetic nor memory, but by overhead or waiting.",
            lambda: roofline(bandwidth, peak, dots),
        )
    ]


def roofline(bandwidth: float, peak: float, dots: list[Placed]) -> Sheet:
    """FLOP/s against FLOP per byte on logarithmic axes: the slope is the bandwidth, the flat line the peak FLOP/s."""
    ridge = peak / bandwidth
    low, high = (ends([dot[2] for dot in dots] + [ridge]) for ends in (min, max))
    low, high = low / 10, high * 8
    floor = min([dot[3] for dot in dots] + [low * bandwidth]) / 3
    ceiling = max([peak * 3.5, *(dot[3] * 2 for dot in dots)])
    sheet = Sheet(360)
    xs, ys = ((math.log10(least), math.log10(most)) for least, most in ((low, high), (floor, ceiling)))
    axes = Axes(sheet, (58, 40, 16, 42), xs, ys)
    axes.x_ticks(labelled(decades(low, high, 4 * columns_of(2)), lambda power: f"{10**power:g}"), grid=True)
    axes.y_ticks(labelled(decades(floor, ceiling, 7), lambda power: scaled(10**power)))
    axes.base()
    sheet.text(0, 28, "FLOP/s")
    sheet.text(sheet.width - 16, sheet.height - 8, "FLOP per byte", anchor="end")
    start = max(low, floor / bandwidth)
    roof = [(start, start * bandwidth), (ridge, peak), (high, peak)]
    drawn = [axes.at(math.log10(x), math.log10(y)) for x, y in roof]
    sheet.line(drawn, width=2.2, color="ink")
    label = f"arithmetic {flop_rate(peak)}, memory {byte_rate(bandwidth)}"
    sheet.text(drawn[-1].x - 2, drawn[-1].y - 11, label, anchor="end", color="ink")
    labels: list[Point] = []
    for number, name, intensity, flops in dots:
        at, (hue, faint) = axes.at(math.log10(intensity), math.log10(flops)), family(name)
        sheet.dot(at, color=hue, radius=4, is_open=faint)
        # The two passes of a part often lie close together: a label is where none is yet, beside, above or below.
        sides = [(-14, 0), (14, 0), (0, -13), (0, 13), (-14, -13), (14, -13), (-14, 13), (14, 13)]
        places = [Point(at.x + x, at.y + y) for x, y in (sides if faint else sides[1::-1] + sides[2:])]
        free = next((place for place in places if not any(_near(place, other) for other in labels)), places[0])
        labels.append(free)
        sheet.text(free.x, free.y, str(number), anchor="middle", color="ink")
    return sheet


def _near(one: Point, other: Point) -> bool:
    """Whether the numbers of two dots would overlap."""
    return abs(one.x - other.x) < 16 and abs(one.y - other.y) < 14
