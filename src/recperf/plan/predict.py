"""Seconds of a step on many ranks, part by part, and what of them is hidden behind others.

`parts` are each part by itself; `exposed` is what is left of it after overlap, and sums to the step. The batch is the
mean one; where ranks have unequal shares of it, all wait for the slowest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..config import require, within
from ..measure.cost import FLOAT, INDEX, Cost
from . import network as wires
from .devices import NETWORKS, Device, Network
from .memory import HALF, Codec, Memory, Wire, memory_of, moved_R
from .sharding import COLUMN_WIDTH, Placed, Wish, place
from .skew import Skew, even
from .work import Work, work_of

UPDATE = "dense_update"
ID_MESSAGES = 3
"""Of TorchRec, to tell which rows are wanted: how many there will be, how many of each table, and the ids."""
PARTS = {
    "input": "from the host's memory",
    "ids all-to-all": "which rows are wanted",
    "lookup": "rows read at their owners",
    "rows all-to-all": "rows on their way forward",
    "dense forward": "the model's layers",
    "dense backward": "and their gradients",
    "all-reduce": "gradients of dense parameters",
    "gradients all-to-all": "of rows, on their way back",
    "table update": "rows changed at their owners",
    "dense update": "of dense parameters",
}
"""Parts of a step, in their order."""


@dataclass(frozen=True, kw_only=True)
class Choices:
    """How a training is spread over ranks."""

    rank_batch: int | None = None
    """Samples of one rank; none: the config's batch size is global and is dealt out."""
    sharding: Wish = "auto"
    """Of all tables: row, column, table, or auto."""
    overrides: Mapping[str, Wish] = field(default_factory=dict)
    """Of single tables."""
    column_width: int = COLUMN_WIDTH
    """Columns a column-wise shard has at least."""
    wire: Wire = "fp16"
    """What rows and their gradients are sent in."""
    codec: Codec = "in-place"
    """How they become that."""
    dedup: bool = True
    """An id that a rank's batch has several times is asked for once."""
    pipelined: bool = True
    """The next batch is copied, and its ids sent, while this one is learned from."""
    overlapped: bool = False
    """Dense gradients are added up behind the backward pass, as DDP does; recperf's own ranks do it afterwards."""
    input_bytes: int | None = None
    """Of a rank's batch; none: as the model reads it."""

    def __post_init__(self) -> None:
        if self.rank_batch is not None:
            within(1, self.rank_batch, 1 << 24, "rank batch")
        require(self.wire in ("fp32", "fp16"), "a2a", self.wire, "fp32, fp16")
        require(self.codec in ("in-place", "clamp-copy"), "codec", self.codec, "in-place, clamp-copy")


@dataclass(frozen=True, kw_only=True, eq=False)
class Prediction:
    ranks: int
    rank_batch: int
    parts: dict[str, float]
    """Seconds of each part by itself."""
    exposed: dict[str, float]
    """Seconds of each part that nothing hides; their sum is the step."""
    memory: Memory
    placed: tuple[Placed, ...]
    skew: Skew
    work: Work
    origins: dict[str, str]

    @property
    def global_batch(self) -> int:
        return self.ranks * self.rank_batch

    @property
    def seconds(self) -> float:
        return sum(self.exposed.values())

    @property
    def samples_per_s(self) -> float:
        return self.global_batch / self.seconds


