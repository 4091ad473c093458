"""recperf data ACTION NAME: an action has the same options for every dataset; its kind decides who performs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from ... import workloads
from ...data import datasets
from ...data.config import SplitOptions
from ...errors import DataError, UsageError, did_you_mean
from ...jsonfile import as_json
from ...terminal import Terminal, conclude, print_json, print_text
from ...units import size
from ..parse import ForceOption, OutputOptions, choose_action, parse
from .output import count_of, print_facts, progress_bars

ACTIONS = {
    "list": "list the datasets on this machine, with the command that trains on each",
    "get": "download a dataset into the cache folder and verify it",
    "check": "read a whole dataset and compare it with its digests or its format",
    "make": "write a synthetic dataset, or the log of a made-up shop as a CSV file",
    "prepare": "convert raw listening events to an event store, in bounded memory",
    "import": "import your own events, or with --clicks rows with a label (CSV, JSON lines, Parquet)",
    "info": "describe a dataset",
    "split": "change what is held out of a dataset that you imported, or say what is",
    "remove": "remove a dataset that you imported",
}

HELP = f"""usage: recperf data ACTION NAME [OPTIONS]

{{actions}}

names: {", ".join(datasets.BUILT_IN)};
       to get: movielens-1m, movielens-20m, movielens-32m, amazon-CATEGORY; or the name of a dataset you imported
  recperf data import FILE --name NAME             your own events: who took what, and when
  recperf data import FILE --clicks --name NAME    your own clicks: rows with a label
  recperf data make shop --out shop.csv            the log of a made-up shop, to import
  recperf data check FOLDER --sums FILE            files against a list of SHA-256 sums
  recperf data ACTION --help    options of an action"""
PUBLISHED = "published"
"""The kind of what `data get` downloads and imports."""
SHOP = "shop"
"""What `data make` writes as a file, which is no dataset before it is imported."""


@dataclass(frozen=True, kw_only=True)
class Get(OutputOptions):
    name: tyro.conf.Positional[str]
    """Dataset: one that recperf data --help names."""


@dataclass(frozen=True, kw_only=True)
class Stored(OutputOptions):
    name: tyro.conf.Positional[str]
    """Dataset: one that recperf data --help names, or one you imported."""
    path: Path | None = None
    """Folder of the dataset; default: in the cache folder."""


@dataclass(frozen=True, kw_only=True)
class Check(Stored):
    sums: Path | None = None
    """List of SHA-256 sums, as sha256sum writes it, of the files in a folder; name its path instead of a dataset."""


@dataclass(frozen=True, kw_only=True)
class Info(Stored):
    min_history: int | None = None
    """Of events: minimum number of a user's events before an anchor; default: 4086, or 100 if most users have fewer."""
    window_seconds: int = 86_400
    """Of events: length of a time window in seconds."""
    seed: int = 7
    """Of movielens-like: seed of the synthetic data."""


@dataclass(frozen=True, kw_only=True)
class Make(OutputOptions, ForceOption):
    name: tyro.conf.Positional[str]
    """Dataset: shop, or a synthetic one of events."""
    out: Path | None = None
    """Of shop: CSV file to write."""
    customers: int = 1500
    """Of shop: number of customers."""
    path: Path | None = None
    """Of a dataset of events: folder to write; existing files are not changed."""
    events: int | None = None
    """Of a dataset of events: approximate number of them; default: that of the embedded one, about 300,000."""
    seed: int = 7
    """Seed of the synthetic data."""


@dataclass(frozen=True, kw_only=True)
class Prepare(OutputOptions):
    name: tyro.conf.Positional[str]
    """Dataset of raw listening events that data get downloaded."""
    path: Path | None = None
    """Folder of the raw files; default: what `recperf data get` downloaded."""
    store: Path | None = None
    """Folder of the event store; default: in the cache folder."""


@dataclass(frozen=True, kw_only=True)
class Remove(OutputOptions):
    name: tyro.conf.Positional[str]
    """A dataset that you imported."""
    runs: Path = Path("runs")
    """Folder whose runs are asked whether they need the dataset."""
    force: bool = False
    """Remove it even if runs need it."""


@dataclass(frozen=True, kw_only=True)
class Divide(SplitOptions, OutputOptions):
    name: tyro.conf.Positional[str]
    """A dataset that you imported. Without options its split is only printed."""


OPTIONS: dict[str, Any] = {
    "remove": Remove, "split": Divide, "get": Get, "check": Check, "info": Info, "make": Make, "prepare": Prepare
}  # fmt: skip


