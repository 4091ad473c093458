"""HSTU attention by a C file: a row of some dozen tokens costs torch more calls than arithmetic.

Float32 is computed here, half precision too, widened. Two things go to the reference: float64, as the file counts in
float32, and long rows, whose products are large enough for torch's own to be faster.

Shapes: B rows, T tokens of all rows, H heads, A width of q and k, V width of v.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..compile import load, share
from . import reference
from .rule import Mask

SOURCE = Path(__file__).with_name("native.c")
SMALL = 1 << 20
"""Multiplications below which a second thread costs more than it brings."""

LONG = 512
"""Tokens of a row above which the reference is faster."""

Into = tuple[Tensor, Tensor, Tensor]
_I64, _PTR = ctypes.c_int64, ctypes.c_void_p


class _Shape(ctypes.Structure):
    _fields_ = (
        ("heads", _I64),
        ("qk", _I64),
        ("width", _I64),
        ("window", _I64),
        ("context", _I64),
        ("has_targets", _I64),
        ("offsets", _PTR),
        ("targets", _PTR),
        ("alpha", ctypes.c_float),
        ("length", ctypes.c_float),
        ("last_only", _I64),
    )


class _View(ctypes.Structure):
    _fields_ = (("data", _PTR), ("token", _I64), ("head", _I64))


@functools.cache
def library() -> ctypes.CDLL | str:
    """The compiled library, or why there is none."""
    loaded = load(SOURCE)
    if isinstance(loaded, str):
        return loaded
    loaded.attention_forward.argtypes = [_PTR, _I64, _I64, *[_PTR] * 4]
    loaded.attention_backward.argtypes = [_PTR, _I64, _I64, *[_PTR] * 7]
    return loaded


def forward(q_THA: Tensor, k_THA: Tensor, v_THV: Tensor, offsets_B1: Tensor, mask: Mask) -> Tensor:
    if _better_by_torch(q_THA, mask):
        return reference.forward(q_THA, k_THA, v_THV, offsets_B1, mask)
    return _forward(q_THA, k_THA, v_THV, offsets_B1, mask, last_only=False)


def backward(
    grad_THV: Tensor,
    q_THA: Tensor,
    k_THA: Tensor,
    v_THV: Tensor,
    offsets_B1: Tensor,
    mask: Mask,
    *,
    into: Into | None = None,
    deterministic: bool | None = None,
) -> Into:
    """Gradients of q, k and v, written into `into` where given. They are the same bits every time, asked for or not."""
    given = (grad_THV, q_THA, k_THA, v_THV, offsets_B1, mask)
    if _better_by_torch(q_THA, mask):
        return reference.backward(*given, into=into)
    return _backward(*given, into, last_only=False)


def forward_last(q_BHA: Tensor, k_THA: Tensor, v_THV: Tensor, offsets_B1: Tensor, mask: Mask) -> Tensor:
    """What `forward` gives for the last token of each row, whose queries alone are given. No row may be empty."""
    if _better_by_torch(q_BHA, mask):
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
    given = (grad_BHV, q_BHA, k_THA, v_THV, offsets_B1, mask)
    if _better_by_torch(q_BHA, mask):
        return reference.backward_last(*given, into=into)
    return _backward(*given, into, last_only=True)


def _better_by_torch(q: Tensor, mask: Mask) -> bool:
    return q.dtype == torch.float64 or mask.longest > LONG


def _forward(q: Tensor, k: Tensor, v: Tensor, offsets_B1: Tensor, mask: Mask, *, last_only: bool) -> Tensor:
    out = torch.empty(*q.shape[:2], v.shape[2])
    _run("attention_forward", map(_wide, (q, k, v)), (out,), offsets_B1, mask, last_only)
    return out.to(v.dtype)


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, offsets_B1: Tensor, mask: Mask, into: Into | None, *, last_only: bool
) -> Into:
    fits = into is not None and all(one.dtype == torch.float32 and one.stride(-1) == 1 for one in into)
    found = into if into is not None and fits else tuple(torch.empty(one.shape) for one in (q, k, v))
    _run("attention_backward", map(_wide, (grad, q, k, v)), found, offsets_B1, mask, last_only)
    if into is None:
        dq, dk, dv = (one.to(like.dtype) for one, like in zip(found, (q, k, v)))
        return dq, dk, dv
    if not fits:
        for wanted, one in zip(into, found):
            wanted.copy_(one)
    return into


def _run(name: str, given: Any, found: Any, offsets_B1: Tensor, mask: Mask, last_only: bool) -> None:
    """Call the C function on parts of the rows, each on a thread of its own."""
    library_ = library()
    assert not isinstance(library_, str), library_
    call, tensors = getattr(library_, name), [*given, *found]
    offsets_B1 = offsets_B1.to(torch.int64).contiguous()
    targets_B = None if mask.targets_B is None else mask.targets_B.to(torch.int64).contiguous()
    _, heads, qk = tensors[-3 if name.endswith("backward") else 0].shape
    width = tensors[-1].shape[2]
    shape = _Shape(
        heads=heads,
        qk=qk,
        width=width,
        window=mask.window,
        context=mask.context,
        has_targets=targets_B is not None,
        offsets=offsets_B1.data_ptr(),
        targets=None if targets_B is None else targets_B.data_ptr(),
        alpha=mask.alpha,
        length=mask.length,
        last_only=last_only,
    )
    views = [_View(one.data_ptr(), one.stride(0), one.stride(1)) for one in tensors]
    places = [ctypes.byref(one) for one in views]
    failed: list[int] = []

    def work(first: int, last: int) -> None:
        failed.append(call(ctypes.byref(shape), first, last, *places))

    share(work, _cuts(offsets_B1.tolist(), heads * (qk + width), last_only))
    if any(failed):
        raise MemoryError("no memory for the keys and values of a row")


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


def _wide(rows: Tensor) -> Tensor:
    """In float32, the numbers of a head together."""
    rows = rows.float()
    return rows if rows.stride(-1) == 1 else rows.contiguous()
