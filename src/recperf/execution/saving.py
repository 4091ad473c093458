"""What a training writes beside its own log: where its checkpoints go, whether they fit there and are written while it
goes on; and an MLPerf log."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from shutil import disk_usage
from typing import TYPE_CHECKING, Any

from ..distributed.ranks import current
from ..errors import ConfigError, MachineError, RecperfError
from ..files import require_short
from ..folders import require_own_folders
from ..machine import available_bytes
from ..models.tiers.columns import table_columns
from ..train import checkpoint_folder as folders
from ..train.checkpoint import CheckpointStore, tensor_bytes
from ..train.config import TrainConfig
from ..train.loop import Position, Recipe
from ..units import size
from .workload import Trial

if TYPE_CHECKING:
    from ..runs.mlperf.log import Facts, MLPerfLog


LARGE = 1 << 30
"""Bytes of a checkpoint from which on its size is announced."""


def in_background(config: TrainConfig, state: Any, notice: Callable[[str], None] = lambda text: None) -> bool:
    """Whether checkpoints are written while training goes on: that takes a copy of the state in memory.

    `auto` wants room for four, since the system needs memory for the files too. It copies no tables in files, which are
    there because memory is limited.
    """
    if config.checkpoint_background != "auto":
        return config.checkpoint_background == "on"
    if any(columns.in_files for columns in table_columns(state)):
        return False
    state_bytes = tensor_bytes(state)
    if 4 * state_bytes <= available_bytes():
        return True
    notice(
        f"checkpoints are written while training waits: four copies of a state of {size(state_bytes)} "
        "do not fit into memory"
    )
    return False


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
        background = in_background(config, trial.state(), notice)
        return CheckpointStore(folder=folder, notice=notice, keep_last=config.keep_last, background=background)
    from ..distributed.checkpoint import RankStore

    if config.checkpoint_background == "on":
        notice("training waits while a checkpoint is written: several ranks write it together")
    return RankStore(folder=folder, notice=notice, keep_last=config.keep_last, world=world)


LOSS_EVERY = 50
"""Steps between two losses in the log."""


@dataclass(frozen=True, kw_only=True)
class Submission:
    """Writes the events of a training into its MLPerf log."""

    log: MLPerfLog
    facts: Facts
    recipe: Recipe
    samples: Callable[[int], int]
    """Returns the number of samples trained on after a number of steps."""
    target: float | None
    """The AUC to reach."""
    _before: list[dict[str, Any]] = field(default_factory=list)
    """The state of the log before an evaluation."""

    def loss(self, step: int, loss: float) -> None:
        if step % LOSS_EVERY == 0:
            self.log.train_loss(self.samples(step), loss, self.recipe.learning_rate(step - 1))

    def begins(self, at: Position) -> None:
        self._before[:] = [self.log.state()]
        self.log.evaluation_begins(self.samples(at.step))

    def abandoned(self) -> None:
        self.log.rewind(self._before[0])

    def ends(self, at: Position, metrics: dict[str, float], enough: bool) -> None:
        goes_on = not enough and at.step < self.recipe.steps
        self.log.evaluation_ends(self.samples(at.step), metrics["auc"], goes_on)

    def stop(self, step: int, metrics: dict[str, float]) -> None:
        """A run without a target has reached none."""
        self.log.stop(self.samples(step), self.target is not None and metrics["auc"] >= self.target)


def open_log(config: Any, folder: Path) -> MLPerfLog | None:
    """The MLPerf log of a run, where its config asks for one."""
    if not _has_log(config):
        return None
    from ..runs.mlperf.log import MLPerfLog

    return MLPerfLog(folder / "mlperf.log", config.mlperf)


def micro_batch(batch_size: int) -> int:
    """A rank's mean share of a batch; samples are dealt by work, so that shares differ from step to step."""
    return -(-batch_size // current().size)


def require_same_ranks(config: Any, log: MLPerfLog | None, folder: Path) -> None:
    """Refuse on every rank another number of ranks than the log states, which rank 0 has."""
    if not _has_log(config):
        return
    sizes = ("global_batch_size", "micro_batch_size")
    logged = current().on_leader(lambda: tuple(log.logged(name) if log else None for name in sizes))
    batch, share = config.train.batch_size, micro_batch(config.train.batch_size)
    if logged[0] == batch and logged[1] != share:
        raise ConfigError(
            f"a run with --mlperf.log needs one number of ranks: its log has {logged[1]} samples a rank, now {share}",
            where={"run": folder},
            fix="start a new run, or leave --mlperf.log out",
        )


def _has_log(config: Any) -> bool:
    options = getattr(config, "mlperf", None)
    return options is not None and bool(options.log)
