"""A trial of a torch module: its optimizer, its checkpoints, and the work of its steps, which is counted."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ...distributed.ranks import current
from ...errors import ConfigError
from ...execution.workload import Estimate, Prepared, Trial, load, require_memory
from ...measure.cost import Cost
from ...measure.counting import Counter
from ...measure.spans import declare, declared, listen, span
from ...train.config import one_cycle
from ...train.device import choose
from ...train.loop import Order, Recipe, State, take_step
from ...train.optim import norm_of
from . import Columns

TABLES = (nn.Embedding, nn.EmbeddingBag)


class PreparedModule(Prepared):
    """How the module of a config and its optimizer are made, and the work of its steps."""

    def __init__(self, config: Any, model: str, optimizer: str, columns: Columns) -> None:
        self.config, self.model, self.optimizer, self.columns = config, model, optimizer, columns
        parts = list(self._sketch().modules())
        widths = [(one.in_features, one.out_features) for one in parts if isinstance(one, nn.Linear)]
        product = max((2 * config.train.batch_size * before * after for before, after in widths), default=0)
        self._table_bytes = sum(map(table_bytes_of, parts))
        # Each weight has a gradient; what the optimizer needs shows only when it runs.
        state = 2 * sum(one.nbytes for one in parts[0].parameters())
        if current().size > 1:
            require_alike(parts)
        least = Estimate(parameters={}, table_bytes=self._table_bytes, step={}, memory={"state": state})
        require_memory(least, fix="a smaller module or --train.batch-size")
        self.settings = choose(config.train, largest_product_flops=product)
        self._last: Callable[[], ModuleTrial | None] = lambda: None
        self._costs: dict[Any, dict[str, Cost]] = {}

    def module(self) -> nn.Module:
        module: nn.Module = load(self.model)(self.columns, self.config)
        return module

    def _sketch(self) -> nn.Module:
        """The module without memory, of which only the sizes matter; with memory where it cannot be made so."""
        try:
            with torch.device("meta"):
                return self.module()
        except (RuntimeError, NotImplementedError, TypeError, ValueError):
            return self.module()

    @abstractmethod
    def new_trial(self, seed: int) -> ModuleTrial: ...

    def trial(self, seed: int) -> ModuleTrial:
        trial = self.new_trial(seed)
        # A trial may fill half of the memory: it must not live on because its work can be counted.
        self._last = weakref.ref(trial)
        return trial

    def size_of(self, batch: Any) -> Any:
        """Batches of one size take the same work."""
        return len(batch)

    def step_cost(self, batch: Any, ids: int, unique: int) -> dict[str, Cost]:
        """What the operators of a step on a batch of this size did, which changes the weights of the last trial."""
        trial, size = self._last(), self.size_of(batch)
        if size not in self._costs and trial is not None:
            self._costs[size] = counted_step(trial.alone, batch)[0]
        return self._costs.get(size, {})

    def table_bytes(self) -> tuple[int, int]:
        """The tables of the module, divided among the rows that its data needs."""
        rows = sum(self.columns.rows)
        row = max(1, self._table_bytes // rows)
        return row, row * rows


def require_alike(parts: Iterable[nn.Module]) -> None:
    """Refuse parts that several ranks, each with its share of a batch, do not keep the same."""
    for part in parts:
        what = f"several ranks cannot train a {type(part).__name__}"
        if isinstance(part, nn.modules.batchnorm._NormBase) and part.track_running_stats:
            raise ConfigError(f"{what}: its running statistics would be those of one", fix="LayerNorm, or --ranks 1")
        if isinstance(part, TABLES) and part.sparse:
            raise ConfigError(f"{what} with a sparse gradient: they sum dense ones", fix="sparse=False, or --ranks 1")


def table_bytes_of(module: nn.Module) -> int:
    return module.weight.nbytes if isinstance(module, TABLES) else 0


class ModuleTrial(Trial):
    """One module and its optimizer."""

    prepared: Any
    module: nn.Module
    alone: Recipe
    """Its training in a single process, of which every rank counts the work of its part."""

    def begin(self, seed: int, order: Order, loss: Callable[[nn.Module, Any], Tensor]) -> None:
        """Make them, and how they train on the batches of an order."""
        prepared, settings, device = self.prepared, self.prepared.config.train, self.prepared.settings.device
        torch.manual_seed(seed)
        self.module = prepared.module().to(device)
        self.optimizer = TorchOptimizer(load(prepared.optimizer)(self.module, settings))
        peak, planned = self.optimizer.peak, settings.epochs * len(order)
        schedules = {
            "one-cycle": lambda step: one_cycle(step, planned, peak=peak, rise=settings.rise),
            "constant": lambda step: peak,
        }
        self.recipe = self.alone = Recipe(
            model=ModuleLoss(self.module, loss),
            optimizer=self.optimizer,
            order=order,
            learning_rate=schedules[settings.schedule],
            epochs=settings.epochs,
            max_steps=settings.max_steps,
        )

    def tables(self) -> list[tuple[str, int]]:
        return list(zip(self.prepared.columns.keys, self.prepared.columns.rows))

    def state(self) -> dict[str, Any]:
        return {"model": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def require_shape(tensor: Tensor, shape: tuple[int, ...], made_by: str, fix: str) -> Tensor:
    """What a module returned; -1 in a shape stands for any number."""
    if len(tensor.shape) != len(shape) or any(size not in (-1, own) for own, size in zip(tensor.shape, shape)):
        raise ConfigError(f"{made_by} returns a tensor of {list(tensor.shape)}", fix=fix)
    return tensor


class ModuleLoss:
    """A module with its loss, whose children are parts of the step."""

    def __init__(self, module: nn.Module, loss: Callable[[nn.Module, Any], Tensor]) -> None:
        self.module, self._loss = module, loss
        name_parts(module)

    def train(self, mode: bool = True) -> None:
        self.module.train(mode)

    def loss(self, batch: Any) -> Tensor:
        world = current()
        if world.size == 1:
            return self._loss(self.module, batch)
        # Each rank draws numbers of its own, as for dropout, from a seed that the generator of all ranks gives. This is
        # in the same state on every rank, so that a checkpoint holds it once.
        seed, device = int(torch.randint(1 << 62, ())), next(self.module.parameters()).device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(seed + world.rank)
            return self._loss(self.module, batch)


def name_parts(module: nn.Module) -> None:
    """Give each child of a module a span of its name, which the budget of a step and the page show."""
    for name, child in module.named_children():
        inner = list(child.children()) if isinstance(child, nn.ModuleList | nn.ModuleDict) else [child]
        kind = "tables" if inner and all(isinstance(one, TABLES) for one in inner) else ""
        try:
            is_part = declared(name).phase == "forward"
        except ConfigError:
            declare("forward", name, kind=kind)
            is_part = True
        for one in inner if is_part else ():
            spans: list[ExitStack] = []

            def enter(*_: Any, name: str = name, spans: list[ExitStack] = spans) -> None:
                spans.append(ExitStack())
                spans[-1].enter_context(span(name))

            def leave(*_: Any, spans: list[ExitStack] = spans) -> None:
                spans.pop().close()

            one.register_forward_pre_hook(enter)
            one.register_forward_hook(leave, always_call=True)


class TorchOptimizer:
    """An optimizer of torch, whose learning rates follow the schedule of the largest of them."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.rates = [float(group["lr"]) for group in optimizer.param_groups]
        self.peak = max(self.rates)
        if not self.peak > 0:
            raise ConfigError(f"the learning rates of the optimizer are {self.rates}", fix="at least one above 0")

    def step(self, learning_rate: float | Tensor) -> None:
        share = float(learning_rate) / self.peak
        for group, rate in zip(self.optimizer.param_groups, self.rates):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate * share)
            else:
                group["lr"] = rate * share
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def gradient_norm(self) -> Tensor:
        gradients = [one.grad for group in self.optimizer.param_groups for one in group["params"]]
        return norm_of([one for one in gradients if one is not None and one.layout == torch.strided])

    def state_dict(self) -> State:
        """As torch has it, with texts as keys."""
        saved = self.optimizer.state_dict()
        groups = [{name: value for name, value in one.items() if name != "params"} for one in saved["param_groups"]]
        return {"groups": groups, "state": {str(place): values for place, values in saved["state"].items()}}

    def load_state_dict(self, state: State) -> None:
        groups = []
        for own, saved in zip(self.optimizer.state_dict()["param_groups"], state["groups"], strict=True):
            # A checkpoint holds lists in place of tuples.
            values = {name: tuple(value) if isinstance(value, list) else value for name, value in saved.items()}
            groups.append({**values, "params": own["params"]})
        values = {int(place): one for place, one in state["state"].items()}
        self.optimizer.load_state_dict({"param_groups": groups, "state": values})


