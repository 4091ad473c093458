"""The claims that a workload makes about its runs, recomputed from the files of a run.

A claim whose evidence is missing or damaged fails; nothing is skipped. A claim about speed is not judged if it was
measured beside too much other work. Nothing here imports torch, so that checking a run costs no more than reading it.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..machine import fingerprint
from ..train.config import baseline_to_beat
from ..units import size
from .evidence import Evidence, NoEvidence
from .quality import detail
from .report.formats import printable
from .result import Metrics, Target, Trial, fault
from .resume import reported_changes
from .schemas import Scores
from .seal import broken, present
from .speed import budget_of, speed_of

__all__ = ["Claim", "Evidence", "Finding", "NoEvidence", "check_run"]

Derive = Callable[[dict[str, Any], dict[str, Any]], Mapping[str, Any]]

SAME = 1e-9
"""Largest relative difference of two numbers that should be equal: the order of a sum may change its last bits."""
MEASURED_SAME = 1e-6
"""The same for shares of a step and for ratios, which come from times rounded to the nanosecond."""
LOSS_ENDS = 0.05
"""The share of the steps at either end whose losses are averaged."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    holds: bool | None
    """None: not judged, because the evidence neither supports nor contradicts the claim."""
    detail: str
    """What the evidence shows, in one line."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    name: str
    """Short, and unique within its workload."""
    text: str
    """The claim in one plain sentence."""
    holds: Callable[[Evidence], Finding]


def check_run(folder: Path, claims: Sequence[Claim]) -> list[tuple[str, Finding]]:
    """The text and the finding of every claim: first those of every run, then those of the workload."""
    evidence = Evidence(folder)
    return [(claim.text, judge(claim, evidence)) for claim in (*ALWAYS, *claims)]


def judge(claim: Claim, evidence: Evidence) -> Finding:
    """Whether a claim holds. One that cannot be evaluated does not hold, whatever the reason."""
    try:
        finding = claim.holds(evidence)
        if not isinstance(finding, Finding):
            raise TypeError(f"the claim must return a Finding, not {finding!r}")
    except NoEvidence as lack:
        finding = Finding(holds=False, detail=f"no evidence: {lack}")
    except Exception as error:
        finding = Finding(holds=False, detail=f"cannot be evaluated: {type(error).__name__}: {error}")
    return Finding(holds=finding.holds, detail=printable(str(finding.detail)))


def finding(objections: Iterable[str], detail: str) -> Finding:
    """The objections against a claim or, if there are none, the detail."""
    reasons = list(objections)
    more = f"; and {len(reasons) - 3} more" if len(reasons) > 3 else ""
    return Finding(holds=not reasons, detail="; ".join(reasons[:3]) + more if reasons else detail)


def _intact(evidence: Evidence) -> Finding:
    return finding(broken(evidence.folder), f"{len(present(evidence.folder))} files match seal.json")


def _described(evidence: Evidence) -> Finding:
    wrong = fault(evidence.raw("result.json"))
    return Finding(holds=wrong is None, detail=wrong or "every field exists and has its type")


def _one_run(evidence: Evidence) -> Finding:
    """Files of another run prove nothing about this one."""
    config, progress, origin = evidence.config, evidence.progress, evidence.result.provenance
    pairs = [
        ("workload", evidence.result.workload, "config.json: workload", config.workload),
        ("data", evidence.result.data, "data.json", evidence.data),
        ("provenance.data_digest", origin.data_digest, "data.json: digest", evidence.data.digest),
        ("provenance.seed", origin.seed, "config.json: config.seed", config.config.get("seed")),
        ("provenance.started", origin.started, "progress.json: started", progress.started),
        ("provenance.resumes", origin.resumes, "progress.json: resumes", progress.resumes),
    ]
    stated = evidence.raw("result.json")["provenance"].get("changes", [])
    changes = reported_changes(evidence.events("change"), config.changed, config.config)
    pairs.append(("provenance.changes", stated, "events.jsonl and config.json", changes))
    objections = [f"result.json: {name} differs from {other}" for name, one, other, two in pairs if one != two]
    seeds = evidence.seeds()
    for number, event in enumerate(evidence.events(), 1):
        if event.get("seed") is not None and event["seed"] not in seeds:
            objections.append(
                f"events.jsonl line {number} is of seed {event['seed']}, which the config does not ask for"
            )
    verified = origin.data_verified
    read = f"; {size(verified.bytes)} of the data's {size(verified.of)} matched its digests" if verified else ""
    return finding(objections, f"{len(evidence.events()):,} events, data, config and result agree{read}")


def _speed(evidence: Evidence) -> Finding:
    """The stated speed must follow from the log, in which every step belongs to one stretch."""
    derived, objections, steady = speed_of(evidence.events()), [], evidence.result.performance.steady
    for seed in evidence.seeds():
        logged = len(evidence.events("step", seed=seed))
        timed = sum(event.get("steps", 0) for event in evidence.events("timing", seed=seed))
        if logged != timed:
            objections.append(f"events.jsonl has {logged:,} steps of seed {seed}, its stretches {timed:,}")
    stated = evidence.raw("result.json")["performance"]
    wrong = [name for name, value in derived.items() if not _same(stated[name], value)]
    objections += [f"result.json: performance.{name} differs from what events.jsonl gives" for name in wrong]
    detail = f"{steady.samples_per_s:,.0f} samples/s over {steady.steps:,} steady steps" if steady else "no steps"
    return finding(objections, detail)


def _same(stated: Any, derived: Any) -> bool:
    if isinstance(stated, dict) and isinstance(derived, dict):
        return stated.keys() == derived.keys() and all(_same(stated[name], derived[name]) for name in derived)
    if isinstance(stated, list) and isinstance(derived, list):
        return len(stated) == len(derived) and all(map(_same, stated, derived))
    if isinstance(stated, (int, float)) and isinstance(derived, (int, float)):
        try:
            return math.isclose(stated, derived, rel_tol=SAME, abs_tol=SAME**2)
        except OverflowError:
            return False
    return bool(stated == derived)


ALWAYS = (
    Claim(name="intact", text="evidence is intact", holds=_intact),
    Claim(name="described", text="result fits its description", holds=_described),
    Claim(name="own", text="files belong to one run", holds=_one_run),
    Claim(name="speed", text="the speed follows from the logged times", holds=_speed),
)
"""The claims of every run, whatever its workload claims."""


def quality_target(target: Derive | None = None) -> Claim:
    """`target` computes the bounds that the result must state, from the config's fields and data.json."""

    def holds(evidence: Evidence) -> Finding:
        quality, trials = evidence.result.quality, evidence.trials()
        objections = [text for name, trial in trials.items() for text in _trial_objections(name, trial, evidence)]
        if quality.seeds != list(trials.values()):
            objections.append("result.json: quality.seeds differs from the trials' files")
        metrics, spread = _mean_and_spread([trial.metrics for trial in trials.values()])
        objections += _differences("quality.metrics", quality.metrics, metrics)
        objections += _differences("quality.spread", quality.spread, spread)
        if quality.baselines != evidence.baselines:
            objections.append("result.json: quality.baselines differs from baselines.json")
        objections += _detail_objections(evidence, metrics)
        objections += _target_objections(evidence, target)
        bounds, missed = _bounds(quality.target, metrics, evidence.baselines)
        if quality.met != (not missed):
            objections.append(f"result.json: quality.met is {quality.met}, the trials say otherwise")
        objections += [f"missed: {text}" for text in missed]
        return finding(objections, f"{', '.join(bounds) or 'no target set'}; log and trials agree ({len(trials)})")

    return Claim(name="quality", text="the logged metrics meet the quality target", holds=holds)


