"""`recperf data import --clicks | check | info` for a user's own clicks."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from time import monotonic

from msgspec.structs import asdict

from ...jsonfile import Struct
from ..user_files.text_rows import SkippedRows
from .columns import open_columns
from .encode import MANIFEST, ColumnFacts, read_manifest
from .imports import Progress, import_clicks
from .options import ClickOptions
from .vocabulary import read_vocabulary

_YEAR_US = 365 * 86_400_000_000


class ClickInfo(Struct, kw_only=True):
    """What is in a store of clicks."""

    name: str
    folder: str
    rows: int
    positives: int
    positive_share: float
    label_column: str
    label: str
    user: str | None
    item: str | None
    time: str | None
    first: str | None
    last: str | None
    left_out: dict[str, str]
    skipped_rows: SkippedRows | None
    min_count: int
    columns: dict[str, str]
    digest: str


class ClickImport(ClickInfo, kw_only=True):
    imported: bool
    """False: the store was there already."""
    seconds: float
    rows_per_s: int | None
    store_bytes: int
    next: str = ""
    """The command that trains on it."""


def make(options: ClickOptions, folder: Path, *, reading: Progress, rows: Progress) -> ClickImport:
    """Import a file, or reuse its import."""
    began, existed = monotonic(), (folder / MANIFEST).is_file()
    manifest = import_clicks(options, folder, reading=reading, writing_rows=rows)
    seconds = monotonic() - began
    return ClickImport(
        **asdict(info(folder)),
        imported=not existed,
        seconds=round(seconds, 2),
        rows_per_s=None if existed else round(manifest.rows / seconds),
        store_bytes=sum(file.stat().st_size for file in folder.iterdir()),
    )


def info(folder: Path) -> ClickInfo:
    """What is in a store, from its description."""
    manifest = read_manifest(folder)
    label, times = manifest.label, manifest.times
    threshold, rule = label.positive_from, ", ".join(label.positives or ("1", "true"))
    return ClickInfo(
        name=manifest.name,
        folder=str(folder),
        rows=manifest.rows,
        positives=manifest.positives,
        positive_share=manifest.positives / manifest.rows,
        label_column=label.name,
        label=f"a click: {rule}" if threshold is None else f"a click from {threshold:g} on",
        user=manifest.user,
        item=manifest.item,
        time=manifest.time,
        first=_date(times[0]) if times else None,
        last=_date(times[1]) if times else None,
        left_out=manifest.left_out,
        skipped_rows=manifest.skipped_rows,
        min_count=manifest.min_count,
        columns={one.name: _column(one, manifest.scale) for one in manifest.columns},
        digest=manifest.digest,
    )


def check(folder: Path) -> dict[str, object]:
    """Compare all arrays and vocabularies with their digests; damage is an error."""
    manifest = read_manifest(folder)
    for column in open_columns(folder, manifest.parts[0], manifest.layout).values():
        column.require(0, len(column))
    for one in manifest.columns:
        if one.vocabulary:
            read_vocabulary(folder, one.vocabulary)
    return {"name": manifest.name, "folder": str(folder), "intact": True, "rows": manifest.rows}


def _column(one: ColumnFacts, scale: str) -> str:
    if one.kind == "numeric":
        span = "" if one.least is None else f", {one.least:g} to {one.most:g}, {scale} scale"
        parts = [f"numeric{span}"]
    elif one.vocabulary is None:
        parts = [f"categorical, hashed to {one.buckets:,} rows"]
    else:
        parts = [f"categorical, {one.vocabulary.entries:,} categories"]
    if one.slots > 1:
        parts.append(f"up to {one.slots} in a row")
    if one.cut:
        parts.append(f"{one.cut:,} further ones left out")
    if one.missing:
        parts.append(f"{one.missing:,} missing")
    return ", ".join(parts)


def _date(microseconds: int) -> str:
    """A date; times of the first year after 1970 are numbers that count something else."""
    if not _YEAR_US < microseconds < 8000 * _YEAR_US:
        return f"{microseconds / 1e6:,g}"
    return datetime.fromtimestamp(microseconds / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%S")
