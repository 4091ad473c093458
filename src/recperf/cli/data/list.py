"""recperf data list: the datasets on this machine."""

from __future__ import annotations

from typing import Any

from ... import workloads
from ...data import datasets
from ...errors import DataError
from ...units import size
from ..parse import OutputOptions, parse
from ..terminal import print_json, print_text


def list_datasets(arguments: list[str]) -> int:
    description = "List the datasets on this machine, with the command that trains on each."
    options = parse(OutputOptions, arguments, prog="recperf data list", description=description)
    rows = [_describe(dataset) for dataset in _present()]
    if options.json:
        print_json({"datasets": rows})
    elif not options.quiet:
        width = max(len(row["name"]) for row in rows)
        print_text(f"{'name':<{width}}  {'kind':<9}  {'rows':>13}  {'size':>9}  train on it with")
        for row in rows:
            counts = f"{_count(row['rows']):>13}  {size(row['bytes']) if row['bytes'] else '-':>9}"
            print_text(f"{row['name']:<{width}}  {row['kind']:<9}  {counts}  {row['train']}")
        print_text("\nrecperf data import FILE --name NAME adds your own; recperf data get NAME downloads one.")
    return 0


def _present() -> list[datasets.Dataset]:
    """Built-in datasets as far as they are on this machine, then imported ones."""
    present = []
    for name in datasets.BUILT_IN:
        try:
            present.append(datasets.find(name))
        except DataError:
            continue
    return [*present, *datasets.imported()]


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


def _count(rows: int | None) -> str:
    return "-" if rows is None else f"{rows:,}"
