"""HSTU attention on a GPU: nothing of the size of the scores is ever written, and no length is read on the host.

The reference serves float64, heads wider than 256, masks that are not plainly causal, and rows longer than 512 with a
bias, whose gradient is the one thing that needs memory of the size of the scores, of one head. Tile sizes follow a rule
instead of autotuning, so that the first call only compiles. Where kernels for one chip exist (`hopper`), they serve
what they can.

Shapes: B rows, T tokens of all rows, H heads, A width of q and k, V width of v, C chunks of a row; P distances and K
time buckets of a bias, S programs.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..gpu import on_nvidia, precision, roomy, tf32
from ..operators import operator
from . import reference
from .kernels import attend, attend_last, grad_keys, grad_last, grad_queries
from .reference import Biased, Into, Mask, RelativeBias, bucket_starts, flops

WIDEST = 256
LONG = 512
"""With longer rows the reference serves a bias."""
CACHED = 24 << 20
"""Bytes of keys and values that programs running together may read: about half of a large GPU's cache."""
CHUNK = 512
"""Keys of a row that one program reads for the last token."""


SHORT = 4
"""Rows with a bias are short: they have the smaller tiles of float32, whatever their type."""


class Tiles(NamedTuple):
    """Queries and keys a program works on at a time, its warps, and how many blocks ahead it loads."""

    queries: int
    keys: int
    warps: int
    stages: int


def forward_tiles(width: int, itemsize: int, roomy: bool) -> Tiles:
    """Chosen by what fits: registers, and the memory that programs of one multiprocessor share, which may be small."""
    if not roomy:
        return Tiles(64, 32, 4, 1) if itemsize == 2 and width <= 128 else Tiles(32, 32, 4, 1)
    if itemsize > 2:
        return Tiles(64, 32, 4, 2) if width <= 128 else Tiles(32, 32, 4, 1)
    return Tiles(128, 64, 4, 2) if width <= 128 else Tiles(128, 64, 8, 2)


def backward_tiles(width: int, itemsize: int, roomy: bool) -> Tiles:
    if itemsize > 2:
        return Tiles(32, 32, 4, 1) if roomy and width <= 128 else Tiles(16, 16, 4, 1)
    if not roomy:
        return Tiles(32, 32, 4, 1) if width <= 128 else Tiles(16, 16, 4, 1)
    return Tiles(64, 128, 8, 2) if width <= 128 else Tiles(64, 64, 8, 2)