def _detail_objections(evidence: Evidence, metrics: Metrics) -> Iterator[str]:
    """Intervals and differences must follow from scores.json, which runs of earlier versions do not have."""
    stated = evidence.raw("result.json")["quality"]
    if not evidence.has("scores.json"):
        if any(stated.get(name) for name in ("interval", "differences")):
            yield "result.json states intervals, but scores.json is missing"
        return
    scores = evidence.file("scores.json", Scores)
    if set(scores.seeds) - {str(seed) for seed in evidence.seeds()}:
        yield "scores.json has seeds that the config does not ask for"
    derived = derived_from(lambda content: detail(content, metrics), {"scores.json": evidence.raw("scores.json")})
    for name, value in derived.items():
        if not _same(stated.get(name), value):
            yield f"result.json: quality.{name} differs from what scores.json gives"


def _trial_objections(name: str, trial: Trial, evidence: Evidence) -> Iterator[str]:
    """How a trial differs from the evaluations in the log."""
    history = evidence.history(trial.seed)
    if name != f"trial-{trial.seed}.json":
        yield f"{name} is of seed {trial.seed}"
    if trial.metrics != history[-1]["metrics"]:
        yield f"{name}: metrics differ from the last evaluation in events.jsonl"
    best = {"step": trial.best.step, "epoch": trial.best.epoch, "metrics": trial.best.metrics}
    if best != max(history, key=lambda entry: float(entry["metrics"]["auc"])):
        yield f"{name}: best is not the best evaluation in events.jsonl"


