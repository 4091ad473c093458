"""Timing, logging, evaluating and saving a training: small objects that `Watchers` calls after every step, and when
each of them is due.

On a GPU a step returns when its kernels are queued, so the host's clock says nothing about a single step. It is read
only where a stretch begins and ends; in between, marks in the queue of the device tell when each step was done.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic, perf_counter_ns
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import GateFailed, Interrupted, Stopped
from ..measure.clocks import StepMarks, timing_event
from ..measure.peaks.other_work import OtherWork
from ..ops.arguments import raise_if_any
from ..stop import reached
from ..tasks import Task
from .loop import Position, Recipe, RecordNorm

LONGEST = 10_000
"""Steps of a stretch of training, at most: the times of all of its steps are held until it ends."""


EVALUATIONS = 1000
"""Evaluations that are remembered, and saved with each checkpoint; the log of the run has all."""


class Emit(Protocol):
    def __call__(self, kind: str, **fields: Any) -> None: ...


@dataclass
class StepTimer:
    """Logs a `timing` event for every stretch of training, evaluation and save; `runs/speed.py` adds them up.

    A stretch of training begins with the shuffling of an epoch, at the end of the warm-up or after an evaluation or
    save, and ends with the next of these, or after LONGEST steps.
    """

    emit: Emit
    seed: int
    expected: int
    """Steps to come, of which the first 20, or a fifth, are warm-up."""
    sync: Callable[[], None] | None
    alone: bool
    """Whether no other rank works on this machine, whose work is not other work."""
    steps: int = 0
    """Steps of this process."""
    _began: int = 0
    """When the open stretch began; 0: there is none."""
    _epoch: int = 0
    """When the epoch began whose first step has not begun yet."""
    _shuffle: int = 0
    _samples: int = 0
    _batch: int = 0
    _first: int = 0
    """`steps` when the stretch began."""
    _others: OtherWork = field(default_factory=OtherWork)

    def __post_init__(self) -> None:
        self.marks = StepMarks(timing_event if self.sync else None)
        self.warmup = min(20, self.expected // 5)

    def before_epoch(self) -> None:
        if not self._began:
            self._begin()
        self._epoch = perf_counter_ns()

    def before_step(self) -> None:
        if self._epoch:
            self._shuffle += perf_counter_ns() - self._epoch
            self._epoch = 0
            self.marks.begin()

    def after_step(self, position: Position, samples: int) -> None:
        self.marks.end_step()
        self.steps += 1
        self._samples += samples
        self._batch = max(self._batch, samples)
        if self.steps == self.warmup or self.steps - self._first >= LONGEST:
            self._end(position, "warmup" if self.steps == self.warmup else "steady")
            self._begin()

    @contextmanager
    def aside(self, part: str, position: Position) -> Iterator[None]:
        """Ends the stretch of training, times what is done instead, and begins the next stretch."""
        began = self._end(position, "warmup" if self.steps < self.warmup else "steady")
        yield
        self._begin()
        self.emit(
            "timing", seed=self.seed, step=position.step, part=part, seconds=round((self._began - began) / 1e9, 9)
        )

    def _begin(self) -> None:
        if self.alone:
            self._others = OtherWork()
        if self.sync:
            self.sync()
        self._began, self._first = perf_counter_ns(), self.steps
        self._shuffle = self._samples = self._batch = 0
        self.marks.begin()

    def _end(self, position: Position, part: str) -> int:
        """Log the stretch of training and return the moment at which it ended."""
        if self.sync:
            self.sync()
        ended = perf_counter_ns()
        times, steps = self.marks.read(), self.steps - self._first
        if steps:
            self.emit(
                "timing", seed=self.seed, step=position.step, part=part, seconds=round((ended - self._began) / 1e9, 9),
                steps=steps, samples=self._samples, batch=self._batch, shuffle_s=round(self._shuffle / 1e9, 9),
                other_work=self._others.share() if self.alone else None,
                step_ms=[round(ns / 1e6, 4) for ns in times] if part == "steady" else [],
            )  # fmt: skip
        return ended


DIVERGED = "lower --train.learning-rate; the last checkpoint is from before it"


Due = Callable[[Position], bool]
"""Whether something is due at a position; called once after every step."""


def never(_: Position) -> bool:
    return False


def every(steps: int) -> Due:
    """Due every `steps` steps; 0 means never."""
    return (lambda at: at.step % steps == 0) if steps else never


def either(*dues: Due) -> Due:
    """Due when any is; each is called, since one may measure time."""
    return lambda at: max([due(at) for due in dues])


SAVE_SHARE = 0.05
"""Share of the time that saves every some minutes may take."""


class Minutes:
    """Due every `minutes` minutes since the last save; 0 means never. Less often if saves would take more than
    SAVE_SHARE of the time, which `notice` says once."""

    def __init__(
        self,
        minutes: float,
        *,
        notice: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.seconds = self._interval = 60 * minutes
        self.clock, self.notice = clock, notice
        self._last = clock()
        self._announced = False

    def __call__(self, _: Position | None = None) -> bool:
        return bool(self.seconds) and self.clock() - self._last >= self._interval

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Time a save, after which the minutes count anew."""
        began = self.clock()
        yield
        self._last = self.clock()
        cost = self._last - began
        self._interval = max(self.seconds, cost / SAVE_SHARE)
        if 0 < self.seconds < self._interval and not self._announced:
            self._announced = True
            self.notice(
                f"a save takes {cost:.1f} s: the next is due after {self._interval:.0f} s, so that saves take at most "
                f"{100 * SAVE_SHARE:.0f} % of the time"
            )


