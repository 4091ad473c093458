"""Renders reports as one HTML file that works offline: no other files, and two small scripts, which zoom
a timeline and hand a trace on.

Importing this module needs neither matplotlib nor jinja2; rendering does (`pip install 'recperf[pages]'`).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ...errors import MachineError
from ...files import write_atomic, writing
from ...version import __version__
from .blocks import Cell, Figure, Report, Section
from .formats import short
from .svg import NARROW, SETTINGS, WIDE, figure_width, require_matplotlib


def write(text: str, out: Path) -> Path:
    """Write a page; it appears whole or not at all."""
    try:
        with writing(out):
            out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(out, text.encode(errors="backslashreplace"))
    except MachineError as error:
        # The place of a page is chosen with another option than the place of a run.
        fix = error.fix.replace("--run-dir", "--out") if error.fix else None
        raise MachineError(error.what, where={"file": out}, fix=fix) from error
    return out


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
        raise MachineError("the report needs matplotlib and jinja2", fix="pip install 'recperf[pages]'") from None
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
