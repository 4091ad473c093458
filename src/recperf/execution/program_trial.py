"""Runs a program again with changes from outside, each in a process of its own, and times its plain steps. For a
change, constructors and settings of torch pass through hooks.

    python -m recperf.execution.program_trial REQUEST RESULT

Both are JSON files: the program with its changes, and what was measured.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from weakref import WeakSet

import torch
from msgspec import convert
from torch import Tensor, nn
from torch.optim import Adam, Optimizer, SparseAdam
from torch.utils.data import DataLoader

from ..errors import MachineError
from ..files import plain_json
from ..measure.clocks import ClockReading, spread
from ..measure.fixes import Fix
from ..measure.observing import ENDLESS, Observer
from ..measure.records import Advice
from .fixes import COMPARED, Measured, try_each, try_fix
from .program_hooks import Wrap, patched
from .script import Program, run_program
from .step_profile import Profiler

ENVIRONMENT = {"keep_memory": {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(64 << 30)}}
"""Changes that are made before the program starts."""


@contextmanager
def changed(settings: dict[str, Any]) -> Iterator[None]:
    """Inside, the program has these changes; `compile` is made by whoever knows its model."""
    with ExitStack() as stack:
        for name, value in settings.items():
            for owner, method, wrap in CHANGES[name](value) if name in CHANGES else ():
                stack.enter_context(patched(owner, method, wrap))
        yield


Patches = list[tuple[Any, str, Wrap]]


def _loader(**arguments: Any) -> Patches:
    """DataLoaders get these arguments, whatever the program passes."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @wraps(original)
        def init(loader: Any, *args: Any, **kwargs: Any) -> None:
            bound = signature.bind(loader, *args, **kwargs).arguments | arguments
            rest = bound.pop("kwargs", {})
            original(**bound, **rest)

        return init

    return [(DataLoader, "__init__", wrap)]


def _optimizer(way: str) -> Patches:
    """Optimizers that have the option run fused or foreach."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def init(optimizer: Any, params: Any, defaults: dict[str, Any]) -> None:
            if way in defaults and not defaults.get("fused") and not defaults.get("differentiable"):
                defaults = {**defaults, "foreach": None, way: True}
            original(optimizer, params, defaults)

        return init

    return [(Optimizer, "__init__", wrap)]


def _zero_grad(_: bool) -> Patches:
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        return wraps(original)(lambda owner, set_to_none=True: original(owner, set_to_none=True))

    return [(Optimizer, "zero_grad", wrap), (nn.Module, "zero_grad", wrap)]


def _tf32(_: bool) -> Patches:
    torch.set_float32_matmul_precision("high")
    return []


def _threads(count: int) -> Patches:
    torch.set_num_threads(count)
    return [(torch, "set_num_threads", lambda original: lambda number: None)]


def _sparse(shapes: list[list[int]]) -> Patches:
    """Embeddings of these sizes have sparse gradients, and SparseAdam takes them over from Adam."""
    modules: WeakSet[nn.Module] = WeakSet()

    def embedding(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def init(module: Any, *args: Any, **kwargs: Any) -> None:
            original(module, *args, **kwargs)
            if [module.num_embeddings, module.embedding_dim] in shapes:
                module.sparse = True
                modules.add(module)

        return init

    def split(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def init(optimizer: Any, params: Any, defaults: dict[str, Any]) -> None:
            tables = {id(module.weight) for module in modules}
            if not isinstance(optimizer, Adam) or not tables:
                original(optimizer, params, defaults)
                return
            listed = _flat(params)
            groups = listed if isinstance(listed[0], dict) else [{"params": listed}]
            groups = [{**group, "params": _flat(group["params"])} for group in groups]
            taken = [tensor for group in groups for tensor in group["params"] if id(tensor) in tables]
            for group in groups:
                group["params"] = [tensor for tensor in group["params"] if id(tensor) not in tables]
            rest = [group for group in groups if group["params"]]
            # An optimizer must have a parameter; one without a gradient is never changed.
            original(optimizer, rest or [{"params": [nn.Parameter(torch.zeros(1))]}], defaults)
            if taken:
                _beside(optimizer, SparseAdam(taken, **{name: defaults[name] for name in ("lr", "betas", "eps")}))

        return init

    return [
        (nn.Embedding, "__init__", embedding),
        (nn.EmbeddingBag, "__init__", embedding),
        (Optimizer, "__init__", split),
    ]


def _beside(optimizer: Any, rows: Optimizer) -> None:
    """Let a second optimizer step after the first and clear its gradients with it."""

    def step(*_: Any) -> None:
        rows.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"]
        rows.step()

    zero_grad = optimizer.zero_grad

    def clear(set_to_none: bool = True) -> None:
        zero_grad(set_to_none)
        rows.zero_grad()

    optimizer.register_step_post_hook(step)
    optimizer.zero_grad = clear


def _flat(params: Any) -> list[Any]:
    return [params] if isinstance(params, torch.Tensor) else list(params)


CHANGES: dict[str, Callable[[Any], Patches]] = {
    "workers": lambda count: _loader(num_workers=count, persistent_workers=count > 0),
    "pinned": lambda pinned: _loader(pin_memory=pinned),
    "optimizer": _optimizer,
    "zero_grad": _zero_grad,
    "tf32": _tf32,
    "threads": _threads,
    "sparse": _sparse,
}


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
        super().__init__(cache_sizes=lambda device: (0, 0))
        self._compiles = compiles

    def _after_warm(self, spent: ClockReading) -> None:
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
            return [ns // count for count, ns in self.blocks.times]
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
    measured = Measured(step=step, losses=losses, others=clock.others)
    result.write_text(json.dumps(plain_json(measured)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
