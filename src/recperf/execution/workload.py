"""What a workload is to the commands: a name, presets, facts known before anything runs, and a way to build it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from ..config import within
from ..distributed.ranks import current
from ..errors import MachineError, UsageError
from ..machine import available_bytes
from ..measure.cost import Cost
from ..tasks import Task
from ..train.config import StartConfig, TargetConfig
from ..units import size

if TYPE_CHECKING:
    from torch import Tensor

    from ..data.datasets import Dataset
    from ..learn.records import RepeatsSeen, TargetsSeen
    from ..measure.fixes import Fix
    from ..models.tiers.cache import TieredRows
    from ..planning.work import PlannedWorkload
    from ..runs.contract import Claim
    from ..train.device import Settings
    from ..train.loop import Position, Recipe


@dataclass(frozen=True, kw_only=True)
class RankingConfig:
    """How many users' first positive held-out row is ranked among other items after training, and among how many."""

    users: int | None = None
    """Number of users; 0: none. Among the whole catalogue at most as many as have 100 million candidates together, or
    100. Default: as many as add at most a fifth to the counted work of the training."""
    negatives: int | None = None
    """Items drawn at random that each row is ranked among; 0: the whole catalogue. Default: the whole catalogue, or
    where that would leave fewer than 100 users, as many items as 100 users leave room for."""

    def __post_init__(self) -> None:
        within(0, self.users or 0, 1 << 40, "ranking.users")
        within(0, self.negatives or 0, 1 << 40, "ranking.negatives")


@dataclass(frozen=True, kw_only=True)
class TrialsConfig:
    """Fields that the config of every workload has."""

    target: TargetConfig = field(default_factory=TargetConfig)
    ranking: RankingConfig = field(default_factory=RankingConfig)
    start: StartConfig = field(default_factory=StartConfig)
    seed: int = 42
    """Seed of the initial weights, of synthetic ids and of the order of batches."""
    seeds: int = 1
    """Number of trainings, with consecutive seeds; the result is their mean and spread."""
    baseline_seconds: float = 20.0
    """Baselines that would begin after the time of the training and this many seconds are left out, and the result
    names them; 0: none are."""

    def __post_init__(self) -> None:
        within(0, self.seed, 1 << 53, "seed")
        within(1, self.seeds, 1000, "seeds")
        within(0.0, self.baseline_seconds, 1e9, "baseline_seconds")


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Parameters, work and memory, counted from the config."""

    parameters: dict[str, int]
    table_bytes: int
    step: dict[str, Cost]
    """Work of one training step, by span."""
    memory: dict[str, int]
    """Bytes that a training step holds, by kind."""
    state_bytes: int = 0
    """Bytes of the optimizer's state of all table rows."""
    table_rows: int = 0
    """Rows of all tables that may lie outside the device."""

    @property
    def total(self) -> Cost:
        return sum(self.step.values(), Cost())


OTHER_FEATURES = "the run was trained on other features of the ratings than this version computes"
MOST_ROWS = 20_000_000
"""Users and items of more scored rows than this are not collected, and such rows have no bootstrap interval."""


@dataclass(frozen=True, eq=False)
class ScoredRows:
    """The rows that a model is scored on, in the order in which it is, on the host."""

    labels_N: Tensor
    users_N: Tensor | None = None
    """A number for each row's user, also for users without training rows; None where rows have no user."""
    items_N: Tensor | None = None
    times_N: Tensor | None = None
    """Numbers in the order of time; None where the rows are in that order, or have no time."""
    targets_N: Tensor | None = None
    """Which rows are ranked, at most one of each user; None: each user's first positive one."""


class Catalogue(Protocol):
    """The items that compete where a row is ranked."""

    @property
    def items_I(self) -> Tensor:
        """Numbers of all items of the dataset."""

    @property
    def rows_I(self) -> Tensor:
        """Training rows of each item, by its number."""

    @property
    def user_rows_N(self) -> Tensor:
        """For each scored row, how many training rows its user has; for events, how many events lie before it."""

    @property
    def user_rows_are(self) -> str:
        """What `user_rows_N` counts: training rows, or events before the row."""

    @property
    def item_rows_N(self) -> Tensor:
        """For each scored row, how many training rows its item has."""

    @property
    def repeats(self) -> float:
        """The share of the training rows whose item their user also has in another one before."""

    @property
    def meeting_is(self) -> str | None:
        """What `meeting` is computed from; None where labels themselves say which items users see, as where negatives
        were drawn."""

    def meeting(self, rows_P: Tensor, items_P: Tensor) -> Tensor:
        """Log probabilities that the users of scored rows see items, from what was known before the rows."""

    def seen(self, row: int) -> Tensor:
        """Items that the user of a scored row took before it."""


