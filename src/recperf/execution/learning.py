"""Watches how a model learns, in a training loop that stays as it is.

    with recperf.watch(model, optimizer) as watch:
        for batch in loader:
            ...
    print(watch.report())

Of most steps only the loss is read. Some are looked at: gradients, updates, outputs of activations and ids of tables;
the more that takes of the time, the rarer it is. docs/quality.md describes what is found.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import wraps
from time import perf_counter
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from ..errors import UsageError
from ..measure.held_out import permuted
from ..measure.learning import report_of
from ..measure.learning_records import (
    ClearingSeen,
    Finding,
    InputSeen,
    LearningReport,
    LearningSeen,
    RateSeen,
)
from ..measure.looks import ENDS, TABLES, Parameters, Probe, Snapshot, Units, not_zero, rows_by_unit, sampled_ids
from ..measure.losses import FIRST, MOST, Losses
from ..measure.program_facts import is_compiled
from .program_hooks import RARE, patched

SHARE, FIRST_LOOKS = 0.005, 6
"""Looks and losses that are read take at most this share of the time, beside the first looks."""
READ, RAREST = 64, 16
"""After so many losses that were read it is decided anew whether to read each; at least one of so many is."""
POSTPONED = 8
"""Steps by which a look is put off that would take too much."""
GAP = 61
"""Steps between two looks, at most; looks at every 64th step would see one half of what alternates."""
WATCHED: tuple[type[nn.Module], ...] = (*TABLES, *ENDS)
"""Modules whose outputs or ids are looked at."""


def watch(model: nn.Module | Mapping[str, nn.Module], optimizer: Optimizer | Iterable[Optimizer]) -> Watch:
    """Watch how a model learns: `with recperf.watch(model, optimizer) as watch:` around the training loop.

    Several modules have names, as in `{"encoder": encoder, "head": head}`; several optimizers are a list. What the loop
    computes stays the same to the bit. Afterwards `watch.report()` says what keeps the model, or a part of it, from
    learning.
    """
    modules = {"": model} if isinstance(model, nn.Module) else dict(model)
    optimizers: list[Any] = [optimizer] if hasattr(optimizer, "param_groups") else list(optimizer)
    # Accelerate's, for one, has no hooks of its own.
    hooked = "_optimizer_step_pre_hooks"
    optimizers = [one if hasattr(one, hooked) else getattr(one, "optimizer", one) for one in optimizers]
    if not all(isinstance(module, nn.Module) for module in modules.values()) or not modules:
        raise UsageError("the model must be a torch.nn.Module", fix="recperf.watch(model, optimizer)")
    if not all(hasattr(one, hooked) for one in optimizers) or not optimizers:
        raise UsageError("the optimizer must be one of torch.optim", fix="recperf.watch(model, optimizer)")
    return Watch(lambda: modules, optimizers)


@dataclass
class _Look:
    """A step that is looked at, until each optimizer has stepped."""

    began: int
    waiting: set[int]
    snapshots: dict[int, Snapshot] = field(default_factory=dict)
    mode_seen: bool = False


def _guarded(method: Callable[..., None]) -> Callable[..., None]:
    """Time a method that the loop calls, and let no failure of it reach the loop."""

    @wraps(method)
    def call(self: Watch, *arguments: Any) -> None:
        if self._off or torch.compiler.is_compiling():
            return
        began = perf_counter()
        try:
            method(self, *arguments)
        except Exception as error:
            self._off = True
            self._notes.append(f"watching ended at step {self.steps}: {type(error).__name__}: {error}")
        finally:
            self._own += perf_counter() - began

    return call


class Watch:
    """Watches the training loop inside its `with` block."""

    def __init__(self, modules: Callable[[], Mapping[str, nn.Module]], optimizers: list[Optimizer] | None) -> None:
        """Without `optimizers`, all that step are watched."""
        self.steps = 0
        self._modules, self._given = modules, optimizers
        self._optimizers: dict[int, Optimizer] = {}
        self._roots: Mapping[str, nn.Module] = {}
        self._parameters = Parameters()
        self._names: dict[int, str] = {}
        """Of parameters, and of modules whose calls are looked at."""
        self._watched: dict[int, nn.Module] = {}
        self._units: dict[tuple[int, int], Units] = {}
        self._rates: dict[str, RateSeen] = {}
        self._losses = Losses()
        self._clearing: dict[int, ClearingSeen] = {}
        self._probes: dict[int, Probe] = {}
        self._training: list[bool] = []
        self._differ: set[str] = set()
        self._inputs: list[InputSeen] = []
        self._notes: list[str] = []
        self._stack = ExitStack()
        self._forward: Any = None
        self._look: _Look | None = None
        self._looks = self._next = self._backward_calls = self._skip = 0
        self._stride = 1
        """One of so many losses is read."""
        self._depth: dict[int, int] = {}
        """Steps of an optimizer inside each other: a class may call its base's."""
        self._primary = 0
        self._own = self._began = self._free = 0.0
        self._final: LearningSeen | None = None
        self._off = True

    def __enter__(self) -> Watch:
        if self._began:
            raise UsageError("a watch is used once", fix="with recperf.watch(model, optimizer) as watch: ...")
        self._began, self._off = perf_counter(), False
        enter, before, after = self._stack, self._before_step, self._after_step
        for one in self._given or []:
            enter.callback(one.register_step_pre_hook(before).remove)
            enter.callback(one.register_step_post_hook(after).remove)
            self._optimizers[id(one)] = one
        if self._given is None:
            enter.callback(register_optimizer_step_pre_hook(before).remove)
            enter.callback(register_optimizer_step_post_hook(after).remove)
        enter.enter_context(patched(Tensor, "backward", self._backward))
        enter.enter_context(patched(torch.amp.GradScaler, "scale", self._scale))
        enter.callback(self._end_look)
        enter.callback(self._close_probes)
        if self._given is not None:
            self._discover()
        return self

    def __exit__(self, *error: object) -> None:
        self._finish()
        self._off = True
        self._stack.close()
        self._final = self._seen()
        # What the loop made may go now, and may change.
        self._parameters, self._losses = Parameters(), Losses()
        self._watched, self._optimizers, self._units = {}, {}, {}

    def report(self) -> LearningReport:
        """What keeps the model, or a part of it, from learning, as far as it was seen until now."""
        self._finish()
        return report_of(replace(self._final or self._seen(), inputs=self._inputs))

    @property
    def findings(self) -> list[Finding]:
        """Those of the report, the surest first."""
        return self.report().findings

    def held_out(self, batches: Iterable[Any], score: Callable[[Any], Any]) -> list[Finding]:
        """Find inputs that do not matter: permute each over the rows of held-out batches, and score the batch again.

        `score` gets a batch and returns a number, such as the loss of the model on it. Inputs are the tensors of a
        batch that is a tensor, tuple, list or dict, and the columns of those with few. The model is in eval mode
        meanwhile; its buffers and all random generators are afterwards as before.
        """
        modules = list(self._modules().values())
        off, self._off = self._off, True
        try:
            self._inputs = permuted(batches, score, modules)
        finally:
            self._off = off
        return [finding for finding in self.findings if finding.name == "ignored-input"]

    # What the loop calls

    def _backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def backward(loss: Any, *arguments: Any, **options: Any) -> Any:
            if torch.compiler.is_compiling() or self._off:
                pass
            elif self._skip:
                self._skip -= 1
            else:
                self._before_backward(loss, sys._getframe(1))
            return original(loss, *arguments, **options)

        return backward

    def _scale(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A scaled loss may be infinite where the loss is not."""

        @wraps(original)
        def scale(scaler: Any, outputs: Any) -> Any:
            scaled = original(scaler, outputs)
            if isinstance(outputs, Tensor) and not torch.compiler.is_compiling():
                self._losses.scaled(scaled, outputs)
            return scaled

        return scale

    @_guarded
    def _before_backward(self, loss: Tensor, frame: Any) -> None:
        self._backward_calls += 1
        if self._backward_calls == 1:
            # The optimizers of a program are known at their first step; a loss that is not finite may come before.
            self._discover()
        self._skip = self._stride - 1
        if not self._backward_calls % READ:
            self._stride = max(1, self._stride // 2) if self._affordable() else min(RAREST, 2 * self._stride)
        if (look := self._look) is not None and not look.mode_seen:
            look.mode_seen = True
            self._see_mode()
        if loss.numel() == 1 and not is_in_torch_dispatch_mode() and not (loss.is_cuda and _capturing(loss)):
            self._losses.note(loss, frame, self.steps, self._names, self._parameters.not_finite)

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        key = id(optimizer)
        self._depth[key] = depth = self._depth.get(key, 0) + 1
        if depth == 1 and (self._look is not None or key not in self._clearing):
            self._look_before(optimizer)

    @_guarded
    @torch.no_grad()
    def _look_before(self, optimizer: Optimizer) -> None:
        key = id(optimizer)
        if key not in self._clearing:
            self._optimizers[key] = optimizer
            self._discover()
            self._clearing[key] = ClearingSeen(name=self._name(optimizer), intervals=0, cleared=0)
            if not self.steps and self._look is None:
                self._look = _Look(0, set(self._optimizers))
        look = self._look
        if look is None or key not in look.waiting:
            return
        if _observed_elsewhere() or any(map(_capturing, _parameters_of(optimizer)[:1])):
            self._end_look()
            return
        look.snapshots[key] = self._parameters.before(map(id, _parameters_of(optimizer)))

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        key = id(optimizer)
        self._depth[key] = depth = self._depth.get(key, 1) - 1
        if depth > 0:
            return
        self._primary = self._primary or key
        self.steps += key == self._primary
        if self._look is not None or key in self._probes or (key == self._primary and self._is_due()):
            self._look_after(optimizer)

    @_guarded
    @torch.no_grad()
    def _look_after(self, optimizer: Optimizer) -> None:
        key, look = id(optimizer), self._look
        if (probe := self._probes.pop(key, None)) is not None:
            probe.close()
            if probe.gradients:
                self._clearing[key].intervals += 1
                self._clearing[key].cleared += probe.cleared
        if look is not None and key in look.snapshots:
            self._parameters.after(look.snapshots.pop(key), self._see_rates(optimizer))
            look.waiting.discard(key)
            self._set_probe(optimizer)
        if look is not None and (not look.waiting or self.steps > look.began + RARE):
            self._parameters.look_at_others()
            self._looks += 1
            if self._looks == FIRST_LOOKS:
                self._free = self._own
            self._end_look()
            # Doubled as long as it is short.
            self._next = max(look.began + min(look.began + 1, GAP), self.steps)
            self._losses.read()
        if self._look is None and key == self._primary and self._is_due() and not _observed_elsewhere():
            self._begin_look()

    # Looks

    def _is_due(self) -> bool:
        """Whether the next step is to be looked at, by its number and by what looks took until now."""
        if self.steps < self._next:
            return False
        if self._affordable():
            return True
        self._next = self.steps + POSTPONED
        return False

    def _affordable(self) -> bool:
        return self._looks < FIRST_LOOKS or self._own <= self._free + SHARE * (perf_counter() - self._began)

    def _begin_look(self) -> None:
        stepping = {key for key in self._optimizers if key in self._clearing}
        self._look = _Look(self.steps, stepping)
        self._skip = 0
        # In the first step a program may compile its model, which hooks would make larger.
        if not is_compiled() and not any(isinstance(root, nn.DataParallel) for root in self._roots.values()):
            self._forward = register_module_forward_hook(self._after_module)

    def _end_look(self) -> None:
        self._look = None
        for table in self._parameters.tables.values():
            table.ids = None
        if self._forward is not None:
            self._forward.remove()
            self._forward = None

    def _close_probes(self) -> None:
        for probe in self._probes.values():
            probe.close()
        self._probes.clear()

    def _after_module(self, module: nn.Module, arguments: Any, output: Any) -> None:
        # A hook of all modules: hooks of one would be copied and saved with it.
        if id(module) in self._watched and torch.is_grad_enabled():
            self._look_at_module(module, arguments, output)

    @_guarded
    @torch.no_grad()
    def _look_at_module(self, module: nn.Module, arguments: Any, output: Any) -> None:
        if is_in_torch_dispatch_mode() or not isinstance(output, Tensor) or _capturing(output):
            return
        if isinstance(module, TABLES):
            table = self._parameters.tables.get(id(module.weight))
            if table is not None and arguments and isinstance(arguments[0], Tensor) and arguments[0].numel():
                table.looks += table.ids is None
                table.lookups += arguments[0].numel()
                table.ids = sampled_ids(arguments[0])
        elif output.requires_grad and output.numel():
            rows = rows_by_unit(output)
            key = id(module), rows.shape[1]
            if key not in self._units:
                self._units[key] = Units(self._names[id(module)], module, rows.shape[1])
            self._units[key].look(rows)

    def _set_probe(self, optimizer: Optimizer) -> None:
        """Watch the smallest parameter that has a gradient now, until the next step."""
        ready = [one for one in _parameters_of(optimizer) if one.grad is not None and one.requires_grad]
        for parameter in sorted(ready, key=Tensor.numel)[:4]:
            assert parameter.grad is not None
            if not_zero(parameter.grad):
                self._probes[id(optimizer)] = probe = Probe(parameter)
                # Without gradients there is no node.
                with torch.enable_grad():
                    probe.watch()
                self._clearing[id(optimizer)].parameter = self._names.get(id(parameter), "")
                return

    def _see_rates(self, optimizer: Optimizer) -> dict[int, float | None]:
        """The learning rate of each parameter of an optimizer."""
        rates: dict[int, float | None] = {}
        for index, group in enumerate(optimizer.param_groups):
            rate = float(group["lr"]) if group.get("lr") is not None else None
            rates.update((id(one), rate) for one in group["params"])
            if rate is not None:
                several = len(optimizer.param_groups) > 1
                name = (f"group {index} of " if several else "") + self._clearing[id(optimizer)].name
                seen = self._rates.setdefault(name, RateSeen(name=name, rates=[], steps=[]))
                seen.rates.append(rate)
                seen.steps.append(self.steps)
                if len(seen.rates) > MOST:
                    del seen.rates[FIRST : MOST // 2], seen.steps[FIRST : MOST // 2]
        return rates

    def _see_mode(self) -> None:
        optimized = {id(one) for optimizer in self._optimizers.values() for one in _parameters_of(optimizer)}
        trained = [root for root in self._roots.values() if any(id(one) in optimized for one in root.parameters())]
        self._training.append(all(_inner(root).training for root in trained))
        if len(self._training) > MOST:
            del self._training[FIRST : MOST // 2]
        for part in (part for root in trained if not _inner(root).training for part in root.modules()):
            if isinstance(part, _DropoutNd) and part.p > 0:
                self._differ.add("dropout")
            elif isinstance(part, _NormBase) and part.track_running_stats:
                self._differ.add("batch norm")

    @_guarded
    @torch.no_grad()
    def _finish(self) -> None:
        self._losses.read()
        self._parameters.finish()

    # Names

    def _discover(self) -> None:
        """Name the parameters of the modules, and those that only optimizers hold."""
        self._roots = self._modules()
        parameters = self._parameters
        for prefix, root in self._roots.items():
            for path, module in root.named_modules():
                name = _joined(prefix, path)
                if isinstance(module, WATCHED):
                    self._watched[id(module)] = module
                    self._names.setdefault(id(module), name or type(module).__name__)
                for own, parameter in module.named_parameters(recurse=False):
                    if not is_lazy(parameter):
                        self._names.setdefault(id(parameter), _joined(name, own))
                        parameters.add(_joined(name, own), parameter, module)
        for optimizer in self._optimizers.values():
            for group in optimizer.param_groups:
                for index, parameter in enumerate(group["params"]):
                    if is_lazy(parameter):
                        continue
                    name = self._names.setdefault(id(parameter), f"parameter {index} of {self._name(optimizer)}")
                    parameters.add(name, parameter)
                    parameters.seen[id(parameter)].optimized = True
                    if id(parameter) in parameters.tables:
                        parameters.tables[id(parameter)].decayed |= bool(group.get("weight_decay"))

    def _name(self, optimizer: Optimizer) -> str:
        """The class of an optimizer, with a number where there are several of it."""
        alike = [key for key, one in self._optimizers.items() if type(one) is type(optimizer)]
        kind = type(optimizer).__name__
        return f"{kind} {alike.index(id(optimizer))}" if len(alike) > 1 else kind

    def _seen(self) -> LearningSeen:
        parameters, roots = self._parameters, list(self._roots.values())
        notes = list(self._notes)
        if is_compiled() and any(isinstance(module, WATCHED) for root in roots for module in root.modules()):
            notes.append("outputs of modules and ids of tables are not seen in a program that compiles")
        elapsed = perf_counter() - self._began
        return LearningSeen(
            steps=self.steps,
            looks=self._looks,
            backward_calls=self._backward_calls,
            cost=self._own / max(elapsed, 1e-9) if self._began else 0.0,
            parameters=list(parameters.seen.values()),
            units=[one.seen() for one in self._units.values()],
            tables=parameters.rows_seen(self.steps),
            rates=list(self._rates.values()),
            losses=self._losses.seen,
            clearing=list(self._clearing.values()),
            nonfinite=self._losses.nonfinite,
            training=self._training,
            differ_in_eval=sorted(self._differ),
            notes=notes,
        )


def _parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [one for group in optimizer.param_groups for one in group["params"] if not is_lazy(one)]


def _joined(*names: str) -> str:
    """Without what torch.compile puts into names."""
    return ".".join(part for name in names for part in name.split(".") if part and part != "_orig_mod")


def _inner(module: nn.Module) -> nn.Module:
    """The module in wrappers, such as torch's DistributedDataParallel, whose own mode may differ from it."""
    for name in ("_orig_mod", "module"):
        inner = module._modules.get(name)
        if inner is not None and len(module._modules) == 1:
            return _inner(inner)
    return module


def _capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _observed_elsewhere() -> bool:
    """Whether a profiler or a counter would see what a look does."""
    return is_in_torch_dispatch_mode() or torch._C._autograd._profiler_enabled()
