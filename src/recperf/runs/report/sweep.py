"""The plot of a sweep: step time and the time of one part against the swept field, with their spread."""

from __future__ import annotations

from typing import Any

from ...measure.sections import swept_ms
from .svg import require_matplotlib, svg_text


def plot(sweep: dict[str, Any]) -> str:
    """The plot as an SVG file. With several swept fields, each combination is a tick on the axis."""
    require_matplotlib()
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    rows = sweep["rows"]
    names = list(rows[0]["settings"])
    labels = [", ".join(row["settings"].values()) for row in rows]
    numeric = len(names) == 1 and all(label.replace(".", "", 1).isdigit() for label in labels)
    x = [float(label) for label in labels] if numeric else list(range(len(rows)))
    with rc_context({"svg.hashsalt": "recperf", "svg.fonttype": "none"}):
        figure = Figure(figsize=(8, 4.5), layout="constrained")
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
