"""A plan for several numbers of ranks as one figure."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from ..runs.report.svg import require_matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREY, RED = "#4c6ef5", "#e8590c", "#868e96", "#e03131"
SHADES = ("#adb5bd", "#74c0fc", "#339af0", "#1864ab", "#69db7c", "#2b8a3e", "#f783ac", "#ffa94d", "#e8590c", "#845ef7")


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
    """Six panels over the numbers of ranks."""
    from matplotlib.figure import Figure

    points = plan["points"]
    sheet = Figure(figsize=(12, 6.6), layout="constrained")
    panels = sheet.subplots(2, 3).flat
    x = list(range(len(points)))
    names = [f"{point['ranks']:,}" for point in points]
    _speed(next(panels), points, x)
    _line(next(panels), x, [100 * p["scaling"] for p in points], "scaling efficiency", "%")
    _step(next(panels), points, x)
    _memory(next(panels), points, x)
    reached = [point["target"] for point in points]
    hours = [one["hours"] for one in reached] if all(reached) else None
    cost = [one["cost"] for one in reached] if hours and reached[0]["cost"] is not None else None
    _line(next(panels), x, hours, "time to the target", "hours")
    _line(next(panels), x, cost, "cost to the target", plan["currency"] or "price units")
    for axes in sheet.axes:
        axes.set_xticks(x, names, rotation=0 if len(x) < 9 else 45)
        axes.set_xlabel("ranks")
        axes.spines[["top", "right"]].set_visible(False)
    sheet.suptitle(f"{plan['workload']} on {plan['device']}, {plan['network']}: predicted, not measured")
    return sheet


def _speed(axes: Axes, points: list[dict[str, Any]], x: list[int]) -> None:
    speed = [point["samples_per_s"] for point in points]
    ideal = [speed[0] / points[0]["ranks"] * point["ranks"] for point in points]
    axes.plot(x, ideal, color=GREY, ls="--", label="linear scaling")
    axes.plot(x, speed, color=BLUE, marker="o", label="predicted")
    axes.set_yscale("log")
    axes.set_title("samples/s")
    axes.legend(frameon=False)


def _line(axes: Axes, x: list[int], values: list[float] | None, title: str, unit: str) -> None:
    axes.set_title(title)
    if values is None:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "unknown", transform=axes.transAxes, ha="center", color=GREY)
        return
    axes.plot(x, values, color=BLUE, marker="o")
    axes.set_ylim(0, 1.1 * max(values))
    axes.set_ylabel(unit)


def _step(axes: Axes, points: list[dict[str, Any]], x: list[int]) -> None:
    """Exposed parts, stacked; those below 1 % of the step everywhere are shown as one."""
    bottom = [0.0] * len(x)
    small = [0.0] * len(x)
    for shade, name in zip(SHADES, points[0]["exposed"]):
        ms = [1e3 * point["exposed"][name] for point in points]
        if all(value < 10 * point["seconds"] for value, point in zip(ms, points)):
            small = [a + b for a, b in zip(small, ms)]
            continue
        axes.bar(x, ms, bottom=bottom, color=shade, label=name, width=0.7)
        bottom = [a + b for a, b in zip(bottom, ms)]
    if any(small):
        axes.bar(x, small, bottom=bottom, color=GREY, label="other", width=0.7)
    axes.set_title("step, exposed parts")
    axes.set_ylabel("ms")
    axes.set_ylim(top=1.6 * max(a + b for a, b in zip(bottom, small)))
    axes.legend(frameon=False, fontsize=7, ncols=2, loc="upper left")


def _memory(axes: Axes, points: list[dict[str, Any]], x: list[int]) -> None:
    gib = [point["memory"]["bytes"] / 2**30 for point in points]
    limit = [point["memory"]["limit_bytes"] / 2**30 for point in points]
    fits = [point["memory"]["verdict"] != "does not fit" for point in points]
    without_reuse = [point["memory"]["without_reuse_bytes"] / 2**30 for point in points]
    axes.bar(x, without_reuse, color="#dbe4ff", width=0.7, label="without reuse")
    axes.bar(x, gib, color=[BLUE if one else RED for one in fits], width=0.7)
    axes.step(x, limit, where="mid", color=ORANGE, ls="--", label="usable")
    axes.set_ylim(0, 1.25 * max(*without_reuse, *limit))
    axes.set_title("memory of the fullest rank")
    axes.set_ylabel("GiB")
    axes.legend(frameon=False)
