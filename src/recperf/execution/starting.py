"""A run that starts from the weights of another, on other events or clicks.

The config of the new run names the other one, and its data is that of a store that also lists the other's ids. The
run's folder gets the other's checkpoint and which of its rows go where, so that a resumed run needs nothing else.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from math import prod
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from ..config import from_json
from ..data.config import SplitConfig
from ..distributed.ranks import current
from ..errors import ConfigError, DataError, MachineError, UsageError
from ..files import digest_of, link_or_copy, make_folder, open_regular, reading, sha256, sync_folder, writing
from ..jsonfile import read, require
from ..machine import available_bytes
from ..runs.evidence import START
from ..runs.record import START_FOLDER, Run, read_config
from ..runs.result import Data, RowCounts, StartedFrom
from ..train import checkpoint_folder as folders
from ..units import size
from .workload import HASHED, Trial, Workload, load

if TYPE_CHECKING:
    from torch import Tensor

    from ..data.events.store import EventStore
    from ..data.rows.imported import ImportedClicks

ROWS = "rows.npz"
HELD_OUT = ("split", "holdout_first", "holdout_windows", "holdout", "split_seed")
"""Fields of `data` that say which events or clicks are held out."""


def continued(workload: Workload, config: Any) -> Any:
    """The config of a run that starts from another: its data is that of a store with the ids of both, and its tables
    have rows for them."""
    run = config.start.run
    old = _config_of(workload, run)
    store = _opened(config.data)
    if store is None:
        raise UsageError("--start-from needs data of your own", fix="--data NAME")
    for name in HELD_OUT:
        ours, other = (getattr(one.data, name, None) for one in (config, old))
        if ours != other:
            what = f"data.{name} is {ours}, that of {run.name} {other}: its weights may know held-out rows"
            raise ConfigError(what, fix=f"leave out --data.{name.replace('_', '-')}, or train without --start-from")
    path = _matching(config.data).with_earlier_ids(store, _data_of(run, old), config.start.forget_days)
    config = replace(config, data=replace(config.data, path=path))
    return (workload.with_rows or workload.resolve)(config)


def _config_of(workload: Workload, run: Path) -> Any:
    """The config of a run of this workload that another can start from."""
    name, values = read_config(run)
    if name != workload.name:
        what = f"{run.name} is a run of {name}, whose weights {workload.name} cannot start from"
        raise UsageError(what, where={"run": run}, fix=f"recperf run {name} --start-from {run}")
    if not workload.id_tables:
        what = f"{workload.name} cannot start from another run: it does not train on data of your own"
        raise UsageError(what, fix="recperf run --resume goes on with the same data")
    return from_json(workload.config, values)


def _has_rows(data: Any) -> bool:
    """Whether a config is that of rows with a label, not of events."""
    return isinstance(data, SplitConfig)


def _opened(data: Any) -> EventStore | ImportedClicks | None:
    """The events or clicks that a config names; None where they are not imported."""
    if _has_rows(data):
        from ..data.rows.imported import open_clicks

        return open_clicks(data.path, data.rows_split()) if data.source == "clicks" else None
    from ..data.known.event_files import open_events

    return None if data.path is None else open_events(data.path)


def _matching(data: Any) -> ModuleType:
    """The module that matches the ids of two datasets of this kind."""
    return import_module(f"recperf.data.{'rows' if _has_rows(data) else 'events'}.earlier_ids")


def _data_of(run: Path, config: Any) -> EventStore | ImportedClicks:
    """The events or clicks that a run was trained on."""
    store, facts = _opened(config.data), run / "data.json"
    if store is None:
        raise DataError(
            f"{run.name} was not trained on data of your own, by whose ids rows are matched", where={"run": run}
        )
    if store.digest != require(read(facts), Data, facts, what="is damaged").digest:
        what = f"the data of {run.name} changed since it was trained: its rows cannot be matched"
        raise DataError(what, where={"run": run, "store": store.folder}, fix="restore the old data, or train again")
    return store


@dataclass(frozen=True)
class Start:
    """The weights that a run starts from, in its own folder."""

    folder: Path
    facts: StartedFrom
    tables: Mapping[str, str]
    """The role of the ids of each tensor with a row for every id."""
    counted: tuple[str, ...]
    """What the names of tensors begin with that are not taken over."""

    def load(self, trial: Trial, model: dict[str, Any]) -> None:
        """Set the state of a new model: rows of ids that both runs have, and everything that is not a row of an id."""
        import torch
        from torch import Tensor

        from ..models.tiers.columns import TableColumns

        _require_one_process()
        saved = self._read(model)
        with np.load(self.folder / ROWS) as rows:
            pairs = {name: torch.from_numpy(rows[name]) for name in rows.files}
        with torch.no_grad():
            for name, into in model.items():
                if name.startswith(self.counted):
                    continue
                role = self.tables.get(name) if into.shape[:1] != (1,) else None
                if role is None and isinstance(into, Tensor):
                    into.copy_(saved[name])
                elif role != HASHED and name in saved:
                    every_R = torch.arange(into.shape[0])
                    earlier_N, numbers_N = pairs[role] if role else (every_R, every_R)
                    if int(earlier_N.max()) >= len(saved[name]):
                        what = f"{role} of {self.facts.run} share rows of {name}, so that theirs cannot be taken over"
                        raise ConfigError(what, fix="train without --start-from, with a row for each id")
                    values = saved[name][earlier_N]
                    if isinstance(into, TableColumns):
                        order_N = numbers_N.argsort()
                        into.load(numbers_N[order_N], values[order_N])
                    else:
                        into.index_copy_(0, numbers_N.to(into.device), values.to(into.device))
        trial.take_over(saved, {role: (rows_2N[0], rows_2N[1]) for role, rows_2N in pairs.items()})

    def _read(self, model: dict[str, Any]) -> dict[str, Tensor]:
        """The state of the other model, whose shapes must be those of this one, but for the number of ids. Whether a
        model has rows of features depends on its data: where one has none, those of the other start anew."""
        from ..data.events.earlier_ids import FEATURES
        from ..train.checkpoint import read_state

        path = self.folder / self.facts.checkpoint
        with reading(self.folder / ROWS):
            digest = sha256(self.folder / ROWS)
        if digest != self.facts.rows_digest:
            raise DataError("the list of rows that this run starts with is damaged", where={"file": self.folder / ROWS})
        if fault := folders.fault(path):
            raise DataError(f"the checkpoint that this run starts from is damaged: {fault}", where={"folder": path})
        self._require_memory(path)
        saved = read_state(path, part=("trial", "model"))
        for name in {**model, **saved}:
            if name.startswith(self.counted):
                continue
            if self.tables.get(name) == FEATURES and not (name in model and name in saved):
                continue
            from_row = 1 if name in self.tables else 0
            shapes = [tuple(one[name].shape)[from_row:] if name in one else None for one in (model, saved)]
            if shapes[0] != shapes[1]:
                shown = [f"has {name} of {shape}" if shape is not None else f"has no {name}" for shape in shapes]
                raise ConfigError(
                    f"the model {shown[0]}, that of {self.facts.run} {shown[1]}",
                    where={"run": self.facts.run},
                    fix="leave out the options that change the model, or train without --start-from",
                )
        return saved

    def _require_memory(self, path: Path) -> None:
        """Refuse a checkpoint whose model does not fit into memory beside this run's."""
        from ..train.checkpoint_state import DTYPES

        tensors = folders.read_manifest(path).tensors.items()
        part = (one for name, one in tensors if name.startswith("trial/model/"))
        needed, available = sum(prod(one.shape) * DTYPES[one.dtype].itemsize for one in part), available_bytes()
        if needed > available:
            raise MachineError(
                f"the tables of {self.facts.run}, {size(needed)}, do not fit into memory: {size(available)} are free",
                fix="a machine with more memory, or train without --start-from",
            )


