"""What a workload is to the commands: a name, presets, facts known before anything runs, and a way to build it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..config import within
from ..distributed.world import current
from ..errors import MachineError
from ..machine import available_bytes
from ..measure.cost import FLOAT, Cost
from ..runs.contract import Claim
from ..train.config import TargetConfig
from ..units import size

if TYPE_CHECKING:
    from torch import Tensor

    from ..distributed.config import DistributedConfig
    from ..plan.work import PlannedWorkload
    from ..runs.mlperf.log import MLPerfLog
    from ..train.device import Settings
    from ..train.loop import Position, Recipe
    from .submission import Submission


@dataclass(frozen=True, kw_only=True)
class TrialsConfig:
    """What the config of every click workload ends with."""

    target: TargetConfig = field(default_factory=TargetConfig)
    seed: int = 42
    """Seed of initial weights, of virtual ids and of the order of batches."""
    seeds: int = 1
    """How many trainings, with seeds counting up from the first; results are their mean and spread."""

    def __post_init__(self) -> None:
        within(0, self.seed, 1 << 53, "seed")
        within(1, self.seeds, 1000, "seeds")


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Counted from the config alone."""

    parameters: dict[str, int]
    table_bytes: int
    step: dict[str, Cost]
    """Work of one training step by component."""
    memory: dict[str, int]
    """Bytes a training step holds."""

    @property
    def total(self) -> Cost:
        return sum(self.step.values(), Cost())


@dataclass(frozen=True, kw_only=True)
class Fix:
    """A switch that is not on yet."""

    name: str
    """What `measure/fixes.py` knows how to predict."""
    title: str
    switch: str
    """The words for the command line."""
    config: Any
    """The whole config with it."""
    tolerance: float
    """Largest relative difference of a loss that its arithmetic excuses."""
    implies: tuple[str, ...] = ()
    """Names of fixes it cannot do without; its switch sets them too."""


class Trial(Protocol):
    """One training with one seed."""

    recipe: Recipe

    def score(self, at: Position | None = None) -> dict[str, float]:
        """Of the validation rows; where those depend on how far training is, of those of that moment."""
        ...

    def rows_of(self, batch: Any) -> Tensor: ...

    def tables(self) -> list[tuple[str, int]]:
        """Name and rows of each table, in the order of the rows `rows_of` counts."""
        ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None: ...


class Prepared(Protocol):
    """Data read, baselines scored, settings chosen: what the trials of a run share."""

    data: dict[str, Any]
    target: dict[str, Any]
    settings: Settings

    def baselines(self) -> dict[str, dict[str, float]]: ...

    def trial(self, seed: int) -> Trial: ...

    def step_cost(self, ids: int, unique: int) -> dict[str, Cost]: ...

    def table_bytes(self) -> tuple[int, int]:
        """Of a row, and of all rows."""
        ...

    def fixes(self) -> tuple[Fix, ...]:
        """What could be switched to make a step faster, with what it would change in the config."""
        ...

    def pair(self, trial: Trial) -> dict[str, Recipe] | None:
        """The recipes of a matched pair, hot and cold, on one trained model; none where ids cannot be varied."""
        ...


def describe_made_up(name: str, data: Any, batch: int, parts: dict[str, Any]) -> dict[str, Any]:
    """What a result says of batches that are drawn; `parts` is all that decides them."""
    return {
        "name": name,
        "digest": hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest(),
        "rows": (data.batches + data.held_out_batches) * batch,
        "train_rows": data.batches * batch,
        "valid_rows": data.held_out_batches * batch,
        "split": "held-out stream",
        "synthetic": True,
    }


SMALLER = "smaller tables (--model.rows, --model.dim) or a smaller --train.batch-size"


def require_memory(found: Estimate, *, tables: float = 1.0, more: int = 0, fix: str = SMALLER) -> None:
    """Refuse what memory cannot hold before anything is allocated; `tables` is how many copies will be made, `more` are
    bytes that the estimate does not know of. Ranks of a host need as much each, at the same time."""
    ranks = current().local_size
    needed = ranks * (sum(found.memory.values()) + (tables - 1) * found.table_bytes + more)
    available = available_bytes()
    if needed > available:
        by = f" by the {ranks} ranks of this host" if ranks > 1 else ""
        raise MachineError(
            f"{size(needed)} are needed{by}, {size(available)} are free",
            fix=fix,
        )


def held_share(rows: Mapping[str, int], options: DistributedConfig) -> float:
    """How much of the tables one process has: all, or with several ranks its part and what every rank has a copy of."""
    kinds, size = options.shardings, current().size
    ours = [count if kinds.get(name) == "data-parallel" else count / size for name, count in rows.items()]
    return sum(ours) / sum(rows.values())


def summed_bytes(parameters: int) -> int:
    """Of the buffer in which several ranks add up gradients of so many numbers; one process has none."""
    return FLOAT * parameters if current().size > 1 else 0


@dataclass(frozen=True, kw_only=True)
class Workload:
    name: str
    summary: str
    config: type
    presets: Mapping[str, Callable[[], Any]]
    """By name; the first is the default."""
    estimate: Callable[[Any], Estimate]
    check: Callable[[Any], str]
    """Looks at what a config needs without running it (files, devices) and says in a line what would be used."""
    prepare: Callable[[Any], Prepared]
    open_log: Callable[[Any, Path], MLPerfLog | None] = lambda config, folder: None
    """The MLPerf log of a run in that folder, where its config asks for one."""
    submission: Callable[[Any, int, MLPerfLog], Submission] | None = None
    """What tells that log of a trial with a seed."""
    planned: Callable[[Any], PlannedWorkload]
    """Counts the work of a config for `recperf plan`."""
    claims: Callable[[Any], tuple[Claim, ...]]
    """What the workload says of itself with this config; `recperf check` holds a run to it."""
