"""Switches resolved for a device: what is on, and why."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..errors import MachineError
from ..ops.triton_problem import problem
from .fast_config import FastConfig


@dataclass(frozen=True, kw_only=True)
class Switches:
    """The ways taken."""

    input: str
    graph: bool
    precision: str
    embedding: bool
    interaction: bool
    mlp: bool
    optimizer: bool
    scatter: bool
    reasons: dict[str, str]

    @property
    def low(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bfloat16" else torch.float32


class _Decisions:
    """Remembers why."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}

    def __call__(self, name: str, value: str, why: str) -> str:
        self.reasons[name] = f"{value}: {why}"
        return value


def resolve(fast: FastConfig, device: torch.device, *, drawn: bool, slices: int, optimizer: str) -> Switches:
    """`drawn`: batches are made up, not read; `slices`: parts a batch is taken in; `optimizer`: the tables'."""
    cuda = device.type == "cuda"
    decided = _Decisions()
    if fast.input != "auto":
        if fast.input == "device" and not drawn:
            raise MachineError("rows of a file cannot be drawn on the device", fix="--fast.input pinned")
        source = decided("input", fast.input, "asked for")
    elif drawn:
        source = decided("input", "device", "batches are made up where they are used")
    else:
        source = decided("input", "pinned" if cuda else "pageable", "rows are read from files")
    precision = _precision(fast, cuda, decided)
    ways = {}
    for name in ("embedding", "interaction", "mlp", "optimizer"):
        ways[name] = _way(name, getattr(fast, name), device, decided)
    sparse = optimizer != "adamw"
    graph = _graph(fast, cuda, slices, ways["embedding"], sparse, decided)
    scatter = cuda and ways["embedding"] and optimizer == "sgd" and not fast.deterministic
    decided("deterministic", *_deterministic(fast, cuda, ways["embedding"] and sparse, scatter, optimizer))
    return Switches(input=source, graph=graph, precision=precision, scatter=scatter, reasons=decided.reasons, **ways)


def _graph(fast: FastConfig, cuda: bool, slices: int, fused: bool, sparse: bool, decided: _Decisions) -> bool:
    lack = "" if cuda else "no GPU"
    if not lack and slices > 1:
        lack = "a batch is taken in slices"
    if not lack and not sparse:
        lack = "adamw keeps a dense gradient of the tables, whose lookups ask the host for sizes"
    if not lack and not fused:
        lack = "plain embeddings count a batch's different rows, which shapes cannot follow"
    if fast.graph == "on" and lack:
        raise MachineError(f"a step cannot be a CUDA graph: {lack}", fix="--fast.graph off")
    if fast.graph != "auto":
        return decided("graph", fast.graph, "asked for") == "on"
    return decided("graph", "off" if lack else "on", lack or "a GPU, and shapes that do not change") == "on"


def _precision(fast: FastConfig, cuda: bool, decided: _Decisions) -> str:
    if fast.precision != "auto":
        if fast.precision == "tf32" and not cuda:
            raise MachineError("a CPU has no tf32", fix="--fast.precision float32")
        return decided("precision", fast.precision, "asked for")
    if cuda and torch.cuda.get_device_capability()[0] >= 8:
        return decided("precision", "bfloat16", "a GPU that has it; sums, weights and their gradients in float32")
    return decided("precision", "float32", "a CPU" if not cuda else "a GPU without bfloat16")


def _way(name: str, asked: str, device: torch.device, decided: _Decisions) -> bool:
    """Whether a part is fused."""
    cpu = device.type == "cpu"
    lack = None if cpu else problem(device)
    if asked == "fused" and lack and not cpu:
        raise MachineError(f"the fused {name} cannot be used: {lack}", fix=f"--fast.{name} plain")
    if asked != "auto":
        return decided(name, asked, "asked for") == "fused"
    return decided(name, "plain" if lack else "fused", lack or f"on {device.type}") == "fused"


def _deterministic(fast: FastConfig, cuda: bool, sorted_ids: bool, scatter: bool, optimizer: str) -> tuple[str, str]:
    """Whether a repeat has equal bits, and why."""
    if scatter:
        return "no", "asked for: the tables' updates are added by atomics"
    if cuda and not sorted_ids:
        return "no", "torch adds up the tables' gradients by atomics; the fused embedding sorts ids instead"
    if fast.deterministic:
        return "yes", "asked for"
    if optimizer in ("adagrad", "rowwise-adagrad"):
        return "yes", "Adagrad needs each row's whole gradient, hence sorted ids"
    return "yes", "no way here varies from run to run"