@dataclass
class LossLog:
    """Collects losses, and at some steps the norm of the gradient, on their device and logs them in groups, so that no
    step waits for a GPU."""

    emit: Emit
    seed: int
    group: int = 50
    norm_every: int = 0
    """Log the norm and the learning rate of the first step and then every this many steps; 0: of none."""
    rate: Callable[[int], float] = lambda step: math.nan
    last: float = math.nan
    _pending: list[tuple[int, Tensor]] = field(default_factory=list)
    _norms: dict[int, Tensor] = field(default_factory=dict)

    def before_step(self, step: int) -> RecordNorm | None:
        due = self.norm_every and (step == 1 or step % self.norm_every == 0)
        return (lambda norm: self._norms.__setitem__(step, norm)) if due else None

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
        norms = dict(zip(self._norms, torch.stack([*self._norms.values()]).tolist())) if self._norms else {}
        raise_if_any(losses_N.device)
        self._pending.clear()
        self._norms.clear()
        for step, loss in zip(steps, losses):
            if not math.isfinite(loss):
                raise GateFailed(f"the loss is {loss} at step {step}", fix=DIVERGED)
            self.emit("step", seed=self.seed, step=step, loss=loss, **self._more(step, norms))
        self.last = losses[-1]

    def _more(self, step: int, norms: dict[int, float]) -> dict[str, float | None]:
        """What is logged of some steps only."""
        if step not in norms:
            return {}
        norm = norms[step]
        return {"gradient_norm": norm if math.isfinite(norm) else None, "learning_rate": float(self.rate(step - 1))}


class TargetMet(Exception):
    """Ends a training whose score meets the target; not an error."""


class EvaluationLog(Protocol):
    """A second log of evaluations, as MLPerf has one."""

    def begins(self, at: Position) -> None: ...

    def abandoned(self) -> None:
        """Undoes `begins`, because a signal ended the scoring."""

    def ends(self, at: Position, metrics: dict[str, float], enough: bool) -> None: ...


