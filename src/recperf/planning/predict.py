"""Seconds of a step on many ranks, part by part, and how much of each part overlaps with others.

`parts` are the seconds of each part alone; `exposed` is what remains after overlap and sums to the step. Where ranks
have unequal shares of a batch, all wait for the slowest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec import Struct

from ..config import require, within
from ..measure.cost import FLOAT, INDEX, Cost
from ..measure.limit_kinds import LIMITS
from ..measure.spans import phase_of
from .devices import NEAREST, NETWORKS, TERA, Device, Network, all_reduce, all_to_all, node_count
from .memory import Memory, memory_of, moved_R
from .sharding import Parallelism, PlacedTable, copied_numbers, largest_share, later, place
from .skew import Skew, even
from .work import PlannedWorkload, Work

ID_MESSAGES = 3
"""Messages with which TorchRec requests rows: how many ids in all, how many of each table, and the ids."""
EXCHANGE_CALLS = 106
"""Operators that TorchRec's exchange adds to a step: a rank of two makes 920 Python calls more than one process, which
makes 8.7 for each operator."""
PARTS = {
    "input": "the host prepares the batch",
    "transfer": "the batch is copied to the device",
    "ids all-to-all": "requests for rows",
    "lookup": "owners read the rows",
    "rows all-to-all": "rows to the ranks that requested them",
    "dense forward": "forward pass of the dense layers",
    "dense backward": "backward pass of the dense layers",
    "late ranks": "ranks wait for the slowest of them",
    "all-reduce": "sum of dense gradients",
    "gradients all-to-all": "gradients of rows to their owners",
    "table update": "owners update the rows",
    "dense update": "update of dense parameters",
    "calls": "the device waits for operator calls",
    "launches": "kernels of a CUDA graph wait for each other",
}
"""Parts of a step in order."""
BANDS = {
    "calibrated": (0.93, 1.08),
    "other device": (0.77, 1.25),
    "host": (0.55, 1.30),
}
"""Error bands of a step, as factors of it, by what is known: recperf's kernels timed on this device; rates carried
over from another device; batches that the host prepares and operators that it calls.
benchmarks/plan_validate.py checks that each known step lies inside."""
BAND_OF_RANKS, BAND_OF_NODES = 1.05, 1.05
"""Further factors to both sides: where several devices exchange data, and for each doubling of the nodes. Predictions
of published steps are 1, 5 and 10 % too low on one, two and four nodes."""


class Band(Struct):
    """A figure and the range that should contain the truth."""

    value: float
    low: float
    high: float

    def times(self, factor: float) -> Band:
        return Band(factor * self.value, factor * self.low, factor * self.high)

    @property
    def factors(self) -> tuple[float, float]:
        """Both ends of the range over the figure."""
        return self.low / self.value, self.high / self.value


class PredictedStep(Band, kw_only=True):
    """Seconds of a step, with their range by the errors of past predictions."""

    samples_per_s: float
    parts: dict[str, float]
    """Seconds of each part alone."""
    exposed: dict[str, float]
    """Seconds of each part that overlap with no other; their sum is the step."""
    limit: str
    shares: dict[str, float]
    """Share of the step by limit, with the names that profiles use; they sum to 1."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Prediction:
    ranks: int
    rank_batch: int
    """Samples of the largest rank."""
    global_batch: int
    step: PredictedStep
    memory: Memory
    placed: tuple[PlacedTable, ...]
    skew: Skew
    work: Work
    parallelism: Parallelism
    origins: dict[str, str]
    options: str = ""
    """Options of `recperf run` that make it fit; empty where it fits without, or not at all."""


