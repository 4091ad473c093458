"""Optimizers of dense parameters, of tables with sparse gradients, and one that combines both.

A learning rate is a number, or a one-element tensor on the parameters' device: a CUDA graph reads it at every replay.
`plain` replaces the fused kernels by ordinary operators, parameter by parameter, for comparison.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from itertools import compress
from typing import cast

import torch
from torch import Tensor, nn

from ..measure.spans import span
from ..models.streams import SideStreams
from ..models.tables import HashedTable, SparseTables
from ..models.tiers.columns import TableColumns, require_read
from ..ops import mlp
from ..ops.table_rules import RULES, RuleName
from .loop import State

Rate = float | Tensor
Groups = list[tuple[list[nn.Parameter], float]]
"""Lists of parameters that share a weight decay, each with that decay."""


class DenseOptimizer(ABC):
    """Updates parameters from their gradients and clears the gradients."""

    def __init__(self, parameters: list[nn.Parameter], *, plain: bool = False) -> None:
        self.parameters: list[Tensor] = [*parameters]
        self.plain = plain
        self.cuda = parameters[0].is_cuda

    @torch.no_grad()
    def step(self, learning_rate: Rate) -> None:
        """Update every parameter that is not frozen and clear its gradient."""
        if not any(parameter.requires_grad for parameter in self.parameters):
            return
        if isinstance(learning_rate, Tensor):
            # Reading a tensor costs nothing on a CPU, where not every kernel accepts one.
            learning_rate = learning_rate.reshape(()) if learning_rate.is_cuda else float(learning_rate)
        if self.plain:
            self._plain(learning_rate)
        else:
            self._fused(learning_rate)
        for parameter in self.parameters:
            parameter.grad = None

    def gradients(self) -> list[Tensor]:
        """The gradients of all parameters that are not frozen, in order."""
        return _trained(self.parameters)[1]

    def gradient_norm(self) -> Tensor:
        return norm_of(self.gradients())

    @abstractmethod
    def _fused(self, rate: Rate) -> None: ...

    @abstractmethod
    def _plain(self, rate: Rate) -> None: ...

    @abstractmethod
    def state_dict(self) -> State: ...

    @abstractmethod
    def load_state_dict(self, state: State) -> None: ...


class SGD(DenseOptimizer):
    """Stochastic gradient descent without momentum; equal to `torch.optim.SGD(fused=True)`."""

    def _fused(self, rate: Rate) -> None:
        mlp.body(self.parameters[0].device).descend(*_trained(self.parameters), rate)

    def _plain(self, rate: Rate) -> None:
        for parameter, gradient in zip(*_trained(self.parameters)):
            parameter -= rate * gradient

    def state_dict(self) -> State:
        return {}

    def load_state_dict(self, state: State) -> None:
        """SGD has no state."""


class Adagrad(DenseOptimizer):
    """Element-wise Adagrad; equal to `torch.optim.Adagrad`."""

    def __init__(self, parameters: list[nn.Parameter], *, eps: float = 1e-8, plain: bool = False) -> None:
        super().__init__(parameters, plain=plain)
        self.eps = eps
        self.sums = [torch.zeros_like(p, requires_grad=False) for p in parameters]
        # The kernel needs a step count for a decay of the learning rate that is not used.
        self._first = torch.ones(())

    def _fused(self, rate: Rate) -> None:
        parameters, gradients, sums = _trained(self.parameters, self.sums)
        if not self.cuda:
            torch._fused_adagrad_(
                parameters,
                gradients,
                sums,
                [self._first] * len(gradients),
                lr=rate,
                lr_decay=0.0,
                weight_decay=0.0,
                eps=self.eps,
                maximize=False,
            )
            return
        torch._foreach_addcmul_(sums, gradients, gradients)
        divisors = torch._foreach_sqrt(sums)
        torch._foreach_add_(divisors, self.eps)
        # In place: nobody reads a gradient after the step.
        torch._foreach_mul_(gradients, -rate)
        torch._foreach_addcdiv_(parameters, gradients, divisors)

    def _plain(self, rate: Rate) -> None:
        for parameter, gradient, squares in zip(*_trained(self.parameters, self.sums)):
            squares += gradient * gradient
            parameter -= rate * gradient / (squares.sqrt() + self.eps)

    def state_dict(self) -> State:
        return {"sums": self.sums}

    def load_state_dict(self, state: State) -> None:
        _copy(self.sums, state["sums"])


class AdamW(DenseOptimizer):
    """AdamW by torch's fused kernel, one call for each group of parameters that share a decay.

    It equals `torch.optim.AdamW(fused=True)`. Calling the kernel directly avoids the overhead of that class, which
    takes longer than the arithmetic of a small model.
    """

    def __init__(
        self, groups: Groups, *, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, plain: bool = False,
        average_steps: int = 0,
    ) -> None:  # fmt: skip
        """With `average_steps` it also keeps the mean of the parameters over so many of the last steps."""
        super().__init__([parameter for parameters, _ in groups for parameter in parameters], plain=plain)
        self.betas, self.eps, self.average_steps = betas, eps, average_steps
        self.averages = [one.detach().clone() for one in self.parameters] if average_steps else []
        self.steps = torch.zeros((), device=groups[0][0][0].device)
        """The number of steps, on the device of the parameters as the kernel requires."""
        self.groups = [_Group(parameters, decay) for parameters, decay in groups]

    def _fused(self, rate: Rate) -> None:
        self.steps += 1
        for group in self.groups:
            parameters, gradients, means, squares = _trained(group.parameters, group.means, group.squares)
            if not parameters:
                continue
            torch._fused_adamw_(
                parameters,
                gradients,
                means,
                squares,
                [],
                [self.steps] * len(parameters),
                lr=rate,
                beta1=self.betas[0],
                beta2=self.betas[1],
                weight_decay=group.decay,
                eps=self.eps,
                amsgrad=False,
                maximize=False,
            )
        self._average()

    @torch.no_grad()
    def _average(self) -> None:
        """The first steps count alike; after them the weight of a step falls off exponentially."""
        if not self.averages:
            return
        if not self.cuda:
            torch._foreach_lerp_(self.averages, self.parameters, 1 / min(float(self.steps), self.average_steps))
            return
        # A CUDA graph reads the number of steps at every replay.
        apart = torch._foreach_sub(self.parameters, self.averages)
        torch._foreach_mul_(apart, (1 / self.steps).clamp_(min=1 / self.average_steps))
        torch._foreach_add_(self.averages, apart)

    @torch.no_grad()
    def exchange(self) -> None:
        """The parameters become their averages, and these the parameters, until the next call."""
        if self.averages and float(self.steps):
            for parameter, average in zip(self.parameters, self.averages):
                trained = parameter.detach().clone()
                parameter.copy_(average)
                average.copy_(trained)

    def _plain(self, rate: Rate) -> None:
        self.steps += 1
        # In float64 like the kernel: after one step the second of these is 0.001.
        mean_correction, square_correction = (1 - beta ** self.steps.double() for beta in self.betas)
        for group in self.groups:
            for parameter, gradient, mean, square in zip(*_trained(group.parameters, group.means, group.squares)):
                parameter *= 1 - rate * group.decay
                mean += (1 - self.betas[0]) * (gradient - mean)
                square += (1 - self.betas[1]) * (gradient * gradient - square)
                parameter -= rate / mean_correction * mean / ((square / square_correction).sqrt() + self.eps)
        self._average()

    def state_dict(self) -> State:
        moments = [{"means": group.means, "squares": group.squares} for group in self.groups]
        averages = {"averages": self.averages} if self.averages else {}
        return {"steps": self.steps, "moments": moments, **averages}

    def load_state_dict(self, state: State) -> None:
        self.steps.copy_(state["steps"])
        _copy(self.averages, state.get("averages", []))
        for group, saved in zip(self.groups, state["moments"], strict=True):
            _copy(group.means, saved["means"])
            _copy(group.squares, saved["squares"])


class _Group:
    """Parameters that share a weight decay, and their moments."""

    def __init__(self, parameters: list[nn.Parameter], decay: float) -> None:
        self.parameters: list[Tensor] = [*parameters]
        self.decay = decay
        self.means = [torch.zeros_like(p, requires_grad=False) for p in parameters]
        self.squares = [torch.zeros_like(p, requires_grad=False) for p in parameters]


def _trained(parameters: list[Tensor], *states: list[Tensor]) -> tuple[list[Tensor], ...]:
    """The parameters that are not frozen, their gradients and their states."""
    if not all(parameter.requires_grad for parameter in parameters):
        trained = [parameter.requires_grad for parameter in parameters]
        states = tuple(list(compress(state, trained)) for state in states)
        parameters = list(compress(parameters, trained))
    # Reading a gradient costs about a microsecond, so each is read once.
    gradients = [parameter.grad for parameter in parameters]
    assert all(gradient is not None for gradient in gradients), "a parameter has no gradient"
    return parameters, cast(list[Tensor], gradients), *states


def norm_of(gradients: list[Tensor]) -> Tensor:
    """The Euclidean norm of all gradients together; on a CPU in half the time of `get_total_norm`."""
    norms = torch._foreach_norm(gradients) if gradients else (torch.zeros(()),)
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


def _copy(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        one.copy_(other)


def make_dense(name: str, groups: Groups, *, eps: float = 1e-8, plain: bool = False) -> DenseOptimizer:
    """The optimizer with a name; that of a rule of tables means the rule's dense counterpart."""
    if name in RULES:
        name = RULES[name].dense
    if name == "adamw":
        return AdamW(groups, eps=eps, plain=plain)
    if any(decay for _, decay in groups):
        raise ValueError(f"{name} has no weight decay")
    parameters = [parameter for group, _ in groups for parameter in group]
    if name == "sgd":
        return SGD(parameters, plain=plain)
    if name == "adagrad":
        return Adagrad(parameters, eps=eps, plain=plain)
    raise ValueError(f"no optimizer is called {name}")


