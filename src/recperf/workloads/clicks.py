"""What the trials of the click workloads (micro-dlrm, micro-dlrm-dram, dlrm) share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..data.batch import ClickBatch
from ..data.order import WHOLE, RankPart, Samples, cut, cut_part
from ..distributed.balance import stride
from ..distributed.ranks import current
from ..distributed.shares import Scores
from ..errors import ConfigError
from ..execution.workload import Predictions, Prepared, ScoredRows
from ..models.config import DLRMConfig
from ..models.dlrm import DLRM
from ..models.embeddings import PlacedFeatures, StackedTables
from ..models.tables import SHARED, HashedTable, SparseTables
from ..stop import poll
from ..train.baselines import MOST_TRAINING_ROWS, FeatureRows, bias_logits, click_rules
from ..train.config import TrainConfig, one_cycle
from ..train.feeds import prefetched
from ..train.loop import Optimizer, Order, Position, Recipe
from ..train.metrics import binary_metrics
from ..train.ranking import Scorer
from .click_candidates import AT_ONCE, ClickCatalogue, of_samples, strongest_feature

if TYPE_CHECKING:
    from ..data.click_store.columns import Rows, Split
    from ..data.click_store.imported import ImportedClicks
    from ..models.tiers.cache import TieredRows

SCORING_BATCH = 8192
SPLITS: tuple[Split, Split] = ("train", "valid")


class PreparedSamples(Prepared):
    """Training and validation rows in memory, on the host."""

    train: Samples | None
    valid: Samples
    choosing: Samples | None = None
    """Training rows that are not trained on but choose the epoch."""
    scoring_batch = SCORING_BATCH

    @property
    def choosing_rows(self) -> int:
        return 0 if self.choosing is None else len(self.choosing)

    @property
    def valid_rows(self) -> ScoredRows | None:
        """The validation rows with their users and items; None where each seed draws rows of its own."""
        return None if self.train is None else self.scored_rows()

    def scored_rows(self) -> ScoredRows:
        return ScoredRows(self.valid.labels_N, self.valid.users_N, self.valid.items_N, self.valid.times_N)

    def baseline_logits(self) -> dict[str, Tensor]:
        assert self.train is not None
        return bias_logits(self.train, self.valid)

    @cached_property
    def _catalogue(self) -> ClickCatalogue | None:
        return None if self.train is None else of_samples(self.train, self.valid, SCORING_BATCH)

    def catalogue(self) -> ClickCatalogue | None:
        return self._catalogue

    def baseline_scorers(self) -> dict[str, Scorer]:
        return {} if self._catalogue is None else self._catalogue.rules()

    def strongest_feature(self) -> tuple[str, float] | None:
        return None if self.train is None else strongest_feature(self.train, self.valid)

    @cached_property
    def _on_device(self) -> dict[Split, Samples]:
        scored: dict[Split, Samples | None] = {"valid": self.valid, "choose": self.choosing}
        return {split: rows.to(self.settings.device) for split, rows in scored.items() if rows is not None}

    def held_out(self, seed: int, part: RankPart = WHOLE, split: Split = "valid") -> Iterable[ClickBatch]:
        """The rows of a split on the device that trains, or a part of each batch of them."""
        valid = self._on_device[split]
        return cut(valid, SCORING_BATCH) if part == WHOLE else cut_part(valid, SCORING_BATCH, part)


def imported_rows(clicks: ImportedClicks, split: Split = "valid") -> ScoredRows:
    """The labels, users, items and times of imported clicks."""
    labels_N = torch.from_numpy(clicks.labels(split)).float()
    columns = (clicks.role_ids("user", split), clicks.role_ids("item", split), clicks.times(split))
    return ScoredRows(labels_N, *(None if column is None else torch.from_numpy(column) for column in columns))


def imported_logits(clicks: ImportedClicks) -> dict[str, Tensor]:
    """Of baselines on the features of imported clicks."""
    roles = {role: getattr(clicks.manifest, role) for role in ("user", "item")}
    names = {role: name if name in clicks.keys else None for role, name in roles.items()}
    step = _fitted_step(clicks)
    before = _items_before(clicks, step)
    train = _feature_rows(clicks, clicks.every("train", step), {key: ids[0] for key, ids in before.items()})
    if clicks.count("choose"):
        train = replace(train, chooses_N=torch.from_numpy(clicks.chooses()[::step]))
    rules = click_rules(train, **names)
    logits: dict[str, list[Tensor]] = {name: [] for name in rules}
    for first in range(0, clicks.count("valid"), AT_ONCE):
        part = slice(first, first + AT_ONCE)
        valid = clicks.rows_of("valid", part.start, part.stop)
        rows = _feature_rows(clicks, valid, {key: ids[1][part] for key, ids in before.items()})
        for name, rule in rules.items():
            logits[name].append(rule(rows))
    return {name: torch.cat(parts) for name, parts in logits.items()}


def imported_facts(clicks: ImportedClicks) -> dict[str, Any]:
    """Facts about imported clicks for a result."""
    train, step = clicks.count("train"), _fitted_step(clicks)
    return {**clicks.describe(), **({"baseline_rows": -(-train // step)} if step > 1 else {})}


def _fitted_step(clicks: ImportedClicks) -> int:
    """Baselines are fitted on every so many training rows."""
    return -(-clicks.count("train") // MOST_TRAINING_ROWS)


def _items_before(clicks: ImportedClicks, step: int) -> dict[str, tuple[Tensor, Tensor]]:
    """The last item that the user of every `step`-th training row, and of each validation row, had at an earlier time
    (0: none), and the pair of it and the row's own item, with one number for all pairs that no such training row has;
    empty where rows have no user, item or time."""
    sides = [(clicks.role_ids("user", split), clicks.role_ids("item", split), clicks.times(split)) for split in SPLITS]
    if any(column is None for side in sides for column in side):
        return {}
    users_N, items_N, times_N = (np.concatenate(columns) for columns in zip(*sides))
    order_N = np.lexsort((times_N, users_N))
    users_N, times_N = users_N[order_N], times_N[order_N]
    # Rows of one moment have the same item before.
    begins_N = np.append(True, (users_N[1:] != users_N[:-1]) | (times_N[1:] != times_N[:-1]))
    place_N = np.maximum.accumulate(np.where(begins_N, np.arange(len(users_N)), 0)) - 1
    known_N = (place_N >= 0) & (users_N[place_N] == users_N)
    before_N = np.zeros(len(users_N), np.int64)
    before_N[order_N] = np.where(known_N, items_N[order_N][place_N] + 1, 0)
    count, spread = clicks.count("train"), items_N.max() + 2
    parts = [(before_N[part], items_N[part]) for part in (slice(0, count, step), slice(count, None))]
    fitted, valid = (before * spread + items for before, items in parts)
    known, pairs_N = np.unique(fitted, return_inverse=True)
    place_V = np.searchsorted(known, valid)
    place_V[known[np.minimum(place_V, len(known) - 1)] != valid] = len(known)
    columns = {"item before": [before for before, _ in parts], "items in turn": [pairs_N, place_V]}
    return {key: (torch.from_numpy(train), torch.from_numpy(scored)) for key, (train, scored) in columns.items()}


def _feature_rows(clicks: ImportedClicks, rows: Rows, before: dict[str, Tensor] | None = None) -> FeatureRows:
    columns = torch.split(torch.from_numpy(rows.ids_NS).long(), list(clicks.slots), dim=1)
    ids = {key: column[:, 0] if column.shape[1] == 1 else column for key, column in zip(clicks.keys, columns)}
    dense_ND = torch.from_numpy(rows.dense_ND)
    if not clicks.columns.numeric:
        dense_ND = dense_ND[:, :0]
    labels_N = torch.from_numpy(rows.labels_N).float()
    return FeatureRows(dense_ND=dense_ND, ids=ids, labels_N=labels_N, before=before or {})


def imported_strongest(clicks: ImportedClicks) -> tuple[str, float] | None:
    """The column of imported clicks whose own AUC is highest; of columns with several categories none is considered."""
    sides = []
    for split in SPLITS:
        step = -(-clicks.count(split) // MOST_TRAINING_ROWS)
        rows = _feature_rows(clicks, clicks.every(split, step))
        ids = {key: ids_N for key, ids_N in rows.ids.items() if ids_N.dim() == 1}
        columns = list(ids.values())
        ids_FN = torch.stack(columns) if columns else torch.zeros(0, len(rows.labels_N), dtype=torch.int64)
        sides.append(
            Samples(
                keys=tuple(ids),
                dense_ND=rows.dense_ND,
                ids_FN=ids_FN,
                labels_N=rows.labels_N,
                dense_names=clicks.dense_names if rows.dense_ND.shape[1] else (),
            )
        )
    return strongest_feature(*sides)


def imported_samples(clicks: ImportedClicks) -> tuple[Samples, Samples, Samples, Samples]:
    """The rows of the splits train, valid, fit and choose of imported clicks in memory, for a model with one id per
    feature."""

    def samples(split: Split) -> Samples:
        rows = clicks.rows_of(split, 0, clicks.count(split))
        return Samples(
            keys=clicks.keys,
            dense_ND=torch.from_numpy(rows.dense_ND),
            ids_FN=torch.from_numpy(rows.ids_NS.astype(np.int64)).t(),
            dense_names=clicks.dense_names,
            **vars(imported_rows(clicks, split)),
        )

    return samples("train"), samples("valid"), samples("fit"), samples("choose")


def require_tables(model: DLRMConfig, clicks: ImportedClicks) -> None:
    """Refuse a model whose tables or dense features are not those of the data, as in a config of other rows."""
    needed, rows = dict(zip(clicks.keys, clicks.table_rows)), dict(zip(model.features, model.rows))
    differing = next((key for key in (*needed, *rows) if rows.get(key) != needed.get(key)), None)
    if differing is not None:
        sizes = (f"{table[differing]:,} rows" if differing in table else "no table" for table in (rows, needed))
        what = f"for column {differing!r} the model has {next(sizes)}, the data needs {next(sizes)}"
    elif model.dense != len(clicks.dense_names):
        what = f"the model has {model.dense:,} dense features, the data {len(clicks.dense_names):,}"
    elif model.features != clicks.keys:
        what = "the model has the tables of the data in another order"
    else:
        return
    fix = f"recperf run dlrm --data {clicks.manifest.name}"
    raise ConfigError(what, where={"field": "model", "data": clicks.manifest.name}, fix=fix)


class DLRMTrialState:
    """The tables of a DLRM trial, the metrics of its predictions, and the state that a checkpoint saves."""

    prepared: Any
    seed: int
    model: DLRM
    optimizer: Optimizer

    def tiers(self) -> TieredRows | None:
        return getattr(self.model.embeddings, "tiers", None)

    def logits_of(self, batch: ClickBatch) -> Tensor:
        logits_B: Tensor = self.model(batch.dense_BD, batch.features)
        return logits_B

    @torch.no_grad()
    def candidate_logits(self, rows_P: Tensor, items_P: Tensor) -> Tensor:
        device = self.prepared.settings.device
        batches = self.prepared.catalogue().batches(rows_P, items_P)
        return torch.cat([self.logits_of(batch.to(device)) for batch in batches])

    def held_out(self, split: Split = "valid") -> Iterator[tuple[ClickBatch, int]]:
        """This process's part of each batch of a split's rows, and the samples of the whole batch."""
        prepared, world = self.prepared, current()
        rows, size = self._rows(split), prepared.scoring_batch
        batches = prepared.held_out(self.seed, RankPart(world.rank, world.size), split)
        for number, batch in enumerate(batches):
            yield batch, min(size, rows - number * size)

    def _rows(self, split: Split) -> int:
        return int(self.prepared.data["valid_rows"] if split == "valid" else self.prepared.choosing_rows)

    @torch.no_grad()
    def _scored(self, split: Split) -> tuple[Tensor, Tensor]:
        """Logits and labels of a split's rows in their order; of several ranks each scores its part of a batch."""
        scores = Scores(current())
        for batch, samples in self.held_out(split):
            poll()
            scores.add(self.logits_of(batch), batch.labels_B, stride(samples, scores.world.size))
        return scores.gather(self._rows(split))

    def validation_loss(self) -> float:
        """The log loss of the rows that choose the epoch."""
        return binary_metrics(*self._scored("choose"))["log_loss"]

    def predictions(self, at: Position | None = None) -> Predictions:
        """Of the validation rows in their order."""
        logits_N, labels_N = self._scored("valid")
        rows = self.prepared.valid_rows
        return Predictions(logits_N, labels_N, rows and rows.users_N, rows and rows.items_N)

    def metrics(self, predictions: Predictions) -> dict[str, float]:
        return binary_metrics(predictions.logits_N, predictions.labels_N)

    def tables(self) -> list[tuple[str, int]]:
        """Name and rows of each table."""
        tables = self.model.embeddings
        if isinstance(tables, HashedTable):
            return [(SHARED, tables.rows)]
        assert isinstance(tables, StackedTables | SparseTables)
        return list(zip(tables.keys, tables.rows))

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if isinstance(tables := self.model.embeddings, SparseTables | HashedTable):
            # A run that is resumed may use other implementations than a new one.
            self.prepared.settings.reasons["bag"] = tables.why


