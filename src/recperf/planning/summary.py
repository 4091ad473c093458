"""A plan: what `recperf plan --json` prints, and the report shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from msgspec import Struct

from ..config import within
from . import advice, target, tiers
from .devices import Device, Network, fullest_and_emptiest, node_count
from .memory import Memory
from .predict import Band, PredictedStep, Prediction, predict, rank_batch_of
from .sharding import LARGEST_BATCH, Parallelism
from .skew import Skew
from .target import Failures, PlannedTraining
from .work import PlannedWorkload, Spread

MOST_RANKS = 1024
"""Where the search for a number of ranks that fits ends."""
LARGER_BATCH, NOTABLY = 4, 1.5
"""A batch LARGER_BATCH times as large is offered where it trains NOTABLY times as many samples/s."""
LARGER = 2
"""How many larger numbers of ranks the table shows after the smallest that fits."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What a plan answers besides the step and its memory."""

    samples_to_target: float | None = None
    """Samples to the quality target. Default: the published number, where one applies."""
    startup_seconds: float | None = None
    """Seconds before the first step. Default: 25, the most that published runs took to initialise."""
    mtbf_hours: float | None = None
    """Mean hours between two failures of one device: adds the goodput and how often to write a checkpoint."""
    checkpoint_seconds: float = 60.0
    """Seconds for which a checkpoint blocks the training."""
    restart_seconds: float = 300.0
    """Seconds from a failure to the next step."""
    served: float | None = None
    """Tables in tiers: share of the rows of a step that the cache serves. Default: estimated from --skew."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Everything that a plan depends on, except the number of ranks."""

    workload: PlannedWorkload
    device: Device
    network: Network
    parallelism: Parallelism
    question: Question
    skew: Callable[[int, int], Skew | None]
    """The ids of that many samples on each of that many ranks; None: spread evenly."""
    worse_skew: Callable[[int, int], Skew | None] | None = None
    """Ids that are less favourable, to see whether the advice depends on them."""
    global_batches: tuple[int, ...] = ()
    """Smaller global batches to try where `parallelism.rank_batch` samples do not fit."""
    history: float | None = None
    price: float | None = None
    """Price of one device for an hour."""
    cache_bytes: int | None = None
    """Device memory for a cache of rows, where tables are in tiers; None: what the rest leaves free."""
    tiered: bool = False
    """Tables are in tiers even if they fit into the device."""

    def parallelisms(self, ranks: int) -> Iterator[Parallelism]:
        """The usual batch of a rank, then smaller ones."""
        yield self.parallelism
        usual = rank_batch_of(self.workload, ranks, self.parallelism)
        for batch in sorted(self.global_batches, reverse=True):
            # Where it does not divide, somewhat smaller: more ranks must not need more memory on each.
            if ranks <= batch < usual * ranks:
                yield replace(self.parallelism, rank_batch=batch // ranks)

    def predictor(self, ranks: int, rank_batch: int) -> Callable[[Parallelism], Prediction]:
        """Predicts a step of `rank_batch` samples on each of `ranks` ranks, for any way to distribute it."""
        skew = self.skew(rank_batch, ranks)

        def predicted(parallelism: Parallelism) -> Prediction:
            return predict(
                self.workload, ranks, self.device, self.network, parallelism, skew=skew, history=self.history
            )

        return predicted


class TablePlace(Struct, kw_only=True):
    name: str
    kind: str
    ranks: int
    bytes: int
    most_bytes_a_rank: int
    why: str


class Point(Struct, kw_only=True):
    """One number of ranks; what does not fit has neither time nor cost."""

    ranks: int
    nodes: int
    node_ranks: tuple[int, int]
    """Ranks on the fullest node and on the last one."""
    rank_batch: int
    global_batch: int
    fits: bool
    options: str
    memory: Memory
    tables: list[TablePlace]
    origins: dict[str, str]
    step: PredictedStep | None = None
    scaling: float | None = None
    target: PlannedTraining | None = None
    failures: Failures | None = None


class Faster(Struct, kw_only=True):
    """Options of `recperf run` that make a step faster."""

    options: str
    step: PredictedStep


class PlanAdvice(Struct, kw_only=True):
    tried_ranks: int
    configuration: Point | None
    """The smallest that fits."""
    changes: list[Faster]
    worse_ranks: int | None
    """How many ranks are enough for less favourable ids, where these are known; 0: none, or as many with options."""
    tiers: tiers.PlannedTiers | None
    """One device, or as many as were asked for, with tables in host memory or in files."""


class Plan(Struct, kw_only=True):
    schema: int = 4
    workload: str
    preset: str | None
    command: str
    """The `recperf run` of the config, without what the plan decides."""
    device: str
    network: str
    currency: str | None
    advice: PlanAdvice
    points: list[Point]


def plan(setting: Setting, counts: Sequence[int] | None = None) -> tuple[PlanAdvice, list[Point]]:
    """The advice, and points for these numbers of ranks, or for the smallest that fits, all powers of two below it and
    some above."""
    candidates = list(_search(setting)) if counts is None else [_candidate(setting, ranks) for ranks in counts]
    tried = list(candidates)
    if counts is not None and not any(one.memory.fits for one in candidates):
        tried += _search(setting, first=1 << max(counts).bit_length(), larger=0)
    smallest = min((one for one in tried if one.memory.fits), key=lambda one: one.ranks, default=None)
    points = [_point(setting, one, smallest) for one in candidates]
    advised = PlanAdvice(
        tried_ranks=max(one.ranks for one in tried),
        configuration=None if smallest is None else _point(setting, smallest, smallest),
        changes=_changes(setting, smallest),
        worse_ranks=_worse_ids(setting, smallest),
        tiers=_tiers(setting, smallest, min(counts) if counts and setting.tiered else 1),
    )
    return advised, points


def _search(setting: Setting, *, first: int = 1, larger: int = LARGER) -> Iterator[Prediction]:
    """Doubles the number of ranks until one fits, and a few times more."""
    by_rank = setting.parallelism.rank_batch is not None
    most = MOST_RANKS if by_rank else min(MOST_RANKS, setting.workload.batch_size)
    ranks, after = first, 0
    while ranks <= most and after <= larger:
        candidate = _candidate(setting, ranks)
        yield candidate
        after += bool(after or candidate.memory.fits)
        ranks *= 2


def _candidate(setting: Setting, ranks: int) -> Prediction:
    """The largest batch that fits, with options if it needs them; else the usual batch."""
    tried = []
    for parallelism in setting.parallelisms(ranks):
        predicted = setting.predictor(ranks, rank_batch_of(setting.workload, ranks, parallelism))
        tried.append(predicted(parallelism))
        if tried[-1].memory.fits:
            return tried[-1]
        for options, changed in advice.remedies(tried[-1], setting.device):
            return replace(predicted(changed), options=options)
    return tried[0]


def _changes(setting: Setting, plan: Prediction | None) -> list[Faster]:
    """Options of `recperf run` that make it faster."""
    if plan is None:
        return []
    better = advice.improvements(plan, setting.predictor(plan.ranks, plan.rank_batch))
    if not setting.workload.published_samples and LARGER_BATCH * plan.global_batch <= LARGEST_BATCH:
        # How many samples the target takes depends on the batch; where that is unknown, larger ones are an offer.
        larger = replace(plan.parallelism, rank_batch=LARGER_BATCH * plan.rank_batch)
        one = setting.predictor(plan.ranks, LARGER_BATCH * plan.rank_batch)(larger)
        if one.memory.fits and one.step.samples_per_s > NOTABLY * plan.step.samples_per_s:
            better.insert(0, (f"--train.batch-size {one.global_batch}", one))
    return [Faster(options=options, step=one.step) for options, one in better]


def _worse_ids(setting: Setting, smallest: Prediction | None) -> int | None:
    """How many ranks are enough for less favourable ids: as many, where they fit in the same configuration."""
    if setting.worse_skew is None or smallest is None:
        return None
    ranks, worse = smallest.ranks, replace(setting, skew=setting.worse_skew)
    if worse.predictor(ranks, smallest.rank_batch)(smallest.parallelism).memory.fits:
        return ranks
    enough = next((one.ranks for one in _search(worse, first=ranks, larger=0) if one.memory.fits), ranks)
    return enough if enough > ranks else 0


def _tiers(setting: Setting, smallest: Prediction | None, ranks: int) -> tiers.PlannedTiers | None:
    if smallest is not None and smallest.ranks == 1 and not setting.tiered:
        return None
    plan = setting.predictor(ranks, rank_batch_of(setting.workload, ranks, setting.parallelism))(setting.parallelism)
    if any(table.copied for table in plan.work.tables):
        # AdamW changes every row in every step: a run refuses tiers.
        return None
    priced = tiers.price(
        plan, setting.device, cache_bytes=setting.cache_bytes, served=setting.question.served,
        node_ranks=fullest_and_emptiest(ranks, setting.network)[0],
    )  # fmt: skip
    for store in priced.stores.values():
        forward = target.forward_seconds(plan.step) * store.step.value / plan.step.value
        store.target = _target(setting, plan, store.step, forward)
    return priced


def _point(setting: Setting, plan: Prediction, smallest: Prediction | None) -> Point:
    ranks, question = plan.ranks, setting.question
    point = Point(
        ranks=ranks,
        nodes=node_count(ranks, setting.network),
        node_ranks=fullest_and_emptiest(ranks, setting.network),
        rank_batch=plan.rank_batch,
        global_batch=plan.global_batch,
        fits=plan.memory.fits,
        options=plan.options,
        memory=plan.memory,
        tables=_tables(plan),
        origins=plan.origins,
    )
    if not point.fits or smallest is None:
        point.memory.largest_global_batch = ranks * _largest_batch(setting, plan)
        return point
    step = point.step = plan.step
    point.scaling = step.samples_per_s / ranks / (smallest.step.samples_per_s / smallest.ranks)
    point.target = _target(setting, plan, step, target.forward_seconds(step))
    if question.mtbf_hours is not None:
        within(1e-6, question.mtbf_hours, 1e9, "mtbf hours")
        # Devices fail independently, and one failure stops all.
        mtbf_s = 3600 * question.mtbf_hours / ranks
        point.failures = target.failures(mtbf_s, question.checkpoint_seconds, question.restart_seconds)
    return point


def _largest_batch(setting: Setting, plan: Prediction) -> int:
    """Samples of a rank that fit where those of the plan do not."""

    def fits(batch: int) -> bool:
        return setting.predictor(plan.ranks, batch)(replace(plan.parallelism, rank_batch=batch)).memory.fits

    return advice.largest_batch(fits, plan.rank_batch)


def _tables(plan: Prediction) -> list[TablePlace]:
    return [
        TablePlace(
            name=one.table.name,
            kind=one.kind,
            ranks=int(np.count_nonzero(one.width_R)),
            bytes=one.table.bytes,
            most_bytes_a_rank=int(one.weight_R.max()),
            why=one.why,
        )
        for one in plan.placed
    ]


def _target(setting: Setting, plan: Prediction, step: Band, forward: float) -> PlannedTraining | None:
    workload, question = setting.workload, setting.question
    samples = target.samples_to_target(workload.published_samples, plan.global_batch, question.samples_to_target)
    if samples is None:
        return None
    return target.training(
        samples,
        step,
        forward,
        plan.global_batch,
        evaluations=workload.evaluations,
        startup=workload.startup_s if (startup := question.startup_seconds) is None else Spread(*3 * [startup]),
        stalls=workload.stalls,
        hourly=None if setting.price is None else plan.ranks * setting.price,
    )