def rank_batch_of(workload: PlannedWorkload, ranks: int, parallelism: Parallelism) -> int:
    if parallelism.rank_batch is not None:
        return parallelism.rank_batch
    samples = workload.batch_size
    require(samples >= ranks, "global batch", samples, f"at least one sample for each of {ranks:,} ranks")
    return -(-samples // ranks)


def predict(
    workload: PlannedWorkload,
    ranks: int,
    device: Device,
    network: Network = NETWORKS["ib400"],
    parallelism: Parallelism | None = None,
    *,
    skew: Skew | None = None,
    history: float | None = None,
) -> Prediction:
    """A workload on that many ranks. Without a skew ids are spread evenly."""
    within(1, ranks, 1 << 20, "ranks")
    parallelism = parallelism or Parallelism()
    batch = rank_batch_of(workload, ranks, parallelism)
    work = workload.work(history=history, distinct=None if skew is None else skew.distinct_per_sample(batch))
    skew = skew or even(work, batch, ranks)
    placed = place(work.tables, ranks, batch, parallelism)
    uneven = largest_share(work, batch, ranks, balanced=parallelism.balance).work
    parts = _seconds(work, placed, skew, batch, device, network, parallelism, uneven)
    left = exposed(parts, parallelism, ahead=work.prepared_ahead)
    seconds, samples = sum(left.values()), workload.batch_size if parallelism.rank_batch is None else ranks * batch
    by_host = left["input"] + left["launches"] + (parts["calls"] if left["calls"] else 0.0)
    nodes = node_count(ranks, network)
    low, high = error_band(device, ranks, by_host / seconds, nodes=nodes)
    shares = limit_shares(work, device, batch, left)
    return Prediction(
        ranks=ranks,
        rank_batch=batch,
        global_batch=samples,
        step=PredictedStep(
            seconds,
            low * seconds,
            high * seconds,
            samples_per_s=samples / seconds,
            parts=parts,
            exposed=left,
            limit=max(shares, key=lambda limit: shares[limit]),
            shares=shares,
        ),
        memory=memory_of(work, placed, skew, batch, device, parallelism),
        placed=tuple(placed),
        skew=skew,
        work=work,
        parallelism=parallelism,
        origins=_origins(work, device, network, skew, batch, ranks),
    )


def error_band(device: Device, ranks: int, by_host: float = 0.0, *, nodes: int = 1) -> tuple[float, float]:
    """Factors of a step between which it lies; the host decides the share `by_host` of it."""
    low, high = BANDS["calibrated" if device.calibrated else "other device"]
    more = (BAND_OF_RANKS if ranks > 1 else 1.0) * BAND_OF_NODES ** math.log2(nodes)
    host_low, host_high = BANDS["host"]
    return (1 - by_host) * low / more + by_host * host_low, (1 - by_host) * high * more + by_host * host_high


def exposed(parts: Mapping[str, float], parallelism: Parallelism, *, ahead: bool = True) -> dict[str, float]:
    """Seconds that overlap with nothing. An overlapped all-reduce runs during the backward pass; with a pipeline, input
    and ids of the next batch move during everything else, where the input is prepared `ahead`. Ranks always wait for
    rows and their gradients. A GPU computes while the host calls the next operators."""
    left = dict(parts)
    if parallelism.overlap != "off":
        # The backward pass lasts as long as its calls, which are about half of all, where those take longer.
        left["all-reduce"] = max(0.0, parts["all-reduce"] - max(parts["dense backward"], parts["calls"] / 2))
    left["calls"] = max(0.0, parts["calls"] - _computed(parts))
    if parallelism.pipeline and ahead:
        early = parts["input"] + parts["transfer"] + parts["ids all-to-all"]
        waited = max(0.0, early - (sum(left.values()) - early))
        # What moves last is hidden first: the host prepares a batch before anything else happens to it.
        left["input"] = min(parts["input"], waited)
        left["transfer"] = min(parts["transfer"], waited - left["input"])
        left["ids all-to-all"] = max(0.0, waited - left["input"] - left["transfer"])
    return left


def limit_shares(work: Work, device: Device, batch: int, left: Mapping[str, float]) -> dict[str, float]:
    """Share of the step by limit: FLOPs are computing, passes over memory are bandwidth."""
    seconds = dict.fromkeys(LIMITS, 0.0)
    for name, time in left.items():
        if name in ("input", "transfer"):
            seconds[name] += time
        elif name in ("calls", "launches"):
            seconds["dispatch"] += time
        elif name in ("lookup", "table update"):
            seconds["bandwidth"] += time
        elif not name.startswith("dense"):
            seconds["communication"] += time
    for name, cost in work.parts(batch).items():
        flops, moved = _seconds_of(name, cost, work, device)
        seconds["compute"] += flops
        seconds["bandwidth"] += moved
    whole = sum(seconds.values()) or 1.0
    return {limit: time / whole for limit, time in seconds.items()}


def part_seconds(name: str, cost: Cost, work: Work, device: Device) -> float:
    """Seconds of a dense part: its FLOPs, and the passes over memory besides them."""
    return sum(_seconds_of(name, cost, work, device))


def _seconds_of(name: str, cost: Cost, work: Work, device: Device) -> tuple[float, float]:
    """Seconds of the FLOPs and of the bytes of a part. A product hides the bytes that it reads and writes itself; those
    of a part are of kernels besides it."""
    if name.startswith("attention"):
        backward = phase_of(name) == "backward"
        rate = device.attention_rate(work.precision, work.attention_length, backward=backward)
    else:
        rate = device.product_rate(work.precision)
    return cost.flops / rate, cost.bytes / device.pass_rate()


def _seconds(
    work: Work,
    placed: list[PlacedTable],
    skew: Skew,
    batch: int,
    device: Device,
    network: Network,
    parallelism: Parallelism,
    uneven: float,
) -> dict[str, float]:
    dense = {name: part_seconds(name, cost, work, device) for name, cost in work.parts(batch).items()}
    backward = sum(part for name, part in dense.items() if phase_of(name) == "backward")
    update = sum(part for name, part in dense.items() if phase_of(name) == "update")
    number = parallelism.number_bytes
    rate = device.pass_rate()
    ranks = len(placed[0].width_R)
    zero_R, kernels = np.zeros(ranks), _graph_kernels(work, device, batch, ranks)
    sent_R, received_R, ids_R = moved_R(placed, skew, batch, parallelism.dedup)
    requested_R = np.full_like(ids_R, ids_R.mean())
    read_R, updated_R = _table_bytes_R(placed, skew, parallelism.dedup)
    before_ids = (ID_MESSAGES - 1) * all_to_all(zero_R, zero_R, device, network)
    exchanges = {
        "ids all-to-all": before_ids + all_to_all(INDEX * requested_R, INDEX * ids_R, device, network),
        "rows all-to-all": all_to_all(number * sent_R, number * received_R, device, network),
        "gradients all-to-all": all_to_all(number * received_R, number * sent_R, device, network),
    }
    if all(one.kind == "data-parallel" for one in placed):
        # Every rank has all rows: ranks ask each other for nothing.
        exchanges = dict.fromkeys(exchanges, 0.0)
    seconds = exchanges | {
        "lookup": float((read_R + FLOAT * sent_R).max()) / rate,
        "table update": float((updated_R + FLOAT * sent_R).max()) / rate,
        "input": batch * work.prepare_s,
        "transfer": work.input_bytes(batch) / device.host_bytes_per_s,
        "dense forward": sum(dense.values()) - backward - update,
        "dense backward": backward,
        "dense update": update,
        "calls": 0.0 if kernels else _calls(work, ranks) * device.call_s,
        "launches": kernels * device.kernel_s,
        "all-reduce": all_reduce(FLOAT * (work.dense_parameters + copied_numbers(placed)), ranks, device, network),
    }
    # Ranks are late because they have more work than others, and because equal work does not take equally long.
    computed, calls = _computed(seconds), seconds["calls"]
    own, slowest = max(computed, calls), max(computed + (uneven - 1) * (sum(dense.values()) - update), calls)
    seconds["late ranks"] = slowest - own + device.late * later(ranks, 2) * own
    return {name: seconds[name] for name in PARTS}


def _computed(parts: Mapping[str, float]) -> float:
    return sum(seconds for name, seconds in parts.items() if name.startswith(("dense", "lookup", "table")))


def _table_bytes_R(
    placed: list[PlacedTable], skew: Skew, dedup: bool
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Bytes that each rank reads for lookups, and reads and writes in updates, optimizer state included."""
    ranks = len(placed[0].width_R)
    read_R, updated_R = np.zeros(ranks), np.zeros(ranks)
    for one in placed:
        traffic = skew.traffic[one.table.name]
        requested_R, touched_R = one.rows_requested_R(traffic, dedup=dedup), one.rows_touched_R(traffic)
        read_R += requested_R * (FLOAT * one.width_R + INDEX)
        updated_R += touched_R * 2 * FLOAT * (one.width_R + one.state_width_R) + INDEX * requested_R
    return read_R, updated_R


def _origins(work: Work, device: Device, network: Network, skew: Skew, batch: int, ranks: int) -> dict[str, str]:
    """Where every figure comes from."""
    share, length = device.efficiency, work.attention_length
    calls = f"{_calls(work, ranks):,} operators, {1e6 * device.call_s:.3g} µs each, called one by one"
    if kernels := _graph_kernels(work, device, batch, ranks):
        calls = f"{kernels:,} kernels of a CUDA graph, {1e6 * device.kernel_s:.3g} µs each besides their work"
    origins = {
        "work": "counted from the config (recperf show)",
        **work.origins,
        "device": f"{device.name}: {device.origin}",
        "efficiency": f"products {share.products:.3g} of the GEMM rate, passes {share.bytes:.3g} of the copy rate, "
        f"links {share.link:.3g}: {share.origin}",
        "calls": calls,
        "network": f"{network.name}: {network.origin}; {network.ranks_per_node:,} ranks per node",
        "ids": skew.origin,
    }
    if work.lengths:
        rates = (device.attention_rate(work.precision, length, backward=one) / TERA for one in (False, True))
        origin = device.attention.origin if device.attention else f"carried over from {NEAREST}, where it was measured"
        passes = " forward, ".join(f"{rate:,.3g}" for rate in rates)
        origins["attention"] = f"{passes} TFLOP/s backward at {length:,.0f} tokens: {origin}"
    return origins


def _calls(work: Work, ranks: int) -> int:
    """Operators that the host calls in a step."""
    return work.calls + (EXCHANGE_CALLS if ranks > 1 else 0)


def _graph_kernels(work: Work, device: Device, batch: int, ranks: int) -> int:
    """Kernels of a step that is replayed as a CUDA graph; 0: it is not."""
    return work.kernels(batch, device.threads) if ranks == 1 else 0
