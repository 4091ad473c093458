"""Profiles any training step: one that is a function, a loop that calls the profiler, or a program that is not changed.

    report = profile(step, batches=loader, model=model)

    with Profiler(model=model) as profiler:
        for batch in profiler.input(loader):
            ...
            profiler.step()
    report = profiler.report

docs/your-model.md describes them.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import cycle
from time import process_time
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from ..errors import UsageError
from ..machine import machine_facts
from ..measure import peaks as machine_peaks
from ..measure.attribution import attribute
from ..measure.ceilings import Ceilings, cache_sizes_of, ceilings_of
from ..measure.child_sampler import ChildSamplers, Sampled, add_children, children_of
from ..measure.clocks import Counts
from ..measure.evidence import observed as observed_by
from ..measure.experiments import confirm as run_experiments
from ..measure.observing import Observer
from ..measure.peaks.records import Peaks
from ..measure.profile import build_profile
from ..measure.program_facts import ProgramWatch, loader_facts, note_batch
from ..measure.program_records import ProgramFacts
from ..measure.records import Attribution, Experiment, Observed
from ..measure.saved_state import SavedState
from ..measure.schedule import SHORT
from ..runs.step_report import Report
from . import live_trials
from .live_trials import LiveStep

Experiments = Callable[[Attribution, Observed], list[Experiment]]
"""Runs experiments for an attribution of what was observed."""

UNLIMITED_SECONDS = 3600.0

__all__ = ["Profiler", "Report", "profile"]


class Evidence(NamedTuple):
    """What a verdict follows from."""

    observed: Observed
    ceilings: Ceilings | None
    peaks: Peaks | None


class Profiler:
    """Observes the loop inside its `with` block. `input` surrounds the batches, `step` ends every step.

    `model` names the parts of the step by module. After enough steps the profiler does nothing more. With `light` it
    traces as few steps as it can and then only reads clocks, to the end of the loop, which costs some microseconds per
    step; the report says how much.
    """

    def __init__(
        self, model: nn.Module | None = None, *, light: bool = False, quiet: bool = False, peaks: bool = True
    ) -> None:
        self._model, self._light, self._quiet, self._use_peaks = model, light, quiet, peaks
        self._observer: Observer | None = None
        self.watch: ProgramWatch | None = None
        self._report: Report | None = None
        self._peaks: Peaks | None = None
        self._experiment: Experiments | None = None
        self.children: ChildSamplers | None = None
        self.child_kind: type[Sampled] | None = None
        """What runs beside the functions of processes that the loop starts."""
        self.counts: Counts | None = None
        """How many steps to observe, where ranks must observe the same."""
        self.evidence: Evidence | None = None
        """What the report was built from."""
        self._undone = 0
        """Steps that are undone, because they repeated a batch."""
        self._driven = False
        """Whether the loop goes on until enough steps were seen."""

    def __enter__(self) -> Profiler:
        self._peaks = self._ceilings_of_machine(torch.get_num_threads())
        self.watch = ProgramWatch()
        if not self._light:
            self.children = ChildSamplers(self.child_kind).__enter__()
        self.restart()
        return self

    def restart(self) -> None:
        """Forget what was observed so far."""
        if self._observer is not None:
            self._observer.close()
        self._observer = Observer(
            cache_sizes=lambda device: cache_sizes_of(self._peaks, device),
            model=self._model,
            light=self._light,
            counts=self.counts,
        )
        if self.watch is not None:
            watch = self.watch
            self._observer.optimizers = lambda: watch.stepped
        self._observer.schedule.goes_on = not (self._light or self._driven)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._observer is not None:
            self.close()
            if kind is None:
                self._report = self.build()

    def close(self) -> None:
        """Stop observing; no report is built."""
        self.observer.close()
        if self.watch is not None:
            self.watch.close()
        if self.children is not None:
            self.children.close()

    def input(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Pass the batches on; the time until each arrives is a wait for input."""
        if self.watch is not None:
            self.watch.loader = loader_facts(batches)
        if self.observer.state == "warm":
            self.observer.buffered = prefetched(batches)
            if not self._driven:
                self.observer.schedule.expected = length(batches)
            elif isinstance(batches, Iterator):
                self.observer.schedule.expected = SHORT
        iterator, is_first = iter(batches), True
        while True:
            with self.waiting_for_input():
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
            if is_first and self.watch is not None and self.watch.loader:
                note_batch(self.watch.loader, batch)
            is_first = False
            yield batch

    def waiting_for_input(self) -> Any:
        """A context for code that waits for the next batch."""
        return self.observer.waiting_for_input()

    def step(self) -> None:
        """Mark the end of a step."""
        self.observer.end_step()

    @property
    def done(self) -> bool:
        """Whether enough steps were seen."""
        return self.observer.done

    @property
    def observer(self) -> Observer:
        if self._observer is None:
            raise UsageError("the profiler is not active", fix="with recperf.Profiler() as profiler: ...")
        return self._observer

    @property
    def report(self) -> Report:
        if self._report is None:
            raise UsageError("the report is ready when the with block of the profiler has ended")
        return self._report

    def build(self) -> Report:
        """Divide what was observed and decide."""
        cpu = process_time()
        observed = observed_by(self.observer)
        if self.children is not None:
            add_children(observed, children_of(self.children.seen))
        ceilings = self._ceilings(observed.device, observed.threads)
        self.evidence = Evidence(observed, ceilings, self._peaks)
        experiments = self._experiment(attribute(observed, ceilings), observed) if self._experiment else []
        profile = build_profile(observed, ceilings, self._facts(observed.threads), experiments, machine_facts())
        profile.steps_trained = self.observer.seen - self._undone
        profile.own_cpu_s = process_time() - cpu + self.observer.cost.ns / 1e9
        return Report.of(profile)

    def _facts(self, threads: int) -> ProgramFacts:
        model = self.observer.model
        modules = model.named_modules() if model is not None else ()
        return self.watch.facts(threads, modules, has_model=model is not None) if self.watch else ProgramFacts()

    def _ceilings_of_machine(self, threads: int) -> Peaks | None:
        if not self._use_peaks:
            return None
        return machine_peaks.require(threads, self.say)

    def say(self, text: str) -> None:
        if not self._quiet:
            print(f"recperf: {text}", file=sys.stderr)

    def _ceilings(self, device: str, threads: int) -> Ceilings | None:
        if self._peaks is not None and device == "cpu" and not machine_peaks.has_threads(self._peaks, threads):
            # The loop changed the number of threads.
            self._peaks = self._ceilings_of_machine(threads)
        return ceilings_of(self._peaks, device=device, threads=threads)