EPS = 1e-8


class SparseRows:
    """Updates the rows that the last batch used by a rule of `table_rules`, with decoupled weight decay."""

    def __init__(
        self, table: HashedTable | SparseTables, rule: RuleName, *, decay: float = 0.0, eps: float = EPS
    ) -> None:
        self.table, self.rule, self.decay, self.eps = table, RULES[rule], decay, eps
        rows_RD, shape = table.table_RD, self.rule.state_shape(*table.table_RD.shape)
        self.state: Tensor | None = None
        """In tiers that of the rows in the cache."""
        if shape is not None:
            self.state = rows_RD.new_zeros(shape) if table.tiers is None else table.tiers.state_SK.view(shape)
        self.count = self.rule.no_updates(rows_RD.device)
        self.rehearsing = False
        """Whether `step` puts the state of its rows back, all of which may be too large to copy."""

    def saved_state(self) -> Tensor | TableColumns | None:
        """The state of all rows, for a checkpoint."""
        tiers = self.table.tiers
        if tiers is None or self.state is None:
            return self.state
        flat = self.state.dim() == 1
        return self.table.columns(slice(tiers.dim, tiers.store.width), {"kind": "zero"}, flat=flat)

    def squared_norm(self) -> float:
        if self.table.frozen:
            return 0.0
        grouped, gradient_ND = self.table.grouped()
        return float(self.table.bag.squared_norm(grouped, gradient_ND))

    def step(self, rate: float | Tensor, *, scale: float = 1.0) -> None:
        """Update the used rows with their gradient times the scale, and clear the gradient."""
        if self.table.frozen:
            return
        grouped, gradient_ND = self.table.grouped()
        if self.count is not None:
            self.count += 1
        rows_V = state_V = None
        if self.rehearsing and self.state is not None:
            # On a GPU what follows the used rows is unspecified.
            rows_V = grouped.sorted_V.long().clamp(0, len(self.state) - 1)
            state_V = self.state.index_select(0, rows_V)
        self.table.bag.update(
            self.table.table_RD,
            self.state,
            grouped,
            gradient_ND,
            rule=self.rule.name,
            rate=rate,
            eps=self.eps,
            decay=self.decay,
            scale=scale,
            count=1 if self.count is None else self.count,
        )
        if self.state is not None and rows_V is not None and state_V is not None:
            self.state.index_copy_(0, rows_V, state_V)
        self.table.forget()


