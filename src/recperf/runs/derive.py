"""Computes result.json from the other files of a run: a run does so once, `recperf check` does it again. Torch-free.

Steady throughput is the samples of all stretches of training after the warm-up over their wall time, each measured
between two moments at which the device was idle. Overall throughput is all samples over all time. Both come from the
timing events of the log, those of every process that a resumed run had. Intervals, differences to baselines and
warnings come from the bootstrap replicates in scores.json.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from ..measure.ceilings import ceilings_of_profile
from ..measure.peaks.other_work import DISTURBED
from ..measure.peaks.records import Peaks
from ..measure.profile_records import WorkloadFigures
from ..measure.records import Percentiles
from ..measure.spans import budget_part
from ..phases import OTHER
from ..tasks import AUC, NDCG, ORACLES, Task, lower_is_better, margin, signed
from . import quality_limit
from .evidence import START, Evidence
from .result import (
    SCHEMA,
    CalibrationBin,
    Difference,
    Interval,
    Metrics,
    ModelInterval,
    Overall,
    Performance,
    Provenance,
    Quality,
    Ranking,
    Result,
    Segment,
    StartedFrom,
    Target,
    Throughput,
    Waited,
)
from .resume import reported_changes
from .schemas import ChangeEvent, MemoryEvent, SampledScores, SavedScores, SegmentFacts, Timing

Json = dict[str, Any]

FINISHER = ("commit", "dirty", "packages", "command", "ended", "data_verified")
"""The fields of a provenance that only the process that finishes a run knows."""
FEWEST = 5
"""Timed steps below which no percentiles are reported."""
CLOSE = 0.1
"""Steady throughput and batch / p50 may differ by this share without a reason being stated."""
MINOR = 0.02
"""Causes of a smaller difference are not mentioned."""


def result_of(
    evidence: Evidence, *, run: str, target: Target, device: str, settings: dict[str, str], origin: Json
) -> Result:
    """The content of result.json. No other file of the run holds the arguments after `evidence`; `origin` are the
    fields in FINISHER."""
    config, data, progress = evidence.config, evidence.data, evidence.progress
    speed = speed_of(evidence.events(Timing))
    memory = [event.device_bytes for event in evidence.events(MemoryEvent)]
    performance = Performance(
        device=device,
        settings=settings,
        **speed,
        budget=None,
        waited=waited_of(progress.waited),
        device_bytes=max(memory, default=None),
    )
    if figures := evidence.figures:
        performance.budget, performance.mfu = budget_of(figures), mfu(figures, evidence.peaks, speed["steady"])
    return Result(
        schema=SCHEMA,
        workload=config.workload,
        task=evidence.task.name,
        run=run,
        quality=quality_of(evidence, target),
        performance=performance,
        data=data,
        provenance=Provenance(
            **origin,
            machine=evidence.machine["fingerprint"],
            seed=evidence.seeds()[0],
            data_digest=data.digest,
            started=progress.started,
            resumes=progress.resumes,
            started_from=evidence.file(START, StartedFrom) if evidence.has(START) else None,
            changes=tuple(reported_changes(evidence.events(ChangeEvent), config.changed, config.config)),
        ),
    )


def result_again(evidence: Evidence) -> Result:
    """The result of a finished run, computed again from its other files."""
    result = evidence.result
    return result_of(
        evidence,
        run=result.run,
        target=result.quality.target,
        device=result.performance.device,
        settings=result.performance.settings,
        origin={name: getattr(result.provenance, name) for name in FINISHER},
    )


def quality_of(evidence: Evidence, target: Target) -> Quality:
    """Mean and spread over the seeds, the baselines, whether the target is met, and what scores.json adds."""
    task, trials, baselines = evidence.task, evidence.trials(), evidence.baselines
    values = {name: [trial.metrics[name] for trial in trials] for name in trials[0].metrics}
    metrics = {name: statistics.fmean(each) for name, each in values.items()}
    quality = Quality(
        metrics=metrics,
        spread={name: statistics.stdev(each) for name, each in values.items()} if len(trials) > 1 else {},
        seeds=trials,
        target=target,
        met=False,
        baselines=baselines,
    )
    if evidence.has("scores.json"):
        add_detail(task, quality, evidence.file("scores.json", SavedScores))
    differences = compared(task, quality)
    quality.met = meets(task, metrics, baselines, target, differences)
    quality.limit = quality_limit.of_run(evidence, task, quality, best_of(differences), leading_interval(task, quality))
    return quality


def meets(
    task: Task, metrics: Metrics, baselines: dict[str, Metrics], target: Target, differences: Sequence[Difference] = ()
) -> bool:
    """Whether every bound of the target holds; None is no bound."""
    return all(met for _, met in bounds(task, metrics, baselines, target, differences))


def bounds(
    task: Task, metrics: Metrics, baselines: dict[str, Metrics], target: Target, differences: Sequence[Difference] = ()
) -> Iterator[tuple[str, bool]]:
    """Every bound of the target beside the value that was reached, and whether it is met: a baseline is beaten where
    the leading metric is better by more than the interval of the difference, or where that is not known, at all."""
    beat = task.baseline_to_beat(target.beat, baselines)
    if beat is not None:
        name = task.leading
        value, bar, side = metrics[name], baselines[beat][name], better_side(name)
        place = next((row.standing for row in differences if row.baseline == beat), None)
        text = f"{name} {value:.4f} ({side} {bar:.4f}, {beat}{f': {place}' if place else ''})"
        yield text, signed(name, value) > signed(name, bar) and place in (None, side)
    for name, bound in target.bounds.items():
        if name in metrics:
            text = f"{name} {metrics[name]:.4f} ({limit_text(name)} {bound:g})"
            yield text, signed(name, metrics[name]) >= signed(name, bound)


def better_side(metric: str) -> str:
    """On which side of a baseline a value is better: above or below."""
    return "below" if lower_is_better(metric) else "above"


def limit_text(metric: str) -> str:
    """How a bound of a metric is meant."""
    return "at most" if lower_is_better(metric) else "at least"


def mfu(figures: WorkloadFigures, peaks: Peaks | None, steady: Throughput | None) -> float | None:
    """FLOPs per second at the steady throughput, as a share of the machine's fastest matrix product in that precision
    and with as many threads; a sample has the FLOPs that were counted for those of the measured batches."""
    ceilings = ceilings_of_profile(figures, peaks)
    peak = ceilings.flops.get(figures.precision) if ceilings else None
    if steady is None or not peak:
        return None
    per_sample = sum(part.flops or 0 for part in figures.components) / figures.batch_size
    return per_sample * steady.samples_per_s / peak


def speed_of(timed: list[Timing]) -> Json:
    """The fields of a result's performance that follow from the log."""
    steady = [event for event in timed if event.part == "steady"]
    times = [ms for event in steady for ms in event.step_ms]
    tenths = statistics.quantiles(times, n=10, method="inclusive") if len(times) >= FEWEST else []
    step_ms = Percentiles(tenths[1], tenths[4], tenths[7]) if tenths else None
    rate = _rate(steady)
    return {
        "steady": Throughput(**rate) if rate else None,
        "overall": _overall(timed),
        "step_ms": step_ms,
        "difference": difference(Throughput(**rate), steady, times, step_ms.p50) if rate and step_ms else None,
    }


