"""A plan for one number of ranks as plain values: what `recperf plan --json` prints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from . import advice, failures, target, tiers
from .devices import Device, Network
from .network import ranks_on_node
from .predict import Prediction, predict
from .sharding import Parallelism
from .skew import Skew
from .work import PlannedWorkload


@dataclass(frozen=True, kw_only=True)
class Question:
    """What a plan answers besides the step and its memory."""

    samples_to_target: float | None = None
    """Samples to the quality target. Default: the published number, where one applies."""
    mtbf_hours: float | None = None
    """Mean hours between failures; simulates the goodput."""
    mtbf_of: Literal["device", "cluster"] = "device"
    """Whether --mtbf-hours is for one device or for the whole cluster."""
    checkpoint_seconds: float = 60.0
    """Seconds for which a checkpoint blocks the training."""
    interval_seconds: float | None = None
    """Seconds of training between two checkpoints. Default: sqrt(2 C M)."""
    restart_seconds: float = 300.0
    """Seconds from a failure to the next step."""
    failure_seed: int = 0
    """Seed of the failure times."""
    served: float | None = None
    """Tables in tiers: share of the rows of a step that the cache serves, as recperf data reuse counts it. Default:
    estimated from --skew."""


def plan_point(
    workload: PlannedWorkload,
    ranks: int,
    device: Device,
    network: Network,
    parallelism: Parallelism,
    question: Question,
    *,
    price: float | None = None,
    skew: Skew | None = None,
    history: float | None = None,
    cache_bytes: int | None = None,
    tiered: bool = False,
) -> dict[str, Any]:
    """Everything about one number of ranks; `price` is that of one device for an hour. Tables that do not fit into one
    device, or should not, are also priced in tiers."""
    plan = predict(workload, ranks, device, network, parallelism, skew=skew, history=history)
    share = device.share(ranks_on_node(ranks, network))
    point = _step(plan, parallelism)
    if not plan.memory.fits:
        point["memory"]["remedies"] = [
            {"options": options, "bytes": memory.peak, "without_reuse_bytes": memory.without_reuse}
            for options, memory in advice.remedies(plan, parallelism, share)
        ]
    # Ranks hold their shards in the memory of their devices.
    if ranks == 1 and (tiered or not plan.memory.fits):
        point["tiers"] = tiers.price(plan, share, cache_bytes=cache_bytes, served=question.served)
    if skew is not None:
        arrivals = advice.arrivals(plan.work, plan.skew, plan.rank_batch, ranks, parallelism)
        limits = advice.limits(plan, parallelism, share)
        point["skew"] = {
            "arrivals": [{**vars(one), "ratio": one.ratio} for one in arrivals],
            "limits": [{**vars(one), "global_batch": one.rank_batch * ranks} for one in limits],
        }
    point["target"] = _target(workload, plan, question.samples_to_target, price)
    point["failures"] = _failures(ranks, point["target"], question)
    return point


def with_scaling(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each point with its samples per second and device, relative to the first point."""
    first = points[0]["samples_per_s"] / points[0]["ranks"]
    return [{**point, "scaling": point["samples_per_s"] / point["ranks"] / first} for point in points]


def _step(plan: Prediction, parallelism: Parallelism) -> dict[str, Any]:
    memory = plan.memory
    rank = memory.fullest
    return {
        "ranks": plan.ranks,
        "rank_batch": plan.rank_batch,
        "global_batch": plan.global_batch,
        "seconds": plan.seconds,
        "samples_per_s": plan.samples_per_s,
        "parts": plan.parts,
        "exposed": plan.exposed,
        "limit": max(plan.shares, key=lambda limit: plan.shares[limit]),
        "shares": plan.shares,
        "memory": {
            "verdict": memory.verdict,
            "fullest_rank": rank,
            "phase": memory.phase,
            "largest_table": memory.largest_table,
            "bytes": memory.peak,
            "without_reuse_bytes": memory.without_reuse,
            "limit_bytes": memory.limit,
            "device_bytes": memory.device_bytes,
            "parts": {name: float(bytes_R[rank]) for name, bytes_R in memory.parts_R.items()},
            "parts_least": {name: float(bytes_R.min()) for name, bytes_R in memory.parts_R.items()},
            "parts_mean": {name: float(bytes_R.mean()) for name, bytes_R in memory.parts_R.items()},
            "by_rank": [float(bytes_) for bytes_ in memory.total_R],
        },
        "tables": [
            {
                "name": one.table.name,
                "kind": one.kind,
                "ranks": int(np.count_nonzero(one.width_R)),
                "bytes": one.table.bytes,
                "most_bytes_a_rank": int(one.weight_R.max()),
                "why": one.why,
            }
            for one in plan.placed
        ],
        "choices": {
            "a2a": parallelism.wire,
            "codec": parallelism.codec,
            "dedup": parallelism.dedup,
            "pipelined": parallelism.pipelined,
            "overlapped": parallelism.overlapped,
        },
        "origins": plan.origins,
    }


def _target(
    workload: PlannedWorkload, plan: Prediction, requested: float | None, price: float | None
) -> dict[str, Any] | None:
    samples = target.samples_to_target(workload.published_samples, plan.global_batch, requested)
    if samples is None:
        return None
    hours = target.hours(samples.count, plan.samples_per_s)
    return {
        "samples": samples.count,
        "origin": samples.origin,
        "hours": hours,
        "cost": None if price is None else target.cost(hours, plan.ranks, price),
    }


def _failures(ranks: int, reached: dict[str, Any] | None, question: Question) -> dict[str, Any] | None:
    if question.mtbf_hours is None:
        return None
    cluster = failures.Cluster(
        mtbf_s=failures.mtbf_of(question.mtbf_hours, ranks, question.mtbf_of),
        checkpoint_s=question.checkpoint_seconds,
        restart_s=question.restart_seconds,
        work_s=3600 * reached["hours"] if reached else 0.0,
        interval_s=question.interval_seconds,
    )
    return {
        "mtbf_s": cluster.mtbf_s,
        "checkpoint_s": cluster.checkpoint_s,
        "restart_s": cluster.restart_s,
        "work_s": cluster.work,
        "young_s": failures.young(cluster),
        "chosen": vars(failures.simulate(cluster, seed=question.failure_seed)),
        "best": vars(failures.best(cluster, seed=question.failure_seed)),
        "seeds": failures.SEEDS,
    }
