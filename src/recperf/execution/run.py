"""One run of a workload, from its config to its result. Read it from top to bottom: the folder is opened, the data
prepared, every seed trained, a window of steps measured, and result.json written.

`recperf run` and `recperf.run` make a `TrainingRun` and call `train`; several ranks each do so, and rank 0 writes.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from ..config import to_json, with_absolute_paths
from ..distributed.job import job, launched, remember_run, remembered_run, restarted, same_job
from ..distributed.ranks import current
from ..distributed.shared_run import require_same_config, share_run, share_stop
from ..errors import ConfigError, DataError, MachineError, RecperfError, UsageError
from ..files import read_regular, require_writable, write_atomic
from ..folders import refuse_foreign
from ..jsonfile import as_json, require
from ..machine import machine_facts
from ..phases import Phases, phase, working
from ..runs.derive import meets, result_of
from ..runs.evidence import Evidence, differences, profile_of, seal
from ..runs.record import JOB, MEASURED, Busy, Run, checkout, now, packages, read_config, read_saved_config
from ..runs.result import SCHEMA, Change, Data, Result, Target, Verified, checked
from ..runs.result import TrialResult as TrialFile
from ..runs.resume import (
    RANKS,
    allowed_fields,
    changed_before,
    changes,
    fixed_fields,
    free_changes,
    operator_changes,
    operators_text,
    record_changes,
    recorded_fields,
    require_allowed,
    since_start,
)
from ..runs.schemas import Machine, Progress, read_file
from ..stop import FLAG, StopFlag, poll
from ..tasks import Task, named
from .workload import OTHER_FEATURES, Prepared, Reporter, Trial, Workload, load

if TYPE_CHECKING:
    from ..runs.loggers import Curves
    from ..runs.mlperf.log import MLPerfLog
    from .quality import Assessment
    from .starting import Start

LEASE_S = 120.0
"""Seconds in which a file server frees the locks of a host that is gone; Linux's leases last 90 (NFS 4)."""
RETRY_S = 10
"""Seconds between two attempts to lock a run."""