def _rate(stretches: list[Timing]) -> Json | None:
    total = {name: sum(getattr(event, name) for event in stretches) for name in ("samples", "steps", "seconds")}
    return {"samples_per_s": total["samples"] / total["seconds"], **total} if total["steps"] else None


def _overall(timed: list[Timing]) -> Overall | None:
    rate = _rate(timed)
    if rate is None:
        return None
    parts: Json = {
        f"{part}_s": math.fsum(event.seconds for event in timed if event.part == part)
        for part in ("steady", "warmup", "evaluation", "save")
    }
    return Overall(**rate, **parts, shuffle_s=math.fsum(event.shuffle_s for event in timed))


def waited_of(phases: dict[str, float]) -> Waited | None:
    """The time by phase; None for a run from before phases were recorded."""
    if not phases:
        return None
    named = {part.removesuffix("_s"): 0.0 for part in Waited.__struct_fields__[1:]}
    for phase, seconds in phases.items():
        named[phase if phase in named else OTHER] += seconds
    return Waited(math.fsum(phases.values()), **{f"{phase}_s": seconds for phase, seconds in named.items()})


def difference(rate: Throughput, steady: list[Timing], times: list[float], p50: float) -> str | None:
    """Why steady throughput is not a batch per median step; None where the two are close."""
    batch, mean = max(event.batch for event in steady), sum(times) / len(times)
    ratio = rate.samples_per_s / (batch / p50 * 1e3)
    if abs(ratio - 1) <= CLOSE:
        return None
    seconds, shuffle = rate.seconds, sum(event.shuffle_s for event in steady)
    between = max(0.0, seconds - shuffle - sum(times) / 1e3)
    causes = {
        f"the mean step takes {mean / p50:.2f} times the median": abs(math.log(mean / p50)),
        f"batches have {rate.samples / rate.steps:,.0f} samples on average": math.log(
            batch * rate.steps / rate.samples
        ),
        f"shuffling takes {shuffle / seconds:.0%} of the time": shuffle / seconds,
        f"the time between steps is {between / seconds:.0%}": between / seconds,
    }
    stated = [text for text, size in sorted(causes.items(), key=lambda item: -item[1]) if size >= MINOR]
    others = sum((event.other_work or 0.0) * event.seconds for event in steady) / seconds
    stated += [f"other work took {others:.0%} of the cores"] if others > DISTURBED else []
    sense = "below" if ratio < 1 else "above"
    return f"{abs(ratio - 1):.0%} {sense} {batch:,} samples per median step: {'; '.join(stated)}"


