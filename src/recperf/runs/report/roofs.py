"""The roofline, and the bandwidth of components without arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .blocks import Figure
from .formats import byte_rate, component, flop_rate, number
from .svg import WIDE, Sheet, decades, family, place, ticks, tone

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Roof:
    label: str
    short: str
    """The label on a phone."""
    bandwidth: float
    tone: str = "muted"
    main: bool = False
    """The one that bounds every component; others are dashed."""

    @property
    def dashes(self) -> Any:
        return "-" if self.main else (0, (4, 3))


@dataclass(frozen=True)
class Point:
    number: int
    """Its row in the table beside the figure."""
    name: str
    intensity: float
    flops: float


def roofline_figure(key: str, roofs: list[Roof], peak: tuple[str, float], points: list[Point]) -> Figure:
    listed = "; ".join(f"{component(p.name)} {flop_rate(p.flops)} at {number(p.intensity)} FLOP/B" for p in points)
    return Figure(
        key,
        f"Roofline under {peak[0]}, {', '.join(roof.label for roof in roofs)}. {listed}",
        "Solid: the ceilings that limit every component; dashed: lower ceilings of some components. A dot far below "
        "all of them is limited by neither arithmetic nor memory, but by overhead or waiting. Open dots are backward "
        "passes; on a phone, dots carry the number of their row in the table.",
        lambda width: roofline(width, roofs, peak, points),
    )


def strip_figure(key: str, roofs: list[Roof], moved: list[Moved]) -> Figure:
    listed = "; ".join(f"{component(one.name)} {byte_rate(one.p50)}" for one in moved)
    return Figure(
        key,
        f"Bandwidth of components without arithmetic: {listed}",
        "Components without arithmetic have no place on the roofline: their bytes per second, with p20 – p80.",
        lambda width: strip(width, roofs, moved),
    )


def roofline(width: int, roofs: list[Roof], peak: tuple[str, float], points: list[Point]) -> Sheet:
    """FLOP/s against FLOP per byte on logarithmic axes: slopes are bandwidths, the flat line is the peak FLOP/s."""
    wide = width == WIDE
    height = 400 if wide else 330
    head = 0 if wide else 16 * len(roofs)
    height += head
    left, right, top, bottom = (58, 16, 40, 42) if wide else (42, 8, 26 + head, 42)
    sheet = Sheet(width, height)
    axes = sheet.axes(left, top, right, bottom)
    best = max(roof.bandwidth for roof in roofs)
    low = min([point.intensity for point in points] + [peak[1] / best / 10]) / 3
    high = max([point.intensity for point in points] + [peak[1] / best]) * 8
    floor = min([point.flops for point in points] + [low * best]) / 3
    ceiling = max([peak[1] * 3.5, *(point.flops * 2 for point in points)])
    for setter, ends in ((axes.set_xlim, (low, high)), (axes.set_ylim, (floor, ceiling))):
        setter(*(math.log10(end) for end in ends))
    across = (width - left - right) / math.log10(high / low)
    upward = (height - top - bottom) / math.log10(ceiling / floor)
    ticks(axes, "x", decades(low, high, 8 if wide else 5), lambda v: f"{10**v:g}", grid=True)
    ticks(axes, "y", decades(floor, ceiling, 7), lambda v: power_of_ten(round(v)).replace(" ", ""), grid=True)
    sheet.text(0, top - 12, "FLOP/s", va="center")
    sheet.text(width - right, height - 8, "FLOP per byte", size=11, ha="right", va="center")
    _roofs(axes, roofs, peak, (low, high, floor))
    _legend(sheet, roofs, left)
    anchors = [
        (left + math.log10(p.intensity / low) * across, top + math.log10(ceiling / p.flops) * upward) for p in points
    ]
    texts = [component(point.name) if wide else str(point.number) for point in points]
    box = (left + 2.0, top + 0.0, width - right + 0.0, height - bottom - 4.0)
    spots = place(anchors, [6.4 * len(text) + 2 for text in texts], box)
    for point, (label_x, label_y), text in zip(points, spots, texts):
        hue, faint = family(point.name)
        axes.plot(
            math.log10(point.intensity), math.log10(point.flops), "o", ms=8, mew=2, mec=tone(hue),
            mfc=tone("surface" if faint else hue), zorder=4,
        )  # fmt: skip
        sheet.text(label_x, label_y, text, color="ink", size=11, ha="left", va="center")
    return sheet


def power_of_ten(exponent: int) -> str:
    """`9` as `1 G`."""
    prefix, digits = divmod(exponent, 3)
    return f"{10**digits} {' kMGTPE'[prefix]}" if 0 <= prefix <= 6 else f"{10.0**exponent:g} "


def _roofs(axes: Axes, roofs: list[Roof], peak: tuple[str, float], ends: tuple[float, float, float]) -> None:
    low, high, floor = ends
    for roof in roofs:
        ridge, start = peak[1] / roof.bandwidth, max(low, floor / roof.bandwidth)
        x, y = (start, ridge), (start * roof.bandwidth, peak[1])
        axes.plot(
            [math.log10(value) for value in x], [math.log10(value) for value in y], ls=roof.dashes,
            lw=2.2 if roof.main else 1.4, color=tone(roof.tone),
        )  # fmt: skip
    ridge = peak[1] / max(roof.bandwidth for roof in roofs)
    axes.plot([math.log10(ridge), math.log10(high)], [math.log10(peak[1])] * 2, lw=2.2, color=tone("ink"))
    axes.annotate(
        peak[0], (math.log10(high), math.log10(peak[1])), (-2, 6), textcoords="offset points", ha="right",
        fontsize=10.5, color=tone("ink"),
    )  # fmt: skip


def _legend(sheet: Sheet, roofs: list[Roof], left: float) -> None:
    """The names of the slopes above the axes: on the slopes themselves, labels of close ones would overlap."""
    from matplotlib.lines import Line2D

    x, y = (left, 9.0) if sheet.wide else (0.0, 9.0)
    for roof in sorted(roofs, key=lambda roof: -roof.bandwidth):
        line = Line2D(
            [x / sheet.width, (x + 22) / sheet.width], [1 - y / sheet.height] * 2, color=tone(roof.tone),
            ls=roof.dashes, lw=2.2 if roof.main else 1.4,
        )  # fmt: skip
        sheet.figure.add_artist(line)
        sheet.text(x + 28, y, roof.label, color="ink", size=10.5, va="center")
        x, y = (x + 28 + 6.5 * len(roof.label) + 18, y) if sheet.wide else (x, y + 16)


@dataclass(frozen=True)
class Moved:
    """Bytes per second of one component, with its spread."""

    name: str
    p20: float
    p50: float
    p80: float


def strip(width: int, roofs: list[Roof], moved: list[Moved]) -> Sheet:
    """One dot per component on a logarithmic axis of bytes per second; ceilings are vertical lines."""
    wide = width == WIDE
    head, foot, right = 14 + 15 * len(roofs), 26, 24
    left = 22 + 6.6 * max(len(component(one.name)) for one in moved)
    sheet = Sheet(width, head + 26 * len(moved) + foot)
    axes = sheet.axes(left, head, right, foot)
    low = min([one.p20 for one in moved] + [roof.bandwidth for roof in roofs]) / 2
    high = max([one.p80 for one in moved] + [roof.bandwidth for roof in roofs]) * 1.6
    axes.set_xlim(math.log10(low), math.log10(high))
    axes.set_ylim(len(moved) - 0.5, -0.5)
    ticks(axes, "x", decades(low, high, 6), lambda v: power_of_ten(round(v)) + "B/s", grid=True)
    for row, one in enumerate(moved):
        hue, faint = family(one.name)
        spread = [math.log10(one.p20), math.log10(one.p80)]
        axes.plot(spread, [row, row], color=tone(hue), lw=2, alpha=0.6)
        fill = tone("surface" if faint else hue)
        axes.plot(math.log10(one.p50), row, "o", ms=9, mew=2, mec=tone(hue), mfc=fill)
        sheet.text(0, head + 26 * row + 13, component(one.name), color="ink", va="center")
    pixels, tall = (width - left - right) / math.log10(high / low), 26 * len(moved)
    for index, roof in enumerate(sorted(roofs, key=lambda roof: -roof.bandwidth)):
        y = 10 + 15 * index
        top = 1 + (head - y - 6) / tall
        axes.axvline(math.log10(roof.bandwidth), 0, top, color=tone(roof.tone), lw=1.4, ls=roof.dashes, clip_on=False)
        x = left + math.log10(roof.bandwidth / low) * pixels
        label = roof.label if wide else roof.short
        # To the left of its line a label meets only lower lines, which end below it.
        x, aside = (x - 5, "right") if x > 6.5 * len(label) else (x + 5, "left")
        sheet.text(x, y, label, color="ink", size=10.5, ha=aside, va="center")
    return sheet
