"""The figure of convergence curves, as an image or as a page with its table."""

from __future__ import annotations

import html
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import units
from ...errors import UsageError
from ...files import write_atomic, writing
from ..report.svg import SETTINGS, require_matplotlib, svg_text
from .curve import Curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

INK, MUTED, LINE = "#1c2330", "#626b7a", "#dde1e8"
OURS = ("#0b62d6", "#c2410c", "#0f7b4f", "#7c3aed", "#b4156b", "#0e7490", "#8a6100", "#374151")
PUBLISHED, DASHES = "#8a93a3", ("-", "--", ":", "-.")
SUFFIXES = (".svg", ".png", ".html")
MOST_NAMED = 9
"""Curves named in the figure; the table names all."""


def write(curves: list[Curve], out: Path) -> Path:
    """Write the figure in the format of the file name."""
    kind = out.suffix.lower()
    if kind not in SUFFIXES or out.is_dir():
        raise UsageError(f"--out must be a file that ends in {', '.join(SUFFIXES)}", where={"file": out})
    with require_matplotlib().rc_context({**SETTINGS, "axes.unicode_minus": True}):
        figure = draw(curves)
        content = _png(figure) if kind == ".png" else svg_text(figure).encode()
    if kind == ".html":
        content = page(curves, content.decode()).encode()
    with writing(out, fix="choose another --out"):
        out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, content)
    return out


def draw(curves: list[Curve]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.4, 5.2), dpi=150, facecolor="white")
    axes = figure.add_axes((0.065, 0.12, 0.655, 0.74))
    ends = [curve.points[-1][0] for curve in curves]
    # On a linear axis, a small run beside the benchmark would be a stroke at the left edge.
    wide = max(ends) > 60 * min(ends)
    _axes(axes, curves, wide)
    ours = published = 0
    handles = []
    for curve in curves:
        if curve.published:
            style, published = (PUBLISHED, DASHES[published % len(DASHES)]), published + 1
        else:
            style, ours = (OURS[ours % len(OURS)], "-"), ours + 1
        handles += _line(axes, curve, *style, wide)
    figure.text(0.012, 0.94, "AUC on the hold-out against training samples", color=INK, fontsize=12, weight="bold")
    figure.text(0.012, 0.895, f"dots and numbers: samples to AUC {curves[0].target:g}", color=MUTED, fontsize=9)
    figure.legend(
        handles[:MOST_NAMED], [_label(curve) for curve in curves[:MOST_NAMED]], loc="upper left",
        bbox_to_anchor=(0.725, 0.88), frameon=False, fontsize=8.5, labelcolor=INK, handlelength=2.4, labelspacing=0.9,
    )  # fmt: skip
    if len(curves) > MOST_NAMED:
        figure.text(0.738, 0.06, f"and {len(curves) - MOST_NAMED} more", color=MUTED, fontsize=8.5)
    return figure


def _label(curve: Curve) -> str:
    name = curve.name if len(curve.name) <= 30 else f"…{curve.name[-29:]}"
    reached = curve.samples_to_target
    text = units.number(reached) if reached is not None else f"not reached, best {curve.best:.4f}"
    return f"{name}\n{text}" + (", published" if curve.published else "")


def _axes(axes: Axes, curves: list[Curve], wide: bool) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

    target = curves[0].target
    values = [auc for curve in curves for _, auc in curve.points]
    low, high = min([*values, target]), max([*values, target])
    room = (high - low or 0.1) * 0.06
    axes.set_ylim(low - room, high + room * 1.6)
    if wide:
        axes.set_xscale("log")
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.set_xlim(0, max(count for curve in curves for count, _ in curve.points) * 1.04 or 1)
        axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: units.number(value)))
    for name, spine in axes.spines.items():
        spine.set_visible(name == "bottom")
        spine.set_edgecolor(LINE)
    axes.tick_params(length=0, pad=6, labelsize=9, labelcolor=MUTED)
    axes.grid(axis="y", color=LINE, lw=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel("samples", color=MUTED, fontsize=9, loc="right")
    axes.axhline(target, color=INK, lw=1, ls=(0, (4, 3)))
    axes.annotate(
        f"target {target:g}", (0, target), (4, 4), xycoords=("axes fraction", "data"), textcoords="offset points",
        fontsize=9, color=INK,
    )  # fmt: skip


def _line(axes: Axes, curve: Curve, colour: str, dashes: str, wide: bool) -> list[Line2D]:
    points = [point for point in curve.points if point[0] > 0 or not wide]
    x, y = [count for count, _ in points], [auc for _, auc in points]
    alone: dict[str, Any] = {"marker": "o", "ms": 4} if len(points) == 1 else {}
    above = 3 if curve.published else 4
    drawn = axes.plot(x, y, color=colour, ls=dashes, lw=1.6 if curve.published else 2.2, zorder=above, **alone)
    reached = curve.samples_to_target
    if reached is not None:
        at = next(auc for count, auc in curve.points if count == reached)
        axes.plot(reached, at, "o", ms=7, mfc=colour, mec="white", mew=1.4, zorder=6)
    return drawn


def _png(figure: Figure) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    drawn = io.BytesIO()
    canvas: Any = FigureCanvasAgg(figure)
    canvas.print_png(drawn)
    return drawn.getvalue()


def rows(curves: list[Curve]) -> list[list[str]]:
    """The table of the curves; its first row is the head."""
    target = curves[0].target
    head = ["", "batch", "seed", "evaluations", "best AUC", f"samples to {target:g}", "epochs"]
    return [head, *(_row(curve) for curve in curves)]


def _row(curve: Curve) -> list[str]:
    reached, total = curve.samples_to_target, curve.train_samples
    return [
        curve.name + (" (published)" if curve.published else ""),
        f"{curve.global_batch_size:,}" if curve.global_batch_size is not None else "-",
        str(curve.seed) if curve.seed is not None else "-",
        f"{len(curve.points):,}",
        f"{curve.best:.4f}",
        f"{reached:,}" if reached is not None else "not reached",
        f"{reached / total:.4f}" if reached is not None and total else "-",
    ]


PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Convergence</title>
<style>
body {{ margin: 2rem auto; max-width: 62rem; padding: 0 1rem; font: 15px/1.5 system-ui, sans-serif; color: {ink}; }}
body {{ background: #fff; }}
svg {{ width: 100%; height: auto; }}
div {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .35rem .9rem .35rem 0; text-align: right; border-bottom: 1px solid {line}; white-space: nowrap; }}
th {{ font-weight: 500; color: {muted}; }}
th:first-child, td:first-child {{ text-align: left; }}
</style>
{figure}
<div><table>{table}</table></div>
</html>
"""


def page(curves: list[Curve], figure: str) -> str:
    """A page in one self-contained file."""
    head, *body = rows(curves)
    lines = ["".join(f"<th>{html.escape(cell)}</th>" for cell in head)]
    lines += ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in body]
    table = "".join(f"<tr>{line}</tr>" for line in lines)
    return PAGE.format(figure=figure[figure.index("<svg") :], table=table, ink=INK, muted=MUTED, line=LINE)
