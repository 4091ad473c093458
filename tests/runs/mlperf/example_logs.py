"""Logs of runs that never were: the benchmark's real sizes, with a curve that reaches the target where a test wants."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recperf.runs.mlperf.log import Facts, MLPerfLog, SubmissionConfig

TRAIN, HOLDOUT = 2_290_835_423, 2_058_204
SUBMISSION = SubmissionConfig(log=True, platform="a laptop")


def interval(batch: int) -> int:
    return math.ceil(0.001 * TRAIN / batch) * batch


def first_block(batch: int) -> int:
    return math.ceil((4480 * batch + 135_331_840) // 3 / interval(batch))


def facts(batch: int = 8192, seed: int = 1, **changed: Any) -> Facts:
    rate = 1e-6 * batch / 8192
    usual: dict[str, Any] = {
        "seed": seed,
        "train_samples": TRAIN,
        "eval_samples": HOLDOUT,
        "global_batch_size": batch,
        "learning_rate": rate,
        "table_learning_rate": rate,
        "warmup_steps": 24_000,
        "max_sequence_length": 4096,
        "eval_every_data_pct": 0.001,
        "skip_eval_epoch_pct": 0.025,
    }
    return Facts(**{**usual, **changed})


class Training:
    """A training that only logs: a loss a block, evaluations from the first block that may have one."""

    def __init__(self, log: MLPerfLog, facts: Facts, last: int, after: Callable[[int], None] | None = None) -> None:
        self.log, self.facts, self.last, self.after = log, facts, last, after

    def go(self, done: int = 0) -> None:
        batch = self.facts.global_batch_size
        for block in range(done + 1, self.last + 1):
            samples = block * interval(batch)
            rate = self.facts.learning_rate * (samples / batch - 1) / 24_000
            self.log.train_loss(samples, 0.14 - 0.001 * block, rate)
            if block >= first_block(batch):
                over = block == self.last
                self.log.evaluation_begins(samples)
                self.log.evaluation_ends(samples, 0.7501 if over else 0.7, goes_on=not over)
            if self.after:
                self.after(block)
        self.log.stop(self.last * interval(batch), reached=True)


def begun(path: Path, known: Facts, state: dict[str, Any] | None = None) -> MLPerfLog:
    """The log of a run that starts, or that continues from a checkpoint."""
    log = MLPerfLog(path, SUBMISSION)
    log.begin()
    log.start(known)
    log.rewind(state)
    return log


def write(path: Path, *, batch: int = 8192, seed: int = 1, last: int = 29, **changed: Any) -> Path:
    """A whole log; the target is reached after `last` blocks."""
    known = facts(batch, seed, **changed)
    log = begun(path, known)
    Training(log, known, last).go()
    log.close()
    return path
