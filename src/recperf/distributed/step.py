"""A training step on several ranks: each works on its own samples, and gradients are summed meanwhile.

Shapes: G numbers of a message: dense gradients, and the loss.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn

from ..measure.cost import FLOAT
from ..measure.spans import span
from ..stop import SIGNALS
from ..train.loop import Model, Optimizer, RecordNorm
from .config import BUCKET_BYTES, DistributedConfig
from .ranks import Ranks, current
from .shares import SharedBatch

if TYPE_CHECKING:
    from ..train.device import Settings
    from .rank_tables import RankTables


class Agreement:
    """Signals, and a save that rank 0 finds due: in every step all ranks learn of them by a message between hosts.

    It is sent while the backward pass runs, and no device takes part: to read a flag from a GPU, the host would wait
    for everything queued there.
    """

    def __init__(self, world: Ranks) -> None:
        self.world = world
        self._flags = torch.zeros(len(SIGNALS) + 1, dtype=torch.int32)
        self._work: Any = None

    def begin(self) -> None:
        world = self.world
        received = world.stop_flag.received if world.stop_flag else None
        due = world.is_leader and world.due_on_leader(None)
        self._flags = torch.tensor([*(received == number for number in SIGNALS), due], dtype=torch.int32)
        self._work = distributed.all_reduce(self._flags, async_op=True)

    def finish_all_reduce(self) -> None:
        """Wait for the other hosts to begin this step's backward pass too."""
        self._work.wait()
        *ranks_by_signal, due = self._flags.tolist()
        for number, ranks in zip(SIGNALS, ranks_by_signal):
            if ranks and self.world.signal is None:
                self.world.signal = number
        self.world.due = bool(due)


class Bucket:
    """Gradients that are summed by one message, and a view of its memory for each of them."""

    def __init__(self, parameters: list[nn.Parameter], device: torch.device, *, own: int, more: int) -> None:
        """`own` of the parameters have a gradient on this rank; `more` numbers are sent behind the gradients."""
        self.parameters, self.own = parameters, own
        sizes = [parameter.numel() for parameter in parameters]
        self.buffer_G = torch.zeros(sum(sizes) + more, device=device)
        parts = torch.split(self.buffer_G[: sum(sizes)], sizes)
        self.views = [part.view_as(parameter) for part, parameter in zip(parts, parameters)]
        self.missing = own
        """Gradients of this step that are not there yet."""
        self._work: Any = None

    def send(self) -> None:
        gradients = [parameter.grad for parameter in self.parameters]
        present = [(view, gradient) for view, gradient in zip(self.views, gradients) if gradient is not None]
        if len(present) < len(gradients):
            # Another rank has the others.
            self.buffer_G[: sum(view.numel() for view in self.views)].zero_()
        if present:
            torch._foreach_copy_([view for view, _ in present], [gradient for _, gradient in present])
        self._work = distributed.all_reduce(self.buffer_G, async_op=True)

    def wait_all_reduce(self) -> None:
        self._work.wait()
        for parameter, view in zip(self.parameters, self.views):
            parameter.grad = view


