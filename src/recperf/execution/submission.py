"""The MLPerf log of a run, and what a training writes into it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..distributed.ranks import current
from ..errors import ConfigError
from ..runs.mlperf.log import Facts, MLPerfLog
from ..train.loop import Position, Recipe

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
    """Open the log of a run on rank 0, and refuse on every rank another number of ranks than it states."""
    world, sizes = current(), ("global_batch_size", "micro_batch_size")
    log = MLPerfLog(folder / "mlperf.log", config.mlperf) if world.is_leader else None
    logged = world.on_leader(lambda: tuple(log.logged(name) if log else None for name in sizes))
    batch, share = config.train.batch_size, micro_batch(config.train.batch_size)
    if logged[0] == batch and logged[1] != share:
        raise ConfigError(
            f"a run with --mlperf.log needs one number of ranks: its log has {logged[1]} samples a rank, now {share}",
            where={"run": folder},
            fix="start a new run, or leave --mlperf.log out",
        )
    if log:
        log.begin()
    return log


def micro_batch(batch_size: int) -> int:
    """A rank's mean share of a batch; samples are dealt by work, so that shares differ from step to step."""
    return -(-batch_size // current().size)
