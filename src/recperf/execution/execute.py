"""Running a workload: trials in turn, watched, saved and resumable, then one result."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..distributed.ranks import Ranks, current
from ..errors import ConfigError, DataError
from ..machine import machine_facts
from ..measure.explain import read
from ..runs.provenance import checkout, packages
from ..runs.record import Run, now
from ..runs.result import SCHEMA, Baselines, Data, checked
from ..runs.result import Trial as TrialFile
from ..runs.schemas import Machine, Progress
from ..runs.seal import seal
from ..train.device import applied
from ..train.stop import StopFlag
from ..train.timing import StepTimer, performance
from .measuring import measure_run
from .submission import open_log
from .training import Job, Reporter
from .workload import Prepared, Trial, Workload

Ceilings = Callable[[], dict[str, Any] | None]
"""This machine's ceilings, asked for once the data is known to be good, since measuring takes seconds, and before a
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
) -> dict[str, Any]:
    """Train every seed that is not finished yet, measure a window of steps, and write result.json.

    `allow` names fields of the config that may differ from those a run was begun with.
    """
    world = current()
    stop = world.share_stop(stop)
    started = _start(run)
    log = world.leader_only(lambda: open_log(config, run.folder))
    if log:
        log.begin()
    # Rank 0 first: it may generate the data, and no other rank may read it half written.
    prepared = world.leader_first(lambda: workload.prepare(config))
    _can_stop(config, prepared.target)
    world.require_same_data(prepared.data["digest"])
    _same_data(run, prepared)
    facts = machine_facts()
    _same_machine(run, facts, report)
    ceilings = peaks() if peaks else None
    with applied(prepared.settings):
        baselines = _baselines(run, world, prepared)
        job = Job(
            workload=workload, config=config, prepared=prepared, run=run, stop=stop, report=report, allow=allow,
            reached=stopping_rule(config, baselines, prepared.target), log=log,
        )  # fmt: skip
        trials, timers, trial = _train_seeds(job)
        if run.read("profile.json") is None:
            measure_run(prepared, trial or prepared.trial(config.seed), run, ceilings, report)
    profile = run.read("profile.json")
    result = {
        "schema": SCHEMA,
        "workload": workload.name,
        "run": run.folder.resolve().name,
        "quality": quality(trials, baselines, prepared.target),
        "performance": {**speed(prepared, world, timers), "mfu": mfu(profile, ceilings), **of_ranks(profile)},
        "data": prepared.data,
        "provenance": provenance(started, facts, prepared.data, config.seed),
    }
    run.write("result.json", checked(result))
    world.leader_only(lambda: seal(run.folder))
    return result


def _train_seeds(job: Job) -> tuple[list[dict[str, Any]], list[StepTimer], Trial | None]:
    """Train every seed that is not finished: the results of all, and timers and last trial of this process."""
    trials: list[dict[str, Any]] = []
    timers: list[StepTimer] = []
    trial: Trial | None = None
    for seed in range(job.config.seed, job.config.seed + job.config.seeds):
        finished = job.run.read(f"trial-{seed}.json", TrialFile)
        if finished is None:
            trial = None  # A table may fill half of the memory: never two at once.
            # recperf draws nothing from torch's own generators, but a user's model may.
            torch.manual_seed(seed)
            trial = job.prepared.trial(seed)
            current().report_plan(trial, job.report.notice)
            finished, timer = job.finish(seed, trial)
            timers.append(timer)
            job.run.write(f"trial-{seed}.json", finished)
        trials.append(finished)
    return trials, timers, trial


def provenance(started: dict[str, Any], facts: dict[str, Any], data: dict[str, Any], seed: int) -> dict[str, Any]:
    """Where the result of a run that ends now comes from."""
    return {
        **checkout(),
        "packages": packages(),
        "machine": facts["fingerprint"],
        "seed": seed,
        "data_digest": data["digest"],
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "started": started["started"],
        "ended": now(),
        "resumes": started["resumes"],
    }


def speed(prepared: Prepared, world: Ranks, timers: list[StepTimer]) -> dict[str, Any]:
    """How fast the steps of this process were, and what was chosen for that."""
    settings = prepared.settings
    return {"device": settings.device_name, "settings": {**settings.reasons, **world.settings()}, **performance(timers)}


