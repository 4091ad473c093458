"""What store.json says about an event store."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import field

from ...jsonfile import Struct, as_json
from ..blocks import StoredColumn
from ..files.text_rows import SkippedRows
from .options import ImportOptions, SideRole


class Days(Struct):
    first: str
    last: str


class DrawnNegatives(Struct):
    per_event: int
    by: str
    seed: int
    drawn: int
    left_out: int
    """Negatives that could not be drawn: their users have every item."""


class Originals(Struct):
    """A file with the ids of the imported file, one in a line."""

    file: str
    lines: int
    kind: str
    """text or number."""
    sha256: str


SideKind = Literal["category", "categories", "number", "text"]


class SideColumn(Struct):
    """A column of the table of items or users, by the user's name."""

    name: str
    kind: SideKind
    values: int
    """How many different ones there are."""
    edges: list[float]
    """Of a number: where one range of it ends and the next begins, so that all have about as many items."""


class SideTableFacts(Struct):
    """The table of items or users that goes with the events."""

    source: str | None
    """Name of its file; None: its columns are those of the events that do not change within an item."""
    sha256: str
    """Of the stored file."""
    rows: int
    without: int
    """Items or users with events of which it has no row."""
    id: str
    title: str | None
    columns: list[SideColumn]
    left_out: dict[str, str]
    """Other columns, and why they are not stored."""


class ContextFacts(Struct):
    """Further columns of the events, by the user's names, stored in the order of the events."""

    columns: dict[str, SideKind]
    left_out: dict[str, str]
    """Other columns that were asked for, and why they are not stored."""
    sha256: str


class RareIds(Struct):
    """Ids, or categories, that have fewer rows than `min_count`, so that some models have one row for all of them."""

    ids: int
    share: float
    """Of the events."""


class EarlierIds(Struct):
    """Ids without events that an earlier store had, after those of the store itself (earlier_ids.py)."""

    ids: dict[str, int]
    """How many there are of each role."""
    sha256: str
    """Of the file with the times of their last events."""


class ImportFacts(Struct, kw_only=True, omit_defaults=True, rename={"options": "import"}):
    """What an import recorded about its file. In store.json these fields stand beside those of the `Manifest`."""

    options: ImportOptions
    """With the columns that were recognised."""
    unused_columns: dict[str, str]
    """Columns of the file that serve nothing, and why where that is not plain."""
    recognised: dict[str, str] = field(default_factory=dict)
    """Roles whose columns no option named: name if by a usual name, values if by what is in the column."""
    time_order: str
    """The order of the events: time, or what a file without times was ordered by."""
    distinct: dict[str, int]
    """The number of different users and items."""
    events_in_file: int
    positive_share_in_file: float | None
    density: float
    events_per_user: dict[str, int]
    days: Days | None = None
    repeated: int = 0
    """Rows with the user, item and, where the file has them, time and label of an earlier row."""
    skipped_rows: SkippedRows | None = None
    originals: dict[str, Originals] = field(default_factory=dict)
    negatives: DrawnNegatives | None = None
    tables: dict[SideRole, SideTableFacts] = field(default_factory=dict)
    """What is known of each item and user, by role: item, user."""
    context: ContextFacts | None = None
    """Where further columns were asked for."""
    rare: dict[str, RareIds] = field(default_factory=dict)
    """By role, where there are some."""
    earlier: EarlierIds | None = None


class EventManifest(Struct, kw_only=True, omit_defaults=True):
    """What a store contains, and where it comes from."""

    name: str
    synthetic: bool
    licence: str
    format: str = ""
    version: int = 0
    size: str = ""
    """Size of the published dataset, such as 50m."""
    split: dict[str, int] | None = None
    config: dict[str, Any] | None = None
    """Of synthetic events."""
    identity: Any = None
    """What identifies the source."""
    events: int = 0
    users: int = 0
    items: int = 0
    first_time: int = 0
    last_time: int = 0
    largest_item: int = 0
    groups: list[str] = field(default_factory=list)
    """Names of the groups that items have as numbers."""
    by_kind: dict[str, int] = field(default_factory=dict)
    """The number of events with each byte, as kinds.py explains it."""
    columns: dict[str, StoredColumn] = field(default_factory=dict)
    """Empty for a cache of the MLPerf reference."""
    digest: str = ""
    imported: ImportFacts | None = None
    """Only for a store that was imported."""

    def count(self, bits: int) -> int:
        """The number of events with any of these bits."""
        return sum(count for kind, count in self.by_kind.items() if int(kind) & bits)

    def content(self) -> dict[str, Any]:
        """The content of store.json."""
        value: dict[str, Any] = as_json(self)
        value |= value.pop("imported", {})
        return value
