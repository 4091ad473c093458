"""What a plan needs to know about a workload: its tables, its dense work, its memory, its data. Torch-free.

A workload offers a `PlannedWorkload` for each of its configs; this room knows no workload by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ..distributed.config import Table as Table
from ..errors import UsageError
from ..measure.cost import Cost

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Lengths = tuple[float, ...]
CALLS, CALLS_PER_LAYER = 10, 11
"""Operators called in an eager step of a click model: counted in steps of micro-dlrm and dlrm, and more for each layer
of the MLPs."""


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """Shapes of the largest work of a step, at which a device is calibrated."""

    rows_per_sample: float
    """Rows of the largest matrix product that a sample has."""
    inputs: int
    outputs: int
    heads: int = 0
    """Heads of attention; 0 without attention."""
    qk: int = 0
    v: int = 0


@dataclass(frozen=True, kw_only=True)
class Work:
    """Work of one training step."""

    tables: tuple[Table, ...]
    dense_parameters: int
    dense_states: int
    """Numbers that the dense optimizer stores for a parameter."""
    precision: str
    """Precision of matrix products."""
    parts: Callable[[int], Mapping[str, Cost]]
    """Dense work of that many samples on one rank, by span name: FLOPs of products, and bytes of the passes besides
    them. Lookups and updates of tables are not included."""
    calls: int
    """Operators that the host calls in a step, forward and backward."""
    shapes: Shapes
    """What `--calibrate` measures."""
    kernels: Callable[[int, int], int] = lambda samples, threads: 0
    """Kernels, one after the other, of the CUDA graph that one process replays instead for that many samples, on a GPU
    that holds `threads` threads at once; 0: it calls operators too."""
    prepare_s: float = 0.0
    """Seconds in which one thread of the host prepares a sample."""
    prepared_ahead: bool = True
    """Other threads prepare the next batch during a step; otherwise the one that calls operators does."""
    lengths: Lengths = ()
    """Tokens of rows, as equally likely values in ascending order; empty without attention."""
    sample_work: Callable[[NDArray[np.float64]], NDArray[np.float64]] | None = None
    """FLOPs of samples with that many tokens; None: all samples are alike."""
    activations: Callable[[int], int]
    """Bytes of activations that the backward pass needs, at their peak, for that many samples."""
    input_bytes: Callable[[int], int]
    """Bytes copied to the device for that many samples."""
    origins: Mapping[str, str] = field(default_factory=dict)
    """What the counts are based on."""

    @property
    def attention_length(self) -> float:
        """Length of the rows that most FLOPs of attention belong to: its mean, weighted by the square."""
        squares = sum(length**2 for length in self.lengths)
        return sum(length**3 for length in self.lengths) / squares if squares else 0.0


class Popularity(NamedTuple):
    """The power law that ids follow."""

    exponent: float
    origin: str
    """Where it is known from."""
    repeated: bool
    """Samples of a batch share most ids, so that it has only as many different ones as `Table.distinct` says."""


class Spread(NamedTuple):
    """The smallest value, the mean and the largest value of several runs."""

    least: float
    mean: float
    most: float


NO_STALLS, STARTUP_S = Spread(1.0, 1.0, 1.0), Spread(25.0, 25.0, 25.0)
"""Of a workload of which nothing else is known."""


@dataclass(frozen=True, kw_only=True)
class Evaluations:
    """When a training is evaluated, and on how many samples."""

    samples: int
    """Samples of one evaluation."""
    every: Callable[[int], int]
    """Samples between two evaluations, by global batch size."""
    first: Callable[[int], int]
    """Samples before the first evaluation, by global batch size."""
    fixed_s: float = 0.0
    """Seconds of an evaluation that do not depend on its samples or the number of ranks."""


@dataclass(frozen=True, kw_only=True)
class PlannedWorkload:
    """What a workload tells the planner about one config."""

    batch_size: int
    """Samples of a step on all ranks together."""
    count: Callable[[float | None, Mapping[str, float]], Work]
    """Counts the work, given the mean length of histories and the number of different ids per sample by table; None and
    empty: the usual ones."""
    histories: bool = False
    """Samples have histories, whose lengths can be set."""
    rank_batch: int | None = None
    """Samples of one rank in the published runs of this config; None: the batch size is divided among the ranks."""
    popularity: Popularity | None = None
    """How often the ids of its data occur, where that is known."""
    published_samples: Mapping[int, Spread] = field(default_factory=dict)
    """Published numbers of samples to the quality target by global batch size; empty where none applies."""
    published_data: str = ""
    """Dataset of those runs, as `recperf run --data` takes it, where the config names no other data."""
    evaluations: Evaluations | None = None
    """The evaluations of a training to the target, where they are known."""
    stalls: Spread = NO_STALLS
    """Seconds of a training's steps and evaluations over those without stalls between them."""
    startup_s: Spread = STARTUP_S
    """Seconds before the first step."""

    def work(self, *, history: float | None = None, distinct: Mapping[str, float] | None = None) -> Work:
        if history is not None and not self.histories:
            raise UsageError("--history does not apply: samples of this workload have no histories")
        return self.count(history, distinct or {})
