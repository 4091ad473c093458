"""recperf data ACTION NAME: each family of datasets has a module with its options and actions."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import tyro

from ... import workloads
from ...data import datasets
from ...errors import DataError, UsageError, did_you_mean
from ...units import size
from ..parse import SWITCHES, OutputOptions, choose_action, parse
from ..terminal import Terminal, conclude, print_json, print_text
from .output import count_of, progress_bars

ACTIONS = {
    "list": "list the datasets on this machine, with the command that trains on each",
    "get": "download a dataset into the cache folder and verify it",
    "check": "read a whole dataset and compare it with its digests or its format",
    "make": "write a synthetic dataset",
    "prepare": "convert raw listening events to an event store, in bounded memory",
    "import": "import your own events, or with --clicks rows with a label (CSV, JSON lines, Parquet)",
    "info": "describe a dataset",
}

HELP = """usage: recperf data ACTION NAME [OPTIONS]

{actions}

names: movielens-100k (real), movielens-like (synthetic), yambda-50m, yambda-500m, yambda-5b (real), yambda-like
       (synthetic), or the name of a dataset you imported
  recperf data import FILE --name NAME             your own events: who took what, and when
  recperf data import FILE --clicks --name NAME    your own clicks: rows with a label
  recperf data check FOLDER --sums FILE            files against a list of SHA-256 sums
  recperf data ACTION NAME --help    options of an action"""

FAMILY = {name: kind for name, (kind, _) in datasets.BUILT_IN.items()}
"""The kind of every dataset that recperf knows, which is the name of the module with its actions."""
NAMED_BY = {
    "get": ("movielens-100k", "yambda-50m", "yambda-500m", "yambda-5b"),
    "check": tuple(FAMILY),
    "make": ("yambda-like",),
    "info": tuple(FAMILY),
}
"""Actions of several families, each with its own options: the datasets that have them."""
WITHOUT_NAME = """usage: recperf data {action} NAME [OPTIONS]

{text}.

names: {names}
  recperf data {action} NAME --help    options, which differ between datasets"""
IMPORT = {
    "events": """Import your own events: a log of who took what, and when. FILE comes right after import.

With --clicks rows with a label are imported instead: recperf data import FILE --clicks --label COLUMN. Its options:
recperf data import --clicks --help.""",
    "clicks": """Import your own clicks: rows with a label. FILE comes right after import, or after --clicks.

Without --clicks a log of events is imported: recperf data import FILE. Its options: recperf data import --help.""",
}
"""Description of each kind of import."""
_SWITCHES = (
    *SWITCHES, *(f"--{no}{name}" for no in ("", "no-") for name in ("json", "quiet", "gzip"))
)  # fmt: skip


def command(arguments: list[str]) -> int:
    action = choose_action("data", arguments, ACTIONS, HELP)
    if action is None:
        return 0
    if action == "list":
        return list_datasets(arguments[1:])
    if action == "check" and any(argument.partition("=")[0] == "--sums" for argument in arguments):
        return check_list(arguments[1:])
    if action in NAMED_BY and _named(arguments[1:]) is None:
        names = ", ".join(NAMED_BY[action])
        if not SWITCHES & set(arguments):
            raise UsageError(f"data {action} needs the name of a dataset", fix=f"recperf data {action} NAME: {names}")
        own = "" if action in ("get", "make") else ",\n       or the name of a dataset you imported"
        print_text(WITHOUT_NAME.format(action=action, text=ACTIONS[action], names=names + own))
        return 0
    kind = _kind(action, arguments[1:])
    if action == "import":
        arguments = ["import", *_with_file(arguments[1:])]
    family = import_module(f".{kind}", __name__)
    if action not in family.OPTIONS:
        name = _named(arguments[1:])
        raise UsageError(f"there is nothing to {action} for {name}", fix=f"recperf data info {name}")
    options: Any = parse(
        family.OPTIONS[action],
        arguments[1:],
        prog=f"recperf data {action}",
        description=IMPORT[kind] if action == "import" else ACTIONS[action] + ".",
    )
    if action == "import" and options.store is None:
        datasets.refuse_other_kind(options.name, kind)
    terminal = Terminal(as_json=options.json, quiet=options.quiet)
    facts = family.perform(action, options, terminal)
    if action == "import":
        name = options.name if options.store is None else facts["folder"]
        model = "dlrm" if kind == "clicks" else "hstu" if options.sequences else "dlrm-v4"
        facts["next"] = f"recperf run {model} --data {shlex.quote(name)}"
    if options.json:
        print_json(facts)
    else:
        family.say(facts, terminal)
    return 0


@dataclass(frozen=True, kw_only=True)
class CheckSums(OutputOptions):
    path: tyro.conf.Positional[Path]
    """Folder of the files."""
    sums: Path
    """List of SHA-256 sums with paths below the folder, as sha256sum writes it."""


def check_list(arguments: list[str]) -> int:
    description = "Compare the files of a folder with a list of SHA-256 sums."
    options = parse(CheckSums, arguments, prog="recperf data check", description=description)
    terminal = Terminal(as_json=options.json, quiet=options.quiet)
    with progress_bars(terminal, resumable=False) as bar:
        sums = datasets.check_sums(options.path, options.sums, bar("comparing", "bytes"))
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
    train = f"recperf run {able[0]} --data {dataset.name}" if able else "-"
    try:
        rows = dataset.rows
    except DataError as error:
        # The others are listed all the same.
        rows, able, train = None, [], error.what
    facts = {"name": dataset.name, "kind": dataset.kind, "rows": rows, "bytes": dataset.bytes, "train": train}
    return facts | {"workloads": able, "folder": str(dataset.folder) if dataset.folder else None}


def _with_file(arguments: list[str]) -> list[str]:
    """The arguments of an import with the file as the value of --clicks or --events, wherever it stands."""
    is_clicks = any(argument.partition("=")[0] == "--clicks" for argument in arguments)
    flag = "--clicks" if is_clicks else "--events"
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
    raise UsageError(what, fix=f"recperf data import FILE{' --clicks' * is_clicks} --name NAME")


def _kind(action: str, arguments: list[str]) -> str:
    """The kind of the dataset named on the command line."""
    if action == "import":
        return "clicks" if any(argument.partition("=")[0] == "--clicks" for argument in arguments) else "events"
    name = _named(arguments)
    if name is None:
        return "events"
    imported = {dataset.name: dataset.kind for dataset in datasets.imported()}
    kind = FAMILY.get(name) or imported.get(name)
    if kind is None:
        known = [*FAMILY, *imported]
        raise UsageError(f"unknown dataset {name!r}{did_you_mean(name, known)}", fix=f"one of: {', '.join(known)}")
    if action == "prepare" and kind != "events":
        what = f"{name} is not raw listening events; only those are prepared"
        raise UsageError(what, fix="recperf data prepare yambda-50m --path FOLDER")
    return kind


def _named(arguments: list[str]) -> str | None:
    """The first argument that is neither an option nor the value of one."""
    before = ["", *arguments]
    for argument, last in zip(arguments, before):
        if not argument.startswith("-") and (not last.startswith("-") or "=" in last or last in _SWITCHES):
            return argument
    return None
