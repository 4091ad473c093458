"""What ranks do with checkpoints in tests; every function is called on each of them."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import torch
from rank_jobs import make
from rank_states import store_of, whole
from torch import Tensor

from recperf.distributed.ranks import Ranks
from recperf.distributed.tables import TorchRecTables
from recperf.errors import RecperfError
from recperf.train import checkpoint_state


def in_small_chunks() -> None:
    """Tables of tests are small: copy them in several chunks all the same."""
    checkpoint_state.CHUNK = 256


def filled(world: Ranks, sharding: str) -> TorchRecTables:
    """Tables whose parts have states of their own."""
    tables = make(world, sharding)
    for part, _, (state_R,) in tables.local():
        draw = torch.Generator().manual_seed(part.first_row * 100 + part.first_column)
        state_R.copy_(torch.rand(state_R.shape, generator=draw))
    return tables


def save(world: Ranks, root: Path, shardings: list[str]) -> list[dict[str, Tensor]]:
    """Save tables of every sharding and return them whole."""
    in_small_chunks()
    found = []
    for number, sharding in enumerate(shardings):
        tables = filled(world, sharding)
        store_of(world, root / str(number)).save(1, {"trial": {"model": tables.sharded_state()}}, best=False)
        found.append(whole(tables))
    return found


def load(world: Ranks, roots: list[Path], sharding: str) -> list[dict[str, Tensor]]:
    """Load what was saved by others into tables of one sharding."""
    in_small_chunks()
    loaded = []
    for root in roots:
        tables = make(world, sharding)
        tables.reset(99)
        assert store_of(world, root).load(into={"trial": {"model": tables.sharded_state()}}) is not None
        loaded.append(whole(tables))
    return loaded


def damaged(world: Ranks, root: Path, damages: list[list[list[str]]]) -> list[Any]:
    """Load after each damage, and say what was said. A damage is a list of (way, file, other file)."""
    found: list[Any] = []
    tables = filled(world, "row")
    kept = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    world.barrier()
    for damage in damages:
        if world.is_leader:
            for way, name, other in damage:
                _damage(way, root / name, root / other)
        world.barrier()
        said: list[str] = []
        store = store_of(world, root)
        store.notice = said.append
        try:
            state = store.load(into={"trial": {"model": tables.sharded_state()}})
            assert state is not None
            found.append((state["position"], said))
        except RecperfError as error:
            found.append((type(error).__name__, error.what, error is world.shared_error))
        world.barrier()
        if world.is_leader:
            for path, content in kept.items():
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(content)
        world.barrier()
    return found


def _damage(way: str, path: Path, other: Path) -> None:
    content = path.read_bytes()
    if way == "flip":
        path.write_bytes(content[:40] + bytes([content[40] ^ 4]) + content[41:])
    elif way == "cut":
        path.write_bytes(content[:-1])
    elif way == "delete":
        path.unlink()
    else:
        path.write_bytes(other.read_bytes())
        other.write_bytes(content)


def save_two(world: Ranks, root: Path) -> None:
    tables = filled(world, "row")
    store = store_of(world, root)
    store.keep_last = 2
    for step in (1, 2):
        store.save(step, {"trial": {"model": tables.sharded_state()}, "position": step}, best=False)


def save_fails(world: Ranks, root: Path, how: str) -> tuple[Any, ...]:
    """A save in which rank 1 cannot do its part."""
    tables = filled(world, "row")
    state = {"trial": {"model": tables.sharded_state()}, "position": 3}
    store = store_of(world, root)
    if how == "elsewhere" and world.rank == 1:
        # As on a host that has no such file.
        Path.exists = lambda self, **_: False  # type: ignore[method-assign]
    try:
        if how == "elsewhere":
            store.load()
        if how == "full" and world.rank == 1:

            def refuse(*_: Any) -> int:
                raise OSError(errno.ENOSPC, "no space")

            os.write = refuse
        store.save(3, state, best=False)
    except RecperfError as error:
        return type(error).__name__, error.what, error.where.get("rank"), error is world.shared_error
    return ()