class SplitOptimizer:
    """One optimizer for the dense parameters and `SparseRows` for the tables, clipped together.

    The tables' learning rate is the dense one times a fixed ratio, so both follow one schedule.
    """

    def __init__(
        self,
        dense: DenseOptimizer,
        sparse: SparseRows,
        *,
        table_ratio: float = 1.0,
        clip: float = 0.0,
        streams: SideStreams | None = None,
    ) -> None:
        self.dense, self.sparse, self.table_ratio, self.clip = dense, sparse, table_ratio, clip
        self.streams = streams or SideStreams()
        """CUDA streams on which weight gradients may still be computed."""

    @torch.no_grad()
    def step(self, learning_rate: float | Tensor) -> None:
        """Update everything; a learning rate on a GPU with side streams was computed before the backward pass."""
        scale = self._scale() if self.clip else 1.0
        with span("sparse_update"), self.streams.run_on("tables"):
            rate = learning_rate if self.table_ratio == 1.0 else learning_rate * self.table_ratio
            self.sparse.step(rate, scale=scale)
        with span("dense_update"):
            self.streams.join("weights")
            self.streams.join("biases")
            if scale < 1.0:
                for gradient in self.dense.gradients():
                    gradient.mul_(scale)
            self.dense.step(learning_rate)
            self.streams.join_all()

    def gradient_norm(self) -> Tensor:
        """Of the dense parameters; the tables' gradient exists only row by row, and is not counted."""
        self.streams.join("weights")
        self.streams.join("biases")
        return self.dense.gradient_norm()

    def _scale(self) -> float:
        """The factor that limits the norm of the whole gradient, dense and sparse, to `clip`."""
        squares = [float(g.square().sum()) for g in self.dense.gradients()]
        with span("sparse_update"):
            squares.append(self.sparse.squared_norm())
        norm = math.sqrt(sum(squares))
        return min(1.0, self.clip / norm) if norm else 1.0

    def state_dict(self) -> State:
        return {"dense": self.dense.state_dict(), "rows": self.sparse.saved_state(), "updates": self.sparse.count}

    def load_state_dict(self, state: State) -> None:
        self.dense.load_state_dict(state["dense"])
        if self.sparse.count is not None:
            self.sparse.count.copy_(state["updates"])
        if self.sparse.table.tiers is not None:
            # Reading the checkpoint has loaded it.
            if self.sparse.state is not None:
                require_read(state["rows"])
        elif self.sparse.state is not None:
            self.sparse.state.copy_(state["rows"])