@dataclass
class Evaluator:
    """Scores the validation rows and remembers all scores."""

    recipe: Recipe
    score: Callable[[Position], dict[str, float]]
    emit: Emit
    seed: int
    task: Task
    enough: Callable[[dict[str, float]], bool] = lambda metrics: False
    """Whether these metrics meet the target, which ends the training."""
    log: EvaluationLog | None = None
    history: list[dict[str, Any]] = field(default_factory=list)

    @torch.no_grad()
    def run(self, position: Position) -> bool:
        """Evaluate now; true when it is better than all before."""
        reached("evaluation: due")
        if self.log:
            self.log.begins(position)
        self.recipe.model.train(False)
        try:
            metrics = self.score(position)
        except (Stopped, Interrupted):
            if self.log:
                self.log.abandoned()
            raise
        self.recipe.model.train()
        reached("evaluation: scored")
        # After the scoring, so that a signal in it changes nothing that is saved.
        if (training := self.recipe.training_metrics()) is not None:
            self.emit("training", seed=self.seed, step=position.step, epoch=position.epoch, **training)
        if facts := self.recipe.evaluation_facts(position):
            self.emit("evaluation", seed=self.seed, step=position.step, epoch=position.epoch, **facts)
        for name, value in metrics.items():
            # The update of a step whose loss was finite can make weights infinite.
            if not math.isfinite(value):
                raise GateFailed(f"the {name} of the validation rows is {value} at step {position.step}", fix=DIVERGED)
        best = all(self.task.merit(metrics) > self.task.merit(past["metrics"]) for past in self.history)
        self.history.append({"step": position.step, "epoch": position.epoch, "metrics": metrics})
        self._forget()
        self.emit("metric", seed=self.seed, step=position.step, epoch=position.epoch, split="valid", **metrics)
        if self.log:
            self.log.ends(position, metrics, self.enough(metrics))
        reached("evaluation: logged")
        return best

    def _forget(self) -> None:
        """Leave out the oldest of very many evaluations: none that is counted since the chosen one, nor the best."""
        if len(self.history) <= EVALUATIONS:
            return
        chosen, best = self.chosen, max(self.history, key=lambda entry: self.task.merit(entry["metrics"]))
        newest = self.history.index(chosen) if self.recipe.patience else len(self.history) - 1
        old = [entry for entry in self.history[:newest] if entry is not chosen and entry is not best]
        if old:
            self.history.remove(old[0])

    def scored(self, position: Position) -> bool:
        """Whether the weights at this position have been scored."""
        return bool(self.history) and bool(self.history[-1]["step"] == position.step)

    @property
    def chosen(self) -> dict[str, Any]:
        """The evaluation of the weights that training would end with now."""
        return self.history[self.task.chosen([entry["metrics"] for entry in self.history])]

    @property
    def met(self) -> bool:
        """Whether the last score meets the target, or the last ones brought nothing better."""
        if not self.history:
            return False
        waited = len(self.history) - 1 - self.history.index(self.chosen)
        return self.enough(self.history[-1]["metrics"]) or 0 < self.recipe.patience <= waited


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
    save_end: bool = True

    def before_training(self, start: Position) -> None:
        """Evaluate a state that a signal saved before the evaluation due there; `train` does so at an epoch's end."""
        due = start.batch < len(self.recipe.order) and self.evaluate_due(start)
        due = self._epoch_due(start) if start.batch == 0 else due
        if start.step and due and not self.evaluator.scored(start):
            self._evaluate(start, self.save_due(start))

    def before_epoch(self) -> None:
        self.timer.before_epoch()

    def before_step(self, step: int) -> RecordNorm | None:
        self.timer.before_step()
        return self.losses.before_step(step)

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
        # Before saving, so that a saved state lacks a score that was due only where a signal came. After the last batch
        # of an epoch `after_epoch` evaluates.
        due = self.evaluate_due(position) and position.batch < len(self.recipe.order)
        best = self._score(position) if due and not self.should_stop() else False
        if self.should_stop():
            self._save(position, best)
            raise self.stopped(position)
        if self.save_due(position) or (due and self._saves_score(position)):
            self._save(position, best)
        if due and self.evaluator.met:
            raise TargetMet

    def after_epoch(self, position: Position) -> None:
        if self._epoch_due(position) and not self.evaluator.scored(position):
            self._evaluate(position)

    def _epoch_due(self, position: Position) -> bool:
        """Whether an evaluation is due at the end of an epoch."""
        last = position.step >= self.recipe.steps
        return last or position.epoch % self.recipe.evaluate_epochs == 0

    def _evaluate(self, position: Position, save: bool = False) -> None:
        best = self._score(position)
        if save or self._saves_score(position):
            self._save(position, best)
        if self.evaluator.met:
            raise TargetMet

    def _saves_score(self, position: Position) -> bool:
        ends = position.step >= self.recipe.steps or self.evaluator.met
        # The best of these is read back in the end.
        validated = self.evaluator.task.choosing in self.evaluator.history[-1]["metrics"]
        return self.save_scored or validated or (self.save_end and ends)

    def _score(self, position: Position) -> bool:
        self.losses.flush()
        try:
            with self.timer.aside("evaluation", position):
                return self.evaluator.run(position)
        except (Stopped, Interrupted):
            # A long evaluation must not delay the save; the resumed training begins with it.
            self.save(position, False)
            raise self.stopped(position) from None

    def _save(self, position: Position, best: bool) -> None:
        self.losses.flush()
        with self.timer.aside("save", position):
            self.save(position, best)
