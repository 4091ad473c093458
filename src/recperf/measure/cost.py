"""Counts the FLOPs and bytes of a component from its shapes. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """FLOPs (a multiply-add is two) and bytes read plus written, with each tensor counted once."""

    flops: int = 0
    bytes: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes)


FLOAT = 4
INDEX = 8


def mlp_forward(widths: tuple[int, ...], batch: int) -> Cost:
    """Each layer reads its input, weights and bias and writes its output."""
    total = Cost()
    for before, after in zip(widths, widths[1:]):
        total += Cost(2 * batch * before * after, FLOAT * (batch * before + before * after + after + batch * after))
    return total


def mlp_backward(widths: tuple[int, ...], batch: int, *, input_gradient: bool) -> Cost:
    """Each layer reads its input, weights and output gradient and writes weight gradients and maybe input gradients."""
    total = Cost()
    for index, (before, after) in enumerate(zip(widths, widths[1:])):
        products = 2 if index or input_gradient else 1
        moved = batch * before + batch * after + before * after + after
        if products == 2:
            moved += before * after + batch * before
        total += Cost(2 * products * batch * before * after, FLOAT * moved)
    return total


def bag_forward(ids: int, bags: int, dim: int, unique: int) -> Cost:
    """Reads an index per id and each different row once, writes a row per bag; adds in bags of several ids."""
    return Cost(max(0, ids - bags) * dim, ids * INDEX + unique * FLOAT * dim + bags * FLOAT * dim)


def bag_backward_dense(ids: int, bags: int, dim: int, rows: int) -> Cost:
    """Clears a gradient of the size of the table, then adds the gradient of a bag to the row of each id."""
    return Cost(ids * dim, FLOAT * rows * dim + bags * FLOAT * dim + ids * (INDEX + 2 * FLOAT * dim))


def sparse_update(ids: int, unique: int, dim: int, *, state: int, flops: int, bags: int | None = None) -> Cost:
    """Reads a gradient row per bag (without `bags`: per id), and reads and writes each different table row with its
    `state` numbers; `flops` for each of their weights."""
    gradients = ids if bags is None else bags
    moved = FLOAT * dim * (gradients + 2 * unique) + INDEX * ids + 2 * FLOAT * unique * state
    return Cost(dim * (ids + flops * unique), moved)


def dense_update(parameters: int, *, states: int, flops: int) -> Cost:
    """Reads weight, gradient and states, writes weight and states."""
    return Cost(flops * parameters, (3 + 2 * states) * FLOAT * parameters)


def adamw_update(parameters: int) -> Cost:
    """Reads weight, gradient and two moments, writes weight and moments; about 14 FLOPs per parameter."""
    return dense_update(parameters, states=2, flops=14)
