"""One training of a run: from its newest checkpoint, or from the start, to the end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from shutil import disk_usage
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..distributed.ranks import current
from ..errors import ConfigError, DataError, MachineError, RecperfError
from ..files import draft_of, require_short
from ..folders import require_own_folders
from ..jsonfile import as_json, require
from ..machine import available_bytes, out_of_memory
from ..models.tiers.columns import table_columns
from ..ops import choice
from ..phases import phase
from ..runs.result import Change
from ..runs.resume import OPERATORS, RANKS, changes, is_free, operator_changes, recorded_fields, require_allowed
from ..runs.schemas import SavedState
from ..stop import name_of
from ..train import checkpoint_folder as folders
from ..train.checkpoint import CheckpointStore, shape_mismatch, tensor_bytes
from ..train.config import TrainConfig
from ..train.loop import Position, train
from ..train.watch import Evaluator, LossLog, Minutes, StepTimer, TargetMet, Watchers, either, every
from ..units import size
from .quality_evidence import evidence_of, start_of
from .workload import Predictions, Prepared, Reporter, Trial, Workload, load

if TYPE_CHECKING:
    from ..runs.loggers import Curves
    from ..runs.mlperf.log import MLPerfLog
    from ..runs.record import Run
    from ..stop import StopFlag
    from .quality import Assessment
    from .starting import Start
    from .submission import Submission


class RunOfSeeds(Protocol):
    """What the training with one seed reads of its run: `execution.run.TrainingRun`."""

    workload: Workload
    config: Any
    prepared: Prepared
    record: Run
    stop: StopFlag
    report: Reporter
    assessment: Assessment
    log: MLPerfLog | None
    curves: Curves | None
    allow: tuple[str, ...]
    changed: tuple[Change, ...]

    @property
    def reached(self) -> Callable[[dict[str, float]], bool]: ...


class SeedTraining:
    """One training: logged, evaluated, saved, stopped and resumed."""

    def __init__(
        self, whole: RunOfSeeds, seed: int, trial: Trial, store: CheckpointStore, start: Start | None = None
    ) -> None:
        """Without a checkpoint the training begins with the weights of another run where there is a `start`."""
        self.whole, self.seed, self.trial, self.store, self.start = whole, seed, trial, store, start
        self.run, self.report = whole.record, whole.report
        self.contract = {**recorded_fields(whole.config), RANKS: current().size}
        """The config fields that a checkpoint is bound to, and free ones whose changes are logged."""
        self.submission: Submission | None = None
        if whole.log and whole.workload.submission:
            self.submission = load(whole.workload.submission)(trial, seed, whole.log)
        self.evaluator = Evaluator(
            recipe=trial.recipe, score=self._score, emit=self.emit, seed=seed, task=whole.workload.task,
            enough=whole.reached, log=self.submission,
        )  # fmt: skip
        self.minutes = Minutes(0)
        self._into: dict[str, Any] = {}
        """The state of the trial before anything was loaded."""
        self._unscored: int | None = None
        """The step of a checkpoint that lacks a score which an uninterrupted run would have saved with it."""
        self._predictions: tuple[Position, Predictions] | None = None
        """The position of the last evaluation, and what the model predicted."""
        store.accept, store.on_disk = self._accept, lambda: self.run.note_saved(seed)
        store.ever_saved = lambda: self.run.ever_saved(seed)

    def finish(self) -> dict[str, Any]:
        recipe, seed = self.trial.recipe, self.seed
        if self.submission:
            self.submission.log.start(self.submission.facts)
        # Nothing is looked at inside the timed region of a submission, nor of tables that several ranks share.
        looked_at = self.submission is None and current().size == 1
        began, weights = monotonic(), start_of(self.trial) if looked_at and self.start is None else None
        start = self.restore()
        if start.step:
            self.report.notice(f"seed {seed} resumes at step {start.step} of {recipe.steps}")
        self.report.trial(seed, recipe.steps, start.step)
        if self.whole.curves:
            self.whole.curves.begin(self.run, seed, start.step)
        reasons = self.whole.prepared.settings.reasons
        graph = reasons.get("graph")
        if not self.evaluator.met:
            watchers = self._watchers(recipe.steps - start.step)
            scored = self.evaluator.scored(start)
            if start.step and not scored and (start.batch < len(recipe.order) or not watchers.save_due(start)):
                self._unscored = start.step
            with contextlib.suppress(TargetMet):
                watchers.before_training(start)
                train(recipe, start, watchers)
        if reasons.get("graph") != graph:
            self._notice(f"CUDA graph {reasons['graph']}")
        last, chosen = self.evaluator.history[-1], self.evaluator.chosen
        if self.submission:
            self.submission.stop(last["step"], last["metrics"])
        early = last["step"] if last["step"] < recipe.steps else None
        if early is not None:
            why = "reached the target" if self.whole.reached(last["metrics"]) else "validation no longer improved"
            self._notice(f"seed {seed} stopped at step {early} of {recipe.steps}: {why}")
        if chosen is not last:
            self._return_to(chosen, start)
        predictions = self._last_predictions(chosen["step"], start)
        trained_s = monotonic() - began
        self.whole.assessment.trained(seed, self.trial, predictions)
        if looked_at:
            with phase("scoring", "what limits the quality"):
                evidence = evidence_of(self.trial, self.whole.prepared, predictions, weights, trained_s)
            self.run.note_learning(seed, evidence)
        best = max(self.evaluator.history, key=lambda entry: self.whole.workload.task.merit(entry["metrics"]))
        return {"seed": seed, "metrics": chosen["metrics"], "best": best, "stopped_early": early}

    def _return_to(self, chosen: dict[str, Any], start: Position) -> None:
        """Read the weights of the chosen evaluation back, and save them as those of the end of the training."""
        self.report.detail(f"seed {self.seed} ends with the weights of epoch {chosen['epoch']}, which validation chose")
        if self.store.load("best", into={"trial": self._into}) is None:
            what = "the checkpoint that validation chose is missing"
            raise DataError(what, where={"folder": self.store.folder}, fix="start a new run")
        end = self._predictions[0] if self._predictions else start
        self.store.supersede(end.step)
        self.save(end, False)

    @torch.no_grad()
    def _last_predictions(self, step: int, start: Position) -> Predictions:
        """Predictions of the weights that training ends with, which an earlier process may have scored."""
        if self._predictions is not None and self._predictions[0].step == step:
            return self._predictions[1]
        self.trial.recipe.model.train(False)
        return self.trial.predictions(start)

    def _notice(self, text: str) -> None:
        self.run.event("notice", seed=self.seed, text=text)
        self.report.notice(text)

    def emit(self, kind: str, **fields: Any) -> None:
        self.run.event(kind, **fields)
        if self.whole.curves:
            self.whole.curves.event(kind, fields)
        if kind == "metric":
            shown = {name: fields[name] for name in self.whole.workload.task.progress if name in fields}
            self.report.metric(fields["step"], fields["epoch"], shown)
        elif kind == "step" and self.submission:
            self.submission.loss(fields["step"], fields["loss"])

    def _score(self, at: Position) -> dict[str, float]:
        with self.whole.stop.interruptible():
            # First, since a model may be completed by what these rows say.
            validation_loss = self.trial.recipe.validation_loss
            chosen_by = {} if validation_loss is None else {self.whole.workload.task.choosing: validation_loss()}
            predictions = self.trial.predictions(at)
            self._predictions = at, predictions
            return {**self.trial.metrics(predictions), **chosen_by}

    def _watchers(self, steps: int) -> Watchers:
        """What watches the steps that are left."""
        recipe, settings, world = self.trial.recipe, self.whole.config.train, current()
        self.minutes = Minutes(settings.checkpoint_minutes, notice=self._notice)
        minutes_due = world.decide_on_leader(self.minutes)
        # A training of few steps has more norms. On a CPU that of a small model takes up to a tenth of its step.
        norm_every = min(50, max(10, recipe.steps // 100))
        return Watchers(
            recipe=recipe,
            losses=LossLog(emit=self.emit, seed=self.seed, norm_every=norm_every, rate=recipe.learning_rate),
            timer=StepTimer(
                emit=self.emit, seed=self.seed, expected=steps, sync=self.whole.prepared.settings.sync,
                alone=world.choose(True, several=False),
            ),
            evaluator=self.evaluator,
            save=self.save,
            progress=lambda position, loss, samples: self.report.step(position.step, loss, samples),
            should_stop=lambda: self.whole.stop.received is not None,
            stopped=self.stopped,
            evaluate_due=either(every(settings.evaluate_steps), recipe.evaluate_after),
            save_due=either(every(settings.checkpoint_steps), recipe.save_after, minutes_due),
            save_scored=settings.checkpoint_epochs,
            save_end=settings.checkpoint_end,
        )  # fmt: skip

    def restore(self) -> Position:
        """Load the newest checkpoint, and cut the logs back to its step so that no step is logged twice."""
        self._into = self.trial.state()
        saved = self.store.load(into={"trial": self._into})
        if saved is None:
            self.run.forget_events(self.seed)
            if self.whole.log:
                self.whole.log.rewind(None)
            self._log_changes(self.whole.changed, 0)
            if self.start:
                self.start.load(self.trial, self._into["model"])
            return Position()
        step, operators = saved["position"]["step"], saved["contract"].get(OPERATORS)
        changed, bound = self._changes(saved["contract"])
        where: dict[str, object] = {"run": self.run.folder, "checkpoint": f"step {step}"}
        require_allowed(bound, self.whole.allow, where)
        replaced = current().all_gather(choice.replaced(operators or {}))
        changed += operator_changes(operators, replaced, self.whole.allow, where)
        if not any(change.field.startswith("data.") for change in bound):
            self._require_baselines(saved["baselines"])
        self.evaluator.history.extend(saved["history"])
        self.run.rewind_events(saved["event_bytes"], step=step)
        if self.whole.log:
            self.whole.log.rewind(saved["mlperf"])
        self._log_changes(changed, step)
        return Position(**saved["position"])

    def _changes(self, saved: dict[str, Any]) -> tuple[list[Change], list[Change]]:
        """All fields that differ from those of a checkpoint, and those among them that could change a number."""
        changed = changes(saved, self.contract)
        return changed, [change for change in changed if not is_free(change.field)]

    def _accept(self, step: int, saved: dict[str, Any]) -> None:
        """Restore weights and random state from a checkpoint; refuse a forged one, so that an older one is tried."""
        self._require_own(step, saved)
        fault = self.run.log_fault(saved["event_bytes"], saved["event_digest"])
        if fault is not None:
            raise DataError(
                fault,
                where={"file": self.run.folder / "events.jsonl", "checkpoint": folders.name_of(step)},
                fix="restore the file, remove this checkpoint to continue from an older one, or start a new run",
            )
        _, bound = self._changes(saved["contract"])
        if any(change.field not in self.whole.allow for change in bound):
            # `restore` names them.
            return
        if not bound:
            self._require_position(saved["position"])
        mismatch = self._restore_trial(saved["trial"])
        if mismatch is not None and not bound:
            raise folders.Damaged(f"its state does not fit: {mismatch}")
        if mismatch is not None:
            raise ConfigError(
                f"the checkpoint does not fit this config: {'; '.join(change.text for change in bound)}",
                where={"run": self.run.folder, "state": mismatch},
                fix="resume with the config it was saved with, or start a new run",
            )
        try:
            torch.set_rng_state(saved["rng"]["cpu"])
            for index, state in enumerate(saved["rng"]["cuda"][: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(state, index)
        except (RuntimeError, LookupError, TypeError, AttributeError) as error:
            if out_of_memory(error):
                raise
            raise folders.Damaged(f"its random state is invalid: {' '.join(str(error).split())}") from None

    def _require_own(self, step: int, saved: dict[str, Any]) -> None:
        """Refuse what is not a state of this training at that step."""
        try:
            require(saved, SavedState, self.store.folder / folders.MANIFEST, what="is not a training state")
        except DataError as error:
            raise folders.Damaged(error.what) from None
        position = saved["position"]
        if position.keys() != vars(Position()).keys() or position["step"] != step:
            raise folders.Damaged(f"its position {position} does not match step {step}")
        if saved["seed"] != self.seed:
            raise folders.Damaged(f"it belongs to seed {saved['seed']}")
        if any(
            not entry["step"] <= step or self.whole.workload.task.leading not in entry["metrics"]
            for entry in saved["history"]
        ):
            raise folders.Damaged("its evaluations do not belong to this training")

    def _require_position(self, position: dict[str, int]) -> None:
        """Refuse a position that training with this config never reaches."""
        epoch, batch, step = position["epoch"], position["batch"], position["step"]
        batches, steps = len(self.trial.recipe.order), self.trial.recipe.steps
        # After an allowed change, epochs before it may have had more or fewer batches.
        counted = self.whole.allow or (step <= steps and epoch * batches + batch == step)
        if batch > batches or not counted:
            raise folders.Damaged(
                f"its position {position} is outside the training: {steps} steps, {batches} batches an epoch"
            )

    def _log_changes(self, changes: Iterable[Change], step: int) -> None:
        for change in changes:
            if change.field in (OPERATORS, RANKS):
                self.report.notice(f"{change.field} change from {change.was} to {change.now}")
            self.run.event("change", seed=self.seed, step=step, **as_json(change))

    def _require_baselines(self, digest: str | None) -> None:
        """Refuse baselines that were edited: they go into the result as they are. Those that are younger than the
        checkpoint are computed again."""
        now = self.run.digest("baselines.json")
        if digest is None:
            current().on_leader(lambda: (self.run.folder / "baselines.json").unlink(missing_ok=True))
        elif now not in (None, digest):
            # Every rank compares the digest that rank 0 read.
            current().shared_error = error = DataError(
                "baselines.json has changed since the checkpoint was saved",
                where={"run": self.run.folder},
                fix="remove it: the next start computes it again",
            )
            raise error

    def _restore_trial(self, saved: dict[str, Any]) -> str | None:
        """Restore the state of the trial, or say what does not fit."""
        # Copying would broadcast a tensor of one number over a larger one silently. Other parts of a state may have
        # shapes that depend on the data seen so far.
        parts = {part: self._into[part] for part in ("model", "optimizer") if part in self._into}
        mismatch = shape_mismatch(parts, saved)
        if mismatch is None:
            try:
                self.trial.restore(saved)
            except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
                from ..distributed.launch import is_peer_failure

                if out_of_memory(error) or is_peer_failure(error):
                    raise
                mismatch = " ".join(str(error).split()) or type(error).__name__
        return mismatch

    def save(self, position: Position, best: bool) -> None:
        if position.step == self._unscored and self.evaluator.scored(position):
            self.store.supersede(position.step)
        self.run.sync_events()
        uses_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        state = {
            "trial": self.trial.state(),
            "position": vars(position),
            "history": self.evaluator.history,
            # Dropout draws from torch's generators, and a user's own model may draw anything.
            "rng": {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all() if uses_gpu else []},
            "contract": {**self.contract, OPERATORS: choice.used()},
            "baselines": self.run.digest("baselines.json"),
            "event_bytes": self.run.event_bytes,
            "event_digest": self.run.event_digest(),
            "mlperf": self.whole.log.state() if self.whole.log else None,
            "seed": self.seed,
        }
        with self.minutes.saving():
            self.store.save(position.step, state, best=best)

    def stopped(self, position: Position) -> RecperfError:
        # The message says that the state is saved, so it must be on disk.
        self.store.wait()
        text = f"stopped by {name_of(self.whole.stop.received)} at step {position.step}"
        self.run.event("notice", seed=self.seed, text=text)
        return self.whole.stop.error(
            f" at step {position.step} of {self.trial.recipe.steps}; the state is saved",
            f"recperf run --resume {self.run.folder}{current().resume_options()}",
        )


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
        require_short(draft_of(folder / folders.name_of(steps)) / f"rank{world.size - 1}-00000.safetensors")
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
