"""Computes result.json from the other files of a run: a run does so once, `recperf check` does it again. Torch-free."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..jsonfile import fit
from ..measure.ceilings import ceilings_of_profile
from ..train.config import baseline_to_beat
from .evidence import Evidence
from .quality import add_detail
from .result import SCHEMA, Metrics, Performance, Provenance, Quality, Ranks, Result, Target, Throughput
from .resume import reported_changes
from .schemas import Scores
from .speed import budget_of, speed_of

Json = dict[str, Any]

FINISHER = ("commit", "dirty", "packages", "command", "ended", "data_verified")
"""The fields of a provenance that only the process that finishes a run knows."""


@dataclass(frozen=True, kw_only=True)
class Stated:
    """What no other file of a run says."""

    run: str
    target: Target
    device: str
    settings: dict[str, str]
    origin: Json
    """The fields in FINISHER."""

    @classmethod
    def of(cls, result: Result) -> Stated:
        return cls(
            run=result.run,
            target=result.quality.target,
            device=result.performance.device,
            settings=result.performance.settings,
            origin={name: getattr(result.provenance, name) for name in FINISHER},
        )


def result_of(evidence: Evidence, stated: Stated) -> Result:
    """The content of result.json."""
    config, data, progress = evidence.config, evidence.data, evidence.progress
    return Result(
        schema=SCHEMA,
        workload=config.workload,
        run=stated.run,
        quality=quality_of(evidence, stated.target),
        performance=_performance(evidence, stated),
        data=data,
        provenance=Provenance(
            **stated.origin,
            machine=evidence.fingerprint,
            seed=evidence.seeds()[0],
            data_digest=data.digest,
            started=progress.started,
            resumes=progress.resumes,
            changes=tuple(reported_changes(evidence.events("change"), config.changed, config.config)),
        ),
    )


def quality_of(evidence: Evidence, target: Target) -> Quality:
    """Mean and spread over the seeds, the baselines, whether the target is met, and what scores.json adds."""
    trials, baselines = evidence.trials(), evidence.baselines
    values = {name: [trial.metrics[name] for trial in trials] for name in trials[0].metrics}
    metrics = {name: statistics.fmean(each) for name, each in values.items()}
    quality = Quality(
        metrics=metrics,
        spread={name: statistics.stdev(each) for name, each in values.items()} if len(trials) > 1 else {},
        seeds=trials,
        target=target,
        met=meets(metrics, baselines, target),
        baselines=baselines,
    )
    if evidence.has("scores.json"):
        add_detail(quality, evidence.file("scores.json", Scores))
    return quality


def meets(metrics: Metrics, baselines: dict[str, Metrics], target: Target) -> bool:
    """Whether every bound of the target holds; None is no bound."""
    return all(met for _, met in bounds(metrics, baselines, target))


def bounds(metrics: Metrics, baselines: dict[str, Metrics], target: Target) -> Iterator[tuple[str, bool]]:
    """Every bound of the target beside the value that was reached, and whether it is met."""
    beat = baseline_to_beat(target.beat, baselines)
    if beat is not None:
        auc, least = metrics["auc"], baselines[beat]["auc"]
        yield f"auc {auc:.4f} (above {least:.4f}, {beat})", auc > least
    for name, bound in (("accuracy", target.accuracy), ("auc", target.auc)):
        if bound is not None:
            yield f"{name} {metrics[name]:.4f} (at least {bound:g})", metrics[name] >= bound


def _performance(evidence: Evidence, stated: Stated) -> Performance:
    speed = speed_of(evidence.events())
    performance = Performance(
        device=stated.device, settings=stated.settings, **speed, budget=None, steps_in_budget=0
    )  # fmt: skip
    if evidence.has("profile.json"):
        measured, profile = evidence.profile, evidence.raw("profile.json")
        performance.budget, performance.steps_in_budget = budget_of(profile), measured.steps
        performance.tables = measured.tables
        performance.mfu = mfu(profile, evidence.peaks if evidence.has("peaks.json") else None, speed["steady"])
        ranks = fit(profile.get("communication"), Ranks)
        performance.ranks = ranks if isinstance(ranks, Ranks) else None
    return performance


def mfu(profile: Json, peaks: Json | None, steady: Throughput | None) -> float | None:
    """FLOPs per second at the steady throughput, as a share of the machine's fastest matrix product in that precision
    and with as many threads; a sample has the FLOPs that were counted for those of the measured batches."""
    ceilings = ceilings_of_profile(profile, peaks)
    peak = ceilings.flops.get(profile.get("precision") or "float32") if ceilings else None
    if steady is None or not peak:
        return None
    per_sample = sum(part["flops"] or 0 for part in profile["components"]) / profile["batch_size"]
    return float(per_sample * steady.samples_per_s / peak)
