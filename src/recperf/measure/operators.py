"""What an operator of torch reads, writes and computes, by its name, its schema and its tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

_READS_ROWS = {
    "aten::embedding": (0, 1),
    "aten::index_select": (0, 2),
    "aten::index": (0, 1),
    "aten::gather": (0, 2),
    "aten::take": (0, 1),
    "aten::_embedding_bag": (0, 1),
    "aten::_embedding_bag_forward_only": (0, 1),
    "aten::embedding_bag": (0, 1),
}
"""Operators that read random rows: the positions of the table and of the ids among their arguments."""
_WRITES_ROWS = {
    "aten::index_add_": (0, 2),
    "aten::index_add": (0, 2),
    "aten::index_put_": (0, 1),
    "aten::_index_put_impl_": (0, 1),
    "aten::index_put": (0, 1),
    "aten::index_copy_": (0, 2),
    "aten::scatter_add_": (0, 2),
    "aten::scatter_add": (0, 2),
    "aten::scatter_": (0, 2),
    "aten::embedding_dense_backward": (-1, 1),
}
"""Operators that update random rows: the positions of the table and of the ids; -1: the table is the result."""
_ONLY_WRITTEN = {"copy_", "fill_", "zero_", "uniform_", "normal_", "random_", "bernoulli_", "exponential_"}
"""In-place operators that do not read what they overwrite."""
_FUSED_PRODUCT = "aten::_addmm_activation"
"""A product with bias and activation, which torch's counter leaves out."""
_SPECIAL = {
    *("exp", "log", "log1p", "expm1", "sigmoid", "tanh", "gelu", "silu", "softplus", "erf", "sin", "cos", "pow"),
    *("mish", "_softmax", "_log_softmax", "elu", "log_sigmoid", "log_sigmoid_forward"),
    "binary_cross_entropy_with_logits",
}
"""Operators that evaluate a function such as exp for every element."""
_CPU_ATTENTION = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": 1.0,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": 2.5,
}
"""Attention on a CPU, which torch's counter leaves out, with its FLOPs relative to the forward pass."""


def row_arguments(name: str) -> int | None:
    """The position of the ids among the arguments of an operator that accesses random rows."""
    places = _READS_ROWS.get(name) or _WRITES_ROWS.get(name)
    return None if places is None else places[1]


def updates_rows(name: str) -> bool:
    """Whether the random rows of an operator are written, which memory reads first."""
    return name in _WRITES_ROWS


def random_rows(name: str, args: Any, result: Any) -> tuple[Tensor, Tensor] | None:
    """The table and the ids of an operator that accesses random rows."""
    places = _READS_ROWS.get(name) or _WRITES_ROWS.get(name)
    if places is None or len(args) <= places[1]:
        return None
    table = result if places[0] < 0 else args[places[0]]
    ids = args[places[1]]
    if isinstance(ids, (list, tuple)):
        present = [item for item in ids if isinstance(item, Tensor)]
        ids = present[0] if len(present) == 1 else None
    if not isinstance(table, Tensor) or not isinstance(ids, Tensor) or ids.dtype.is_floating_point:
        return None
    return table, ids


def flops_of(func: Any, args: Any, kwargs: Any, result: Any, inputs: list[Tensor]) -> tuple[int, str]:
    name = func._schema.name
    count = flop_registry.get(torch.ops.aten.addmm if name == _FUSED_PRODUCT else func._overloadpacket)
    if name == _FUSED_PRODUCT:
        kwargs = {}
    try:
        if count is not None:
            flops = int(count(*args, **kwargs, out_val=result))
        elif name in _CPU_ATTENTION:
            first = 1 if "backward" in name else 0
            query, key, value = (tensor.shape for tensor in inputs[first : first + 3])
            flops = int(_CPU_ATTENTION[name] * sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]
        else:
            return 0, ""
    except (RuntimeError, TypeError, ValueError, AssertionError, IndexError):
        return 0, ""
    return flops, precision_of(inputs)


def special_of(name: str, outputs: list[Tensor]) -> int:
    """Evaluations of a function such as exp."""
    if base_name(name).removesuffix("_").removesuffix("_backward") not in _SPECIAL:
        return 0
    return max((tensor.numel() for tensor in outputs), default=0)


def overwrites(name: str) -> bool:
    """Whether the operator does not read what it changes in place."""
    return base_name(name) in _ONLY_WRITTEN


def precision_of(inputs: list[Tensor]) -> str:
    tensor = next((tensor for tensor in inputs if tensor.dtype.is_floating_point), None)
    if tensor is None:
        return "float32"
    name = str(tensor.dtype).removeprefix("torch.")
    if name == "float32" and tensor.is_cuda and torch.backends.cuda.matmul.allow_tf32:
        return "tf32"
    return name


def tensors_in(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple)) or (
        hasattr(values, "__iter__") and not isinstance(values, (str, bytes, dict))
    ):
        for value in values:
            yield from tensors_in(value)


def size_of(tensor: Tensor) -> int:
    """Bytes of the different elements: expanded dimensions repeat them. 0 for sparse tensors, which have no strides."""
    if tensor.layout != torch.strided:
        return 0
    sizes: Iterable[int] = (n for n, stride in zip(tensor.shape, tensor.stride()) if stride or n == 0)
    return prod(sizes) * tensor.element_size()


def address_of(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return id(tensor)


def is_view(func: Any, outputs: list[Tensor]) -> bool:
    """Whether the operator returns another view of an input without touching its data."""
    aliases = [argument.alias_info for argument in func._schema.arguments if argument.alias_info is not None]
    if not outputs or not aliases or any(alias.is_write for alias in aliases):
        return func._schema.name in ("aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty")
    return True


def written_by(func: Any, args: Any, kwargs: Any) -> set[int]:
    """The identities of the tensors that the operator changes in place."""
    written: set[int] = set()
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            written |= {id(tensor) for tensor in tensors_in(value)}
    return written


def base_name(name: str) -> str:
    return name.rpartition("::")[2]