@dataclass(kw_only=True)
class TrainingRun:
    """One run of a workload in this process, alone or as one of several ranks."""

    workload: Workload
    config: Any
    report: Reporter
    """Shows progress: a terminal, or nothing."""
    resume: Path | None = None
    """The run to resume; None: a new one."""
    saved: Any = None
    """The config that the resumed run was saved with."""
    folder: Path | None = None
    """The folder of a new run, and afterwards that of this one; None: runs/<workload>-<time>-<id>."""
    allow_change: tuple[str, ...] = ()
    """Config fields of a resumed run that may change although they affect its numbers."""
    loggers: tuple[str, ...] = ()
    """Where curves are sent; a resumed run remembers it."""
    peaks: bool = True
    """Whether to measure the ceilings of this machine, where none are saved."""
    measured: bool = True
    """Whether to measure what limits a step after the training."""

    record: Run = field(init=False)
    """The run's folder, open for writing."""
    prepared: Prepared = field(init=False)
    phases: Phases = field(init=False)
    stop: StopFlag = field(init=False)
    allow: tuple[str, ...] = ()
    """Config fields that may differ from those the run was started with."""
    changed: tuple[Change, ...] = ()
    """Config fields that do differ, for seeds that have no checkpoint."""
    curves: Curves | None = None
    log: MLPerfLog | None = None
    assessment: Assessment = field(init=False)
    """Receives the last predictions of each seed."""
    began: float | None = None
    """When the user started to wait; None: when training is called."""
    reached: Callable[[dict[str, float]], bool] = lambda metrics: False
    """Whether metrics are good enough to end a training."""

    def __post_init__(self) -> None:
        self.config = with_absolute_paths(self.config)
        if self.resume and self.folder:
            raise UsageError("--run-dir cannot be combined with --resume, which names the folder")
        if self.allow_change and not self.resume:
            raise UsageError("--allow-change needs --resume: a new run may have any config")
        if self.resume:
            self._allowed_changes()
        # Reports find the task by the name that the run will have of it.
        task = named(self.workload.task.name)
        for name, bound in vars(self.config.target).items():
            if name not in ("beat", *task.bounds) and bound is not None and not self.resume:
                what = f"target.{name} is {bound:g}, which {self.workload.name} does not measure"
                raise ConfigError(what, where={"task": task.name}, fix="--target.beat, or no target")

    def check(self) -> tuple[str, Path]:
        """Check everything that can be checked without training; returns the name of the data and the run's folder."""
        data = self.workload.check(self.config)
        place = self.resume or self.folder or Path("runs") / f"{self.workload.name}-<time>-<id>"
        if not self.resume and self.folder and (self.folder / "config.json").exists():
            raise UsageError("the run folder already holds a run", where={"folder": self.folder})
        if not self.resume:
            refuse_foreign(place)
        require_writable(place)
        if self.config.train.device == "cuda":
            from ..train.device import choose

            choose(self.config.train, largest_product_flops=0)
        return data, place

    def train(self) -> Result | None:
        """Train, or go on, until there is a result; None on ranks other than 0, which write nothing."""
        shown = self.report.working if current().is_leader else None
        with Phases(shown, began=self.began).current() as self.phases:
            return self._train()

    def _train(self) -> Result | None:
        world, remembered = current(), remembered_run()
        if world.size > 1:
            poll()
            world.join(self.config.train.device, self.config.distributed.timeout_s)
            require_same_config(world, self.workload.name, self.config)
            world.report_ranks(self.report.say)
            # Rank 0 may be on a host that has just come.
            remembered = next(filter(None, world.all_gather(remembered)), None)
        if not world.is_leader:
            self._follow()
            return None
        begun = self._open(remembered)
        try:
            return self._result(begun)
        except (ConfigError, DataError, MachineError):
            if not self.resume and not self.record.began:
                self.record.discard()
            raise
        finally:
            self._note_waited()
            self.report.close()
            self.record.close()

    def _note_waited(self) -> None:
        self.phases.mark()
        self.record.note_waited(self.phases.seconds)
        self.phases.seconds.clear()

    def _open(self, remembered: Path | None) -> bool:
        """Open the folder of the run, or make one; returns whether restarted ranks had begun it. `remembered`: the run
        that they were at."""
        begun = None if self.resume else self._begun(remembered)
        if begun is not None:
            self.resume, self.saved = begun, self.config
        elif restarted() and not self.resume:
            self.report.notice("the ranks were restarted, but no host has their run: starting a new one")
        poll()
        if self.resume:
            self.record = self._locked(self.resume)
        else:
            name, task = self.workload.name, self.workload.task.name
            self.record = Run.create(name, to_json(self.config), folder=self.folder, task=task, job=job())
        self.folder = self.record.folder
        remember_run(self.record.folder)
        self.record.note_job(job())
        return begun is not None

    def _begun(self, remembered: Path | None) -> Path | None:
        """The run that these ranks had begun, with this very config, when one of them failed and all started again.

        Each host remembers its folder; where all hosts are new, --run-dir names a run of the same torchrun job.
        """
        folder = remembered
        if folder is None and self.folder is not None:
            # The job may have finished the run when a host failed.
            with suppress(OSError, ValueError):
                folder = self.folder if same_job(read_regular(self.folder / JOB).decode()) else None
        if folder is None or not (folder / "config.json").exists():
            return None
        return folder if read_config(folder) == (self.workload.name, to_json(self.config)) else None

    def _locked(self, folder: Path) -> Run:
        """The run to resume. Under torchrun the lock may be that of a rank on a host that is gone; the other ranks wait
        no longer than their timeout."""
        timeout_s = self.config.distributed.timeout_s if current().size > 1 else LEASE_S + RETRY_S
        wait_s = min(LEASE_S, timeout_s - RETRY_S)
        end = monotonic() + (wait_s if job() and not launched() else 0.0)
        while True:
            try:
                return Run.open(folder)
            except Busy:
                if monotonic() >= end:
                    raise
            left = end - monotonic()
            self.report.notice(f"another process has locked the run; waiting up to {left:.0f} s for it")
            for _ in range(RETRY_S):
                poll()
                sleep(1.0)

    def _result(self, begun: bool) -> Result:
        """The result of a finished run; otherwise train, measure and conclude."""
        result = self._finished()
        current().broadcast(self.folder if result is not None else None)
        if result is not None:
            self._repeat(result)
            return result
        if begun:
            self.report.notice("the ranks were restarted and resume their run")
        self.report.say(f"{self.workload.name}: starting in {self.record.folder}")
        again = f"recperf run --resume {self.record.folder}{current().resume_options()}"
        what = "; what was saved remains" if self.record.began else "; nothing was trained yet"
        with FLAG.explained(what, again), self._changed_config(), ExitStack() as stack:
            # A field that config.json already has with its new value was edited there by hand.
            if self.resume:
                self.allow = (*changed_before(self.record.folder), *allowed_fields(self.allow_change, self.config))
            current().broadcast(self.allow)
            progress: Progress | None = self.record.read("progress.json", Progress)
            names = self.loggers or (progress.log if progress else ())
            # Importing torch takes seconds, so everything that can fail earlier has been checked before.
            import torch  # noqa: F401

            poll()
            if names:
                from ..runs.loggers import Curves

                self.curves = Curves(names, self.record.folder, self.report.notice)
                stack.callback(self.curves.close)
            self.record = share_run(self.record, current())
            return self._execute()

    def _follow(self) -> None:
        """Train as a rank other than 0."""
        world = current()
        self.folder = world.broadcast(None)
        if self.folder is not None:
            return
        self.allow, self.record = world.broadcast(()), share_run(None, world)
        self.folder = self.record.folder
        remember_run(self.record.folder)
        self._execute()

    def _finished(self) -> Result | None:
        """The result of a finished run, once its files match their seal; None if there is more to do."""
        folder = self.record.folder
        if not self.record.finished:
            return None
        wrong = differences(folder)
        fix = "restore the file from a backup, or start a new run"
        if wrong.keys() <= {"result.json"}:
            if not os.path.lexists(folder / "result.json"):
                # A kill from here on leaves an unfinished run, not files that differ from their seal.
                self.record.remove("seal.json")
                return None
            if not wrong:
                return read_file(folder / "result.json", Result, SCHEMA)
            fix = "remove result.json and resume the run: it is computed again from the other files"
        raise DataError(f"this run is finished, but {next(iter(wrong.values()))}", where={"run": folder}, fix=fix)

    def _repeat(self, result: Result) -> None:
        """Say that the run needs no training, send its curves where that is asked for, and name damaged checkpoints."""
        self.report.notice("this run is already finished")
        folder = self.record.folder
        if self.loggers:
            from ..runs.loggers import Curves

            curves = Curves(self.loggers, folder, self.report.notice)
            curves.finish(self.record, result, profile_of(self.record), to_json(self.config), replay=True)
        from ..runs.checkpoints import listed

        for one in listed(folder, hashed=False):
            if one.fault:
                self.report.notice(f"checkpoint {one.name} of seed {one.seed} is damaged: {one.fault}")

    def _allowed_changes(self) -> list[Change]:
        """The changed fields of a resumed run that affect its numbers; each of them must be allowed."""
        allow = allowed_fields(self.allow_change, self.saved)
        changed = changes(fixed_fields(self.saved), fixed_fields(self.config))
        require_allowed(changed, allow, {"run": self.resume})
        return changed

    @contextmanager
    def _changed_config(self) -> Iterator[None]:
        """Save the changed config of a resumed run, and put the old one back if the checkpoint does not fit it."""
        if not self.resume or self.config == self.saved:
            yield
            return
        folder = self.record.folder
        edits = [*self._allowed_changes(), *free_changes(self.saved, self.config)]
        for change in edits:
            self.report.notice(f"{change.field} changes from {change.was!r} to {change.now!r}")
        before = record_changes(folder, self.config, edits)
        if any(change.field.startswith("data.") for change in edits):
            # The baselines were computed from other rows.
            (folder / "baselines.json").unlink(missing_ok=True)
        try:
            yield
        except ConfigError:
            write_atomic(folder / "config.json", before)
            raise

    def _execute(self) -> Result:
        """Train every unfinished seed, measure a window of steps and write result.json."""
        import torch

        from ..measure.peaks import require as require_peaks
        from ..ops import choice
        from ..train.device import applied

        self.stop = share_stop(FLAG, current())
        poll()
        choice.forget_used()
        started = note_start(self.record, self.curves.names if self.curves else ())
        if getattr(self.config, "mlperf", None) and self.config.mlperf.log:
            from .submission import open_log

            self.log = open_log(self.config, self.record.folder)
        working("reading the data")
        prepared = self._prepare(started)
        with phase("measuring", "measuring the ceilings of this machine"):
            ceilings = require_peaks(None, self.report.notice) if self.peaks and current().is_leader else None
        poll()
        with applied(prepared.settings):
            self.assessment = assessment = assessment_of(self.workload, self.record, prepared, self.report.notice)
            # No step needs the baselines, unless beating one ends the training: they are computed after the first one.
            needed = self.config.train.stop_at_target and prepared.target.get("beat") is not None
            baselines = assessment.baselines() if needed else {}
            self.reached = stopping_rule(self.workload.task, self.config, baselines, prepared.target)
            with phase("training"):
                trial = self._train_seeds(started)
            if prepared.settings.device.type == "cuda":
                self.record.event("memory", device_bytes=torch.cuda.max_memory_allocated(prepared.settings.device))
            assessment.baselines()
            if self.measured:
                with phase("measuring", "measuring steps"):
                    # Importing it takes a second that no step waits for.
                    from .measuring import measure_run

                    measure_run(self.record, prepared, trial, ceilings, self.report.notice)
        return self._conclude(started)

    def _prepare(self, started: Progress) -> Prepared:
        """Read the data and choose the device; refuse what does not fit the start of the run."""
        self.prepared = prepared = self.workload.prepare(self.config)
        poll()
        settings, target = prepared.settings, prepared.target
        if self.config.train.device == "auto" and settings.device.type == "cuda":
            self.report.notice(f"device: cuda ({settings.device_name}), chosen by auto")
        tables = settings.reasons.get("tables", "device")
        if not tables.startswith("device"):
            self.report.detail(f"tables: {tables}")
        if self.config.train.stop_at_target and all(bound is None for bound in target.values()):
            # It would be reached before the first step.
            raise ConfigError(
                "train.stop_at_target is set, but the target has no bound",
                where={"field": "train.stop_at_target"},
                fix=" or ".join([*(f"--target.{name}" for name in self.workload.task.bounds), "--target.beat best"]),
            )
        self._require_same_data()
        self.changed = self._changes(started)
        self._note_machine()
        return prepared

    def _require_same_data(self) -> None:
        """Refuse to resume a run with other data."""
        before: Data | None = self.record.read("data.json", Data)
        data, folder = self.prepared.data, self.record.folder
        now = require(data, Data, folder / "data.json", what="is damaged")
        if now.held_out is not None and now.held_out.warning:
            self.report.notice(now.held_out.warning)
        error: RecperfError | None = None
        if before is not None and before.digest != data["digest"]:
            error = DataError(
                "the data changed since the run started",
                where={"run": folder, "digest then": before.digest, "digest now": data["digest"]},
                fix="restore the old data, or start a new run",
            )
        elif before is not None and before.features != data.get("features"):
            error = DataError(OTHER_FEATURES, where={"run": folder}, fix="start a new run")
        elif before is not None and not now.divided_as(before) and not any("data." in name for name in self.allow):
            what = f"the run started with another split of its data: {before.held_out_text}"
            error = DataError(what, where={"run": folder, "split now": now.held_out_text}, fix="start a new run")
        if error is not None:
            current().shared_error = error
            raise error
        if before is None or as_json(before) != data:
            # A resumed run may be allowed to use other rows of the same data.
            self.record.write("data.json", data)

    def _changes(self, started: Progress) -> tuple[Change, ...]:
        """What differs from the start of the run: config fields, operators and the number of ranks."""
        from ..ops import choice

        world, used, folder = current(), started.operators, self.record.folder
        saved = world.on_leader(lambda: read_saved_config(folder / "config.json").changed)
        changed = tuple(since_start(saved, recorded_fields(self.config)))
        replaced = world.all_gather(choice.replaced(used))
        changed += tuple(operator_changes(used, replaced, self.allow, {"run": folder}))
        ranks = started.ranks or world.size
        if ranks != world.size:
            changed += (Change(RANKS, ranks, world.size),)
            # They say what limited a step of the ranks that finished the training.
            self.record.remove(*MEASURED)
        return changed

    def _note_machine(self) -> None:
        """Write what this machine is, and say where the run began on another one."""
        facts, before = machine_facts(), self.record.read("machine.json", Machine)
        if before is not None and before.fingerprint != facts["fingerprint"]:
            self.report.notice(
                "this run was started on another machine or torch version; its numbers may differ in the last bits"
            )
            # What limits a step there says nothing about this machine, which the result names.
            self.record.remove(*MEASURED)
        self.record.write("machine.json", facts)

    def _train_seeds(self, started: Progress) -> Trial | None:
        """Train every seed that is not finished; the last trial of this process."""
        import torch

        from ..ops import choice

        trial, start, config = None, self._weights(), self.config
        for seed in range(config.seed, config.seed + config.seeds):
            if self.record.read(f"trial-{seed}.json", TrialFile) is not None:
                continue
            # A table may fill half of the memory: never two at once. A trial's parts refer to each other, so that only
            # the collector frees them.
            if trial is not None:
                trial = None
                gc.collect()
            # Dropout draws from torch's own generators, and a user's model may draw anything.
            torch.manual_seed(seed)
            trial = self.prepared.trial(seed)
            poll()
            current().report_plan(trial, self.report.detail)
            finished = self._train_seed(seed, trial, start)
            started.operators = started.operators or choice.used()
            self.record.note_progress(operators=started.operators, ranks=current().size)
            # After a power cut there must be no trial whose last steps the log lacks.
            self.record.sync_events()
            self.record.write(f"trial-{seed}.json", finished)
            self.stop.explain("; what was trained is saved")
            poll()
        return trial

    def _weights(self) -> Start | None:
        """What the trainings begin with, if that is the model of another run."""
        if self.config.start.run is None:
            return None
        from .starting import start_of

        start = start_of(self.workload, self.config, self.record, self.prepared.data.get("held_out_from"))
        if start is not None:
            self.report.notice(f"starts from {start.facts.text}")
        return start

    def _train_seed(self, seed: int, trial: Trial, start: Start | None) -> dict[str, Any]:
        """Train a seed to its end: the contents of trial-<seed>.json."""
        from .training import SeedTraining, checkpoint_folder, open_store, require_room

        folder, notice = checkpoint_folder(self.record.folder, seed, trial.recipe.steps), self.report.notice
        require_room(self.record.folder, trial, self.config.train, notice)
        # Said only when a second Ctrl-C ends the process at once.
        self.stop.explain("; what was trained since the last checkpoint is lost")
        with self.stop.deferred(), open_store(folder, trial, self.config.train, notice) as store:
            return SeedTraining(self, seed, trial, store, start).finish()

    def _conclude(self, started: Progress) -> Result:
        """Write result.json from the other files of the run, tell the loggers, and seal the run."""
        from ..ops import choice

        record, world, settings = self.record, current(), self.prepared.settings
        operators, verified = operators_text({**(started.operators or {}), **choice.used()}), self.prepared.verified()
        # What no other file of the run says.
        stated: dict[str, Any] = {
            "run": record.folder.resolve().name,
            "target": Target(**self.prepared.target),
            "device": settings.device_name,
            "settings": {**settings.reasons, "operators": operators, **world.settings()},
            "origin": {
                **checkout(),
                "packages": packages(),
                "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
                "ended": now(),
                "data_verified": Verified(**verified) if verified else None,
            },
        }
        self._note_waited()
        result = world.on_leader(lambda: result_of(Evidence(record.folder), **stated))
        record.write("result.json", checked(result))
        profile = profile_of(record)
        if self.curves is not None:
            self.curves.finish(record, result, profile, to_json(self.config))
        if world.is_leader:
            seal(record.folder)
        return result


def note_start(record: Run, loggers: tuple[str, ...] = ()) -> Progress:
    """Record the start of the run, count its resumes, and remember its loggers for the next one."""
    progress: Progress | None = record.read("progress.json", Progress)
    if progress is None:
        # A log that has lost its progress.json may be of a run that has saved.
        progress = Progress(started=now(), resumes=0, saved=None if record.event_bytes else ())
    else:
        progress.resumes += 1
    progress.log = loggers or progress.log
    record.write("progress.json", progress)
    return progress


def assessment_of(workload: Workload, record: Run, prepared: Prepared, notice: Callable[[str], None]) -> Assessment:
    """How the quality of a workload is assessed, as its task says."""
    assessment: Assessment = load(workload.task.assessment)(record, current(), prepared, notice)
    return assessment


def stopping_rule(
    task: Task, config: Any, baselines: dict[str, dict[str, float]], target: dict[str, Any]
) -> Callable[[dict[str, float]], bool]:
    """A function that says whether metrics end the training."""
    if not config.train.stop_at_target:
        return lambda metrics: False
    return lambda metrics: meets(task, metrics, baselines, Target(**target))
