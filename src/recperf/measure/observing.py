"""Observes the steps of a training loop: clocks on every step, then some steps under torch.profiler, then some counted.

The loop calls `end_step` at the end of every step and waits for batches inside `waiting_for_input`. Nothing else of the
loop changes, so the same observer serves a loop that recperf drives, one that calls it, and a program that knows
nothing of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cached_property
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from ..machine import process_memory
from ..ops.operators import fast_range, recorded, set_call_listener
from .clocks import (
    MOST_PLAIN,
    TRACED,
    ClockReading,
    Counts,
    GpuStretches,
    SpanRanges,
    ThreadClock,
    TimedStep,
    TracingCost,
    cuda_used,
    module_ranges,
)
from .counted_steps import counted
from .counting import Counter
from .memory import GROWS, PythonMemory
from .peaks.other_work import OtherWork
from .places import Position, Stacks
from .records import MemoryLine
from .schedule import FEW, FEW_PLAIN, WAITS, WATCHED, Schedule
from .spans import listen
from .stack_sampler import StackSampler
from .trace.read import PART, STEP, Trace
from .trace.record import Recording

CacheSizes = Callable[[str], tuple[int, int]]
"""The bytes beyond which random rows, and streams, come from memory; by device."""


class Observer:
    """Observes steps until it has seen enough; `done` says so.

    With `spans`, the steps are those of recperf itself: the span "data" is their wait for input, spans of exchanges are
    waits for other ranks, and all spans are parts. `about` goes into the header of the trace.
    """

    def __init__(
        self,
        *,
        cache_sizes: CacheSizes,
        model: nn.Module | None = None,
        light: bool = False,
        counts: Counts | None = None,
        spans: bool = False,
        about: dict[str, Any] | None = None,
    ):
        self.cache_sizes, self.model, self.light = cache_sizes, model, light
        self.schedule, self._about = Schedule(counts=counts), about
        self.buffered = 0
        """Steps whose batches the loader may have ready after a pause."""
        self.notes: list[str] = []
        self.state = "warm"
        self.seen = 0
        """Steps seen in all."""
        self.clock = ThreadClock()
        self._thread = get_ident()
        self.cuda = cuda_used()
        self.plain: list[TimedStep] = []
        self.blocks = GpuStretches()
        self.traced: list[ClockReading] = []
        """Traced steps without waits for input and for other ranks."""
        self.counter: Counter | None = None
        self.recording: Recording | None = None
        self.threads = torch.get_num_threads()
        self.other_work = OtherWork()
        self.others: float | None = None
        self.workers = 0.0
        """Share of the cores that worker processes of the loop used."""
        self._input = self._ranks = _ZERO
        self.waiting = ""
        """What the step waits for: input, ranks."""
        self._trace_few = self._traced_early = False
        self.stacks = Stacks(own=spans)
        self.end_stack: tuple[Position, ...] = ()
        self.sampler = StackSampler(self.stacks, lambda: self.waiting)
        self._spans = SpanRanges(self) if spans else None
        self._heard = listen(self._spans, only_waits=True) if spans else None
        self._stack = ExitStack()
        self._step_range: Any = None
        self._in_state = 0
        self._unnamed = 1
        self._left_out = False
        self._plain_ns = self._sampled_ns = 0
        self.cost = TracingCost()
        self.optimizers: Callable[[], Iterable[Any]] = tuple
        """Those of the loop that have stepped."""
        self.python_memory: PythonMemory | None = None
        self.growth: list[MemoryLine] = []
        """Lines of Python whose memory grows."""
        self._own_bytes, self._grows = 0, 0.0
        """Memory of the process when timing began, and by how much a step made it grow."""
        self._before_trace: tuple[list[TimedStep], list[tuple[int, int]]] = ([], [])
        self._first_trace: tuple[Recording | None, list[ClockReading], bool] = (None, [], False)
        self._began = self.clock.now()

    @contextmanager
    def waiting_for_input(self) -> Iterator[None]:
        """Time what happens inside as a wait for the next batch. What other threads prepare is not waited for."""
        if get_ident() != self._thread or self._unwatched:
            yield
            return
        before, self.waiting = self.clock.now(), "input"
        try:
            # How a batch is made is not divided by operators, and a loader may call thousands.
            with _INPUT_RANGE.get(self.state, nullcontext)():
                yield
        finally:
            self.waiting = ""
        self.waited(before)

    def waited(self, since: ClockReading, *, for_ranks: bool = False) -> None:
        """Add a wait for input, or for other ranks, to the current step."""
        spent = self.clock.now().since(since)
        if for_ranks:
            self._ranks = self._ranks.plus(spent)
        else:
            self._input = self._input.plus(spent)

    def end_step(self, *, ordinary: bool = True) -> None:
        """Note the end of a step and get ready for the next one.

        A step in which the loop also did something else, such as an evaluation, is not `ordinary` and left out.
        """
        if get_ident() != self._thread:
            # From now on observe the thread that ends steps, unless another one is being traced or counted.
            if self.state in ("warm", "plain"):
                self.clock.close()
                self.clock, self._thread = ThreadClock(), get_ident()
                self._input = self._ranks = _ZERO
                self._began = self.clock.now()
                if self.state == "plain":
                    self.sampler.start()
            return
        if self._unwatched:
            self.seen += 1
            if not self._unwatched:
                self._began = self.clock.now()
            return
        spent = self.clock.now().since(self._began)
        self.seen += 1
        if ordinary or not self._leave_out():
            self._in_state += 1
            getattr(self, f"_after_{self.state}")(spent)
        self._input = self._ranks = _ZERO
        self._began = self.clock.now()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context for what the loop does between two steps besides waiting for input: it is neither timed, traced nor
        counted. Traced steps must follow each other, so tracing and counting begin again."""
        plain_cpu, state = self.cost.plain_ns, self.state
        if state == "traced":
            self._step_range.__exit__(None, None, None)
            self._stop_trace()
            self.traced.clear()
        elif state == "counted":
            self._stack.close()
        yield
        if state == "traced":
            self._start_trace()
            self.cost.plain_ns = plain_cpu
        elif state == "counted":
            self._start_counting()
        elif state == "plain":
            self._leave_out()
        self._input = self._ranks = _ZERO
        self._began = self.clock.now()

    @property
    def _unwatched(self) -> bool:
        """Whether the current step of the light mode is not timed: its clocks would cost more than they tell."""
        return self.state == "done" or (self.state == "watching" and self.seen % WATCHED != 0)

    @property
    def done(self) -> bool:
        return self.state in ("done", "watching")

    @property
    def traced_enough(self) -> bool:
        """Whether no step is left to be traced or counted."""
        return self.done or (self.state == "plain" and self.counter is not None)

    def close(self) -> None:
        """End whatever is active; may be called at any time, also where the loop ended early."""
        if self.state == "traced":
            self._stop_trace()
        if len(self.traced) < len(self._first_trace[1]):
            self.recording, self.traced, self._left_out = self._first_trace
        self._stack.close()
        self.sampler.stop()
        if self.state == "plain":
            self.blocks.close(len(self.plain))
        if self.others is None:
            self._end_others()
        if len(self.plain) <= FEW_PLAIN:
            plain, blocks = self._before_trace
            self.plain, self.blocks.times = plain + self.plain, blocks + self.blocks.times
        if self._spans:
            listen(self._heard)
        self._spans, self.state = None, "done"

    def _after_warm(self, spent: ClockReading) -> None:
        if not self.schedule.warm(self._in_state):
            return
        self.threads = torch.get_num_threads()
        self.cuda = cuda_used()
        self._start_plain()

    def _start_plain(self, *, again: bool = False) -> None:
        self._enter("plain")
        self._own_bytes = process_memory().get("own", 0)
        self.cost.begin(self.seen)
        if not again:
            self.other_work = OtherWork()
        if not self.light:
            self.sampler.start()
        self.blocks.active = self.cuda
        self.blocks.open(len(self.plain))

    def _after_plain(self, spent: ClockReading) -> None:
        self.plain.append(TimedStep(spent, self._input, self._ranks))
        self.sampler.end_step(keep=True)
        count = len(self.plain)
        self._plain_ns += spent.wall
        self._sampled_ns += spent.wall
        self.blocks.step(count)
        seconds = (sum(ns for _, ns in self.blocks.times) if self.cuda else self._plain_ns) / 1e9
        blocks, was_traced = len(self.blocks.times) if self.cuda else None, self.counter is not None
        if was_traced and self._traced_early and count >= FEW:
            self.blocks.close(count)
            self._first_trace = self.recording, self.traced, self._left_out
            self.recording, self.traced, self._left_out = None, [], False
            self._start_trace()
        elif was_traced and self._samples_missing:
            pass
        elif self.schedule.timed(count, seconds, blocks=blocks, traced=was_traced):
            self.blocks.close(count)
            self._end_others()
            if was_traced:
                self._enter("done")
            else:
                self._start_trace()

    def _after_traced(self, spent: ClockReading) -> None:
        self._step_range.__exit__(None, None, None)
        if self._in_state > self._unnamed:
            self.traced.append(spent.since(self._input.plus(self._ranks)))
        seconds = sum(moment.wall for moment in self.traced) / 1e9
        if self.schedule.traced(len(self.traced), seconds, few=self._trace_few):
            self._stop_trace()
            if self.counter is None:
                self._start_counting()
            else:
                self.cost.add(self.seen)
                self._start_plain(again=True)
        else:
            self._open_range()

    def _after_counted(self, spent: ClockReading) -> None:
        assert self.counter is not None
        if self.schedule.counted(self._in_state, spent.wall / 1e9):
            self._stack.close()
            self.cost.add(self.seen)
            if self.light:
                self._enter("watching")
            elif self.schedule.hurries:
                # Few steps were timed before the trace.
                self._before_trace = (self.plain, self.blocks.times)
                self.plain, self.blocks, self._plain_ns = [], GpuStretches(), 0
                self._start_plain()
            elif self._samples_missing or (self.schedule.counts and self.schedule.counts.again):
                self._start_plain(again=True)
            else:
                self._enter("done")
        else:
            if self.python_memory is not None:
                self.python_memory.end_step()
            self.counter.begin_step()

    @property
    def _samples_missing(self) -> bool:
        return self.schedule.samples_missing(len(self.sampler.samples), self._sampled_ns)

    def _after_watching(self, spent: ClockReading) -> None:
        """Clocks only, to the end of the loop; the latest steps count."""
        self.plain.append(TimedStep(spent, self._input, self._ranks))
        if len(self.plain) > 2 * MOST_PLAIN:
            del self.plain[:MOST_PLAIN]

    def _end_others(self) -> None:
        self.others, self.workers = self.other_work.share(), self.other_work.workers()

    def _enter(self, state: str) -> None:
        self.sampler.stop()
        self.state, self._in_state = state, 0

    def _leave_out(self) -> bool:
        """Forget the latest step, if possible; of traced steps also those before, so that the others follow each
        other."""
        if self.state == "plain":
            self.sampler.end_step(keep=False)
            self.blocks.open(len(self.plain))
        elif self.state == "traced" and self._in_state <= self._unnamed + 2 * TRACED:
            self._in_state += 1
            self.traced.clear()
            self._left_out = True
            self._step_range.__exit__(None, None, None)
            self._open_range()
        elif self.state == "counted" and self.counter is not None:
            self.counter.steps.pop()
            self.counter.begin_step()
        else:
            return False
        return True

    def _start_trace(self) -> None:
        if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
            self.notes.append("the loop runs under torch.profiler already, so recperf did not trace it")
            self._enter("done")
            return
        self._enter("traced")
        self._grows = (process_memory().get("own", 0) - self._own_bytes) / max(1, len(self.plain))
        self.cost.begin_traced(self.seen)
        self.end_stack = self.stacks.of(sys._getframe())
        # Who reads the trace later has no other evidence that the machine was quiet.
        self.recording = Recording(cuda=self.cuda, about={**(self._about or {}), "other_work": self.others})
        # The first step under the profiler pays for its buffers, and those with batches that became ready during this
        # pause do not wait as other steps do.
        waits = sum(step.input.wall for step in self.plain) / max(1, sum(step.whole.wall for step in self.plain))
        self._unnamed = 1 + (self.buffered if waits > WAITS and self.schedule.usual else 0)
        # Operators have little of such a step.
        self._trace_few = self.light or waits > 0.5
        # A loop of few steps may begin again: then there is time for more of them.
        self._traced_early = self.schedule.few and not self._trace_few and self.counter is None
        self._trace_few |= self._traced_early
        if self.model is not None and not self.light:
            self._stack.enter_context(module_ranges(self.model))
        if self._spans:
            listen(self._spans)
        set_call_listener(recorded)
        self._stack.callback(set_call_listener, None)
        self._open_range()

    def _open_range(self) -> None:
        number = self._in_state - self._unnamed
        name = f"{STEP}#{number}" if number >= 0 else f"{STEP}.first"
        self._step_range = fast_range(name)
        self._step_range.__enter__()

    def _stop_trace(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()
        assert self.recording is not None
        self.recording.stop()
        self._stack.close()

    @cached_property
    def trace(self) -> Trace | None:
        """The trace of the steps, read when the report is built, so that the loop does not pause for it."""
        if self.recording is None:
            return None
        return self.recording.trace(len(self.traced) if self._left_out else None)

    def _start_counting(self) -> None:
        self._enter("counted")
        on_device = self.recording is not None and self.recording.on_device
        self.counter = Counter(*self.cache_sizes(torch.cuda.get_device_name() if on_device else "cpu"), self.stacks)
        self._stack.enter_context(counted(self.counter, self.model, lambda: self.optimizers(), self._thread))
        if self._grows > GROWS:
            self.python_memory = PythonMemory(self.stacks)
            self._stack.callback(self._end_python_memory, self.python_memory)

    def _end_python_memory(self, memory: PythonMemory) -> None:
        self.growth = memory.close()


_ZERO = ClockReading(0, 0, 0, 0)
_INPUT_RANGE = {"traced": lambda: fast_range(f"{PART}data"), "counted": _disable_current_modes}
