"""Optimizers of dense parameters with one interface.

A learning rate is a number, or a one-element tensor on the parameters' device: a CUDA graph reads it at every replay.
`plain` replaces the fused kernels by ordinary operators, parameter by parameter, for comparison. A learning-rate
schedule is a pure function of the number of a step, counted from 0.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import compress
from typing import cast

import torch
from torch import Tensor, nn

from ..ops import many
from ..ops.table_rules import RULES
from .config import DLRMTrainConfig
from .loop import State

FLOOR = 1e-7
"""The quadratic decay stops here, as in the public DLRM."""
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
        many.body(self.parameters[0].device).descend(*_trained(self.parameters), rate)

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
        self, groups: Groups, *, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, plain: bool = False
    ) -> None:
        super().__init__([parameter for parameters, _ in groups for parameter in parameters], plain=plain)
        self.betas, self.eps = betas, eps
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

    def state_dict(self) -> State:
        moments = [{"means": group.means, "squares": group.squares} for group in self.groups]
        return {"steps": self.steps, "moments": moments}

    def load_state_dict(self, state: State) -> None:
        self.steps.copy_(state["steps"])
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


def one_cycle(step: int, total: int, *, peak: float, rise: float) -> float:
    """A cosine from peak / 25 up to the peak, then one down to peak / 250,000."""
    start, end = peak / 25, peak / 250_000
    top = max(1.0, rise * total - 1)
    if step <= top:
        return _cosine(start, peak, step / top)
    return _cosine(peak, end, min(1.0, (step - top) / max(1.0, total - 1 - top)))


def _cosine(begin: float, end: float, share: float) -> float:
    return end + (begin - end) * (1 + math.cos(math.pi * share)) / 2


def warmup_decay(step: int, *, peak: float, warmup: int, decay_start: int, decay_steps: int) -> float:
    """A linear warm-up over `warmup` steps, the peak, then a quadratic decay over `decay_steps` to a constant.

    Like the public DLRM this counts steps from 1, so that the first step has a rate above 0.
    """
    count = step + 1
    if count < warmup:
        return peak * count / warmup
    if not decay_steps or count < decay_start:
        return peak
    left = max(1, decay_start + decay_steps - count)
    return max(min(FLOOR, peak), peak * (left / decay_steps) ** 2)


def make_schedule(config: DLRMTrainConfig, planned: int) -> Callable[[int], float]:
    """The schedule of a config, for a training of `planned` steps."""
    peak = config.learning_rate
    if config.schedule == "constant":
        return lambda step: peak
    if config.schedule == "one-cycle":
        return lambda step: one_cycle(step, planned, peak=peak, rise=config.rise)
    return lambda step: warmup_decay(
        step, peak=peak, warmup=config.warmup_steps, decay_start=config.decay_start, decay_steps=config.decay_steps
    )
