"""What store.json says about an event store."""

from __future__ import annotations

from typing import Any

from msgspec import field

from ...jsonfile import Struct, as_json
from ..blocks import StoredColumn
from ..files.text_rows import SkippedRows
from .options import ImportOptions


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


class ItemFileFacts(Struct):
    """A file of items that went with the events, and what was stored of it."""

    source: str
    sha256: str
    """Of the stored file."""
    items: int
    without: int
    """Items with events that the file does not have."""
    id: str
    title: str | None
    features: list[str]
    """Names of the columns that became features."""
    left_out: dict[str, str]
    """Other columns, and why."""


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
    unused_columns: list[str]
    recognised: dict[str, str] = field(default_factory=dict)
    """Roles whose columns no option named: name if by a usual name, values if by what is in the column."""
    time_order: str
    """The order of the events: time, or what a file without times was ordered by."""
    distinct: dict[str, int]
    """The number of different users, items, artists and albums."""
    events_in_file: int
    positive_share_in_file: float | None
    density: float
    events_per_user: dict[str, int]
    days: Days | None = None
    repeated: int = 0
    """Rows with the user, item, time and label of an earlier row."""
    skipped_rows: SkippedRows | None = None
    originals: dict[str, Originals] = field(default_factory=dict)
    negatives: DrawnNegatives | None = None
    item_file: ItemFileFacts | None = None
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
    by_type: dict[str, int] = field(default_factory=dict)
    by_pool: dict[str, int] = field(default_factory=dict)
    columns: dict[str, StoredColumn] = field(default_factory=dict)
    """Empty for a cache of the MLPerf reference."""
    digest: str = ""
    imported: ImportFacts | None = None
    """Only for a store that was imported."""

    def content(self) -> dict[str, Any]:
        """The content of store.json."""
        value: dict[str, Any] = as_json(self)
        value |= value.pop("imported", {})
        return value