def rank_batch_of(config: Any, ranks: int, choices: Choices) -> int:
    """Samples of one rank."""
    if choices.rank_batch is not None:
        return choices.rank_batch
    whole: int = config.train.batch_size
    require(whole >= ranks, "global batch", whole, f"at least one sample for each of {ranks:,} ranks")
    return -(-whole // ranks)


def predict(
    config: Any,
    ranks: int,
    device: Device,
    network: Network = NETWORKS["ib400"],
    choices: Choices | None = None,
    *,
    skew: Skew | None = None,
    history: float | None = None,
) -> Prediction:
    """Of a workload's config on so many ranks. Without a skew ids are spread evenly."""
    within(1, ranks, 1 << 20, "ranks")
    choices = choices or Choices()
    batch = rank_batch_of(config, ranks, choices)
    work = work_of(config, history=history, items=None if skew is None else skew.items_a_sample(batch))
    skew = skew or even(work, batch, ranks)
    placed = place_all(work, ranks, skew, batch, choices)
    here = wires.here(ranks, network)
    mine = device.share(here)
    waits = network.crowded(device.crowd(here)) if device.cores else network
    parts = _seconds(work, placed, skew, batch, mine, waits, choices)
    return Prediction(
        ranks=ranks,
        rank_batch=batch,
        parts=parts,
        exposed=exposed(parts, choices),
        memory=memory_now(work, placed, skew, batch, mine, choices),
        placed=tuple(placed),
        skew=skew,
        work=work,
        origins=_origins(work, device, network, skew, choices, here),
    )


def place_all(work: Work, ranks: int, skew: Skew, batch: int, choices: Choices) -> list[Placed]:
    return place(
        work.tables,
        ranks,
        skew,
        batch,
        wish=choices.sharding,
        overrides=choices.overrides,
        width=choices.column_width,
        dedup=choices.dedup,
    )


def memory_now(work: Work, placed: list[Placed], skew: Skew, batch: int, device: Device, choices: Choices) -> Memory:
    return memory_of(
        work, placed, skew, batch, device, wire=choices.wire, codec=choices.codec, dedup=choices.dedup,
        ahead=int(choices.pipelined),
    )  # fmt: skip


def exposed(parts: Mapping[str, float], choices: Choices) -> dict[str, float]:
    """What nothing hides: an overlapped all-reduce runs behind the backward pass, and with a pipeline the next batch's
    input and ids behind everything else. Rows and their gradients are waited for."""
    left = dict(parts)
    if choices.overlapped:
        left["all-reduce"] = max(0.0, parts["all-reduce"] - parts["dense backward"])
    if choices.pipelined:
        ahead = parts["input"] + parts["ids all-to-all"]
        others = sum(left.values()) - ahead
        left["ids all-to-all"] = 0.0
        left["input"] = max(0.0, ahead - others)
    return left


def calibrated(
    config: Any,
    device: Device,
    seconds: float,
    choices: Choices | None = None,
    *,
    skew: Skew | None = None,
    history: float | None = None,
) -> Device:
    """The device with efficiencies that make one rank's step take the measured time."""
    within(1e-9, seconds, 1e6, "seconds")
    found = predict(config, 1, device, choices=choices, skew=skew, history=history)
    of_device = sum(found.exposed[name] for name in PARTS if "all" not in name and name != "input")
    factor = of_device / max(1e-9, seconds - (found.seconds - of_device))
    told = f"measured: one rank's step takes {seconds * 1e3:,.3g} ms, {factor:.3g} of what was assumed before"
    return replace(device, efficiency=device.efficiency.scaled(factor, told))


def dense_seconds(work: Work, device: Device, batch: int) -> dict[str, float]:
    """Of each dense part: its FLOPs or its bytes, whichever take longer."""
    return {name: part_seconds(name, cost, work, device) for name, cost in work.parts(batch).items()}


def part_seconds(name: str, cost: Cost, work: Work, device: Device) -> float:
    share = device.efficiency.attention if name.startswith("attention") else device.efficiency.products
    flops = cost.flops / (share * device.flops.of(work.precision))
    return max(flops, cost.bytes / (device.efficiency.bytes * device.bytes_per_s))


def _seconds(
    work: Work,
    placed: list[Placed],
    skew: Skew,
    batch: int,
    device: Device,
    network: Network,
    choices: Choices,
) -> dict[str, float]:
    dense = dense_seconds(work, device, batch)
    back = sum(seconds for name, seconds in dense.items() if name.endswith("_backward") or name == "recompute")
    update = dense.get(UPDATE, 0.0)
    number = HALF if choices.wire == "fp16" else FLOAT
    rate = device.efficiency.bytes * device.bytes_per_s
    nothing_R = np.zeros(len(placed[0].width_R))
    before_ids = (ID_MESSAGES - 1) * wires.all_to_all(nothing_R, nothing_R, device, network)
    each: list[dict[str, float]] = []
    for index in range(skew.batches):
        sent_R, received_R, ids_R = moved_R(placed, skew, index, batch, choices.dedup)
        asked_R = np.full_like(ids_R, ids_R.mean())
        looked_R, changed_R = _table_bytes_R(placed, skew, index, choices.dedup)
        each.append(
            {
                "ids all-to-all": before_ids + wires.all_to_all(INDEX * asked_R, INDEX * ids_R, device, network),
                "lookup": float((looked_R + FLOAT * sent_R).max()) / rate,
                "rows all-to-all": wires.all_to_all(number * sent_R, number * received_R, device, network),
                "gradients all-to-all": wires.all_to_all(number * received_R, number * sent_R, device, network),
                "table update": float((changed_R + FLOAT * sent_R).max()) / rate,
            }
        )
    inputs = work.input_bytes(batch) if choices.input_bytes is None else choices.input_bytes
    ranks = len(placed[0].width_R)
    found = {name: float(np.mean([one[name] for one in each])) for name in each[0]}
    calls = device.calls
    found["lookup"] += calls.lookup
    found |= {
        "input": inputs / device.host_bytes_per_s + calls.input,
        "dense forward": sum(dense.values()) - back - update + calls.forward,
        "dense backward": back + calls.backward,
        "dense update": update + calls.update,
        "all-reduce": wires.all_reduce(FLOAT * work.dense_parameters, ranks, device, network),
    }
    return {name: found[name] for name in PARTS}


def _table_bytes_R(
    placed: list[Placed], skew: Skew, index: int, dedup: bool
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Bytes of rows each rank reads for lookups, and reads and writes in their update, state included."""
    ranks = len(placed[0].width_R)
    looked_R, changed_R = np.zeros(ranks), np.zeros(ranks)
    for one in placed:
        traffic = skew.traffic[one.table.name]
        traffic = traffic.batch(min(index, traffic.batches - 1))
        asked_R, touched_R = one.rows_asked_R(traffic, dedup=dedup), one.rows_touched_R(traffic)
        looked_R += asked_R * (FLOAT * one.width_R + INDEX)
        kept_R = np.minimum(one.width_R, one.table.state)
        changed_R += touched_R * 2 * FLOAT * (one.width_R + kept_R) + INDEX * asked_R
    return looked_R, changed_R


def _origins(work: Work, device: Device, network: Network, skew: Skew, choices: Choices, here: int) -> dict[str, str]:
    """Where every figure comes from."""
    share = device.efficiency
    shares = f"products {share.products:.3g}, attention {share.attention:.3g}, bytes {share.bytes:.3g}"
    far = device.name in ("b200", "mi350x") and "H200" in share.origin
    carried = "; carried over, and published runs on these devices stayed below that (docs/planning.md)" if far else ""
    hidden = "input and ids behind the step before, " if choices.pipelined else "no pipeline of input and ids; "
    summed = "the all-reduce behind the backward pass" if choices.overlapped else "nothing behind the backward pass"
    shared = _shared_words(device, here)
    return {
        "work": "counted from the config (recperf show)",
        **work.origins,
        "device": f"{device.name}: {device.origin}{shared}",
        "efficiency": f"{shares} of the peaks, links {share.link:.3g}: {share.origin}{carried}",
        "network": f"{network.name}: {network.origin}; {network.ranks_per_node:,} ranks a node",
        "ids": skew.origin,
        "overlap": f"assumed: {hidden}{summed}, rows and gradients waited for",
    }


def _shared_words(device: Device, here: int) -> str:
    """What each of a node's ranks has, where they share it."""
    if not device.shared or here == 1:
        return ""
    if device.cores is None:
        return f"; {here:,} ranks share it"
    if here <= device.cores:
        return f"; {here:,} ranks, each on one of {device.cores:,} cores"
    return f"; {here:,} ranks share {device.cores:,} cores: each works {device.cores / here:.0%} of the time"
