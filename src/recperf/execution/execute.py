"""Runs a workload: trains every seed, measures a window of steps and writes one result."""

from __future__ import annotations

import gc
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..config import to_json
from ..distributed.ranks import current
from ..errors import ConfigError, DataError
from ..machine import machine_facts
from ..measure.ceilings import ceilings_of_profile
from ..ops import choice
from ..runs.loggers import Curves
from ..runs.provenance import checkout, packages
from ..runs.quality import detail
from ..runs.record import Run, now, read_saved_config
from ..runs.result import SCHEMA, Data, checked
from ..runs.result import Trial as TrialFile
from ..runs.resume import (
    RANKS,
    Change,
    operator_changes,
    operators_text,
    recorded_fields,
    reported_changes,
    since_start,
)
from ..runs.schemas import Machine, Profile, Progress, Scores
from ..runs.seal import seal
from ..runs.speed import budget_of, speed_of, tables_of
from ..stop import StopFlag, poll
from ..train.config import baseline_to_beat
from ..train.device import applied
from .measuring import MEASURED, measure_run
from .quality import FILE, Assessment
from .submission import open_log, require_same_ranks
from .training import Job, Reporter
from .workload import Prepared, Trial, Workload

Ceilings = Callable[[], dict[str, Any] | None]
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
) -> dict[str, Any]:
    """Train every unfinished seed, measure a window of steps and write result.json.

    `allow` names config fields that may differ from those the run was started with.
    """
    world = current()
    stop = world.share_stop(stop)
    poll()
    choice.forget_used()
    curves = curves or Curves()
    started = _start(run, curves.names)
    log = world.leader_only(lambda: open_log(config, run.folder))
    require_same_ranks(config, log, run.folder)
    if log:
        log.begin()
    # Rank 0 first: it may generate the data, and no other rank may read it half written.
    prepared = world.leader_first(lambda: workload.prepare(config))
    poll()
    tables = prepared.settings.reasons.get("tables", "device")
    if not tables.startswith("device"):
        report.notice(f"tables: {tables}")
    _can_stop(config, prepared.target)
    world.require_same_data(prepared.data["digest"])
    _same_data(run, prepared)
    changed = _changes(run, config, started, allow)
    facts = machine_facts()
    _same_machine(run, facts, report)
    ceilings = peaks() if peaks else None
    poll()
    with applied(prepared.settings):
        assessment = Assessment(run, world, prepared, report.notice)
        baselines = assessment.baselines()
        poll()
        job = Job(
            workload=workload, config=config, prepared=prepared, run=run, stop=stop, report=report, allow=allow,
            reached=stopping_rule(config, baselines, prepared.target), log=log, changed=changed,
            trained=assessment.trained, curves=curves,
        )  # fmt: skip
        trials, trial = _train_seeds(job, started)
        if run.read("profile.json", Profile) is None:
            measure_run(prepared, trial or prepared.trial(config.seed), run, ceilings, report)
    result = checked(_result(job, trials, baselines, started, facts, ceilings))
    run.write("result.json", result)
    profile = run.read("profile.json", Profile)  # On every rank: rank 0 sends what it reads.
    if curves.loggers:
        curves.finish(run, result, profile, to_json(config))
    world.leader_only(lambda: seal(run.folder))
    return result


def _result(
    job: Job,
    trials: list[dict[str, Any]],
    baselines: dict[str, Any],
    started: dict[str, Any],
    facts: dict[str, Any],
    ceilings: dict[str, Any] | None,
) -> dict[str, Any]:
    """The content of result.json, from the files of the run and what its trainings gave."""
    run, prepared, world = job.run, job.prepared, current()
    operators = operators_text({**(started.get("operators") or {}), **choice.used()})
    profile = run.read("profile.json", Profile)
    speed, changes = world.on_leader(lambda: _logged(run))
    verified = prepared.verified()
    return {
        "schema": SCHEMA,
        "workload": job.workload.name,
        "run": run.folder.resolve().name,
        "quality": quality(trials, baselines, prepared.target, run.read(FILE, Scores)),
        "performance": {
            "device": prepared.settings.device_name,
            "settings": {**prepared.settings.reasons, "operators": operators, **world.settings()},
            **speed,
            **budget_of(profile),
            "mfu": mfu(profile, ceilings, speed["steady"]),
            **of_ranks(profile),
            **tables_of(profile),
        },
        "data": prepared.data,
        "provenance": {
            **provenance(started, facts, prepared.data, job.config.seed),
            **changes,
            **({"data_verified": verified} if verified else {}),
        },
    }


def _train_seeds(job: Job, started: dict[str, Any]) -> tuple[list[dict[str, Any]], Trial | None]:
    """Train every seed that is not finished: the results of all, and the last trial of this process."""
    trials: list[dict[str, Any]] = []
    trial: Trial | None = None
    for seed in range(job.config.seed, job.config.seed + job.config.seeds):
        finished = job.run.read(f"trial-{seed}.json", TrialFile)
        if finished is None:
            # A table may fill half of the memory: never two at once. A trial's parts refer to each other, so that only
            # the collector frees them.
            if trial is not None:
                trial = None
                gc.collect()
            # recperf draws nothing from torch's own generators, but a user's model may.
            torch.manual_seed(seed)
            trial = job.prepared.trial(seed)
            poll()
            current().report_plan(trial, job.report.notice)
            finished = job.finish(seed, trial)
            started.setdefault("operators", choice.used())
            job.run.note_progress(operators=started["operators"], ranks=current().size)
            # After a power cut there must be no trial whose last steps the log lacks.
            job.run.sync_events()
            job.run.write(f"trial-{seed}.json", finished)
            job.stop.explain("; what was trained is saved")
            poll()
        trials.append(finished)
    return trials, trial