def budget_of(figures: WorkloadFigures) -> dict[str, float] | None:
    """The share of each part of a step, from the steps measured after training: the one source for every report."""
    budget: dict[str, float] = {}
    for row in figures.components:
        # The spans of a model are declared only where its workload is loaded.
        part = budget_part(row.name, default="backward" if row.phase == "backward" else row.name)
        budget[part] = budget.get(part, 0.0) + row.share
    return budget or None


FEW_ROWS = 1000
LEAKED_AUC = 0.99


def interval(replicates: Sequence[float]) -> Interval:
    """The middle 95 % of the replicates."""
    cuts = statistics.quantiles(replicates, n=40, method="inclusive")
    return Interval(low=cuts[0], high=cuts[-1])


def combined(seeds: Sequence[Sequence[float]]) -> list[float]:
    """Replicates of the mean over the seeds: in each replicate the seeds are drawn with replacement, as users are."""
    if len(seeds) == 1:
        return list(seeds[0])
    draw = random.Random(len(seeds))
    return [statistics.fmean(draw.choice(seeds)[place] for _ in seeds) for place in range(len(seeds[0]))]


def add_detail(task: Task, quality: Quality, scores: SavedScores) -> None:
    """Fill in what follows from scores.json."""
    seeds, baselines, leading = list(scores.seeds.values()), scores.baselines, task.leading
    if seeds and seeds[0].leading is not None:
        rows = [seed.replicates[leading] for seed in seeds]
        ends = interval(combined(rows))
        quality.interval = ModelInterval(
            low=ends.low, high=ends.high, by=scores.by, units=scores.units, replicates=len(rows[0])
        )
    paired = [seed for seed in seeds if seed.rows_digest == scores.rows_digest]
    if paired:
        quality.segments = tuple(_segment(name, facts, paired, scores) for name, facts in scores.segments.items())
        quality.calibration = tuple(_calibration(bins) for bins in zip(*(seed.calibration for seed in paired)))
    if paired and baselines:
        _add_differences(leading, quality, paired, baselines, units=scores.units, by=scores.by)
    facts, ranked = scores.ranking, [seed.ranking for seed in paired if seed.ranking]
    if facts and ranked:
        metrics, ndcg = _means([seed.metrics for seed in ranked]), [seed.ndcg_replicates for seed in ranked]
        quality.ranking = Ranking(
            users=facts.users,
            catalogue=facts.catalogue,
            negatives=facts.negatives,
            repeats=facts.repeats,
            meeting=facts.meeting,
            split=facts.split,
            lists=_means([seed.lists for seed in ranked]) or None,
            metrics=metrics,
            one_ms=ranked[-1].one_ms,
            baseline_intervals={name: interval(rule.ndcg_replicates) for name, rule in facts.baselines.items()},
            baselines={name: rule.metrics for name, rule in facts.baselines.items()},
            interval=interval(combined(ndcg)),
            differences=tuple(
                difference_to(
                    name, NDCG, (metrics[NDCG], rule.metrics[NDCG]), ndcg, [rule.ndcg_replicates], units=facts.users
                )
                for name, rule in sorted(facts.baselines.items(), key=lambda item: -item[1].metrics[NDCG])
            ),
        )
    else:
        quality.not_ranked = scores.not_ranked
    quality.left_out = scores.left_out
    quality.warnings = tuple(warnings(scores, quality.metrics.get(AUC, 0.0)))


