"""Runs a workload: trains every seed, measures a window of steps and writes one result."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from shutil import disk_usage
from typing import TYPE_CHECKING, Any

import torch

from ..config import to_json
from ..distributed.ranks import current
from ..distributed.shared_run import share_stop
from ..errors import ConfigError, DataError, MachineError, RecperfError
from ..files import draft_of, require_short
from ..folders import require_own_folders
from ..jsonfile import as_json
from ..machine import available_bytes, machine_facts
from ..measure.peaks.records import Peaks
from ..models.tiers.columns import table_columns
from ..ops import choice
from ..runs.derive import Stated, meets, result_of
from ..runs.evidence import Evidence, seal
from ..runs.record import MEASURED, Run, checkout, now, packages, profile_of, read_saved_config
from ..runs.result import Change, Data, Result, Target, Verified, checked
from ..runs.result import TrialResult as TrialFile
from ..runs.resume import RANKS, operator_changes, operators_text, recorded_fields, since_start
from ..runs.schemas import Machine, Progress
from ..stop import StopFlag, poll
from ..train import checkpoint_folder as folders
from ..train.checkpoint import CheckpointStore, tensor_bytes
from ..train.config import TrainConfig
from ..train.device import applied
from ..units import size
from .training import Job, Reporter, SeedTraining
from .workload import OTHER_FEATURES, Prepared, Trial, Workload, load

if TYPE_CHECKING:
    from ..runs.loggers import Curves
    from .quality import Assessment
    from .starting import Start

Ceilings = Callable[[], Peaks | None]
"""Returns the ceilings of this machine. Called after the data was checked, since measuring takes seconds, and before a
model is built, which may fill half of the memory."""


def execute(
    workload: Workload,
    config: Any,
    run: Run,
    stop: StopFlag,
    report: Reporter,
    peaks: Ceilings | None = None,
    *,
    allow: tuple[str, ...] = (),
    curves: Curves | None = None,
) -> Result:
    """Train every unfinished seed, measure a window of steps and write result.json.

    `allow` names config fields that may differ from those the run was started with.
    """
    world = current()
    stop = share_stop(stop, world)
    poll()
    choice.forget_used()
    started = _start(run, curves.names if curves else ())
    log = None
    if getattr(config, "mlperf", None) and config.mlperf.log:
        from .submission import open_log

        log = open_log(config, run.folder)
    prepared = workload.prepare(config)
    poll()
    settings = prepared.settings
    if config.train.device == "auto" and settings.device.type == "cuda":
        report.notice(f"device: cuda ({settings.device_name}), chosen by auto")
    tables = settings.reasons.get("tables", "device")
    if not tables.startswith("device"):
        report.detail(f"tables: {tables}")
    _can_stop(config, prepared.target)
    _same_data(run, prepared)
    changed = _changes(run, config, started, allow)
    facts = machine_facts()
    _same_machine(run, facts, report)
    ceilings = peaks() if peaks else None
    poll()
    with applied(settings):
        assessment = assessment_of(workload, run, prepared, report.notice)
        # No step needs the baselines, unless beating one ends the training: they are computed after the first training.
        needed = config.train.stop_at_target and prepared.target.get("beat") is not None
        baselines = assessment.baselines() if needed else {}
        job = Job(
            workload=workload, config=config, prepared=prepared, run=run, stop=stop, report=report, allow=allow,
            reached=stopping_rule(config, baselines, prepared.target), log=log, changed=changed,
            trained=assessment.trained, curves=curves,
        )  # fmt: skip
        trial = _train_seeds(job, started)
        assessment.baselines()
        # Importing it takes a second that no step waits for.
        from .measuring import measure_run

        measure_run(job, trial, ceilings)
    return _conclude(job, started)


def assessment_of(workload: Workload, run: Run, prepared: Prepared, notice: Callable[[str], None]) -> Assessment:
    """How the quality of a workload is assessed, as its task says."""
    assessment: Assessment = load(workload.task.assessment)(run, current(), prepared, notice)
    return assessment


def _conclude(job: Job, started: Progress) -> Result:
    """Write result.json from the other files of the run, tell the loggers, and seal the run."""
    run, curves, world = job.run, job.curves, current()
    stated = _stated(job, started)
    result = world.on_leader(lambda: result_of(Evidence(run.folder), stated))
    run.write("result.json", checked(result))
    profile = profile_of(run)
    if curves is not None:
        curves.finish(run, result, profile, to_json(job.config))
    if world.is_leader:
        seal(run.folder)
    return result


def _stated(job: Job, started: Progress) -> Stated:
    """What the result states that no other file of the run says."""
    prepared, world = job.prepared, current()
    operators = operators_text({**(started.operators or {}), **choice.used()})
    verified = prepared.verified()
    return Stated(
        run=job.run.folder.resolve().name,
        target=Target(**prepared.target),
        device=prepared.settings.device_name,
        settings={**prepared.settings.reasons, "operators": operators, **world.settings()},
        origin={
            **checkout(),
            "packages": packages(),
            "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
            "ended": now(),
            "data_verified": Verified(**verified) if verified else None,
        },
    )


def _train_seeds(job: Job, started: Progress) -> Trial | None:
    """Train every seed that is not finished; the last trial of this process."""
    trial: Trial | None = None
    start: Start | None = None
    if job.config.start.run is not None:
        from .starting import start_of

        start = start_of(job.workload, job.config, job.run, job.prepared.data.get("held_out_from"))
    if start:
        job.report.notice(f"starts from {start.facts.text}")
    for seed in range(job.config.seed, job.config.seed + job.config.seeds):
        if job.run.read(f"trial-{seed}.json", TrialFile) is None:
            # A table may fill half of the memory: never two at once. A trial's parts refer to each other, so that only
            # the collector frees them.
            if trial is not None:
                trial = None
                gc.collect()
            # The dropout of hstu draws from torch's own generators, and a user's model may.
            torch.manual_seed(seed)
            trial = job.prepared.trial(seed)
            poll()
            current().report_plan(trial, job.report.detail)
            finished = _train(job, seed, trial, start)
            started.operators = started.operators or choice.used()
            job.run.note_progress(operators=started.operators, ranks=current().size)
            # After a power cut there must be no trial whose last steps the log lacks.
            job.run.sync_events()
            job.run.write(f"trial-{seed}.json", finished)
            job.stop.explain("; what was trained is saved")
            poll()
    return trial


def _train(job: Job, seed: int, trial: Trial, start: Start | None) -> dict[str, Any]:
    """Train a seed to its end: the contents of trial-<seed>.json. Without a checkpoint it begins with the weights of
    another run where there is a `start`."""
    config, notice = job.config.train, job.report.notice
    folder = checkpoint_folder(job.run.folder, seed, trial.recipe.steps)
    require_room(job.run.folder, trial, config, notice)
    # Said only when a second Ctrl-C ends the process at once.
    job.stop.explain("; what was trained since the last checkpoint is lost")
    with job.stop.deferred(), open_store(folder, trial, config, notice) as store:
        return SeedTraining(job, seed, trial, store, start).finish()


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


def _changes(run: Run, config: Any, started: Progress, allow: tuple[str, ...]) -> tuple[Change, ...]:
    """What differs from the start of the run: config fields, operators and the number of ranks."""
    world, used = current(), started.operators
    saved = world.on_leader(lambda: read_saved_config(run.folder / "config.json").changed)
    changed = tuple(since_start(saved, recorded_fields(config)))
    changed += tuple(operator_changes(used, world.all_gather(choice.replaced(used)), allow, {"run": run.folder}))
    ranks = started.ranks or world.size
    if ranks != world.size:
        changed += (Change(RANKS, ranks, world.size),)
        # They say what limited a step of the ranks that finished the training.
        run.remove(*MEASURED)
    return changed


def _start(run: Run, loggers: tuple[str, ...] = ()) -> Progress:
    """Record the start of the run, count its resumes, and remember its loggers for the next one."""
    progress: Progress | None = run.read("progress.json", Progress)
    if progress is None:
        # A log that has lost its progress.json may be of a run that has saved.
        progress = Progress(started=now(), resumes=0, saved=None if run.event_bytes else ())
    else:
        progress.resumes += 1
    progress.log = loggers or progress.log
    run.write("progress.json", progress)
    return progress


def _can_stop(config: Any, target: dict[str, Any]) -> None:
    """Refuse to stop at a target without bounds, which would be reached before the first step."""
    if config.train.stop_at_target and all(bound is None for bound in target.values()):
        raise ConfigError(
            "train.stop_at_target is set, but the target has no bound",
            where={"field": "train.stop_at_target"},
            fix="--target.auc, --target.accuracy or --target.beat auto",
        )


def stopping_rule(
    config: Any, baselines: dict[str, dict[str, float]], target: dict[str, Any]
) -> Callable[[dict[str, float]], bool]:
    """A function that says whether metrics end the training."""
    if not config.train.stop_at_target:
        return lambda metrics: False
    return lambda metrics: meets(metrics, baselines, Target(**target))


def _same_data(run: Run, prepared: Prepared) -> None:
    """Refuse to resume a run with other data."""
    before: Data | None = run.read("data.json", Data)
    if before is not None and before.digest != prepared.data["digest"]:
        current().shared_error = error = DataError(
            "the data changed since the run started",
            where={"run": run.folder, "digest then": before.digest, "digest now": prepared.data["digest"]},
            fix="restore the old data, or start a new run",
        )
        raise error
    if before is not None and before.features != prepared.data.get("features"):
        current().shared_error = error = DataError(OTHER_FEATURES, where={"run": run.folder}, fix="start a new run")
        raise error
    if before is None or as_json(before) != prepared.data:
        # A resumed run may be allowed to use other rows of the same data.
        run.write("data.json", prepared.data)


def _same_machine(run: Run, facts: dict[str, Any], report: Reporter) -> None:
    before: Machine | None = run.read("machine.json", Machine)
    if before is not None and before.fingerprint != facts["fingerprint"]:
        report.notice(
            "this run was started on another machine or torch version; its numbers may differ in the last bits"
        )
        # What limits a step there says nothing about this machine, which the result names.
        run.remove(*MEASURED)
    run.write("machine.json", facts)
