"""Line charts: lookup time against table size, training loss and metrics over the steps, and the roofline."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...measure.sections import swept_ms
from ...units import digits
from .blocks import Figure
from .formats import byte_rate, component, flop_rate, scaled, size
from .svg import Sheet, decades, evenly, family, require_matplotlib, round_steps, svg_text, ticks, tone

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BUCKETS = 160
"""Points of a loss curve; more would not be visible."""


@dataclass(frozen=True)
class Mark:
    """A size of this workload, marked on the curve."""

    label: str
    bytes: float
    tone: str


def knee(points: list[dict[str, Any]], caches: dict[str, int], marks: list[Mark]) -> Sheet:
    """Nanoseconds per lookup against table size, with the sizes of the caches and of the workload."""
    sheet, (left, right, top, bottom) = Sheet(340), (44, 16, 34, 42)
    axes = sheet.axes(left, top, right, bottom)
    sizes, middle = [point["table_bytes"] for point in points], [point["p50"] for point in points]
    low = min([*sizes, *(mark.bytes for mark in marks)]) / 1.6
    high = max([*sizes, *(mark.bytes for mark in marks)]) * 1.6
    axes.set_xlim(math.log2(low), math.log2(high))
    highest = max(point["p80"] for point in points) * 1.12
    axes.set_ylim(0, highest)
    octaves = [float(v) for v in range(0, 60, 3)]
    ticks(axes, "x", octaves, lambda v: size(2**v))
    ticks(axes, "y", round_steps(0, highest, 5), lambda v: f"{v:g}", grid=True)
    sheet.text(0, 10, "ns per lookup", va="center")
    sheet.text(sheet.width - right, sheet.height - 8, "table size", ha="right", va="center")
    x = [math.log2(value) for value in sizes]
    axes.fill_between(x, [p["p20"] for p in points], [p["p80"] for p in points], color=tone("accent"), alpha=0.18, lw=0)
    axes.plot(x, middle, color=tone("accent"), lw=2.2, marker="o", ms=4)
    across = (sheet.width - left - right) / math.log2(high / low)
    for level, count in caches.items():
        if low < count < high:
            axes.axvline(math.log2(count), color=tone("muted"), lw=1, ls=(0, (2, 3)))
            at = left + math.log2(count / low) * across
            sheet.text(at, top - 8, f"{level} {size(count)}", ha="center", va="center", size=10.5)
    _marks(sheet, axes, marks, (x, middle), (left, top, low, across), (sheet.height - top - bottom) / highest)
    return sheet


def _marks(
    sheet: Sheet,
    axes: Axes,
    marks: list[Mark],
    curve: tuple[list[float], list[float]],
    frame: tuple[float, float, float, float],
    upward: float,
) -> None:
    """A line and a dot on the curve for each size, with its name."""
    import numpy

    left, top, low, across = frame
    highest = axes.get_ylim()[1]
    ends = {mark.label: left + math.log2(mark.bytes / low) * across for mark in marks}
    # There is room above the curve on the left, and below it on the right.
    rightmost = min((x for x in ends.values() if x >= sheet.width / 2), default=0.0)
    for index, mark in enumerate(sorted(marks, key=lambda mark: mark.bytes)):
        at, x = math.log2(mark.bytes), ends[mark.label]
        height = float(numpy.interp(at, *curve))
        axes.plot([at, at], [0, height], color=tone(mark.tone), lw=1.6)
        axes.plot(at, height, "o", ms=9, mfc=tone(mark.tone), mec=tone("surface"), mew=1.5, zorder=5)
        if x < sheet.width / 2:
            x, aside = x - 4, "left"
            y = max(top + 14 + 16 * index, top + (highest - height) * upward - 24 - 16 * (len(marks) - 1 - index))
        else:
            x, aside = rightmost - 9, "right"
            y = top + (highest - height / 2) * upward + 16 * index
        text = f"{mark.label} {size(mark.bytes)}"
        sheet.text(x, y, text, color=mark.tone, size=11.5, ha=aside, weight="bold")


@dataclass(frozen=True)
class Thinned:
    """A series in buckets: the mean step, mean, minimum and maximum of each."""

    step: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


def thin(series: list[tuple[int, float]], buckets: int = BUCKETS) -> Thinned:
    ordered = sorted(series)
    each = max(1, math.ceil(len(ordered) / buckets))
    pieces = [ordered[start : start + each] for start in range(0, len(ordered), each)]
    losses = [[loss for _, loss in piece] for piece in pieces]
    return Thinned(
        [sum(step for step, _ in piece) / len(piece) for piece in pieces],
        [math.fsum(values) / len(values) for values in losses],
        [min(values) for values in losses],
        [max(values) for values in losses],
    )


def smooth(values: list[float], weight: float = 0.15) -> list[float]:
    """An exponential moving average, started at the first value."""
    averages: list[float] = []
    for value in values:
        averages.append(value if not averages else averages[-1] + weight * (value - averages[-1]))
    return averages


def training(
    losses: dict[int, list[tuple[int, float]]],
    norms: dict[int, list[tuple[int, float]]],
    history: dict[int, list[tuple[int, float]]],
    metric: str,
    target: float | None,
) -> Sheet:
    """Loss, gradient norm and a validation metric side by side."""
    series = {"training loss": losses, "gradient norm": norms, f"validation {metric}": history}
    panels = [title for title, by_seed in series.items() if by_seed]
    sheet = Sheet(250)
    each = (sheet.width - 56 * (len(panels) - 1)) / len(panels)
    for index, title in enumerate(panels):
        left = index * (each + 56)
        axes = sheet.axes(left + 40, 34, sheet.width - left - each + 6, 34)
        sheet.text(left, 12, title, color="ink", size=12, weight="bold", va="center")
        if series[title] is history:
            _history(axes, history, target)
        else:
            _losses(axes, series[title])
        sheet.text(left + each - 6, 242, "steps", ha="right", va="center")
    return sheet


def _band(axes: Axes, series: list[list[tuple[float, float]]], marker: str = "") -> tuple[float, float]:
    """The mean of several seeds, with a band from the lowest to the highest; of the steps that most of them have."""
    by_step: dict[float, list[float]] = {}
    for one in series:
        for step, value in one:
            by_step.setdefault(step, []).append(value)
    most = max(map(len, by_step.values()))
    steps = sorted(step for step, values in by_step.items() if len(values) == most)
    low, high = ([ends(by_step[step]) for step in steps] for ends in (min, max))
    axes.fill_between(steps, low, high, color=tone("accent"), alpha=0.25, lw=0)
    means = [math.fsum(by_step[step]) / most for step in steps]
    axes.plot(steps, means, color=tone("accent"), lw=1.8, marker=marker or None, ms=4)
    return min(low), max(high)


def _losses(axes: Axes, losses: dict[int, list[tuple[int, float]]]) -> None:
    drawn = {seed: thin(series) for seed, series in losses.items()}
    if len(drawn) > 1:
        smoothed = [list(zip(thinned.step, smooth(thinned.mean))) for thinned in drawn.values()]
        ends = _band(axes, smoothed)
        _frame(axes, max(thinned.step[-1] for thinned in drawn.values()), *ends)
        return
    for thinned in drawn.values():
        axes.fill_between(thinned.step, thinned.low, thinned.high, color=tone("muted"), alpha=0.25, lw=0)
    for thinned in drawn.values():
        axes.plot(thinned.step, smooth(thinned.mean), color=tone("accent"), lw=1.8)
    low = min(min(thinned.low) for thinned in drawn.values())
    high = max(max(thinned.high) for thinned in drawn.values())
    _frame(axes, max(thinned.step[-1] for thinned in drawn.values()), low, high)


def _history(axes: Axes, history: dict[int, list[tuple[int, float]]], target: float | None) -> None:
    if len(history) > 1:
        _band(axes, [[(float(step), value) for step, value in series] for series in history.values()], "o")
    else:
        x, y = zip(*sorted(*history.values()))
        axes.plot(x, y, color=tone("accent"), lw=1.8, marker="o", ms=4)
    values = [value for series in history.values() for _, value in series] + ([target] if target is not None else [])
    _frame(axes, max(step for series in history.values() for step, _ in series), min(values), max(values))
    if target is not None:
        axes.axhline(target, color=tone("ink"), lw=1, ls=(0, (4, 3)))
        axes.annotate(
            "target", (1, target), (0, 4), xycoords=("axes fraction", "data"), textcoords="offset points", ha="right",
            fontsize=10.5, color=tone("ink"),
        )  # fmt: skip


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
    ticks(axes, "x", decades(low, high, 8), lambda v: f"{10**v:g}", grid=True)
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
            middle = [m["p50"] for m in ms]
            spread = [[m["p50"] - m["p20"] for m in ms], [m["p80"] - m["p50"] for m in ms]]
            axes.errorbar(x, middle, yerr=spread, marker="o", capsize=3, color=colour, label=part)
        axes.set_ylim(bottom=0)
        axes.set_xlabel(", ".join(names))
        axes.set_ylabel("ms per step, p50 with p20 to p80")
        if not numeric:
            axes.set_xticks(x, labels)
        axes.set_title(f"{sweep['workload']}: {rows[0]['profile']['steps']} steps per point, new ids, warm-up excluded")
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
        return svg_text(figure)
