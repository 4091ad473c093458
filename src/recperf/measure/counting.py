"""Counts the work of every operator of a step: FLOPs, bytes, where the bytes come from, and the rows of random access.

A dispatch mode sees each operator with its tensors, so nothing is counted by hand: FLOPs come from torch's own counter,
bytes from the sizes of the tensors. Which bytes come from memory follows from the order of accesses: a tensor is still
cached where the step touched fewer bytes than the cache holds since it last touched that tensor.
"""

from __future__ import annotations

import math
import resource
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, ValuesView
from time import process_time_ns
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from ..ops.operators import NativeCall
from .clocks import ThreadClock
from .memory import MemoryWatch
from .operators import ROW_ACCESS, CallWork, is_special, overwrites, traffic_kind
from .places import Position, Stacks
from .random_rows import MOST_IDS, RandomRows, address_of, memory_of, random_rows, rows_of_table
from .trace.read import grouped

PAGE = resource.getpagesize()
_PRODUCTS = {"aten::_addmm_activation": "addmm", "aten::addmm_": "addmm", "aten::baddbmm_": "baddbmm"}
"""Products that torch's counter leaves out, with an activation or in place, and those that take the same work."""
_CPU_ATTENTION = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": 1.0,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": 2.5,
}
"""Attention on a CPU, which torch's counter leaves out, with its FLOPs relative to the forward pass."""

