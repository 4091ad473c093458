"""Sequences of items, from an event store or embedded, and how a model of the next item is scored on them: it ranks the
held-out items.

Shapes: N targets, I items, B histories, D width.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...data.events.store import own_ids
from ...data.next_item import NextItemData, PlantedSequences, Targets, digest_of, read
from ...data.next_item_batches import EventsOnDevice, SequenceBatch, SequenceOrder, histories
from ...distributed.balance import stride
from ...distributed.ranks import current
from ...errors import DataError
from ...execution.workload import TRAINED, HeldOutFacts, Predictions, Prepared, RankedTargets, ScoredRows, Trial
from ...learn.records import TargetsSeen
from ...stop import poll
from ...tasks import NEXT_ITEM
from ...train.baselines import Rules
from ...train.factor_items import factor_baseline
from ...train.item_rules import baselines
from ...train.linear_items import linear_baseline
from ...train.loop import Position
from ...train.next_item import Products, Ranked, Scorer, Seen, item_counts, rank, ranks_of, seen_by_default
from ...train.next_item import histories as earlier
from ...train.ranking import gains, list_quality
from .config import SequencesConfig

SCORING_BATCH = 512
"""Histories that are encoded at a time."""
EMBEDDED_SEED = 7


def planted(config: SequencesConfig) -> PlantedSequences:
    return PlantedSequences(config.users, config.groups, config.group_items, EMBEDDED_SEED)


def drawn(targets: Targets, most: int) -> Targets:
    """Those of some users, the same ones in every run; 0: all."""
    if not 0 < most < len(targets):
        return targets
    places = np.sort(np.random.default_rng(len(targets)).permutation(len(targets))[:most])
    return targets[places]


class SequenceSource:
    """The sequences that a config names."""

    def __init__(self, config: SequencesConfig, data: NextItemData | None = None) -> None:
        self.config = config
        self.data = data or (planted(config).data() if config.path is None else read(config.path, config))
        if config.train_share < 1.0:
            self.data = replace(self.data, train_share=config.train_share)
        self.train, self.test = self.data.train(), drawn(self.data.test(), config.test_users)
        if not len(self.test) or not len(self.train):
            what = f"{self.data.name} has no user with an item to train on and one to predict, split {self.data.kind}"
            raise DataError(what, fix="another --data.split, or import events of users with at least three items")

    def describe(self) -> str:
        facts = self.facts()
        return f"{facts['name']}, {facts['rows']:,} events, split {facts['split']}"

    def facts(self) -> dict[str, Any]:
        """What a result records about the data."""
        store, split = self.data.store, self.data.split
        note = "" if store is None or store.time_order == "time" else store.split_note
        return {
            "name": self.data.name,
            "digest": digest_of(self.data) if store is None else store.digest,
            "rows": len(self.data.items_E),
            "train_rows": int((self.train.ends_S - self.train.begins_S).sum()),
            "valid_rows": len(self.test),
            "synthetic": store is None or store.synthetic,
            **({"split": self.data.kind} if split is None else split.facts(note)),
        }

    @cached_property
    def seen(self) -> Seen:
        """Whether items of a history compete."""
        return seen_by_default(self.data) if self.config.seen == "auto" else self.config.seen

    @cached_property
    def validation(self) -> Targets:
        """Those that choose the epoch: of some users, the same ones in every run."""
        return drawn(self.data.validation(), self.config.validation_users)

    def oracle(self) -> dict[str, Any]:
        """Makes a rule that ranks by the true probabilities of embedded sequences; none for other data."""
        if self.config.path is not None:
            return {}
        truth = planted(self.config)

        def score(targets: Targets) -> Tensor:
            return torch.from_numpy(truth.scores(self.data, targets))

        return {"planted": lambda: score}


class RankedSequences(Prepared):
    """What ranks the held-out items of sequences; a model reads the `length` latest events of a history."""

    sequences: SequenceSource
    events: EventsOnDevice
    length: int

    @cached_property
    def item_events(self) -> NDArray[np.int64]:
        """Training events of each item."""
        return item_counts(self.sequences.data)

    def order(self, seed: int) -> SequenceOrder:
        """The order in which sequences are trained on."""
        train = self.config.train
        return SequenceOrder.of(
            self.sequences.data,
            self.events,
            length=self.length,
            batch_size=train.batch_size,
            seed=seed,
            all_windows=train.windows == "all",
        )

    @cached_property
    def baselines(self) -> dict[str, Callable[[], Scorer]]:
        """Makes the rules that count training events, each once."""
        return {name: cache(make) for name, make in baselines(self.sequences.data).items()}

    def ranks(self, targets: Targets, score: Any) -> Ranked:
        return rank(self.sequences.data, targets, score, seen=self.sequences.seen, device=self.settings.device)

    def ranking(self) -> RankedTargets:
        data = self.sequences.data
        rules = Rules({**self.sequences.oracle(), **self.baselines, **factor_baseline(data), **linear_baseline(data)})
        return RankedTargets(
            users_N=torch.from_numpy(self.sequences.test.users_N),
            items_N=torch.from_numpy(data.items_E[self.sequences.test.positions_N].astype(np.int64)),
            catalogue=self.sequences.data.items,
            repeats=self.sequences.seen == "kept",
            split=self.sequences.data.kind,
            baseline_ranks=rules.then(lambda rule: ranks_of(data, self.sequences.test, rule, seen=self.sequences.seen)),
        )

    def scored_rows(self) -> ScoredRows:
        return ScoredRows(torch.ones(len(self.sequences.test)), torch.from_numpy(self.sequences.test.users_N))

    def own_ids(self, role: str) -> Sequence[object] | None:
        store, padding = self.sequences.data.store, -self.sequences.data.padding_id
        if store is None:
            return None
        return own_ids(store, role) if role == "user" else [*("",) * padding, *own_ids(store, role)]

    def held_out_facts(self) -> HeldOutFacts:
        data, train, targets = self.sequences.data, self.sequences.train, self.sequences.test
        items_N, last_N = data.items_E[targets.positions_N], data.items_E[targets.ends_N - 1]
        rows_P, events_P = earlier(data, targets)
        in_history_N = np.bincount(rows_P, data.items_E[events_P] == items_N[rows_P], len(targets)) > 0
        long_S = train.ends_S - train.begins_S > 1
        ends_S = train.ends_S[long_S]
        seen = TargetsSeen(
            in_history=float(in_history_N.mean()),
            last=float((items_N == last_N).mean()),
            training=float((data.items_E[ends_S - 1] == data.items_E[ends_S - 2]).mean()) if len(ends_S) else 0.0,
        )
        counts = {"item": torch.from_numpy(self.item_events[items_N - 1])}
        return HeldOutFacts(training_rows=counts, targets=seen)

    def baseline_logits(self) -> dict[str, Tensor]:
        """Nothing is labelled: `ranking` has the baselines."""
        return {}

    def verified(self) -> dict[str, int] | None:
        store = self.sequences.data.store
        return store.verified() if store else None


MOST_PROBED = 1000
"""Targets whose histories are exchanged, at most."""


def _some(targets: Targets) -> Targets:
    step = max(1, -(-len(targets) // MOST_PROBED))
    return targets[::step]


def unchanged(batch: SequenceBatch) -> SequenceBatch:
    return batch


def last_exchanged(batch: SequenceBatch) -> SequenceBatch:
    """Each sequence ends with the last item of another one."""
    items_T, last_B = batch.items_T.clone(), batch.offsets_B1[1:] - 1
    items_T[last_B] = items_T[last_B].roll(1)
    return replace(batch, items_T=items_T)


def shuffled(batch: SequenceBatch) -> SequenceBatch:
    """The items of each sequence in another order, the same in every call."""
    draw = torch.Generator().manual_seed(len(batch.items_T))
    keys_T = torch.rand(len(batch.items_T), generator=draw, dtype=torch.float64).to(batch.items_T.device)
    return replace(batch, items_T=batch.items_T[(batch.rows_T + keys_T).argsort()])


def earlier_exchanged(batch: SequenceBatch) -> SequenceBatch:
    """What comes before the last item of a sequence is drawn from all sequences."""
    draw = torch.Generator().manual_seed(len(batch.items_T))
    items_T = batch.items_T[torch.randperm(len(batch.items_T), generator=draw).to(batch.items_T.device)]
    last_B = batch.offsets_B1[1:] - 1
    items_T[last_B] = batch.items_T[last_B]
    return replace(batch, items_T=items_T)


EXCHANGED = {"the last item": last_exchanged, "the order of items": shuffled, "earlier items": earlier_exchanged}
"""What is done to histories to see whether a model uses a part of them."""


class RankedTrial(Trial):
    """A model whose score of an item is the product of two vectors."""

    prepared: Any
    changed: Callable[[SequenceBatch], SequenceBatch] = staticmethod(unchanged)
    """What is done to histories before they are scored."""

    @abstractmethod
    def last(self, batch: SequenceBatch) -> Tensor:
        """The vector after the last position of each sequence."""

    @abstractmethod
    def item_vectors(self) -> Tensor:
        """The vectors of items 1 and up."""

    @torch.no_grad()
    def score(self, targets: Targets, vectors_ID: Tensor | None = None) -> Tensor:
        """Scores of all items, by their vectors, for the history before each target."""
        vectors_ID = self.item_vectors() if vectors_ID is None else vectors_ID
        return torch.cat([self.scored(self.last(batch) @ vectors_ID.t(), batch) for batch in self._histories(targets)])

    @torch.no_grad()
    def vectors(self, targets: Targets) -> Tensor:
        """The vectors of users before some targets."""
        return torch.cat([self.last(batch) for batch in self._histories(targets)])

    def _histories(self, targets: Targets) -> Iterator[SequenceBatch]:
        data, events, length = self.prepared.sequences.data, self.prepared.events, self.prepared.length
        for batch in histories(data, events, targets, length=length, batch_size=SCORING_BATCH):
            poll()
            yield self.changed(batch)

    def recommender(self) -> Callable[[int], Tensor]:
        test, vectors_ID = self.prepared.sequences.test, self.item_vectors()

        def score(place: int) -> Tensor:
            one = slice(place, place + 1)
            return self.score(test[one], vectors_ID)

        return score

    @property
    def by_products(self) -> bool:
        """Whether items are ranked by the products of the vectors of users and items alone."""
        return True

    def scored(self, products_BI: Tensor, batch: SequenceBatch) -> Tensor:
        """What items are ranked by, from these products."""
        return products_BI

    @torch.no_grad()
    def probes(self) -> Iterator[tuple[str, Tensor]]:
        sequences = self.prepared.sequences
        chosen, train = _some(sequences.validation), sequences.train
        long_S = train.ends_S - train.begins_S > 1
        if not len(chosen) or not long_S.any():
            return
        yield "", self._losses(chosen)
        yield TRAINED, self._losses(_some(Targets(train.users_S[long_S], train.ends_S[long_S] - 1)))
        for name, change in EXCHANGED.items():
            self.changed = change
            try:
                losses_N = self._losses(chosen)
            finally:
                self.changed = unchanged
            yield name, losses_N

    def _losses(self, targets: Targets) -> Tensor:
        ranks_N = self.ranked(targets).ranks_N
        return 1 - gains(ranks_N - 1, 0 * ranks_N)[NEXT_ITEM.leading]

    @torch.no_grad()
    def ranked(self, targets: Targets) -> Ranked:
        """The ranks of targets; of several processes each ranks its share."""
        vectors_ID, world = self.item_vectors(), current()
        parts = stride(len(targets), world.size)
        own = targets[parts[world.rank]]
        by_products = Products(self.vectors, vectors_ID)
        scorer: Scorer = by_products if self.by_products else lambda part: self.score(part, vectors_ID)
        ranked = self.prepared.ranks(own, scorer)
        order_N = torch.from_numpy(np.argsort(np.concatenate(parts)))
        gathered = zip(*world.all_gather((ranked.ranks_N, ranked.lists_NK)))
        ranks_N, lists_NK = (torch.cat(columns)[order_N] for columns in gathered)
        return Ranked(ranks_N, lists_NK, ranked.seen)

    def predictions(self, at: Position | None = None) -> Predictions:
        """The ranks of the test items."""
        test = self.prepared.sequences.test
        ranked, none = self.ranked(test), torch.zeros(0)
        lists = list_quality(ranked.lists_NK, self.prepared.sequences.data.items, self.prepared.item_events)
        return Predictions(none, none, torch.from_numpy(test.users_N), ranks_N=ranked.ranks_N, lists=lists)

    def metrics(self, predictions: Predictions) -> dict[str, float]:
        """Of the test items, and of the validation items, by which the epoch is chosen."""
        assert predictions.ranks_N is not None
        validation = self.ranked(self.prepared.sequences.validation)
        scored = self.prepared.ranking().metrics(predictions.ranks_N)
        return {**scored, NEXT_ITEM.choosing: validation.metrics()[NEXT_ITEM.leading]}
