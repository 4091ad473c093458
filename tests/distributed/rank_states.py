"""States of trials by way of a checkpoint: what ranks save one process reads whole, and the other way round."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recperf.distributed.checkpoint import RankStore
from recperf.distributed.rank_tables import RankTables
from recperf.distributed.ranks import Ranks
from recperf.distributed.shared_run import require_same_config
from recperf.errors import ConfigError, RecperfError
from recperf.train.checkpoint import CheckpointStore, read_state
from recperf.train.checkpoint_folder import name_of
from recperf.workloads.micro_dlrm import config as micro_dlrm


@contextmanager
def shared_folder(world: Ranks) -> Iterator[Path]:
    folder = Path(world.on_leader(tempfile.mkdtemp))
    try:
        yield folder
    finally:
        world.barrier()
        if world.is_leader:
            shutil.rmtree(folder)


def store_of(world: Ranks, folder: Path) -> RankStore:
    return RankStore(folder=folder, notice=print, world=world)


def whole(tables: RankTables) -> dict[str, Tensor]:
    """All tables, and what the optimizer remembers of them (`<table>_state`), put together on rank 0 without a
    checkpoint; nothing on the others."""
    each = tables.world.gather([*tables.local()])
    if not tables.world.is_leader:
        return {}
    found: dict[str, Tensor] = {}
    for name in tables.names:
        found[name] = torch.empty(tables.rows[name], tables.dim)
        rule = tables.rule
        sums = torch.zeros(tables.rows[name], rule.state_width(tables.dim), dtype=torch.float64)
        for part, weight, states in (held for parts in each for held in parts if held[0].table == name):
            if part.kind == "data-parallel" and part.rank:
                continue
            rows = slice(part.first_row, part.first_row + part.rows)
            columns = slice(part.first_column, part.first_column + part.columns)
            found[name][rows, columns] = weight.detach()
            for kind, state in enumerate(states):
                if rule.weight_states:
                    columns_of = state.double().view(part.rows, -1)
                    first = kind * tables.dim + part.first_column
                    sums[rows, first : first + columns_of.shape[1]] = columns_of
                else:
                    # One number for a row is the mean of those of its parts, by their columns.
                    sums[rows, 0] += state.double() * (part.columns / tables.dim)
        if sums.shape[1]:
            found[f"{name}_state"] = (sums if rule.weight_states else sums[:, 0]).float()
    return found


def whole_state(world: Ranks, trial: Any) -> dict[str, Any]:
    """On rank 0 what one process reads of what all ranks saved; nothing on the others."""
    with shared_folder(world) as folder:
        store_of(world, folder).save(1, {"trial": trial.state()}, best=False)
        return read_state(folder / name_of(1), None)["trial"] if world.is_leader else {}


def restore(world: Ranks, trial: Any, state: dict[str, Any]) -> None:
    """Go on from what one process saves, which only rank 0 looks at."""
    with shared_folder(world) as folder:
        if world.is_leader:
            CheckpointStore(folder=folder, notice=print).save(1, {"trial": state}, best=False)
        loaded = store_of(world, folder).load(into={"trial": trial.state()})
        assert loaded is not None
        trial.restore(loaded["trial"])


def unlike(world: Ranks) -> list[tuple[str, str, str, bool]]:
    """What is said where ranks differ: in a path, which is fine; in a number of the config; in the data."""
    config = micro_dlrm.MicroDLRMConfig()
    elsewhere = replace(config, data=replace(config.data, path=Path(f"/host-{world.rank}")))
    require_same_config(world, "micro-dlrm", elsewhere, steps=5)
    world.require_same_data("digest")
    other = replace(config, train=replace(config.train, batch_size=64 + world.rank))
    found = []
    for label, check in (
        ("field", lambda: require_same_config(world, "micro-dlrm", other)),
        ("its digest", lambda: world.require_same_data(f"digest {world.rank}")),
    ):
        try:
            check()
        except RecperfError as error:
            one_says_it = isinstance(error, ConfigError) or error is world.shared_error
            found.append((type(error).__name__, error.what, error.where[label], one_says_it))
    return found