def _mean_and_spread(trials: list[Metrics]) -> tuple[Metrics, Metrics]:
    if any(trial.keys() != trials[0].keys() for trial in trials):
        raise NoEvidence("the trials do not have the same metrics")
    values = {name: [trial[name] for trial in trials] for name in trials[0]}
    spread = {name: statistics.stdev(v) for name, v in values.items()} if len(trials) > 1 else {}
    return {name: statistics.fmean(v) for name, v in values.items()}, spread


def _differences(place: str, stated: Metrics, derived: Metrics) -> Iterator[str]:
    for name in sorted(stated.keys() | derived.keys()):
        if name not in stated or name not in derived:
            yield f"result.json: {place}.{name} is not in the trials too"
        elif not math.isclose(stated[name], derived[name], rel_tol=SAME, abs_tol=SAME):
            yield f"result.json: {place}.{name} is {stated[name]:.6g}, the trials give {derived[name]:.6g}"


def _target_objections(evidence: Evidence, derive: Derive | None) -> Iterator[str]:
    """A target that was lowered afterwards does not count."""
    target, config = evidence.result.quality.target, evidence.config.config
    stated = {"beat": target.beat, "accuracy": target.accuracy, "auc": target.auc}
    if derive is not None:
        bounds = derived_from(derive, {"config.json": config, "data.json": evidence.raw("data.json")})
    else:
        requested = config.get("target") or {}
        bounds = {name: requested.get(name) for name in ("accuracy", "auc") if requested.get(name) is not None}
    for name, bound in bounds.items():
        if stated.get(name) != bound:
            yield f"result.json: quality.target.{name} is {stated.get(name)!r}, the config gives {bound!r}"


def derived_from(derive: Callable[..., Mapping[str, Any]], files: dict[str, dict[str, Any]]) -> Mapping[str, Any]:
    """What a function of a workload computes from files of a run; it gets copies, and may find them unusable."""
    try:
        return derive(*(copy.deepcopy(content) for content in files.values()))
    except Exception as error:
        raise NoEvidence(f"{' and '.join(files)} cannot be used: {type(error).__name__}: {error}") from error


