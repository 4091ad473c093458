"""Where the rows of embedding tables lie: on the device, in host memory or in files. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...config import require, within
from ...units import byte_count, size

Placement = Literal["device", "host", "file"]
ROOM = 0.9
"""Share of the free memory that tables may take."""
SMALLEST = 1 << 16
"""Bytes of the smallest cache."""


@dataclass(frozen=True, kw_only=True)
class TablesConfig:
    """Where the rows of the tables lie. Rows in host memory or files are fetched while earlier steps run; the numbers
    of a training are the same to the bit."""

    placement: Literal["auto", "device", "host", "file"] = "auto"
    """device: all rows in the memory of the device that computes. host: all rows in host memory, those in use in the
    memory of the GPU. file: all rows in files, those in use in memory. auto: the first of these that fits."""
    device_bytes: str = ""
    """Memory of the GPU for rows in use, as in 40GiB; by default what is free."""
    resident: str = ""
    """On a CPU with files: memory for rows in use, as in 2GiB; by default half of what is free."""
    depth: int = 2
    """How many batches ahead rows are fetched."""
    eviction: Literal["recent", "frequent"] = "recent"
    """Rows that make room for others: those whose last use is longest ago, or those with the fewest uses."""
    folder: Path | None = None
    """Folder of the table files; by default one in the folder of the run."""

    def __post_init__(self) -> None:
        require(
            self.placement in ("auto", "device", "host", "file"),
            "tables.placement",
            self.placement,
            "auto, device, host, file",
        )
        require(self.eviction in ("recent", "frequent"), "tables.eviction", self.eviction, "recent, frequent")
        within(1, self.depth, 4, "tables.depth")
        for name in ("device_bytes", "resident"):
            text = getattr(self, name)
            if text:
                count = byte_count(text)
                require(
                    count is not None and count >= SMALLEST,
                    f"tables.{name}",
                    text,
                    "a size of at least 64KiB, as in 512MiB or 40GiB",
                )

    def requested(self, *, several: bool) -> bool:
        """Whether the tables must fit into memory: with several ranks, or where the user wants them there."""
        return several or self.placement in ("device", "host")


@dataclass(frozen=True)
class Tiers:
    """What was decided for the tables of a model."""

    placement: Placement
    cache_bytes: int
    """Memory of the device for rows in use; with placement device the whole tables."""
    why: str


def decide(tables: TablesConfig, needed: int, *, device: str, device_free: int, host_free: int) -> Tiers:
    """Place tables that take so many bytes, optimizer state included, on a device of which so many bytes are free."""
    cuda = device == "cuda"
    room = byte_count(tables.device_bytes if cuda else tables.resident)
    cache = min(needed, room or int(ROOM * device_free if cuda else host_free / 2))
    if tables.placement == "host" and not cuda:
        return Tiers("device", needed, "device: without a GPU the device's memory is the host's")
    if tables.placement != "auto":
        placed: Placement = tables.placement
        return Tiers(placed, needed if placed == "device" else cache, f"{placed}: requested")
    limit = room or int(ROOM * device_free)
    if needed <= limit:
        return Tiers("device", needed, f"device: tables of {size(needed)} fit into {size(limit)}")
    large = f"tables of {size(needed)} do not fit into {size(limit)}"
    if cuda and needed <= ROOM * host_free:
        return Tiers("host", cache, f"host: {large} of the GPU, but into {size(host_free)} of host memory")
    more = f", nor into {size(host_free)} of host memory" if cuda else ""
    return Tiers("file", cache, f"file: {large}{more}")
