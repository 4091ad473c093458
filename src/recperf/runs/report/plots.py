"""The figures, each drawn for a given width: numbers in, a sheet out. What they mean is said by `sections`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .blocks import Drawing
from .svg import NARROW, WIDE, Sheet, family, place, tone
from .words import component, percent, scaled, size

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def drawing(key: str, label: str, caption: str, draw: Callable[[int], Sheet]) -> Drawing:
    """A figure for a screen and for a phone."""
    wide, narrow = (
        draw(width).markup(f"{key}-{name}", label) for name, width in (("wide", WIDE), ("narrow", NARROW))
    )
    return Drawing(wide, narrow, caption)


@dataclass(frozen=True)
class Bar:
    """One model or rule with its scores."""

    label: str
    values: dict[str, float]
    own: bool = False
    spread: dict[str, float] = field(default_factory=dict)
    seeds: dict[str, list[float]] = field(default_factory=dict)


def quality(width: int, bars: list[Bar], metrics: list[tuple[str, str]], targets: dict[str, float]) -> Sheet:
    """A panel a metric, a bar a model; the target is a dashed line."""
    wide, rows = width == WIDE, len(bars)
    panel = 26 * rows + 48
    sheet = Sheet(width, panel if wide else panel * len(metrics) + 12 * (len(metrics) - 1))
    names = 170 if wide else 112
    each = (width - names - 30 * len(metrics)) / len(metrics) if wide else width - names - 44
    for index, (metric, title) in enumerate(metrics):
        left = names + index * (each + 46) if wide else names
        top = 26 if wide else 26 + index * (panel + 12)
        axes = sheet.axes(left, top, width - left - each, sheet.height - top - 26 * rows - 4)
        sheet.text(left, top - 12, title, color="ink", size=12, weight="bold")
        _scores(axes, bars, metric, targets.get(metric))
        if index == 0 or not wide:
            for row, bar in enumerate(bars):
                y = top + 26 * row + 13
                sheet.text(names - 10, y, bar.label, color="ink" if bar.own else "muted", ha="right", va="center")
    return sheet


def _scores(axes: Axes, bars: list[Bar], metric: str, target: float | None) -> None:
    values = [bar.values[metric] for bar in bars]
    low = 0.5 if min(values) >= 0.5 and max(values) <= 1 else min(0.0, *values)
    high = max([*values, target or low]) + 1e-9
    axes.set_xlim(low, low + (high - low) * 1.2)
    axes.set_ylim(len(bars) - 0.35, -0.65)
    for row, (bar, value) in enumerate(zip(bars, values)):
        color = tone("accent" if bar.own else "other")
        axes.barh(row, value - low, left=low, height=0.58, color=color)
        spread = bar.spread.get(metric)
        if spread:
            axes.plot([value - spread, value + spread], [row, row], color=tone("ink"), lw=1.5, solid_capstyle="butt")
        for seed in bar.seeds.get(metric, []):
            axes.plot(seed, row + 0.0, "o", ms=4, mfc=tone("surface"), mec=tone("ink"), mew=1)
        end = max([value + (spread or 0), *bar.seeds.get(metric, [])])
        axes.annotate(
            f"{value:.3f}", (end, row), (6, 0), textcoords="offset points", va="center", color=tone("ink"), fontsize=11
        )
    if target is not None:
        axes.axvline(target, color=tone("ink"), lw=1, ls=(0, (4, 3)))
        axes.annotate(
            "target", (target, -0.65), (0, 3), textcoords="offset points", ha="center", fontsize=10, color=tone("ink")
        )
    _ticks(axes, "x", [low, target or (low + high) / 2] if target is None else [low, target], lambda v: f"{v:.2g}")


@dataclass(frozen=True)
class Part:
    name: str
    phase: str
    value: float


def stacked(width: int, bars: Sequence[tuple[str, Sequence[Part]]], unit: str) -> Sheet:
    """A stacked bar a row: shares of a step, or milliseconds. A single bar shows its phases below."""
    wide, single = width == WIDE, len(bars) == 1
    each = 40 if single else 38
    # On a phone a bar's name stands above it: beside it there is no room.
    above = 0 if wide or single else 20
    names = (min(220, 18 + 6.6 * max(len(label) for label, _ in bars)) if wide else 0) if not single else 0
    foot = 44 if single else 30
    sheet = Sheet(width, round(len(bars) * (each + above + 10) + foot))
    axes = sheet.axes(names + 1, 0, 12, foot)
    longest = max(sum(part.value for part in parts) for _, parts in bars) or 1.0
    axes.set_xlim(0, longest)
    axes.set_ylim(len(bars) * (each + above + 10), 0)
    pixels = (width - names - 13) / longest
    for row, (label, parts) in enumerate(bars):
        top = row * (each + above + 10) + above
        if not single:
            y = top + each / 2 if wide else top - 9
            sheet.text(names - 10 if wide else 1, y, label, ha="right" if wide else "left", va="center", color="ink")
        _segments(axes, parts, top, each, pixels)
    if single:
        _phases(axes, bars[0][1], each + 6, pixels)
        axes.spines["bottom"].set_visible(False)
    else:
        _ticks(axes, "x", _steps(0, longest, 5 if wide else 3), lambda v: percent(v) if unit == "share" else f"{v:g}")
        if unit != "share":
            axes.set_xlabel("ms a step", color=tone("muted"), fontsize=11, labelpad=2)
            sheet.figure.set_size_inches(width / 72, sheet.height / 72)
    return sheet


def _segments(axes: Axes, parts: Sequence[Part], top: float, height: float, pixels: float) -> None:
    start = 0.0
    for part in parts:
        hue, faint = family(part.name)
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


def _phases(axes: Axes, parts: Sequence[Part], y: float, pixels: float) -> None:
    """A bracket under each stretch of parts of one phase."""
    start, runs = 0.0, [("", 0.0, 0.0)]
    for part in parts:
        if part.phase == runs[-1][0]:
            runs[-1] = (part.phase, runs[-1][1], start + part.value)
        else:
            runs.append((part.phase, start, start + part.value))
        start += part.value
    for phase, begin, end in runs[1:]:
        label = f"{phase} {percent(end - begin)}"
        inset = 1.5 / pixels
        axes.plot([begin + inset, end - inset], [y, y], color=tone("muted"), lw=1.5, clip_on=False)
        if (end - begin) * pixels > 6.6 * len(label) + 4:
            axes.annotate(
                label, ((begin + end) / 2, y), (0, -7), textcoords="offset points", ha="center", va="top",
                fontsize=11, color=tone("muted"), annotation_clip=False,
            )  # fmt: skip


@dataclass(frozen=True)
class Roof:
    label: str
    bandwidth: float
    main: bool = False
    """The one that bounds every component; others are drawn lighter."""


@dataclass(frozen=True)
class Point:
    number: int
    """Its row in the table beside the figure."""
    name: str
    intensity: float
    flops: float


def roofline(width: int, roofs: list[Roof], peak: tuple[str, float], points: list[Point]) -> Sheet:
    """FLOP/s against FLOP a byte, both logarithmic: the slopes are bandwidths, the flat line is the product."""
    wide = width == WIDE
    height = 400 if wide else 330
    left, right, top, bottom = (58, 16, 18, 46) if wide else (46, 8, 18, 44)
    sheet = Sheet(width, height)
    axes = sheet.axes(left, top, right, bottom)
    best = max(roof.bandwidth for roof in roofs)
    low = min([point.intensity for point in points] + [peak[1] / best / 10]) / 3
    high = max([point.intensity for point in points] + [peak[1] / best]) * 8
    floor = min([point.flops for point in points] + [low * best]) / 3
    ceiling = peak[1] * 3.5
    for setter, ends in ((axes.set_xlim, (low, high)), (axes.set_ylim, (floor, ceiling))):
        setter(*(math.log10(end) for end in ends))
    across = (width - left - right) / math.log10(high / low)
    upward = (height - top - bottom) / math.log10(ceiling / floor)
    _ticks(axes, "x", _decades(low, high, 8 if wide else 5), lambda v: f"{10**v:g}", grid=True)
    _ticks(axes, "y", _decades(floor, ceiling, 7), lambda v: scaled(10**v, "").replace(" ", ""), grid=True)
    sheet.text(left, 8, "FLOP/s", size=11, ha="left", va="center")
    sheet.text(width - right, height - 8, "FLOP a byte", size=11, ha="right", va="center")
    _roofs(axes, roofs, peak, (low, high, floor), math.degrees(math.atan2(upward, across)), wide)
    anchors = [
        (left + math.log10(p.intensity / low) * across, top + math.log10(ceiling / p.flops) * upward) for p in points
    ]
    texts = [component(point.name) if wide else str(point.number) for point in points]
    box = (left + 2.0, top + 0.0, width - right + 0.0, height - bottom - 4.0)
    spots = place(anchors, [6.4 * len(text) + 2 for text in texts], box)
    for point, (x, y), (label_x, label_y), text in zip(points, anchors, spots, texts):
        hue, faint = family(point.name)
        axes.plot(
            math.log10(point.intensity), math.log10(point.flops), "o", ms=8, mew=2, mec=tone(hue),
            mfc=tone("surface" if faint else hue), zorder=4,
        )  # fmt: skip
        sheet.text(label_x, label_y, text, color="ink", size=11, ha="left", va="center")
    return sheet


def _roofs(
    axes: Axes, roofs: list[Roof], peak: tuple[str, float], ends: tuple[float, float, float], angle: float, wide: bool
) -> None:
    low, high, floor = ends
    for index, roof in enumerate(sorted(roofs, key=lambda roof: -roof.bandwidth)):
        ridge = peak[1] / roof.bandwidth
        start = max(low, floor / roof.bandwidth)
        style = {"lw": 2.2, "color": tone("ink")} if roof.main else {"lw": 1.2, "color": tone("muted")}
        axes.plot(
            [math.log10(start), math.log10(ridge)], [math.log10(start * roof.bandwidth), math.log10(peak[1])],
            ls="-" if roof.main else (0, (4, 3)), **style,
        )  # fmt: skip
        # The uppermost slope is named above it, the others below, so that near ones do not write over each other.
        at = math.log10(start) + (math.log10(ridge) - math.log10(start)) * (0.30 if index == 0 else 0.62)
        axes.annotate(
            roof.label if wide else roof.label.split(" · ")[-1], (at, at + math.log10(roof.bandwidth)),
            (-4, 7) if index == 0 else (4, -7), textcoords="offset points", rotation=angle, rotation_mode="anchor",
            ha="center", va="bottom" if index == 0 else "top", fontsize=10.5,
            color=tone("ink" if roof.main else "muted"),
        )  # fmt: skip
    ridge = peak[1] / max(roof.bandwidth for roof in roofs)
    axes.plot([math.log10(ridge), math.log10(high)], [math.log10(peak[1])] * 2, lw=2.2, color=tone("ink"))
    axes.annotate(
        peak[0], (math.log10(high), math.log10(peak[1])), (-2, 6), textcoords="offset points", ha="right",
        fontsize=10.5, color=tone("ink"),
    )  # fmt: skip


def _ticks(axes: Axes, which: str, at: Sequence[float], say: Callable[[float], str], *, grid: bool = False) -> None:
    axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = sorted(axes.get_xlim() if which == "x" else axes.get_ylim())
    kept = [value for value in at if low - 1e-12 <= value <= high + 1e-12]
    axis.set_ticks(kept, [say(value) for value in kept])
    if grid:
        axes.grid(axis="x" if which == "x" else "y", color=tone("line"), lw=0.8)


def _decades(low: float, high: float, most: int) -> list[float]:
    """Exponents of the powers of ten within, thinned to what fits."""
    inside = list(range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1))
    return [float(value) for value in inside[:: max(1, math.ceil(len(inside) / most))]]


def _steps(low: float, high: float, most: int) -> list[float]:
    """Round numbers within."""
    from matplotlib.ticker import MaxNLocator

    return [float(v) for v in MaxNLocator(most, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high) if low <= v <= high]


__all__ = ["Bar", "Part", "Point", "Roof", "drawing", "quality", "roofline", "size", "stacked"]
