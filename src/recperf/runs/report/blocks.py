"""The blocks that a report is built from, and how a terminal shows them: as plain text, as wide as the terminal is.

Figures and timelines exist on pages only; `page.py` renders these.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

from ...units import WIDEST, width
from .formats import printable, short


@dataclass(frozen=True)
class Text:
    kind: ClassVar[str] = "text"
    text: str
    tone: str = ""
    """Empty, `lead`, `note`, `warning` or `missing`."""


@dataclass(frozen=True)
class Figure:
    """A plot, drawn only for a page."""

    kind: ClassVar[str] = "figure"
    label: str
    """What the figure shows, for readers who cannot see it."""
    caption: str
    draw: Callable[[], Any]
    """Returns the `Sheet` of `svg.py` that it is drawn on."""


@dataclass(frozen=True)
class Cell:
    text: str
    tone: str = ""
    """Empty, `strong`, `muted`, `good`, `bad` or `code`."""
    swatch: str = ""
    """Name of the colour that the row has in a figure."""
    faint: bool = False
    """Whether the figure uses the lighter shade."""
    second_line: str = ""
    """A smaller line below; beside the text in a terminal."""
    link: str = ""
    """Address that a page links the text to."""
    width: int = 0
    """Shorten the text to this many characters; the page shows the whole text on hover. 0: never shorten."""


@dataclass(frozen=True)
class Table:
    kind: ClassVar[str] = "table"
    head: tuple[str, ...]
    rows: list[tuple[Cell, ...]]
    caption: str = ""
    left: tuple[int, ...] = ()
    """Columns that hold text and are aligned to the left; the first always is."""
    fold: str = ""
    """The label behind which a page folds the table away; a terminal leaves a folded table out. Empty: always open."""
    top: int | None = None
    """How many rows are always visible: a page folds the others away, a terminal prints `rest` instead."""
    rest: str = ""
    """One sentence about the rows that are not always visible."""


@dataclass(frozen=True)
class Code:
    kind: ClassVar[str] = "code"
    label: str
    text: str


@dataclass(frozen=True)
class Viewer:
    """A trace that a page opens in Perfetto; a terminal names the file."""

    kind: ClassVar[str] = "viewer"
    file: str
    data: str = ""
    """The gzipped trace in base 64; empty where it is too large for a page, then the reader picks the file."""


@dataclass(frozen=True)
class Stretch:
    """A call in a timeline."""

    start: float
    """Percent of the step, as `width`."""
    width: float
    tone: str
    text: str
    """What a reader sees who points at it."""
    name: str = ""
    """Written onto it where it is wide enough; empty: other calls lie over it."""


@dataclass(frozen=True)
class Lane:
    name: str
    stretches: list[Stretch]


@dataclass(frozen=True)
class Timeline:
    """The calls of one step, on a page only."""

    kind: ClassVar[str] = "timeline"
    label: str
    caption: str
    us: float
    lanes: list[Lane]
    legend: list[tuple[str, str]]
    """What each colour stands for."""


Block = Text | Figure | Table | Code | Viewer | Timeline


@dataclass(frozen=True)
class Section:
    key: str
    title: str
    blocks: list[Block]
    fold: bool = False
    """Whether a page folds it away, below the sections that it shows."""


SHOWN = ("failed", "advice", "timeline", "shares", "ranks", "quality", "training")
"""Sections that a page shows, in this order; it folds the others."""


def arranged(sections: list[Section], shown: tuple[str, ...] = SHOWN) -> list[Section]:
    """The sections that matter first, then the others, which a page folds."""
    first = sorted((one for one in sections if one.key in shown), key=lambda one: shown.index(one.key))
    return [*first, *(replace(one, fold=True) for one in sections if one.key not in shown)]


@dataclass(frozen=True)
class Report:
    """The report of one run, profile, trace or plan. A terminal prints its title, subtitle and facts, and the sections
    only where it is asked for everything; a page shows all of it."""

    key: str
    title: str
    name: str
    subtitle: str
    verdict: str
    measured: bool
    """Whether the verdict rests on measurements."""
    command: str = ""
    """The command that would measure what was not."""
    picture: Figure | None = None
    """Between the verdict and the facts."""
    facts: list[tuple[str, str | Cell]] = field(default_factory=list)
    """What matters most, by name; an empty name continues the fact before it."""
    sections: list[Section] = field(default_factory=list)


def cells(*texts: Any) -> tuple[Cell, ...]:
    return tuple(text if isinstance(text, Cell) else Cell(str(text)) for text in texts)


def table_of(
    rows: Iterable[T],
    columns: Mapping[str, Callable[[T], Any]],
    caption: str = "",
    *,
    left: tuple[int, ...] = (),
    top: int | None = None,
    rest: str = "",
) -> Table:
    """A table with a row for every record; each column is its head and what it shows of a record."""
    lines = [cells(*(show(row) for show in columns.values())) for row in rows]
    return Table(tuple(columns), lines, caption, left, top=top, rest=rest)


def definitions(rows: list[tuple[str, str | Cell]]) -> Table:
    """A list of names with their values."""
    return Table(("", ""), [cells(name, value) for name, value in rows], left=(1,))


T = TypeVar("T")
LABEL = 10
"""Columns of the name of a fact, with the space behind it."""
LONGEST = 3 * WIDEST
"""Characters of a fact beyond which it is cut: a page has the whole."""


def render(report: Report, *, verbose: bool = False) -> str:
    """The title and the facts of a report; with `verbose` every section too."""
    lines = [f"{report.title} · {report.subtitle}", *fact_lines(report.facts)]
    return "\n".join([*lines, *(render_sections(report.sections) if verbose else [])])


def fact_lines(facts: Sequence[tuple[str, str | Cell]]) -> list[str]:
    """A line for each fact, or a few; code stays whole, so that it can be copied."""
    lines: list[str] = []
    for name, fact in facts:
        before, after = f"  {name:<{LABEL - 1}} ", " " * (LABEL + 2)
        if isinstance(fact, Cell):
            lines.append(before + printable(fact.text))
            continue
        rows = -(-LONGEST // width())
        lines += textwrap.wrap(
            printable(fact), width(), initial_indent=before, subsequent_indent=after, max_lines=rows, placeholder=" …",
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
    return lines


def render_sections(sections: Sequence[Section]) -> list[str]:
    """Every section under its title, with an empty line before each."""
    lines: list[str] = []
    for section in sections:
        if all(isinstance(block, Figure | Timeline) for block in section.blocks):
            continue
        lines += ["", section.title]
        first = len(lines)
        for block in section.blocks:
            rendered = render_block(block)
            if rendered and isinstance(block, Table) and len(lines) > first:
                lines.append("")
            lines += rendered
    return lines


def render_block(block: Block) -> list[str]:
    match block:
        case Text():
            return wrapped(f"WARNING: {block.text}" if block.tone == "warning" else block.text)
        case Table():
            return _table(block)
        case Code():
            return [*wrapped(f"{block.label}:"), f"    {printable(block.text)}"]
        case Viewer():
            return wrapped(f"Open {block.file} at https://ui.perfetto.dev; it is not uploaded.")
        case _:
            return []


def _table(table: Table) -> list[str]:
    if table.fold or not table.rows:
        return []
    rows = [[_cell_text(cell) for cell in row] for row in table.rows[: table.top]]
    head = [list(table.head)] if any(table.head) else []
    shorten = any(row[0].width for row in table.rows)
    lines = columns([*head, *rows], left=table.left, shorten_first=shorten)
    if table.top is not None and len(table.rows) > table.top:
        lines += wrapped(table.rest or f"{len(table.rows) - table.top} more rows.")
    return lines + (wrapped(table.caption) if table.caption else [])


def _cell_text(cell: Cell) -> str:
    text = short(cell.text, cell.width) if cell.width else printable(cell.text)
    return f"{text} {cell.second_line}" if cell.second_line else text


def wrapped(sentence: str, *, indent: int = 2) -> list[str]:
    space = " " * indent
    return textwrap.wrap(printable(sentence), width(), initial_indent=space, subsequent_indent=space + "  ")


def columns(rows: Sequence[Sequence[str]], *, left: tuple[int, ...] = (), shorten_first: bool = False) -> list[str]:
    """Aligned columns: the first and those in `left` to the left, numbers to the right.

    If the table is wider than the terminal, names in the first column are shortened if `shorten_first` is set, and the
    widest left-aligned column is wrapped.
    """
    aligned_left = {0, *left}
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    for shortest in (28, 16) if shorten_first else (16,):
        excess = 2 + sum(widths) + 2 * (len(widths) - 1) - width()
        widest = 0 if shortest == 28 else max(aligned_left, key=lambda index: widths[index])
        if excess > 0:
            widths[widest] = min(widths[widest], max(shortest, widths[widest] - excess))
    lines = []
    for row in rows:
        first = short(row[0], widths[0]) if shorten_first else row[0]
        cells = [_folded(cell, width) for cell, width in zip([first, *row[1:]], widths)]
        for number in range(max(map(len, cells))):
            parts = [cell[number] if number < len(cell) else "" for cell in cells]
            padded = (
                part.ljust(width) if index in aligned_left else part.rjust(width)
                for index, (part, width) in enumerate(zip(parts, widths))
            )
            lines.append(f"  {'  '.join(padded)}".rstrip())
    return lines


def _folded(cell: str, width: int) -> list[str]:
    return textwrap.wrap(cell, width) if len(cell) > width else [cell]
