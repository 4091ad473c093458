"""What the click workloads (micro-dlrm, micro-dlrm-dram, dlrm) share: where their rows come from, and their trials."""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..config import to_json
from ..data.batch import ClickBatch
from ..data.order import WHOLE, ClickOrder, RankShare, Samples
from ..data.rows.clicks import Clicks
from ..data.tables import MemoryRows, Rows
from ..distributed.balance import stride
from ..distributed.ranks import current
from ..distributed.shares import Division, SharedScores
from ..errors import notice_once
from ..execution.workload import TRAINED, HeldOutFacts, Predictions, Prepared, ScoredRows, Trial
from ..models.config import DLRMConfig
from ..models.dlrm import DLRM
from ..models.embeddings import StackedTables
from ..models.tables import SHARED, HashedTable, SparseTables
from ..stop import poll
from ..train.baselines import MOST_CHOOSING, bias_logits, synthetic_logits
from ..train.config import TrainConfig, one_cycle
from ..train.loop import Optimizer, Order, Position, Recipe
from ..train.metrics import binary_metrics
from ..train.ranking import Scorer
from .click_candidates import (
    ClickCatalogue,
    catalogue_of,
    fitted_step,
    imported_logits,
    scored_rows,
    training_rows,
)

if TYPE_CHECKING:
    from ..data.random_bags import RandomBags
    from ..data.rows.imported import ImportedClicks
    from ..data.tables import Split
    from ..models.tiers.cache import TieredRows

SCORING_BATCH = 8192
MOST_PROBED = 10_000
"""Rows that inputs are exchanged between, at most."""
NOTED_SHARE = 0.01
"""Share of the training rows from which on rare categories of a column are noted."""


class DrawnRows:
    """Batches that are drawn at random: each seed has rows of its own, without users and items."""

    choosing_rows, valid_rows = 0, None

    def __init__(self, bags: Callable[[int], RandomBags], name: str, config: Any, **determining: Any) -> None:
        data, batch = config.data, config.train.batch_size
        self.bags, self.seed, self.count, self.scoring_batch = bags, config.seed, data.held_out_batches, batch
        parts = {"data": to_json(data), "seed": config.seed, "batch": batch, **determining}
        self.data = {
            "name": name,
            "digest": hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest(),
            "rows": (data.batches + data.held_out_batches) * batch,
            "train_rows": data.batches * batch,
            "valid_rows": data.held_out_batches * batch,
            "split": "held-out stream",
            "synthetic": True,
        }

    def held_out(self, seed: int, rank_share: RankShare = WHOLE, split: Split = "valid") -> Iterable[ClickBatch]:
        return self.bags(seed).share(rank_share).held_out(self.count)

    def scored_rows(self) -> ScoredRows:
        return ScoredRows(torch.cat([batch.labels_B for batch in self.held_out(self.seed)]).cpu())

    def baseline_logits(self) -> dict[str, Tensor]:
        """The majority class, and the logits that labels were drawn from."""
        return synthetic_logits(self.bags(self.seed), self.count)

    def catalogue(self) -> None: ...

    def own_ids(self, role: str) -> None: ...

    def held_out_facts(self) -> HeldOutFacts:
        return HeldOutFacts()

    def verified(self) -> None: ...


