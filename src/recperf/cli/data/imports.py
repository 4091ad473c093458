"""recperf data import FILE: a user's own events, or with --clicks rows with a label; and what it says at its end."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ...data import datasets, importing
from ...data.config import SPLIT_FIELDS, EventSplitOptions, SplitOptions
from ...data.events.manifest import SideColumn
from ...data.events.options import ImportOptions
from ...data.files.values import TIME_UNITS
from ...data.rows.options import ClickOptions
from ...errors import UsageError
from ...learn.leaks import after_import
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
"""Columns without a use, or of another file, that the end of an import shows."""


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
    if facts["imported"]:
        facts["notes"] = [*facts.get("notes", ()), *after_import(kind, Path(facts["folder"]))]
    facts["next"] = f"recperf run {model} --data {shlex.quote(str(options.store or options.name))}"
    if options.json:
        print_json(facts)
    else:
        (say_clicks if is_clicks else say_events)(facts, terminal)
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


def say_clicks(facts: dict[str, Any], terminal: Terminal) -> None:
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
            "tables": f"rare categories, of fewer than {facts['min_count']} training rows, share a table row; "
            "--min-count 1 gives each its own",
            "held out": facts["split"].text,
        },
        skipped=facts["skipped_rows"],
    )


def say_events(facts: dict[str, Any], terminal: Terminal) -> None:
    from ...data.events.store import read_manifest

    manifest = read_manifest(Path(facts["folder"]))
    imported = manifest.imported
    assert imported is not None
    days, per_user = imported.days, imported.events_per_user
    counts = f"{count_of(imported.events_in_file, 'event')} of {count_of(facts['users'], 'user')}"
    lines = dict(_recognition(imported))
    if facts["positive_share"] is not None:
        lines["positives"] = f"{facts['positive_share']:.1%} of {facts['labelled']:,} labelled events"
    lines["per user"] = f"{count_of(per_user['p50'], 'event')} (median), {per_user['min']:,} to {per_user['max']:,}"
    if rare := " and ".join(_rare(imported)):
        few = f"have fewer than {imported.options.min_count} events"
        lines["rare"] = f"{rare} {few}: dlrm and micro-dlrm give them one row, --min-count 1 each its own"
    lines["held out"] = facts["split"].text
    if manifest.licence != ImportOptions.licence:
        lines["licence"] = manifest.licence
    print_import(
        facts,
        terminal,
        counts=f"{counts} and {count_of(facts['items'], 'item')}",
        dates=(days.first, days.last) if days else None,
        columns=dict(_columns(imported)),
        lines=lines,
        skipped=imported.skipped_rows,
    )


def _recognition(imported: Any) -> Iterator[tuple[str, str]]:
    """What was recognised without an option and what was not, and the options that change it."""
    columns, options = imported.options.columns, "--user, --item, --time, --rating or --label COLUMN"
    if imported.recognised:
        found = {"name": "by name", "values": "by its values"}
        for how, text in found.items():
            roles = [role for role, by in imported.recognised.items() if by == how]
            found[how] = f"{text}: {', '.join(f'{columns[role]} ({role})' for role in roles)}" if roles else ""
        missing = ["no time"] * ("time" not in columns)
        missing += ["no rating or label"] * (not {"rating", "label"} & columns.keys())
        yield "recognised", "; ".join(filter(None, found.values()))
        no_time = f"; --time none: {columns['time']} is no time" if "time" in imported.recognised else ""
        yield "otherwise", f"{' and '.join(missing)}{': ' * bool(missing)}{options}{no_time}"


def _rare(imported: Any) -> Iterator[str]:
    """How many users and items have few events."""
    for role, rare in imported.rare.items():
        every = imported.distinct[f"{role}s"]
        yield f"{rare.ids:,} of {every:,} {role}s ({rare.ids / every:.0%}, {rare.share:.1%} of the events)"


def _columns(imported: Any) -> Iterator[tuple[str, str]]:
    """The columns of the file that were used, and what became of each."""
    options, distinct = imported.options, imported.distinct
    texts = {
        "user": f"user, {distinct['users']:,} different",
        "item": f"item, {distinct['items']:,} different",
        "time": f"time, in {TIME_NAMES.get(options.time_unit, 'seconds')}",
        "rating": f"rating, positive from {options.positive_from or 0:g} on",
        "label": f"label, positive: {', '.join(options.positives or ('1', 'true'))}",
    }
    yield from ((options.columns[role], text) for role, text in texts.items() if role in options.columns)
    if imported.context:
        yield from ((name, f"context, {kind}") for name, kind in imported.context.columns.items())
        yield from ((name, f"not used: {why}") for name, why in imported.context.left_out.items())
    for role, table in imported.tables.items():
        columns = {table.title: "title"} if table.title else {}
        columns |= {one.name: _kind(one) for one in table.columns}
        if table.source is None:
            yield from ((name, f"of the {role}: {text}") for name, text in columns.items())
        else:
            columns |= {name: f"not used: {why}" for name, why in table.left_out.items()}
            shown = [f"{name} ({text})" for name, text in {table.id: "id", **columns}.items()]
            more = f" and {len(shown) - MOST_UNUSED:,} more" if len(shown) > MOST_UNUSED else ""
            yield table.source, f"of {role}s: {', '.join(shown[:MOST_UNUSED])}{more}"
    unused = list(imported.unused_columns.items())
    yield from ((name, f"not used{': ' * bool(why)}{why}") for name, why in unused[:MOST_UNUSED])
    if len(unused) > MOST_UNUSED:
        yield "...", f"{len(unused) - MOST_UNUSED:,} more columns not used"


def _kind(column: SideColumn) -> str:
    if column.kind in ("number", "text"):
        return column.kind
    noun = "category" if column.values == 1 else "categories"
    return f"{column.values:,} {noun}" + ", several each" * (column.kind == "categories")
