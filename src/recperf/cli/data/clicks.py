"""A user's own clicks: import, check, info."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import tyro

from ... import places
from ...data import datasets
from ...data.click_store.options import ClickOptions
from ...jsonfile import as_json
from ..parse import OutputOptions
from ..terminal import Terminal
from .output import print_facts, print_import, progress_bars


@dataclass(frozen=True, kw_only=True)
class Import(ClickOptions, OutputOptions):
    store: Path | None = None
    """Folder of the rows; default: one in the cache folder, which other commands find by the dataset's name."""


@dataclass(frozen=True, kw_only=True)
class Info(OutputOptions):
    name: tyro.conf.Positional[str]
    """A dataset you imported."""
    path: Path | None = None
    """Folder of the rows; default: in the cache folder."""


OPTIONS: dict[str, Any] = {"import": Import, "check": Info, "info": Info}


def perform(action: str, options: Any, terminal: Terminal) -> dict[str, Any]:
    from ...data.click_store import encode, imports

    if action == "import":
        values = {field.name: getattr(options, field.name) for field in fields(ClickOptions)}
        folder = options.store or places.dataset_folder(options.name) / Path(datasets.KINDS["clicks"].manifest).parent
        with progress_bars(terminal, resumable=False) as bar:
            reading, rows = bar("reading", "bytes"), bar("writing", "rows")
            return imports.make(ClickOptions(**values), folder, reading=reading, rows=rows)
    place: Any = options.path or datasets.find(options.name).folder
    return encode.info(place) if action == "info" else encode.check(place)


def say(facts: dict[str, Any], terminal: Terminal) -> None:
    if "imported" in facts:
        _say_import(facts, terminal)
    else:
        facts = as_json(facts)
        columns = facts.pop("columns", {})
        print_facts(facts, terminal)
        print_facts(columns, terminal)


def _say_import(facts: dict[str, Any], terminal: Terminal) -> None:
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
            "held out": "by default a random fifth" + ("; the last fifth with --data.split time" if days else ""),
        },
        skipped=facts["skipped_rows"],
    )
