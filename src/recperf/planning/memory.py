"""Bytes that each rank holds at the peak of a step.

Shapes: R ranks.

A step has three phases with high memory use: rows are looked up and sent (`lookup`), the backward pass runs through the
layers (`layers`), and gradients of rows are sent to their owners (`gradients`). Weights and optimizer state are present
in all of them.

A phase can reuse memory that an earlier one released, but fragmentation limits how well. So there are two totals: the
peak with perfect reuse, which no run can stay below, and the sum without any reuse. A plan fits when even the second
total does, and is tight when only the first does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ..distributed.config import Demand, DistributedConfig
from ..distributed.placement import ShardPlacement, placed_by
from ..measure.cost import FLOAT, INDEX
from .devices import Device
from .sharding import HALF, Parallelism, PlacedTable, copied_numbers, largest_share
from .skew import Skew
from .work import PlannedWorkload, Work

RESERVE = 0.05
"""Share of a device's memory for the context, the collective library and fragmentation: an assumption."""
PARTS = ("tables", "optimizer", "dense", "input", "activations", "all-to-all")

Bytes = NDArray[np.float64]


class Memory(Struct, kw_only=True):
    """Memory of the ranks."""

    verdict: str
    """fits; tight: only if memory is reused well; does not fit."""
    fullest_rank: int
    phase: str
    """The phase of a step in which that rank holds most."""
    largest_tables: list[str]
    """Tables by their bytes on that rank, weights and vectors in flight together, the largest first."""
    bytes: float
    """Its peak with perfect reuse."""
    without_reuse_bytes: float
    """Its bytes if no phase reused memory of another."""
    limit_bytes: float
    """Bytes that a rank may hold: the memory of its device less a reserve."""
    device_bytes: int
    parts: dict[str, list[float]]
    """Bytes of each rank in that phase, by purpose."""
    largest_global_batch: int | None = None
    """The largest that would fit, where the planned one does not."""

    @property
    def fits(self) -> bool:
        return self.verdict == "fits"

    @property
    def missing_bytes(self) -> float:
        return max(0.0, self.without_reuse_bytes - self.limit_bytes)


def memory_of(
    work: Work, placed: Sequence[PlacedTable], skew: Skew, batch: int, device: Device, parallelism: Parallelism
) -> Memory:
    """Memory in the phase in which the fullest rank holds most."""
    ranks = len(placed[0].width_R)
    other = beside_tables(work, batch, placed, pipelined=parallelism.pipeline, balanced=parallelism.balance)
    constant_R = {
        "tables": np.asarray(sum(one.weight_R for one in placed), np.float64),
        "optimizer": np.asarray(sum(one.state_R() for one in placed)) + other["optimizer"],
        "dense": np.full(ranks, other["dense"]),
        "input": np.full(ranks, other["input"]),
    }
    phases = _phases(placed, skew, batch, other["activations"], parallelism)
    without_reuse = float((_total_R(constant_R) + _without_reuse_R(phases)).max())
    phase = max(phases, key=lambda name: _total_R(constant_R | phases[name]).max())
    parts_R = constant_R | phases[phase]
    peak = float(_total_R(parts_R).max())
    fullest, limit = int(np.argmax(_total_R(parts_R))), (1 - RESERVE) * device.memory_bytes
    return Memory(
        verdict="fits" if without_reuse <= limit else "tight" if peak <= limit else "does not fit",
        fullest_rank=fullest,
        phase=phase,
        largest_tables=_largest_tables(placed, skew, batch, parallelism.dedup, fullest),
        bytes=peak,
        without_reuse_bytes=without_reuse,
        limit_bytes=limit,
        device_bytes=device.memory_bytes,
        parts={name: parts_R[name].tolist() for name in PARTS},
    )


