"""Picks the implementation of an op on a device by one rule: Triton on a GPU, C on a CPU, otherwise plain torch."""

from __future__ import annotations

import copyreg
import functools
import importlib
import importlib.util
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal

import torch

from ..errors import MachineError

Name = Literal["auto", "reference", "native", "triton"]

_used: dict[str, str] = {}

_on_gpu: dict[tuple[str, Name, torch.device], tuple[ModuleType, str]] = {}
"""What was chosen on GPUs, where nothing changes it: calls of small operators would wait for choosing again."""

# A model holds the modules that implement its ops; a copy of the model refers to the same modules.
copyreg.pickle(ModuleType, lambda module: (importlib.import_module, (module.__name__,)))


def choose(
    package: str,
    name: Name,
    device: torch.device,
    *,
    fix: str = 'impl="reference"',
    problem: str | None = None,
    moves: bool = False,
) -> tuple[ModuleType, str]:
    """The implementation of an op and the reason for it; an explicit request that cannot be met is an error.

    `problem`: a reason of the op's own why only the reference can serve. `fix`: the option that avoids an error.
    `moves`: it is not recorded here, as it computes no number or the caller decides whether it is used.
    """
    if problem is None and (known := _on_gpu.get((package, name, device))):
        return known
    if name == "reference":
        return _module(package, "reference"), "reference: requested"
    picked = name
    if name == "auto":
        picked = "triton" if device.type == "cuda" else "native"
        if not _exists(package, picked):
            return _module(package, "reference"), f"reference: the tensors are on {device.type}"
    lack = None if problem else _problem(package, picked, device)
    op = package.rpartition(".")[2]
    if name == "auto" and not problem and not moves:
        _used[f"{op} on {device.type}"] = "reference" if lack else picked
    problem = problem or lack
    if problem is None:
        reason = "requested" if name != "auto" else f"the tensors are on {device.type}"
        chosen = _module(package, picked), f"{picked}: {reason}"
        if device.type == "cuda":
            _on_gpu[package, name, device] = chosen
        return chosen
    if name == "auto":
        return _module(package, "reference"), f"reference: {problem}"
    raise MachineError(f"the {name} implementation of {op} cannot be used: {problem}", fix=fix)


def forget_used() -> None:
    """Begin again with what `used` lists: a process may train several runs."""
    _used.clear()
    _on_gpu.clear()


def used() -> dict[str, str]:
    """The implementations that a run uses because of what the machine offers, by op and type of device."""
    return dict(sorted(_used.items()))


def replaced(recorded: Any) -> dict[str, tuple[str, str]]:
    """Of recorded implementations those that this machine replaces: by which, and the reason."""
    now: dict[str, tuple[str, str]] = {}
    if not isinstance(recorded, dict):
        return now
    for name, body in recorded.items():
        op, _, device = name.partition(" on ")
        if device in ("cpu", "cuda") and op.isidentifier() and _exists(f"{__package__}.{op}", "reference"):
            picked, reason = choose(f"{__package__}.{op}", "auto", torch.device(device))
            if (other := picked.__name__.rpartition(".")[2]) != body:
                now[name] = other, reason.partition(": ")[2]
    return now


def dispatch(package: str, function: str | Callable[..., Any], *, float64: bool = True) -> Callable[..., Any]:
    """The op's function of this name, in the implementation for the device of its first argument, or in `impl`; or a
    function whose first argument is that implementation.

    It is a forward or backward pass of its own: autograd and autocast are off. `float64`: whether kernels compute it;
    otherwise the reference does.
    """

    def call(*arguments: Any, impl: Name = "auto", **options: Any) -> Any:
        first = arguments[0]
        if impl == "auto" and first.dtype == torch.float64 and not float64:
            impl = "reference"
        body, _ = choose(package, impl, first.device)
        with torch.no_grad(), torch.autocast(first.device.type, enabled=False):
            if callable(function):
                return function(body, *arguments, **options)
            return getattr(body, function)(*arguments, **options)

    return call


def triton_problem(device: torch.device) -> str | None:
    """The reason why Triton kernels cannot run on a device; None if they can. Tests interpret them on any device."""
    if not _exists("triton"):
        return "triton is not installed"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"the tensors are on {device.type}"
    return None


def _problem(package: str, name: str, device: torch.device) -> str | None:
    if not _exists(package, name):
        return "there is none"
    if name == "triton":
        return triton_problem(device)
    if device.type != "cpu":
        return f"the tensors are on {device.type}"
    library = _module(package, "native").library()
    return library if isinstance(library, str) else None


@functools.cache
def _exists(*names: str) -> bool:
    try:
        return importlib.util.find_spec(".".join(names)) is not None
    except ModuleNotFoundError:
        return False


@functools.cache
def _module(package: str, name: str) -> ModuleType:
    """Imported when it is first needed: triton is not installed everywhere."""
    return importlib.import_module(f"{package}.{name}")
