"""Runs a program and prints the mean time of its steps, by a clock of its own at every end of an optimizer's step:

    python _step_clock.py REQUEST PROGRAM [ARGUMENTS]

The request is a JSON object: `seconds` to measure, or the `warm` and `steps` that another run printed, so that both
count the same steps; `most` steps; and `settings` of an advice that are no edit of the program.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import sys
import time
from contextlib import ExitStack
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

WARM_UPS, FEWEST_WARM, WARM_S = 8, 3, 4.0
"""Steps before the clock starts: so many, or fewer where they take that long."""


class Clock:
    def __init__(self, request: dict[str, Any]) -> None:
        self.request, self.warm, self.steps = request, request.get("warm"), request.get("steps")
        self.optimizer: Any = None
        self.seen, self.first, self.began, self.latest = 0, 0.0, 0.0, 0.0
        self.compiles = bool(request.get("settings", {}).get("compile"))

    def stepped(self, optimizer: Any, *_: Any) -> None:
        # A second optimizer belongs to the same step.
        self.optimizer = self.optimizer or optimizer
        if optimizer is not self.optimizer:
            return
        self.seen += 1
        now = time.perf_counter()
        self.first = self.first or now
        if self.compiles:
            self.compiles = False
            _compile(optimizer)
        if self.warm is None and self.seen >= FEWEST_WARM and (self.seen >= WARM_UPS or now - self.first > WARM_S):
            self.warm = self.seen
        if self.warm is None or self.seen < self.warm:
            return
        if self.seen == self.warm:
            self.began = self.latest = _now()
            return
        self.latest = now
        counted = self.seen - self.warm
        over = now - self.began > self.request["seconds"] if self.steps is None else counted >= self.steps
        if over or counted >= self.request.get("most", 1 << 60):
            self.report()

    def report(self) -> None:
        counted = self.seen - self.warm if self.warm is not None else 0
        # What is queued on a device belongs to the steps, what follows the last of them does not.
        ended = max(self.latest, _now()) if _on_gpu() else self.latest
        seconds = (ended - self.began) / counted if counted else None
        os.write(2, f"\n{json.dumps({'seconds': seconds, 'warm': self.warm, 'steps': counted})}\n".encode())
        # Not through handlers of the program, which may save or wait for workers.
        os._exit(0)


def _on_gpu() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _now() -> float:
    if _on_gpu():
        torch.cuda.synchronize()
    return time.perf_counter()


def _compile(optimizer: Any) -> None:
    """Compile the model whose parameters the optimizer has."""
    has = {id(one) for group in optimizer.param_groups for one in group["params"]}
    models = [one for one in gc.get_objects() if isinstance(one, torch.nn.Module)]

    def covers(model: torch.nn.Module) -> tuple[int, int]:
        return sum(id(one) in has for one in model.parameters()), -sum(1 for _ in model.modules())

    model = max(models, key=covers)
    torch.nn.Module.compile(model, mode="reduce-overhead" if _on_gpu() else "default")


def main() -> None:
    request, program = json.loads(sys.argv[1]), sys.argv[2]
    sys.argv = sys.argv[2:]
    clock = Clock(request)
    register_optimizer_step_post_hook(clock.stepped)
    sys.path[0] = os.path.dirname(os.path.abspath(program))
    settings = {name: value for name, value in request.get("settings", {}).items() if name != "compile"}
    with ExitStack() as stack:
        if settings:
            from recperf.execution.program_changes import changed

            stack.enter_context(changed(settings))
        runpy.run_path(program, run_name="__main__")
        clock.report()


if __name__ == "__main__":
    main()
