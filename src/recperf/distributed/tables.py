"""The tables of DLRMv4 on several ranks: TorchRec's EmbeddingCollection behind the same few methods.

A rank asks for the distinct rows its own samples use, so that each travels to it once. `lookup` runs TorchRec's forward
pass and hands out copies as leaves; `update` runs its backward pass with their gradients, in which fbgemm's row-wise
Adagrad changes the tables where they lie.

Shapes: R rows of a table, D width, U distinct rows that a rank's batch uses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..models.dlrm_v4.config import DLRMv4Config
from ..models.dlrm_v4.inputs import Inputs
from ..models.dlrm_v4.tables import CHUNK, fill_uniform_, table_seed
from .ahead import Ahead
from .config import DistributedConfig
from .library import require_torchrec
from .placing import Part, require_possible
from .replicated import Gathering, Replicated
from .sharding import copied_parts, held, set_rate, sharded, sharder_of
from .world import World

EPS = 1e-8
"""Of row-wise Adagrad; fbgemm wants to know it when tables are made."""


class TorchRecTables(nn.Module):
    """As `DLRMv4Tables`, with the rows of all ranks behind it. Every rank calls every method as often as the others."""

    def __init__(
        self,
        config: DLRMv4Config,
        options: DistributedConfig,
        world: World,
        *,
        ids: Mapping[str, float],
        batch_size: int,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        require_torchrec()
        require_possible(options, config.table_rows, config.table_dim, world)
        self.names, self.dim, self.world = config.tables, config.table_dim, world
        self.rows: Mapping[str, int] = config.table_rows
        self.remembered = 1
        self.place = torch.device(device)
        copied = {name for name, kind in options.shardings.items() if kind == "data-parallel"}
        self.copies = Replicated({n: r for n, r in self.rows.items() if n in copied}, self.dim, world, self.place)
        self.divided = tuple(name for name in self.names if name not in copied)
        self.parts = [part for name in sorted(copied) for part in copied_parts(name, self.rows[name], self.dim, world)]
        # Not a submodule: its parameters are no dense ones, and its state has a format of its own.
        self._engine: list[Any] = []
        if self.divided:
            self._engine.append(self._shard(options, ids, batch_size))
        self.ahead = Ahead(self._engine[0].module, self._asked, self.place) if self._engine else None
        self._rate = 0.0
        self._rows: dict[str, Tensor] = {}
        self._leaves: dict[str, Tensor] = {}
        self._outputs: dict[str, Tensor] = {}
        self._gathering: Gathering | None = None
        self.reset(seed)

    def _shard(self, options: DistributedConfig, ids: Mapping[str, float], batch_size: int) -> Any:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from torchrec.distributed.embedding import EmbeddingCollectionSharder
        from torchrec.modules.embedding_configs import EmbeddingConfig
        from torchrec.modules.embedding_modules import EmbeddingCollection

        tables = {name: self.rows[name] for name in self.divided}
        module = EmbeddingCollection(
            device=torch.device("meta"),
            tables=[
                EmbeddingConfig(name=name, embedding_dim=self.dim, num_embeddings=rows, feature_names=[name])
                for name, rows in tables.items()
            ],
        )
        sharder = sharder_of(EmbeddingCollectionSharder, options, optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD, eps=EPS)
        engine, parts = sharded(
            module, sharder, tables, ids, options, self.world, batch_size=batch_size, place=self.place
        )
        self.parts += parts
        return engine

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """The very numbers that one process draws: each a function of the seed, the table's name and its place."""
        for part, weight_RD, state_R in self.local():
            count = max(1, CHUNK // self.dim)
            for start in range(0, part.rows, count):
                rows = min(count, part.rows - start)
                # A row is drawn whole, and a rank that has some of its columns keeps those.
                whole = torch.empty(rows, self.dim, device=weight_RD.device)
                bound, first = self.rows[part.table] ** -0.5, part.first_row + start
                fill_uniform_(whole, bound, table_seed(seed, part.table), first_row=first)
                weight_RD[start : start + rows] = whole[:, part.first_column : part.first_column + part.columns]
            if state_R is not None:
                state_R.zero_()
        self.copies.reset(seed)
        self.forget()

    def local(self) -> list[tuple[Part, Tensor, Tensor | None]]:
        """The parts of divided tables on this rank, their rows, and what row-wise Adagrad remembers of them."""
        ours = [part for part in self.parts if part.rank == self.world.rank]
        return [found for engine in self._engine for found in held(engine, "embeddings", self.divided, ours)]

    def set_rate(self, rate: float) -> None:
        """Of the next update: fbgemm binds it to the lookup whose backward pass the update is."""
        self._rate = float(rate)
        for engine in self._engine:
            set_rate(engine, self._rate)

    def lookup(self, inputs: Inputs) -> dict[str, Tensor]:
        """The rows of every table that this rank's samples use."""
        if inputs.rows is self._rows:
            return self._leaves
        if torch.is_grad_enabled() and self._leaves:
            raise RuntimeError("gradients of another batch wait: call update() or forget() before the next lookup")
        gathering = self.copies.gather(inputs.rows) if torch.is_grad_enabled() else None
        outputs = self._looked_up(inputs.rows)
        if gathering:
            gathering.send()
        for name in self.copies.tables:
            outputs[name] = self.copies.lookup(name, inputs.rows[name])
        found = {name: outputs[name].detach() for name in inputs.rows}
        if torch.is_grad_enabled():
            self._rows, self._outputs, self._gathering = inputs.rows, outputs, gathering
            self._leaves = {name: leaf.requires_grad_() for name, leaf in found.items()}
        return found

    def follow(self, inputs: Inputs | None) -> None:
        """Say which batch comes after the next one: its ids travel while that one is computed."""
        if self.ahead:
            self.ahead.follow(None if inputs is None else inputs.rows)

    def _looked_up(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if not self.ahead:
            return {}
        found = self.ahead.lookup(rows, training=torch.is_grad_enabled())
        return {name: found[name].values() for name in self.divided}

    def _asked(self, rows: Mapping[str, Tensor]) -> Any:
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        asked = [rows[name].long() for name in self.divided]
        lengths = torch.tensor([ids.shape[0] for ids in asked], dtype=torch.int32, device=self.place)
        return KeyedJaggedTensor(list(self.divided), torch.cat(asked), lengths=lengths)

    def gradients(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """The table, the rows this rank used and their gradient, for every table that has one."""
        for name, leaf_UD in self._leaves.items():
            if leaf_UD.grad is not None:
                yield name, self._rows[name], leaf_UD.grad

    def forget(self) -> None:
        self._rows, self._leaves, self._outputs, self._gathering = {}, {}, {}, None

    def update(self, rate: float | Tensor, eps: float = EPS) -> None:
        """Row-wise Adagrad of the rows that any rank used. A rank that has no gradient sends zeros, which change
        nothing: the others wait for it."""
        if eps != EPS or float(rate) != self._rate:
            raise RuntimeError("fbgemm takes rate and eps when rows are looked up: call set_rate() before lookup()")
        given = {
            name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in self._leaves.items()
        }
        if self._engine:
            torch.autograd.backward(
                [self._outputs[name] for name in self.divided], [given[name] for name in self.divided]
            )
        if self._gathering:
            self.copies.update(self._gathering, given, rate, eps)
        self.forget()
