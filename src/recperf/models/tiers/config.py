"""Where the rows of embedding tables lie: on the device, in host memory or in files. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from shutil import disk_usage
from typing import Literal

from ...config import require, within
from ...errors import MachineError
from ...locations import home
from ...units import byte_count, size

Placement = Literal["device", "host", "file"]
ROOM = 0.9
"""Share of the free memory that tables may take."""
SMALLEST = 1 << 16
"""Bytes of the smallest cache."""
INDEX_BYTES = 9
"""Host memory that each row outside the device takes, once it is used: its slot in the cache (4), whether it was
trained (1), and the number of its record (4)."""


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
    """Folder of the table files, as on another disk; by default `tables` in RECPERF_HOME, recperf's cache folder."""

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

    def free_disk(self) -> int:
        """Free bytes of the disk that table files go to."""
        folder = (self.folder or home() / "tables").absolute()
        return disk_usage(next(one for one in (folder, *folder.parents) if one.exists())).free


@dataclass(frozen=True)
class Tiers:
    """What was decided for the tables of a model."""

    placement: Placement
    cache_bytes: int
    """Memory of the device for rows in use; with placement device the whole tables."""
    why: str
    index_bytes: int = 0
    """Host memory that tells where each row lies."""
    options: TablesConfig = TablesConfig()
    """What was requested."""


def decide(
    tables: TablesConfig,
    needed: int,
    *,
    device: str,
    device_free: int | None,
    host_free: int,
    rows: int = 0,
    others: int = 0,
) -> Tiers:
    """Place tables of these numbers of rows and bytes, optimizer state included, on a device of which this many bytes
    are free, for them and the `others` that a step takes. None: nobody knows yet what is free."""
    cuda, index = device == "cuda", INDEX_BYTES * rows
    room = byte_count(tables.device_bytes if cuda else tables.resident)
    usable = needed if device_free is None else int(ROOM * max(0, device_free - others))
    cache = min(needed, room or (usable if cuda else max(0, host_free - index) // 2))
    unused = ""
    if cuda and tables.resident:
        unused = "; tables.resident does nothing: it is for a CPU"
    elif tables.device_bytes and not cuda:
        unused = "; tables.device_bytes does nothing: it is for a GPU"
    if tables.placement == "host" and not cuda:
        return Tiers("device", needed, f"device: without a GPU the device's memory is the host's{unused}")
    if cuda and device_free is not None and tables.placement != "device" and cache > device_free:
        # The rest of a step is not counted here: that is an upper bound, and the user may know better.
        raise MachineError(
            f"tables.device_bytes is {size(cache)}, {size(device_free)} of the GPU are free",
            fix="a smaller --tables.device-bytes, or none to use what is free",
        )
    if tables.placement != "auto":
        placed: Placement = tables.placement
        if placed == "device":
            return Tiers(placed, needed, f"{placed}: requested{unused}")
        return Tiers(placed, cache, f"{placed}: requested{unused}", index)
    limit = min(room or usable, usable) if cuda else room or usable
    if needed <= limit:
        return Tiers("device", needed, f"device: tables of {size(needed)} fit into {size(limit)}{unused}")
    beside = f" beside {size(others)} for the rest of a step" if others and limit == usable else ""
    large = f"tables of {size(needed)} do not fit into {size(limit)}{' of the GPU' * cuda}{beside}"
    if cuda and needed + index <= ROOM * host_free:
        free = f"{size(host_free)} of host memory"
        return Tiers("host", cache, f"host: {large}, but with an index of {size(index)} into {free}{unused}", index)
    more = f", nor into {size(host_free)} of host memory" if cuda else ""
    return Tiers("file", cache, f"file: {large}{more}{unused}", index)


def scored_only(tiers: Tiers) -> Tiers:
    """The same for a model that is not trained: rows are read where they lie, and a cache would stay empty."""
    return tiers if tiers.placement == "device" else replace(tiers, cache_bytes=SMALLEST)
