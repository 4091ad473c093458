"""Line charts: training loss and metrics over the steps, calibration, the roofline, and sweeps."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from ...measure.sections import swept_ms
from ...units import digits
from .blocks import Figure
from .formats import byte_rate, component, flop_rate, scaled
from .svg import Sheet, columns_of, decades, evenly, family, require_matplotlib, round_steps, svg_text, ticks, tone

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GROUPS = 160
"""Points of a curve over the steps; more would not be visible."""
FEW_POINTS = 40
"""A curve with at most so many points shows each of them and is not smoothed."""


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
    _frame(axes, steps[-1], min(bounds), max(bounds))
    if target is not None:
        axes.axhline(target, color=tone("ink"), lw=1, ls=(0, (4, 3)))
        _note(axes, "target", (steps[-1], target), (0, 4), "right")


def _frame(axes: Axes, last: float, low: float, high: float) -> None:
    room = (high - low or abs(high) or 1.0) * 0.08
    axes.set_xlim(0, last * 1.02)
    axes.set_ylim(low - room, high + room)
    marked = round_steps(low - room, high + room, 5)
    ticks(axes, "y", marked, evenly(marked), grid=True)
    ticks(axes, "x", round_steps(0, last * 1.02, 4), lambda v: f"{v:,.0f}")


def reliability(bins: list[tuple[float, float]]) -> Sheet:
    """Observed over predicted rates, beside the line on which they are equal."""
    side = 260
    sheet = Sheet(side + 70)
    axes = sheet.axes(46, 34, sheet.width - 46 - side, 36)
    sheet.text(0, 12, "observed share of positives", color="ink", size=12, weight="bold", va="center")
    sheet.text(46 + side, side + 62, "predicted probability", ha="right", va="center")
    high = max(max(pair) for pair in bins) * 1.05 or 1.0
    axes.plot([0, high], [0, high], color=tone("muted"), lw=1, ls=(0, (4, 3)))
    x, y = zip(*bins)
    axes.plot(x, y, color=tone("accent"), lw=1.8, marker="o", ms=5)
    axes.set_xlim(0, high)
    axes.set_ylim(0, high)
    marked = round_steps(0, high, 4)
    ticks(axes, "x", marked, evenly(marked))
    ticks(axes, "y", marked, evenly(marked), grid=True)
    return sheet


@dataclass(frozen=True)
class Dot:
    """A part of a step on the roofline, with the number of its row in the table."""

    number: int
    name: str
    intensity: float
    flops: float


def roofline_figure(key: str, bandwidth: float, peak: float, dots: list[Dot]) -> Figure:
    listed = "; ".join(f"{component(d.name)} {flop_rate(d.flops)} at {digits(d.intensity)} FLOP/B" for d in dots)
    return Figure(
        key,
        f"Roofline under arithmetic {flop_rate(peak)} and memory {byte_rate(bandwidth)}. {listed}",
        "Dots carry the number of their row in the table; open ones are backward passes. A dot far below the roof is "
        "limited by neither arithmetic nor memory, but by overhead or waiting.",
        lambda: roofline(bandwidth, peak, dots),
    )


def roofline(bandwidth: float, peak: float, dots: list[Dot]) -> Sheet:
    """FLOP/s against FLOP per byte on logarithmic axes: the slope is the bandwidth, the flat line the peak FLOP/s."""
    sheet = Sheet(360)
    axes = sheet.axes(58, 40, 16, 42)
    ridge = peak / bandwidth
    low, high = (ends([dot.intensity for dot in dots] + [ridge]) for ends in (min, max))
    low, high = low / 10, high * 8
    floor = min([dot.flops for dot in dots] + [low * bandwidth]) / 3
    ceiling = max([peak * 3.5, *(dot.flops * 2 for dot in dots)])
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
    for dot in dots:
        at, (hue, faint) = (math.log10(dot.intensity), math.log10(dot.flops)), family(dot.name)
        fill = tone("surface" if faint else hue)
        axes.plot(*at, "o", ms=8, mew=2, mec=tone(hue), mfc=fill, zorder=4)
        # The two passes of a part often lie close together.
        _note(axes, str(dot.number), at, (-7 if faint else 7, -4), "right" if faint else "left")
    return sheet


def _note(axes: Axes, text: str, at: tuple[float, float], offset: tuple[float, float], aside: str) -> None:
    axes.annotate(text, at, offset, textcoords="offset points", ha=aside, fontsize=10.5, color=tone("ink"))


def sweep(sweep: dict[str, Any]) -> str:
    """Step time and the time of one part against the swept field, with their spread, as an SVG file.

    With several swept fields, each combination is a tick on the axis.
    """
    require_matplotlib()
    from matplotlib import rc_context
    from matplotlib.figure import Figure as MatplotlibFigure

    rows = sweep["rows"]
    names = list(rows[0]["settings"])
    labels = [", ".join(row["settings"].values()) for row in rows]
    numeric = len(names) == 1 and all(label.replace(".", "", 1).isdigit() for label in labels)
    x = [float(label) for label in labels] if numeric else list(range(len(rows)))
    with rc_context({"svg.hashsalt": "recperf", "svg.fonttype": "none"}):
        figure = MatplotlibFigure(figsize=(8, 4.5), layout="constrained")
        axes = figure.add_subplot()
        for part, colour in zip(sweep["parts"], ("#4c6ef5", "#e8590c")):
            ms = [swept_ms(row["profile"], part) for row in rows]
            middle = [m.p50 for m in ms]
            spread = [[m.p50 - m.p20 for m in ms], [m.p80 - m.p50 for m in ms]]
            axes.errorbar(x, middle, yerr=spread, marker="o", capsize=3, color=colour, label=part)
        axes.set_ylim(bottom=0)
        axes.set_xlabel(", ".join(names))
        axes.set_ylabel("ms per step, p50 with p20 to p80")
        if not numeric:
            axes.set_xticks(x, labels)
        axes.set_title(f"{sweep['workload']}: {rows[0]['profile'].steps} steps per point, new ids, warm-up excluded")
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
        return svg_text(figure)
