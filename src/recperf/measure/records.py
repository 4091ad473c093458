"""Records of an observed step and what follows from it, as they are passed around and written to files. Torch-free."""

from __future__ import annotations

from typing import Any

from ..jsonfile import Number, Struct


class Percentiles(Struct):
    p20: Number
    p50: Number
    p80: Number


class Place(Struct, frozen=True):
    """A line of the user's program."""

    function: str
    file: str
    """Relative to the working directory, or to the folder from which it is imported."""
    line: int
    backward: bool = False
    """Whether it is the backward pass of what this line computes."""


class PlaceTime(Place, frozen=True, kw_only=True):
    """The time of a step that a limit takes at a place."""

    limit: str
    share: Number
    """Of the step."""
    ms: Number
    low: Number | None = None
    """The ends of the 95 % interval of the share; None: measured by an older recperf."""
    high: Number | None = None
    samples: int = 0
    """Samples of the stack that show it."""


class PlaceShare(Struct):
    """A place outside of operators."""

    limit: str
    share: Number
    """Of the limit's time outside of operators."""
    place: Place
    source: str = ""
    """The text of its line, where the file can be read."""
    low: Number | None = None
    """The ends of the 95 % interval of the share, by samples or by traced steps; None: measured by an older recperf."""
    high: Number | None = None
    samples: int = 0


class LineShare(Struct):
    """A line by samples of the stack, whatever limits it: all that it takes until it is left, but no backward pass."""

    place: Place
    share: Number
    """Of the step."""
    low: Number
    high: Number


class SampledStack(Struct):
    """Samples of one stack."""

    frames: list[str]
    """Outermost first: function, file and line."""
    limit: str
    """What the thread did there, as far as the sampler sees: input, python, blocked, ranks or operators."""
    samples: int
    share: Number
    """Of the sampled time."""


_KEYS = {"memory_bytes": "beyond", "new_bytes": "fresh", "memory_rows": "missed", "host_bytes": "linked"}
"""Names in files of fields that have clearer names here: files that users have stay readable."""


class Operator(Struct, rename=_KEYS):
    """An operator of an observed step: its time and its counted work per step."""

    name: str
    part: str | None
    """The span, region or module that it belongs to."""
    kind: str
    calls: Number
    python_calls: Number
    """Calls that come from Python, not from another operator."""
    ms: Number
    kernels: Number = 0
    flops: Number = 0
    special: Number = 0
    bytes: Number = 0
    memory_bytes: Number = 0
    """Of these bytes, those streamed from memory."""
    new_bytes: Number = 0
    """Of those from memory, the ones written to pages that the process did not have before."""
    rows: Number = 0
    """Random rows."""
    memory_rows: Number = 0
    """Of these rows, those from memory rather than from a cache."""
    distinct: Number = 0
    host_bytes: Number = 0
    """Bytes of rows that a device reads from host memory."""
    precision: str | None = None
    row_bytes: int | None = None
    table_rows: int | None = None
    place: Place | None = None
    parallel: Number = 1.0
    """How many such operators ran at the same time."""
    counted: bool = True
    """Whether the work of all calls is known."""
    by_name: str | None = None
    """The limit that the name of a kernel of a CUDA graph stands for."""
    communication: bool = False
    fused: bool = False
    largest: list[int] | None = None
    """Shape of the largest tensor that it reads."""
    each_ms: list[Number] = []
    """Its time in each of the traced steps."""


class DividedOperator(Operator, kw_only=True):
    """An operator with its time (ms per step) by limit."""

    limits: dict[str, Number]
    random_ms: Number
    """Time of random rows from memory."""
    note: str
    """Why a ceiling does not apply; empty where all do."""


class PartTime(Struct):
    name: str
    ms: Number
    share_of_operators: Number


class ObservedSteps(Struct):
    seen: int
    plain: int
    traced: int
    counted: int = 0


class TimingCost(Struct):
    """What timing one step costs."""

    ns: Number
    share: Number


class NativeCode(Struct):
    """C code of libraries outside of operators."""

    share: Number
    """Of the time outside of operators."""
    modules: list[str]


class Sampling(Struct):
    samples: int
    share: Number
    """What sampling the stack costs."""


class TracedCall(Struct, omit_defaults=True):
    """A call in a traced step, or a stretch of short ones."""

    lane: str
    """input, host, other threads or device."""
    start_us: Number
    us: Number
    operator: int | None = None
    """Number of its row among the operators of the profile."""
    name: str = ""
    """Empty: that of the operator."""
    limit: str = ""
    """Empty: that of the operator."""


class TracedStep(Struct):
    """The median traced step; its calls lie over each other in their order."""

    us: Number
    calls: list[TracedCall]


class ChildTime(Place, frozen=True, kw_only=True):
    """A line that a process of the program runs."""

    share: Number
    """Of the time in which the processes work."""
    low: Number
    high: Number
    samples: int
    off: Number
    """Share of its time off the processor: it sleeps, or waits for a lock or a disk."""


class Children(Struct):
    """Processes that the program started, such as the workers of its DataLoader."""

    what: str
    processes: int
    samples: int
    """While they worked."""
    busy: Number
    """Share of their time in which they worked."""
    lines: list[ChildTime]


class MemoryLine(Place, frozen=True, kw_only=True):
    """Memory that a line of the program takes."""

    part: str
    bytes: int


