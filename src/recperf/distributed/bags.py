"""The tables of the click models on several ranks: TorchRec's EmbeddingBagCollection behind the models' seam.

Each rank brings the bags of its own samples and gets their sums back. `record` runs TorchRec's forward pass; `update`
runs its backward pass with the gradient that `backward` left, in which fbgemm's optimizer changes the tables where they
lie.

Shapes: B samples of this rank, M bags that every rank brings of a feature, F features, R rows of a table, D width,
V ids.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ..data.batch import JaggedFeatures
from ..errors import ConfigError
from ..models.embeddings import Embeddings, require_ids
from ..models.init import InitialRows
from ..models.tables import SparseTables
from ..ops import lookup as ops
from ..ops.bag import Name
from ..ops.bag.reference import stacked_rows
from .ahead import Ahead
from .config import DistributedConfig
from .library import require_torchrec
from .placing import Part, require_possible
from .replicated import Gathering
from .sharding import copied_parts, held, set_rate, sharded, sharder_of
from .world import World

Rule = Literal["sgd", "adagrad", "rowwise-adagrad"]
FBGEMM = {"sgd": "EXACT_SGD", "adagrad": "EXACT_ADAGRAD", "rowwise-adagrad": "EXACT_ROWWISE_ADAGRAD"}
"""The optimizers of ours that fbgemm has on a CPU and on a GPU, under its names. It has no dense AdamW at all."""
CHUNK = 1 << 22
"""Initial values placed at a time."""


@dataclass(frozen=True, eq=False)
class SharedFeatures(JaggedFeatures):
    """The bags of one rank's samples. Ranks bring equally many, since gloo's exchange of sums by rows wants that; those
    that a rank lacks are empty."""

    bags: int = 0
    """Of a feature, on every rank."""


class _Used:
    """The rows that this rank's bags use, each once, on their way to the others while the step is computed."""

    def __init__(self, rows_V: Tensor, offsets_N1: Tensor, world: World) -> None:
        bags = torch.arange(offsets_N1.numel() - 1, device=rows_V.device)
        bag_V = bags.repeat_interleave(offsets_N1.diff(), output_size=rows_V.numel())
        found = ops.unique(rows_V)
        self._bag_V, self._starts_U1 = bag_V[found.order_N], found.starts_U1
        self._gathering = Gathering({"rows": found.values_U}, world)

    def send(self) -> None:
        self._gathering.send()

    def of_all(self, gradient_ND: Tensor) -> tuple[Tensor, Tensor]:
        """All ranks' rows, and what the bags' gradient makes theirs."""
        summed_UD = ops.segment_sum(gradient_ND, self._bag_V, self._starts_U1)
        return self._gathering.rows()["rows"], self._gathering.of_all({"rows": summed_UD})["rows"]