@dataclass(frozen=True, eq=False)
class Predictions:
    """Logits of the scored rows in their order, and of these rows the labels, users and items, on the host."""

    logits_N: Tensor
    labels_N: Tensor
    users_N: Tensor | None = None
    items_N: Tensor | None = None
    ranks_N: Tensor | None = None
    """Of a workload that ranks all items: the rank of each user's held-out item, from 1 on. Such a workload predicts no
    labels, and has no logits."""
    lists: Mapping[str, float] = field(default_factory=dict)
    """Of such a workload: what the lists of different users have in common, and how popular their items are."""


@dataclass(frozen=True, eq=False)
class RankedTargets:
    """The held-out items of a workload that ranks all items, one of each user."""

    users_N: Tensor
    items_N: Tensor
    catalogue: int
    """Number of items."""
    repeats: bool
    """Whether items of a user's history compete."""
    split: str
    """leave-one-out or time."""
    baseline_ranks: Mapping[str, Tensor]
    """The ranks that simple rules give the items, by name; the cheapest rule first."""

    def gains(self, ranks_N: Tensor) -> dict[str, Tensor]:
        """Hit, discounted gain and reciprocal rank of each item."""
        from ..train.ranking import gains

        return gains(ranks_N - 1, ranks_N * 0)

    def metrics(self, ranks_N: Tensor) -> dict[str, float]:
        return {name: float(gain_N.mean()) for name, gain_N in self.gains(ranks_N).items()}


@dataclass(frozen=True, kw_only=True)
class HeldOutFacts:
    """What is known of the scored rows beside their labels, which explains why a model is good or bad there."""

    training_rows: Mapping[str, Tensor] = field(default_factory=dict)
    """For each scored row, how many training rows have its user, its item or its value of a column, by name."""
    alone: Mapping[str, float] = field(default_factory=dict)
    """The AUC of each input alone."""
    later: Mapping[str, float] = field(default_factory=dict)
    """Inputs that are times, with the share of rows in which they are later than the row's own."""
    known_users: Mapping[str, float] = field(default_factory=dict)
    """What shows that users train whom the split promises not to, with their share of the scored rows."""
    at_most: float | None = None
    """The highest AUC that any scores of the inputs reach, where equal rows have different labels."""
    repeats: RepeatsSeen | None = None
    """None: rows cannot be told apart."""
    targets: TargetsSeen | None = None
    """Of a workload that ranks all items."""


TRAINED = "trained"
"""The name of the probe of training rows."""


class Reporter(Protocol):
    """Shows progress: a terminal, or nothing."""

    def notice(self, text: str) -> None: ...

    def say(self, text: str = "") -> None: ...

    def detail(self, text: str) -> None: ...

    def trial(self, seed: int, total_steps: int, done: int) -> None: ...

    def step(self, step: int, loss: float, samples: int) -> None: ...

    def working(self, text: str, seconds: float) -> None:
        """Show what has been under way for that long; an empty text takes it away."""

    def metric(self, step: int, epoch: int, metrics: dict[str, float]) -> None: ...

    def close(self) -> None:
        """Remove the progress from the terminal."""