def beside_tables(
    work: Work, batch: int, placed: Sequence[ShardPlacement], *, pipelined: bool, balanced: bool
) -> dict[str, float]:
    """Bytes on the rank with most tokens for everything but the tables and what is sent of them, by purpose; `batch` is
    the mean of the ranks."""
    dense = FLOAT * work.dense_parameters
    tokens = largest_share(work, batch, len(placed[0].width_R), balanced=balanced).tokens
    return {
        "optimizer": float(work.dense_states * dense),
        # Parameters, gradients, and the buckets in which gradients are summed; of copied tables the last two.
        "dense": 3.0 * dense + 2.0 * FLOAT * copied_numbers(placed),
        # A pipeline also holds the next batch.
        "input": tokens * (1.0 + pipelined) * work.input_bytes(batch),
        "activations": tokens * work.activations(batch),
    }


def rank_demand(workload: PlannedWorkload, ranks: int, options: DistributedConfig, *, on_cpu: bool = False) -> Demand:
    """What one of `ranks` ranks needs in a run with these options, beside the memory that copied tables have taken
    when it asks how much is free. In that of a host (`on_cpu`) they take none before they are written."""
    work, batch = workload.work(), -(-workload.batch_size // ranks)
    placed = placed_by(options, Demand(tables=work.tables, batch=batch), ranks)
    other = sum(beside_tables(work, batch, placed, pipelined=options.pipeline, balanced=options.balance).values())
    if on_cpu:
        other += sum(float(one.weight_R[0] + one.state_R()[0]) for one in placed if one.kind == "data-parallel")
    return Demand(tables=work.tables, batch=batch, other_bytes=round(other))


def _total_R(parts_R: Mapping[str, Bytes]) -> Bytes:
    return np.asarray(sum(parts_R.values()))


def _without_reuse_R(phases: Mapping[str, Mapping[str, Bytes]]) -> Bytes:
    """The sum over parts of the most that each has in any phase."""
    names = next(iter(phases.values()))
    return np.asarray(sum(np.maximum.reduce([phase[name] for phase in phases.values()]) for name in names))


def moved_R(placed: Sequence[PlacedTable], skew: Skew, batch: int, dedup: bool) -> tuple[Bytes, Bytes, Bytes]:
    """Numbers each rank sends in the forward pass, numbers it receives, and ids it receives."""
    ranks = len(placed[0].width_R)
    sent_R, ids_R, total = np.zeros(ranks), np.zeros(ranks), 0.0
    for one in placed:
        traffic = skew.traffic[one.table.name]
        sent = one.sent_R(traffic, batch, dedup=dedup)
        if one.kind != "data-parallel":
            ids_R += one.rows_requested_R(traffic, dedup=dedup)
        sent_R += sent
        total += float(sent.sum())
    # About equally much for each rank: rows that repeat are sent once, however many tokens it has.
    return sent_R, np.full(ranks, total / ranks), ids_R


def _phases(
    placed: Sequence[PlacedTable], skew: Skew, batch: int, activations: float, parallelism: Parallelism
) -> dict[str, dict[str, Bytes]]:
    sent_R, received_R, ids_R = moved_R(placed, skew, batch, parallelism.dedup)
    zero_R = np.zeros_like(sent_R)
    coded = 0 if parallelism.all_to_all == "fp32" else HALF
    # Float32 at both ends, and encoded at both ends in between.
    both_R = FLOAT * (sent_R + received_R) + coded * (sent_R + received_R) + INDEX * ids_R
    return {
        "lookup": {"activations": zero_R, "all-to-all": both_R},
        "layers": {"activations": zero_R + activations, "all-to-all": FLOAT * received_R + INDEX * ids_R},
        # The received rows are still held next to their gradients.
        "gradients": {"activations": zero_R, "all-to-all": both_R + FLOAT * received_R},
    }


def _largest_tables(placed: Sequence[PlacedTable], skew: Skew, batch: int, dedup: bool, rank: int) -> list[str]:
    """Tables by their bytes on a rank, weights and vectors in flight together, the largest first."""

    def held(one: PlacedTable) -> float:
        sent_R = one.sent_R(skew.traffic[one.table.name], batch, dedup=dedup)
        return float(one.weight_R[rank] + FLOAT * sent_R[rank])

    return [one.table.name for one in sorted(placed, key=held, reverse=True)]
