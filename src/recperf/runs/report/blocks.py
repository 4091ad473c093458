"""What a page is made of. The template knows how each looks; everything else only fills them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True)
class Text:
    kind: ClassVar[str] = "text"
    text: str
    tone: str = ""
    """Empty, `lead`, `note` or `warning`."""


@dataclass(frozen=True)
class Drawing:
    """A figure in two widths; the page shows the one that fits."""

    kind: ClassVar[str] = "drawing"
    wide: str
    narrow: str
    caption: str


@dataclass(frozen=True)
class Cell:
    text: str
    tone: str = ""
    """Empty, `strong`, `muted`, `good`, `bad` or `code`."""
    swatch: str = ""
    """Name of the colour that stands for the row in a figure."""
    faint: bool = False
    """Whether the figure draws it in the lighter shade."""
    aside: str = ""
    """A smaller line below."""


@dataclass(frozen=True)
class Table:
    kind: ClassVar[str] = "table"
    head: tuple[str, ...]
    rows: list[tuple[Cell, ...]]
    caption: str = ""
    fold: str = ""
    """Folded behind these words; empty: open."""
    words: tuple[int, ...] = ()
    """Columns that hold words, not numbers; the first always does."""


@dataclass(frozen=True)
class Missing:
    kind: ClassVar[str] = "missing"
    what: str
    command: str


@dataclass(frozen=True)
class Code:
    kind: ClassVar[str] = "code"
    label: str
    text: str


Block = Text | Drawing | Table | Missing | Code


@dataclass(frozen=True)
class Section:
    key: str
    title: str
    blocks: list[Block]


@dataclass(frozen=True)
class Tile:
    label: str
    value: str
    note: str


@dataclass(frozen=True)
class Badge:
    text: str
    tone: str
    """`good`, `bad`, `warning` or `plain`."""


@dataclass(frozen=True)
class RunView:
    key: str
    title: str
    name: str
    subtitle: str
    verdict: str
    measured: bool
    """Whether the verdict rests on measurements."""
    command: str
    """What would measure it."""
    badges: list[Badge] = field(default_factory=list)
    tiles: list[Tile] = field(default_factory=list)
    sections: list[Section] = field(default_factory=list)


def cells(*texts: Any) -> tuple[Cell, ...]:
    return tuple(text if isinstance(text, Cell) else Cell(str(text)) for text in texts)