class Trial(Protocol):
    """One training with one seed."""

    recipe: Recipe

    def predictions(self, at: Position | None = None) -> Predictions:
        """Predictions for the validation rows; where those depend on how far training is, the rows then."""

    def metrics(self, predictions: Predictions) -> dict[str, float]:
        """What an evaluation records of its predictions; each evaluation calls it once."""

    def recommender(self) -> Callable[[int], Tensor]:
        """Of a workload that ranks all items: a function that scores them for the user of a scored row."""
        raise TypeError("a workload with a catalogue scores candidates")

    def candidate_logits(self, rows_P: Tensor, items_P: Tensor) -> Tensor:
        """Logits of scored rows, given by their number, if their item were another; asked for where the workload has a
        catalogue."""
        raise TypeError("a workload without a catalogue has no candidates")

    def probes(self) -> Iterator[tuple[str, Tensor]]:
        """Losses of some of the rows that choose the epoch, one of each: of the model as it is, by the empty name; then
        of some training rows, named TRAINED, the earliest first where rows have times; then with each input exchanged
        between the rows, by its name. Nothing where no rows choose the epoch. A loss is the log loss of a label, or 1
        less the discounted gain of an item."""
        return iter(())

    def rows_of(self, batch: Any) -> Tensor: ...

    def tables(self) -> list[tuple[str, int]]:
        """Name and rows of each table, in the order of the rows `rows_of` counts."""

    def tiers(self) -> TieredRows | None:
        """The rows of its tables, where these do not lie on the device."""
        return None

    def take_over(self, saved: dict[str, Tensor], rows: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Use what the model of another run counted: `rows` are the numbers that ids have there and here, by role."""
        return None

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None: ...


class Prepared(Protocol):
    """Data read and settings chosen: what the trials of a run share. Inherit from it to get the defaults."""

    config: Any
    data: dict[str, Any]
    """Facts about the data that a result records: name, digest, rows, train_rows, valid_rows, split, synthetic."""
    target: dict[str, Any]
    """Bounds to reach: beat (name of a baseline), accuracy, auc; None where there is none."""
    settings: Settings

    def scored_rows(self) -> ScoredRows:
        """The rows that the end of a training is scored on, in the order of `Trial.predictions`; where each seed has
        rows of its own, those of the first."""

    def own_ids(self, role: str) -> Sequence[object] | None:
        """The ids of users (role user) or items (role item) in the user's own file, by the numbers in `scored_rows`;
        None where these are the ids."""
        return None

    def baseline_logits(self) -> Mapping[str, Tensor]:
        """Logits, or scores of any scale, that simple rules give the scored rows, by name and in the rows' order; the
        cheapest rule first."""

    def ranking(self) -> RankedTargets | None:
        """What a workload that ranks all items is scored on; None where rows have labels."""
        return None

    def catalogue(self) -> Catalogue | None:
        """The items that rows can be ranked among; None where rows have no user or no item."""
        return None

    def baseline_scorers(self) -> Mapping[str, Callable[[Tensor, Tensor], Tensor]]:
        """Simple rules that rank, by name: functions of the numbers of scored rows and of the items that take the place
        of the rows' own, which return scores of any scale."""
        return {}

    def held_out_facts(self) -> HeldOutFacts:
        """What explains the scores of the scored rows; it may take as long as a simple baseline."""
        catalogue = self.catalogue()
        if catalogue is None:
            return HeldOutFacts()
        return HeldOutFacts(training_rows={"user": catalogue.user_rows_N, "item": catalogue.item_rows_N})

    def trial(self, seed: int) -> Trial: ...

    def verified(self) -> dict[str, int] | None:
        """Bytes of the data that this process compared with their digests, and `of` how many; None for data that is
        not verified as it is read."""
        return None

    def step_cost(self, batch: Any, ids: int, unique: int) -> dict[str, Cost]:
        """Work of a step on this batch, whose samples on this rank have `ids` ids, of which `unique` are
        distinct, by the name of the span that times it."""

    def table_bytes(self) -> tuple[int, int]:
        """Bytes of one row, and of all rows."""

    def fixes(self) -> tuple[Fix, ...]:
        """Switches that could make a step faster, with what each changes in the config."""
        from ..train.device import cpu_fixes

        return cpu_fixes(self.config, self.settings)

    def pair(self, trial: Trial, hot_bytes: int | None) -> dict[str, Arm] | None:
        """A matched pair, hot and cold, on one trained model; None where ids cannot be varied.

        `hot_bytes` is the size of the table by which the rate of hot rows was measured, where it was.
        """
        return None


@dataclass(frozen=True)
class Arm:
    """One half of a matched pair."""

    recipe: Recipe
    rows: int | None
    """Number of table rows that its ids refer to, all equally often; None where some are more popular."""
    lookups: Callable[[], Callable[[], object]] | None
    """Draws as many random rows as a step looks up and returns a call that looks them up; None as above."""


SMALLER = "smaller tables (--model.rows, --model.dim) or a smaller --train.batch-size"


def require_memory(estimate: Estimate, *, tables: float = 1.0, more: int = 0, fix: str = SMALLER) -> None:
    """Refuse what memory cannot hold before anything is allocated; `tables` is how many copies will be made, `more` are
    bytes that the estimate does not know of. Ranks of a host need as much each, at the same time."""
    needed, by = current().needed_bytes(sum(estimate.memory.values()) + (tables - 1) * estimate.table_bytes + more)
    available = available_bytes()
    if needed > available:
        raise MachineError(
            f"{size(needed)} are needed{by}, {size(available)} are free",
            fix=fix,
        )


HASHED = "hashed"
"""In `Workload.id_tables`: rows are addressed by a hash of numbers that every import assigns anew, so they cannot be
matched and start with initial weights."""


def claiming(config: Any) -> Any:
    """The config with the target that its workload claims to reach."""
    return replace(config, target=config.target.claimed)


def quality_claims(bounds: Callable[[Any], dict[str, Any]]) -> Callable[[Any], tuple[Claim, ...]]:
    """The claims of a workload that claims nothing but to reach its target, whose `bounds` follow from a config."""

    def claims(config: Any) -> tuple[Claim, ...]:
        from ..runs.contract import quality_target

        return (quality_target(lambda *_: bounds(claiming(config))),)

    return claims


Named = str | Callable[..., Any]
"""The "module:attribute" of a function or class, which is imported when it is used; or a function that imports it."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One name a user types. Its torch-free facts are here; what needs torch is named and loaded when it is used."""

    name: str
    summary: str
    task: Task
    """What it predicts, and how that is scored, compared and shown."""
    config: type
    presets: Mapping[str, Callable[[], Any]]
    """Functions that return a config, by name; the first is the default."""
    estimate: Callable[[Any], Estimate]
    claims: Callable[[Any], tuple[Claim, ...]]
    """What the workload claims about a run with this config; `recperf check` tests each claim."""
    checks: Named
    """"module:function" that checks files and memory without training and returns a line that names the data."""
    build: Named
    """"module:Class" of its `Prepared`. A workload runs on several ranks where its config has a `DistributedConfig`."""
    plan: str | None = None
    """"module:function" that counts the work of a config for `recperf plan`."""
    plan_preset: str | None = None
    """Preset that `recperf plan` starts from where none is named; None: the first."""
    resolve: Callable[[Any], Any] = lambda config: config
    """Replaces values of a config that stand for what this machine has; a run saves and resumes the result."""
    datasets: Mapping[str, Callable[[Any, Dataset], Any]] = field(default_factory=dict)
    """By kind, the datasets that it can train on: functions that take a config and a dataset and return the config for
    that dataset. They are called before the fields on a command line are set."""
    serve: Named | None = None
    """"module:Class" of the `Served` model of a config, for scoring rows after training; None where rows are random."""
    id_tables: Mapping[str, str] = field(default_factory=dict)
    """The tensors of the model's state whose row k is that of id k of an event store, with the role of the id: users or
    items, one of `id_names`, or HASHED; or with the role rows, the stacked tables of all columns of clicks. Where there
    is one, a run can start from another on other data."""
    id_names: Named | None = None
    """"module:function" that lists, for a store of events, the names of ids of further roles, the k-th with row k + 1;
    None: those of features of items."""
    counted: tuple[str, ...] = ()
    """What the names of tensors begin with that every run counts from its own data; a run that starts from another
    hands those of the other to `Trial.take_over`."""
    with_rows: Callable[[Any], Any] | None = None
    """Sets the rows of these tables in a config to those that its events need; None: `resolve` does."""
    submission: str | None = None
    """"module:function" that returns the `Submission` of a trial, for workloads with an MLPerf log."""

    def check(self, config: Any) -> str:
        return str(load(self.checks)(config))

    def planned(self, config: Any) -> PlannedWorkload:
        if self.plan is None:
            raise UsageError(
                f"workload {self.name!r} does not count its work, so recperf plan cannot plan it",
                fix="recperf plan dlrm-v4",
            )
        planned: PlannedWorkload = load(self.plan)(config)
        return planned

    def prepare(self, config: Any) -> Prepared:
        """Read the data and choose device and switches, as one process or as one of several ranks."""
        world = current()
        # Rank 0 first: it may generate the data, and no other rank may read it half written.
        prepared: Prepared = world.leader_first(lambda: load(self.build)(config))
        world.require_same_data(prepared.data["digest"])
        return prepared


def load(name: Named) -> Any:
    """Import what "module:attribute" names; a function is itself."""
    if not isinstance(name, str):
        return name
    module, _, attribute = name.partition(":")
    try:
        imported = import_module(module)
    except ModuleNotFoundError as error:
        # Another module that is missing is for whoever wrote this one to explain.
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        imported = None
    if imported is None or not hasattr(imported, attribute):
        what = f"{name} cannot be imported: there is no {attribute if imported else f'module {module}'}"
        raise MachineError(what, fix="install the package that has it, or correct the name")
    return getattr(imported, attribute)
