"""Bar charts: quality beside baselines, and steps divided into their parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...measure.profile_records import StepBudget
from ...measure.records import Percentiles
from ...measure.spans import PHASES
from ..result import Interval
from .blocks import Figure
from .formats import component, percent, short
from .svg import Sheet, columns_of, evenly, family, round_steps, ticks, tone

if TYPE_CHECKING:
    from matplotlib.axes import Axes


CHARACTER = 6.6
"""Pixels of a character at the size of labels, a little generous."""


@dataclass(frozen=True)
class Bar:
    """One model or baseline with its metrics."""

    label: str
    values: dict[str, float]
    own: bool = False
    spread: dict[str, float] = field(default_factory=dict)
    seeds: dict[str, list[float]] = field(default_factory=dict)
    interval: Mapping[str, Interval] = field(default_factory=dict)
    """Bootstrap interval of a metric, drawn instead of its spread."""


def quality(bars: list[Bar], metrics: list[tuple[str, str]], targets: dict[str, float]) -> Sheet:
    """One panel per metric with one bar per model; the target is a dashed line."""
    columns, tall = columns_of(len(metrics)), 26 * len(bars) + 60
    sheet = Sheet(tall * len(metrics) // columns)
    names = 18 + CHARACTER * max(len(bar.label) for bar in bars)
    each = (sheet.width - names - 30 * columns) / columns
    for index, (metric, title) in enumerate(metrics):
        left, top = names + index % columns * (each + 46), tall * (index // columns)
        axes = sheet.axes(left, top + 38, sheet.width - left - each, sheet.height - top - 38 - 26 * len(bars))
        sheet.text(left, top + 14, title, color="ink", size=12, weight="bold")
        _scores(axes, bars, metric, targets.get(metric))
        for row, bar in enumerate(bars if left == names else []):
            sheet.text(0, top + 51 + 26 * row, bar.label, color="ink" if bar.own else "muted", va="center")
    return sheet


def _scores(axes: Axes, bars: list[Bar], metric: str, target: float | None) -> None:
    values = [bar.values[metric] for bar in bars]
    highest = max([bar.interval[metric].high for bar in bars if metric in bar.interval], default=0.0)
    low = 0.5 if min(values) >= 0.5 and max(values) <= 1 else min(0.0, *values)
    high = max([*values, highest, target or low]) + 1e-9
    axes.set_xlim(low, low + (high - low) * 1.2)
    axes.set_ylim(len(bars) - 0.5, -0.5)
    for row, (bar, value) in enumerate(zip(bars, values)):
        color = tone("accent" if bar.own else "other")
        axes.barh(row, value - low, left=low, height=0.58, color=color)
        spread, ends = bar.spread.get(metric, 0.0), bar.interval.get(metric)
        low_end, high_end = (ends.low, ends.high) if ends else (value - spread, value + spread)
        if high_end > low_end:
            axes.plot([low_end, high_end], [row, row], color=tone("ink"), lw=1.5, solid_capstyle="butt")
        for seed in bar.seeds.get(metric, []):
            axes.plot(seed, row + 0.0, "o", ms=4, mfc=tone("surface"), mec=tone("ink"), mew=1)
        end = max([value, high_end, *bar.seeds.get(metric, [])])
        axes.annotate(
            f"{value:.3f}", (end, row), (6, 0), textcoords="offset points", va="center", color=tone("ink"), fontsize=11
        )
    if target is not None:
        axes.axvline(target, color=tone("ink"), lw=1, ls=(0, (4, 3)))
        axes.annotate(
            "target", (target, -0.5), (0, 3), textcoords="offset points", ha="center", fontsize=10, color=tone("ink")
        )
    marked = round_steps(low, high, 4)
    ticks(axes, "x", marked, evenly(marked))


@dataclass(frozen=True)
class BarPart:
    name: str
    value: float
    phase: str = ""
    """Parts of one phase get a bracket under a single bar."""
    tone: str = ""
    """Colour; empty: the one that the name has in every figure."""


@dataclass(frozen=True)
class StepPart:
    name: str
    phase: str
    share: float
    """Share of the step."""
    ms: Percentiles | None
    """None if only the share is known."""


def from_profile(profile: StepBudget) -> list[StepPart]:
    return in_order(StepPart(part.name, part.phase, part.share, part.ms) for part in profile.components)


def in_order(parts: Iterable[StepPart]) -> list[StepPart]:
    """The parts by phase; within a phase, as they were measured."""
    return sorted(parts, key=lambda part: PHASES.index(part.phase) if part.phase in PHASES else len(PHASES))


def budget_figure(key: str, parts: Sequence[StepPart], of: str) -> Figure:
    """The share of each part in one step."""
    listed = ", ".join(f"{component(part.name)} {percent(part.share, 1)}" for part in parts)
    bar = [("", [BarPart(part.name, part.share, part.phase) for part in parts])]
    backward = any(part.name.endswith("_backward") for part in parts)
    caption = "Backward passes have the lighter shade of their forward pass." if backward else ""
    return Figure(key, f"Share of each part in {of}: {listed}", caption, lambda: stacked(bar, "share"))


def stacked(bars: Sequence[tuple[str, Sequence[BarPart]]], unit: str) -> Sheet:
    """One stacked bar per row: shares of a step, or milliseconds. A single bar shows its phases below.

    A part too thin for its label is named in the table below the figure.
    """
    single = len(bars) == 1 and not bars[0][0]
    most = 220 if columns_of(2) == 2 else 120
    names = 0.0 if single else min(most, 18 + CHARACTER * max(len(label) for label, _ in bars))
    phases = single and any(part.phase for part in bars[0][1])
    foot, inset = 26 * phases if single else 30 if unit == "share" else 42, 0 if single else 16
    tall = 50 * len(bars) if phases or not single else 40
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
    if single:
        _phases(axes, bars[0][1], 46, pixels)
        axes.spines["bottom"].set_visible(False)
    else:
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


def _phases(axes: Axes, parts: Sequence[BarPart], y: float, pixels: float) -> None:
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
