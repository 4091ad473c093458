"""FLOPs and bytes of an operator from the sizes of its inputs; None where they do not follow from those.

Shapes: M, K, N are rows, inner size and columns of a product; B its batch.
"""

from __future__ import annotations

from math import prod

from .read import Shapes

_BYTES = {
    "float": 4,
    "double": 8,
    "c10::half": 2,
    "c10::bfloat16": 2,
    "long int": 8,
    "long": 8,
    "int": 4,
    "short": 2,
    "short int": 2,
    "signed char": 1,
    "unsigned char": 1,
    "bool": 1,
    "c10::float8_e4m3fn": 1,
    "c10::float8_e5m2": 1,
}
_POINTWISE = {
    *("add", "sub", "mul", "div", "pow", "where", "lerp", "addcmul", "addcdiv", "copy", "clone", "neg", "abs"),
    *("exp", "log", "log1p", "sqrt", "rsqrt", "clamp", "clamp_min", "relu", "sigmoid", "tanh", "gelu", "silu"),
    *("threshold_backward", "sigmoid_backward", "tanh_backward"),
}
_REDUCING = {"sum", "mean", "amax", "amin", "max", "min", "norm"}
_BAGS = {"_embedding_bag", "_embedding_bag_forward_only"}


def flops(name: str, shapes: Shapes | None) -> int | None:
    """Multiplications and additions of a matrix product."""
    sizes = _product(name, shapes)
    return None if sizes is None else 2 * prod(sizes)


def moved(name: str, shapes: Shapes | None) -> int | None:
    """Bytes that an operator reads and writes if nothing is cached."""
    if shapes is None or not name.startswith("aten::"):
        return None
    op = name.removeprefix("aten::")
    tensors = _tensors(shapes)
    if not tensors:
        return None
    read = sum(count * size for count, size in tensors)
    width = tensors[0][1]
    sizes = _product(name, shapes)
    if sizes is not None:
        batch, rows, _, columns = sizes
        return read + batch * rows * columns * width
    if op in _BAGS and len(shapes.dims) > 2 and len(shapes.dims[0]) == 2 and len(tensors) > 2:
        (_, dim), lookups, bags = shapes.dims[0], tensors[1], tensors[2]
        ids = lookups[0] * lookups[1] + bags[0] * bags[1]
        return (lookups[0] + bags[0]) * dim * width + ids
    if op.rstrip("_") in _POINTWISE:
        # The first input of a copy is its target, so both are already counted.
        return read if op == "copy_" else read + max(count for count, _ in tensors) * width
    return read if op in _REDUCING else None


def _tensors(shapes: Shapes) -> list[tuple[int, int]]:
    """(elements, bytes per element) of every input tensor of a known type."""
    return [(prod(dim), _BYTES[kind]) for dim, kind in zip(shapes.dims, shapes.types) if kind in _BYTES]


def _product(name: str, shapes: Shapes | None) -> tuple[int, int, int, int] | None:
    """(B, M, K, N) of a matrix product."""
    if shapes is None:
        return None
    dims = shapes.dims
    if name in ("aten::addmm", "aten::_addmm_activation", "aten::baddbmm"):
        dims = dims[1:]
    if len(dims) < 2:
        return None
    left, right = dims[0], dims[1]
    if name in ("aten::mm", "aten::addmm", "aten::_addmm_activation") and len(left) == len(right) == 2:
        return 1, left[0], left[1], right[1]
    if name in ("aten::bmm", "aten::baddbmm") and len(left) == len(right) == 3:
        return left[0], left[1], left[2], right[2]
    if name == "aten::linear" and left and len(right) == 2:
        return 1, prod(left[:-1]), left[-1], right[0]
    return None
