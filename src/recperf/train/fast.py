"""Resolves the switches of `FastConfig` for a device, with the reason for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..errors import MachineError, notice_once
from ..machine import bfloat16_instructions
from ..ops.choice import triton_problem
from .config import FastConfig
from .graph import FIXED_SHAPES, choose_graph

SWITCH = "--fast.graph"


@dataclass(frozen=True, kw_only=True)
class Switches:
    """The implementations in use."""

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


Decide = Callable[[str, str, str], str]
"""Records the value of a switch and the reason for it, and returns the value."""


def resolve(
    fast: FastConfig, device: torch.device, *, drawn: bool, slices: int, optimizer: str, lack: str = ""
) -> Switches:
    """`drawn`: batches are synthetic, not read from files; `slices`: micro-batches; `optimizer`: the tables'; `lack`:
    what the workload lacks for a CUDA graph, if anything."""
    cuda = device.type == "cuda"
    reasons: dict[str, str] = {}

    def decided(name: str, value: str, why: str) -> str:
        reasons[name] = f"{value}: {why}"
        return value

    if fast.input != "auto":
        if fast.input == "device" and not drawn:
            raise MachineError("rows of a file cannot be drawn on the device", fix="--fast.input pinned")
        source = decided("input", fast.input, "requested")
    elif drawn:
        source = decided("input", "device", "synthetic batches are drawn where they are used")
    else:
        source = decided("input", "pinned" if cuda else "pageable", "rows are read from files")
    precision = _precision(fast, cuda, decided)
    fused = {}
    for name in ("embedding", "interaction", "mlp", "optimizer"):
        fused[name] = _fused(name, getattr(fast, name), device, decided)
    sparse = optimizer != "adamw"
    lack = lack or _graph_lack(slices, fused["embedding"], sparse)
    graph, why = choose_graph(fast.graph, device, lack, why=FIXED_SHAPES, switch=SWITCH)
    decided("graph", *why.split(": ", 1))
    scatter = cuda and fused["embedding"] and optimizer == "sgd" and not fast.deterministic
    decided("deterministic", *_deterministic(fast, cuda, fused["embedding"] and sparse, scatter, optimizer))
    return Switches(input=source, graph=graph, precision=precision, scatter=scatter, reasons=reasons, **fused)


def _graph_lack(slices: int, fused: bool, sparse: bool) -> str:
    if slices > 1:
        return "a batch is split into micro-batches"
    if not sparse:
        return "adamw needs a dense gradient of the tables, whose lookups read sizes on the host"
    return "" if fused else "plain embeddings have shapes that depend on a batch's distinct rows"


def _precision(fast: FastConfig, cuda: bool, decided: Decide) -> str:
    if fast.precision != "auto":
        if fast.precision == "tf32" and not cuda:
            raise MachineError("a CPU has no tf32", fix="--fast.precision float32")
        return decided("precision", fast.precision, _requested(fast.precision, cuda))
    if cuda and torch.cuda.get_device_capability()[0] >= 8:
        return decided("precision", "bfloat16", "a GPU that supports it; sums, weights and their gradients in float32")
    return decided("precision", "float32", "a CPU" if not cuda else "a GPU without bfloat16")


def _requested(precision: str, cuda: bool) -> str:
    if precision != "bfloat16" or cuda:
        return "requested"
    instructions = bfloat16_instructions()
    if instructions is None:
        return "requested; faster than float32 only on a CPU with instructions for it, which the system does not say"
    if instructions:
        return f"requested; this CPU has {instructions} instructions for it"
    notice_once("this CPU has no instructions for bfloat16: --fast.precision float32 is faster")
    return "requested; slower than float32, since this CPU has no instructions for it"


def _fused(name: str, requested: str, device: torch.device, decided: Decide) -> bool:
    """Whether to use the fused implementation of a part."""
    cpu = device.type == "cpu"
    lack = None if cpu else triton_problem(device)
    if requested == "fused" and lack and not cpu:
        raise MachineError(f"the fused {name} cannot be used: {lack}", fix=f"--fast.{name} plain")
    if requested != "auto":
        return decided(name, requested, "requested") == "fused"
    return decided(name, "plain" if lack else "fused", lack or f"on {device.type}") == "fused"


def _deterministic(fast: FastConfig, cuda: bool, sorted_ids: bool, scatter: bool, optimizer: str) -> tuple[str, str]:
    """Whether a repeat is bit-identical, and why."""
    if scatter:
        return "no", "requested: the tables' updates are added by atomics"
    if cuda and not sorted_ids:
        return "no", "torch adds the tables' gradients by atomics; the fused embedding sorts ids instead"
    if fast.deterministic:
        return "yes", "requested"
    if optimizer not in ("sgd", "adamw"):
        return "yes", f"{optimizer} needs each row's whole gradient, so ids are sorted"
    return "yes", "no implementation in use varies from run to run"
