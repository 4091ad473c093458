"""The tables of the click models on several ranks: TorchRec's EmbeddingBagCollection behind the `Embeddings` interface.

Each rank looks up the bags of its own samples and gets their sums. `record` runs TorchRec's forward pass; `update` runs
its backward pass with the gradient that `backward` left, in which fbgemm's optimizer changes the tables in place.

Shapes: B samples of this rank, M bags per feature on every rank, F features, R rows of a table, D width, V ids.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..data.batch import ClickBatch, JaggedFeatures
from ..models.embeddings import Embeddings, pool, pool_backward, require_ids
from ..models.init import InitialRows
from ..models.tiers.config import Tiers
from ..ops.bag.reference import stacked_rows
from ..ops.table_rules import RuleName
from .config import Demand, DistributedConfig
from .rank_tables import ON_DEVICE, RankTables
from .ranks import Ranks


@dataclass(frozen=True, eq=False)
class SharedFeatures(JaggedFeatures):
    """The bags of one rank's samples. A row-wise exchange needs as many on every rank: missing ones are empty."""

    bags: int = 0
    """Bags per feature, on every rank."""


@dataclass(frozen=True)
class _Saved:
    """What the backward pass needs of a forward pass."""

    output_MW: Tensor | None
    """TorchRec's output: the sums of all sharded features side by side."""
    order: tuple[int, ...]
    """Which of the sharded features each of them is."""
    rows_V: Tensor | None
    """The rows of the copies that were used."""
    copied: JaggedFeatures | None
    """The bags that were looked up in copies."""