def last_keys(width: int) -> int:
    """Keys a program of the last token holds at a time."""
    return max(16, 4096 // width)


@operator("attention_forward", flops=lambda q, k, v, offsets_B1, *_, **__: flops(offsets_B1, k, v))
def forward(
    q_THA: Tensor, k_THA: Tensor, v_THV: Tensor, offsets_B1: Tensor, mask: Mask, bias: RelativeBias | None = None
) -> Tensor:
    if bias is not None:
        bias.require_fit(len(q_THA), mask)
    elif fast := _hopper(q_THA.device):
        out: Tensor | None = fast.forward(q_THA, k_THA, v_THV, offsets_B1, mask)
        if out is not None:
            return out
    if not _served(q_THA, v_THV, mask, bias):
        return reference.forward(q_THA, k_THA, v_THV, offsets_B1, mask, bias)
    out_THV = torch.empty(v_THV.shape, dtype=v_THV.dtype, device=v_THV.device)
    itemsize = q_THA.element_size() if bias is None else SHORT
    shape, tiles = _shape(q_THA, v_THV), forward_tiles(_width(q_THA, v_THV), itemsize, roomy(q_THA.device))
    grid, cut = _cut(q_THA, v_THV, offsets_B1, mask, tiles.queries)
    if grid[0]:
        q, k, v = _near(q_THA), _near(k_THA), _near(v_THV)
        attend[grid](
            q, k, v, out_THV, offsets_B1, *_strides(q, k, v, out_THV),
            *_scales(mask), *cut, *_bias(bias), **shape, **_tile_options(tiles, q, bias),
        )  # fmt: skip
    return out_THV


@operator(
    "attention_backward",
    flops=lambda grad, q, k, v, offsets_B1, *_, **__: flops(offsets_B1, k, v, backward=True),
)
def backward(
    grad_THV: Tensor, q_THA: Tensor, k_THA: Tensor, v_THV: Tensor, offsets_B1: Tensor, mask: Mask,
    *, into: Into | None = None, sums: Into | None = None, deterministic: bool | None = None,
) -> Into:  # fmt: skip
    """Gradients of q, k and v, written into `into` if set, and their sums over all tokens into `sums`.

    Where one kernel computes all, those of q are added up by atomics, whose order varies, unless `deterministic`
    (None: torch's own setting): then a kernel of their own recomputes the scores, as always where heads are wide, which
    is faster there. On Hopper the order is always fixed for half-precision heads of 64, 128 and 256.
    """
    if fast := _hopper(q_THA.device):
        swift: Into | None = fast.backward(grad_THV, q_THA, k_THA, v_THV, offsets_B1, mask, into=into, sums=sums)
        if swift is not None:
            return swift
    if not _served(q_THA, v_THV, mask):
        gradients = reference.backward(grad_THV, q_THA, k_THA, v_THV, offsets_B1, mask, into=into)
    else:
        if deterministic is None:
            deterministic = torch.are_deterministic_algorithms_enabled()
        deterministic = deterministic or _width(q_THA, v_THV) > 128
        gradients = _backward(grad_THV, q_THA, k_THA, v_THV, offsets_B1, mask, into, deterministic)
    reference.add_up(gradients, sums)
    return gradients


def _backward(
    grad_THV: Tensor, q_THA: Tensor, k_THA: Tensor, v_THV: Tensor, offsets_B1: Tensor, mask: Mask,
    into: Into | None, deterministic: bool,
) -> Into:  # fmt: skip
    dq, dk, dv = into or _room(q_THA, k_THA, v_THV)
    grad, q, k, v = _near(grad_THV.to(v_THV.dtype)), _near(q_THA), _near(k_THA), _near(v_THV)
    sum_q = dq if deterministic else torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    tiles = backward_tiles(_width(q, v), q.element_size(), roomy(q.device))
    grid, cut = _cut(q, v, offsets_B1, mask, tiles.keys)
    if not grid[0]:
        return dq, dk, dv
    grad_keys[grid](
        grad, q, k, v, sum_q, dk, dv, offsets_B1, *_strides(grad, q, k, v, sum_q, dk, dv),
        *_scales(mask), *cut, *_bias(None), **_shape(q, v), **_tile_options(tiles, q), ATOMIC=not deterministic,
    )  # fmt: skip
    if not deterministic:
        torch.mul(sum_q, mask.alpha / 2 / mask.length, out=dq)
        return dq, dk, dv
    # The tiles of the keys' backward pass with queries and keys exchanged.
    tiles = tiles._replace(queries=tiles.keys, keys=tiles.queries)
    grid, cut = _cut(q, v, offsets_B1, mask, tiles.queries)
    grad_queries[grid](
        grad, q, k, v, dq, offsets_B1, *_strides(grad, q, k, v, dq),
        *_scales(mask), *cut, *_bias(None), None, None, 0, **_shape(q, v), **_tile_options(tiles, q), **_sums(q, 0),
    )  # fmt: skip
    return dq, dk, dv


@operator(
    "attention_backward",
    flops=lambda grad, q, k, v, offsets_B1, *_, **__: flops(offsets_B1, k, v, backward=True),
)
def backward_biased(
    grad_THV: Tensor, q_THA: Tensor, k_THA: Tensor, v_THV: Tensor, offsets_B1: Tensor, mask: Mask, bias: RelativeBias
) -> Biased:
    """Gradients of q, k, v, positions_P and buckets_K (None where there is none); the same bits every time."""
    bias.require_fit(len(q_THA), mask)
    if not _served(q_THA, v_THV, mask, bias):
        return reference.backward_biased(grad_THV, q_THA, k_THA, v_THV, offsets_B1, mask, bias)
    dq, dk, dv = _room(q_THA, k_THA, v_THV)
    grad, q, k, v = _near(grad_THV.to(v_THV.dtype)), _near(q_THA), _near(k_THA), _near(v_THV)
    tiles = backward_tiles(_width(q, v), SHORT, roomy(q.device))
    buckets = 0 if bias.buckets_K is None else len(bias.buckets_K)
    grid, cut = _cut(q, v, offsets_B1, mask, tiles.keys)
    if grid[0]:
        grad_keys[grid](
            grad, q, k, v, dq, dk, dv, offsets_B1, *_strides(grad, q, k, v, dq, dk, dv),
            *_scales(mask), *cut, *_bias(bias), **_shape(q, v), **_tile_options(tiles, q, bias), ATOMIC=False,
        )  # fmt: skip
    tiles = tiles._replace(queries=tiles.keys, keys=tiles.queries)
    rows, blocks = offsets_B1.numel() - 1, triton.cdiv(mask.longest, tiles.queries)
    parts_S = torch.zeros(rows * blocks, mask.longest + buckets, device=q.device)
    if rows * blocks:
        dscores = torch.empty(len(q), mask.longest, device=q.device)
        grad_queries[(rows * blocks,)](
            grad, q, k, v, dq, offsets_B1, *_strides(grad, q, k, v, dq), *_scales(mask), rows, blocks, rows,
            *_bias(bias), dscores, parts_S, mask.longest, **_shape(q, v), **_tile_options(tiles, q, bias),
            **_sums(q, buckets),
        )  # fmt: skip
    sums = parts_S.sum(0)
    dpositions_P = torch.zeros_like(bias.positions_P)
    dpositions_P[: mask.longest] = sums[: mask.longest]
    dbuckets_K = None if bias.buckets_K is None else sums[mask.longest :].to(bias.buckets_K.dtype)
    return dq, dk, dv, dpositions_P, dbuckets_K


@operator(
    "attention_last_forward",
    flops=lambda q, k, v, offsets_B1, *_, **__: flops(offsets_B1, k, v, last_only=True),
)
def forward_last(q_BHA: Tensor, k_THA: Tensor, v_THV: Tensor, offsets_B1: Tensor, mask: Mask) -> Tensor:
    """The output of `forward` for the last token of each row, from its queries alone. No row may be empty."""
    if not _served(q_BHA, v_THV, mask):
        return reference.forward_last(q_BHA, k_THA, v_THV, offsets_B1, mask)
    batch, heads, _ = q_BHA.shape
    q, k, v = _near(q_BHA), _near(k_THA), _near(v_THV)
    chunks = triton.cdiv(max(mask.longest, 1), CHUNK)
    parts_CBHV = torch.empty(chunks, batch, heads, v.shape[2], dtype=torch.float32, device=v.device)
    if batch:
        attend_last[(batch * heads, chunks)](
            q, k, v, parts_CBHV, offsets_B1, *_strides(q, k, v),
            *_scales(mask), batch * heads, **_shape(q, v), **_last_options(q, v),
        )  # fmt: skip
    return parts_CBHV.sum(0).to(v.dtype)


@operator(
    "attention_last_backward",
    flops=lambda grad, q, k, v, offsets_B1, *_, **__: flops(offsets_B1, k, v, backward=True, last_only=True),
)
def backward_last(
    grad_BHV: Tensor, q_BHA: Tensor, k_THA: Tensor, v_THV: Tensor, offsets_B1: Tensor, mask: Mask,
    *, into: Into | None = None,
) -> Into:  # fmt: skip
    """Gradients of the queries of `forward_last` and of all keys and values; the same bits every time."""
    if not _served(q_BHA, v_THV, mask):
        return reference.backward_last(grad_BHV, q_BHA, k_THA, v_THV, offsets_B1, mask, into=into)
    batch, heads, width = q_BHA.shape
    dq, dk, dv = into or _room(q_BHA, k_THA, v_THV)
    grad, q, k, v = _near(grad_BHV.to(v_THV.dtype)), _near(q_BHA), _near(k_THA), _near(v_THV)
    chunks = triton.cdiv(max(mask.longest, 1), CHUNK)
    parts_CBHA = torch.empty(chunks, batch, heads, width, dtype=torch.float32, device=q.device)
    if batch:
        grad_last[(batch * heads, chunks)](
            grad, q, k, v, parts_CBHA, dk, dv, offsets_B1, *_strides(grad, q, k, v, dk, dv),
            *_scales(mask), batch * heads, **_shape(q, v), **_last_options(q, v),
        )  # fmt: skip
    dq.copy_(parts_CBHA.sum(0))
    return dq, dk, dv


def _served(q: Tensor, v: Tensor, mask: Mask, bias: RelativeBias | None = None) -> bool:
    narrow = max(q.shape[2], v.shape[2]) <= WIDEST and (bias is None or mask.longest <= LONG)
    return mask.causal and narrow and q.dtype in (torch.bfloat16, torch.float16, torch.float32)


@functools.cache
def _hopper(device: torch.device) -> ModuleType | None:
    """A body for this chip alone, whose passes return None where it does not serve."""
    if device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(device) != (9, 0):
        return None
    return importlib.import_module(f"{__package__}.hopper")


def _cut(q: Tensor, v: Tensor, offsets_B1: Tensor, mask: Mask, step: int) -> tuple[tuple[int], tuple[int, int, int]]:
    """The grid, and what tells a program its share: pairs of row and head, blocks of each, pairs that go together."""
    pairs, blocks = (offsets_B1.numel() - 1) * q.shape[1], triton.cdiv(mask.longest, step)
    together = CACHED // max(1, mask.longest * (q.shape[2] + v.shape[2]) * q.element_size())
    return (pairs * blocks,), (pairs, blocks, max(1, min(pairs, together)))


def _near(rows: Tensor) -> Tensor:
    """The numbers of a head must lie together; tokens and heads may lie anywhere."""
    return rows if rows.stride(-1) == 1 or rows.shape[-1] == 1 else rows.contiguous()


def _room(q: Tensor, k: Tensor, v: Tensor) -> Into:
    dq, dk, dv = (torch.empty(rows.shape, dtype=rows.dtype, device=rows.device) for rows in (q, k, v))
    return dq, dk, dv


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for rows in tensors for stride in rows.stride()[:2]]


