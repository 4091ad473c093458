"""The optimizers of embedding tables, each declared once: its state, its arithmetic, its cost and its other names.

Whatever handles tables (the bodies of `bag` and `lookup`, tiers, checkpoints, ranks, the planner, the configs) asks the
rule. To add one, write it here, its arithmetic in `bag/native.c` and `bag/update_kernels.py`, and a peer in plain torch
in `tests/models/dense_peers.py`; the tests run over all rules. Importing this module does not import torch.

Shapes: R rows of a table, U updated rows, D width, K numbers of state of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch
    from torch import Tensor

RuleName = Literal["sgd", "adagrad", "rowwise-adagrad", "adam", "rowwise-adam"]
Numbers = tuple["float | Tensor", ...]
BETAS = 0.9, 0.999
"""Of Adam's two moments, as in the dense AdamW."""


@dataclass(frozen=True, kw_only=True)
class TableRule:
    """How the rows that a step used are updated; with every rule `decay` shrinks a row by rate * decay beforehand."""

    name: RuleName
    summary: str
    step: Callable[[Tensor, Tensor, Numbers, float], Tensor]
    """(state of the rows, their gradient_UD, numbers, eps): changes the state in place and returns what is subtracted
    from the rows. It defines what is right; C and Triton must match it."""
    flops: int
    """For each weight of an updated row."""
    dense: Literal["sgd", "adagrad", "adamw"]
    """The optimizer of the other parameters where one name stands for all."""
    fbgemm: str = ""
    """The name in FBGEMM's EmbOptimType, whose states are in the order of the columns here; empty: it has none, and
    ranks have copies of the tables."""
    fbgemm_on_cpu: bool = True
    row_states: int = 0
    """Numbers for a whole row: 0 or 1; it comes after those of its weights."""
    weight_states: int = 0
    """Numbers for each weight; all first ones of a row come before all second ones."""
    numbers: Callable[[float | Tensor, float | Tensor], Numbers] = lambda rate, count: (rate,)
    """What an update needs beside eps, from the learning rate and the number of updates including this one; the rate
    comes first."""
    counts: bool = False
    """Whether the numbers depend on the count, which a checkpoint then holds; a row whose gradient is zero changes."""

    @property
    def code(self) -> int:
        """The number of the rule in native.c."""
        return [*RULES].index(self.name)

    def state_width(self, dim: int) -> int:
        """Numbers of state of a row."""
        return self.row_states + self.weight_states * dim

    def state_shape(self, rows: int, dim: int) -> tuple[int, ...] | None:
        """The shape of the state of a table; one number for each row has one dimension."""
        if not self.weight_states:
            return (rows,) if self.row_states else None
        return rows, self.state_width(dim)

    def no_updates(self, device: torch.device | str) -> Tensor | None:
        """A number of updates, where the rule needs it; on the device, so that a CUDA graph can count."""
        import torch

        return torch.zeros((), dtype=torch.float64, device=device) if self.counts else None

    def apply_(
        self,
        table_RD: Tensor,
        state: Tensor | None,
        rows_U: Tensor,
        gradient_UD: Tensor,
        *,
        rate: float | Tensor,
        eps: float,
        decay: float = 0.0,
        count: float | Tensor = 1,
    ) -> None:
        """Update distinct rows and their state in place, by plain torch."""
        gradient_UD = gradient_UD.to(table_RD.dtype if state is None else state.dtype)
        own = gradient_UD if state is None else state.index_select(0, rows_U)
        step_UD = self.step(own, gradient_UD, self.numbers(rate, count), eps)
        if state is not None:
            state.index_copy_(0, rows_U, own)
        rows_UD = table_RD.index_select(0, rows_U)
        rows_UD = (1 - rate * decay) * rows_UD if decay else rows_UD
        table_RD.index_copy_(0, rows_U, (rows_UD - step_UD).to(table_RD.dtype))


def _sgd(state: Tensor, gradient_UD: Tensor, numbers: Numbers, eps: float) -> Tensor:
    return numbers[0] * gradient_UD


def _adagrad(state_UD: Tensor, gradient_UD: Tensor, numbers: Numbers, eps: float) -> Tensor:
    state_UD += gradient_UD.square()
    return numbers[0] * gradient_UD / (state_UD.sqrt() + eps)


def _rowwise_adagrad(state_U: Tensor, gradient_UD: Tensor, numbers: Numbers, eps: float) -> Tensor:
    state_U += gradient_UD.square().mean(1)
    return numbers[0] * gradient_UD / (state_U.sqrt() + eps).unsqueeze(1)


def _adam(state_UK: Tensor, gradient_UD: Tensor, numbers: Numbers, eps: float) -> Tensor:
    _, mean_share, square_share, mean_rate, square_scale = numbers
    means_UD, squares_UD = state_UK.chunk(2, 1)
    means_UD += mean_share * (gradient_UD - means_UD)
    squares_UD += square_share * (gradient_UD.square() - squares_UD)
    return mean_rate * means_UD / ((squares_UD * square_scale).sqrt() + eps)


def _rowwise_adam(state_UK: Tensor, gradient_UD: Tensor, numbers: Numbers, eps: float) -> Tensor:
    _, mean_share, square_share, mean_rate, square_scale = numbers
    means_UD, squares_U1 = state_UK[:, :-1], state_UK[:, -1:]
    means_UD += mean_share * (gradient_UD - means_UD)
    squares_U1 += square_share * (gradient_UD.square().mean(1, keepdim=True) - squares_U1)
    return mean_rate * means_UD / ((squares_U1 * square_scale).sqrt() + eps)


def _adam_numbers(rate: float | Tensor, count: float | Tensor) -> Numbers:
    """The shares of a new gradient in both moments, and the bias corrections: after one step the second is 0.001."""
    mean_correction, square_correction = (1 - beta**count for beta in BETAS)
    return rate, 1 - BETAS[0], 1 - BETAS[1], rate / mean_correction, 1 / square_correction


RULES: dict[str, TableRule] = {
    rule.name: rule
    for rule in (
        TableRule(name="sgd", summary="no state", step=_sgd, flops=2, dense="sgd", fbgemm="EXACT_SGD"),
        TableRule(
            name="adagrad",
            summary="a sum of squared gradients for each weight",
            step=_adagrad,
            flops=5,
            dense="adagrad",
            fbgemm="EXACT_ADAGRAD",
            weight_states=1,
        ),
        TableRule(
            name="rowwise-adagrad",
            summary="a sum of mean squared gradients for each row",
            step=_rowwise_adagrad,
            flops=5,
            dense="adagrad",
            fbgemm="EXACT_ROWWISE_ADAGRAD",
            row_states=1,
        ),
        TableRule(
            name="adam",
            summary="two moments for each weight, which change only where a step uses the row",
            step=_adam,
            flops=12,
            dense="adamw",
            fbgemm="ADAM",
            fbgemm_on_cpu=False,
            weight_states=2,
            numbers=_adam_numbers,
            counts=True,
        ),
        TableRule(
            name="rowwise-adam",
            summary="a mean gradient for each weight and a mean square for each row, which change where a step uses it",
            step=_rowwise_adam,
            flops=10,
            dense="adamw",
            fbgemm="PARTIAL_ROWWISE_ADAM",
            fbgemm_on_cpu=False,
            row_states=1,
            weight_states=1,
            numbers=_adam_numbers,
            counts=True,
        ),
    )
}