class CopiedBags:
    """Tables of which every rank has a copy. Ranks send each other the rows they used, and in the update the summed
    gradients."""

    def __init__(
        self, rows: Mapping[str, int], dim: int, world: World, device: torch.device, *, remembered: int, eps: float,
        bag: Name = "auto",
    ) -> None:  # fmt: skip
        self.world, self.eps = world, eps
        self.bags = SparseTables(tuple(rows), tuple(rows.values()), dim, bag=bag, device=device)
        self.bags.group_early = False
        shape = (sum(rows.values()), dim) if remembered > 1 else (sum(rows.values()),)
        self.state_R = torch.zeros(shape, device=device) if remembered else None
        self._used: _Used | None = None

    @property
    def tables(self) -> dict[str, Tensor]:
        return {key: self.bags.table(key) for key in self.bags.keys}

    @property
    def states(self) -> dict[str, Tensor]:
        if self.state_R is None:
            return {}
        starts, rows = self.bags.starts, self.bags.rows
        return {key: self.state_R[s : s + r] for key, s, r in zip(self.bags.keys, starts, rows)}

    def reset(self, std: float, seed: int) -> None:
        self.bags.reset(std, seed)
        self.bags.forget()
        self._used = None
        if self.state_R is not None:
            self.state_R.zero_()

    @torch.no_grad()
    def tell(self, features: JaggedFeatures) -> None:
        """Begin to tell the other ranks which rows this one trains; `send` goes on once all know how many come."""
        rows_V = stacked_rows(features.values_V, features.offsets_FB1, self.bags.starts_F)
        self._used = _Used(rows_V, features.offsets_FB1, self.world)

    def send(self) -> None:
        if self._used:
            self._used.send()

    @torch.no_grad()
    def update(self, rate: float) -> None:
        """Every rank adds up what all ranks have, in the order of the ranks, so that copies stay equal to the bit."""
        tables, used = self.bags, self._used
        assert used, "rows are told when they are looked up"
        self._used = None
        rows_N, gradient_ND = used.of_all(tables.take_gradient().gradient_ND)
        offsets_N1 = torch.arange(rows_N.numel() + 1, device=rows_N.device)
        grouped = tables.bag.Grouped(rows_N, offsets_N1, tables.table_RD.shape[0], None)
        tables.bag.update(
            tables.table_RD, self.state_R, grouped, gradient_ND, rate=rate, eps=self.eps, decay=0.0, scale=1.0
        )


@dataclass(frozen=True)
class _Saved:
    """A forward pass, for its backward pass."""

    output_MW: Tensor | None
    """What TorchRec gave: the sums of all divided features side by side."""
    order: tuple[int, ...]
    """Which of the divided features each of them is."""
    rows_V: Tensor | None
    """What the copies used."""


