"""Logging, timing and evaluating a training: small objects that `Watchers` calls after every step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import GateFailed
from ..measure.device_clock import EventClock, step_clock
from ..measure.spans import StepClock
from ..ops.faults import raise_if_any
from ..points import reached
from .cadence import Due, never
from .loop import Position, Recipe


class Emit(Protocol):
    def __call__(self, kind: str, **fields: Any) -> None: ...


@dataclass
class LossLog:
    """Collects losses on their device and logs them in groups, so that no step waits for a GPU."""

    emit: Emit
    seed: int
    group: int = 50
    last: float = math.nan
    _pending: list[tuple[int, Tensor]] = field(default_factory=list)

    def after_step(self, position: Position, loss: Tensor) -> None:
        self._pending.append((position.step, loss))
        if len(self._pending) >= self.group:
            self.flush()

    def flush(self) -> None:
        """Log the pending losses. Called before every save, so that a state after a NaN loss is never saved."""
        if not self._pending:
            return
        steps = [step for step, _ in self._pending]
        losses_N = torch.stack([loss for _, loss in self._pending])
        losses = losses_N.tolist()
        raise_if_any(losses_N.device)
        self._pending.clear()
        for step, loss in zip(steps, losses):
            if not math.isfinite(loss):
                raise GateFailed(
                    f"the loss is {loss} at step {step}",
                    fix="lower --train.learning-rate; the last checkpoint is from before it",
                )
            self.emit("step", seed=self.seed, step=step, loss=loss)
        self.last = losses[-1]


@dataclass
class StepTimer:
    """Measures the wall time of every step, and in some steps each span. Warm-up steps do not count."""

    emit: Emit
    seed: int
    sync: Callable[[], None] | None = None
    every: int = 16
    warmup: int = 20
    step_ns: list[int] = field(default_factory=list)
    parts: list[tuple[int, dict[str, int]]] = field(default_factory=list)
    samples: int = 0
    train_ns: int = 0
    setup_ns: int = 0
    """Time before the first step of epochs: shuffling."""
    steps: int = 0
    _began: int = 0
    _epoch: int = 0
    _clock: StepClock | EventClock | None = None

    @classmethod
    def for_training(cls, steps: int, *, emit: Emit, seed: int, sync: Callable[[], None] | None) -> StepTimer:
        """Times spans in every 16th step, more often in a short training; the warm-up is 20 steps, or a fifth."""
        return cls(emit=emit, seed=seed, sync=sync, every=max(1, min(16, steps // 20)), warmup=min(20, steps // 5))

    def before_epoch(self) -> None:
        self._epoch = perf_counter_ns()

    def before_step(self, step: int) -> None:
        now = perf_counter_ns()
        if self._epoch:
            self.setup_ns += now - self._epoch
            self.train_ns += now - self._epoch
            self._epoch = 0
        # On a GPU a step returns before its work is done, so only steps with a clock are timed there.
        if self.steps >= self.warmup and step % self.every == 0:
            self._clock = step_clock(self.sync)
            self._clock.begin()
        self._began = perf_counter_ns()

    def after_step(self, position: Position, samples: int) -> None:
        if self._clock:
            wall, parts = self._clock.end()
            self._clock = None
            self.parts.append((wall, parts))
            self.emit(
                "span",
                seed=self.seed,
                step=position.step,
                ms={name: round(ns / 1e6, 6) for name, ns in {"step": wall, **parts}.items()},
            )
            if self.sync:
                self.step_ns.append(wall)
            self.train_ns += wall
        else:
            wall = perf_counter_ns() - self._began
            if self.steps >= self.warmup and not self.sync:
                self.step_ns.append(wall)
            self.train_ns += wall
        self.samples += samples
        self.steps += 1

    def wait_for_device(self) -> None:
        """Wait for queued kernels, so that they count as training time."""
        if self.sync:
            began = perf_counter_ns()
            self.sync()
            self.train_ns += perf_counter_ns() - began


class TargetMet(Exception):
    """Ends a training whose score meets the target; not an error."""


@dataclass
class Evaluator:
    """Scores the validation rows and remembers all scores."""

    recipe: Recipe
    score: Callable[[Position], dict[str, float]]
    emit: Emit
    seed: int
    enough: Callable[[dict[str, float]], bool] = lambda metrics: False
    """Whether these metrics meet the target, which ends the training."""
    begins: Callable[[Position], None] = lambda at: None
    ends: Callable[[Position, dict[str, float]], None] = lambda at, metrics: None
    history: list[dict[str, Any]] = field(default_factory=list)

    @torch.no_grad()
    def run(self, position: Position) -> bool:
        """Evaluate now; true when the AUC is better than all before."""
        reached("evaluation: due")
        self.begins(position)
        if (training := self.recipe.training_metrics()) is not None:
            self.emit("training", seed=self.seed, step=position.step, epoch=position.epoch, **training)
        if facts := self.recipe.evaluation_facts(position):
            self.emit("evaluation", seed=self.seed, step=position.step, epoch=position.epoch, **facts)
        self.recipe.model.train(False)
        metrics = self.score(position)
        self.recipe.model.train()
        reached("evaluation: scored")
        best = all(metrics["auc"] > past["metrics"]["auc"] for past in self.history)
        self.history.append({"step": position.step, "epoch": position.epoch, "metrics": metrics})
        self.emit("metric", seed=self.seed, step=position.step, epoch=position.epoch, split="valid", **metrics)
        self.ends(position, metrics)
        if not self.enough(metrics):
            self.recipe.prepare_evaluation(position)
        reached("evaluation: logged")
        return best

    def scored(self, position: Position) -> bool:
        """Whether the weights at this position have been scored."""
        return bool(self.history) and bool(self.history[-1]["step"] == position.step)

    @property
    def met(self) -> bool:
        """Whether the last score meets the target."""
        return bool(self.history) and self.enough(self.history[-1]["metrics"])


@dataclass
class Watchers:
    """Calls each watcher in an order that matters: losses are logged before a state is evaluated or saved."""

    recipe: Recipe
    losses: LossLog
    timer: StepTimer
    evaluator: Evaluator
    save: Callable[[Position, bool], None]
    progress: Callable[[Position, float, int], None]
    should_stop: Callable[[], bool]
    stopped: Callable[[Position], Exception]
    evaluate_due: Due = never
    save_due: Due = never
    save_scored: bool = True

    def before_epoch(self) -> None:
        self.timer.before_epoch()

    def before_step(self, step: int) -> None:
        self.timer.before_step(step)

    def after_step(self, position: Position, loss: Tensor, samples: int) -> None:
        self.timer.after_step(position, samples)
        self.losses.after_step(position, loss)
        self.progress(position, self.losses.last, samples)
        if events := self.recipe.events_after(position):
            reached("window: left")
            # Keeps the order of the log independent of where an interrupted run was saved.
            self.losses.flush()
            for event in events:
                self.losses.emit(**event, seed=self.losses.seed, step=position.step)
            reached("window: logged")
        # Before saving, so that a saved state never lacks a score that was due. After the last batch of an epoch
        # `after_epoch` evaluates.
        due = self.evaluate_due(position) and position.batch < len(self.recipe.order)
        best = self._score(position) if due else False
        if self.should_stop():
            self.losses.flush()
            self.save(position, best)
            raise self.stopped(position)
        if self.save_due(position) or (due and self.save_scored):
            self.losses.flush()
            self.save(position, best)
        if due and self.evaluator.met:
            raise TargetMet

    def after_epoch(self, position: Position) -> None:
        if self.evaluator.scored(position):
            return
        best = self._score(position)
        if self.save_scored:
            self.save(position, best)
        if self.evaluator.met:
            raise TargetMet

    def _score(self, position: Position) -> bool:
        self.timer.wait_for_device()
        self.losses.flush()
        return self.evaluator.run(position)
