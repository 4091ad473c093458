"""The blocks that a report is built from: `text.py` renders them for a terminal, `page.py` as HTML."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from .svg import Sheet


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
    key: str
    """Starts the ids inside the figure, so that two figures on a page never clash."""
    label: str
    """What the figure shows, for readers who cannot see it."""
    caption: str
    draw: Callable[[], Sheet]


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
class Tile:
    """One headline number of a page."""

    label: str
    value: str
    note: str


@dataclass(frozen=True)
class Badge:
    text: str
    tone: str
    """`good`, `bad`, `warning` or `plain`."""


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
    """The command that would measure the verdict."""
    badges: list[Badge] = field(default_factory=list)
    facts: list[tuple[str, str | Cell]] = field(default_factory=list)
    """What matters most, by name; an empty name continues the fact before it."""
    tiles: list[Tile] = field(default_factory=list)
    sections: list[Section] = field(default_factory=list)


def cells(*texts: Any) -> tuple[Cell, ...]:
    return tuple(text if isinstance(text, Cell) else Cell(str(text)) for text in texts)


def definitions(rows: list[tuple[str, str | Cell]]) -> Table:
    """A list of names with their values."""
    return Table(("", ""), [cells(name, value) for name, value in rows], left=(1,))
