"""HSTU attention in C: for rows of a few dozen tokens torch spends more on operator calls than on arithmetic.

C computes in float32, half precision widened to it. The reference serves float64, masks that are not plainly causal,
and long rows, whose products are large enough for torch to be faster.

Shapes: B rows, T tokens of all rows, H heads, A width of q and k, V width of v.
"""

from __future__ import annotations

import ctypes
import itertools

import torch
from torch import Tensor

from ...errors import ArgumentError
from ..arguments import address, require_offsets, widened
from ..compile import I64, POINTER, native_library, share, usable
from ..operators import operator
from . import reference
from .reference import Biased, Mask, RelativeBias, activations, bucket_starts, flops

SMALL = 1 << 20
"""With fewer multiplications a second thread costs more than it saves."""

LONG = 512
"""With longer rows the reference is faster."""

Into = tuple[Tensor, Tensor, Tensor]


class _Shape(ctypes.Structure):
    _fields_ = (
        ("heads", I64),
        ("qk", I64),
        ("width", I64),
        ("offsets", POINTER),
        ("alpha", ctypes.c_float),
        ("length", ctypes.c_float),
        ("last_only", I64),
        ("positions", POINTER),
        ("buckets", POINTER),
        ("starts", POINTER),
        ("key_times", POINTER),
        ("query_times", POINTER),
        ("distances", I64),
        ("bucket_count", I64),
    )


class _View(ctypes.Structure):
    _fields_ = (("data", POINTER), ("token", I64), ("head", I64))


_FUNCTIONS = {
    "attention_forward": [POINTER, I64, I64, *[POINTER] * 4],
    "attention_backward": [POINTER, I64, I64, *[POINTER] * 8],
    "attention_add_up": [POINTER, I64, I64, POINTER],
}
library = native_library(
    __file__, _FUNCTIONS, {name: ctypes.c_int for name in _FUNCTIONS if name != "attention_add_up"}
)
"""Returns the compiled library, or the reason why it cannot be used."""


def forward(
    q_THA: Tensor, k_THA: Tensor, v_THV: Tensor, offsets_B1: Tensor, mask: Mask, bias: RelativeBias | None = None
) -> Tensor:
    if bias is not None:
        bias.require_fit(len(q_THA), mask)
    if _left_to_torch(q_THA, mask):
        return reference.forward(q_THA, k_THA, v_THV, offsets_B1, mask, bias)
    return _forward(q_THA, k_THA, v_THV, offsets_B1, mask, bias, last_only=False)


def backward(
    grad_THV: Tensor,
    q_THA: Tensor,
    k_THA: Tensor,
    v_THV: Tensor,
    offsets_B1: Tensor,
    mask: Mask,
    *,
    into: Into | None = None,
    sums: Into | None = None,
    deterministic: bool | None = None,
) -> Into:
    """Gradients of q, k and v, written into `into` if set, and their sums over all tokens into `sums`; always the same
    bits, whatever `deterministic` says."""
    inputs = (grad_THV, q_THA, k_THA, v_THV, offsets_B1, mask)
    if _left_to_torch(q_THA, mask):
        return reference.backward(*inputs, into=into, sums=sums)
    gradients, _ = _backward(*inputs, into, last_only=False)
    reference.add_up(gradients, sums)
    return gradients


def backward_biased(
    grad_THV: Tensor, q_THA: Tensor, k_THA: Tensor, v_THV: Tensor, offsets_B1: Tensor, mask: Mask, bias: RelativeBias
) -> Biased:
    """Gradients of q, k, v, positions_P and buckets_K (None where there is none); always the same bits."""
    bias.require_fit(len(q_THA), mask)
    if _left_to_torch(q_THA, mask):
        return reference.backward_biased(grad_THV, q_THA, k_THA, v_THV, offsets_B1, mask, bias)
    gradients, rows_BW = _backward(grad_THV, q_THA, k_THA, v_THV, offsets_B1, mask, None, bias, last_only=False)
    assert rows_BW is not None
    sums_W = torch.empty(rows_BW.shape[1])
    usable(library()).attention_add_up(rows_BW.data_ptr(), *rows_BW.shape, sums_W.data_ptr())
    positions = len(bias.positions_P)
    dbuckets_K = None if bias.buckets_K is None else sums_W[positions:].to(bias.buckets_K.dtype)
    return *gradients, sums_W[:positions].flip(0).to(bias.positions_P.dtype), dbuckets_K


