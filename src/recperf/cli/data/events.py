"""Listening events: get, prepare, check, info, make, import."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from ...data.user_files.values import TIME_UNITS
from ...data.yambda.import_options import ImportOptions
from ...errors import UsageError
from ..parse import OutputOptions
from ..terminal import Terminal
from .output import count_of, print_facts, print_import, progress_bars

if TYPE_CHECKING:
    from ...data.yambda.manifest import ImportFacts

SYNTHETIC = "yambda-like"
TIME_NAMES = {"iso": "dates", **{unit: name for unit, (name, _) in TIME_UNITS.items()}}
MOST_UNUSED = 20
"""Columns without a use that the end of an import shows."""


@dataclass(frozen=True, kw_only=True)
class Get(OutputOptions):
    name: tyro.conf.Positional[str]
    """Dataset: yambda-50m, yambda-500m or yambda-5b."""


@dataclass(frozen=True, kw_only=True)
class Prepare(OutputOptions):
    name: tyro.conf.Positional[str]
    """Dataset: yambda-50m, yambda-500m or yambda-5b."""
    path: Path | None = None
    """Folder of the raw files; default: what `recperf data get` downloaded."""
    store: Path | None = None
    """Folder of the event store; default: in the cache folder."""


@dataclass(frozen=True, kw_only=True)
class Check(OutputOptions):
    name: tyro.conf.Positional[str]
    """Dataset: yambda-50m, yambda-500m, yambda-5b, yambda-like, or one you imported."""
    path: Path | None = None
    """A store, or a cache of the MLPerf reference; default: in the cache folder."""


@dataclass(frozen=True, kw_only=True)
class Info(Check):
    min_history: int | None = None
    """Minimum number of a user's events before an anchor; default: 4086, or 100 if most users have fewer events."""
    window_seconds: int = 86_400
    """Length of a time window in seconds."""


@dataclass(frozen=True, kw_only=True)
class Make(OutputOptions):
    name: tyro.conf.Positional[str]
    """Dataset: yambda-like."""
    path: Path | None = None
    """Folder to write; existing files are not changed."""
    events: int | None = None
    """Approximate number of events; default: that of the embedded dataset, about 300,000."""
    seed: int = 7
    """Seed of the synthetic data."""


@dataclass(frozen=True, kw_only=True)
class Import(ImportOptions, OutputOptions):
    store: Path | None = None
    """Folder of the event store; default: one in the cache folder, which other commands find by the dataset's name."""


OPTIONS: dict[str, Any] = {
    "get": Get,
    "prepare": Prepare,
    "check": Check,
    "info": Info,
    "make": Make,
    "import": Import,
}


def perform(action: str, options: Any, terminal: Terminal) -> dict[str, Any]:
    from ...data.yambda import catalogue

    with progress_bars(terminal, resumable=action in ("prepare", "make", "get")) as bar:
        if action == "get":
            return _get(options, terminal)
        if action == "prepare":
            return catalogue.prepare(options.name, path=options.path, store=options.store, progress=bar)
        if action == "check":
            return catalogue.check(options.name, path=options.path, progress=bar, say=terminal.say)
        if action == "info":
            return _info(options, terminal)
        if action == "make":
            return _make(options, bar("generating"))
        values = {field.name: getattr(options, field.name) for field in fields(ImportOptions)}
        from ...data.yambda.imports import import_dataset

        return import_dataset(
            ImportOptions(**values), options.store or catalogue.store_folder(options.name), progress=bar
        )


def _get(options: Get, terminal: Terminal) -> dict[str, object]:
    from ...data.yambda import download

    if options.name == SYNTHETIC:
        what = f"{SYNTHETIC} is generated locally: there is nothing to download"
        raise UsageError(what, fix=f"recperf data make {SYNTHETIC} --path FOLDER writes it as files")
    size = options.name.removeprefix("yambda-")
    facts = download.get(size, say=terminal.say, bars=terminal.live)
    return {"name": options.name, **facts}


