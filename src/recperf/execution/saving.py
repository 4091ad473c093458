"""Where and how the checkpoints of a training are written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from shutil import disk_usage
from typing import Any

from ..distributed.ranks import current
from ..errors import MachineError, RecperfError
from ..files import require_short
from ..folders import require_own_folders
from ..machine import available_bytes
from ..models.tiers.columns import table_columns
from ..train import checkpoint_folder as folders
from ..train.checkpoint import CheckpointStore, tensor_bytes
from ..train.config import TrainConfig
from ..units import size
from .workload import Trial

LARGE = 1 << 30
"""Bytes of a checkpoint from which on its size is announced."""


def in_background(config: TrainConfig, state: Any) -> bool:
    """Whether checkpoints are written while training goes on: that takes a copy of the state in memory.

    `auto` wants room for four, since the system needs memory for the files too. It copies no tables in files, which are
    there because memory is limited.
    """
    if config.checkpoint_background != "auto":
        return config.checkpoint_background == "on"
    return not any(one.in_files for one in table_columns(state)) and 4 * tensor_bytes(state) <= available_bytes()


def checkpoint_folder(run: Path, seed: int, steps: int) -> Path:
    """The folder of a seed's checkpoints; it may not be a link, nor the path of a file there, the longest that a run
    writes, be too long."""
    world = current()
    try:
        folder = require_own_folders(run, "checkpoints", f"seed-{seed}")
        require_short(folders.draft_of(folder / folders.name_of(steps)) / f"rank{world.size - 1}-00000.safetensors")
    except RecperfError as error:
        if isinstance(error, MachineError):
            error.where = {"run": str(run)}
        world.shared_error = error
        raise
    return folder


def require_room(run: Path, trial: Trial, config: TrainConfig, notice: Callable[[str], None]) -> None:
    """Refuse to train if the checkpoint at the end does not fit on the disk; say the size of a large one."""
    world = current()
    needed = int(world.total(tensor_bytes(trial.state())))
    free = world.on_leader(lambda: disk_usage(run).free)
    if needed > free and (config.checkpoint_end or config.checkpoint_epochs):
        world.shared_error = error = MachineError(
            f"a checkpoint takes {size(needed)} of disk; {size(free)} are free",
            where={"run": run},
            fix="free some space, --run-dir on another disk, or --train.no-checkpoint-end --train.no-checkpoint-epochs",
        )
        raise error
    if needed >= LARGE:
        notice(f"each checkpoint takes {size(needed)} of disk")


def open_store(folder: Path, trial: Trial, config: TrainConfig, notice: Callable[[str], None]) -> CheckpointStore:
    """The checkpoints of a trial, as its config wants them kept. Only a single process writes in the background."""
    world = current()
    if world.size == 1:
        background = in_background(config, trial.state())
        return CheckpointStore(folder=folder, notice=notice, keep_last=config.keep_last, background=background)
    from ..distributed.checkpoint import RankStore

    return RankStore(folder=folder, notice=notice, keep_last=config.keep_last, world=world)
