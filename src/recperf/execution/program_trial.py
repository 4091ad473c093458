"""Runs a program again with changes from outside, each in a process of its own, and times its plain steps.

    python -m recperf.execution.program_trial REQUEST RESULT

Both are JSON files: the program with its changes, and what was measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from msgspec import convert
from torch import Tensor

from ..errors import MachineError
from ..files import plain_json
from ..measure.clocks import Moment
from ..measure.fixes import Fix
from ..measure.observing import ENDLESS, Observer
from ..measure.profile import spread
from ..measure.records import Advice
from .fixes import COMPARED, Measured, try_each, try_fix
from .program_changes import ENVIRONMENT, changed
from .program_hooks import patched
from .script import Program, run_program
from .step_profile import Profiler

WARM_UPS = 8
FEWEST = 3
"""Steps that a program must have after them."""
ROUNDING = 1e-4
"""Relative difference of a loss that another order of additions explains."""


def try_changes(program: Program, advice: list[Advice], say: Callable[[str], None]) -> None:
    """Measure each change that can be made from outside, alone and all together, and write the gains into the advice.

    The unchanged program runs before and after each.
    """
    rows: list[Advice] = []
    for one in advice:
        if one.settings and all(one.settings != other.settings for other in rows):
            rows.append(one)
    if not rows:
        say("no change of this program can be made from outside")
        return
    fixes = [Fix(name=one.name, title="", switch=one.change, config=one.settings, tolerance=ROUNDING) for one in rows]

    def measure(settings: dict[str, Any]) -> Measured:
        return measured(program, settings)

    say("trying changes: running the program without any")
    accepted, unchanged = try_each(fixes, rows, measure, {}, measure({}), say)
    if len(accepted) > 1:
        settings = {name: value for fix in accepted for name, value in fix.config.items()}
        names = ", ".join(fix.name for fix in accepted)
        whole = Fix(name="all together", title=names, switch=names, config=settings, tolerance=ROUNDING)
        advice.append(Advice(whole.name, f"{names} together.", names))
        say(f"trying {names} together")
        try_fix(measure, {}, whole, advice[-1], unchanged)


def measured(program: Program, settings: dict[str, Any]) -> Measured:
    """Run the program with these changes in a process of its own."""
    with TemporaryDirectory() as folder:
        request, result = Path(folder, "request.json"), Path(folder, "result.json")
        request.write_text(
            json.dumps({"program": {**asdict(program), "script": str(program.script)}, "settings": settings})
        )
        environment = {name: value for key in settings for name, value in ENVIRONMENT.get(key, {}).items()}
        command = [sys.executable, "-m", __name__, str(request), str(result)]
        ended = subprocess.run(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
        )
        if not result.exists():
            lines = ended.stderr.strip().splitlines()
            raise MachineError(lines[-1] if lines else f"the program ended with exit code {ended.returncode}")
        return convert(json.loads(result.read_text()), Measured)


class _StepClock(Observer):
    """Times plain steps after a warm-up, during which it compiles the model where that is asked for; traces none."""

    def __init__(self, *, compiles: bool) -> None:
        super().__init__(knees=lambda device: (0, 0))
        self._compiles = compiles

    def _after_warm(self, spent: Moment) -> None:
        if self._compiles and self.model is not None:
            self._compiles = False
            self.model.compile(mode="reduce-overhead" if self.cuda else "default")
        if self._in_state >= WARM_UPS:
            self.expected = ENDLESS
            super()._after_warm(spent)

    def _start_trace(self) -> None:
        self._enter("done")

    def times(self) -> list[int]:
        """ns of each step, on a GPU of a step in each block."""
        if self.cuda:
            return [ns // count for count, ns in self.blocks]
        return [step.whole.wall for step in self.plain]


class _Timer(Profiler):
    """A profiler that only times steps."""

    def __init__(self, *, compiles: bool) -> None:
        super().__init__(quiet=True, peaks=False)
        self._compiles = compiles

    def __enter__(self) -> Profiler:
        self.restart()
        return self

    def restart(self) -> None:
        self._observer = _StepClock(compiles=self._compiles)


@contextmanager
def _recorded_losses() -> Iterator[list[float]]:
    """The first scalars whose backward pass runs."""
    losses: list[float] = []

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def backward(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if len(losses) < 2 * COMPARED and tensor.numel() == 1:
                losses.append(float(tensor.detach()))
            return original(tensor, *args, **kwargs)

        return backward

    with patched(Tensor, "backward", wrap):
        yield losses


def main(request: Path, result: Path) -> None:
    asked = json.loads(request.read_text())
    program = Program(**{**asked["program"], "script": Path(asked["program"]["script"]), "to_the_end": False})
    timer = _Timer(compiles=bool(asked["settings"].get("compile")))
    with changed(asked["settings"]), _recorded_losses() as losses:
        outcome, _ = run_program(program, timer)
    clock = timer.observer
    assert isinstance(clock, _StepClock)
    times = clock.times()
    if outcome.code or len(times) < FEWEST:
        raise SystemExit(f"the program ended with exit code {outcome.code} after {clock.seen} steps")
    step = spread(times)
    measured = Measured(step=step, single=step, losses=losses, others=clock.others)
    result.write_text(json.dumps(plain_json(measured)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