def of_ranks(profile: dict[str, Any] | None) -> dict[str, Any]:
    """What the measured steps say of several ranks; nothing of one."""
    found = (profile or {}).get("communication") or {}
    if "each" not in found:
        return {}
    times = ("step_ms", "own_ms", "exposed_ms", "late_ms", "moving_ms")
    each = [{name: row[name] for name in ("rank", *times)} for row in found["each"]]
    return {"ranks": {"slowest": found["slowest"], **{name: found[name] for name in times}, "each": each}}


def _start(run: Run) -> dict[str, Any]:
    """When the run began and how often it was taken up again."""
    before = run.read("progress.json", Progress)
    state = {"started": now(), "resumes": 0} if before is None else {**before, "resumes": before["resumes"] + 1}
    run.write("progress.json", state)
    return state


def _baselines(run: Run, world: Ranks, prepared: Prepared) -> dict[str, Any]:
    baselines = run.read("baselines.json", Baselines)
    if baselines is None:
        baselines = world.on_leader(prepared.baselines)
        run.write("baselines.json", baselines)
    return baselines


def _can_stop(config: Any, target: dict[str, Any]) -> None:
    """A target without a bound is met before the first step."""
    if config.train.stop_at_target and all(bound is None for bound in target.values()):
        raise ConfigError(
            "train.stop_at_target is set, but the target has no bound to meet",
            where={"field": "train.stop_at_target"},
            fix="--target.auc, --target.accuracy or --target.beat bias",
        )


def stopping_rule(
    config: Any, baselines: dict[str, dict[str, float]], target: dict[str, Any]
) -> Callable[[dict[str, float]], bool]:
    """Whether a score ends a training."""
    if not config.train.stop_at_target:
        return lambda metrics: False
    return lambda metrics: meets(metrics, baselines, target)


def _same_data(run: Run, prepared: Prepared) -> None:
    """A run goes on only with the data it began with."""
    before = run.read("data.json", Data)
    if before is not None and before["digest"] != prepared.data["digest"]:
        raise DataError(
            "the data changed since the run began",
            where={"run": run.folder, "digest then": before["digest"], "digest now": prepared.data["digest"]},
            fix="bring the old data back, or start a new run",
        )
    if before != prepared.data:
        # Also where a resumed run was allowed to take other rows of the same data.
        run.write("data.json", prepared.data)


def _same_machine(run: Run, facts: dict[str, Any], report: Reporter) -> None:
    before = run.read("machine.json", Machine)
    if before is not None and before["fingerprint"] != facts["fingerprint"]:
        report.notice(
            "this run began on another machine or torch; it goes on, but its numbers may differ in the last bits"
        )
    run.write("machine.json", facts)


def mfu(profile: dict[str, Any] | None, peaks: dict[str, Any] | None) -> float | None:
    """Counted FLOPs of the measured steps over what this machine's fastest product would have done in their time."""
    return read(profile, peaks)["compute"] if profile and peaks else None


def quality(
    trials: list[dict[str, Any]], baselines: dict[str, dict[str, float]], target: dict[str, Any]
) -> dict[str, Any]:
    """Mean and spread over the seeds, beside the baselines, against the target."""
    names = trials[0]["metrics"].keys()
    metrics = {name: statistics.fmean(t["metrics"][name] for t in trials) for name in names}
    spread = {}
    if len(trials) > 1:
        spread = {name: statistics.stdev(t["metrics"][name] for t in trials) for name in names}
    return {
        "metrics": metrics,
        "spread": spread,
        "seeds": trials,
        "target": target,
        "met": meets(metrics, baselines, target),
        "baselines": baselines,
    }


def meets(metrics: dict[str, float], baselines: dict[str, dict[str, float]], target: dict[str, Any]) -> bool:
    """Whether every bound of the target holds; one that is none asks nothing."""
    return bool(
        (target["beat"] is None or metrics["auc"] > baselines[target["beat"]]["auc"])
        and (target["accuracy"] is None or metrics["accuracy"] >= target["accuracy"])
        and (target["auc"] is None or metrics["auc"] >= target["auc"])
    )