def forward_last(q_BHA: Tensor, k_THA: Tensor, v_THV: Tensor, offsets_B1: Tensor, mask: Mask) -> Tensor:
    """The output of `forward` for the last token of each row, from its queries alone. No row may be empty."""
    if _left_to_torch(q_BHA, mask):
        return reference.forward_last(q_BHA, k_THA, v_THV, offsets_B1, mask)
    return _forward(q_BHA, k_THA, v_THV, offsets_B1, mask, last_only=True)


def backward_last(
    grad_BHV: Tensor,
    q_BHA: Tensor,
    k_THA: Tensor,
    v_THV: Tensor,
    offsets_B1: Tensor,
    mask: Mask,
    *,
    into: Into | None = None,
) -> Into:
    """Gradients of the queries of `forward_last` and of all keys and values."""
    inputs = (grad_BHV, q_BHA, k_THA, v_THV, offsets_B1, mask)
    if _left_to_torch(q_BHA, mask):
        return reference.backward_last(*inputs, into=into)
    return _backward(*inputs, into, last_only=True)[0]


def _left_to_torch(q: Tensor, mask: Mask) -> bool:
    return q.dtype == torch.float64 or mask.longest > LONG or not mask.causal


@operator(
    "attention_forward",
    flops=lambda q, k, v, offsets_B1, *_, last_only: flops(offsets_B1, k, v, last_only=last_only),
    special=lambda q, k, v, offsets_B1, *_, last_only: activations(offsets_B1, k, last_only=last_only),
)
def _forward(
    q: Tensor, k: Tensor, v: Tensor, offsets_B1: Tensor, mask: Mask, bias: RelativeBias | None = None,
    *, last_only: bool,
) -> Tensor:  # fmt: skip
    out = torch.empty(*q.shape[:2], v.shape[2])
    tensors = {"q": q, "k": k, "v": v, "out": out}
    _run("attention_forward", tensors, offsets_B1, mask, last_only, bias)
    return out.to(v.dtype)


@operator(
    "attention_backward",
    flops=lambda grad, q, k, v, offsets_B1, *_, last_only: flops(offsets_B1, k, v, backward=True, last_only=last_only),
    special=lambda grad, q, k, v, offsets_B1, *_, last_only: activations(offsets_B1, k, last_only=last_only),
)
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, offsets_B1: Tensor, mask: Mask, into: Into | None,
    bias: RelativeBias | None = None, *, last_only: bool,
) -> tuple[Into, Tensor | None]:  # fmt: skip
    """Gradients of q, k and v, and of a bias by row: by distance, the last one first, then by bucket."""
    fits = into is not None and all(one.dtype == torch.float32 and one.stride(-1) == 1 for one in into)
    dq, dk, dv = into if into is not None and fits else tuple(torch.empty(one.shape) for one in (q, k, v))
    tensors = {"grad": grad, "q": q, "k": k, "v": v, "dq": dq, "dk": dk, "dv": dv}
    learned = () if bias is None else (bias.positions_P, bias.buckets_K)
    width = sum(len(one) for one in learned if one is not None)
    rows_BW = None if bias is None else torch.empty(len(offsets_B1) - 1, width)
    _run("attention_backward", tensors, offsets_B1, mask, last_only, bias, rows_BW)
    if into is None:
        return (dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)), rows_BW
    if not fits:
        for target, gradient in zip(into, (dq, dk, dv)):
            target.copy_(gradient)
    return into, rows_BW


