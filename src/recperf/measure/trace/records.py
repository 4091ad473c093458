"""Records of the analysis of a trace: a section of its profile. Torch-free."""

from __future__ import annotations

from ...jsonfile import Number, Struct
from ..profile_records import Collective, Communication, Idle, Kernels, Missing, ProfileSection, TracedPart, Transfer


class Window(Struct):
    """The steps that are analysed; times are per step."""

    steps: int
    named: bool
    steps_from: str
    """names, optimizer, or whole trace."""
    wall_ms: Number
    host_ms: Number
    devices: int
    """Devices that the steps used."""
    device: int | None
    """The busiest of them."""


class TracedCommunication(ProfileSection):
    """The collectives of a trace, per step."""

    where: str = "host"
    rows: list[Collective] = []
    exposed_ms: Number = 0.0
    """Time in which nothing else runs."""


class RankFacts(Struct):
    """The rank that recorded a trace, as its header says."""

    rank: str | int | None
    world_size: str | int | None
    backend: str | int | None


class TraceFacts(Struct, kw_only=True):
    """The origin of a trace, as its header says."""

    host: str | None = None
    file: str = ""
    bytes: int = 0
    events: int = 0
    part: str | None = None
    """Why only a part of the file was read."""
    ignored: int = 0
    torch: str | int | None = None
    cuda: str | None = None
    devices: list[str] = []
    ranks: RankFacts | None = None


class ComparedRanks(Communication, kw_only=True):
    """The traces of several ranks compared."""

    file: str
    """The trace of the slowest rank."""
    notes: list[str]


class MergedRank(Struct):
    rank: int
    file: str
    events: int
    host: str | None


class MergedTraces(Struct, kw_only=True):
    """One file of the traces of all ranks."""

    file: str
    bytes: int
    events: int
    ranks: list[MergedRank]
    of: int | None
    """The number of ranks that recorded."""
    clock: str
    """Whose clocks its times are of."""


class TraceAnalysis(TraceFacts, kw_only=True):
    """What only the profile of a trace has; times are per step."""

    window: Window
    parts: list[TracedPart]
    communication: TracedCommunication
    ceilings_of: str = ""
    """Whose ceilings were used, or why none."""
    ranks_compared: ComparedRanks | None = None
    merged: MergedTraces | None = None


class StepTables(TraceAnalysis, kw_only=True):
    """All tables of traced steps: those of a device are sections of other profiles too."""

    kernels: Kernels
    idle: Idle
    transfers: list[Transfer] | Missing