def _info(options: Info, terminal: Terminal) -> dict[str, object]:
    from ...data.yambda import catalogue
    from ...data.yambda.config import WindowConfig

    store = catalogue.find(options.name, path=options.path, say=terminal.say)
    least = catalogue.usual_history(store) if options.min_history is None else options.min_history
    return catalogue.describe(store, WindowConfig(seconds=options.window_seconds, min_history=least))


def _make(options: Make, progress: Callable[[int, int], None]) -> dict[str, object]:
    from ...data.yambda import catalogue
    from ...data.yambda.yambda_like import YambdaLike, of_size

    if options.name != SYNTHETIC:
        raise UsageError(f"{options.name} is real data and cannot be generated", fix=f"recperf data get {options.name}")
    if options.path is None:
        raise UsageError(
            "data make needs --path, the folder to write", fix=f"recperf data make {options.name} --path DIR"
        )
    config = YambdaLike(seed=options.seed) if options.events is None else of_size(options.events, seed=options.seed)
    return catalogue.make(config, path=options.path, progress=progress)


def say(facts: dict[str, Any], terminal: Terminal) -> None:
    if "imported" in facts:
        _say_import(facts, terminal)
        return
    if "days_of_events" in facts:
        facts = {name: value for name, value in facts.items() if name not in ("first_time", "last_time")}
        facts["windows"] = {
            name: day(value) if value is not None and name.endswith("anchor") else value
            for name, value in facts["windows"].items()
        }
    for part in ("raw", "store"):
        if isinstance(facts.get(part), dict):
            facts |= {f"{part}_{name}": value for name, value in facts.pop(part).items()}
    print_facts(facts, terminal)


def day(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).date().isoformat()


def _say_import(facts: dict[str, Any], terminal: Terminal) -> None:
    from ...data.yambda.store import read_manifest

    imported = read_manifest(Path(facts["folder"])).imported
    assert imported is not None
    days, per_user = imported.days, imported.events_per_user
    counts = f"{count_of(imported.events_in_file, 'event')} of {count_of(facts['users'], 'user')}"
    lines = {}
    if facts["positive_share"] is not None:
        lines["positives"] = f"{facts['positive_share']:.1%} of {facts['labelled']:,} labelled events"
    lines["per user"] = f"{count_of(per_user['p50'], 'event')} (median), {per_user['min']:,} to {per_user['max']:,}"
    begin = f", from {days.held_out_from} on" if days else ""
    lines["held out"] = f"by default the last fifth, about {facts['held_out']:,} events{begin}"
    print_import(
        facts,
        terminal,
        counts=f"{counts} and {count_of(facts['items'], 'item')}",
        dates=(days.first, days.last) if days else None,
        columns=dict(_columns(imported, facts["items_without"])),
        lines=lines,
        skipped=imported.skipped_rows,
    )


def _columns(imported: ImportFacts, items_without: dict[str, int]) -> Iterator[tuple[str, str]]:
    """The columns of the file that were used, and what became of each."""
    options, distinct = imported.options, imported.distinct
    groups = {}
    for role in ("artist", "album"):
        if f"{role}s" in distinct:
            missing = items_without[f"{role}s"]
            without = f" ({count_of(missing, 'item')} without)" if missing else ""
            groups[role] = count_of(distinct[f"{role}s"], role) + without
    texts = {
        "user": f"user, {distinct['users']:,} different",
        "item": f"item, {distinct['items']:,} different",
        "time": f"time, in {TIME_NAMES.get(options.time_unit, 'seconds')}",
        "rating": f"rating, positive from {options.positive_from or 0:g} on",
        "label": f"label, positive: {', '.join(options.positives or ('1', 'true'))}",
        "genres": f"genres, the first is the artist and the set of all the album: {', '.join(groups.values())}",
        **groups,
    }
    yield from ((options.columns[role], text) for role, text in texts.items() if role in options.columns)
    if file := imported.item_file:
        parts = [f"id {file.id}", f"title {file.title}" if file.title else "", ", ".join(["features", *file.features])]
        yield file.source, "; ".join(filter(None, parts if file.features else parts[:2]))
    unused = imported.unused_columns
    yield from ((name, "not used") for name in unused[:MOST_UNUSED])
    if len(unused) > MOST_UNUSED:
        yield "...", f"{len(unused) - MOST_UNUSED:,} more columns not used"