def provenance(started: dict[str, Any], facts: dict[str, Any], data: dict[str, Any], seed: int) -> dict[str, Any]:
    """The origin of a result: code, packages, machine, data, command and times."""
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


def of_ranks(profile: dict[str, Any] | None) -> dict[str, Any]:
    """Times per rank from the measured steps; empty for a single process."""
    communication = (profile or {}).get("communication") or {}
    if "each" not in communication:
        return {}
    times = ("step_ms", "own_ms", "exposed_ms", "late_ms", "moving_ms")
    each = [{name: row[name] for name in ("rank", *times)} for row in communication["each"]]
    return {
        "ranks": {"slowest": communication["slowest"], **{name: communication[name] for name in times}, "each": each}
    }


def _changes(run: Run, config: Any, started: dict[str, Any], allow: tuple[str, ...]) -> tuple[Change, ...]:
    """What differs from the start of the run: config fields, operators and the number of ranks."""
    world, used = current(), started.get("operators")
    changed = world.on_leader(lambda: _since_start(run, config))
    changed += tuple(operator_changes(used, world.all_gather(choice.replaced(used)), allow, {"run": run.folder}))
    ranks = started.get("ranks") or world.size
    if ranks != world.size:
        changed += (Change(RANKS, ranks, world.size),)
        # They say what limited a step of the ranks that finished the training.
        run.remove(*MEASURED)
    return changed


def _since_start(run: Run, config: Any) -> tuple[Change, ...]:
    return tuple(since_start(read_saved_config(run.folder / "config.json").changed, recorded_fields(config)))


def _logged(run: Run) -> tuple[dict[str, Any], dict[str, Any]]:
    """From the log: the speed of the training, and the config fields that changed when the run was resumed, if any."""
    events = [event for event in run.events() if event["kind"] in ("timing", "change")]
    saved = read_saved_config(run.folder / "config.json")
    rows = reported_changes((event for event in events if event["kind"] == "change"), saved.changed, saved.config)
    return speed_of(events), {"changes": rows} if rows else {}


def _start(run: Run, loggers: tuple[str, ...] = ()) -> dict[str, Any]:
    """Record the start of the run, count its resumes, and remember its loggers for the next one."""
    before = run.read("progress.json", Progress)
    if before is None:
        # A log that has lost its progress.json may be of a run that has saved.
        state = {"started": now(), "resumes": 0, **({} if run.event_bytes else {"saved": []})}
    else:
        state = {**before, "resumes": before["resumes"] + 1}
    if loggers:
        state["log"] = list(loggers)
    run.write("progress.json", state)
    return state


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
    return lambda metrics: meets(metrics, baselines, target)


def _same_data(run: Run, prepared: Prepared) -> None:
    """Refuse to resume a run with other data."""
    before = run.read("data.json", Data)
    if before is not None and before["digest"] != prepared.data["digest"]:
        current().shared_error = error = DataError(
            "the data changed since the run started",
            where={"run": run.folder, "digest then": before["digest"], "digest now": prepared.data["digest"]},
            fix="restore the old data, or start a new run",
        )
        raise error
    if before != prepared.data:
        # A resumed run may be allowed to use other rows of the same data.
        run.write("data.json", prepared.data)


def _same_machine(run: Run, facts: dict[str, Any], report: Reporter) -> None:
    before = run.read("machine.json", Machine)
    if before is not None and before["fingerprint"] != facts["fingerprint"]:
        report.notice(
            "this run was started on another machine or torch version; its numbers may differ in the last bits"
        )
        # What limits a step there says nothing about this machine, which the result names.
        run.remove(*MEASURED)
    run.write("machine.json", facts)


def mfu(profile: dict[str, Any] | None, peaks: dict[str, Any] | None, steady: dict[str, Any] | None) -> float | None:
    """FLOPs per second at the steady throughput, as a share of the machine's fastest matrix product in that precision
    and with as many threads; a sample has the FLOPs that were counted for those of the measured batches."""
    ceilings = ceilings_of_profile(profile, peaks) if profile else None
    peak = ceilings.flops.get(profile.get("precision") or "float32") if profile and ceilings else None
    if profile is None or steady is None or not peak:
        return None
    per_sample = sum(part["flops"] or 0 for part in profile["components"]) / profile["batch_size"]
    return float(per_sample * steady["samples_per_s"] / peak)


def quality(
    trials: list[dict[str, Any]],
    baselines: dict[str, dict[str, float]],
    target: dict[str, Any],
    scores: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Mean and spread over the seeds, the baselines, whether the target is reached, and what scores.json adds."""
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
        **(detail(scores, metrics) if scores else {}),
    }


def meets(metrics: dict[str, float], baselines: dict[str, dict[str, float]], target: dict[str, Any]) -> bool:
    """Whether every bound of the target holds; None is no bound."""
    beat = baseline_to_beat(target["beat"], baselines)
    return bool(
        (beat is None or metrics["auc"] > baselines[beat]["auc"])
        and (target["accuracy"] is None or metrics["accuracy"] >= target["accuracy"])
        and (target["auc"] is None or metrics["auc"] >= target["auc"])
    )
