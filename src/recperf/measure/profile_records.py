"""Records of the sections of a profile and of pair.json, as they are passed around and written to files. Torch-free."""

from __future__ import annotations

from ..jsonfile import Count, Number, Struct
from .records import Percentiles

PAIR_SCHEMA = 1
NARROWER_PAIR = "measure it on a quiet machine or with a larger --train.batch-size"
"""What narrows the ranges of a pair: both come from readings of lookups."""


class Missing(Struct):
    """Stands for a section that was not measured."""

    missing: str


class ProfileSection(Struct, omit_defaults=True, kw_only=True):
    """A section of a profile that may be missing, with the reason: then nothing else is in it."""

    missing: str | None = None


class KernelTime(Struct):
    name: str
    part: str | None
    count: Number
    total_ms: Number
    mean_us: Number
    share: Number
    launch_delay_us: Number | None = None


class SmallKernels(Struct, frozen=True):
    count: Number
    share_of_count: Number
    total_ms: Number


class Kernels(ProfileSection):
    """The kernels of traced steps, per step."""

    rows: list[KernelTime] = []
    count: Number = 0
    busy_ms: Number = 0.0
    small: SmallKernels = SmallKernels(0, 0.0, 0.0)
    steps: int = 0


class Sync(Struct):
    """A call in which the host waits for the device."""

    what: str
    caller: str
    count: Number
    ms: Number


class Idle(ProfileSection):
    """The device in traced steps, per step."""

    wall_ms: Number = 0.0
    busy_ms: Number = 0.0
    idle_ms: Number = 0.0
    causes: dict[str, Number] = {}
    """The idle time by limit."""
    syncs: list[Sync] = []


class Transfer(Struct):
    """Copies of one kind, per step."""

    kind: str
    count: Number
    bytes: Number
    ms: Number
    gb_per_s: Number
    pinned: bool | None
    overlapped_share: Number


class TracedPart(Struct):
    """A region or a module of traced steps, per step."""

    name: str
    calls: Number
    host_ms: Number
    """Without inner ones."""
    total_ms: Number
    device_ms: Number | None
    kernels: Number


class RankTimes(Struct):
    """Milliseconds of a step of the profile."""

    step_ms: Number
    own_ms: Number
    """Outside collectives."""
    exposed_ms: Number
    """Waiting in collectives."""
    late_ms: Number | None
    """Waiting for a rank that arrives late; None: not measured."""
    moving_ms: Number | None
    """Waiting for bytes to move; None: not measured."""


class Rank(RankTimes):
    rank: int


class MeasuredRank(Rank, omit_defaults=True):
    awaited_ms: Number | None
    """Time that the others waited for it."""
    largest_part: str
    file: str | None = None
    """Its trace."""


class Collective(Struct, omit_defaults=True, kw_only=True):
    """A kind of collective, per step; times are means over the ranks, None where they are not known."""

    what: str
    part: str | None = None
    count: Number
    bytes: Number
    ms: Number | None = None
    exposed_ms: Number | None = None
    late_ms: Number | None = None
    moving_ms: Number | None = None
    awaited_rank: int | None = None
    """The rank for which the others waited longest."""


class Communication(ProfileSection):
    """What ranks wait for, in ms per step."""

    ranks: int = 1
    hosts: int = 1
    slowest: int = 0
    """The rank with the most work of its own."""
    steps: int = 0
    step_ms: Number = 0.0
    own_ms: Number = 0.0
    exposed_ms: Number = 0.0
    exposed_share: Number = 0.0
    late_ms: Number | None = None
    moving_ms: Number | None = None
    not_told_apart: str | None = None
    """Why waiting for a rank and for bytes could not be separated."""
    each: list[MeasuredRank] = []
    collectives: list[Collective] = []
    sharing: int = 1
    """Ranks that share the processor."""
    why: str = ""
    """The line that makes the slowest rank slow, where places of all ranks are known."""

    def __post_init__(self) -> None:
        if (self.missing is None) != bool(self.each):
            raise ValueError("`each` lists no rank")


class TableTraffic(Struct, omit_defaults=True):
    """Tables that do not lie on the device: figures of a mean step after training."""

    placement: str
    """host or file."""
    cache_bytes: int
    """Memory of the device for rows in use."""
    rows: Number
    """Distinct rows of a batch."""
    hit_rate: Number
    """Share of them that the cache held."""
    fetched_bytes: Number
    written_back_bytes: Number
    placing_ms: Number
    """Time of fetching and writing back, beside the step."""
    exposed_ms: Number
    """Time that the step waited for its batch."""
    process: dict[str, int] | None = None
    """Bytes in memory of the process: its own, those of files such as libraries, and the peak of both."""