_WITHOUT_ACCESS = {f"aten::{name}" for name in ("empty", "empty_strided", "empty_like", "new_empty")}
_WITHOUT_ACCESS |= {"aten::_sparse_coo_tensor_with_dims_and_tensors"}
"""Operators that touch no data although their results are not views of a single input."""


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that hides itself from torch's compiler only where the program uses it: torch's own modes import
    it, which takes seconds."""

    def __init_subclass__(cls) -> None:
        plain: Any = cls.__torch_dispatch__
        super().__init_subclass__()  # type: ignore[no-untyped-call]
        hidden: Any = cls.__torch_dispatch__

        def dispatch(self: Any, *arguments: Any) -> Any:
            return (hidden if "torch._dynamo" in sys.modules else plain)(self, *arguments)

        cls.__torch_dispatch__ = dispatch  # type: ignore[method-assign]


class Counter(DispatchMode):
    """Lists the work of the operators that the current thread calls while it is active, one list per step."""

    def __init__(self, cache_bytes: int, stream_cache_bytes: int, stacks: Stacks | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cache_bytes, self.stacks = cache_bytes, stacks or Stacks()
        self.positions: set[Position] = set()
        """Where Python calls operators."""
        self.steps: list[list[CallWork]] = []
        self.ended = False
        """Whether nothing is counted any more, also where the mode is still active in its thread."""
        self._memory = _Memory(stream_cache_bytes)
        self.memory = MemoryWatch(self.stacks)
        self._clock = ThreadClock()
        self._inside = False

    def begin_step(self) -> None:
        self.steps.append([])
        self._memory.begin_step()
        self.memory.begin_step()

    def result(self) -> list[CallWork]:
        """The work of the last step; the steps before it tell what the caches hold."""
        if not self.steps:
            return []
        self._clock.close()
        _resolve_rows(self.steps, self.cache_bytes, self._memory.step_bytes)
        return self.steps[-1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._inside or self.ended:
            return func(*args, **kwargs)
        caller = sys._getframe(1)
        self.positions.add(self.stacks.position(caller))
        if func._overloadpacket not in flop_registry and torch.is_inference_mode_enabled():
            # An operator that only calls others, which inference mode does not take apart, is counted by those.
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result, spent = self._timed(lambda: func(*args, **kwargs))
        if self.steps:
            with torch._C._DisableTorchDispatch():
                try:
                    work = self._count(func, args, kwargs, result, spent.faults)
                except (RuntimeError, TypeError, ValueError, AttributeError, LookupError):
                    # Tensors of a kind that has no sizes or addresses must not end the program.
                    work = CallWork(func._schema.name, known=False)
            spent.note(work)
            work.stack = self.stacks.of(caller)
            self.steps[-1].append(work)
            with torch._C._DisableTorchDispatch():
                self.memory.see(tensors_in((args, kwargs.values())), tensors_in(result), work.stack)
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
            result, spent = self._timed(call.run)
        finally:
            self._inside = False
        with torch._C._DisableTorchDispatch():
            work = CallWork(call.name, flops=flops, special=special, precision=precision_of(inputs))
            spent.note(work)
            if rows is not None:
                self._count_rows(work, rows_of_table(*rows, updates=call.updates))
            known: set[int] = {address_of(rows[0])} if rows is not None else set()
            outputs = list(tensors_in(result))
            for tensor in (*inputs, *outputs):
                if address_of(tensor) not in known:
                    known.add(address_of(tensor))
                    self._touch(work, tensor, 1)
            if spent.faults and not any(tensor.is_cuda for tensor in outputs):
                work.new_bytes = min(spent.faults * PAGE, sum(size_of(tensor) for tensor in outputs))
        work.stack = self.stacks.of(sys._getframe(1))
        self.steps[-1].append(work)
        self.memory.see(inputs, outputs, work.stack)
        return result

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any, faults: int) -> CallWork:
        work = CallWork(func._schema.name)
        inputs, outputs = list(tensors_in((args, kwargs.values()))), list(tensors_in(result))
        if is_view(func, outputs):
            return work
        work.largest = tuple(max((one.shape for one in inputs), key=math.prod, default=()))
        arguments = named(func, args, kwargs)
        written = written_by(func, arguments)
        rows = random_rows(work.name, arguments, result, written)
        if not any(tensor.layout != torch.strided for tensor in inputs):
            work.flops, work.precision = flops_of(func, args, kwargs, result, inputs)
        if not (rows or work.flops or is_understood(func, inputs, outputs, written)):
            work.known = False
            return work
        integers = bool(outputs) and not outputs[0].dtype.is_floating_point
        if is_special(work.name, integers=integers):
            work.special = max((tensor.numel() for tensor in outputs), default=0)
        if rows is not None:
            self._count_rows(work, rows)
        # Of a tensor that another shall be like only the sizes matter.
        sizes_only = work.name.endswith("_like") or "::new_" in work.name
        read = [] if sizes_only else [part for tensor in inputs for part in memory_of(tensor)]
        known, overwritten = (
            set(rows.tables) if rows else set(),
            overwrites(work.name) or func._schema.overload_name.endswith("out"),
        )
        for part in read:
            if address_of(part) not in known:
                self._touch(work, part, 2 if address_of(part) in written and not overwritten else 1)
        known.update(map(address_of, read))
        for part in (part for tensor in outputs for part in memory_of(tensor)):
            if address_of(part) not in known:
                self._touch(work, part, 1)
        if faults and not any(tensor.is_cuda for tensor in outputs):
            work.new_bytes = min(faults * PAGE, sum(size_of(tensor) for tensor in outputs) or faults * PAGE)
        return work

    def _touch(self, work: CallWork, tensor: Tensor, factor: int) -> None:
        size = size_of(tensor)
        if size:
            work.bytes += factor * size
            if self._memory.touch(address_of(tensor), size):
                work.memory_bytes += factor * size

    def _count_rows(self, work: CallWork, rows: RandomRows) -> None:
        """Count the random rows; those that are updated are read and written back."""
        count = rows.ids.numel()
        if not count or not rows.table_rows:
            return
        if rows.in_host_memory:
            work.host_bytes = count * rows.accesses * rows.row_bytes
            return
        work.row_bytes, work.table_rows = max(1, rows.row_bytes), rows.table_rows
        work.rows = count * rows.accesses
        work.bytes += work.rows * work.row_bytes
        distinct = torch.unique(rows.ids.detach().reshape(-1)[:MOST_IDS]).cpu()
        work.distinct = round(distinct.numel() * (count / min(count, MOST_IDS)))
        work.ids, work.position = (rows.address, distinct), self._memory.touched
        self._memory.touched += work.distinct * work.row_bytes

    def _timed(self, run: Callable[[], Any]) -> tuple[Any, _Spent]:
        before, process, began = resource.getrusage(resource.RUSAGE_SELF), process_time_ns(), self._clock.now()
        result = run()
        spent, process = self._clock.now().since(began), process_time_ns() - process
        after = resource.getrusage(resource.RUSAGE_SELF)
        # Without reads from a disk a thread waits for the others. Where these read too, their mean idle time counts.
        idle = 0
        if after.ru_majflt > before.ru_majflt or after.ru_inblock > before.ru_inblock:
            idle = max(0, min(spent.off, spent.wall - spent.waiting - process // torch.get_num_threads()))
        return result, _Spent(spent.wall, spent.off, idle, after.ru_minflt - before.ru_minflt)


class _Spent(NamedTuple):
    """Where the time of a call went, in ns."""

    wall: int
    off: int
    """The thread did not run, although it had a core."""
    idle: int
    """It waited for a disk: a page of a file or of swap space."""
    faults: int
    """Page faults without reading a file."""

    def note(self, work: CallWork) -> None:
        work.off_ns, work.blocked = self.off - self.idle, self.idle / max(1, self.wall)


class _Memory:
    """The bytes touched since each tensor was last touched, as a cache that replaces the oldest would hold them."""

    LONGEST = 4096
    """Tensors looked back over; that many small ones are cached whatever lies between."""

    def __init__(self, cache_bytes: int) -> None:
        self.cache_bytes = cache_bytes
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
        from_memory = size > self.cache_bytes or not self._cached(key, size)
        self._order.pop(key, None)
        self._order[key] = self._step[key] = size
        return from_memory

    def _cached(self, key: Any, size: int) -> bool:
        if key not in self._order:
            # Seen for the first time: written by nobody yet, so it does not come from a cache.
            return False
        between = size
        for count, (other, other_size) in enumerate(reversed(self._order.items())):
            if other == key or count > self.LONGEST:
                return True
            between += other_size
            if between > self.cache_bytes:
                return False
        return True


def _resolve_rows(steps: list[list[CallWork]], cache_bytes: int, step_bytes: int) -> None:
    """Decide how many of the last step's rows come from memory.

    A row is cached if the whole step fits the cache and so does its table, or if the row was used so recently that what
    was touched in between fits. How many steps were looked at does not matter: where they fit the cache,
    it holds rows of earlier steps too.
    """
    looked_up = (work for step in steps for work in step if work.ids is not None)
    calls = grouped(looked_up, lambda work: work.ids[0] if work.ids else 0)
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
                before.ids[1]
                for before in group[:position]
                if before.ids and work.position - before.position <= cache_bytes
            ]
            if step_bytes <= cache_bytes and table_bytes <= cache_bytes:
                work.memory_rows = 0
                continue
            memory_rows = int((~torch.isin(ids, torch.cat(recent))).sum()) if recent else ids.numel()
            if position and work.position <= cache_bytes:
                # All steps so far fit the cache: it also holds rows of steps before them, drawn as these were.
                drawn = sum(before.distinct for before in group[:position]) / max(1, work.position) * cache_bytes
                memory_rows = min(memory_rows, round(ids.numel() * math.exp(-drawn / max(1, work.table_rows))))
            # A row that one call uses twice is cached the second time if all rows of the call are.
            again = (work.rows - work.distinct) * (1 - min(1.0, cache_bytes / max(1, work.distinct * work.row_bytes)))
            work.memory_rows = min(work.rows, round(memory_rows + again * memory_rows / max(1, ids.numel())))
    for work in (work for step in steps for work in step):
        work.ids = None


def _distinct(calls: list[CallWork]) -> int:
    """Bytes of the different rows of one table that some calls use."""
    ids = [work.ids[1] for work in calls if work.ids is not None]
    return torch.unique(torch.cat(ids)).numel() * calls[-1].row_bytes if ids else 0


def named(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments by their names in the operator's schema, whose order differs between versions of a library."""
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args)), **kwargs}


