"""A user's own clicks: import, check, info."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from ... import places
from ...data import datasets
from ...data.click_store.options import ClickOptions
from ...jsonfile import as_json
from ..parse import OutputOptions
from ..terminal import Terminal
from .output import print_facts, print_import, progress_bars

if TYPE_CHECKING:
    from ...data.click_store.encode import ClickInfo
    from ...data.click_store.imports import ClickImport


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


def perform(action: str, options: Any, terminal: Terminal) -> ClickInfo | dict[str, object]:
    from ...data.click_store import encode, imports

    if action == "import":
        values = {field.name: getattr(options, field.name) for field in fields(ClickOptions)}
        folder = options.store or places.dataset_folder(options.name) / Path(datasets.KINDS["clicks"].manifest).parent
        with progress_bars(terminal, resumable=False) as bar:
            reading, rows = bar("reading", "bytes"), bar("writing", "rows")
            return imports.make(ClickOptions(**values), folder, reading=reading, rows=rows)
    place: Any = options.path or datasets.find(options.name).folder
    return encode.info(place) if action == "info" else encode.check(place)


def say(done: ClickImport | ClickInfo | dict[str, object], terminal: Terminal) -> None:
    from ...data.click_store.imports import ClickImport

    if isinstance(done, ClickImport):
        _say_import(done, terminal)
        return
    facts = as_json(done)
    columns = facts.pop("columns", {})
    print_facts(facts, terminal)
    print_facts(columns, terminal)


def _say_import(done: ClickImport, terminal: Terminal) -> None:
    days = (done.first.split()[0], done.last.split()[0]) if done.first and done.last else None
    roles = {done.user: "user, ", done.item: "item, "}
    columns = {done.label_column: f"label, {done.label}"}
    columns |= {done.time: "time"} if done.time else {}
    columns |= {name: roles.get(name, "") + text for name, text in done.columns.items()}
    columns |= {name: f"left out: {why}" for name, why in done.left_out.items()}
    print_import(
        done,
        terminal,
        counts=f"{done.rows:,} rows, {done.positives:,} clicks ({done.positive_share:.1%})",
        dates=days,
        columns=columns,
        lines={
            "tables": f"categories of fewer than {done.min_count} training rows share a table row",
            "held out": "by default a random fifth" + ("; the last fifth with --data.split time" if days else ""),
        },
    )