@dataclass(frozen=True)
class PlacedOrder:
    """Batches whose rows are in the cache of tables in tiers, placed there while earlier steps run."""

    order: Order
    tables: SparseTables | HashedTable
    device: torch.device

    def __len__(self) -> int:
        return len(self.order)

    def batches(self, epoch: int, start: int = 0) -> Iterator[ClickBatch]:
        tiers, owner = self.tables.tiers, object()
        assert tiers is not None

        def place(batch: ClickBatch) -> ClickBatch:
            return replace(batch, features=self.tables.place(batch.features, owner))

        def finish(batch: ClickBatch) -> None:
            assert isinstance(batch.features, PlacedFeatures)
            tiers.finish(batch.features.placed)

        batches = self.order.batches(epoch, start)
        return prefetched(batches, place, self.device, depth=tiers.config.depth, finished=finish, waited=tiers.waited)


def one_cycle_recipe(model: DLRM, optimizer: Optimizer, order: Order, settings: TrainConfig) -> Recipe:
    """A training whose learning rate rises and falls once over all planned epochs."""
    planned = settings.epochs * len(order)
    return Recipe(
        model=model,
        optimizer=optimizer,
        order=order,
        learning_rate=lambda step: one_cycle(step, planned, peak=settings.learning_rate, rise=settings.rise),
        epochs=settings.epochs,
        max_steps=settings.max_steps,
    )


def largest_product(model: DLRMConfig, batch: int) -> int:
    """FLOPs of the largest matrix product of a step."""
    stacks = [model.bottom, model.top_widths]
    if model.interaction == "dcn":
        stacks.append((model.interaction_width, model.cross_rank))
    return max(2 * batch * before * after for widths in stacks for before, after in zip(widths, widths[1:]))
