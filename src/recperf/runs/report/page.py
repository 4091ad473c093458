"""Renders reports as one HTML file that works offline: no other files, and two small scripts, which zoom a timeline and
hand a trace on. Figures are inline SVG; they take their colours and font from the page.

Importing this module does not need jinja2; rendering does.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...errors import MachineError
from ...files import write_atomic, writing
from ...outputs import is_page, output_file
from ...version import __version__
from .blocks import Cell, Figure, Report, Section
from .formats import short
from .svg import NARROW, WIDE, figure_width


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
    """Write the page of a report; a name in .svg asks for its picture: one step, or the models of a bench."""
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
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError:
        raise MachineError("the report needs jinja2", fix="pip install jinja2") from None
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

    sizes = []
    for width in (WIDE, NARROW):
        token = figure_width.set(width)
        sizes.append(figure.draw().markup(figure.label))
        figure_width.reset(token)
    return Markup("".join(sizes))


def shortened(cell: Cell) -> str:
    """The text of a cell. A long name is cut, shows the whole on hover, and may be broken at its separators."""
    from markupsafe import Markup

    if not cell.width:
        return cell.text
    shown = short(cell.text, cell.width)
    broken = Markup("<wbr>").join(re.findall(r"[^_:<]*[_:<]+|[^_:<]+", shown))
    return broken if shown == cell.text else Markup('<span title="{}">{}</span>').format(cell.text, broken)