def _add_differences(
    leading: str, quality: Quality, paired: list[SampledScores], baselines: dict[str, SampledScores], **drawn: Any
) -> None:
    """To every baseline in the leading metric; in the others, to the one that is the best in the first of them."""
    quality.baseline_intervals = {name: interval(rule.replicates[leading]) for name, rule in baselines.items()}
    replicates = [seed.replicates[leading] for seed in paired]
    own = statistics.fmean(seed.leading or 0.0 for seed in paired)
    quality.differences = tuple(
        difference_to(name, leading, (own, rule.leading or 0.0), replicates, [rule.replicates[leading]], **drawn)
        for name, rule in sorted(baselines.items(), key=lambda item: -signed(leading, item[1].leading or 0.0))
    )
    others = [name for name in paired[0].replicates if name != leading]
    known = {rule: row for rule, row in quality.baselines.items() if others and others[0] in row}
    rules = [rule for rule in baselines if rule in known and rule not in ORACLES]
    best = max(rules, key=lambda rule: signed(others[0], known[rule][others[0]]), default="")
    quality.probabilities = tuple(
        difference_to(
            best,
            name,
            (quality.metrics[name], quality.baselines[best][name]),
            [seed.replicates[name] for seed in paired],
            [baselines[best].replicates[name]],
            **drawn,
        )
        for name in (others if best else ())
    )


def _segment(name: str, facts: SegmentFacts, seeds: list[SampledScores], scores: SavedScores) -> Segment:
    ranked = [seed.ranking.segments[name] for seed in seeds if seed.ranking and name in seed.ranking.segments]
    own = [seed.segments[name] for seed in seeds if name in seed.segments]
    return Segment(
        name=name,
        rows=facts.rows,
        at_most=facts.at_most,
        counted=facts.counted,
        auc=statistics.fmean(own) if own else None,
        baselines={rule: row.segments[name] for rule, row in scores.baselines.items() if name in row.segments},
        ranking=_means(ranked) if ranked else None,
    )


def _calibration(bins: Sequence[CalibrationBin]) -> CalibrationBin:
    return CalibrationBin(
        predicted=statistics.fmean(one.predicted for one in bins),
        observed=statistics.fmean(one.observed for one in bins),
        rows=bins[0].rows,
    )


def _means(rows: Sequence[Metrics]) -> Metrics:
    return {name: statistics.fmean(row[name] for row in rows) for name in rows[0]}


def difference_to(
    other: str,
    metric: str,
    values: tuple[float, float],
    own: Sequence[Sequence[float]],
    others: Sequence[Sequence[float]],
    *,
    units: int,
    by: str = "users",
) -> Difference:
    """A model less another, or a baseline, from replicates by seed: the interval over users and seeds, how often the
    difference is negative, and how many users would tell where these do not."""
    replicates = [one - other for one, other in zip(combined(own), combined(others))]
    ends, negative = interval(replicates), sum(value < 0 for value in replicates)
    standing = "above" if ends.low > 0 else "below" if ends.high < 0 else "level"
    none, half = margin(metric, max(values, key=lambda value: signed(metric, value))), (ends.high - ends.low) / 2
    return Difference(
        low=ends.low,
        high=ends.high,
        metric=metric,
        baseline=other,
        difference=values[0] - values[1],
        below_zero=negative / len(replicates),
        seeds=len(own),
        standing=standing,
        units=units,
        by=by,
        values=values,
        needed=round_up(units * (half / none) ** 2) if standing == "level" and none and half > none else None,
    )


def round_up(count: float) -> int:
    """The next larger count with two digits."""
    unit = int(10 ** max(0, math.floor(math.log10(count)) - 1))
    return math.ceil(round(count / unit, 6)) * unit


def best_of(differences: Sequence[Difference]) -> Difference | None:
    """Of differences with the best baseline first, that to the first one that is no oracle."""
    return next((row for row in differences if row.baseline not in ORACLES), None)


def compared(task: Task, quality: Quality) -> Sequence[Difference]:
    """The differences to every baseline in the leading metric, which decide whether it is beaten."""
    known = quality.differences if not task.ranks_items else quality.ranking.differences if quality.ranking else ()
    return tuple(row for row in known if row.metric == task.leading)


def leading_interval(task: Task, quality: Quality) -> Interval | None:
    """The 95 % interval of the leading metric; None if it is not known."""
    if task.ranks_items:
        return quality.ranking.interval if quality.ranking else None
    return quality.interval


def few_rows(rows: int) -> str | None:
    if rows >= FEW_ROWS:
        return None
    return f"only {rows:,} rows are scored; below {FEW_ROWS:,} metrics say little: hold out more"


def warnings(scores: SavedScores, auc: float) -> list[str]:
    """Reasons to doubt the metrics."""
    texts = [few_rows(scores.rows)]
    if auc == 0.5:
        texts.append("AUC is 0.5: all scored rows have the same label, or the model gives them the same score")
    if auc > LEAKED_AUC:
        text, strongest = f"AUC {auc:.4f}: a feature may contain the label", scores.strongest_feature
        texts.append(f"{text}; {strongest.name} alone reaches {strongest.auc:.4f}" if strongest else text)
    return [text for text in texts if text]
