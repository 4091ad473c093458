"""One training of a run: from its newest checkpoint, or from the start, to the end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from ..distributed.record import shared_store
from ..distributed.world import current
from ..runs.record import Run
from ..runs.resume import noted_of
from ..train.cadence import Due, Minutes, either, every, never
from ..train.checkpoint import CheckpointStore
from ..train.loop import Position, train
from ..train.stop import StopFlag
from ..train.watch import Evaluator, LossLog, StepTimer, TargetMet, Watchers
from .keeper import Keeper, open_store
from .submission import Submission
from .workload import Prepared, Trial


class Reporter(Protocol):
    """Who is told how it goes: a terminal, or nobody."""

    def notice(self, text: str) -> None: ...

    def trial(self, seed: int, total_steps: int, done: int) -> None: ...

    def step(self, step: int, loss: float, samples: int) -> None: ...

    def metric(self, step: int, epoch: int, metrics: dict[str, float]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Training:
    """One seed."""

    seed: int
    trial: Trial
    prepared: Prepared
    config: Any
    run: Run
    stop: StopFlag
    report: Reporter
    enough: Callable[[dict[str, float]], bool]
    """Whether a score ends it."""
    submission: Submission | None = None
    allow: tuple[str, ...] = ()
    """Fields that may differ from those it was begun with."""

    def finish(self) -> tuple[dict[str, Any], StepTimer]:
        """Train to the end: what trial-<seed>.json says, and the times of this process's steps."""
        folder = self.run.folder / "checkpoints" / f"seed-{self.seed}"
        with shared_store(open_store(folder, self.trial, self.config.train, self.report.notice), current()) as store:
            return self._finish(store)

    def _finish(self, store: CheckpointStore) -> tuple[dict[str, Any], StepTimer]:
        recipe, seed = self.trial.recipe, self.seed
        timer = StepTimer.for_training(recipe.steps, emit=self.emit, seed=seed, sync=self.prepared.settings.sync)
        evaluator = self._evaluator()
        keeper = self._keeper(evaluator, store)
        if self.submission:
            self.submission.log.start(self.submission.facts)
        start = keeper.restore()
        if start.step:
            self.report.notice(f"seed {seed} goes on at step {start.step} of {recipe.steps}")
        self.report.trial(seed, recipe.steps, start.step)
        if not evaluator.met:
            recipe.ahead(start)
            with contextlib.suppress(TargetMet):
                train(recipe, start, self._watch(timer, evaluator, keeper))
        last = evaluator.history[-1]
        if self.submission:
            self.submission.stop(last["step"], last["metrics"])
        early = last["step"] if last["step"] < recipe.steps else None
        if early is not None:
            text = f"seed {seed} met the target at step {early} of {recipe.steps} and stopped"
            self.run.event("notice", seed=seed, text=text)
            self.report.notice(text)
        best = max(evaluator.history, key=lambda entry: float(entry["metrics"]["auc"]))
        return {"seed": seed, "metrics": last["metrics"], "best": best, "stopped_early": early}, timer

    def emit(self, kind: str, **fields: Any) -> None:
        self.run.event(kind, **fields)
        if kind == "metric":
            shown = {name: fields[name] for name in ("accuracy", "auc", "log_loss")}
            self.report.metric(fields["step"], fields["epoch"], shown)
        elif kind == "step" and self.submission:
            self.submission.loss(fields["step"], fields["loss"])

    def _evaluator(self) -> Evaluator:
        recipe, told = self.trial.recipe, self.submission

        def ends(at: Position, metrics: dict[str, float]) -> None:
            if told:
                told.ends(at, metrics, self.enough(metrics))
            if not self.enough(metrics):
                recipe.ahead(at)

        return Evaluator(
            score=self.trial.score,
            emit=self.emit,
            seed=self.seed,
            model=recipe.model,
            enough=self.enough,
            training=recipe.seen,
            about=recipe.about_score,
            begins=told.begins if told else lambda at: None,
            ends=ends,
        )

    def _keeper(self, evaluator: Evaluator, store: CheckpointStore) -> Keeper:
        return Keeper(
            seed=self.seed,
            trial=self.trial,
            evaluator=evaluator,
            run=self.run,
            store=store,
            stop=self.stop,
            contract=noted_of(self.config),
            allow=self.allow,
            log=self.submission.log if self.submission else None,
        )

    def _minutes(self) -> Due:
        minutes = self.config.train.checkpoint_minutes
        return current().decide_on_leader(Minutes(minutes)) if minutes else never

    def _watch(self, timer: StepTimer, evaluator: Evaluator, keeper: Keeper) -> Watchers:
        recipe, chosen = self.trial.recipe, self.config.train
        return Watchers(
            losses=LossLog(emit=self.emit, seed=self.seed),
            timer=timer,
            evaluator=evaluator,
            save=keeper.save,
            progress=lambda position, loss, samples: self.report.step(position.step, loss, samples),
            should_stop=lambda: self.stop.received is not None,
            stopped=keeper.stopped,
            batches=len(recipe.order),
            events_after=recipe.events_after,
            evaluate_due=either(every(chosen.evaluate_steps), recipe.evaluate_after),
            save_due=either(every(chosen.checkpoint_steps), recipe.save_after, self._minutes()),
            save_scored=chosen.checkpoint_epochs,
        )
