"""`recperf data import --clicks | check | info` for a user's own clicks; each returns plain values."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any

from ...config import from_json
from .columns import open_columns
from .encode import MANIFEST, ColumnFacts, layout_of, read_manifest
from .imports import Progress, import_clicks
from .options import ClickOptions
from .vocabulary import read_vocabulary

_YEAR_US = 365 * 86_400_000_000


def make(options: ClickOptions, folder: Path, *, reading: Progress, rows: Progress) -> dict[str, Any]:
    """Import a file, or reuse its import."""
    began, existed = monotonic(), (folder / MANIFEST).is_file()
    manifest = import_clicks(options, folder, reading=reading, writing_rows=rows)
    seconds = monotonic() - began
    return {
        **info(folder),
        "imported": not existed,
        "seconds": round(seconds, 2),
        "rows_per_s": None if existed else round(manifest["rows"] / seconds),
        "store_bytes": sum(file.stat().st_size for file in folder.iterdir()),
    }


def info(folder: Path) -> dict[str, Any]:
    """What is in a store, from its description."""
    manifest = read_manifest(folder)
    label, times = manifest["label"], manifest["times"]
    threshold, rule = label["positive_from"], ", ".join(label.get("positives") or ("1", "true"))
    return {
        "name": manifest["name"],
        "folder": str(folder),
        "rows": manifest["rows"],
        "positives": manifest["positives"],
        "positive_share": manifest["positives"] / manifest["rows"],
        "label_column": label["name"],
        "label": f"a click: {rule}" if threshold is None else f"a click from {threshold:g} on",
        **{role: manifest[role] for role in ("user", "item", "time")},
        "first": _date(times[0]) if times else None,
        "last": _date(times[1]) if times else None,
        "left_out": manifest["left_out"],
        "skipped_rows": manifest.get("skipped_rows"),
        "min_count": manifest["min_count"],
        "columns": {one["name"]: _column(from_json(ColumnFacts, one), manifest) for one in manifest["columns"]},
        "digest": manifest["digest"],
    }


def check(folder: Path) -> dict[str, Any]:
    """Compare all arrays and vocabularies with their digests; damage is an error."""
    manifest = read_manifest(folder)
    facts = [from_json(ColumnFacts, one) for one in manifest["columns"]]
    layout = layout_of(facts, times=manifest["times"] is not None)
    for column in open_columns(folder, manifest["parts"][0], layout).values():
        column.require(0, len(column))
    for one in facts:
        if one.vocabulary:
            read_vocabulary(folder, one.vocabulary)
    return {"name": manifest["name"], "folder": str(folder), "intact": True, "rows": manifest["rows"]}


def _column(one: ColumnFacts, manifest: dict[str, Any]) -> str:
    if one.kind == "numeric":
        parts = (
            [f"numeric, {one.least:g} to {one.most:g}, {manifest['scale']} scale"]
            if one.least is not None
            else ["numeric"]
        )
    elif one.vocabulary is None:
        parts = [f"categorical, hashed to {one.buckets:,} rows"]
    else:
        entries = one.vocabulary["entries"]
        parts = [f"categorical, {entries:,} categories"]
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
