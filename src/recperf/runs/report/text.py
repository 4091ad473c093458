"""Renders reports and blocks as plain text, as wide as the terminal is. Figures exist on pages only."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from ...units import WIDEST, width
from .blocks import Block, Cell, Code, Figure, Report, Section, Table, Text, Timeline, Viewer
from .formats import printable, short

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
        before, after = f"  {name:<{LABEL}}", " " * (LABEL + 2)
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