def command(arguments: list[str]) -> int:
    action = choose_action("data", arguments, ACTIONS, HELP)
    if action is None:
        return 0
    if action == "list":
        return list_datasets(arguments[1:])
    if action == "import":
        from .imports import import_file

        return import_file(arguments[1:])
    prog, description = f"recperf data {action}", ACTIONS[action] + "."
    if len(arguments) == 1:
        raise UsageError(f"data {action} needs the name of a dataset", fix=f"{prog} --help")
    options: Any = parse(OPTIONS[action], arguments[1:], prog=prog, description=description)
    terminal = Terminal(as_json=options.json, quiet=options.quiet)
    if action in ("remove", "split"):
        return (_remove if action == "remove" else _split)(options, terminal)
    with progress_bars(terminal, resumable=action in ("prepare", "make", "get")) as bar:
        if action == "check" and options.sums is not None:
            return _check_sums(options, bar("comparing", "bytes"), terminal)
        facts = PERFORM[action](options, _kind(options.name, action), bar, terminal)
    if options.json:
        print_json(facts)
    elif facts is not None:
        _say(as_json(facts), terminal)
    return 0


def _kind(name: str, action: str) -> str:
    """The kind of the dataset of a name: movielens, events or clicks; or what an action makes of the name."""
    if action == "make" and name == SHOP:
        return SHOP
    from ...data.known.published import PUBLISHED as published

    if action == "get" and name in published:
        return PUBLISHED
    kinds = {name: kind for name, (kind, _) in datasets.BUILT_IN.items()}
    kinds |= {dataset.name: dataset.kind for dataset in datasets.imported()}
    if name not in kinds:
        if name in published:
            raise datasets.missing(name)
        kinds |= dict.fromkeys(published, "") if action == "get" else {}
        raise UsageError(f"unknown dataset {name!r}{did_you_mean(name, kinds)}", fix=f"one of: {', '.join(kinds)}")
    return kinds[name]


def _get(options: Get, kind: str, bar: Callable[..., Any], terminal: Terminal) -> dict[str, Any]:
    name = options.name
    if kind == PUBLISHED:
        return _get_published(name, bar, terminal)
    if name not in datasets.BUILT_IN or datasets.BUILT_IN[name][1] is None:
        raise UsageError(f"there is nothing to download for {name}", fix=f"recperf data info {name}")
    if kind == "movielens":
        from ...data.known import movielens_files as catalogue

        return catalogue.get(name, say=terminal.say)
    from ...data.known import event_files as events

    return events.get(name, say=terminal.say, bars=terminal.live)


def _get_published(name: str, bar: Callable[..., Any], terminal: Terminal) -> dict[str, Any]:
    """Download a published log and import it under its name."""
    from ...data import importing
    from ...data.known.published import downloaded

    dataset, done = datasets.imported_as(name), dict[str, Any](downloaded=False)
    if dataset is None:
        with downloaded(name, say=terminal.say) as (options, record):
            importing.import_file(options, split=SplitOptions(), progress=bar)
        dataset, done = datasets.find(name), {"downloaded": True, "sha256": record.sha256, "compared": record.checksum}
    else:
        terminal.say(f"{name} is already in {dataset.folder}")
    following = f"recperf run {workloads.proposed(dataset)} --data {name}"
    return {"name": name, "folder": str(dataset.folder), "events": dataset.rows, **done, "next": following}


def _check(options: Check, kind: str, bar: Callable[..., Any], terminal: Terminal) -> dict[str, Any]:
    if kind == "movielens":
        from ...data.known import movielens_files as catalogue

        return catalogue.check(options.name, path=options.path)
    if kind == "clicks":
        from ...data.rows import encode

        return encode.check(_folder(options))
    from ...data.known import event_files as events

    return events.check(options.name, path=options.path, progress=bar, say=terminal.say)


def _info(options: Info, kind: str, bar: Callable[..., Any], terminal: Terminal) -> dict[str, Any] | None:
    """The facts to print; None where they are said."""
    if kind == "movielens":
        from ...data.known import movielens_files as catalogue

        return catalogue.info(options.name, path=options.path, seed=options.seed)
    if kind == "clicks":
        from ...data.rows import encode
        from .imports import say_clicks

        return _own(options, encode.info(_folder(options)), say_clicks, terminal)
    from ...data.known import event_files as events

    store = events.find(options.name, path=options.path, say=terminal.say)
    if store.imported:
        if options.min_history is not None:
            what = f"--min-history describes listening events for dlrm-v4; {options.name} is your own"
            raise UsageError(what, fix=f"recperf data info {options.name}")
        from ...data.events.imports import described
        from .imports import say_events

        facts = {**described(store), "name": store.name, "folder": str(store.folder)}
        return _own(options, facts, say_events, terminal)
    return events.describe(store, seconds=options.window_seconds, min_history=options.min_history)


def _own(options: Info, facts: dict[str, Any], say: Callable[..., None], terminal: Terminal) -> dict[str, Any] | None:
    """The facts of an imported dataset with its split and the command that trains on it; without --json they are said
    as at the end of the import."""
    from ...data.importing import divide

    dataset = datasets.at(_folder(options))
    facts["split"] = divide(dataset, SplitOptions(), write=False)
    facts["next"] = f"recperf run {workloads.proposed(dataset)} --data {options.path or options.name}"
    if options.json:
        return facts
    say(facts, terminal)
    return None