def _scales(mask: Mask) -> tuple[float, float]:
    return mask.alpha / 2, 1 / mask.length


def _width(q: Tensor, v: Tensor) -> int:
    return int(max(_padded(q), _padded(v)))


def _padded(rows: Tensor) -> int:
    """Products of matrices want a power of two, 16 at least."""
    return max(16, int(triton.next_power_of_2(rows.shape[2])))


def _shape(q: Tensor, v: Tensor) -> dict[str, int]:
    """Half-precision blocks of keys and values are padded to one width: 32 beside 16 came out wrong on an H200."""
    width = _width(q, v)
    one = q.element_size() == 2
    padded = {"PA": width if one else _padded(q), "PV": width if one else _padded(v)}
    return {"H": q.shape[1], "A": q.shape[2], "V": v.shape[2]} | padded


def _tanh(q: Tensor) -> bool:
    """Whether the hardware's tanh, good to 11 bits, may serve: not for float32."""
    return on_nvidia(q) and q.dtype != torch.float32


def _tile_options(tiles: Tiles, q: Tensor, bias: RelativeBias | None = None) -> dict[str, Any]:
    sizes = {"QUERIES": tiles.queries, "KEYS": tiles.keys, "STAGES": tiles.stages, "num_warps": tiles.warps}
    buckets = 0 if bias is None or bias.buckets_K is None else len(bias.buckets_K)
    # A bias follows torch's own setting.
    exact = precision(q, rounded=bias is not None and tf32(q))
    return sizes | {"K": buckets, "TANH": _tanh(q), "PRECISION": exact}


def _bias(bias: RelativeBias | None) -> tuple[Tensor | None, tuple[Tensor, ...] | None]:
    """The pointers of a bias that kernels take."""
    if bias is None:
        return None, None
    if bias.buckets_K is None or bias.key_times_T is None or bias.query_times_T is None:
        return bias.positions_P.contiguous(), None
    times = bias.key_times_T.contiguous(), bias.query_times_T.contiguous()
    starts = bucket_starts(len(bias.buckets_K), bias.buckets_K.device)
    return bias.positions_P.contiguous(), (bias.buckets_K.contiguous(), starts, *times)


def _sums(q: Tensor, buckets: int) -> dict[str, Any]:
    """How gradients are added up by bucket: rows of 16, and the precision of what is added."""
    half = q.dtype != torch.float32
    precise = "tf32" if half or tf32(q) else "tf32x3"
    high = max(16, int(triton.next_power_of_2(triton.cdiv(buckets, 16))))
    return {"HIGH": high, "SUMMED": precise if on_nvidia(q) else "ieee"}


def _last_options(q: Tensor, v: Tensor) -> dict[str, Any]:
    return {"CHUNK": CHUNK, "KEYS": last_keys(_width(q, v)), "TANH": _tanh(q), "num_warps": 4}
