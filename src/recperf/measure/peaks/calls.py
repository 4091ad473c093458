"""What calling an operator costs whatever it computes, by kind: every call here works on tensors of one element."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns

import torch
from torch import Tensor
from torch.nn import functional as F

from .records import Figure
from .sampling import Sampler, figure

CALLS = 100
"""Calls per reading. On a GPU fewer than its queue holds, so that the host never waits for the device."""
SHORT, LONG = 8, 64
"""Nodes of the two backward passes whose difference is the time of a node."""


def calls(sampler: Sampler, device: torch.device | str = "cpu") -> dict[str, Figure]:
    """ns of one call from Python by kind of operator; on a GPU the host's time to queue it."""
    one, matrix = torch.ones(1, device=device), torch.ones(1, 1, device=device)
    weight, target = torch.ones(1, device=device, requires_grad=True), torch.ones(1, device=device)
    ids, offsets = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2))
    kinds: dict[str, tuple[str, Callable[[], object]]] = {
        "elementwise": ("add", lambda: one + one),
        "elementwise_grad": ("add to a parameter, forward", lambda: weight + one),
        "view": ("transpose", lambda: matrix.t()),
        "product": ("addmm", lambda: torch.addmm(one, matrix, matrix)),
        "reduction": ("sum", lambda: one.sum()),
        "index": ("index_select of one row", lambda: torch.index_select(matrix, 0, ids)),
        "embedding_bag": ("embedding_bag of one id", lambda: F.embedding_bag(ids, matrix, offsets, mode="sum")),
        "allocate": ("empty", lambda: torch.empty(1, device=device)),
        "copy": ("copy_", lambda: target.copy_(one)),
    }
    empty = min(sampler.readings(_repeated(lambda: None, device)))
    figures = {}
    for kind, (what, call) in kinds.items():
        # The operators are wrapped in a function here; a program calls them directly.
        ns = [max(1.0, value - empty) for value in sampler.readings(_repeated(call, device))]
        figures[kind] = figure(ns, "ns", what=what)
    return figures | _backward(sampler, weight, one)


def _repeated(call: Callable[[], object], device: torch.device | str) -> Callable[[], float]:
    def once() -> float:
        synchronize(device)
        began = perf_counter_ns()
        for _ in range(CALLS):
            call()
        return (perf_counter_ns() - began) / CALLS

    return once


def _backward(sampler: Sampler, weight: Tensor, one: Tensor) -> dict[str, Figure]:
    """Starting a backward pass, and each of its nodes: from chains of additions of two lengths."""

    def backward(nodes: int) -> Callable[[], float]:
        def once() -> float:
            weight.grad = None
            result = weight
            for _ in range(nodes):
                result = result + one
            synchronize(weight.device)
            began = perf_counter_ns()
            result.backward()  # type: ignore[no-untyped-call]
            return perf_counter_ns() - began

        return once

    short, long = (sorted(sampler.readings(backward(nodes))) for nodes in (SHORT, LONG))
    nodes = [max(1.0, (slow - fast) / (LONG - SHORT)) for fast, slow in zip(short, long)]
    starts = [max(1.0, fast - SHORT * node) for fast, node in zip(short, nodes)]
    return {
        "node": figure(nodes, "ns", what="one node of a backward pass"),
        "backward": figure(starts, "ns", what="starting a backward pass"),
    }


def synchronize(device: torch.device | str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
