"""The tables of DLRMv4: each distinct row of a batch is looked up once, and only these rows get a gradient.

Shapes: R rows of a table, D width, U distinct rows that a batch uses.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...ops import lookup as ops
from ...ops.table_rules import RULES, RuleName
from ..init import UniformRows, generator
from ..tiers.cache import TieredRows
from ..tiers.columns import RowBlock, TableColumns, require_read
from .config import DLRMv4Config
from .inputs import Inputs

ROWWISE_ADAGRAD: RuleName = "rowwise-adagrad"


class DLRMv4Tables(nn.Module):
    """One tensor per table and one of its rows' optimizer state, where the rule has some.

    Tables are buffers, not parameters: no gradient of their size is ever made. `lookup` returns the used rows as
    leaves; after the backward passes of all parts of a batch, `gradients` yields theirs and `update` applies them.
    """

    frozen = False
    updates: Tensor | None
    """The number of updates, where the rule needs it."""

    def __init__(
        self,
        config: DLRMv4Config,
        rule: RuleName = ROWWISE_ADAGRAD,
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.config, self.names, self.rule = config, config.tables, RULES[rule]
        self._rows: dict[str, Tensor] = {}
        self._leaves: dict[str, Tensor] = {}
        self._allocate(device)
        self.register_buffer("updates", self.rule.no_updates(device))
        self.reset(seed)

    def _allocate(self, device: torch.device | str) -> None:
        for name, rows in self.config.table_rows.items():
            shape = self.rule.state_shape(rows, self.config.table_dim)
            self.register_buffer(name, torch.empty(rows, self.config.table_dim, device=device))
            self.register_buffer(f"{name}_state", None if shape is None else torch.zeros(shape, device=device))

    def requires_grad_(self, requires_grad: bool = True) -> DLRMv4Tables:
        """Freeze or train the tables."""
        super().requires_grad_(requires_grad)
        self.frozen = not requires_grad
        return self

    def table(self, name: str) -> Tensor:
        return self.get_buffer(name)

    def state(self, name: str) -> Tensor | None:
        """The optimizer state of each row."""
        state: Tensor | None = getattr(self, f"{name}_state")
        return state

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """Draw rows uniform in +-1/sqrt(rows); a number depends on the seed, the table's name and its place alone."""
        for name in self.names:
            initial_table(seed, name, *self.table(name).shape).fill_(self.table(name))
            if (state := self.state(name)) is not None:
                state.zero_()
        self._start()

    def _start(self) -> None:
        if self.updates is not None:
            self.updates.zero_()
        self.forget()

    def lookup(self, inputs: Inputs) -> dict[str, Tensor]:
        """Return the rows that the batch uses in every table; parts of one batch share them, so gradients add up."""
        rows = self.places(inputs)
        if rows is self._rows:
            return self._leaves
        leaves = {name: ops.gather(self.table(name), rows_U) for name, rows_U in rows.items()}
        if torch.is_grad_enabled() and not self.frozen:
            if any(True for _ in self.gradients()):
                raise RuntimeError("another batch has gradients: call update() or forget() before the next lookup")
            self._rows, self._leaves = rows, {name: leaf.requires_grad_() for name, leaf in leaves.items()}
        return leaves

    def places(self, inputs: Inputs) -> dict[str, Tensor]:
        """Where the rows of a batch lie in the tensors that `table` returns."""
        return inputs.rows

    def gradients(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield the name, the used rows and their gradient of every table that has a gradient."""
        for name, leaf_UD in self._leaves.items():
            if leaf_UD.grad is not None:
                yield name, self._rows[name], leaf_UD.grad

    def forget(self) -> None:
        """Drop rows and gradients."""
        self._rows, self._leaves = {}, {}

    @torch.no_grad()
    def update(self, rate: float | Tensor, eps: float = 1e-8) -> None:
        """Update the used rows by the rule."""
        if self.updates is not None:
            self.updates += 1
        count = 1 if self.updates is None else self.updates
        for name, rows_U, gradient_UD in self.gradients():
            rows = self.table(name), self.state(name), rows_U, gradient_UD
            ops.update_rows_(*rows, rule=self.rule.name, rate=rate, eps=eps, count=count)
        self.forget()

    def dense_gradient(self, name: str) -> Tensor:
        """The gradient of a whole table: for tests and small models."""
        gradient_RD = torch.zeros_like(self.table(name))
        for table, rows_U, gradient_UD in self.gradients():
            if table == name:
                gradient_RD[rows_U] = gradient_UD
        return gradient_RD


class TieredDLRMv4Tables(DLRMv4Tables):
    """The same tables in tiers: `table` is the cache of the device, and a batch to train on has been placed in it.
    Batches that are only scored read rows where they lie."""

    def __init__(
        self, config: DLRMv4Config, tiers: TieredRows, rule: RuleName = ROWWISE_ADAGRAD, *, seed: int = 0
    ) -> None:
        self.tiers = tiers
        super().__init__(config, rule, seed=seed, device=tiers.device)

    def _allocate(self, device: torch.device | str) -> None:
        """The cache is there already, and rows get their initial values when they are needed."""

    def table(self, name: str) -> Tensor:
        return self.tiers.cache_SD

    def state(self, name: str) -> Tensor | None:
        shape = self.rule.state_shape(*self.tiers.cache_SD.shape)
        return None if shape is None else self.tiers.state_SK.view(shape)

    def reset(self, seed: int) -> None:
        dim = self.config.table_dim
        initial = {name: initial_table(seed, name, rows, dim) for name, rows in self.config.table_rows.items()}
        self._initial, self.tiers.initial = initial, lambda name, rows_U: initial[name].rows(rows_U)
        self.tiers.clear()
        self._start()

    def lookup(self, inputs: Inputs) -> dict[str, Tensor]:
        if inputs.placed is None:
            dim = self.config.table_dim
            return {name: self.tiers.records({name: rows_U})[:, :dim] for name, rows_U in inputs.rows.items()}
        return super().lookup(inputs)

    def columns(self) -> dict[str, TableColumns]:
        """The tensors that these tables would have on the device."""
        dim = self.config.table_dim
        leaves: dict[str, TableColumns] = {}
        for name, rows in self.config.table_rows.items():
            blocks, initial = [RowBlock(0, rows, self.tiers.starts[name])], self._initial[name].description
            leaves[name] = TableColumns(self.tiers, (rows, dim), blocks, slice(0, dim), initial)
            if (shape := self.rule.state_shape(rows, dim)) is not None:
                columns = slice(dim, self.tiers.store.width)
                leaves[f"{name}_state"] = TableColumns(self.tiers, shape, blocks, columns, {"kind": "zero"})
        return leaves

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update({prefix + name: leaf for name, leaf in self.columns().items()})

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        """Reading a checkpoint has loaded the rows."""
        if self.updates is not None:
            self.updates.copy_(state_dict[f"{prefix}updates"])
        for name in self.columns():
            require_read(state_dict.get(prefix + name))

    def places(self, inputs: Inputs) -> dict[str, Tensor]:
        self.tiers.require_in_flight(inputs.placed)
        return inputs.slots


def initial_table(seed: int, name: str, rows: int, dim: int) -> UniformRows:
    return UniformRows(rows, dim, seed=generator(seed, f"table.{name}").initial_seed())
