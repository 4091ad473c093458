"""Runs programs again, each in a process of its own, and times turns of their steps as the process that started this
one asks.

    python -m recperf.execution.program_trial DESCRIPTOR PARENT

The socket of this descriptor asks for programs, with a socket of its own and a file for messages each; torch is
imported once for all of them. Requests and answers of a program are lines of JSON. Between turns it stands still.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import wraps
from importlib import import_module
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy
import torch
from torch import Tensor

from ..measure.clocks import cuda_used
from ..measure.memory import begin_peak, peak_bytes
from ..measure.schedule import ENDLESS, Schedule
from ..stop import end_with_parent
from .program_changes import changed
from .program_hooks import patched
from .script import Program, run_program
from .side_effects import SideEffects, confine
from .step_profile import Profiler

COMPARED = 10
"""Losses that show whether a change keeps the results."""
FORK, BECOME = b"f", b"b"
"""What is asked for: a child that runs a program, or this process."""
SEED = 1
"""Of programs that set none."""


class Pace(Profiler):
    """Lets a program take as many steps as it is told to, and then the next ones; it observes nothing else."""

    state, done = "warm", False
    plain: tuple[()] = ()

    def __init__(self, request: dict[str, Any], ask: Callable[[dict[str, Any]], int]) -> None:
        super().__init__(quiet=True, peaks=False)
        self._ask, self._compiles = ask, bool(request["settings"].get("compile"))
        self._room = request.get("room")
        self.model: torch.nn.Module | None = None
        self.schedule = Schedule(expected=None)
        self.buffered = 0
        self.seen, self.until, self._began = 0, int(request["warm_ups"]), 0
        self.losses: list[float] = []

    def __enter__(self) -> Profiler:
        return self

    @property
    def observer(self) -> Any:
        return self

    def restart(self) -> None:
        """The end of a step is another one than thought: nothing was timed yet."""

    def close(self) -> None:
        pass

    def waiting_for_input(self) -> AbstractContextManager[None]:
        return nullcontext()

    def end_step(self, *, ordinary: bool = True) -> None:
        self.seen += 1
        if self.seen == 1 and not self._room:
            # The state of the optimizer is there now.
            begin_peak()
        if self._compiles and self.model is not None:
            self._compiles = False
            # Its class may have a method of this name that does something else.
            torch.nn.Module.compile(self.model, mode="reduce-overhead" if cuda_used() else "default")
        if self.seen + 1 == self.until and self.state == "warm":
            # The time of the last of these steps says how many make a turn.
            self._synchronize()
            self._began = perf_counter_ns()
        if self.seen < self.until:
            return
        self._synchronize()
        ns = perf_counter_ns() - self._began
        if self.state == "warm" and self._compiles:
            raise SystemExit("the model that would be compiled was not found")
        self.state = "turns"
        expected = self.schedule.expected
        steps = expected if expected is not None and expected < ENDLESS else 0
        self.until += self._ask(
            {"ns": ns, "losses": self.losses, "steps": steps, "buffered": self.buffered, "peak": peak_bytes()}
        )
        self._began = perf_counter_ns()

    @contextmanager
    def recorded_losses(self) -> Iterator[None]:
        """Record the first scalars whose backward pass runs."""

        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(original)
            def backward(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
                if len(self.losses) < COMPARED and tensor.numel() == 1:
                    self.losses.append(float(tensor.detach()))
                return original(tensor, *args, **kwargs)

            return backward

        with patched(Tensor, "backward", wrap):
            yield

    def _synchronize(self) -> None:
        if cuda_used():
            torch.cuda.synchronize()


def main(descriptor: int, parent: int) -> None:
    """Fork a process for each program that is asked for, or become the only one. Those that have ended are kept as
    zombies until this one ends, so that their numbers stay theirs."""
    # Also where a process stands still, and its workers with it.
    end_with_parent(parent, signal.SIGKILL)
    os.register_at_fork(after_in_child=lambda: end_with_parent(os.getppid(), signal.SIGKILL))
    # The first optimizer of a program would import it, which takes seconds.
    import_module("torch._dynamo")
    control = socket.socket(fileno=descriptor)
    control.sendall(b"+")
    while True:
        asked, descriptors, *_ = socket.recv_fds(control, 1, 2)
        if not asked:
            return
        number = os.fork() if asked == FORK else 0
        if not number:
            if asked == FORK:
                os.setpgid(0, 0)
            else:
                control.sendall(os.getpid().to_bytes(8, "little"))
            control.close()
            stream, messages = descriptors
            os.dup2(messages, 2)
            os.close(messages)
            run(stream)
            return
        for one in descriptors:
            os.close(one)
        # Here too: the number is also that of its group once it is known.
        with suppress(OSError):
            os.setpgid(number, number)
        control.sendall(number.to_bytes(8, "little"))


def run(descriptor: int) -> None:
    """Run a program as the socket of this descriptor asks."""
    stream = socket.socket(fileno=descriptor).makefile("rw")

    def ask(answer: dict[str, Any]) -> int:
        stream.write(json.dumps(answer) + "\n")
        stream.flush()
        line = stream.readline()
        if not line:
            os._exit(0)
        return int(line)

    request = json.loads(stream.readline())
    os.environ.update(request["environment"])
    tempfile.tempdir = None
    asked, settings = request["program"], request["settings"]
    sources = settings.get("sources", {})
    asked = {**asked, "script": Path(asked["script"]), "to_the_end": False, "learning": False, "sources": sources}
    program = Program(**asked)
    folder = None if request["anywhere"] else Path(tempfile.gettempdir())
    if folder is not None:
        confine(folder)
    if request.get("room"):
        limit_memory(request["room"])
    random.seed(SEED)
    numpy.random.seed(SEED)
    torch.manual_seed(SEED)
    pace, effects = Pace(request, ask), SideEffects(folder)
    with changed(settings), pace.recorded_losses():
        outcome, _ = run_program(program, pace, effects)
    effect = next(iter(effects.seen), None) if folder else None
    ask({"ended": pace.seen, "code": outcome.code, "effect": effect})


def limit_memory(room: int) -> None:
    """Let this process and each one that it starts have no more than so many bytes beside what it has now."""
    lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    has = next(int(line[1]) << 10 for line in lines if line and line[0] == "VmData:")
    resource.setrlimit(resource.RLIMIT_DATA, (has + room, has + room))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