def _require_one_process() -> None:
    if current().size > 1:
        what = "ranks can only resume a run that started from another once it has a checkpoint"
        raise UsageError(what, fix="recperf run --resume in a single process")


def start_of(workload: Workload, config: Any, run: Run, held_out_from: int | None) -> Start | None:
    """What a run starts from, which scores from some second on; None where it starts with initial weights."""
    if config.start.run is None:
        return None
    folder = run.folder / START_FOLDER
    facts: StartedFrom | None = run.read(START, StartedFrom)
    if facts is None:
        _require_one_process()
        facts = _copy(workload, config, folder, held_out_from)
        run.write(START, facts)
    return Start(folder, facts, workload.id_tables, workload.counted)


def _copy(workload: Workload, config: Any, folder: Path, held_out_from: int | None) -> StartedFrom:
    """Copy the checkpoint and list the rows that go on."""
    from .serving import find_checkpoint

    run = config.start.run
    path = find_checkpoint(run, config.start.checkpoint)
    if fault := folders.fault(path):
        raise DataError(f"checkpoint {path.name} of {run.name} is damaged: {fault}", where={"folder": path})
    roles = [role for role in dict.fromkeys(workload.id_tables.values()) if role != HASHED]
    earlier, data = _data_of(run, _config_of(workload, run)), config.data
    names = [load(workload.id_names)] if workload.id_names else []
    matched = _matching(data).matched(earlier, _opened(data), config.start.forget_days, *names)
    unused = matched.rows.keys() - set(roles)
    shutil.rmtree(folder, ignore_errors=True)
    with writing(folder):
        make_folder(folder / path.name)
        for name in os.listdir(path):
            link_or_copy(path / name, folder / path.name / name)
        # Of a role that only one of the datasets has, row 0 alone is in both.
        arrays: dict[str, Any] = {role: np.zeros((2, 1), np.int64) for role in roles}
        arrays |= {role: rows_2N for role, rows_2N in matched.rows.items() if role in roles}
        with open(folder / ROWS, "wb") as file:
            np.savez(file, **arrays)
            os.fsync(file.fileno())
        sync_folder(folder)
    with open(open_regular(path / folders.MANIFEST), "rb") as file:
        digest = digest_of(file)
    return StartedFrom(
        run=run.name,
        seed=int(path.parent.name.removeprefix("seed-")),
        checkpoint=path.name,
        digest=digest,
        forget_days=config.start.forget_days,
        rows={
            kind: RowCounts(**counts)
            for kind, counts in matched.counts.items()
            if kind not in unused and any(counts.values())
        },
        rows_digest=sha256(folder / ROWS),
        trained_until=_trained_until(run),
        held_out_from=held_out_from,
    )


def _trained_until(run: Path) -> int | None:
    """The second until which a run, and those that it started from, were trained; None where none says it."""
    at = [require(read(run / "data.json"), Data, run / "data.json", what="is damaged").held_out_from]
    if (run / START).exists():
        at.append(require(read(run / START), StartedFrom, run / START, what="is damaged").trained_until)
    return max((one for one in at if one is not None), default=None)
