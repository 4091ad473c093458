"""A figure of an event store: activity of users, popularity of items, events per day, anchors per window."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ... import units
from ...errors import MachineError, UsageError
from ...files import writing

SUFFIXES = (".svg", ".png", ".pdf")
_INK, _BAR, _LINE = "#1f2933", "#3b7dd8", "#c8d0d9"


def draw(statistics: dict[str, Any], path: Path) -> None:
    """Draw the result of `describe` as four panels; the suffix of the file decides the format."""
    kind = path.suffix.lower()
    if kind not in SUFFIXES:
        raise UsageError(f"cannot draw {path.name}: a plot is one of {', '.join(SUFFIXES)}", fix="--plot events.svg")
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise MachineError("the plot needs matplotlib", fix="pip install 'recperf[report]'") from None
    settings: Any = {
        "svg.fonttype": "none", "svg.hashsalt": "recperf", "font.size": 9, "axes.edgecolor": _LINE,
        "axes.labelcolor": _INK, "xtick.color": _INK, "ytick.color": _INK, "text.color": _INK,
        "axes.spines.top": False, "axes.spines.right": False, "text.parse_math": False,
    }  # fmt: skip
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(10, 6.4), layout="constrained")
        synthetic = ", synthetic" if statistics["synthetic"] else ""
        figure.suptitle(
            f"{statistics['name']}{synthetic}: {statistics['events']:,} events of {statistics['users']:,} users, "
            f"{statistics['items_with_events']:,} items",
            fontsize=12,
        )
        panels = figure.subplots(2, 2)
        _users(panels[0, 0], statistics)
        _items(panels[0, 1], statistics)
        _days(panels[1, 0], statistics)
        _anchors(panels[1, 1], statistics)
        with writing(path, fix="choose another file with --plot"):
            figure.savefig(path, format=kind[1:], metadata={"Date": None} if kind == ".svg" else None, dpi=120)


def _plain(axis: Any, low: float = 0, high: float = 0) -> None:
    """Tick labels as plain numbers; matplotlib's own need its math text, which is off because names may contain $.

    `low` and `high` are the ends of a logarithmic axis; a short one has labels between powers of ten too.
    """
    from matplotlib.ticker import LogLocator, MaxNLocator

    if high < 8 * low or not low:
        axis.set_major_locator(MaxNLocator(6, integer=True, steps=(1, 2, 5, 10)))
    elif high < 300 * low:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(lambda value, _: units.number(value))
    axis.set_minor_formatter(lambda value, _: "")


def _steps(axes: Any, values: Any, message: str) -> None:
    """A filled step for each value; a message if there are none."""
    if not len(values):
        axes.set(xticks=[], yticks=[])
        axes.annotate(message, (0.5, 0.5), xycoords="axes fraction", ha="center", va="center")
        return
    axes.stairs(values, fill=True, color=_BAR, linewidth=0)
    axes.set(xlim=(0, len(values)), ylim=(0, None))
    if len(values) < 10:
        # Few steps are labelled in their middle.
        axes.set_xticks(np.arange(len(values)) + 0.5, [str(step) for step in range(len(values))])
    _plain(axes.yaxis)


def _users(axes: Any, statistics: dict[str, Any]) -> None:
    lengths = statistics["plot"]["user_lengths"]
    edges = np.geomspace(1, max(2, lengths.max() + 1), 40)
    axes.hist(lengths, bins=edges, color=_BAR)
    axes.set(xscale="log", title="Events per user", xlabel="events of a user", ylabel="users")
    axes.margins(y=0.25)
    _plain(axes.xaxis, 1, lengths.max())
    _plain(axes.yaxis)
    least = statistics["anchors"]["min_history"]
    if 0 < least < lengths.max():
        axes.axvline(least, color=_INK, linewidth=1, linestyle="--")
        axes.annotate(
            f"{statistics['anchors']['users_with_enough']:,} users past {least:,}",
            (least, 0.97), xycoords=("data", "axes fraction"), xytext=(4, 0), textcoords="offset points", va="top",
        )  # fmt: skip


def _items(axes: Any, statistics: dict[str, Any]) -> None:
    counts = statistics["plot"]["item_events"]
    # 400 points are enough; millions would make the file large.
    ranks = np.unique(np.geomspace(1, len(counts), 400).astype(np.int64))
    axes.plot(ranks, counts[ranks - 1], color=_BAR, marker="o" if len(counts) == 1 else None)
    share = statistics["top_items_share"]
    axes.set(
        xscale="log", yscale="log", xlabel="item rank", ylabel="events",
        title=f"Items by popularity: the top 1 % have {100 * share:.0f} %",
    )  # fmt: skip
    if counts[-1] == counts[0]:
        axes.set_ylim(counts[0] / 2, counts[0] * 2)
    _plain(axes.xaxis, 1, len(counts))
    _plain(axes.yaxis, counts[-1], counts[0])


def _days(axes: Any, statistics: dict[str, Any]) -> None:
    by_day = statistics["plot"]["events_by_day"]
    axes.set(title="Events per day", xlabel="day", ylabel="events")
    _steps(axes, by_day, "no events")


def _anchors(axes: Any, statistics: dict[str, Any]) -> None:
    anchors = statistics["plot"]["anchors_by_window"]
    total, least = statistics["anchors"]["total"], statistics["anchors"]["min_history"]
    axes.set(
        title=f"{total:,} anchors with at least {least:,} earlier events",
        xlabel=f"window of {statistics['windows']['seconds']:,} s", ylabel="anchors",
    )  # fmt: skip
    _steps(axes, anchors, f"no listen has {least:,} earlier events")