def profile(
    step: Callable[..., object],
    batches: Iterable[Any] | None = None,
    model: nn.Module | None = None,
    *,
    confirm: bool | None = None,
    try_changes: bool = False,
    light: bool = False,
    quiet: bool = False,
) -> Report:
    """Run a training step until it is clear what limits it, and return the report.

    `step` is called with the next of the `batches`, or with nothing where there are none. A step of several parameters
    gets the elements of a tuple or list, or the values of a dict by name. `model` names parts by module. The verdict is
    confirmed by experiments that repeat the step: with a batch in memory, twice the batch, half the threads, hot ids,
    as a CUDA graph. They run where they take under 10 s; `confirm=True` always runs them, `confirm=False` never.

    Experiments are undone: afterwards weights, buffers, optimizers, gradients and random state are those that
    `report.steps_trained` calls of the step leave, on the batches in the order in which they were drawn. Where the step
    holds something that cannot be put back, such as an iterator, or a copy does not fit in memory, there are none, and
    the notes of the report say why.

    With `try_changes` what can be switched in a live step is tried too, and undone: threads, fused optimizers, workers
    of a DataLoader, a CUDA graph. The advice of the report has the gains.
    """
    last: list[Any] = []
    run, takes_batch = step, False
    profiler = Profiler(model, light=light, quiet=quiet)
    repeated = _Repeated(profiler, step, last)
    if batches is None and not _binds(step):
        raise UsageError(f"the step has parameters {inspect.signature(step)}, but there are no batches",
                         fix="recperf.profile(step, batches=loader)")  # fmt: skip

    def experiment(attribution: Attribution, observed: Observed) -> list[Experiment]:
        if confirm is False or light or not observed.operators:
            return []
        if problem := repeated.save():
            observed.notes.append(f"no experiment was run, because the step could not be undone: {problem}")
            return []
        seconds = None if confirm is None else UNLIMITED_SECONDS
        batch = last[0] if last else None
        return run_experiments(run, batch, bool(last), attribution, observed, seconds, peaks=profiler._peaks)

    profiler._experiment, profiler._driven = experiment, True
    try:
        with profiler:
            for number, batch in enumerate(_endless(profiler, batches, repeated)):
                if not number and batches is not None:
                    run, takes_batch = _call(step, batch)
                if takes_batch:
                    last[:] = [batch]
                    run(batch)
                else:
                    step()
                profiler.step()
                if profiler.done:
                    break
    finally:
        repeated.undo()
    if try_changes:
        optimizers = list(profiler.watch.stepped) if profiler.watch else []
        source = None if isinstance(batches, Iterator) or not takes_batch else batches
        # The iterator of a loader may have processes, which are not saved.
        reached = [source.dataset, source.batch_sampler, source.sampler] if isinstance(source, DataLoader) else [source]
        roots = [step, last, model, optimizers, *reached]
        live = LiveStep(run if takes_batch else lambda _: step(), source, last, optimizers, roots)
        live_trials.try_changes(live, profiler.report, profiler.say)
    return profiler.report


