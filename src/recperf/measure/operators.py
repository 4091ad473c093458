"""What the operators of torch do, by name, in one place: which table and ids they access, what they read and write, and
what calling them costs. Torch-free.

`counting` counts the work of observed steps from their tensors, `trace.work` that of traced steps from recorded sizes;
both look operators up here and return a `CallWork`.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from ..jsonfile import Struct

RESULT = -1


class RowAccess(NamedTuple):
    """Where an operator that accesses random rows has its table and its ids."""

    table: int
    """Position among the arguments; RESULT: the operator returns the table."""
    ids: int
    updates: bool = False
    """Whether it updates the rows, which memory reads first."""
    unit: str = "row"
    """What an id selects: a `row`; an `element`; `listed`: the ids are a list with one tensor per dimension."""


ROW_ACCESS = {
    "aten::embedding": RowAccess(0, 1),
    "aten::_embedding_bag": RowAccess(0, 1),
    "aten::_embedding_bag_forward_only": RowAccess(0, 1),
    "aten::embedding_bag": RowAccess(0, 1),
    "aten::_embedding_bag_per_sample_weights_backward": RowAccess(1, 2),
    "aten::index_select": RowAccess(0, 2),
    "aten::index": RowAccess(0, 1, unit="listed"),
    "aten::gather": RowAccess(0, 2, unit="element"),
    "aten::take": RowAccess(0, 1, unit="element"),
    "aten::embedding_dense_backward": RowAccess(RESULT, 1, updates=True),
    "aten::_embedding_bag_backward": RowAccess(RESULT, 1, updates=True),
    "aten::_embedding_bag_dense_backward": RowAccess(RESULT, 1, updates=True),
    "aten::index_add_": RowAccess(0, 2, updates=True),
    "aten::index_add": RowAccess(0, 2, updates=True),
    "aten::index_copy_": RowAccess(0, 2, updates=True),
    "aten::index_put_": RowAccess(0, 1, updates=True, unit="listed"),
    "aten::_index_put_impl_": RowAccess(0, 1, updates=True, unit="listed"),
    "aten::index_put": RowAccess(0, 1, updates=True, unit="listed"),
    "aten::scatter_add_": RowAccess(0, 2, updates=True, unit="element"),
    "aten::scatter_add": RowAccess(0, 2, updates=True, unit="element"),
    "aten::scatter_": RowAccess(0, 2, updates=True, unit="element"),
}
"""Operators that access random rows."""
TABLE_BATCHED = re.compile(r"fbgemm::(?:int_nbit_|ssd_)?(?:split|dense)_embedding\w*_codegen_")
"""FBGEMM's operators over the rows of many tables."""
UPDATING = re.compile(r"_backward_codegen_")
"""Those among them that update the rows: the backward pass applies the optimizer."""
CACHE_FILL = re.compile(r"fbgemm::l[rf]u_cache_populate")
"""FBGEMM's operators that copy the rows of a batch from host memory into a cache on the device."""
_STREAMING = re.compile(
    r"fbgemm::(?:bounds_check|permute_|jagged_|dense_to_jagged|asynchronous_|block_bucketize|linearize_cache|offsets_range"
    r"|segment_sum|recat_|tbe_input|pack_|expand_into)"
)
"""FBGEMM's operators that read and write each of their tensors once."""
COLLECTIVE = re.compile(r"_?c10d(?:_functional)?::|record_param_comms$")
"""Operators of torch.distributed, in which a thread starts a collective or waits for one."""

_TRAFFIC = {
    "pointwise": "add sub rsub mul div pow where lerp addcmul addcdiv clone neg abs exp exp2 expm1 log log1p log2 sqrt "
    "rsqrt square reciprocal sign clamp clamp_min clamp_max minimum maximum relu relu6 leaky_relu elu sigmoid tanh "
    "gelu silu softplus hardtanh hardswish mish log_sigmoid_forward sin cos erf floor round trunc remainder fmod "
    "eq ne lt le gt ge logical_and logical_or logical_not bitwise_and bitwise_or isnan masked_fill nan_to_num "
    "flip roll tril triu mse_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits "
    "_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data threshold_backward sigmoid_backward "
    "tanh_backward gelu_backward silu_backward elu_backward leaky_relu_backward hardtanh_backward softplus_backward "
    "log_sigmoid_backward floor_divide "
    "mse_loss_backward smooth_l1_loss_backward binary_cross_entropy_backward native_layer_norm "
    "native_layer_norm_backward native_batch_norm native_batch_norm_backward cudnn_batch_norm native_group_norm "
    "_fused_rms_norm native_dropout native_dropout_backward cumsum cumprod logcumsumexp sparse_mask",
    "reducing": "sum mean amax amin max min norm linalg_vector_norm var std var_mean argmax argmin prod any all "
    "count_nonzero logsumexp nansum",
    "writing": "fill_ zero_ uniform_ normal_ random_ bernoulli_ exponential_",
    "copying": "copy_",
    "sorting": "sort topk argsort msort unique _unique2 _coalesce",
}
"""Pointwise operators read their inputs once and write a result as large as the largest of them. Those that write or
copy do not read what they overwrite."""
_TRAFFIC_OF = {name: kind for kind, names in _TRAFFIC.items() for name in names.split()}

_SPECIAL = {
    *("exp", "log", "log1p", "expm1", "sigmoid", "tanh", "gelu", "silu", "softplus", "erf", "sin", "cos", "pow"),
    *("mish", "_softmax", "_log_softmax", "elu", "log_sigmoid", "log_sigmoid_forward"),
    "binary_cross_entropy_with_logits",
}

