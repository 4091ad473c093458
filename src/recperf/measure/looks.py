"""Looks at the tensors of a model around one step: gradients, updates, outputs of activations, rows of tables.

Large tensors are looked at in a sample of their rows. Nothing here changes a tensor or draws a random number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from .learning_records import ParameterSeen, TableSeen, UnitsSeen

SAMPLE = 16_384
"""Values of a tensor that are looked at."""
TABLE_ROWS, TABLE_COLUMNS, IDS = 2_048, 8, 1_024
"""Rows and columns of a table that are compared at the start and the end, and ids of a batch whose rows are compared
around a step."""
UNIT_VALUES = 1 << 20
SATURATED_ROWS = 0.99
UNIT_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Layers whose weight has a row for each output unit."""
TABLES = (nn.Embedding, nn.EmbeddingBag)
ENDS: dict[type[nn.Module], tuple[float, float] | None] = {
    nn.ReLU: None,
    nn.ReLU6: None,
    nn.Tanh: (-0.999, 0.999),
    nn.Sigmoid: (4.5e-5, 1 - 4.5e-5),
}
"""Activations: a unit of those without ends is dead at 0, of the others saturated beyond the ends."""


@dataclass
class Snapshot:
    """Weights before a step, in the sample that is looked at."""

    parameters: list[int]
    rows: dict[int, Tensor | None]
    """Of tables: the rows that the batch used, where they are known."""
    values: list[Tensor]


@dataclass
class Table:
    weight: int
    name: str
    rows: int
    decayed: bool = False
    """Whether weight decay changes rows that no batch uses."""
    ids: Tensor | None = None
    """Of the step that is looked at."""
    lookups: int = 0
    looks: int = 0