def _run(
    name: str, tensors: dict[str, Tensor], offsets_B1: Tensor, mask: Mask, last_only: bool,
    bias: RelativeBias | None, *rows_BW: Tensor | None,
) -> None:  # fmt: skip
    """Call the C function on ranges of rows, each on its own thread."""
    tensors = {part: _dense_heads(tensor) for part, tensor in tensors.items()}
    heads, qk, width = (*tensors["k"].shape, tensors["v"].shape[-1])[1:]
    offsets_B1 = offsets_B1.to(torch.int64).contiguous()
    edges: list[int] = offsets_B1.tolist()
    rows, tokens = len(edges) - 1, tensors["k"].shape[0]
    require_offsets("offsets_B1", edges, tokens)
    if last_only and any(a == b for a, b in zip(edges, edges[1:])):
        raise ArgumentError("offsets_B1 has an empty row, which has no last token")
    shape = _Shape(
        heads=heads,
        qk=qk,
        width=width,
        offsets=address("offsets_B1", offsets_B1, torch.int64, (rows + 1,)),
        alpha=mask.alpha,
        length=mask.length,
        last_only=last_only,
    )
    tables = _bias_tables(bias)
    for field, table in tables.items():
        setattr(shape, field, address(field, table, table.dtype, tuple(table.shape)))
    shape.distances, shape.bucket_count = (len(tables.get(field, ())) for field in ("positions", "buckets"))
    queries = rows if last_only else tokens
    per_query, per_key = {"q": qk, "dq": qk, "out": width, "grad": width}, {"k": qk, "dk": qk, "v": width, "dv": width}
    shapes = {part: (queries, heads, size) for part, size in per_query.items()}
    shapes |= {part: (tokens, heads, size) for part, size in per_key.items()}
    views = [_view(part, tensor, shapes[part]) for part, tensor in tensors.items()]
    call, places, failures = getattr(usable(library()), name), [ctypes.byref(view) for view in views], []

    def work(first: int, last: int) -> None:
        failures.append(
            call(
                ctypes.byref(shape), first, last, *places, *(None if one is None else one.data_ptr() for one in rows_BW)
            )
        )

    share(work, _cuts(edges, heads * (qk + width), last_only))
    if any(failures):
        raise MemoryError("not enough memory for the keys and values of a row")


def _bias_tables(bias: RelativeBias | None) -> dict[str, Tensor]:
    """What C reads of a bias: positions with the last distance first."""
    if bias is None:
        return {}
    tables = {"positions": bias.positions_P.float().flip(0)}
    if bias.buckets_K is not None and bias.key_times_T is not None and bias.query_times_T is not None:
        tables |= {
            "buckets": bias.buckets_K.float(),
            "starts": bucket_starts(len(bias.buckets_K), bias.buckets_K.device),
        }
        tables |= {"key_times": bias.key_times_T, "query_times": bias.query_times_T}
    return {field: table.contiguous() for field, table in tables.items()}


def _view(name: str, tensor: Tensor, shape: tuple[int, ...]) -> _View:
    return _View(address(name, tensor, torch.float32, shape, strided=True), tensor.stride(0), tensor.stride(1))


def _cuts(edges: list[int], factor: int, last_only: bool) -> list[int]:
    """Where to divide the rows between threads, by their work."""
    lengths = [last - first for first, last in zip(edges, edges[1:])]
    costs = [factor * (length if last_only else length * length) for length in lengths]
    total, threads = sum(costs), torch.get_num_threads()
    if total < SMALL or threads == 1:
        return [0, len(costs)]
    sums, cuts = list(itertools.accumulate(costs)), [0]
    for part in range(1, threads):
        at = next(row for row, done in enumerate(sums, 1) if done * threads >= total * part)
        cuts.append(max(at, cuts[-1]))
    return [*cuts, len(costs)]


def _dense_heads(tensor: Tensor) -> Tensor:
    """Half precision as float32, the numbers of a head next to each other."""
    tensor = widened(tensor)
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