class BagTables(RankTables, Embeddings):
    """Like `SparseTables`, with the rows of all ranks behind it. Every rank calls every method equally often."""

    def __init__(
        self,
        demand: Demand,
        options: DistributedConfig,
        world: Ranks,
        *,
        optimizer: RuleName,
        eps: float,
        device: torch.device | str = "cpu",
        tiers: Tiers = ON_DEVICE,
    ) -> None:
        super().__init__(
            demand, options, world, optimizer=optimizer, eps=eps, device=device, field="model.dim", tiers=tiers
        )
        starts = [self.copies.starts[name] for name in self.copies.names]
        self._copy_starts = torch.tensor(starts, dtype=torch.int64, device=self.device)
        self._copy_gradient: tuple[Tensor, Tensor] | None = None
        """The gradient of all copies, and the rows that it is of."""
        self._pending: list[tuple[Tensor, Tensor]] = []
        """Outputs of forward passes and their gradients, for the next update."""

    def reset(self, std: float, seed: int) -> None:
        """Draw the initial values of a single process."""
        self.fill({
            name: InitialRows(rows, self.dim, std=std or None, seed=seed, name=f"table.{name}")
            for name, rows in self.rows.items()
        })  # fmt: skip
        self._pending, self._copy_gradient = [], None

    def check(self, features: JaggedFeatures) -> None:
        require_ids(features, self.names, tuple(self.rows[name] for name in self.names))

    def rows_of(self, features: JaggedFeatures) -> Tensor:
        """The row of each id, counted over all tables one after the other."""
        features, starts = features.trimmed(), [0]
        for name in self.names[:-1]:
            starts.append(starts[-1] + self.rows[name])
        return stacked_rows(features.values_V, features.offsets_FB1, torch.tensor(starts, device=self.device))

    @torch.no_grad()
    def forward(self, features: JaggedFeatures) -> dict[str, Tensor]:
        pooled_FBD, _ = self._pooled(features)
        return dict(zip(self.names, pooled_FBD.unbind(0)))

    def record(self, features: JaggedFeatures) -> tuple[Tensor, _Saved]:
        if self._pending or self._copy_gradient is not None:
            raise RuntimeError("another batch still has a gradient: call update() before the next lookup")
        # The model computes its loss without autograd; only TorchRec's part needs it.
        with torch.enable_grad():
            return self._pooled(features)

    def _pooled(self, features: JaggedFeatures) -> tuple[Tensor, _Saved]:
        if features.keys != self.names:
            raise ValueError(f"the batch has features {features.keys}, the tables {self.names}")
        # Untrimmed: a prefetched batch is recognised as the very same object.
        output_MW, order = self._lookup_shards(features) if self.sharded else (None, ())
        features = features.trimmed()
        pooled_FBD = torch.empty(len(self.names), features.batch_size, self.dim, device=self.device)
        if output_MW is not None:
            sums_MFD = output_MW.detach().view(-1, len(order), self.dim)
            for column, index in enumerate(order):
                pooled_FBD[self.names.index(self.sharded[index])] = sums_MFD[: features.batch_size, column]
        rows_V = copied = None
        if self.copies.names:
            copied = _select(features, self.copies.names)
            rows_V = stacked_rows(copied.values_V, copied.offsets_FB1, self._copy_starts)
            for name, pooled_BD in zip(self.copies.names, pool(rows_V, self.copies.table_RD, copied)):
                pooled_FBD[self.names.index(name)] = pooled_BD
        return pooled_FBD, _Saved(output_MW, order, rows_V, copied)

    def follow(self, part: ClickBatch | None, ready: Any = None) -> None:
        self.prefetch.follow(None if part is None else part.features, ready)

    def _lookup_shards(self, features: JaggedFeatures) -> tuple[Tensor, tuple[int, ...]]:
        output = self.prefetch.lookup(features)
        # The sharding decides in which order features come back.
        return output.values(), tuple(map(self.sharded.index, output.keys()))

    def _keyed(self, features: JaggedFeatures) -> Any:
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        features = features.trimmed()
        names = self.sharded
        ids = _select(features, names)
        lengths_FB = ids.offsets_FB1.diff().view(len(names), -1)
        missing = features.bags - features.batch_size if isinstance(features, SharedFeatures) else 0
        lengths_FM = torch.nn.functional.pad(lengths_FB, (0, missing)).int()
        return KeyedJaggedTensor(list(names), ids.values_V, lengths=lengths_FM.view(-1))

    def backward(self, saved: _Saved, features: JaggedFeatures, gradient_FBD: Tensor) -> None:
        if saved.output_MW is not None:
            gradient_MFD = torch.zeros(saved.output_MW.shape[0], len(saved.order), self.dim, device=self.device)
            for column, index in enumerate(saved.order):
                gradient_BD = gradient_FBD[self.names.index(self.sharded[index])]
                gradient_MFD[: gradient_BD.shape[0], column] = gradient_BD
            self._pending.append((saved.output_MW, gradient_MFD.view(saved.output_MW.shape)))
        if saved.rows_V is not None and saved.copied is not None:
            names, table_RD = self.copies.names, self.copies.table_RD
            copied_FBD = torch.stack([gradient_FBD[self.names.index(name)] for name in names])
            gradient_RD = pool_backward(saved.rows_V, copied_FBD, saved.copied, table_RD.shape[0])
            self._copy_gradient = gradient_RD, saved.rows_V

    def update(self, rate: float) -> None:
        """Update the rows that any rank used."""
        if float(rate) != self._rate:
            raise RuntimeError("fbgemm reads the rate in the lookup: call set_rate() before record()")
        pending, self._pending = self._pending, []
        with warnings.catch_warnings():
            # TorchRec gathers row-wise gradients by a function that torch deprecates.
            warnings.simplefilter("ignore")
            for output_MW, gradient_MW in pending:
                torch.autograd.backward([output_MW], [gradient_MW])
        self.prefetch.finish()
        self.updates += 1
        if self._copy_gradient is not None:
            gradient_RD, rows_V = self._copy_gradient
            self.copies.update(gradient_RD, self._rate, rows_V, self.updates)
            self._copy_gradient = None


def _select(features: JaggedFeatures, keys: tuple[str, ...]) -> JaggedFeatures:
    """Some of the features, in the order of `keys`."""
    if keys == features.keys:
        return features
    batch, indices = features.batch_size, [features.keys.index(key) for key in keys]
    lengths_FB = features.offsets_FB1.diff().view(len(features.keys), batch)
    parts = torch.split(features.values_V, list(features.ids_per_key))
    # Not indexed by a list: on a GPU the host would wait for its copy there.
    lengths = torch.cat([lengths_FB[index] for index in indices])
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    return JaggedFeatures(keys, torch.cat([parts[index] for index in indices]), offsets, features.one_id_a_bag)
