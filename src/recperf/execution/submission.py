"""Writes a training into an MLPerf log."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..distributed.ranks import current
from ..errors import ConfigError
from ..train.loop import Position, Recipe

if TYPE_CHECKING:
    from ..runs.mlperf.log import Facts, MLPerfLog

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

    def loss(self, step: int, loss: float) -> None:
        if step % LOSS_EVERY == 0:
            self.log.train_loss(self.samples(step), loss, self.recipe.learning_rate(step - 1))

    def begins(self, at: Position) -> None:
        self.log.evaluation_begins(self.samples(at.step))

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
