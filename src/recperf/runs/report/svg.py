"""Draws inline SVG with matplotlib; the figures take their colours and font from the page.

Placeholder colours are replaced by CSS variables, so that a figure works in light and dark mode.
"""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from ...errors import MachineError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as MatplotlibFigure

WIDE, NARROW = 880, 350
"""Pixels across a figure; a page has both, and a phone shows the narrow one."""
figure_width: ContextVar[int] = ContextVar("figure_width", default=WIDE)

FAMILIES = ("data", "hash", "bottom", "embedding", "interaction", "top", "loss", "backward", "update", "sparse")
EXTRA = ("extra-1", "extra-2", "extra-3")
KNOWN = {
    "dense_update": "update", "sparse_update": "sparse", "optimizer": "update", "exchange": "extra-2",
    "own work": "accent", "waiting for a rank": "loss", "waiting for bytes": "extra-2", "waiting": "extra-2",
}  # fmt: skip
"""Names that share the colour of another name."""
TONES = ("ink", "muted", "line", "surface", "on-fill", "accent", "good", "bad", "other", *FAMILIES, *EXTRA)
"""Every colour of a figure; style.css defines each for light and for dark mode."""

SETTINGS = {
    "svg.hashsalt": "recperf",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "axes.unicode_minus": False,
    "text.parse_math": False,
}
"""Settings while a figure is drawn; without math, a dollar in a run's name stays a dollar."""


def tone(name: str) -> str:
    """A stand-in for a colour: the page replaces it by a variable of its style, which follows light and dark mode."""
    return f"#fe00{TONES.index(name):02x}"


def family(component: str) -> tuple[str, bool]:
    """The colour of a component, and whether it is light: a backward pass has the hue of its forward pass."""
    if component == "backward":
        return "backward", False
    head = component.removesuffix("_backward")
    known = KNOWN.get(head.rpartition("_")[2] if head.endswith("_exchange") else head, head)
    if known not in TONES:
        # An unknown name gets the same colour in every run.
        known = EXTRA[sum(known.encode()) % len(EXTRA)]
    return known, head != component


def require_matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise MachineError("the report needs matplotlib and jinja2", fix="pip install 'recperf[pages]'") from None
    return matplotlib


def columns_of(panels: int) -> int:
    """How many panels of a figure are side by side."""
    return panels if figure_width.get() == WIDE else 1


class Sheet:
    """A figure with coordinates in pixels from its top left corner."""

    def __init__(self, height: int) -> None:
        from matplotlib.figure import Figure

        self.width, self.height = figure_width.get(), height
        self.figure = Figure(figsize=(self.width / 72, height / 72), dpi=72, frameon=False)

    def axes(self, left: float, top: float, right: float, bottom: float) -> Axes:
        """Empty axes between four margins."""
        from matplotlib.ticker import NullLocator

        across, upward = self.width - left - right, self.height - top - bottom
        axes = self.figure.add_axes(
            (left / self.width, bottom / self.height, across / self.width, upward / self.height)
        )
        axes.patch.set_visible(False)
        for name, spine in axes.spines.items():
            spine.set_visible(name == "bottom")
            spine.set_edgecolor(tone("line"))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_minor_locator(NullLocator())
            axis.set_major_locator(NullLocator())
        axes.tick_params(length=0, pad=6, labelsize=11, labelcolor=tone("muted"))
        axes.set_axisbelow(True)
        return axes

    def text(self, x: float, y: float, text: str, *, color: str = "muted", size: float = 11, **more: Any) -> None:
        """Draw text at a pixel."""
        self.figure.text(x / self.width, 1 - y / self.height, text, color=tone(color), fontsize=size, **more)

    def markup(self, key: str, label: str) -> str:
        """The figure as an element; ids start with the key, so that two figures on a page never clash."""
        return _inline(svg_text(self.figure), key, label, self.width, self.height)


def svg_text(figure: MatplotlibFigure) -> str:
    """A figure as an SVG file without a date, so that the same numbers give the same text."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    drawn = io.StringIO()
    canvas: Any = FigureCanvasSVG(figure)
    canvas.print_svg(drawn, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return drawn.getvalue()


def _inline(drawn: str, key: str, label: str, width: int, height: int) -> str:
    body = drawn[drawn.index(">", drawn.index("<svg")) + 1 :]
    # Matplotlib's style rule would apply to every element of the page.
    body = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", body, count=1, flags=re.S)
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.S)
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', body))
    # Only tags are rewritten: the text between them comes from the run.
    body = re.sub(r"<[^>]+>", lambda match: _tag(match[0], key, used), body)
    body = re.sub(r"\s*\n\s*", " ", body).strip()
    size = "narrow" if width == NARROW else "wide"
    head = f'<svg class="figure {size}" role="img" aria-label="{html.escape(label)}" viewBox="0 0 {width} {height}"'
    return f'{head} data-width="{width}">{body}'


def _tag(tag: str, key: str, used: set[str]) -> str:
    tag = re.sub(r' id="([^"]+)"', lambda m: f' id="{key}-{m[1]}"' if m[1] in used else "", tag)
    tag = tag.replace('xlink:href="#', f'href="#{key}-').replace("url(#", f"url(#{key}-")
    tag = re.sub(r"font-family: [^;\"]*;? ?", "", tag)
    tag = re.sub(r"#fe00([0-9a-f]{2})", lambda m: f"var(--{TONES[int(m[1], 16)]})", tag)
    tag = re.sub(r' transform="rotate\(-?0 [^"]*"', "", tag)
    return re.sub(r"(\d+\.\d\d)\d+", r"\1", tag)


def ticks(axes: Axes, which: str, at: Sequence[float], show: Callable[[float], str], *, grid: bool = False) -> None:
    axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = sorted(axes.get_xlim() if which == "x" else axes.get_ylim())
    inside = [value for value in at if low - 1e-12 <= value <= high + 1e-12]
    axis.set_ticks(inside, [show(value) for value in inside])
    if grid:
        axes.grid(axis="x" if which == "x" else "y", color=tone("line"), lw=0.8)


def evenly(values: Sequence[float]) -> Callable[[float], str]:
    """A format with as many decimals as the finest of the values needs."""
    digits = next((d for d in range(5) if all(abs(round(v, d) - v) < 1e-9 for v in values)), 5)
    return lambda value: f"{value:,.{digits}f}"


def decades(low: float, high: float, most: int) -> list[float]:
    """Exponents of the powers of ten in a range, at most `most`."""
    inside = list(range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1))
    return [float(value) for value in inside[:: max(1, math.ceil(len(inside) / most))]]


def round_steps(low: float, high: float, most: int) -> list[float]:
    """Round numbers in a range."""
    from matplotlib.ticker import MaxNLocator

    return [float(v) for v in MaxNLocator(most, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high) if low <= v <= high]
