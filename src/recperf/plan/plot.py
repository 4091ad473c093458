"""A plan for several numbers of ranks as one figure."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from ..runs.report.svg import require_matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREY = "#4c6ef5", "#e8590c", "#868e96"
SHADES = (
    "#adb5bd",
    "#74c0fc",
    "#339af0",
    "#1864ab",
    "#69db7c",
    "#2b8a3e",
    "#f783ac",
    "#ffa94d",
    "#e8590c",
    "#845ef7",
    "#212529",
)


def plot(plan: dict[str, Any]) -> str:
    """The figure as SVG."""
    require_matplotlib()
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    svg = io.StringIO()
    with _settings():
        canvas: Any = FigureCanvasSVG(figure(plan))
        canvas.print_svg(svg, metadata={"Date": None})
    return svg.getvalue()


def _settings() -> Any:
    from matplotlib import rc_context

    return rc_context({"svg.hashsalt": "recperf", "svg.fonttype": "none", "font.size": 9})


def figure(plan: dict[str, Any]) -> Figure:
    """Six panels over the numbers of ranks; those that do not fit are empty."""
    from matplotlib.figure import Figure

    sheet = Figure(figsize=(12, 6.6), layout="constrained")
    panels = sheet.subplots(2, 3).flat
    fitting = [(x, point) for x, point in enumerate(plan["points"]) if point["fits"]]
    x, points = [x for x, _ in fitting], [point for _, point in fitting]
    reached = [point["target"] for point in points]
    known = bool(points) and all(reached)
    _speed(next(panels), points, x)
    _scaling(next(panels), points, x)
    _step(next(panels), points, x)
    _memory(next(panels), points, x)
    hours = [one["seconds"] for one in reached] if known else None
    _bands(next(panels), x, hours, "time to the target", "hours", 1 / 3600)
    cost = [one["cost"] for one in reached] if known and reached[0]["cost"] else None
    _bands(next(panels), x, cost, "cost to the target", plan["currency"] or "price units")
    names = [f"{point['ranks']:,}" for point in plan["points"]]
    for axes in sheet.axes:
        axes.set_xlim(-0.6, len(names) - 0.4)
        axes.set_xticks(range(len(names)), names, rotation=0 if len(names) < 9 else 45)
        axes.set_xlabel("ranks")
        axes.spines[["top", "right"]].set_visible(False)
        for missing in set(range(len(names))) - set(x):
            across = axes.get_xaxis_transform()
            axes.text(missing, 0.5, "does not fit", transform=across, color=GREY, rotation=90, ha="center", va="center")
    sheet.suptitle(f"{plan['workload']} on {plan['device']}, {plan['network']}: predicted, not measured")
    return sheet


def _speed(axes: Axes, points: list[dict[str, Any]], x: list[int]) -> None:
    axes.set_title("samples/s")
    if not points:
        return
    bounds = {"value": "value", "low": "high", "high": "low"}
    bands = [{key: one["global_batch"] / one["step"][bound] for key, bound in bounds.items()} for one in points]
    speed, below, above = _errors(bands)
    ideal = [speed[0] / points[0]["ranks"] * point["ranks"] for point in points]
    axes.plot(x, ideal, color=GREY, ls="--", label="linear scaling")
    axes.errorbar(x, speed, yerr=[below, above], color=BLUE, marker="o", capsize=4, elinewidth=1, label="predicted")
    axes.set_yscale("log")
    axes.legend(frameon=False)


def _scaling(axes: Axes, points: list[dict[str, Any]], x: list[int]) -> None:
    axes.set_title("scaling efficiency")
    axes.set_ylabel("%")
    axes.plot(x, [100 * point["scaling"] for point in points], color=BLUE, marker="o")
    axes.set_ylim(0, 110 * max((point["scaling"] for point in points), default=1.0))


def _bands(
    axes: Axes, x: list[int], bands: list[dict[str, float]] | None, title: str, unit: str, factor: float = 1.0
) -> None:
    axes.set_title(title)
    if not bands:
        axes.set_yticks([])
        if bands is None:
            axes.text(0.5, 0.5, "unknown", transform=axes.transAxes, ha="center", color=GREY)
        return
    value, below, above = _errors([{key: factor * bound for key, bound in band.items()} for band in bands])
    axes.errorbar(x, value, yerr=[below, above], color=BLUE, marker="o", capsize=4, elinewidth=1)
    axes.set_ylim(0, 1.1 * max(a + b for a, b in zip(value, above)))
    axes.set_ylabel(unit)


def _errors(bands: list[dict[str, float]]) -> tuple[list[float], list[float], list[float]]:
    """Values, and how far their ranges reach below and above them."""
    value, low, high = ([band[key] for band in bands] for key in ("value", "low", "high"))
    return value, [a - b for a, b in zip(value, low)], [b - a for a, b in zip(value, high)]


def _step(axes: Axes, points: list[dict[str, Any]], x: list[int]) -> None:
    """Exposed parts, stacked; those below 1 % of the step everywhere are shown as one."""
    axes.set_title("step, exposed parts")
    axes.set_ylabel("ms")
    if not points:
        return
    steps = [point["step"] for point in points]
    bottom = [0.0] * len(x)
    small = [0.0] * len(x)
    for shade, name in zip(SHADES, steps[0]["exposed"]):
        ms = [1e3 * step["exposed"][name] for step in steps]
        if all(value < 10 * step["value"] for value, step in zip(ms, steps)):
            small = [a + b for a, b in zip(small, ms)]
            continue
        axes.bar(x, ms, bottom=bottom, color=shade, label=name, width=0.7)
        bottom = [a + b for a, b in zip(bottom, ms)]
    if any(small):
        axes.bar(x, small, bottom=bottom, color=GREY, label="other", width=0.7)
    value, below, above = _errors([{key: 1e3 * step[key] for key in ("value", "low", "high")} for step in steps])
    axes.errorbar(x, value, yerr=[below, above], fmt="none", color="black", capsize=4, elinewidth=1)
    axes.set_ylim(top=1.6 * max(a + b for a, b in zip(value, above)))
    axes.legend(frameon=False, fontsize=7, ncols=2, loc="upper left")


def _memory(axes: Axes, points: list[dict[str, Any]], x: list[int]) -> None:
    axes.set_title("memory of the fullest rank")
    axes.set_ylabel("GiB")
    if not points:
        return
    gib = [point["memory"]["bytes"] / 2**30 for point in points]
    limit = [point["memory"]["limit_bytes"] / 2**30 for point in points]
    without_reuse = [point["memory"]["without_reuse_bytes"] / 2**30 for point in points]
    axes.bar(x, without_reuse, color="#dbe4ff", width=0.7, label="without reuse")
    axes.bar(x, gib, color=BLUE, width=0.7, label="with reuse")
    axes.axhline(min(limit), color=ORANGE, ls="--", label="usable")
    axes.set_ylim(0, 1.35 * max(*without_reuse, *limit))
    axes.legend(frameon=False, ncols=3, fontsize=8, loc="upper center")