class StoredRows:
    """Imported clicks, or ratings as clicks, read batch by batch."""

    scoring_batch = SCORING_BATCH

    def __init__(self, clicks: ImportedClicks | Clicks, device: torch.device | str) -> None:
        self.clicks, self.device, self.choosing_rows = clicks, device, clicks.count("choose")
        train, step = clicks.count("train"), 1 if isinstance(clicks, Clicks) else fitted_step(clicks)
        if not isinstance(clicks, Clicks):
            for name, (few, seen, share) in clicks.rare.items():
                if share >= NOTED_SHARE:
                    what = f"{few:,} of {seen:,} values of {name} share a table row, with {share:.0%} of training rows"
                    notice_once(f"{what}: each is in fewer than {clicks.manifest.min_count} of them")
        fitted = -(-train // step)
        chosen = -(-fitted // -(-fitted // MOST_CHOOSING))
        self.data = {
            **clicks.describe(),
            **({"baseline_rows": fitted} if step > 1 else {}),
            **({"chosen_rows": chosen} if chosen < fitted and not isinstance(clicks, Clicks) else {}),
        }

    def held_out(self, seed: int, rank_share: RankShare = WHOLE, split: Split = "valid") -> Iterable[ClickBatch]:
        order = ClickOrder(store=self.clicks, batch_size=SCORING_BATCH, seed=seed, split=split)
        return (batch.to(self.device) for batch in order.share(rank_share).cut())

    @cached_property
    def valid_rows(self) -> ScoredRows:
        return scored_rows(self.clicks)

    def scored_rows(self) -> ScoredRows:
        return self.valid_rows

    def baseline_logits(self) -> Mapping[str, Tensor]:
        if isinstance(self.clicks, Clicks):
            return bias_logits(self.samples("train"), self.samples("valid"))
        return imported_logits(self.clicks)

    def catalogue(self) -> ClickCatalogue | None:
        return catalogue_of(self.clicks, SCORING_BATCH)

    def own_ids(self, role: str) -> Sequence[object] | None:
        return self.clicks.own_ids(role)

    def held_out_facts(self) -> HeldOutFacts:
        from ..learn.leaks import areas, at_most, known_users, later_times, repeats

        clicks = self.clicks
        return HeldOutFacts(
            training_rows=training_rows(clicks), alone=areas(clicks), repeats=repeats(clicks), at_most=at_most(clicks),
            later={} if isinstance(clicks, Clicks) else later_times(clicks),
            known_users={} if isinstance(clicks, Clicks) else known_users(clicks),
        )  # fmt: skip

    def verified(self) -> dict[str, int] | None:
        return self.clicks.verified()

    def samples(self, split: Split) -> Samples:
        """The rows of a split in memory, for a model with one id per feature."""
        rows = self.clicks.rows_of(split, 0, self.clicks.count(split))
        return Samples(
            keys=self.clicks.keys,
            dense_ND=torch.from_numpy(rows.dense_ND),
            ids_FN=torch.from_numpy(rows.ids_NS.astype(np.int64)).t(),
            labels_N=torch.from_numpy(rows.labels_N).float(),
        )


class PreparedRows(Prepared):
    """Click rows from any source. Of a source, `data` are the facts that a result records, `scoring_batch` is the size
    of the batches that `held_out` yields, `choosing_rows` counts the training rows that are not trained on but choose
    the epoch, and `valid_rows` are the validation rows, None where each seed draws rows of its own."""

    source: DrawnRows | StoredRows

    @cached_property
    def _catalogue(self) -> ClickCatalogue | None:
        return self.source.catalogue()

    def catalogue(self) -> ClickCatalogue | None:
        return self._catalogue

    def baseline_scorers(self) -> Mapping[str, Scorer]:
        return {} if self._catalogue is None else self._catalogue.rules()

    def scored_rows(self) -> ScoredRows:
        return self.source.scored_rows()

    def baseline_logits(self) -> Mapping[str, Tensor]:
        return self.source.baseline_logits()

    def own_ids(self, role: str) -> Sequence[object] | None:
        return self.source.own_ids(role)

    def held_out_facts(self) -> HeldOutFacts:
        return self.source.held_out_facts()

    def verified(self) -> dict[str, int] | None:
        return self.source.verified()


class ClickTrialState(Trial):
    """The predictions of a trial on clicks, and their metrics."""

    prepared: Any
    seed: int
    ranks = Division()

    @abstractmethod
    def logits_of(self, batch: ClickBatch) -> Tensor: ...

    @torch.no_grad()
    def candidate_logits(self, rows_P: Tensor, items_P: Tensor) -> Tensor:
        device = self.prepared.settings.device
        batches = self.prepared.catalogue().batches(rows_P, items_P)
        return torch.cat([self.logits_of(batch.to(device)) for batch in batches])

    def held_out(self, split: Split = "valid") -> Iterator[tuple[ClickBatch, int]]:
        """This process's share of each batch of a split's rows, and the samples of the whole batch."""
        source, world = self.prepared.source, current()
        rows, size = self._rows(split), source.scoring_batch
        batches = source.held_out(self.seed, RankShare(world.rank, world.size), split)
        for number, batch in enumerate(batches):
            samples = min(size, rows - number * size)
            yield self.ranks.part(batch, samples), samples

    def _rows(self, split: Split) -> int:
        return int(self.prepared.data["valid_rows"] if split == "valid" else self.prepared.source.choosing_rows)

    @torch.no_grad()
    def _scored(self, split: Split) -> tuple[Tensor, Tensor]:
        """Logits and labels of a split's rows in their order; of several ranks each scores its share of a batch."""
        scores = SharedScores(current())
        for batch, samples in self.held_out(split):
            poll()
            scores.add(self.logits_of(batch), batch.labels_B, stride(samples, scores.world.size))
        return scores.gather(self._rows(split))

    def validation_loss(self) -> float:
        """The log loss of the rows that choose the epoch."""
        return binary_metrics(*self._scored("choose"))["log_loss"]

    @torch.no_grad()
    def probes(self) -> Iterator[tuple[str, Tensor]]:
        source = self.prepared.source
        if not isinstance(source, StoredRows) or not source.choosing_rows:
            return
        clicks = source.clicks
        chosen, trained = (clicks.every(split, -(-clicks.count(split) // MOST_PROBED)) for split in ("choose", "fit"))
        yield "", self._losses(chosen)
        times_N = clicks.times("fit")
        step = -(-clicks.count("fit") // MOST_PROBED)
        order_T = np.arange(len(trained)) if times_N is None else times_N[::step].argsort(kind="stable")
        yield TRAINED, self._losses(trained.take(order_T))
        order_N = np.random.default_rng(len(chosen)).permutation(len(chosen))
        for at, name in enumerate(clicks.dense_names if clicks.dense_names != ("constant",) else ()):
            dense_ND = chosen.dense_ND.copy()
            dense_ND[:, at] = dense_ND[order_N, at]
            yield name, self._losses(replace(chosen, dense_ND=dense_ND))
        for at, name in enumerate(clicks.keys):
            ids_NS, slots = chosen.ids_NS.copy(), slice(sum(clicks.slots[:at]), sum(clicks.slots[: at + 1]))
            ids_NS[:, slots] = ids_NS[order_N, slots]
            yield name, self._losses(replace(chosen, ids_NS=ids_NS))

    def _losses(self, rows: Rows) -> Tensor:
        """The log loss of each row."""
        clicks, device = self.prepared.source.clicks, self.prepared.settings.device
        store = MemoryRows(clicks.keys, clicks.slots, rows)
        batches = ClickOrder(store=store, batch_size=SCORING_BATCH, seed=0, split="valid").cut()
        logits_N = torch.cat([self.logits_of(batch.to(device)) for batch in batches]).cpu().double()
        labels_N = torch.from_numpy(rows.labels_N).double()
        return F.binary_cross_entropy_with_logits(logits_N, labels_N, reduction="none")

    def predictions(self, at: Position | None = None) -> Predictions:
        """Of the validation rows in their order."""
        logits_N, labels_N = self._scored("valid")
        rows = self.prepared.source.valid_rows
        return Predictions(logits_N, labels_N, rows and rows.users_N, rows and rows.items_N)

    def metrics(self, predictions: Predictions) -> dict[str, float]:
        return binary_metrics(predictions.logits_N, predictions.labels_N)


class DLRMTrialState(ClickTrialState):
    """The tables of a DLRM trial, and the state that a checkpoint saves."""

    model: DLRM
    optimizer: Optimizer

    def tiers(self) -> TieredRows | None:
        return getattr(self.model.embeddings, "tiers", None)

    def logits_of(self, batch: ClickBatch) -> Tensor:
        logits_B: Tensor = self.model(batch.dense_BD, batch.features)
        return logits_B

    def tables(self) -> list[tuple[str, int]]:
        """Name and rows of each table."""
        tables = self.model.embeddings
        if isinstance(tables, HashedTable):
            return [(SHARED, tables.rows)]
        if isinstance(tables, StackedTables | SparseTables):
            return list(zip(tables.keys, tables.rows))
        return list(zip(self.model.config.features, self.model.config.rows))

    def state(self) -> dict[str, Any]:
        return self.ranks.saved({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})

    def restore(self, state: dict[str, Any]) -> None:
        state = self.ranks.restored(state)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if isinstance(tables := self.model.embeddings, SparseTables | HashedTable):
            # A run that is resumed may use other implementations than a new one.
            self.prepared.settings.reasons["bag"] = tables.why


@dataclass(frozen=True)
class CopiedOrder:
    """Batches made on the host and copied to the device one step at a time."""

    order: RandomBags | ClickOrder
    device: torch.device
    pinned: bool

    def __len__(self) -> int:
        return len(self.order)

    def share(self, rank_share: RankShare) -> CopiedOrder:
        return replace(self, order=self.order.share(rank_share))

    def whole_samples(self, number: int) -> int:
        return self.order.whole_samples(number)

    def batches(self, epoch: int, start: int = 0) -> Iterator[ClickBatch]:
        for batch in self.order.batches(epoch, start):
            yield (batch.pin_memory() if self.pinned else batch).to(self.device, non_blocking=self.pinned)


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