def is_understood(func: Any, inputs: list[Tensor], outputs: list[Tensor], written: set[int]) -> bool:
    """Whether an operator reads and writes its tensors as a whole.

    Of operators outside the tables those of torch do, unless ids among their tensors may select parts of a larger one.
    """
    name = func._schema.name
    if name in ROW_ACCESS:
        # A sparse gradient has no more than the rows.
        return any(tensor.layout != torch.strided for tensor in outputs)
    if traffic_kind(name) or torch.Tag.pointwise in func.tags or name.startswith(("aten::_foreach_", "aten::_fused_")):
        return True
    if not name.startswith("aten::") or any(tensor.layout != torch.strided for tensor in inputs):
        return False
    largest = max((tensor.numel() for tensor in outputs), default=0)
    ids = [tensor for tensor in inputs if not tensor.dtype.is_floating_point and tensor.dtype != torch.bool]
    others = [tensor for tensor in inputs if all(tensor is not one for one in ids[:1])]
    return not ids or all(tensor.numel() <= largest and address_of(tensor) not in written for tensor in others)


def flops_of(func: Any, args: Any, kwargs: Any, result: Any, inputs: list[Tensor]) -> tuple[int, str]:
    name = func._schema.name
    count = flop_registry.get(getattr(torch.ops.aten, _PRODUCTS[name]) if name in _PRODUCTS else func._overloadpacket)
    if name in _PRODUCTS:
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
    """The tensors among arguments or results; other things with elements, such as a storage, have none."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple, ValuesView)):
        for value in values:
            yield from tensors_in(value)


def size_of(tensor: Tensor) -> int:
    """Bytes of the different elements: expanded dimensions repeat them. 0 for sparse tensors, which have no strides."""
    if tensor.layout != torch.strided:
        return 0
    sizes: Iterable[int] = (n for n, stride in zip(tensor.shape, tensor.stride()) if stride or n == 0)
    return math.prod(sizes) * tensor.element_size()


def is_view(func: Any, outputs: list[Tensor]) -> bool:
    """Whether the operator returns another view of an input without touching its data."""
    aliases = [argument.alias_info for argument in func._schema.arguments if argument.alias_info is not None]
    if not outputs or not aliases or any(alias.is_write for alias in aliases):
        return func._schema.name in _WITHOUT_ACCESS
    return True


def written_by(func: Any, arguments: dict[str, Any]) -> set[int]:
    """The addresses of the tensors that the operator changes in place."""
    changed = (
        arguments.get(argument.name)
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    return {address_of(part) for value in changed for tensor in tensors_in(value) for part in memory_of(tensor)}
