"""Bytes each rank holds at the fullest moment of a step.

Shapes: R ranks.

A step has three full moments: rows looked up and on their way (`lookup`), the layers on their way back (`layers`), and
the rows' gradients on their way to the owners (`gradients`). What is there all the time is in each of them.

A moment can have what the one before it gave back, but not in any pieces it likes. So there are two totals: that of the
fullest moment, which no run can do with less than, and that of everything side by side, nothing used twice. A plan
fits when even the second does, and is tight when only the first does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..measure.cost import FLOAT, INDEX
from .devices import Device
from .sharding import Placed
from .skew import Skew, Traffic
from .work import Work

Wire = Literal["fp32", "fp16"]
Codec = Literal["in-place", "clamp-copy"]
"""How float32 becomes fp16 for the wire: written once and clamped there, or clamped into a float32 copy first."""

HALF = 2
RESERVE = 0.05
"""Share of a device's memory left to the context, the collective library and fragments: an assumption."""
PARTS = ("tables", "optimizer", "dense", "input", "activations", "all-to-all", "temporary")

Bytes = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Memory:
    """Of the worst batch."""

    parts_R: dict[str, Bytes]
    """Bytes by what they are, at the moment that is fullest on the fullest rank."""
    moment: str
    batch: int
    """Which of the batches it is."""
    limit: float
    """What a rank may hold: its device's memory, less a reserve."""
    device_bytes: int
    apart: float
    """Most bytes of a rank if no moment could use what another gave back."""
    blamed: str
    """The table with most bytes, weights and vectors on their way, on the fullest rank."""

    @property
    def total_R(self) -> Bytes:
        return _total_R(self.parts_R)

    @property
    def fullest(self) -> int:
        return int(np.argmax(self.total_R))

    @property
    def most(self) -> float:
        return float(self.total_R.max())

    @property
    def fits(self) -> bool:
        return self.apart <= self.limit

    @property
    def verdict(self) -> str:
        if self.fits:
            return "fits"
        return "tight" if self.most <= self.limit else "does not fit"


def memory_of(
    work: Work,
    placed: Sequence[Placed],
    skew: Skew,
    batch: int,
    device: Device,
    *,
    wire: Wire = "fp16",
    codec: Codec = "in-place",
    dedup: bool = True,
    ahead: int = 1,
) -> Memory:
    """Of the batch, among those of the skew, whose fullest rank is fullest."""
    ranks = len(placed[0].width_R)
    dense = FLOAT * work.dense_parameters
    still_R = {
        "tables": np.asarray(sum(one.weight_R for one in placed), np.float64),
        "optimizer": np.asarray(sum(one.state_R() for one in placed), np.float64) + work.dense_states * dense,
        # Gradients are summed in buckets of their own.
        "dense": np.full(ranks, 3.0 * dense),
        "input": np.full(ranks, (1.0 + ahead) * work.input_bytes(batch)),
    }
    activations = float(work.activations(batch))
    found: list[tuple[float, int, str, dict[str, Bytes]]] = []
    apart = 0.0
    for number in range(skew.batches):
        moments = _moments(placed, skew, number, batch, activations, wire, codec, dedup)
        apart = max(apart, float((_total_R(still_R) + _apart_R(moments)).max()))
        for moment, moving_R in moments.items():
            parts_R = still_R | moving_R
            found.append((float(_total_R(parts_R).max()), number, moment, parts_R))
    _, number, moment, parts_R = max(found, key=lambda entry: entry[0])
    fullest = int(np.argmax(_total_R(parts_R)))
    return Memory(
        parts_R={name: parts_R[name] for name in PARTS},
        moment=moment,
        batch=number,
        limit=(1 - RESERVE) * device.memory_bytes,
        device_bytes=device.memory_bytes,
        apart=apart,
        blamed=_blamed(placed, skew, number, batch, dedup, fullest),
    )


def _total_R(parts_R: Mapping[str, Bytes]) -> Bytes:
    return np.asarray(sum(parts_R.values()))


def _apart_R(moments: Mapping[str, Mapping[str, Bytes]]) -> Bytes:
    """Of each part the most it has in any moment, side by side."""
    names = next(iter(moments.values()))
    return np.asarray(sum(np.maximum.reduce([moment[name] for moment in moments.values()]) for name in names))


def temporary_bytes(numbers: float, *, wire: Wire, codec: Codec) -> float:
    """Of a copy that only the codec needs, for so many numbers to be sent."""
    return FLOAT * numbers if wire == "fp16" and codec == "clamp-copy" else 0.0


def moved_R(placed: Sequence[Placed], skew: Skew, number: int, batch: int, dedup: bool) -> tuple[Bytes, Bytes, Bytes]:
    """Numbers each rank sends forward, numbers it receives, and ids that reach it."""
    ranks = len(placed[0].width_R)
    sent_R, ids_R, total = np.zeros(ranks), np.zeros(ranks), 0.0
    for one in placed:
        traffic = _at(skew, one, number)
        sent = one.sent_R(traffic, batch, dedup=dedup)
        ids_R += one.rows_asked_R(traffic, dedup=dedup)
        sent_R += sent
        total += float(sent.sum())
    # Samples are dealt out evenly, so that every rank asks for as much as every other.
    return sent_R, np.full(ranks, total / ranks), ids_R


def _at(skew: Skew, one: Placed, number: int) -> Traffic:
    traffic = skew.traffic[one.table.name]
    return traffic.batch(min(number, traffic.batches - 1))


def _moments(
    placed: Sequence[Placed],
    skew: Skew,
    number: int,
    batch: int,
    activations: float,
    wire: Wire,
    codec: Codec,
    dedup: bool,
) -> dict[str, dict[str, Bytes]]:
    sent_R, received_R, ids_R = moved_R(placed, skew, number, batch, dedup)
    nothing_R = np.zeros_like(sent_R)
    coded = HALF if wire == "fp16" else 0
    copied = temporary_bytes(1.0, wire=wire, codec=codec)
    # Looked up and unpacked in float32 on either side, and coded on either side in between.
    both_R = FLOAT * (sent_R + received_R) + coded * (sent_R + received_R) + INDEX * ids_R
    return {
        "lookup": {"activations": nothing_R, "all-to-all": both_R, "temporary": copied * sent_R},
        "layers": {
            "activations": nothing_R + activations,
            "all-to-all": FLOAT * received_R + INDEX * ids_R,
            "temporary": nothing_R,
        },
        "gradients": {
            "activations": nothing_R,
            # The rows themselves are still held beside their gradients.
            "all-to-all": both_R + FLOAT * received_R,
            "temporary": copied * received_R,
        },
    }


def _blamed(placed: Sequence[Placed], skew: Skew, number: int, batch: int, dedup: bool, rank: int) -> str:
    def held(one: Placed) -> float:
        return float(one.weight_R[rank] + FLOAT * one.sent_R(_at(skew, one, number), batch, dedup=dedup)[rank])

    return max(placed, key=held).table.name
