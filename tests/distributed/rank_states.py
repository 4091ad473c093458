"""States of trials by way of a checkpoint: what ranks save one process reads whole, and the other way round."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from recperf.distributed.store import RankStore
from recperf.distributed.world import World
from recperf.train.checkpoint import CheckpointStore, read_state
from recperf.train.checkpoint_folder import name_of


@contextmanager
def shared_folder(world: World) -> Iterator[Path]:
    folder = Path(world.of_first(tempfile.mkdtemp))
    try:
        yield folder
    finally:
        world.barrier()
        if world.leads:
            shutil.rmtree(folder)


def store_of(world: World, folder: Path) -> RankStore:
    return RankStore(folder=folder, notice=print, world=world)


def whole_state(world: World, trial: Any) -> dict[str, Any]:
    """On rank 0 what one process reads of what all ranks saved; nothing on the others."""
    with shared_folder(world) as folder:
        store_of(world, folder).save(1, {"trial": trial.state()}, best=False)
        return read_state(folder / name_of(1), None)["trial"] if world.leads else {}


def restore(world: World, trial: Any, state: dict[str, Any]) -> None:
    """Go on from what one process saves, which only rank 0 looks at."""
    with shared_folder(world) as folder:
        if world.leads:
            CheckpointStore(folder=folder, notice=print).save(1, {"trial": state}, best=False)
        loaded = store_of(world, folder).load(into={"trial": trial.state()})
        assert loaded is not None
        trial.restore(loaded["trial"])
