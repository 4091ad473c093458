"""recperf data import FILE: a user's own events, or with --clicks rows with a label; and what it says at its end."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ...data import datasets, importing
from ...data.config import SPLIT_FIELDS, EventSplitOptions, SplitOptions
from ...data.events.options import ImportOptions
from ...data.files.values import TIME_UNITS
from ...data.rows.options import ClickOptions
from ...errors import UsageError
from ...runs.record import runs_on
from ...terminal import Terminal, print_json
from ...workloads import proposed
from ..parse import SWITCHES, OutputOptions, parse
from .output import count_of, print_import, progress_bars

EVENTS = """Import your own events: a log of who took what, and when. FILE comes right after import.

With --clicks rows with a label are imported instead: recperf data import FILE --clicks --label COLUMN. Its options:
recperf data import --clicks --help."""
CLICKS = """Import your own clicks: rows with a label. FILE comes right after import, or after --clicks.

Without --clicks a log of events is imported: recperf data import FILE. Its options: recperf data import --help."""
TIME_NAMES = {"iso": "dates", **{unit: name for unit, (name, _) in TIME_UNITS.items()}}
MOST_UNUSED = 20
"""Columns without a use that the end of an import shows."""


@dataclass(frozen=True, kw_only=True)
class ImportEvents(ImportOptions, EventSplitOptions, OutputOptions):
    store: Path | None = None
    """Folder of the event store; default: one in the cache folder, which other commands find by the dataset's name."""
    replace: bool = False
    """Import the file in place of the dataset that has the name now; that one stays if the import fails."""


@dataclass(frozen=True, kw_only=True)
class ImportClicks(ClickOptions, SplitOptions, OutputOptions):
    store: Path | None = None
    """Folder of the rows; default: one in the cache folder, which other commands find by the dataset's name."""
    replace: bool = False
    """Import the file in place of the dataset that has the name now; that one stays if the import fails."""


def import_file(arguments: list[str]) -> int:
    is_clicks = any(argument.partition("=")[0] == "--clicks" for argument in arguments)
    kind, asked = ("clicks", ImportClicks) if is_clicks else ("events", ImportEvents)
    options: Any = parse(
        asked,
        _with_file(arguments, f"--{kind}"),
        prog="recperf data import",
        description=CLICKS if is_clicks else EVENTS,
    )
    asked_for = ClickOptions if is_clicks else ImportOptions
    values = {field.name: getattr(options, field.name) for field in fields(asked_for)}
    split = SplitOptions(**{name: getattr(options, name, None) for name in SPLIT_FIELDS})
    terminal = Terminal(as_json=options.json, quiet=options.quiet)
    before = runs_on(options.name, Path("runs")) if options.replace else []
    with progress_bars(terminal, resumable=False) as bar:
        facts = importing.import_file(
            asked_for(**values), split=split, store=options.store, replace=options.replace, progress=bar
        )
    model = proposed(datasets.at(Path(facts["folder"])))
    if before and facts["imported"]:
        note = f"runs of the dataset before, which can no longer be resumed or scored: {', '.join(before)}"
        facts["notes"] = [*facts.get("notes", ()), note]
    facts["next"] = f"recperf run {model} --data {shlex.quote(str(options.store or options.name))}"
    if options.json:
        print_json(facts)
    else:
        (_say_clicks if is_clicks else say_events)(facts, terminal)
    return 0


def _with_file(arguments: list[str], flag: str) -> list[str]:
    """The arguments of an import with the file as the value of --clicks or --events, wherever it stands."""
    if any(argument.startswith(f"{flag}=") for argument in arguments):
        return arguments
    following = arguments[arguments.index(flag) + 1 :][:1] if flag in arguments else []
    value = next((argument for argument in following if not argument.startswith("-")), None)
    # Only the first argument: further on it could be one of several values of an option.
    if arguments and not arguments[0].startswith("-"):
        if value is not None:
            raise UsageError(f"two files: {arguments[0]} and {value}", fix="import them one by one")
        return [flag, arguments[0], *(argument for argument in arguments[1:] if argument != flag)]
    if value is not None or SWITCHES & set(arguments):
        return arguments if value is not None else [argument for argument in arguments if argument != "--clicks"]
    what = "data import needs a file, right after import"
    raise UsageError(what, fix=f"recperf data import FILE{' --clicks' * (flag == '--clicks')} --name NAME")


def _say_clicks(facts: dict[str, Any], terminal: Terminal) -> None:
    days = (facts["first"].split()[0], facts["last"].split()[0]) if facts["first"] else None
    roles = {facts["user"]: "user, ", facts["item"]: "item, "}
    columns = {facts["label_column"]: f"label, {facts['label']}"}
    columns |= {facts["time"]: "time"} if facts["time"] else {}
    columns |= {name: roles.get(name, "") + text for name, text in facts["columns"].items()}
    columns |= {name: f"left out: {why}" for name, why in facts["left_out"].items()}
    print_import(
        facts,
        terminal,
        counts=f"{facts['rows']:,} rows, {facts['positives']:,} clicks ({facts['positive_share']:.1%})",
        dates=days,
        columns=columns,
        lines={
            "tables": f"categories of fewer than {facts['min_count']} training rows share a table row",
            "held out": facts["split"].text,
        },
        skipped=facts["skipped_rows"],
    )


def say_events(facts: dict[str, Any], terminal: Terminal) -> None:
    from ...data.events.store import read_manifest

    imported = read_manifest(Path(facts["folder"])).imported
    assert imported is not None
    days, per_user = imported.days, imported.events_per_user
    counts = f"{count_of(imported.events_in_file, 'event')} of {count_of(facts['users'], 'user')}"
    lines = dict(_recognition(imported))
    if facts["positive_share"] is not None:
        lines["positives"] = f"{facts['positive_share']:.1%} of {facts['labelled']:,} labelled events"
    lines["per user"] = f"{count_of(per_user['p50'], 'event')} (median), {per_user['min']:,} to {per_user['max']:,}"
    lines["held out"] = facts["split"].text
    print_import(
        facts,
        terminal,
        counts=f"{counts} and {count_of(facts['items'], 'item')}",
        dates=(days.first, days.last) if days else None,
        columns=dict(_columns(imported, facts["items_without"])),
        lines=lines,
        skipped=imported.skipped_rows,
    )


def _recognition(imported: Any) -> Iterator[tuple[str, str]]:
    """What was recognised without an option, and the options that change it."""
    columns, options = imported.options.columns, "--user, --item, --time, --rating or --label COLUMN"
    if imported.recognised:
        found = {"name": "by name", "values": "by its values"}
        for how, text in found.items():
            roles = [role for role, by in imported.recognised.items() if by == how]
            found[how] = f"{text}: {', '.join(f'{columns[role]} ({role})' for role in roles)}" if roles else ""
        yield "recognised", "; ".join(filter(None, found.values()))
        yield "otherwise", options + ("; --time none: it is no time" if "time" in imported.recognised else "")


def _columns(imported: Any, items_without: dict[str, int]) -> Iterator[tuple[str, str]]:
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