class Reduction:
    """Sums the dense gradients and the loss over the ranks.

    With `overlap` a bucket is sent as soon as its last gradient is there, while the backward pass goes on; without it
    all gradients are one message after the backward pass. Ranks send buckets in one order: the one in which rank 0 had
    its gradients in the first step. That step sends the same buckets, after its backward pass: among more than two
    ranks the order of a sum depends on the position in a message, and a resumed run begins with such a step.

    DistributedDataParallel is not used. Its first step has other buckets than those after it, so three ranks resume
    with other bits. It gets gradients from a single backward pass of autograd, where most models here write theirs
    out or cut it into parts with names. And a short step takes longer with it (benchmarks/rank_gradients.py).
    """

    def __init__(self, named: Mapping[str, nn.Parameter], world: Ranks, *, overlap: bool) -> None:
        """`named` are all dense parameters; an error says which of them it is about."""
        self.named, self.parameters, self.world, self.overlap = named, list(named.values()), world, overlap
        self.agreement = Agreement(world)
        self.buckets: list[Bucket] = []
        """Empty before the first step."""
        self._bucket_of: dict[int, Bucket] = {}
        self._others: list[nn.Parameter] = []
        """Parameters without a gradient."""
        self._expected: dict[int, int] = {}
        """How often a backward pass adds to the gradient of each parameter."""
        self._added: dict[int, int] = {}
        """Additions so far in this step, ordered by each parameter's latest one."""
        self._sent = 0
        self._armed = False
        """Whether the backward pass of a training step runs: others send nothing."""
        self._loss = torch.zeros(())
        if overlap:
            self._watch()

    def _watch(self) -> None:
        # A hook is not seen by the garbage collector: a strong reference would keep the whole model.
        reduction = weakref.ref(self)

        def hook(_: Tensor, index: int) -> None:
            if (alive := reduction()) is not None and alive._armed:
                alive._gradient_added(index)

        for index, parameter in enumerate(self.parameters):
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    functools.partial(hook, index=index)
                )

    def begin(self, loss: Tensor) -> None:
        """Called before the backward pass of every step."""
        self._loss, self._added, self._sent, self._armed = loss, {}, 0, True
        for bucket in self.buckets:
            bucket.missing = bucket.own
        self.agreement.begin()

    def _gradient_added(self, index: int) -> None:
        self._added[index] = self._added.pop(index, 0) + 1
        if not self.buckets:
            return
        if self._added[index] > self._expected.get(index, 0):
            raise self._changed()
        if self._added[index] == self._expected[index]:
            self._bucket_of[index].missing -= 1
            while self._sent < len(self.buckets) and not self.buckets[self._sent].missing:
                self._send_next()

    def _send_next(self) -> None:
        bucket = self.buckets[self._sent]
        self._sent += 1
        if self._sent == len(self.buckets):
            bucket.buffer_G[-1].copy_(self._loss)
        bucket.send()

    def __call__(self) -> Tensor:
        """The loss of the whole batch. Gradients become views of the buckets, with the same bits on every rank."""
        self._armed = False
        if not self.overlap:
            self._added = {index: 1 for index, parameter in enumerate(self.parameters) if parameter.grad is not None}
        if not self.buckets:
            self._expected = self._added
            self._fill_buckets()
        # One that was frozen at first has no hook.
        if self._added != self._expected or any(parameter.grad is not None for parameter in self._others):
            raise self._changed()
        while self._sent < len(self.buckets):
            self._send_next()
        for bucket in self.buckets:
            bucket.wait_all_reduce()
        self.agreement.finish_all_reduce()
        return self.buckets[-1].buffer_G[-1].clone()

    def _fill_buckets(self) -> None:
        """Divide the parameters that have a gradient on any rank into buckets."""
        orders = self.world.all_gather(list(self._added))
        without = [rank for rank, indices in enumerate(orders) if not indices]
        if 0 < len(without) < len(orders):
            raise RuntimeError(
                f"rank {without[0]} of {len(orders)} computed no gradient in the first step, but others did: a rank "
                "without samples of its own must compute the loss of one with weight 0"
            )
        order = list(dict.fromkeys(index for indices in orders for index in indices))
        sizes = [FLOAT * self.parameters[index].numel() for index in order]
        groups = cut(sizes, BUCKET_BYTES if self.overlap else sum(sizes))
        for number, (start, stop) in enumerate(groups, 1):
            indices = order[start:stop]
            bucket = Bucket(
                [self.parameters[index] for index in indices],
                self.parameters[0].device,
                own=sum(index in self._added for index in indices),
                # The last one carries the loss too.
                more=int(number == len(groups)),
            )
            self.buckets.append(bucket)
            self._bucket_of |= dict.fromkeys(indices, bucket)
        self._others = [parameter for index, parameter in enumerate(self.parameters) if index not in self._bucket_of]

    def _changed(self) -> RuntimeError:
        changed = [
            name
            for index, (name, parameter) in enumerate(self.named.items())
            if self._expected.get(index, 0) != self._added.get(index, int(parameter.grad is not None))
        ]
        listed = ", ".join(changed[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
        return RuntimeError(
            f"ranks sum the gradients that the first step had, but this step computed others: {listed}. Use every "
            "parameter in every step, if only with weight 0, or freeze it before the first"
        )


def cut(sizes: list[int], least: int) -> list[tuple[int, int]]:
    """Consecutive runs of at least `least` bytes, as (start, stop); only the last may have fewer."""
    runs, start, held = [], 0, 0
    for stop, size in enumerate(sizes, 1):
        held += size
        if held >= least and stop < len(sizes):
            runs.append((start, stop))
            start, held = stop, 0
    return [*runs, (start, len(sizes))]


class RankStep:
    """A whole training step of a rank, which the training loop calls instead of its own."""

    def __init__(
        self,
        model: Model,
        optimizer: Optimizer,
        reduction: Reduction,
        tables: RankTables | None,
        *,
        table_rate: float,
    ) -> None:
        self.model, self.optimizer, self.reduction = model, optimizer, reduction
        self.tables, self.table_rate = tables, table_rate

    def __call__(
        self, batches: Iterator[Any], rate: float, record_norm: RecordNorm | None = None
    ) -> tuple[Tensor, int]:
        with span("data"):
            batch: SharedBatch[Any] = next(batches)
        if self.tables:
            self.tables.set_rate(float(rate) * self.table_rate)
            self.tables.follow(batch.following, batch.following_ready)
        # The losses of all ranks add up to that of the whole batch.
        loss = self.model.loss(batch.part) * batch.weight
        self.reduction.begin(loss.detach())
        with span("backward"):
            loss.backward()
        with span("embedding"):
            if self.tables:
                self.tables.prefetch.send_ahead()
        with span("reduce"):
            value = self.reduction()
        with span("update"):
            if record_norm:
                record_norm(self.optimizer.gradient_norm())
            self.optimizer.step(rate)
        return value, len(batch)


def shared_step(
    model: Model,
    optimizer: Optimizer,
    module: nn.Module,
    parameters: Iterable[nn.Parameter],
    tables: RankTables | None,
    options: DistributedConfig,
    settings: Settings,
    *,
    table_rate: float = 1.0,
) -> RankStep:
    """The step of a rank. The gradients of `parameters`, which are the module's, are summed; tables are updated by
    TorchRec, with `table_rate` times the learning rate."""
    world, names = current(), {parameter: name for name, parameter in module.named_parameters()}
    overlap, settings.reasons["overlap"] = world.overlaps(options, settings.threads)
    reduction = Reduction({names[parameter]: parameter for parameter in parameters}, world, overlap=overlap)
    return RankStep(model, optimizer, reduction, tables, table_rate=table_rate)
