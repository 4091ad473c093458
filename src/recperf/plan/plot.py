"""The steps of a plan as one figure."""

from __future__ import annotations

from ..runs.report.svg import EXTRA, FAMILIES, Sheet, evenly, round_steps, ticks, tone
from .summary import Point

COLOURS = (*FAMILIES, *EXTRA)
SMALL = 0.01
"""Parts below this share of every step are drawn as one."""


def step_figure(points: list[Point]) -> Sheet:
    """Exposed parts of a step, stacked, one bar for each number of ranks; the line is the range of the prediction."""
    steps = [point.step for point in points if point.step is not None]
    names = [name for name in steps[0].exposed if any(step.exposed[name] >= SMALL * step.value for step in steps)]
    high = 1e3 * max(step.high for step in steps)
    sheet = Sheet(260 + 16 * len(names))
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