class _Repeated:
    """Steps that repeat a batch, in experiments or because there are too few: all of them are undone together."""

    def __init__(self, profiler: Profiler, *roots: object) -> None:
        self._profiler, self._roots = profiler, roots
        self._saved: SavedState | None = None

    def save(self, *batches: object) -> str:
        """Save the state before the first of them, and return why that is not possible."""
        if self._saved is None:
            watch = self._profiler.watch
            optimizers = watch.stepped if watch else None
            self._saved = SavedState(*self._roots, self._profiler._model, optimizers, *batches)
        return self._saved.problem

    def undo(self) -> None:
        if self._saved is not None and not self._saved.problem:
            self._saved.restore()


def length(batches: Any) -> int | None:
    """The number of batches, where it is known."""
    if isinstance(getattr(batches, "dataset", None), IterableDataset):
        # Its DataLoader would remember that it was asked, and warn about further batches.
        return None
    try:
        return len(batches)
    except (TypeError, NotImplementedError):
        return None


def prefetched(batches: Any) -> int:
    """Batches that the worker processes of a DataLoader may have ready."""
    return (getattr(batches, "num_workers", None) or 0) * (getattr(batches, "prefetch_factor", None) or 0)


def _call(step: Callable[..., object], batch: Any) -> tuple[Callable[..., object], bool]:
    """How a batch is passed to the step, as its parameters ask for it, and whether the step takes one."""
    if _binds(step, batch):
        return step, True
    if isinstance(batch, (tuple, list)) and _binds(step, *batch):
        return lambda batch: step(*batch), True
    if isinstance(batch, dict) and all(isinstance(key, str) for key in batch) and _binds(step, **batch):
        return lambda batch: step(**batch), True
    if _binds(step):
        return step, False
    parts = f" of {len(batch)} elements" if isinstance(batch, (tuple, list, dict)) else ""
    raise UsageError(
        f"the step's parameters {inspect.signature(step)} do not fit its batches: the first is a {type(batch).__name__}"
        f"{parts}",
        fix="def step(batch): ...",
    )


def _binds(step: Callable[..., object], *arguments: Any, **named: Any) -> bool:
    try:
        inspect.signature(step).bind(*arguments, **named)
    except TypeError:
        return False
    except ValueError:  # It has no signature that can be read.
        pass
    return True


def _endless(profiler: Profiler, batches: Iterable[Any] | None, repeated: _Repeated) -> Iterator[Any]:
    """Batches again and again. An iterator ends once: where steps are still to be traced then, its batches are used
    again from memory, and the steps on them are undone."""
    if batches is None:
        while True:
            yield None
    once = isinstance(batches, Iterator)
    kept: list[Any] = []
    while True:
        count = 0
        for batch in profiler.input(batches):
            count += 1
            if once and not profiler.observer.traced_enough and len(kept) < SHORT:
                kept.append(batch)
            yield batch
        if not count or once:
            break
    observer = profiler.observer
    if not kept or observer.traced_enough:
        return
    note = f"the batches ended after {count}: traced and counted steps used them again from memory"
    with observer.paused():
        problem = repeated.save(kept)
    observer.notes.append(note + (f" and could not be undone: {problem}" if problem else ""))
    observer.schedule.expected = count
    for batch in cycle(kept):
        if observer.traced_enough:
            break
        profiler._undone += not problem
        yield batch