class SpanWork:
    """Divides the operators that a counter lists among the spans in which they are called."""

    def __init__(self, counter: Counter) -> None:
        self.counter, self.costs = counter, dict[str, Cost]()
        self._open, self._booked = list[str](), 0

    def enter(self, name: str) -> None:
        self._book()
        self._open.append(name)

    def leave(self) -> None:
        self._book()
        self._open.pop()

    def _book(self) -> None:
        calls = self.counter.steps[-1]
        for work in calls[self._booked :] if self._open else ():
            name = self._open[-1]
            self.costs[name] = self.costs.get(name, Cost()) + Cost(work.flops, work.bytes)
        self._booked = len(calls)


def counted_step(recipe: Recipe, batch: Any) -> tuple[dict[str, Cost], int]:
    """Take a step, and return its work by span and the bytes that its forward pass keeps for the backward pass."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    counter = Counter(1 << 60, 1 << 60)
    counter.begin_step()
    work = SpanWork(counter)
    with heard_by(work), counter, saved_tensors_hooks(keep, lambda tensor: tensor):
        take_step(recipe, iter([batch]), recipe.steps - 1)
    counter.result()
    return work.costs, sum(kept.values())


@contextmanager
def heard_by(listener: SpanWork) -> Iterator[None]:
    before = listen(listener)
    try:
        yield
    finally:
        listen(before)


def estimate_of(prepared: PreparedModule) -> Estimate:
    """Counted in a first step, because only that shows what a module does."""
    trial = prepared.trial(prepared.config.seed)
    batch = next(trial.recipe.order.batches(0))
    step, activations = counted_step(trial.recipe, batch)
    parameters = {name: sum(one.numel() for one in child.parameters()) for name, child in trial.module.named_children()}
    own = sum(one.numel() for one in trial.module.parameters(recurse=False))
    weights = sum(one.nbytes for one in trial.module.parameters())
    of_optimizer = [value for values in trial.optimizer.state_dict()["state"].values() for value in values.values()]
    state = 2 * weights + sum(value.nbytes for value in of_optimizer if isinstance(value, Tensor))
    return Estimate(
        parameters={**parameters, **({"own": own} if own else {})},
        table_bytes=sum(map(table_bytes_of, trial.module.modules())),
        step=step,
        memory={"state": state, "activations": activations},
    )
