"""The tables of DLRMv4: each distinct row of a batch is looked up once, and only these rows get a gradient.

Shapes: R rows of a table, D width, U distinct rows that a batch uses.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ...ops import lookup as ops
from ...ops.hashing import finalise_torch_, signed, stream
from ...ops.splitmix import GOLDEN
from ..init import generator
from .config import DLRMv4Config
from .inputs import Inputs

CHUNK = 1 << 22
"""Initial values drawn at a time, so that a table never needs its memory twice."""
STEP = 2.0**-23
"""24 random bits times this, minus 1, is an exact number in [-1, 1)."""


class DLRMv4Tables(nn.Module):
    """One tensor per table and, for row-wise Adagrad, one number per row.

    Tables are buffers, not parameters: no gradient of their size is ever made. `lookup` returns the used rows as
    leaves; after the backward passes of all parts of a batch, `gradients` yields theirs and `update` applies them.
    """

    frozen = False

    def __init__(self, config: DLRMv4Config, *, seed: int = 0, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.names = config.tables
        for name, rows in config.table_rows.items():
            self.register_buffer(name, torch.empty(rows, config.table_dim, device=device))
            self.register_buffer(f"{name}_state", torch.zeros(rows, device=device))
        self._rows: dict[str, Tensor] = {}
        self._leaves: dict[str, Tensor] = {}
        self.reset(seed)

    def requires_grad_(self, requires_grad: bool = True) -> DLRMv4Tables:
        """Freeze or train the tables."""
        super().requires_grad_(requires_grad)
        self.frozen = not requires_grad
        return self

    def table(self, name: str) -> Tensor:
        return self.get_buffer(name)

    def state(self, name: str) -> Tensor:
        """The Adagrad state of each row."""
        return self.get_buffer(f"{name}_state")

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """Draw rows uniform in +-1/sqrt(rows); a number depends on the seed, the table's name and its place alone."""
        for name in self.names:
            table_RD = self.table(name)
            fill_uniform_(table_RD, table_RD.shape[0] ** -0.5, table_seed(seed, name))
            self.state(name).zero_()
        self.forget()

    def lookup(self, inputs: Inputs) -> dict[str, Tensor]:
        """Return the rows that the batch uses in every table; parts of one batch share them, so gradients add up."""
        if inputs.rows is self._rows:
            return self._leaves
        leaves = {name: ops.gather(self.table(name), rows_U) for name, rows_U in inputs.rows.items()}
        if torch.is_grad_enabled() and not self.frozen:
            if any(True for _ in self.gradients()):
                raise RuntimeError("another batch has gradients: call update() or forget() before the next lookup")
            self._rows, self._leaves = inputs.rows, {name: leaf.requires_grad_() for name, leaf in leaves.items()}
        return leaves

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
        """Update the used rows by row-wise Adagrad."""
        for name, rows_U, gradient_UD in self.gradients():
            ops.rowwise_adagrad_(self.table(name), self.state(name), rows_U, gradient_UD, rate=rate, eps=eps)
        self.forget()

    def dense_gradient(self, name: str) -> Tensor:
        """The gradient of a whole table: for tests and small models."""
        gradient_RD = torch.zeros_like(self.table(name))
        for table, rows_U, gradient_UD in self.gradients():
            if table == name:
                gradient_RD[rows_U] = gradient_UD
        return gradient_RD


def table_seed(seed: int, name: str) -> int:
    return generator(seed, f"table.{name}").initial_seed()


@torch.no_grad()
def fill_uniform_(table_RD: Tensor, bound: float, seed: int, first_row: int = 0) -> None:
    """Fill with numbers in +-bound, the same bits on every device; a shard begins at `first_row` of the table."""
    flat, start_place, key = table_RD.view(-1), first_row * table_RD.shape[1], stream(seed)
    for start in range(0, flat.numel(), CHUNK):
        part = flat[start : start + CHUNK]
        places = torch.arange(part.numel(), device=flat.device)
        words = finalise_torch_(places.mul_(signed(GOLDEN)).add_(signed(key + GOLDEN * (start_place + start))))
        bits = words.bitwise_right_shift_(40).bitwise_and_((1 << 24) - 1)
        part.copy_(bits.to(torch.float32).mul_(STEP).sub_(1.0).mul_(bound))