class BagTables(Embeddings):
    """As `SparseTables`, with the rows of all ranks behind it. Every rank calls every method as often as the others."""

    def __init__(
        self,
        tables: Mapping[str, int],
        dim: int,
        options: DistributedConfig,
        world: World,
        *,
        optimizer: Rule,
        eps: float,
        ids: Mapping[str, float],
        batch_size: int,
        device: torch.device | str = "cpu",
        bag: Name = "auto",
    ) -> None:
        super().__init__()
        require_torchrec()
        require_possible(options, tables, dim, world, field="model.dim")
        self.world, self.rows, self.dim, self.place = world, tables, dim, torch.device(device)
        self.names = tuple(tables)
        self.optimizer, self.eps = optimizer, eps
        self.remembered = {"sgd": 0, "adagrad": dim, "rowwise-adagrad": 1}[optimizer]
        copied = tuple(name for name in self.names if options.shardings.get(name) == "data-parallel")
        self.divided = tuple(name for name in self.names if name not in copied)
        require_something_sent(options, bool(self.divided))
        self.copies = CopiedBags(
            {name: tables[name] for name in copied},
            dim,
            world,
            self.place,
            remembered=self.remembered,
            eps=eps,
            bag=bag,
        )
        self.parts: list[Part] = [part for name in copied for part in copied_parts(name, tables[name], dim, world)]
        # Not a submodule: its parameters are no dense ones, and its state has a format of its own.
        self._engine: list[Any] = []
        if self.divided:
            self._engine.append(self._shard(options, ids, batch_size))
        self.ahead = Ahead(self._engine[0].module, self._asked, self.place) if self._engine else None
        self.parts = [replace(part, remembered=self._kept(part)) for part in self.parts]
        self._rate = 0.0
        self._waiting: list[tuple[Tensor, Tensor]] = []

    def _kept(self, part: Part) -> int:
        return part.columns if self.remembered > 1 else self.remembered

    def _shard(self, options: DistributedConfig, ids: Mapping[str, float], batch_size: int) -> Any:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
        from torchrec.modules.embedding_configs import EmbeddingBagConfig
        from torchrec.modules.embedding_modules import EmbeddingBagCollection

        tables = {name: self.rows[name] for name in self.divided}
        module = EmbeddingBagCollection(
            device=torch.device("meta"),
            tables=[
                EmbeddingBagConfig(name=name, embedding_dim=self.dim, num_embeddings=rows, feature_names=[name])
                for name, rows in tables.items()
            ],
        )
        rule = getattr(EmbOptimType, FBGEMM[self.optimizer])
        sharder = sharder_of(EmbeddingBagCollectionSharder, options, optimizer=rule, eps=self.eps)
        engine, parts = sharded(
            module, sharder, tables, ids, options, self.world, batch_size=batch_size, place=self.place
        )
        self.parts += parts
        return engine

    @torch.no_grad()
    def reset(self, std: float, seed: int) -> None:
        """The very numbers that one process draws."""
        for part, weight_RD, state in self.local():
            rows = self.rows[part.table]
            initial = InitialRows(rows, self.dim, std=std or None, seed=seed, name=f"table.{part.table}")
            count = max(1, CHUNK // self.dim)
            for start in range(0, part.rows, count):
                these = min(count, part.rows - start)
                whole = torch.empty(these, self.dim)
                initial.fill_(whole, part.first_row + start)
                weight_RD[start : start + these] = whole[:, part.first_column : part.first_column + part.columns]
            if state is not None:
                state.zero_()
        self.copies.reset(std, seed)
        self._waiting = []

    def local(self) -> list[tuple[Part, Tensor, Tensor | None]]:
        """The parts of divided tables on this rank, their rows, and what the optimizer remembers of them."""
        ours = [part for part in self.parts if part.rank == self.world.rank]
        return [found for engine in self._engine for found in held(engine, "embedding_bags", self.divided, ours)]

    def check(self, features: JaggedFeatures) -> None:
        require_ids(features, self.names, tuple(self.rows[name] for name in self.names))

    def rows_of(self, features: JaggedFeatures) -> Tensor:
        """The row each id means, as if the tables stood one behind the other."""
        features, starts = features.trimmed(), [0]
        for name in self.names[:-1]:
            starts.append(starts[-1] + self.rows[name])
        return stacked_rows(features.values_V, features.offsets_FB1, torch.tensor(starts, device=self.place))

    @torch.no_grad()
    def forward(self, features: JaggedFeatures) -> dict[str, Tensor]:
        pooled_FBD, _ = self._pooled(features)
        return dict(zip(self.names, pooled_FBD.unbind(0)))

    def record(self, features: JaggedFeatures) -> tuple[Tensor, _Saved]:
        if self._waiting or self.copies.bags.used:
            raise RuntimeError("the gradient of another batch waits: call update() before the next lookup")
        # A loss that is written out is computed without autograd; only TorchRec's own part needs it.
        with torch.enable_grad():
            return self._pooled(features)

    def _pooled(self, features: JaggedFeatures) -> tuple[Tensor, _Saved]:
        if features.keys != self.names:
            raise ValueError(f"the batch has features {features.keys}, the tables {self.names}")
        copied = _chosen(features.trimmed(), self.copies.bags.keys) if self.copies.bags.keys else None
        telling = torch.is_grad_enabled()
        if telling and copied is not None:
            self.copies.tell(copied)
        # As it came: a batch that was begun before is known by being the very same object.
        output_MW, order = self._looked_up(features) if self._engine else (None, ())
        if telling:
            self.copies.send()
        features = features.trimmed()
        pooled_FBD = torch.empty(len(self.names), features.batch_size, self.dim, device=self.place)
        if output_MW is not None:
            sums_MFD = output_MW.detach().view(-1, len(order), self.dim)
            for place, index in enumerate(order):
                pooled_FBD[self.names.index(self.divided[index])] = sums_MFD[: features.batch_size, place]
        rows_V = None
        if copied is not None:
            copied_FBD, rows_V = self.copies.bags.record(copied)
            for key, rows_BD in zip(self.copies.bags.keys, copied_FBD):
                pooled_FBD[self.names.index(key)] = rows_BD
        return pooled_FBD, _Saved(output_MW, order, rows_V)

    def follow(self, features: JaggedFeatures | None) -> None:
        """Say which bags come after the next ones: their ids travel while those are computed."""
        if self.ahead:
            self.ahead.follow(features)

    def _looked_up(self, features: JaggedFeatures) -> tuple[Tensor, tuple[int, ...]]:
        assert self.ahead
        found = self.ahead.lookup(features, training=torch.is_grad_enabled())
        # The sharding decides in which order features come back.
        order: list[str] = found.keys()
        return found.values(), tuple(self.divided.index(key) for key in order)

    def _asked(self, features: JaggedFeatures) -> Any:
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        features = features.trimmed()
        asked = _chosen(features, self.divided)
        lengths_FB = asked.offsets_FB1.diff().view(len(self.divided), -1)
        lacking = features.bags - features.batch_size if isinstance(features, SharedFeatures) else 0
        lengths_FM = torch.nn.functional.pad(lengths_FB, (0, lacking)).int()
        return KeyedJaggedTensor(list(self.divided), asked.values_V, lengths=lengths_FM.view(-1))

    def backward(self, saved: _Saved, features: JaggedFeatures, gradient_FBD: Tensor) -> None:
        if saved.output_MW is not None:
            gradient_MFD = torch.zeros(saved.output_MW.shape[0], len(saved.order), self.dim, device=self.place)
            for place, index in enumerate(saved.order):
                gradient_BD = gradient_FBD[self.names.index(self.divided[index])]
                gradient_MFD[: gradient_BD.shape[0], place] = gradient_BD
            self._waiting.append((saved.output_MW, gradient_MFD.view(saved.output_MW.shape)))
        if saved.rows_V is not None:
            keys = self.copies.bags.keys
            copied_FBD = torch.stack([gradient_FBD[self.names.index(key)] for key in keys])
            self.copies.bags.backward(saved.rows_V, _chosen(features.trimmed(), keys), copied_FBD)

    def set_rate(self, rate: float) -> None:
        """Of the next update, before its rows are looked up."""
        self._rate = float(rate)
        for engine in self._engine:
            set_rate(engine, self._rate)

    def update(self, rate: float) -> None:
        """The optimizer's step of the rows that any rank used."""
        if float(rate) != self._rate:
            raise RuntimeError("fbgemm takes the rate when rows are looked up: call set_rate() before record()")
        waiting, self._waiting = self._waiting, []
        with warnings.catch_warnings():
            # TorchRec gathers row-wise gradients by a name that torch means to give up.
            warnings.simplefilter("ignore")
            for output_MW, gradient_MW in waiting:
                torch.autograd.backward([output_MW], [gradient_MW])
        if self.copies.bags.keys:
            self.copies.update(self._rate)


def require_something_sent(options: DistributedConfig, divided: bool) -> None:
    """Refuse a precision for what is never sent."""
    if options.all_to_all != "fp32" and not divided:
        raise ConfigError(
            f"distributed.all_to_all {options.all_to_all}: every rank has a copy of every table, so no rows are sent",
            where={"field": "distributed.all_to_all"},
            fix="--distributed.all-to-all fp32",
        )


def _chosen(features: JaggedFeatures, keys: tuple[str, ...]) -> JaggedFeatures:
    """Some of the features, in the order of `keys`."""
    if keys == features.keys:
        return features
    batch, indices = features.batch_size, [features.keys.index(key) for key in keys]
    lengths_FB = features.offsets_FB1.diff().view(len(features.keys), batch)[indices]
    parts = torch.split(features.values_V, list(features.ids_per_key))
    offsets = torch.nn.functional.pad(lengths_FB.reshape(-1).cumsum(0), (1, 0))
    return JaggedFeatures(keys, torch.cat([parts[index] for index in indices]), offsets, features.one_id_a_bag)
