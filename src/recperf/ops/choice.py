"""Which body of an op serves on a device, by one rule: Triton on a GPU, C on a CPU, plain torch where those cannot."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Literal

import torch

from ..errors import MachineError
from .triton_problem import problem

Name = Literal["auto", "reference", "native", "triton"]


def choose(
    package: str,
    name: Name,
    device: torch.device,
    *,
    what: str,
    subject: str,
    fix: str,
    bodies: tuple[str, ...] = ("reference", "native", "triton"),
) -> tuple[ModuleType, str]:
    """The body of an op's package and why; an explicit wish that cannot be met is an error.

    `what` the op is to a user, `subject` what lies on the device, `fix` the words that avoid an error, `bodies` those
    the package has: `reference` always, and where the one for the device is not among them, it serves.
    """
    wanted = name
    if name == "auto":
        wanted = "triton" if device.type == "cuda" else "native"
        wanted = wanted if wanted in bodies else "reference"
    lack = _problem(package, wanted, device, subject) if wanted in bodies else f"there is no {wanted} body of it"
    if lack is None:
        why = "asked for" if name != "auto" else f"{subject} are on {device.type}"
        return _body(package, wanted), f"{wanted}: {why}"
    if name == "auto":
        return _body(package, "reference"), f"reference: {lack}"
    raise MachineError(f"the {name} {what} cannot be used: {lack}", fix=fix)


def _body(package: str, name: str) -> ModuleType:
    """Imported only when it is chosen: triton is not everywhere."""
    return importlib.import_module(f"{package}.{name}")


def _problem(package: str, name: str, device: torch.device, subject: str) -> str | None:
    if name == "reference":
        return None
    if name == "triton":
        return problem(device)
    if device.type != "cpu":
        return f"{subject} are on {device.type}"
    found = _body(package, "native").library()
    return found if isinstance(found, str) else None
