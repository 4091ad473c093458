"""What ranks do with checkpoints in tests; every function is called on each of them."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rank_jobs import make
from rank_states import store_of, whole
from torch import Tensor

from recperf.distributed.moving import divided
from recperf.distributed.tables import TorchRecTables
from recperf.distributed.world import World
from recperf.errors import RecperfError
from recperf.train import checkpoint_dcp, checkpoint_tree
from recperf.train.checkpoint_parts import Wanted


def in_pieces(small: int) -> None:
    """Tables of tests are small: cut them all the same."""
    checkpoint_tree.PIECE = checkpoint_dcp.PIECE = 1024
    checkpoint_tree.SMALL = small


def filled(world: World, sharding: str) -> TorchRecTables:
    """Tables whose parts have states of their own."""
    tables = make(world, sharding)
    for part, _, state_R in tables.local():
        assert state_R is not None
        draw = torch.Generator().manual_seed(part.first_row * 100 + part.first_column)
        state_R.copy_(torch.rand(state_R.shape, generator=draw))
    for state_R in tables.copies.states.values():
        state_R.copy_(torch.linspace(0, 1, state_R.shape[0]))
    return tables


def parts_of(tables: TorchRecTables) -> list[tuple[Any, Tensor, Tensor | None]]:
    return [(part, weight.clone(), None if state is None else state.clone()) for part, weight, state in tables.local()]


def save(world: World, root: Path, shardings: list[str], small: int) -> list[dict[str, Any]]:
    """Save tables of every sharding; what they are, whole and in parts."""
    in_pieces(small)
    found = []
    for number, sharding in enumerate(shardings):
        tables = filled(world, sharding)
        store_of(world, root / str(number)).save(1, {"trial": {"model": dict(divided(tables))}}, best=False)
        found.append({"whole": whole(tables), "parts": parts_of(tables)})
    return found


@contextmanager
def pieces(small: int) -> Iterator[None]:
    """Cut tables for a while."""
    before = checkpoint_tree.PIECE, checkpoint_dcp.PIECE, checkpoint_tree.SMALL
    in_pieces(small)
    yield
    checkpoint_tree.PIECE, checkpoint_dcp.PIECE, checkpoint_tree.SMALL = before


def load(world: World, roots: list[Path], sharding: str, small: int) -> list[dict[str, Any]]:
    """Load what was saved by others into tables of one sharding."""
    in_pieces(small)
    read, found = checkpoint_dcp.read_blocks, []
    names: list[str] = []

    def noted(folder: Path, wanted: list[Wanted]) -> None:
        names.extend(piece.name for piece in wanted)
        read(folder, wanted)

    checkpoint_dcp.read_blocks = noted  # type: ignore[assignment]
    for root in roots:
        tables = make(world, sharding)
        tables.reset(99)
        names.clear()
        loaded = store_of(world, root).load(into={"trial": {"model": dict(divided(tables))}})
        assert loaded is not None
        found.append({"whole": whole(tables), "parts": parts_of(tables), "read": sorted(set(names))})
    return found


def damaged(world: World, root: Path, damages: list[list[list[str]]]) -> list[Any]:
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
            state = store.load(into={"trial": {"model": dict(divided(tables))}})
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


def save_two(world: World, root: Path) -> None:
    tables = filled(world, "row")
    store = store_of(world, root)
    store.keep_last = 2
    for step in (1, 2):
        store.save(step, {"trial": {"model": dict(divided(tables))}, "position": step}, best=False)


def save_fails(world: World, root: Path, how: str) -> tuple[Any, ...]:
    """A save in which rank 1 cannot do its part."""
    tables = filled(world, "row")
    state = {"trial": {"model": dict(divided(tables))}, "position": 3}
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
        if how == "refused" and world.rank == 1:
            os.posix_fadvise = lambda *_: os.open("/nowhere", os.O_RDONLY)
        store.save(3, state, best=False)
    except RecperfError as error:
        return type(error).__name__, error.what, error.where.get("rank"), error is world.shared_error
    return ()