_DIVISIONS = {"floor_divide", "remainder", "fmod", "div"}

_CALLS = {
    "view": "view t transpose permute reshape expand slice select squeeze unsqueeze as_strided detach alias unbind "
    "split chunk narrow flatten lift_fresh _unsafe_view expand_as unflatten numpy_T",
    "allocate": "empty empty_like empty_strided new_empty resize_ set_ new_empty_strided empty_permuted",
    "copy": "copy_ to _to_copy clone contiguous zeros zero_ fill_ ones zeros_like ones_like full",
    "product": "mm addmm addmm_ _addmm_activation bmm baddbmm baddbmm_ linear matmul convolution _convolution conv1d "
    "conv2d mkldnn_convolution einsum convolution_backward dot mv",
    "reduction": "sum mean amax amin max min norm any all argmax linalg_vector_norm var std",
    "index": "index_select index gather embedding take index_put_ _index_put_impl_ index_add_ scatter_add_ sort topk "
    "embedding_dense_backward nonzero unique cumsum cat stack",
    "embedding_bag": "_embedding_bag embedding_bag _embedding_bag_forward_only _embedding_bag_backward "
    "_embedding_bag_dense_backward",
}
_CALL_OF = {f"aten::{name}": kind for kind, names in _CALLS.items() for name in names.split()}
_FUNCTION = re.compile(r"[A-Z_]\w*(?<!Backward\d)(?<!CompiledFxGraph)$")

_KERNELS = {
    "compute": r"gemm|nvjet|cutlass|xmma|wgmma|conv|flash|fmha|mma",
    "latency": r"embedding|gather|scatter|index",
    "bandwidth": r"elementwise|reduce|copy|fill|memset|softmax|norm|multi_tensor|adam|cat",
}


class CallWork(Struct):
    """The counted work of one call of an operator."""

    name: str
    flops: int = 0
    precision: str = ""
    """Precision of the product: float32, tf32, bfloat16, ..."""
    special: int = 0
    """Evaluations of functions such as exp, which cost many FLOPs that nobody counts."""
    bytes: int = 0
    """Bytes read and written; of a table only the rows that are used."""
    memory_bytes: int = 0
    """Bytes among them that come from memory: no cache holds them until they are used again."""
    new_bytes: int = 0
    """Bytes written to memory that the process did not have before, so that the system maps and clears it."""
    rows: int = 0
    """Random rows read or written; one that is updated is both."""
    row_bytes: int = 0
    memory_rows: float = 0
    """Rows among them that come from memory."""
    table_rows: int = 0
    distinct: int = 0
    """Different rows among them."""
    host_bytes: int = 0
    """Bytes of random rows that a device reads from the memory of the host; `rows` does not count them."""
    known: bool = True
    """Whether the work follows from the arguments; where it does not, nothing is counted."""
    off_ns: int = 0
    """Time inside the call in which its thread did not run because it waited for other threads."""
    blocked: float = 0.0
    """Share of the call's time in which it waited for a disk: for a page of a file or of swap space."""
    position: int = 0
    """Bytes that all steps had touched before this call."""
    ids: tuple[int, Any] | None = None
    """The table's address and the ids, until `memory_rows` is known."""
    written: int = 0
    """Bytes written, where the work follows from sizes in a trace."""
    largest: tuple[int, ...] = ()
    """Sizes of the largest tensor that it reads."""
    stack: tuple[Any, ...] = ()
    """From where it was called; see places.py."""


_STORING = ("aten::index_copy_", "aten::scatter_")
"""Operators with ids that store rows: where ids were replaced, other rows would keep what was never written."""


def replaceable(name: str, *, backward: bool) -> RowAccess | None:
    """The access of a lookup, or of the backward pass of one: other ids do not change what its result means. In a
    forward pass an operator that adds to rows may count or pool by its ids, which then must stay."""
    access = ROW_ACCESS.get(name)
    if access is None or name in _STORING or (access.updates and access.table != RESULT and not backward):
        return None
    return access


def traffic_kind(name: str) -> str | None:
    """How the bytes that an operator moves follow from the sizes of its inputs; None where they do not."""
    if _STREAMING.match(name):
        return "pointwise"
    if not name.startswith("aten::"):
        return None
    base = name.removeprefix("aten::")
    return _TRAFFIC_OF.get(base) or _TRAFFIC_OF.get(base.rstrip("_"))


def overwrites(name: str) -> bool:
    """Whether the operator does not read what it changes in place."""
    return traffic_kind(name) in ("writing", "copying")


def is_special(name: str, *, integers: bool = False) -> bool:
    """Whether the operator evaluates a function such as exp for every element; of integers a division is one."""
    base = name.rpartition("::")[2].removesuffix("_").removesuffix("_backward")
    return base in (_DIVISIONS if integers else _SPECIAL)


def kind_of_call(name: str) -> str:
    """The kind of call whose measured cost stands for the cost of calling this operator.

    "function" is an autograd.Function written in Python, whose own time is that of the interpreter.
    """
    if _FUNCTION.match(name):
        return "function"
    if name.startswith("autograd::") or name.endswith(("Backward", "Backward0", "AccumulateGrad")):
        return "node"
    return "embedding_bag" if TABLE_BATCHED.match(name) else _CALL_OF.get(name, "elementwise")


def limit_of_kernel(name: str) -> str:
    """What usually limits a kernel of this name: all that is known about the kernels of a CUDA graph."""
    return next((limit for limit, names in _KERNELS.items() if re.search(names, name, re.IGNORECASE)), "operator")