class StepMemory(Struct):
    """The memory of one device, or of the host, at the peak of a step."""

    device: str
    peak_bytes: int
    parts: dict[str, int]
    """They add up to the peak."""
    lines: list[MemoryLine]
    """Lines of activations and temporary tensors, largest first."""
    growth: list[MemoryLine]
    """Lines that hold more after every step, in bytes a step."""
    capacity_bytes: int
    """What is free, and what the process has."""
    batch: int | None = None
    largest_batch: int | None = None
    """Predicted: activations, inputs and temporary tensors grow with the batch, the rest does not."""
    fitting_batch: int | None = None
    """The largest batch that ran in a trial."""
    batch_note: str = ""
    """Why the largest batch was not tried, or what its trials showed."""
    advice: list[Advice] = []
    """Changes that would free memory, the one that frees most first."""


class Observed(Struct):
    """The figures of a step that its verdict follows from, in ms per step."""

    device: str
    threads: int
    step_ms: Percentiles
    waits: dict[str, Number]
    operators: list[Operator]
    other_work: Number | None = None
    """Share of the cores that other work took."""
    steps: ObservedSteps | None = None
    """None: those of a trace."""
    overhead: TimingCost | None = None
    parts: list[PartTime] = []
    notes: list[str] = []
    places: list[PlaceShare] = []
    native: NativeCode | None = None
    sampling: Sampling | None = None
    preempted: Number | None = None
    """Share of the time in which the thread of the steps waited for a core."""
    input_cores: Number = 1.0
    """Cores that the process used while a step waited for its input."""
    inside: Number | None = None
    """Part of a call's cost that is inside the operator."""
    crowded: Number = 0.0
    """Share of the cores that worker processes took from operators."""
    scale: Number | None = None
    """Time of plain steps over that of traced ones."""
    host_ms: Number | None = None
    """GPU: time of the host in a step, without its waits for input, other ranks and the device."""
    long_python_ms: Number | None = None
    """Time outside of operators in stretches that are long enough for the sampler to tell their lines."""
    optimizer_python: dict[str, Number] = {}
    """CPU: time outside of operators in the methods of optimizers: mostly memory that they release."""
    pageable_bytes: Number = 0
    """Bytes copied between the device and memory of the host that is not pinned."""
    lines: list[LineShare] = []
    stacks: list[SampledStack] = []
    """What the samples saw, largest first."""
    children: list[Children] = []
    """What other processes of the program did."""
    memory: list[StepMemory] = []
    traced_ms: list[Number] = []
    """The traced steps, without their waits for input; empty: measured by an older recperf."""
    varies: dict[str, Number] = {}
    """How much a wait may differ from its mean over the timed steps: half of the 95 % interval over the mean."""
    timeline: TracedStep | None = None


class Attribution(Struct):
    """Every nanosecond of a step by limit."""

    shares: dict[str, float]
    random: float
    """Share of random rows from memory, which is divided between latency and bandwidth."""
    operators: list[DividedOperator]


class Verdict(Struct):
    """What limits a step."""

    limit: str
    """One of the limits, "unclear", or "not judged" beside too much other work."""
    share: Number
    """Its share of the step; of an unclear step, or one that is not judged, the largest one."""
    confidence: str
    """high, medium or low."""
    because: list[str]
    """Sentences with the figures that led to it."""
    doubts: list[str] = []
    """What lowers the confidence."""
    second: str | None = None


class Experiment(Struct):
    name: str
    expected: str
    measured: str
    outcome: str = "not run"
    """agrees, disagrees, inconclusive or not run."""


class Advice(Struct):
    """One change, with its predicted and its measured gain (1.5: a step is 1.5 times as fast)."""

    name: str
    seen: str
    """What was seen, with figures."""
    change: str
    """A line to paste, or the options to give."""
    predicted_gain: Number | None = None
    predicted_range: list[Number] | None = None
    measured_ms: Number | None = None
    measured_gain: Number | None = None
    measured_range: list[Number] | None = None
    same_losses: bool | None = None
    largest_difference: Number | None = None
    status: str = "suggested"
    """suggested, tried, no gain, rejected (changes the losses), not tried, not judged, or not applicable."""
    note: str | None = None
    settings: dict[str, Any] = {}
    """What a trial changes in a program from outside; empty where only its author can."""
    changes: str = ""
    """What the change does not keep, where a rule knows it."""
    measured_peak: list[int] | None = None
    """Bytes at the peak of the steps of the unchanged and the changed program of a trial, of a device or else of the
    host."""


class Explanation(Struct, kw_only=True):
    """What limits a step, with the figures behind that."""

    verdict: Verdict
    shares: dict[str, Number]
    """Share of the step by limit; they sum to 1."""
    operators: list[DividedOperator]
    """Operators with their time, counted work and limits, largest first."""
    places: list[PlaceTime] = []
    """Functions, files and lines of the program by limit, with their share of the step, largest first."""
    stacks: list[SampledStack] = []
    """What the samples of the stack saw, largest first."""
    children: list[Children] = []
    """What other processes of the program did, such as workers of its DataLoader."""
    memory: list[StepMemory] = []
    """The host's first."""
    advice: list[Advice]
    """Changes that would make the step faster, the largest predicted gain first."""
    step_ms: Percentiles
    """Of the plain steps."""
    notes: list[str]
    timeline: TracedStep | None = None
