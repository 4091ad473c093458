"""Records of the ceilings of a machine, as they are passed around and written to its file. Torch-free."""

from __future__ import annotations

from typing import Annotated, Any

from ...jsonfile import Count, Meta, Number, Struct
from ..records import Percentiles


class PeakFigure(Percentiles, kw_only=True, omit_defaults=True):
    """Readings of one kind of work, with the details needed to interpret them."""

    n: Count
    unit: str = ""
    """ns, B/s or FLOP/s, with what they are of."""
    what: str | None = None
    """What was called."""
    counted: str | None = None
    """Which bytes count."""
    buffer_bytes: int | None = None
    method: str | None = None
    shape: list[int] | None = None
    """Of a matrix product."""
    table_bytes: Count = 0
    """Of a point of a curve."""
    adamw: Number | None = None
    """The rate of a fused AdamW, of updates in place."""

    def __post_init__(self) -> None:
        readings = (self.p20, self.p50, self.p80, self.n)
        if min(readings) <= 0:
            raise ValueError(f"p20, p50, p80 and n are {readings}, not four positive numbers")
        if not self.p20 <= self.p50 <= self.p80:
            raise ValueError("p20, p50 and p80 are out of order")


class GatherRow(Struct, kw_only=True):
    """Random rows of one width."""

    row_bytes: Count
    ns: PeakFigure
    ids: Count = 0
    method: str = ""
    """The fastest one."""
    methods: dict[str, Number] = {}
    """ns by method."""


class RowTable(Struct):
    table_bytes: Count
    rows: Annotated[list[GatherRow], Meta(min_length=1)]


class RowTables(Struct, omit_defaults=True):
    cache: RowTable
    dram: RowTable
    near: RowTable | None = None
    """In the nearest cache of some size."""


class Rates(Struct, kw_only=True, omit_defaults=True):
    """Figures that depend on the number of threads."""

    gemm: dict[str, PeakFigure]
    """Matrix products by precision."""
    copy: PeakFigure
    read: PeakFigure
    cached: PeakFigure
    gather: RowTables
    update: PeakFigure
    first_touch: PeakFigure | None = None
    """Of a CPU: the first write to new pages."""
    special: PeakFigure | None = None
    other_work: Number | None = None
    """Share of the cores that others took meanwhile."""

    def __post_init__(self) -> None:
        if "float32" not in self.gemm:
            raise ValueError("gemm.float32 is missing")


class StreamCurve(Struct):
    """Times of additions by the size of both tensors."""

    points: list[PeakFigure]
    bytes: Count = 0
    """Where the curve leaves the cache."""
    threads: int = 1
    method: str = ""


class Knee(Struct, kw_only=True, omit_defaults=True):
    """Times of random rows by the size of the table."""

    points: Annotated[list[PeakFigure], Meta(min_length=1)]
    bytes: Count
    """Where the curve leaves the cache."""
    stream: StreamCurve | None = None
    row_bytes: Count = 0
    lookups: Count = 0
    threads: int | None = None
    method: str = ""


class Launch(Struct):
    """ns of a kernel of one element."""

    kernel: PeakFigure
    queue: PeakFigure


class DeviceRates(Rates, kw_only=True):
    """All figures of a device."""

    knee: Knee
    calls: dict[str, PeakFigure]
    """ns of a call by kind of operator."""
    launch: Launch | None = None
    transfer: dict[str, PeakFigure] = {}
    l2_bytes: Count = 0


class HostRates(DeviceRates, kw_only=True):
    other_threads: dict[str, Rates]


class Peaks(HostRates, kw_only=True, omit_defaults=False):
    """The file of ceilings."""

    schema: int
    machine: dict[str, Any]
    """Its facts."""
    threads: Count
    gpu: dict[str, DeviceRates] | None = None
    quick: bool = False
    measured: str = ""
    seconds: Number = 0.0
    huge_pages: str | None = None
    notes: list[str] = []

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.machine.get("fingerprint"), str):
            raise ValueError("machine.fingerprint is missing")
        if "elementwise" not in self.calls:
            raise ValueError("calls.elementwise is missing")
