"""Counts the work of every operator of a step: FLOPs, bytes, where the bytes come from, and the rows of random access.

A dispatch mode sees each operator with its tensors, so nothing is counted by hand: FLOPs come from torch's own counter,
bytes from the sizes of the tensors. Which bytes come from memory follows from the order of accesses: a tensor is still
cached where the step touched fewer bytes than the measured knee since it last touched that tensor.
"""

from __future__ import annotations

import math
import resource
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from time import perf_counter_ns, thread_time_ns
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from ..ops.operators import NativeCall
from .operators import RESULT, ROW_ACCESS, CallWork, is_special, overwrites

PAGE = resource.getpagesize()
MOST_IDS = 1 << 22
"""Ids of one call that are looked at; a longer list is counted by its first part."""
_FUSED_PRODUCT = "aten::_addmm_activation"
"""A product with bias and activation, which torch's counter leaves out."""
_CPU_ATTENTION = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": 1.0,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": 2.5,
}
"""Attention on a CPU, which torch's counter leaves out, with its FLOPs relative to the forward pass."""


class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lists the work of the operators that the current thread calls while it is active, one list per step."""

    def __init__(self, knee: int, stream_knee: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.knee = knee
        self.steps: list[list[CallWork]] = []
        self.ended = False
        """Whether nothing is counted any more, also where the mode is still active in its thread."""
        self._memory = _Memory(stream_knee)
        self._inside = False

    def begin_step(self) -> None:
        self.steps.append([])
        self._memory.begin_step()

    def result(self) -> list[CallWork]:
        """The work of the last step; the steps before it tell what the caches hold."""
        if not self.steps:
            return []
        _resolve_rows(self.steps, self.knee, self._memory.step_bytes)
        return self.steps[-1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._inside or self.ended:
            return func(*args, **kwargs)
        if func._overloadpacket not in flop_registry and torch.is_inference_mode_enabled():
            # An operator that only calls others, which inference mode does not take apart, is counted by those.
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result, off_ns, faults = _timed(lambda: func(*args, **kwargs))
        if self.steps:
            with torch._C._DisableTorchDispatch():
                try:
                    work = self._count(func, args, kwargs, result, faults)
                except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
                    # Tensors of a kind that has no sizes or addresses must not end the program.
                    work = CallWork(func._schema.name)
            work.off_ns = off_ns
            self.steps[-1].append(work)
        return result

    def native(self, call: NativeCall) -> Any:
        """Run a function in C or Triton and count its work; the operators inside it belong to it."""
        if not self.steps or self._inside or _get_current_dispatch_mode() is not self:
            return call.run()
        self._inside = True
        try:
            with torch._C._DisableTorchDispatch():
                rows = call.of(call.rows)
                reads = call.of(call.reads)
                inputs = list(tensors_in((call.args, call.kwargs.values()) if reads is None else reads))
                flops, special = call.of(call.flops) or 0, call.of(call.special) or 0
            result, off_ns, faults = _timed(call.run)
        finally:
            self._inside = False
        with torch._C._DisableTorchDispatch():
            work = CallWork(call.name, flops=flops, special=special, precision=precision_of(inputs), off_ns=off_ns)
            if rows is not None:
                self._count_rows(work, *rows, updates=call.updates)
            known: set[int] = {id(rows[0])} if rows is not None else set()
            outputs = list(tensors_in(result))
            for tensor in (*inputs, *outputs):
                if id(tensor) not in known:
                    known.add(id(tensor))
                    self._touch(work, tensor, 1)
            if faults and not any(tensor.is_cuda for tensor in outputs):
                work.fresh = min(faults * PAGE, sum(size_of(tensor) for tensor in outputs))
        self.steps[-1].append(work)
        return result

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any, faults: int) -> CallWork:
        work = CallWork(func._schema.name)
        inputs, outputs = list(tensors_in((args, kwargs.values()))), list(tensors_in(result))
        work.flops, work.precision = flops_of(func, args, kwargs, result, inputs)
        if is_special(work.name):
            work.special = max((tensor.numel() for tensor in outputs), default=0)
        if is_view(func, outputs):
            return work
        rows = random_rows(work.name, args, result)
        if rows is not None:
            self._count_rows(work, *rows, updates=ROW_ACCESS[work.name].updates)
        table = rows[0] if rows is not None else None
        written = written_by(func, args, kwargs)
        overwritten = overwrites(work.name)
        for tensor in inputs:
            if tensor is not table:
                self._touch(work, tensor, 2 if id(tensor) in written and not overwritten else 1)
        known = {id(tensor) for tensor in inputs}
        for tensor in outputs:
            if id(tensor) not in known and (tensor is not table or work.name.endswith("dense_backward")):
                self._touch(work, tensor, 1)
        if faults and not any(tensor.is_cuda for tensor in outputs):
            work.fresh = min(faults * PAGE, sum(size_of(tensor) for tensor in outputs) or faults * PAGE)
        return work

    def _touch(self, work: CallWork, tensor: Tensor, factor: int) -> None:
        size = size_of(tensor)
        if size:
            work.bytes += factor * size
            if self._memory.touch(address_of(tensor), size):
                work.beyond += factor * size

    def _count_rows(self, work: CallWork, table: Tensor, ids: Tensor, *, updates: bool) -> None:
        """Count the random rows; those that are updated are read and written back."""
        if not ids.numel() or not table.numel():
            return
        work.row_bytes = max(1, table.numel() // table.shape[0] if table.dim() > 1 else 1) * table.element_size()
        work.rows = ids.numel() * (1 + updates)
        work.table_rows = table.shape[0] if table.dim() else 1
        if work.name in ROW_ACCESS and ROW_ACCESS[work.name].unit == "element":
            work.row_bytes = table.element_size()
            work.table_rows = table.numel()
        work.bytes += work.rows * work.row_bytes
        flat = ids.detach().reshape(-1)[:MOST_IDS]
        distinct = torch.unique(flat.nonzero().reshape(-1) if flat.dtype == torch.bool else flat).cpu()
        work.distinct = round(distinct.numel() * (ids.numel() / min(ids.numel(), MOST_IDS)))
        work.ids, work.position = (address_of(table), distinct), self._memory.touched
        self._memory.touched += work.distinct * work.row_bytes


def _timed(run: Callable[[], Any]) -> tuple[Any, int, int]:
    """The result, the time in ns in which the thread did not run, and the page faults meanwhile."""
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    wall, cpu = perf_counter_ns(), thread_time_ns()
    result = run()
    cpu, wall = thread_time_ns() - cpu, perf_counter_ns() - wall
    return result, max(0, wall - cpu), resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults


class _Memory:
    """The bytes touched since each tensor was last touched, as a cache that replaces the oldest would hold them."""

    LONGEST = 4096
    """Tensors looked back over; that many small ones are cached whatever lies between."""

    def __init__(self, knee: int) -> None:
        self.knee = knee
        self._order: OrderedDict[Any, int] = OrderedDict()
        self._step: dict[Any, int] = {}
        self.touched = 0
        """Bytes of all accesses so far."""

    def begin_step(self) -> None:
        self._step = {}

    @property
    def step_bytes(self) -> int:
        """Different bytes that the current step touched."""
        return sum(self._step.values())

    def touch(self, key: Any, size: int) -> bool:
        """Whether these bytes come from memory; they are the latest ones from now on."""
        self.touched += size
        beyond = size > self.knee or not self._cached(key, size)
        self._order.pop(key, None)
        self._order[key] = self._step[key] = size
        return beyond

    def _cached(self, key: Any, size: int) -> bool:
        if key not in self._order:
            # Seen for the first time: written by nobody yet, so it does not come from a cache.
            return False
        between = size
        for count, (other, other_size) in enumerate(reversed(self._order.items())):
            if other == key or count > self.LONGEST:
                return True
            between += other_size
            if between > self.knee:
                return False
        return True


def _resolve_rows(steps: list[list[CallWork]], knee: int, step_bytes: int) -> None:
    """Decide how many of the last step's rows come from memory.

    A row is cached if the whole step fits the cache and so does its table, or if the row was used so recently that what
    was touched in between fits. How many steps were looked at does not matter: where they fit the cache,
    it holds rows of earlier steps too.
    """
    calls: defaultdict[int, list[CallWork]] = defaultdict(list)
    for work in (work for step in steps for work in step):
        if work.ids is not None:
            calls[work.ids[0]].append(work)
    latest = {id(work) for work in steps[-1]}
    rows = sum(_distinct([work for work in group if id(work) in latest]) for group in calls.values())
    step_bytes += rows
    for group in calls.values():
        table_bytes = group[-1].row_bytes * group[-1].table_rows
        for position, work in enumerate(group):
            if id(work) not in latest or work.ids is None:
                continue
            ids = work.ids[1]
            recent = [
                before.ids[1] for before in group[:position] if before.ids and work.position - before.position <= knee
            ]
            if step_bytes <= knee and table_bytes <= knee:
                work.missed = 0
                continue
            missed = int((~torch.isin(ids, torch.cat(recent))).sum()) if recent else ids.numel()
            if position and work.position <= knee:
                # All steps so far fit the cache: it also holds rows of steps before them, drawn as these were.
                drawn = sum(before.distinct for before in group[:position]) / max(1, work.position) * knee
                missed = min(missed, round(ids.numel() * math.exp(-drawn / max(1, work.table_rows))))
            # A row that one call uses twice is cached the second time if all rows of the call are.
            again = (work.rows - work.distinct) * (1 - min(1.0, knee / max(1, work.distinct * work.row_bytes)))
            work.missed = min(work.rows, round(missed + again * missed / max(1, ids.numel())))
    for work in (work for step in steps for work in step):
        work.ids = None


def _distinct(calls: list[CallWork]) -> int:
    """Bytes of the different rows of one table that some calls use."""
    ids = [work.ids[1] for work in calls if work.ids is not None]
    return torch.unique(torch.cat(ids)).numel() * calls[-1].row_bytes if ids else 0


def random_rows(name: str, args: Any, result: Any) -> tuple[Tensor, Tensor] | None:
    """The table and the ids of an operator that accesses random rows."""
    access = ROW_ACCESS.get(name)
    if access is None or len(args) <= access.ids:
        return None
    table = result if access.table == RESULT else args[access.table]
    ids = args[access.ids]
    if isinstance(ids, (list, tuple)):
        present = [item for item in ids if isinstance(item, Tensor)]
        ids = present[0] if len(present) == 1 else None
    if not isinstance(table, Tensor) or not isinstance(ids, Tensor) or ids.dtype.is_floating_point:
        return None
    return table, ids


def flops_of(func: Any, args: Any, kwargs: Any, result: Any, inputs: list[Tensor]) -> tuple[int, str]:
    name = func._schema.name
    count = flop_registry.get(torch.ops.aten.addmm if name == _FUSED_PRODUCT else func._overloadpacket)
    if name == _FUSED_PRODUCT:
        kwargs = {}
    try:
        if count is not None:
            flops = int(count(*args, **kwargs, out_val=result))
        elif name in _CPU_ATTENTION:
            first = 1 if "backward" in name else 0
            query, key, value = (tensor.shape for tensor in inputs[first : first + 3])
            flops = int(_CPU_ATTENTION[name] * sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]
        else:
            return 0, ""
    except (RuntimeError, TypeError, ValueError, AssertionError, IndexError):
        return 0, ""
    return flops, precision_of(inputs)


def precision_of(inputs: list[Tensor]) -> str:
    tensor = next((tensor for tensor in inputs if tensor.dtype.is_floating_point), None)
    if tensor is None:
        return "float32"
    name = str(tensor.dtype).removeprefix("torch.")
    if name == "float32" and tensor.is_cuda and torch.backends.cuda.matmul.allow_tf32:
        return "tf32"
    return name


def tensors_in(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple)) or (
        hasattr(values, "__iter__") and not isinstance(values, (str, bytes, dict))
    ):
        for value in values:
            yield from tensors_in(value)


def size_of(tensor: Tensor) -> int:
    """Bytes of the different elements: expanded dimensions repeat them. 0 for sparse tensors, which have no strides."""
    if tensor.layout != torch.strided:
        return 0
    sizes: Iterable[int] = (n for n, stride in zip(tensor.shape, tensor.stride()) if stride or n == 0)
    return math.prod(sizes) * tensor.element_size()


def address_of(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return id(tensor)


def is_view(func: Any, outputs: list[Tensor]) -> bool:
    """Whether the operator returns another view of an input without touching its data."""
    aliases = [argument.alias_info for argument in func._schema.arguments if argument.alias_info is not None]
    if not outputs or not aliases or any(alias.is_write for alias in aliases):
        return func._schema.name in ("aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty")
    return True


def written_by(func: Any, args: Any, kwargs: Any) -> set[int]:
    """The identities of the tensors that the operator changes in place."""
    written: set[int] = set()
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            written |= {id(tensor) for tensor in tensors_in(value)}
    return written
