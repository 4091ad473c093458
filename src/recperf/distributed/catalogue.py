"""The embeddings of items, divided by rows among ranks: looked up, scored and gathered by torch's own collectives.

Every rank scores the positions of all ranks with its own items. Of the softmax over all items the highest logarithm and
the sums of exponentials are reduced, and so are the means of items by their probabilities, which are the gradients of
users; the gradients of items stay where their rows are.

Shapes: T positions of a rank, R ranks, L positions of the rank with the most, D width, N own rows, I rows of all.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, distributed, nn

from ..ops.catalogue_softmax import softmax_loss
from ..ops.compile import even_cuts
from ..train.loop import Optimizer
from .ranks import Ranks


class CatalogueShards:
    """The rows of this rank."""

    def __init__(self, world: Ranks, rows: int) -> None:
        self.world, cuts = world, even_cuts(rows, world.size)
        self.sizes = [stop - begin for begin, stop in zip(cuts, cuts[1:])]
        self.begin, self.stop = cuts[world.rank], cuts[world.rank + 1]
        self.skipped = int(self.begin == 0)
        """Own rows before those of items: the first of all is padding."""
        self.first = self.begin + self.skipped - 1
        """The number of the first own item."""
        self.lengths: list[int] = []
        """Positions of each rank in this step."""

    def part(self, whole_ID: Tensor) -> Tensor:
        return whole_ID[self.begin : self.stop].clone()

    @torch.no_grad()
    def whole(self, own_ND: Tensor) -> Tensor:
        """The rows of all ranks. Every rank must ask for them."""
        every_RLD = self.world.stack(_padded(own_ND, max(self.sizes)))
        return torch.cat([rows_LD[:size] for rows_LD, size in zip(every_RLD, self.sizes)])

    def gathered(self, own: Tensor) -> Tensor:
        """What all ranks have for their positions of this step, in rank order."""
        stacked = self.world.stack(_padded(own, max(self.lengths)))
        return torch.cat([values[:length] for values, length in zip(stacked, self.lengths)])

    def own(self, values: Tensor) -> Tensor:
        """Of values for the positions of all ranks those of this one."""
        before = sum(self.lengths[: self.world.rank])
        return values[before : before + self.lengths[self.world.rank]]

    def lookup(self, own_ND: Tensor, rows_T: Tensor) -> Tensor:
        """Rows of any rank; the first of a step's collectives."""
        counts_R = self.world.stack(torch.tensor([len(rows_T)]))
        self.lengths = counts_R.flatten().tolist()
        found: Tensor = _Lookup.apply(own_ND, rows_T, self)  # type: ignore[no-untyped-call]
        return found

    def loss(
        self, users_TD: Tensor, vectors_ND: Tensor, targets_T: Tensor, weights_T: Tensor, temperature: float
    ) -> Tensor:
        """The weighted sum over the positions of all ranks; its gradients are whole whatever it is multiplied by."""
        loss = softmax_loss(
            _Gathered.apply(users_TD, self),  # type: ignore[no-untyped-call]
            vectors_ND,
            self.gathered(targets_T),
            temperature=temperature,
            bounded=True,
            weights_T=self.gathered(weights_T),
            shards=self,
        )
        whole: Tensor = _Whole.apply(loss)  # type: ignore[no-untyped-call]
        return whole

    def sum_(self, values: Tensor) -> Tensor:
        return self.world.sum_(values)

    def logarithms(self, logs_T: Tensor) -> Tensor:
        """Of sums of exponentials, from those of each rank."""
        high_T = logs_T.clone()
        distributed.all_reduce(high_T, op=distributed.ReduceOp.MAX)
        return self.sum_((logs_T - high_T).exp()).log() + high_T

    def whole_state(self, state: Any, own: Iterable[Tensor]) -> Any:
        """A state with the rows of all ranks in place of its tensors that are one of these."""
        places = {one.data_ptr() for one in own}
        return _mapped(state, state, lambda here, value: self.whole(value) if here.data_ptr() in places else value)

    def part_state(self, state: Any, here: Any, own: Iterable[Tensor]) -> Any:
        """The opposite, of a state like the one here."""
        places = {one.data_ptr() for one in own}
        return _mapped(here, state, lambda here, value: self.part(value) if here.data_ptr() in places else value)


class DividedItems:
    """An optimizer whose gradient of items is that of this rank's rows."""

    def __init__(self, optimizer: Optimizer, items_ND: nn.Parameter, shards: CatalogueShards) -> None:
        self.optimizer, self.items_ND, self.shards = optimizer, items_ND, shards

    def step(self, learning_rate: float | Tensor) -> None:
        self.optimizer.step(learning_rate)

    def gradient_norm(self) -> Tensor:
        """Every rank asks for it in the same steps."""
        assert self.items_ND.grad is not None
        own = self.items_ND.grad.square().sum()
        return (self.optimizer.gradient_norm().square() - own + self.shards.sum_(own.clone())).sqrt()

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own_ND: Tensor, rows_T: Tensor, shards: CatalogueShards) -> Tensor:
        places = shards.gathered(rows_T) - shards.begin
        inside = (places >= 0) & (places < len(own_ND))
        ctx.shards, ctx.rows = shards, len(own_ND)
        ctx.save_for_backward(places[inside], inside)
        rows = own_ND.new_zeros(len(places), own_ND.shape[1])
        rows[inside] = own_ND[places[inside]]
        return shards.own(shards.sum_(rows)).clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> Any:
        places, inside = ctx.saved_tensors
        every = ctx.shards.gathered(grad_TD.contiguous())
        d_own_ND = every.new_zeros(ctx.rows, every.shape[1])
        # In a fixed order on any device.
        d_own_ND.index_put_((places,), every[inside], accumulate=True)
        return d_own_ND, None, None


class _Gathered(torch.autograd.Function):
    """The vectors of all ranks; each rank has the whole gradient of all of them."""

    @staticmethod
    def forward(ctx: Any, own_TD: Tensor, shards: CatalogueShards) -> Tensor:
        ctx.shards = shards
        return shards.gathered(own_TD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.shards.own(grads[0]), None


class _Whole(torch.autograd.Function):
    """Ranks add up shares of one loss: its gradients are computed from all of it."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return torch.ones_like(grads[0])


def _padded(values: Tensor, length: int) -> Tensor:
    padded = values.new_zeros(length, *values.shape[1:])
    padded[: len(values)] = values
    return padded


def _mapped(here: Any, value: Any, change: Any) -> Any:
    """A tree of tensors like the one here, with each tensor changed by what is in its place here."""
    if isinstance(here, Tensor):
        return change(here, value)
    if isinstance(here, dict):
        return {name: _mapped(here[name], one, change) if name in here else one for name, one in value.items()}
    if isinstance(here, (list, tuple)):
        return [_mapped(one, other, change) for one, other in zip(here, value, strict=True)]
    return value