def _bounds(target: Target, metrics: Metrics, baselines: dict[str, Metrics]) -> tuple[list[str], list[str]]:
    """Every bound with the value that was reached, and those that were missed."""
    bounds, missed = [], []
    beat = baseline_to_beat(target.beat, baselines)
    if beat is not None:
        if "auc" not in baselines.get(beat, {}):
            raise NoEvidence(f"baselines.json has no AUC of {beat}")
        bound = baselines[beat]["auc"]
        bounds.append(f"auc {metrics.get('auc', math.nan):.4f} (above {bound:.4f}, {beat})")
        missed += [] if metrics.get("auc", math.nan) > bound else bounds[-1:]
    for name, least in (("accuracy", target.accuracy), ("auc", target.auc)):
        if least is not None:
            bounds.append(f"{name} {metrics.get(name, math.nan):.4f} (at least {least:g})")
            missed += [] if metrics.get(name, math.nan) >= least else bounds[-1:]
    return bounds, missed


def budget_sums() -> Claim:
    def holds(evidence: Evidence) -> Finding:
        stated, profile = evidence.result.performance, evidence.profile
        derived = budget_of(evidence.raw("profile.json"))
        objections = []
        if stated.steps_in_budget != profile.steps:
            objections.append(f"the budget is of {stated.steps_in_budget} steps, profile.json of {profile.steps}")
        shares, measured = stated.budget or {}, derived["budget"] or {}
        for name in sorted(shares.keys() | measured.keys()):
            one, other = shares.get(name, 0.0), measured.get(name, 0.0)
            if not math.isclose(one, other, abs_tol=MEASURED_SAME):
                objections.append(f"{name} is {one:.6f} of a step, profile.json gives {other:.6f}")
        if abs(sum(shares.values()) - 1) > MEASURED_SAME:
            objections.append(f"it sums to {sum(shares.values()):.6g}")
        return finding(objections, f"sums to 1 over {profile.steps} measured steps")

    return Claim(name="budget", text="the step budget is that of the profile and sums to 1", holds=holds)


def known_machine() -> Claim:
    def holds(evidence: Evidence) -> Finding:
        own, objections = own_fingerprint("machine.json", evidence.raw("machine.json"))
        stated = evidence.result.provenance.machine
        if stated != own:
            objections.append(f"result.json is from machine {stated!r}, machine.json describes {own}")
        objections += foreign_peaks(evidence, own)
        peaks = ", and so do its ceilings" if evidence.has("peaks.json") else ""
        return finding(objections, f"{own} follows from the facts of machine.json{peaks}")

    return Claim(name="machine", text="the run is from the machine it describes", holds=holds)


def own_fingerprint(place: str, machine: Any) -> tuple[str, list[str]]:
    """The fingerprint that follows from a machine's facts, and an objection if it states another."""
    if not isinstance(machine, dict):
        raise NoEvidence(f"{place} describes no machine")
    derived = fingerprint({name: fact for name, fact in machine.items() if name != "fingerprint"})
    stated = machine.get("fingerprint")
    return derived, [] if stated == derived else [f"{place} states {stated!r}, its facts give {derived}"]


def foreign_peaks(evidence: Evidence, own: str) -> list[str]:
    if not evidence.has("peaks.json"):
        return []
    theirs, objections = own_fingerprint("peaks.json", evidence.peaks.get("machine"))
    if theirs != own:
        objections.append(f"peaks.json has the ceilings of another machine: {theirs}, not {own}")
    return objections


def loss_falls(by: float) -> Claim:
    def holds(evidence: Evidence) -> Finding:
        falls = {seed: _fall(evidence.losses(seed)) for seed in evidence.seeds()}
        least = min(falls, key=lambda seed: falls[seed])
        detail = f"by {falls[least]:.4g} in seed {least}, the least of {len(falls)} (at least {by:g})"
        return Finding(holds=falls[least] >= by, detail=detail)

    return Claim(name="loss", text=f"the loss falls by at least {by:g} with every seed", holds=holds)


def _fall(losses: list[float]) -> float:
    ends = max(1, round(LOSS_ENDS * len(losses)))
    return statistics.fmean(losses[:ends]) - statistics.fmean(losses[-ends:])
