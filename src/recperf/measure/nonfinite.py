"""Finds the operator that made a loss NaN or infinite, in the autograd graph that the loss still has.

The tensors that autograd saved for the backward pass are values of the forward pass. Where those that an operator read
are finite and what it wrote is not, it made the value. Nothing is computed again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

MOST_NODES = 20_000
_WRITTEN = ("_saved_result", "_saved_output", "_saved_out")
_RISKY = re.compile(r"^(Log|Log2|Log10|Log1P|Div|Pow|Sqrt|Rsqrt|Reciprocal|Exp|Expm1|Acos|Asin|Atanh|Sinh|Cosh|Tan)B")
"""Operators that make such values from ordinary ones; a sum or a product needs huge ones."""


@torch.no_grad()
def cause_of(loss: Tensor, names: Mapping[int, str]) -> tuple[str, str, str]:
    """What made the loss so: "operator", "outside" (an operator that may have read it from outside of the graph),
    "weights", "input" or "" for not known; the module of the nearest parameter before it, whose name `names` has by
    its identity; and the operator."""
    if loss.grad_fn is None:
        return "", "", ""
    nodes = _nodes(loss.grad_fn)
    read, written, leaves = _values(nodes, names)
    weights = [names[id(leaf)] for leaf in leaves if id(leaf) in names and not is_finite(leaf)]
    if weights:
        return "weights", weights[0], ""
    unsure: list[Any] = []
    # The last node is the farthest from the loss: the first operators of the forward pass come first.
    for node in reversed(nodes):
        outside = read.get(node, [])
        if not all(map(is_finite, outside)):
            return "input", _nearest(node, names), _operator(node)
        inputs = [one for before in _before(node) for one in written.get(before, [])]
        if not all(map(is_finite, inputs)):
            continue
        output = written.get(node)
        if output is not None and not all(map(is_finite, output)):
            return _made([*_unsure_before(node, unsure, written), node], node, bool(outside), names)
        if output is None and (inputs or outside):
            unsure.append(node)
    # No operator saved the value: it was made behind the last finite ones.
    return _made(unsure, unsure[-1], True, names) if unsure else ("", "", "")


def _made(suspects: list[Any], likely: Any, saved: bool, names: Mapping[int, str]) -> tuple[str, str, str]:
    """The operator that made the value, or one that may have read it from outside of the graph, such as a target."""
    risky = next((node for node in suspects if _RISKY.match(node.name().rpartition("::")[2])), None)
    node = likely if risky is None else risky
    reads_outside = risky is None and not saved and any(before is None for before, _ in node.next_functions)
    return "outside" if reads_outside else "operator", _nearest(node, names), _operator(node)


def is_finite(tensor: Tensor) -> bool:
    """No NaN, and no positive infinity: -inf is what masks are filled with."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    values = tensor._values() if tensor.is_sparse else tensor
    return (
        bool(values.isfinite().all()) if tensor.is_complex() else not bool((values.isnan() | values.isposinf()).any())
    )


def _unsure_before(node: Any, unsure: list[Any], written: Mapping[Any, list[Tensor]]) -> list[Any]:
    """Operators before this one whose results nothing saved, the first ones first."""
    inside: list[Any] = []
    level = _before(node)
    while level:
        level = [one for one in level if one not in written and one in unsure and one not in inside]
        inside += level
        level = [before for one in level for before in _before(one)]
    return inside[::-1]


def _nodes(root: Any) -> list[Any]:
    """The nodes of the graph; each comes after those that read its result."""
    readers: dict[Any, int] = {root: 0}
    level = [root]
    while level and len(readers) < MOST_NODES:
        following = []
        for node in level:
            for before in _before(node):
                if before not in readers:
                    readers[before] = 0
                    following.append(before)
                readers[before] += 1
        level = following
    ordered, ready = [], [root]
    while ready:
        node = ready.pop()
        ordered.append(node)
        for before in _before(node):
            if before in readers:
                readers[before] -= 1
                if not readers[before]:
                    ready.append(before)
    return ordered


def _values(
    nodes: list[Any], names: Mapping[int, str]
) -> tuple[dict[Any, list[Tensor]], dict[Any, list[Tensor]], list[Tensor]]:
    """What nodes read that has no node, such as a batch; what nodes wrote; and the leaves of the graph."""
    read: dict[Any, list[Tensor]] = {}
    written: dict[Any, list[Tensor]] = {}
    leaves: list[Tensor] = []
    known = set(nodes)
    for node in nodes:
        if (leaf := getattr(node, "variable", None)) is not None:
            leaves.append(leaf)
            continue
        for name, tensor in _saved(node):
            if name in _WRITTEN:
                written.setdefault(node, []).append(tensor)
            elif tensor.grad_fn is None:
                if id(tensor) not in names:
                    read.setdefault(node, []).append(tensor)
            elif tensor.grad_fn in known:
                written.setdefault(tensor.grad_fn, []).append(tensor)
    return read, written, leaves


def _saved(node: Any) -> Iterator[tuple[str, Tensor]]:
    names = [name for name in dir(node) if name.startswith("_saved_")]
    if not names and hasattr(node, "saved_tensors"):
        names = ["saved_tensors"]
    for name in names:
        try:
            value = getattr(node, name)
        except RuntimeError:
            # It was changed in place, or freed by an earlier backward pass.
            continue
        for one in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(one, Tensor):
                yield name, one


def _before(node: Any) -> list[Any]:
    return [before for before, _ in node.next_functions if before is not None]


def _operator(node: Any) -> str:
    """`LogBackward0` is the gradient of `log`."""
    name = re.sub(r"Backward\d*$", "", node.name().rpartition("::")[2])
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def _nearest(node: Any, names: Mapping[int, str]) -> str:
    """The name of the module whose parameter is nearest before a node."""
    level, seen = [node], {node}
    while level:
        for one in level:
            leaf = getattr(one, "variable", None)
            if leaf is not None and id(leaf) in names:
                return names[id(leaf)].rpartition(".")[0] or names[id(leaf)]
        level = [before for one in level for before in _before(one) if before not in seen]
        seen.update(level)
    return ""