@dataclass
class Parameters:
    """The parameters of a model and of its optimizers, by identity."""

    seen: dict[int, ParameterSeen] = field(default_factory=dict)
    tensors: dict[int, Tensor] = field(default_factory=dict)
    tables: dict[int, Table] = field(default_factory=dict)
    not_finite: bool = False
    """Whether a gradient was not finite."""
    _start: dict[int, tuple[Tensor, int]] = field(default_factory=dict)
    _layers: set[int] = field(default_factory=set)
    _active: dict[int, Tensor] = field(default_factory=dict)

    def add(self, name: str, tensor: Tensor, module: nn.Module | None = None) -> None:
        key = id(tensor)
        if key in self.seen:
            return
        self.seen[key] = ParameterSeen(name=name, shape=list(tensor.shape), trainable=tensor.requires_grad)
        self.tensors[key] = tensor
        if isinstance(module, TABLES):
            self.tables[key] = Table(key, name, tensor.shape[0])
        elif isinstance(module, UNIT_LAYERS) and tensor.dim() >= 2:
            self._layers.add(key)
        self._start[key] = self._compared(key).clone(), tensor._version

    def before(self, keys: Iterable[int]) -> Snapshot:
        parameters = [key for key in keys if self.tensors[key].requires_grad]
        rows = {key: self.tables[key].ids for key in parameters if key in self.tables}
        values = [_sample(self.tensors[key], rows.get(key)).clone() for key in parameters]
        return Snapshot(parameters, rows, values)

    def after(self, snapshot: Snapshot, rates: dict[int, float | None]) -> None:
        """Look at the gradients and at what a step changed."""
        now = [_sample(self.tensors[key], snapshot.rows.get(key)) for key in snapshot.parameters]
        differences = torch._foreach_sub(now, snapshot.values) if now else []
        before: Sequence[Tensor] = snapshot.values
        changed = [self._touched(key, *pair) for key, *pair in zip(snapshot.parameters, differences, before)]
        sizes = numbers(norms([pair[0] for pair in changed])), numbers(norms([pair[1] for pair in changed]))
        gradients = self._gradients(snapshot.parameters, snapshot.rows)
        for key, update, weight in zip(snapshot.parameters, *sizes):
            seen = self.seen[key]
            seen.looks += 1
            seen.rate = rates.get(key)
            if gradients.get(key) and weight > 0 and update == update < float("inf") and changed:
                seen.updates.append(update / weight)

    def look_at_others(self) -> None:
        """Look at the gradients of trainable parameters that no optimizer holds."""
        keys = [key for key, one in self.seen.items() if not one.optimized and self.tensors[key].requires_grad]
        self._gradients(keys, {})
        for key in keys:
            self.seen[key].looks += 1

    def finish(self) -> None:
        """Compare all parameters with the start."""
        for key, seen in self.seen.items():
            start, version = self._start[key]
            tensor = self.tensors[key]
            seen.moved = not torch.equal(self._compared(key), start)
            seen.written = seen.moved or tensor._version != version
            if (active := self._active.get(key)) is not None:
                seen.idle_units = 1 - float(active.float().mean())

    def rows_seen(self, steps: int) -> list[TableSeen]:
        """The rows of tables that the loop did not change."""
        result = []
        for key, table in self.tables.items():
            # Where no gradient arrives, rows that stay as they are say nothing about ids.
            if not (self.seen[key].moved and self.seen[key].nonzero and table.looks):
                continue
            start, end = self._start[key][0].float(), self._compared(key).float()
            if table.decayed and start.shape[1] > 1:
                # Decay shortens a row and keeps its direction.
                along = (start * end).sum(1, keepdim=True) / (start * start).sum(1, keepdim=True).clamp_min(1e-30)
                same = ((end - along * start).norm(dim=1) <= 1e-5 * end.norm(dim=1)) & (along[:, 0] <= 1)
            elif table.decayed:
                continue
            else:
                same = (start == end).all(1)
            result.append(
                TableSeen(
                    name=table.name, rows=table.rows, sampled=len(start), unchanged=int(same.sum()),
                    lookups=table.lookups * steps // table.looks,
                )
            )  # fmt: skip
        return result

    def _compared(self, key: int) -> Tensor:
        tensor = _local(self.tensors[key]).detach()
        if key not in self.tables:
            return _sample(tensor, None)
        return tensor[:: max(1, tensor.shape[0] // TABLE_ROWS), :TABLE_COLUMNS]

    def _touched(self, key: int, difference: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """Of a table only the rows that the step changed: the others were not in the batch."""
        if key not in self.tables:
            return difference, before
        touched = (difference != 0).any(1)
        return difference[touched], before[touched]

    def _gradients(self, keys: list[int], rows: dict[int, Tensor | None]) -> dict[int, bool]:
        """Whether each gradient that is there is not zero."""
        grads = {key: _local(grad) for key in keys if (grad := self.tensors[key].grad) is not None}
        sampled = [_sample(grad, rows.get(key)) for key, grad in grads.items()]
        result = {}
        for (key, grad), one, size in zip(grads.items(), sampled, numbers(norms(sampled))):
            self.not_finite |= not size < float("inf")
            # A sample of a gradient that is mostly zero may miss the rest.
            result[key] = size != 0 or (one.numel() < grad.numel() and not grad.is_sparse and bool(grad.any()))
            self.seen[key].gradients += 1
            self.seen[key].nonzero += result[key]
            if key in self._layers and not grad.is_sparse:
                active = (one != 0).flatten(1).any(1)
                self._active[key] = active | self._active[key] if key in self._active else active
        return result


@dataclass
class Units:
    """The outputs of an activation module, over all looks."""

    name: str
    module: nn.Module
    count: int
    looks: int = 0
    rows: int = 0
    active: Tensor | None = None
    saturated: Tensor | None = None

    def look(self, values_RU: Tensor) -> None:
        ends = next(ends for kind, ends in ENDS.items() if isinstance(self.module, kind))
        self.looks += 1
        self.rows += len(values_RU)
        if ends is None:
            active = (values_RU > 0).any(0)
            self.active = active if self.active is None else self.active | active
        else:
            count = ((values_RU < ends[0]) | (values_RU > ends[1])).sum(0)
            self.saturated = count if self.saturated is None else self.saturated + count

    def seen(self) -> UnitsSeen:
        dead = 0 if self.active is None else self.count - int(self.active.sum())
        saturated = 0 if self.saturated is None else int((self.saturated >= SATURATED_ROWS * self.rows).sum())
        return UnitsSeen(
            name=self.name, kind=type(self.module).__name__, units=self.count, looks=self.looks, rows=self.rows,
            dead=dead, saturated=saturated,
        )  # fmt: skip


@dataclass
class Probe:
    """Tells at each gradient of one parameter whether the one before it was cleared."""

    parameter: Tensor
    handle: Any = None
    node: Any = None
    gradients: int = 0
    cleared: bool = False

    def watch(self) -> None:
        # At the node, not at the parameter: nothing is left there, and compiled code does not notice.
        self.node = get_gradient_edge(self.parameter).node
        self.handle = self.node.register_prehook(self._before)

    def _before(self, gradients: Any) -> None:
        before = self.parameter.grad
        self.gradients += 1
        self.cleared |= before is None or not not_zero(before)

    def close(self) -> None:
        self.handle.remove()
        self.node = None


def rows_by_unit(output: Tensor) -> Tensor:
    """Outputs as rows by units, in a sample of the rows; the units of images are their channels."""
    values = output.detach()
    if values.dim() >= 4:
        values = values[:16].movedim(1, -1)
    values = values.reshape(-1, values.shape[-1] if values.dim() > 1 else 1)
    rows = max(64, UNIT_VALUES // max(1, values.shape[1]) // 4)
    return values[:: max(1, len(values) // rows)]


def sampled_ids(ids: Tensor) -> Tensor:
    flat = ids.detach().reshape(-1)
    return flat[:: max(1, len(flat) // IDS)].clone()


def not_zero(gradient: Tensor) -> bool:
    values = gradient._values() if gradient.is_sparse else gradient
    return bool(values.any())


def norms(tensors: list[Tensor]) -> list[Tensor]:
    """The length of each tensor, in float32 where it is narrower."""
    plain = [one._values() if one.is_sparse else one for one in tensors]
    wide = [one if one.dtype in (torch.float32, torch.float64, torch.complex64) else one.float() for one in plain]
    return list(torch._foreach_norm(wide)) if wide else []


def numbers(tensors: list[Tensor]) -> list[float]:
    """Values of tensors of one element, waiting once for each device."""
    if all(one.device.type == "cpu" for one in tensors):
        return [float(one) for one in tensors]
    result = [0.0] * len(tensors)
    for device in {one.device for one in tensors}:
        places = [at for at, one in enumerate(tensors) if one.device == device]
        values = torch.stack([tensors[at].detach().float().reshape(()) for at in places]).tolist()
        for at, value in zip(places, values):
            result[at] = value
    return result


def _local(tensor: Tensor) -> Tensor:
    """The part of a distributed tensor that is here."""
    local: Any = getattr(tensor, "to_local", None)
    return tensor if local is None else local()


def _sample(tensor: Tensor, rows: Tensor | None) -> Tensor:
    tensor = _local(tensor.detach())
    if tensor.is_sparse:
        return tensor._values()
    if rows is not None:
        return tensor[rows]
    if tensor.numel() <= SAMPLE:
        return tensor
    length = len(tensor)
    return tensor[:: max(1, length // max(1, SAMPLE * length // tensor.numel()))]
