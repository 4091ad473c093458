"""Figures of plans: time and cost over the number of devices, and the parts of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle

from ..runs.report.blocks import Figure, Section
from ..runs.report.page import EXTRA, FAMILIES, Sheet, columns_of, evenly, round_steps, ticks, tone
from .predict import Band
from .summary import Plan, Point

COLOURS = (*FAMILIES, *EXTRA)
SERIES = ("accent", "embedding", "interaction", "top", "loss", "update")
"""Colours of plans in one chart."""
SMALL = 0.01
"""Parts below this share of every step are drawn as one."""
UNITS = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0), ("s", 1.0), ("ms", 1e-3))

Curve = list[tuple[int, Band]]
"""A figure over the number of devices."""


def over_devices(plans: Sequence[Plan], key: str) -> list[Section]:
    """Time and cost over the number of devices; none where nothing fits."""
    panels = [(title, curves) for title, curves in (_times(plans), _costs(plans)) if any(curves)]
    if not panels:
        return []
    names = [plan.device for plan in plans]
    listed = "; ".join(
        f"{title}, {name}: " + ", ".join(f"{ranks:,}: {band.value:.3g}" for ranks, band in curve)
        for title, curves in panels
        for name, curve in zip(names, curves)
        if curve
    )
    caption = "Lines are predictions, bands their ranges. A number of devices on which nothing fits is left out."
    figure = Figure(f"{key}-devices", f"Over the number of devices. {listed}", caption, lambda: _chart(panels, names))
    return [Section("charts", "time and cost over devices", [figure])]


def _curves(plans: Sequence[Plan], figure: Callable[[Point], Band | None]) -> list[Curve]:
    return [[(point.ranks, band) for point in plan.points if (band := figure(point))] for plan in plans]


def _times(plans: Sequence[Plan]) -> tuple[str, list[Curve]]:
    """The time to the target, or of a step where no target is known."""
    curves = _curves(plans, lambda point: point.target.seconds if point.target else None)
    title = "time to the target"
    if not any(curves):
        curves, title = _curves(plans, lambda point: point.step), "time of a step"
    longest = max((band.high for curve in curves for _, band in curve), default=1.0)
    unit, seconds = next((one for one in UNITS if longest >= one[1]), UNITS[-1])
    return f"{title}, {unit}", [[(ranks, band.times(1 / seconds)) for ranks, band in curve] for curve in curves]


def _costs(plans: Sequence[Plan]) -> tuple[str, list[Curve]]:
    """The cost of the training, or the throughput where no price is known."""
    costs = _curves(plans, lambda point: point.target.cost if point.target else None)
    if any(costs):
        currency = next((plan.currency for plan in plans if plan.currency), "")
        return (f"cost, {currency}" if currency else "cost"), costs

    def rate(point: Point) -> Band | None:
        step, samples = point.step, point.global_batch / 1e3
        return step and Band(samples / step.value, samples / step.high, samples / step.low)

    return "thousand samples/s", _curves(plans, rate)


def _chart(panels: list[tuple[str, list[Curve]]], names: list[str]) -> Sheet:
    """One panel for each figure, one line for each plan."""
    columns, tall, head = columns_of(len(panels)), 250, 24 * (len(names) > 1)
    sheet = Sheet(head + tall * len(panels) // columns)
    across = 0.0
    for colour, name in zip(cycle(SERIES), names if head else []):
        sheet.text(across, 14, "■", color=colour)
        sheet.text(across + 16, 14, name, color="ink")
        across += 40 + 7 * len(name)
    each = (sheet.width - 40 * (columns - 1)) / columns
    for index, (title, curves) in enumerate(panels):
        left, top = index % columns * (each + 40), head + tall * (index // columns)
        axes = sheet.axes(left + 46, top + 34, sheet.width - left - each + 6, sheet.height - top - tall + 36)
        sheet.text(left, top + 12, title, color="ink", size=12, weight="bold", va="center")
        sheet.text(left + each - 6, top + 244, "devices", ha="right", va="center")
        counts = sorted({ranks for curve in curves for ranks, _ in curve})
        high = 1.05 * max(band.high for curve in curves for _, band in curve)
        axes.set_xlim(-0.4, len(counts) - 0.6)
        axes.set_ylim(0, high)
        for colour, curve in zip(cycle(SERIES), curves):
            for ranks, band in curve:
                axes.plot(2 * [counts.index(ranks)], [band.low, band.high], color=tone(colour), lw=5, alpha=0.3)
            x = [counts.index(ranks) for ranks, _ in curve]
            axes.plot(x, [band.value for _, band in curve], color=tone(colour), lw=1.8, marker="o", ms=5)
        marked = round_steps(0, high, 5)
        ticks(axes, "y", marked, evenly(marked), grid=True)
        axes.set_xticks(range(len(counts)), [f"{count:,}" for count in counts])
    return sheet


def step_figure(points: list[Point]) -> Sheet:
    """Exposed parts of a step, stacked, one bar for each number of ranks; the line is the range of the prediction."""
    steps = [point.step for point in points if point.step is not None]
    names = [name for name in steps[0].exposed if any(step.exposed[name] >= SMALL * step.value for step in steps)]
    high = 1e3 * max(step.high for step in steps)
    sheet = Sheet(280 + 16 * len(names))
    axes = sheet.axes(56, 12, 12, sheet.height - 240)
    axes.set_xlim(-0.6, len(points) - 0.4)
    axes.set_ylim(0, 1.05 * high)
    for x, step in enumerate(steps):
        bottom = 0.0
        for colour, name in zip(COLOURS, names):
            axes.bar(x, 1e3 * step.exposed[name], bottom=bottom, width=0.6, color=tone(colour))
            bottom += 1e3 * step.exposed[name]
        axes.bar(x, 1e3 * step.value - bottom, bottom=bottom, width=0.6, color=tone("other"))
        axes.plot([x, x], [1e3 * step.low, 1e3 * step.high], color=tone("ink"), lw=1.5)
    marked = round_steps(0, high, 5)
    ticks(axes, "y", marked, evenly(marked), grid=True)
    ticks(axes, "x", list(range(len(points))), lambda x: f"{points[round(x)].ranks:,}")
    sheet.text(0, 12, "ms", color="muted")
    sheet.text(0, 250, "ranks", color="muted", va="center")
    for line, (colour, name) in enumerate(zip((*COLOURS[: len(names)], "other"), (*names, "other"))):
        sheet.text(56, 272 + 16 * line, "■", color=colour)
        sheet.text(72, 272 + 16 * line, name, color="ink")
    return sheet
