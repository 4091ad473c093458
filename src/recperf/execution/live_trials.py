"""Tries changes on a step whose objects live: threads, fused optimizers, DataLoader workers, a CUDA graph. The changed
and the unchanged step take turns; all that they train is undone, to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import fmean, median
from time import monotonic
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ..machine import available_bytes, usable_cores
from ..measure.clocks import cuda_used
from ..measure.experiments import captured_step, seconds_of
from ..measure.peaks.cpu import using_threads
from ..measure.records import Advice
from ..measure.saved_state import SavedState
from ..runs.step_report import Report
from .change_settings import changes_text
from .trial_search import FEWEST, MOST, NARROW, Compared, NotTried, Search, interval

SECONDS = 60.0
"""Time for all trials together."""
TURN_S = 0.25
PREFETCHED = 2
"""Batches that a worker has ready."""
COPIES = 8
"""Times the weights that must fit into memory to compare them."""
COMPARED = 3
"""Steps after which weights are compared."""
LIVE = {"threads", "optimizer", "workers", "graph"}
"""Changes that can be switched on objects that live."""


@dataclass
class LiveStep:
    """A step as its user runs it."""

    run: Callable[[Any], object]
    """Takes a batch, also where the step takes none."""
    batches: Any
    """Iterated for every side; None where the step takes no batch, or its last batch is used again."""
    last: list[Any]
    """The last batch; empty where there is none."""
    optimizers: list[Any]
    roots: list[object]
    """What a step can change is what they reach."""

    def feed(self, workers: int | None = None) -> Generator[Any]:
        """Its batches again and again; of a DataLoader with this many workers."""
        while self.batches is None:
            yield self.last[0] if self.last else None
        source = self.batches if workers is None else with_workers(self.batches, workers)
        while True:
            yield from source


class LiveTrials(Search):
    """The trials of a step; its state is that of before when the `with` block has ended."""

    what = "weights"

    def __init__(self, step: LiveStep, workers: int, seconds: float = SECONDS) -> None:
        super().__init__(seconds, workers=workers)
        self.step = step
        self._first: list[Tensor] = []

    def compare(self, settings: dict[str, Any], deadline: float, most: int = MOST) -> Compared:
        if unknown := settings.keys() - LIVE:
            raise NotTried(f"{', '.join(unknown)} cannot be switched in a step that runs; a program can: --script")
        try:
            if self.repeats is None:
                self._first = self._trained({})
                self.repeats = _difference(self._first, self._trained({}))
            differs = _difference(self._first, self._trained(settings)) if self._first else None
            with self._undone():
                turns = self._turns(settings, deadline, most)
        except (RuntimeError, ValueError, TypeError) as error:
            raise NotTried(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}") from None
        gains = [math.log(before / after) for before, after in turns]
        range_ = [math.exp(end) for end in interval(gains)]
        return Compared(math.exp(fmean(gains)), range_, median(after for _, after in turns) * 1e3, differs)

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """Inside, steps may train."""
        saved = SavedState(*self.step.roots)
        if saved.problem:
            raise NotTried(f"the step could not be undone: {saved.problem}")
        try:
            yield
        finally:
            saved.restore()

    def _run(self, settings: dict[str, Any], batch: Any) -> Callable[[], object]:
        """A step on a batch, which as a graph is captured first."""
        if not settings.get("graph"):
            return lambda: self.step.run(batch)
        # What else is changed is captured too.
        with self._undone(), switched(settings, self.step.optimizers):
            replay = captured_step(lambda: self.step.run(batch))
        if replay is None:
            raise NotTried("the step cannot be captured")
        return replay

    def _trained(self, settings: dict[str, Any]) -> list[Tensor]:
        """The weights after some steps on one batch; none where copies would take too much of the memory."""
        groups = (group for optimizer in self.step.optimizers for group in optimizer.param_groups)
        tensors = [one for group in groups for one in group["params"]]
        if COPIES * sum(one.nbytes for one in tensors) > available_bytes():
            return []
        run = self._run(settings, self.step.last[0] if self.step.last else None)
        with self._undone(), switched(settings, self.step.optimizers):
            for _ in range(COMPARED):
                run()
            return [one.detach().clone() for one in tensors]

    def _turns(self, settings: dict[str, Any], deadline: float, most: int) -> list[tuple[float, float]]:
        """Seconds of a step of turns of both sides."""
        with ExitStack() as stack:
            plain, altered = self.step.feed(), self.step.feed(settings.get("workers"))
            for one in (plain, altered):
                stack.callback(one.close)
            run: Callable[[], object] = lambda: self.step.run(next(altered))  # noqa: E731
            if settings.get("graph"):
                run = self._run(settings, next(altered))
            sides: list[tuple[Callable[[], object], dict[str, Any]]]
            sides = [(lambda: self.step.run(next(plain)), {}), (run, settings)]
            each = 1
            for once, changes in sides:
                with switched(changes, self.step.optimizers):
                    seconds_of(once, 3)
                    seconds = seconds_of(once, 2)
                each = max(each, round(TURN_S / max(seconds, 1e-9)) if seconds < TURN_S else 1)
            if "workers" in settings:
                # Batches that workers have ready must not make up most of a turn.
                each = max(each, 2 * PREFETCHED * max(self.workers, settings["workers"]))
            turns: list[tuple[float, float]] = []
            while len(turns) < most and (len(turns) < FEWEST or monotonic() < deadline):
                times = [0.0, 0.0]
                for number in (0, 1) if len(turns) % 2 == 0 else (1, 0):
                    once, changes = sides[number]
                    with switched(changes, self.step.optimizers):
                        times[number] = seconds_of(once, each)
                turns.append((times[0], times[1]))
                if len(turns) >= FEWEST and monotonic() > deadline:
                    break
                low, high = interval([math.log(a / b) for a, b in turns]) if len(turns) >= FEWEST else (0.0, 1.0)
                if high - low < math.log(NARROW):
                    break
            return turns


def try_changes(step: LiveStep, report: Report, say: Callable[[str], None], seconds: float = SECONDS) -> None:
    """Measure what can be switched, into the advice of the report; a change that no rule advised is added if it
    gains."""
    loader = step.batches if isinstance(step.batches, DataLoader) else None
    with LiveTrials(step, loader.num_workers if loader is not None else 0, seconds) as trials:
        advised = {name for one in report.advice for name in one.settings}
        further = [one for one in _further(step, loader) if not one.settings.keys() & advised]
        advice = [*report.advice, *further]
        trials.try_each(advice, say)
        own = set(map(id, further))
        report.advice = [one for one in advice if id(one) not in own or one.status == "tried"]


def _further(step: LiveStep, loader: Any) -> Iterator[Advice]:
    """Changes that may be tried without a rule that advises them."""
    if cuda_used():
        change = "torch.cuda.graph(graph): step(batch)  # of a batch in the same memory"
        yield Advice("graph", "The whole step as a CUDA graph.", change, settings={"graph": True})
    elif torch.get_num_threads() != usable_cores():
        settings: dict[str, Any] = {"threads": usable_cores()}
        yield Advice("threads", "Another number of threads.", changes_text(settings), settings=settings)
    elif usable_cores() > 1:
        settings = {"threads": max(1, usable_cores() // 2)}
        yield Advice("threads", "Another number of threads.", changes_text(settings), settings=settings)
    kinds = {type(one).__name__ for one in step.optimizers if _fusable(one)}
    for kind in sorted(kinds):
        change = f"torch.optim.{kind}(..., fused=True)"
        yield Advice("optimizer", f"{kind} is not fused.", change, settings={"optimizer": "fused"})
    if loader is not None:
        settings = {"workers": 1 if loader.num_workers != 1 else 0}
        yield Advice("workers", "Another number of workers.", changes_text(settings), settings=settings)


def _fusable(optimizer: Any) -> bool:
    groups = optimizer.param_groups
    tensors = [one for group in groups for one in group["params"]]
    return all("fused" in group and not group["fused"] for group in groups) and all(
        one.is_floating_point() and not one.is_sparse and (one.grad is None or not one.grad.is_sparse)
        for one in tensors
    )


@contextmanager
def switched(settings: dict[str, Any], optimizers: list[Any]) -> Iterator[None]:
    """Inside, these changes are on: threads, and fused optimizers."""
    with ExitStack() as stack:
        if threads := settings.get("threads"):
            stack.enter_context(using_threads(threads))
        if settings.get("optimizer"):
            for optimizer in optimizers:
                if _fusable(optimizer):
                    stack.enter_context(_fused(optimizer, settings["optimizer"]))
        yield


@contextmanager
def _fused(optimizer: Optimizer, way: str) -> Iterator[None]:
    before = [{name: group.get(name) for name in ("fused", "foreach")} for group in optimizer.param_groups]
    steps = [(state, state["step"]) for state in optimizer.state.values() if isinstance(state.get("step"), Tensor)]
    for group in optimizer.param_groups:
        group.update({"fused": False, "foreach": False, way: True})
    if way == "fused":
        for parameter, state in optimizer.state.items():
            if isinstance(state.get("step"), Tensor) and parameter.is_cuda:
                # A fused kernel counts on the device.
                state["step"] = state["step"].to(parameter.device)
    try:
        yield
    finally:
        for group, own in zip(optimizer.param_groups, before):
            group.update(own)
        for state, step in steps:
            if state["step"] is not step:
                state["step"] = step.copy_(state["step"])


def with_workers(loader: Any, workers: int) -> DataLoader[Any]:
    """The same batches from another number of worker processes."""
    same: dict[str, Any] = {
        name: getattr(loader, name)
        for name in ("collate_fn", "pin_memory", "worker_init_fn", "generator", "timeout")
    }  # fmt: skip
    if loader.batch_sampler is not None:
        same["batch_sampler"] = loader.batch_sampler
    else:
        same |= {"batch_size": None, "sampler": loader.sampler}
    return DataLoader(loader.dataset, num_workers=workers, persistent_workers=workers > 0, **same)


def _difference(some: list[Tensor], others: list[Tensor]) -> float:
    """The largest relative difference; infinite where something is not finite."""
    largest = 0.0
    for one, other in zip(some, others):
        scale = float(one.abs().max()) if one.numel() else 0.0
        gap = float((one - other).abs().max()) / max(scale, 1e-12) if one.numel() else 0.0
        largest = max(largest, gap) if math.isfinite(gap) else math.inf
    return largest
