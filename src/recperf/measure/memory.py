"""Divides the peak memory of a step: weights, gradients, optimizer state, activations, inputs and temporary tensors, by
the lines that made them, and what is left; and names what grows from step to step.

A dispatch mode sees every tensor that an operator of the step returns, and a weak reference tells when its memory is
released. What lies at the peak is known from these times afterwards.
"""

from __future__ import annotations

import gc
import re
import tracemalloc
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..machine import available_bytes, process_memory
from .clocks import cuda_used
from .places import BACKWARD, ROOT, USER, Position, Stack, Stacks, place_in
from .random_rows import memory_of
from .records import MemoryLine, Place, StepMemory
from .trace.read import summed

WEIGHTS, GRADIENTS, STATE, INPUTS = "weights", "gradients", "optimizer state", "inputs"
ACTIVATIONS, TEMPORARY, CACHES, OUTSIDE = "activations", "temporary tensors", "caches and fragments", "outside torch"
KEPT = "other tensors of earlier steps"
PARTS = (WEIGHTS, GRADIENTS, STATE, ACTIVATIONS, INPUTS, TEMPORARY, KEPT, CACHES, OUTSIDE)
LINES = 20
GROWS = 64 << 10
"""Bytes a step from which memory of Python that grows is looked at by line."""
LEAST = 4 << 10
"""Bytes a step that a line of tensors must add to be named."""
REQUESTED, REST = "asked for", "activations, temporary tensors and what lies outside torch"
ASKED = re.compile(r"tried to allocate ([\d.]+) (bytes|[KMGT]iB)", re.IGNORECASE)
UNITS = {"bytes": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
DEEP = 12
"""Frames of Python's own trace of its memory."""


@dataclass(slots=True, eq=False)
class _Block:
    """Memory of one storage."""

    bytes: int
    device: str
    born: int
    """Counts operators, as `died` and the moments of steps do."""
    step: int
    stack: tuple[Position, ...] = ()
    moves: bool = False
    """Whether it is as large as the batch: its rows are, and no parameter has its shape."""
    phase: str = ""
    """Where it was made: forward, backward or optimizer; empty: before the step."""
    died: int | None = None
    role: str = ""


class MemoryWatch:
    """Follows the memory of the tensors of counted steps."""

    def __init__(self, stacks: Stacks) -> None:
        self._stacks = stacks
        self.modules: Callable[[], Iterable[Any]] = tuple
        self.optimizers: Callable[[], Iterable[Any]] = tuple
        """Those of the loop, as far as its owner knows them."""
        self._parameters: dict[int, Any] = {}
        """Parameters that operators used."""
        self._blocks: dict[int, _Block] = {}
        """Those in memory, by the address of their storage object."""
        self._references: dict[int, Any] = {}
        self._all: list[_Block] = []
        self._live: defaultdict[str, int] = defaultdict(int)
        self._now = self._step = 0
        self._peak: dict[str, tuple[int, int]] = {}
        """Of the current step by device: bytes, and the moment."""
        self._begin, self._backward = 0, 0
        """When the step, and its backward pass, began."""
        self._forward: dict[int, tuple[Position, ...]] = {}
        """The lines of nodes of autograd, by their sequence numbers."""
        self._batch = self._next_batch = 0
        self._owned: set[tuple[int, ...]] = set()
        """Shapes of parameters."""
        self._moving: defaultdict[str, int] = defaultdict(int)
        self._most: dict[str, tuple[int, int]] = {}
        """Of the current step by device: the most that is as large as the batch, and what lay beside it."""
        self._before: tuple[int, int] = (0, 0)
        """Memory of the process, and of tensors on the host, at the start of the step."""
        self._host_peak = self._free = 0

    def begin_step(self) -> None:
        """Begin a step; the one before has ended."""
        self.mark()
        self._step += 1
        self._begin, self._backward = self._now, 0
        self._peak = {device: (live, self._now) for device, live in self._live.items()}
        self._most = {}
        self._next_batch = 0
        begin_host_peak()
        memory = process_memory()
        self._before = memory.get("own", 0) + memory.get("files", 0), self._live["cpu"]

    def mark(self) -> None:
        """Find the weights, gradients and states of optimizers that are in memory now."""
        seen = [tensor for reference in self._parameters.values() if (tensor := reference()) is not None]
        gradients = ((GRADIENTS, tensor.grad) for tensor in seen if tensor.grad is not None)
        for role, tensor in [*owned(self.modules(), self.optimizers()), *((WEIGHTS, one) for one in seen), *gradients]:
            self._owned.add(tuple(tensor.shape))
            for part in _parts(tensor):
                block = self._add(part, (), "")
                if block is not None and not block.role:
                    block.role = role

    def see(self, inputs: Iterable[Tensor], outputs: Iterable[Tensor], stack: tuple[Position, ...]) -> None:
        """Note the tensors of an operator."""
        self._now += 1
        node = torch._C._current_autograd_node() if hasattr(torch._C, "_current_autograd_node") else None
        phase = "forward"
        if node is not None or stack[:1] == (BACKWARD,):
            phase, self._backward = "backward", self._backward or self._now
            stack = self._forward.get(node._sequence_nr(), stack) if node is not None else stack
        elif torch.is_grad_enabled():
            # The node of this operator was numbered just before.
            self._forward[torch.autograd._get_sequence_nr() - 1] = stack  # type: ignore[attr-defined]
        elif self._backward:
            phase = "optimizer"
        for tensor in inputs:
            if isinstance(tensor, nn.Parameter) and id(tensor) not in self._parameters:
                self._parameters[id(tensor)] = ref(tensor)
            for part in _parts(tensor):
                block = self._add(part, (), "")
                if block is not None and not block.role and not self._next_batch and tensor.dim():
                    self._batch = self._next_batch = tensor.shape[0]
        for tensor in outputs:
            for part in _parts(tensor):
                self._add(part, stack, phase)
        for device, live in self._live.items():
            if live > self._peak.get(device, (0, 0))[0]:
                self._peak[device] = live, self._now
            if self._moving[device] > self._most.get(device, (0, 0))[0]:
                self._most[device] = self._moving[device], live - self._moving[device]

    def _add(self, tensor: Tensor, stack: tuple[Position, ...], phase: str) -> _Block | None:
        try:
            storage = tensor.untyped_storage()
            key, count = storage._cdata, storage.nbytes()
        except (RuntimeError, NotImplementedError):
            return None
        block = self._blocks.get(key)
        if block is not None:
            self._live[block.device] += count - block.bytes
            block.bytes = count
            return block
        rows, shape = tensor.shape[0] if tensor.dim() else 0, tuple(tensor.shape)
        moves = bool(self._batch and rows and rows % self._batch == 0 and shape not in self._owned)
        block = _Block(count, str(storage.device.type), self._now, self._step, stack, moves, phase)
        self._moving[block.device] += moves * count
        self._blocks[key] = block
        self._references[key] = ref(storage, partial(self._released, key))
        self._all.append(block)
        self._live[block.device] += count
        return block

    def _released(self, key: int, reference: Any) -> None:
        block = self._blocks.pop(key, None)
        self._references.pop(key, None)
        if block is not None:
            block.died = self._now
            self._live[block.device] -= block.bytes
            self._moving[block.device] -= block.moves * block.bytes

    def end(self) -> None:
        """The last step has ended."""
        self._host_peak = process_memory().get("peak", 0)
        self._free = available_bytes()
        self.mark()
        self._references.clear()

    def result(self, around: Stack) -> list[StepMemory]:
        """The peak of the last step, of the host and of a device that it used."""
        return [self._of(device, around) for device in sorted(self._peak, key=lambda one: one != "cpu")]

    def _of(self, device: str, around: Stack) -> StepMemory:
        live, moment = self._peak[device]
        sums: defaultdict[str, int] = defaultdict(int)
        lines: defaultdict[tuple[str, Place], int] = defaultdict(int)
        for block in self._all:
            if block.device != device or block.born > moment or (block.died is not None and block.died < moment):
                continue
            part = self._part(block, moment)
            sums[part] += block.bytes
            place = place_in(self._stacks.stack(block.stack), around) if block.stack else None
            if place is not None and part in (ACTIVATIONS, TEMPORARY):
                lines[part, place] += block.bytes
        if device == "cpu":
            process, tensors = self._before
            peak = max(self._host_peak, live)
            outside = max(0, min(peak - live, process - tensors))
            sums[OUTSIDE], sums[CACHES] = outside, peak - live - outside
            name, capacity = "host", self._free + peak
        else:
            allocated, peak = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
            # Memory that operators use inside.
            sums[TEMPORARY] += max(0, allocated - live)
            peak = max(peak, live)
            sums[CACHES] = peak - max(allocated, live)
            name, capacity = torch.cuda.get_device_name(), torch.cuda.mem_get_info()[1]
        memory = StepMemory(
            device=name, peak_bytes=peak, parts={part: sums[part] for part in PARTS if sums[part]},
            capacity_bytes=capacity, batch=self._batch or None,
            lines=[
                MemoryLine(place.function, place.file, place.line, part=part, bytes=count)
                for (part, place), count in sorted(lines.items(), key=lambda item: -item[1])[:LINES]
            ],
            growth=self._growth(device, around),
        )  # fmt: skip
        moving, fixed = self._most.get(device, (0, 0))
        if moving and self._batch:
            room = capacity - fixed - sums[OUTSIDE] - sums[CACHES]
            memory.largest_batch = max(self._batch, int(self._batch * room / moving))
        return memory

    def _part(self, block: _Block, moment: int) -> str:
        if block.role:
            return block.role
        if block.step < self._step:
            return KEPT
        if not block.phase:
            return INPUTS
        held = block.died is None or (self._backward and block.died >= self._backward)
        return ACTIVATIONS if block.phase == "forward" and held else TEMPORARY

    def _growth(self, device: str, around: Stack) -> list[MemoryLine]:
        """Lines whose tensors of every earlier step are still there, in bytes a step."""
        if self._step < 3:
            return []
        kept: defaultdict[Place, defaultdict[int, int]] = defaultdict(lambda: defaultdict(int))
        for block in self._all:
            if block.device == device and block.phase and not block.role and block.died is None and block.stack:
                place = place_in(self._stacks.stack(block.stack), around)
                if place is not None:
                    kept[place][block.step] += block.bytes
        earlier = range(1, self._step)
        rows = [
            (place, sum(steps[step] for step in earlier) // len(earlier))
            for place, steps in kept.items()
            if all(steps[step] >= LEAST for step in earlier)
        ]
        return [
            MemoryLine(place.function, place.file, place.line, part="grows", bytes=count)
            for place, count in sorted(rows, key=lambda row: -row[1])
        ]


def _parts(tensor: Tensor) -> list[Tensor]:
    return [tensor] if tensor.layout == torch.strided else list(memory_of(tensor))


def owned(modules: Iterable[Any], optimizers: Iterable[Any]) -> list[tuple[str, Tensor]]:
    """The parameters and buffers of modules, and the gradients and states of optimizers."""
    found: list[tuple[str, Tensor]] = []
    for module in modules:
        own = [*vars(module).get("_parameters", {}).values(), *vars(module).get("_buffers", {}).values()]
        found += [(WEIGHTS, tensor) for tensor in own if isinstance(tensor, Tensor)]
    for optimizer in optimizers:
        for group in vars(optimizer).get("param_groups", ()):
            found += [(WEIGHTS, tensor) for tensor in group["params"]]
        states = (state for state in list(vars(optimizer).get("state", {}).values()) if isinstance(state, dict))
        found += [(STATE, tensor) for state in states for tensor in state.values() if isinstance(tensor, Tensor)]
    gradients = [(GRADIENTS, tensor.grad) for _, tensor in found if tensor.is_leaf and tensor.grad is not None]
    return found + gradients


def everything() -> list[tuple[str, Tensor]]:
    """Those of all modules and optimizers of this process."""
    modules, optimizers = [], []
    for item in gc.get_objects():
        kind = type(item)
        if issubclass(kind, nn.Module):
            modules.append(item)
        elif issubclass(kind, Optimizer):
            optimizers.append(item)
    return owned(modules, optimizers)


def begin_host_peak() -> None:
    """Count the peak of this process from now on."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def begin_peak() -> None:
    """Count what `peak_bytes` returns from now on."""
    begin_host_peak()
    if cuda_used():
        torch.cuda.reset_peak_memory_stats()


def peak_bytes() -> int:
    """The peak of a device where the process uses one, else that of the process; 0: not known."""
    return int(torch.cuda.max_memory_allocated()) if cuda_used() else process_memory().get("peak", 0)


def is_out_of_memory(error: BaseException) -> bool:
    named = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    return named or (isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error))


def at_failure(error: BaseException, stacks: Stacks) -> StepMemory:
    """What was in memory when a program ran out of it, and the line that asked for more."""
    match = ASKED.search(str(error))
    asked = round(float(match[1]) * UNITS[match[2].lower()]) if match else 0
    device = "cuda" if isinstance(error, torch.OutOfMemoryError) else "cpu"
    sizes: dict[int, tuple[str, int]] = {}
    for role, tensor in everything():
        for part in _parts(tensor):
            if part.device.type == device:
                storage = part.untyped_storage()
                sizes.setdefault(storage._cdata, (role, storage.nbytes()))
    parts: dict[str, float] = dict(summed(sizes.values()))
    known = int(sum(parts.values()))
    if device == "cuda":
        name, capacity = torch.cuda.get_device_name(), torch.cuda.mem_get_info()[1]
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        parts[ACTIVATIONS], parts[CACHES] = max(0, allocated - known), reserved - allocated
    else:
        memory = process_memory()
        name, held = "host", max(known, memory.get("own", 0) + memory.get("files", 0))
        capacity, parts[REST] = available_bytes() + held, held - known
    parts[REQUESTED] = asked
    place = None
    frames = error.__traceback__
    while frames is not None:
        kind, file = stacks.file(frames.tb_frame.f_code.co_filename)
        if kind == USER:
            place = MemoryLine(frames.tb_frame.f_code.co_name, file, frames.tb_lineno, part=REQUESTED, bytes=asked)
        frames = frames.tb_next
    whole = {part: int(count) for part, count in parts.items() if count}
    return StepMemory(name, sum(whole.values()), whole, [place] if place else [], [], capacity)


class PythonMemory:
    """Memory of Python, such as lists and numpy's arrays, that grows from step to step, by line."""

    def __init__(self, stacks: Stacks) -> None:
        self._stacks, self._taken = stacks, list[Any]()
        self._own = not tracemalloc.is_tracing()
        if self._own:
            tracemalloc.start(DEEP)

    def end_step(self) -> None:
        self._taken.append(tracemalloc.take_snapshot())

    def close(self) -> list[MemoryLine]:
        """The lines that held more after every step."""
        self.end_step()
        if self._own:
            tracemalloc.stop()
        times = [summed(self._lines(one)) for one in self._taken]
        if len(times) < 3:
            return []
        rows = []
        for place, last in times[-1].items():
            series = [one[place] for one in times]
            steps = [after - before for before, after in zip(series, series[1:])]
            if min(steps) >= GROWS and last > series[0]:
                rows.append(MemoryLine(place.function, place.file, place.line, part="grows", bytes=int(min(steps))))
        return sorted(rows, key=lambda row: -row.bytes)

    def _lines(self, snapshot: Any) -> Iterable[tuple[Place, float]]:
        # Grouped by the snapshot itself: an object for each allocation takes longer than all else.
        for one in snapshot.statistics("traceback"):
            for frame in reversed(one.traceback):
                if frame.filename.startswith(ROOT):
                    break
                kind, file = self._stacks.file(frame.filename)
                if kind == USER:
                    yield Place("", file, frame.lineno), float(one.size)
                    break
