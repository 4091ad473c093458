"""Renders reports as one HTML file that works offline: no other files, and two small scripts, which zoom a timeline and
hand a trace on. Figures are drawn by matplotlib as inline SVG; they take their colours and font from the page.

Importing this module needs neither matplotlib nor jinja2; rendering does.
"""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import MachineError
from ...files import write_atomic, writing
from ...outputs import is_page, output_file
from ...version import __version__
from .blocks import Cell, Figure, Report, Section
from .formats import short

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def place_of(out: Path, *, force: bool = False, endings: Sequence[str] = (".html",)) -> Path:
    """Where the page is written that a user wants in `out`: a new file, or with `force` any, or a page of recperf."""
    return output_file(out, endings=endings, ours=is_page, what="a page", force=force)


def write(text: str, out: Path, *, force: bool = False, endings: Sequence[str] = (".html",)) -> Path:
    """Write a page; it appears whole or not at all."""
    place = place_of(out, force=force, endings=endings)
    try:
        with writing(place):
            place.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(place, text.encode(errors="backslashreplace"))
    except MachineError as error:
        # The place of a page is chosen with another option than the place of a run.
        fix = error.fix.replace("--run-dir", "--out") if error.fix else None
        raise MachineError(error.what, where={"file": out}, fix=fix) from error
    return out


def save(report: Report, out: Path, *, force: bool = False) -> Path:
    """Write the page of a report; a name in .svg asks for the picture of its step."""
    if out.suffix == ".svg":
        from .timeline import picture_of

        return write(picture_of(report), out, force=force, endings=(".svg",))
    return write(html_of(report), out, force=force)


def html_of(report: Report) -> str:
    return render(f"{report.title}: {report.name}" if report.name else report.title, [report])


def framed(report: Report) -> str:
    """The page of a report for a notebook."""
    return frame_of(html_of(report))


def frame_of(page: str) -> str:
    """A page inside a frame, so that its styles do not reach the notebook."""
    return f'<iframe srcdoc="{html.escape(page, quote=True)}" style="width:100%;height:640px;border:0"></iframe>'


def render(
    title: str,
    reports: list[Report],
    *,
    comparison: list[Section] | None = None,
    summary: str | None = None,
    kinds: str = "runs",
) -> str:
    """The page of one report, or of several below a comparison."""
    compared = {"several": comparison is not None, "comparison": comparison, "summary": summary, "kinds": kinds}
    return fill("template.html.j2", title=title, runs=reports, **compared)


def fill(template: str, **values: Any) -> str:
    """The text of a template of this folder."""
    text: str = _environment().get_template(template).render(version=__version__, **values)
    return text


def _environment() -> Any:
    """Jinja with escaping of all text, and an error on names that are not defined."""
    require_matplotlib()
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError:
        raise MachineError("the report needs matplotlib and jinja2", fix="pip install matplotlib jinja2") from None
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["drawn"] = drawn
    environment.filters["shortened"] = shortened
    return environment


def drawn(figure: Figure) -> str:
    """The figure as SVG markup, for a screen and for a phone."""
    from markupsafe import Markup

    drawn = []
    with require_matplotlib().rc_context(SETTINGS):
        for width in (WIDE, NARROW):
            token = figure_width.set(width)
            drawn.append(figure.draw().markup(f"{figure.key}-{width}", figure.label))
            figure_width.reset(token)
    return Markup("".join(drawn))


def shortened(cell: Cell) -> str:
    """The text of a cell. A long name is cut, shows the whole on hover, and may be broken at its separators."""
    from markupsafe import Markup

    if not cell.width:
        return cell.text
    shown = short(cell.text, cell.width)
    broken = Markup("<wbr>").join(re.findall(r"[^_:<]*[_:<]+|[^_:<]+", shown))
    return broken if shown == cell.text else Markup('<span title="{}">{}</span>').format(cell.text, broken)


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
        raise MachineError("the report needs matplotlib and jinja2", fix="pip install matplotlib jinja2") from None
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
        """The figure as an element without a date, so that the same numbers give the same text; ids start with the key,
        so that two figures on a page never clash."""
        from matplotlib.backends.backend_svg import FigureCanvasSVG

        drawn = io.StringIO()
        canvas: Any = FigureCanvasSVG(self.figure)
        canvas.print_svg(drawn, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
        return _inline(drawn.getvalue(), key, label, self.width, self.height)


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