class Component(Struct):
    """A part of a clocked step with its counted work."""

    name: str
    phase: str
    ms: Percentiles
    share: Number
    """Of the sum of all parts' medians."""
    flops: Number | None = None
    bytes: Number | None = None


class IdFacts(Struct):
    """What the lookups of a step touch."""

    lookups: Number
    unique_rows: Number
    row_bytes: int
    working_set_bytes: Count
    touched_bytes: Count
    """By all measured steps."""


class MeasuringCost(Struct):
    """The cost of measuring: measured steps relative to plain ones."""

    plain_ms: Number
    clocked_ms: Number
    share: Number


class StepBudget(Struct, kw_only=True):
    """The time of a step by part; an arm of a pair."""

    device: str
    steps: int
    warmup: int
    batch_size: int
    step_ms: Percentiles
    """Of clocked steps."""
    components: list[Component]
    ids: IdFacts
    threads: int
    precision: str = "float32"
    communication: Communication | None = None


class RooflinePoint(Struct):
    """A part with counted work, relative to the ceilings."""

    name: str
    flops: Number
    bytes: Number
    intensity: Number | None
    flops_per_s: Number
    bytes_per_s: Number
    ceiling_flops_per_s: Number
    ceiling_bytes_per_s: Number
    share_of_roof: Number | None
    bound: str


class TableLookups(Struct):
    """The lookups of a step in one table."""

    name: str
    rows: int
    row_bytes: int
    lookups: Number
    unique: Number
    unique_ratio: Number
    touched_bytes: Count
    busiest_share: Number
    """Share of the lookups that read the most frequent hundredth of the touched rows."""


class EmbeddingShare(Struct):
    tables: list[TableLookups]
    lookups: Number
    unique: Number
    unique_ratio: Number


class SavedTrace(Struct):
    file: str
    bytes: int
    steps: int


class Trust(Struct):
    """What a reader must know to believe a profile."""

    tracing: MeasuringCost | None = None
    seed: int | None = None
    versions: dict[str, str | None] = {}
    clocks: dict[str, Number] | None = None


class WorkloadFigures(StepBudget, kw_only=True):
    """What the profile of a workload tells beside what that of any step does. The sections from `name` on are those of
    recperf profile; a run has none of them but `no_advice`."""

    overhead: MeasuringCost
    """Of clocked steps, relative to the plain ones that were observed."""
    tables: TableTraffic | None = None
    """What moved between the tiers of tables; None: they lie on the device."""
    name: str | None = None
    preset: str | None = None
    switches: dict[str, str] = {}
    roofline: list[RooflinePoint] | Missing | None = None
    embeddings: EmbeddingShare | None = None
    trace: SavedTrace | None = None
    no_advice: Missing | None = None
    """Why the profile has no advice."""
    trust: Trust | None = None


class ColdOverHot(Struct):
    """How many times as long lookups of cold ids should take as those of hot ids."""

    low: Number
    expected: Number
    high: Number


class PairLookups(Struct):
    """ms to look up as many random rows as a step does, outside a step: with each arm's number of rows, in the same
    table."""

    hot: Percentiles
    cold: Percentiles

    def cold_over_hot(self) -> ColdOverHot:
        """The ratio that follows for a step, with ends from p20 and p80 of both."""
        hot, cold = self.hot, self.cold
        return ColdOverHot(cold.p20 / hot.p80, cold.p50 / hot.p50, cold.p80 / hot.p20)


class PairIds(Struct):
    """Number of table rows that the ids of each arm refer to."""

    hot: int
    cold: int


class Pair(Struct, kw_only=True):
    """pair.json: the same step with ids whose rows stay in a cache, and with ids from the whole table."""

    schema: int
    hot: StepBudget
    cold: StepBudget
    ids: PairIds
    ratio: dict[str, Number]
    """Time with cold ids over that with hot ids, by part."""
    lookups: PairLookups | None = None
    """None where ids are not equally likely."""
    expected: ColdOverHot | None = None
    other_work: Number | None = None
    """Share of the cores that others took during the turns that count."""
    verdict: str
