"""Measures steps of a workload: at the end of every run, and as a matched pair."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..distributed.ranks import current
from ..distributed.shared_run import window_of
from ..distributed.shares import own_part
from ..measure import measuring
from ..measure.ceilings import hot_bytes
from ..measure.cost import Cost
from ..measure.fixes import Fix, Predictor
from ..measure.measuring import MeasuredSteps, measure_steps
from ..measure.observing import Observer
from ..measure.peaks import with_threads
from ..measure.peaks.records import Peaks
from ..measure.profile import Subject
from ..measure.profile_records import Pair, Profile
from ..measure.records import Advice
from ..measure.trace.analyse import analyse
from ..measure.trace.records import StepTables
from ..runs.record import MEASURED, profile_of
from ..train.graph import GraphStep
from ..train.loop import Recipe, take_step
from .training import Job
from .workload import Prepared, Trial


def measure_run(job: Job, trial: Trial | None, peaks: Peaks | None) -> None:
    """Write profile.json, the ceilings of the machine, and pair.json where the workload has a matched pair; nothing
    where an earlier process of the run did so."""
    run, prepared, notice = job.run, job.prepared, job.report.notice
    if profile_of(run) is not None:
        return
    if peaks is not None:
        require_threads(peaks, notice)
    trial = trial or prepared.trial(job.config.seed)
    profile, pair, _ = measure_window(prepared, trial, peaks, confirm=CONFIRM_SECONDS)
    if current().choose(True, several=False):
        profile.advice = advise(prepared, profile, peaks)[1]
    # Files of an earlier start of this run would contradict the profile.
    run.remove(*MEASURED)
    for name, content in (("peaks.json", peaks), ("pair.json", pair), ("profile.json", profile)):
        if content is not None:
            run.write(name, content)


def tables_of(observer: Observer | None) -> StepTables | None:
    """Tables from the trace of the observed steps; None where there is none."""
    return analyse(observer.trace) if observer is not None and observer.trace and observer.traced else None


def advise(prepared: Prepared, profile: Profile, peaks: Peaks | None) -> tuple[list[Fix], list[Advice]]:
    """The fixes of a workload by their predicted gain, with an advice about each; where there are none, a larger batch
    if that helps."""
    predictor = Predictor(profile, peaks)
    switches, advice = predictor.suggest(prepared.fixes())
    larger = None if advice else predictor.larger_batch()
    return switches, advice if larger is None else [larger]


def require_threads(peaks: Peaks, say: Callable[[str], None]) -> None:
    """Measure and store the ceilings for the current number of threads where they are missing; ranks share those of
    all threads."""
    if current().choose(True, several=False):
        with_threads(peaks, torch.get_num_threads(), say)


CONFIRM_SECONDS = 2.0
"""Time limit of the experiments at the end of a run."""


class TrainingSteps(Subject):
    """Steps of a trial after its training, by this recipe."""

    def __init__(self, prepared: Prepared, trial: Trial, recipe: Recipe) -> None:
        self.recipe, self.order, self.first_epoch = recipe, recipe.order, recipe.epochs
        self.device, self.precision = prepared.settings.device_name, prepared.settings.precision
        self.row_bytes, self.table_bytes = prepared.table_bytes()
        self.sync, self.cost = prepared.settings.sync, prepared.step_cost
        self.trial, self.world, self.ranks = trial, current(), window_of(current())
        self.alone = current().choose(True, several=False)
        # With the last learning rate of the schedule the update does its full work and hardly changes the weights.
        whole, rate = recipe.whole_step, recipe.learning_rate(recipe.steps - 1)
        self.clocked = self.eager = None
        if isinstance(whole, GraphStep):
            self.eager = lambda batches: whole.eager(batches, rate)
            self.clocked = lambda batches: whole.clocked(batches, rate)

    def step(self, batches: Iterator[Any]) -> object:
        return take_step(self.recipe, batches, self.recipe.steps - 1)

    def rows_of(self, batch: Any) -> Tensor:
        return self.trial.rows_of(own_part(batch))

    def cost_of(self, batch: Any, ids: int, unique: int) -> dict[str, Cost]:
        return self.cost(own_part(batch), ids, unique)

    def tiers(self) -> Any:
        return self.trial.tiers()


def measure_window(
    prepared: Prepared, trial: Trial, peaks: Peaks | None, *, confirm: float = 0.0, **options: Any
) -> MeasuredSteps:
    """Measure steps after training, and confirm the verdict by experiments for up to `confirm` seconds, of which a
    matched pair is one. The other options are those of `measure_steps`."""
    arms = _arms(prepared, trial, peaks) if confirm else None
    return measure_steps(TrainingSteps(prepared, trial, trial.recipe), peaks, arms=arms, confirm=confirm, **options)


def measure_pair(prepared: Prepared, trial: Trial, peaks: Peaks | None) -> Pair | None:
    """Measure one model with ids whose rows fit a cache and with ids from the whole table; None where it has no such
    pair."""
    arms = _arms(prepared, trial, peaks)
    return measuring.measure_pair(arms, peaks) if arms else None


def _arms(prepared: Prepared, trial: Trial, peaks: Peaks | None) -> dict[str, Any] | None:
    """The steps of both arms with the rows that their ids refer to. No workload with a pair runs on several ranks."""
    arms = prepared.pair(trial, hot_bytes(peaks, prepared.settings.device_name, torch.get_num_threads()))
    return arms and {name: (TrainingSteps(prepared, trial, arm.recipe), arm.rows) for name, arm in arms.items()}