def _folder(options: Stored) -> Path:
    folder = options.path or datasets.find(options.name).folder
    assert folder is not None
    return folder


def _make(options: Make, kind: str, bar: Callable[..., Any], terminal: Terminal) -> dict[str, Any]:
    if kind == SHOP:
        from ...data.known import shop

        if options.out is None:
            raise UsageError("a shop is written to a file", fix="recperf data make shop --out shop.csv")
        facts = shop.write(options.out, customers=options.customers, seed=options.seed, force=options.force)
        return {**facts, "next": f"recperf data import {options.out} --name {SHOP}"}
    from ...data.known import event_files as events

    progress = bar("generating")
    return events.make(options.name, events=options.events, seed=options.seed, path=options.path, progress=progress)


def _prepare(options: Prepare, kind: str, bar: Callable[..., Any], terminal: Terminal) -> dict[str, Any]:
    from ...data.known import event_files as catalogue

    if kind != "events":
        what = f"{options.name} is not raw listening events; only those are prepared"
        raise UsageError(what, fix="recperf data prepare --help")
    return catalogue.prepare(options.name, path=options.path, store=options.store, progress=bar)


def _remove(options: Remove, terminal: Terminal) -> int:
    from ...data.importing import remove_dataset
    from ...runs.record import runs_on

    facts = remove_dataset(options.name, needed_by=runs_on(options.name, options.runs), force=options.force)
    rows = "" if facts["rows"] is None else f"{count_of(facts['rows'], 'row')}, "
    terminal.say(f"removed {facts['name']}: {rows}{size(facts['bytes'])}")
    if options.json:
        print_json(facts)
    return 0


def _split(options: Divide, terminal: Terminal) -> int:
    from ...data.importing import divide

    dataset = datasets.imported_as(options.name)
    if dataset is None:
        datasets.find(options.name)
        what = f"{options.name} is no dataset that you imported"
        raise UsageError(what, fix=f"--data.split of recperf run divides {options.name} for one run")
    split = divide(dataset, options, write=options.given)
    terminal.say(f"held out of {options.name}: {split.text}")
    if options.given and (warning := split.warning):
        terminal.notice(warning)
    if options.json:
        print_json(as_json(split))
    return 0


PERFORM: dict[str, Any] = {"get": _get, "check": _check, "info": _info, "make": _make, "prepare": _prepare}


def _say(facts: dict[str, Any], terminal: Terminal) -> None:
    """Print facts line by line; those of columns and of parts of a dataset by their own names."""
    for part in ("raw", "store"):
        if isinstance(facts.get(part), dict):
            facts |= {f"{part}_{name}": value for name, value in facts.pop(part).items()}
    print_facts(facts, terminal)


def _check_sums(options: Check, progress: Callable[..., None], terminal: Terminal) -> int:
    assert options.sums is not None
    sums = datasets.check_sums(Path(options.name), options.sums, progress)
    faults = {"missing": sums.missing, "differing": sums.differing, "extra": sums.extra}
    for how, names in faults.items():
        for name in names:
            terminal.say(f"{how:<9}  {name}")
    error = None
    if sums.intact:
        terminal.say(f"{count_of(sums.compared, 'file')} as listed, {sums.bytes:,} bytes")
    else:
        counts = ", ".join(f"{len(names)} {how}" for how, names in faults.items() if names)
        fix = "get missing and differing files again, and move extra ones away"
        error = DataError(f"the files are not those of the list: {counts}", where={"folder": sums.folder}, fix=fix)
    return conclude(error, sums if options.json else None)


def list_datasets(arguments: list[str]) -> int:
    options = parse(OutputOptions, arguments, prog="recperf data list", description=ACTIONS["list"] + ".")
    rows = [_describe(dataset) for dataset in datasets.present()]
    if options.json:
        print_json({"datasets": rows})
    elif not options.quiet:
        width = max(len(row["name"]) for row in rows)
        print_text(f"{'name':<{width}}  {'kind':<9}  {'rows':>13}  {'size':>9}  train on it with")
        for row in rows:
            counts = "-" if row["rows"] is None else f"{row['rows']:,}"
            bytes_ = size(row["bytes"]) if row["bytes"] else "-"
            print_text(f"{row['name']:<{width}}  {row['kind']:<9}  {counts:>13}  {bytes_:>9}  {row['train']}")
        print_text("\nrecperf data import FILE --name NAME adds your own; recperf data get NAME downloads one.")
    return 0


def _describe(dataset: datasets.Dataset) -> dict[str, Any]:
    able = workloads.able(dataset.kind)
    train = f"recperf run {workloads.proposed(dataset)} --data {dataset.name}" if able else "-"
    try:
        rows = dataset.rows
    except DataError as error:
        # The others are listed all the same.
        rows, able, train = None, [], error.what
    facts = {"name": dataset.name, "kind": dataset.kind, "rows": rows, "bytes": dataset.bytes, "train": train}
    return facts | {"workloads": able, "folder": str(dataset.folder) if dataset.folder else None}
