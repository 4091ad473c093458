"""HSTU attention in plain torch: what is right. Row by row and a block of queries at a time, so that memory is bounded.

Half precision is computed in float32. The lengths are read on the host.

Shapes: B rows, T tokens of all rows, H heads, A width of q and k, V width of v, M queries of a block, N keys it sees,
P distances and K buckets of a bias.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...config import require
from ...errors import ArgumentError

SCORES = 1 << 22
"""How many scores are held at a time; a few tensors of that size live at once."""

BUCKET = 0.301
"""The width of a time bucket, in natural logarithms of seconds."""

Into = tuple[Tensor, Tensor, Tensor]
Biased = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]
"""Gradients of q, k, v, and of a bias's positions_P and buckets_K."""


@dataclass(frozen=True, eq=False)
class Mask:
    """A score is SiLU(alpha q.k) / length where the query sees the key, 0 elsewhere.

    Without options a token sees itself and what lies before it in its row. `reference` serves all options; no config
    asks for them, and the faster implementations leave masks with one to it.
    """

    alpha: float
    """The factor of q.k."""
    length: float
    """The divisor of the scores: the longest row of the batch, or a fixed length."""
    longest: int
    """The length of the longest row; the host cannot read lengths without waiting, and longer rows would be cut."""
    targets_B: Tensor | None = None
    """How many tokens at the end of each row do not see each other; with one a row, as without, all is causal."""
    window: int = 0
    """How far back a token sees, counted after the prefix; 0: to the beginning."""
    context: int = 0
    """How many tokens at the beginning of each row see all of it but the targets; 0: none."""

    def __post_init__(self) -> None:
        require(self.length > 0, "length", self.length, "above 0")
        require(self.longest >= 0, "longest", self.longest, "at least 0")
        require(self.window >= 0, "window", self.window, "at least 0")
        require(self.context >= 0, "context", self.context, "at least 0")

    @property
    def causal(self) -> bool:
        """Whether no option is set."""
        return self.targets_B is None and not self.window and not self.context

    def seen_MN(self, queries_M: Tensor, keys_N: Tensor, tokens: int, targets: int | None) -> Tensor:
        """Which query positions of a row with this many tokens see which keys."""
        shift = max(self.context - 1, 0)
        last = tokens - (targets or 0) - shift

        def places(positions: Tensor) -> Tensor:
            ids = (positions - shift).clamp(min=0)
            return ids if targets is None else ids.clamp(max=last)

        query_M1, key_1N = places(queries_M)[:, None], places(keys_N)[None, :]
        back = query_M1 - key_1N
        seen = back > 0
        if self.window:
            seen &= back <= self.window
        if self.context:
            seen |= (query_M1 == 0) & (key_1N < last)
        return seen | (queries_M[:, None] == keys_N[None, :])

    def keys(self, first: int, last: int, tokens: int, targets: int | None) -> tuple[int, int]:
        """The range of keys that queries first .. last - 1 can see."""
        if first < self.context:
            return 0, tokens
        if not self.window:
            return 0, last
        shift = max(self.context - 1, 0)
        place = first - shift
        if targets is not None:
            place = min(place, tokens - targets - shift)
        oldest = place - self.window
        return (oldest + shift if oldest > 0 else 0), last


@dataclass(frozen=True, eq=False)
class RelativeBias:
    """What is added to alpha q.k of a query and a key of the same row, the same for all heads.

    The bucket of a time difference of s seconds is min(K - 1, floor(log(max(1, |s|)) / 0.301)).
    """

    positions_P: Tensor
    """Learned; entry d belongs to a key that lies d tokens before its query. Rows have at most P tokens."""
    buckets_K: Tensor | None = None
    """Learned; by the bucket of the time between the query and the key."""
    key_times_T: Tensor | None = None
    """Seconds of every token, int64."""
    query_times_T: Tensor | None = None
    """Seconds that the query of every token stands at, int64: for example the time of the next event."""

    def __post_init__(self) -> None:
        times = self.key_times_T, self.query_times_T
        if any((one is None) != (self.buckets_K is None) for one in times):
            raise ArgumentError("a bias by time needs buckets_K, key_times_T and query_times_T together")
        if any(one is not None and one.dtype != torch.int64 for one in times):
            raise ArgumentError("key_times_T and query_times_T must be int64 seconds")

    def require_fit(self, tokens: int, mask: Mask) -> None:
        """Fail unless the bias covers a batch of this many tokens under the mask."""
        if not mask.causal:
            raise ArgumentError("a relative bias needs the plain causal mask, without targets, window and context")
        if mask.longest > len(self.positions_P):
            raise ArgumentError(f"a row has {mask.longest} tokens, but positions_P only {len(self.positions_P)}")
        if any(one is not None and one.shape != (tokens,) for one in (self.key_times_T, self.query_times_T)):
            raise ArgumentError(f"key_times_T and query_times_T must have one time for each of the {tokens} tokens")

    def values_MN(self, queries: slice, keys: slice, dtype: torch.dtype) -> Tensor:
        """What is added to the score of every pair of a query and a key."""
        distances_MN, buckets_MN = self.entries_MN(queries, keys)
        values_MN = self.positions_P.to(dtype)[distances_MN]
        if self.buckets_K is not None and buckets_MN is not None:
            values_MN += self.buckets_K.to(dtype)[buckets_MN]
        return values_MN

    def entries_MN(self, queries: slice, keys: slice) -> tuple[Tensor, Tensor | None]:
        """The distance and the bucket of every pair of a query and a key; a key after its query has distance 0."""
        device = self.positions_P.device
        query_M1 = torch.arange(queries.start, queries.stop, device=device)[:, None]
        distances_MN = (query_M1 - torch.arange(keys.start, keys.stop, device=device)).clamp_(min=0)
        if self.buckets_K is None or self.query_times_T is None or self.key_times_T is None:
            return distances_MN, None
        seconds_MN = (self.query_times_T[queries, None] - self.key_times_T[keys]).abs()
        starts_K = bucket_starts(len(self.buckets_K), device)[:-1]
        return distances_MN, torch.searchsorted(starts_K, seconds_MN.clamp_(min=1), right=True) - 1


@functools.cache
def bucket_starts(buckets: int, device: torch.device) -> Tensor:
    """The first whole second of every bucket, and a last entry that no time reaches."""
    most = torch.iinfo(torch.int64).max
    logs = (BUCKET * bucket for bucket in range(buckets))
    starts = [math.ceil(math.exp(log)) if log < math.log(most) else most for log in logs]
    return torch.tensor([*starts, most], device=device)


class _Block(NamedTuple):
    """Queries of one row and the keys they can see, as places among all tokens."""

    row: int
    queries: slice
    keys: slice
    hidden_MN: Tensor


def forward(
    q_THA: Tensor, k_THA: Tensor, v_THV: Tensor, offsets_B1: Tensor, mask: Mask, bias: RelativeBias | None = None
) -> Tensor:
    if bias is not None:
        bias.require_fit(len(q_THA), mask)
    out_THV = torch.zeros_like(v_THV, memory_format=torch.contiguous_format)
    for block in _blocks(offsets_B1, mask, q_THA.shape[1], v_THV.device):
        q_HMA, k_HNA, v_HNV = _wide(q_THA[block.queries]), _wide(k_THA[block.keys]), _wide(v_THV[block.keys])
        bias_MN = None if bias is None else bias.values_MN(block.queries, block.keys, q_HMA.dtype)
        out_HMV = _forward(q_HMA, k_HNA, v_HNV, block.hidden_MN, mask, bias_MN)
        out_THV[block.queries] = out_HMV.transpose(0, 1).to(out_THV.dtype)
    return out_THV


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
    gradients = _room(q_THA, k_THA, v_THV, into)
    _gradients(grad_THV, q_THA, k_THA, v_THV, offsets_B1, mask, gradients, None)
    add_up(gradients, sums)
    return gradients


def backward_biased(
    grad_THV: Tensor, q_THA: Tensor, k_THA: Tensor, v_THV: Tensor, offsets_B1: Tensor, mask: Mask, bias: RelativeBias
) -> Biased:
    """Gradients of q, k, v, positions_P and buckets_K (None where there is none); on a CPU always the same bits."""
    bias.require_fit(len(q_THA), mask)
    gradients, total = _room(q_THA, k_THA, v_THV, None), _BiasGradient(bias)
    _gradients(grad_THV, q_THA, k_THA, v_THV, offsets_B1, mask, gradients, total)
    return *gradients, *total.gradients()


class _BiasGradient:
    """Adds up the gradients of the scores by distance and by time bucket."""

    def __init__(self, bias: RelativeBias) -> None:
        self.bias = bias
        self.learned = [one for one in (bias.positions_P, bias.buckets_K) if one is not None]
        self.totals = [torch.zeros_like(one, dtype=_precise(one)) for one in self.learned]

    def add(self, block: _Block, dscores_HMN: Tensor) -> None:
        dscores_S = dscores_HMN.sum(0).flatten()
        for total, entries_MN in zip(self.totals, self.bias.entries_MN(block.queries, block.keys)):
            if entries_MN is not None:
                total.index_add_(0, entries_MN.flatten(), dscores_S.to(total.dtype))

    def gradients(self) -> tuple[Tensor, Tensor | None]:
        positions_P, *buckets_K = (total.to(one.dtype) for total, one in zip(self.totals, self.learned))
        return positions_P, buckets_K[0] if buckets_K else None


def _gradients(
    grad_THV: Tensor, q_THA: Tensor, k_THA: Tensor, v_THV: Tensor, offsets_B1: Tensor, mask: Mask,
    into: Into, total: _BiasGradient | None,
) -> None:  # fmt: skip
    dq_THA, dk_THA, dv_THV = into
    for row, (first, last) in enumerate(_rows(offsets_B1)):
        k_HNA, v_HNV = _wide(k_THA[first:last]), _wide(v_THV[first:last])
        dk_HNA, dv_HNV = torch.zeros_like(k_HNA), torch.zeros_like(v_HNV)
        for block in _row_blocks(row, first, last, mask, q_THA.shape[1], q_THA.device):
            grad_HMV, q_HMA = _wide(grad_THV[block.queries]), _wide(q_THA[block.queries])
            near = slice(block.keys.start - first, block.keys.stop - first)
            bias_MN = None if total is None else total.bias.values_MN(block.queries, block.keys, q_HMA.dtype)
            dq_HMA, dk, dv, dscores_HMN = _backward(
                grad_HMV, q_HMA, k_HNA[:, near], v_HNV[:, near], block.hidden_MN, mask, bias_MN
            )
            dq_THA[block.queries] = dq_HMA.transpose(0, 1).to(dq_THA.dtype)
            dk_HNA[:, near] += dk
            dv_HNV[:, near] += dv
            if total is not None:
                total.add(block, dscores_HMN)
        dk_THA[first:last] = dk_HNA.transpose(0, 1).to(dk_THA.dtype)
        dv_THV[first:last] = dv_HNV.transpose(0, 1).to(dv_THV.dtype)


def add_up(gradients: Into, sums: Into | None) -> None:
    """Write the sums of gradients over all tokens into `sums` if set."""
    for rows, total in zip(gradients, sums or ()):
        torch.sum(rows, 0, dtype=total.dtype, out=total)


def forward_last(q_BHA: Tensor, k_THA: Tensor, v_THV: Tensor, offsets_B1: Tensor, mask: Mask) -> Tensor:
    """The output of `forward` for the last token of each row, from its queries alone. No row may be empty."""
    out_BHV = v_THV.new_zeros(q_BHA.shape[0], *v_THV.shape[1:])
    for block in _last_blocks(offsets_B1, mask, v_THV.device):
        q_H1A, k_HNA, v_HNV = _wide(q_BHA[block.queries]), _wide(k_THA[block.keys]), _wide(v_THV[block.keys])
        out_BHV[block.queries] = _forward(q_H1A, k_HNA, v_HNV, block.hidden_MN, mask).transpose(0, 1).to(out_BHV.dtype)
    return out_BHV


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
    dq_BHA, dk_THA, dv_THV = _room(q_BHA, k_THA, v_THV, into)
    for block in _last_blocks(offsets_B1, mask, q_BHA.device):
        grad_H1V, q_H1A = _wide(grad_BHV[block.queries]), _wide(q_BHA[block.queries])
        k_HNA, v_HNV = _wide(k_THA[block.keys]), _wide(v_THV[block.keys])
        dq, dk, dv, _ = _backward(grad_H1V, q_H1A, k_HNA, v_HNV, block.hidden_MN, mask)
        dq_BHA[block.queries] = dq.transpose(0, 1).to(dq_BHA.dtype)
        dk_THA[block.keys] = dk.transpose(0, 1).to(dk_THA.dtype)
        dv_THV[block.keys] = dv.transpose(0, 1).to(dv_THV.dtype)
    return dq_BHA, dk_THA, dv_THV


def _forward(
    q_HMA: Tensor, k_HNA: Tensor, v_HNV: Tensor, hidden_MN: Tensor, mask: Mask, bias_MN: Tensor | None = None
) -> Tensor:
    scores_HMN = (q_HMA * mask.alpha) @ k_HNA.mT
    if bias_MN is not None:
        scores_HMN += bias_MN
    weights_HMN = torch.nn.functional.silu(scores_HMN).masked_fill_(hidden_MN, 0.0)
    return (weights_HMN @ v_HNV) / mask.length


def _backward(
    grad_HMV: Tensor, q_HMA: Tensor, k_HNA: Tensor, v_HNV: Tensor, hidden_MN: Tensor, mask: Mask,
    bias_MN: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of the queries, the keys, the values and the scores."""
    scores_HMN = (q_HMA * mask.alpha) @ k_HNA.mT
    if bias_MN is not None:
        scores_HMN += bias_MN
    open_HMN = torch.sigmoid(scores_HMN)
    weights_HMN = (scores_HMN * open_HMN).masked_fill_(hidden_MN, 0.0)
    grad_HMV = grad_HMV / mask.length
    dv_HNV = weights_HMN.mT @ grad_HMV
    slope_HMN = open_HMN * (1 + scores_HMN * (1 - open_HMN))
    dscores_HMN = (slope_HMN * (grad_HMV @ v_HNV.mT)).masked_fill_(hidden_MN, 0.0)
    dq_HMA, dk_HNA = (dscores_HMN @ k_HNA) * mask.alpha, (dscores_HMN.mT @ q_HMA) * mask.alpha
    return dq_HMA, dk_HNA, dv_HNV, dscores_HMN


def _rows(offsets_B1: Tensor) -> list[tuple[int, int]]:
    edges = offsets_B1.tolist()
    return list(zip(edges, edges[1:]))


def _targets(row: int, mask: Mask) -> int | None:
    return None if mask.targets_B is None else int(mask.targets_B[row])


def _blocks(offsets_B1: Tensor, mask: Mask, heads: int, device: torch.device) -> Iterator[_Block]:
    for row, (first, last) in enumerate(_rows(offsets_B1)):
        yield from _row_blocks(row, first, last, mask, heads, device)


def _row_blocks(row: int, first: int, last: int, mask: Mask, heads: int, device: torch.device) -> Iterator[_Block]:
    tokens, targets = last - first, _targets(row, mask)
    step = max(1, SCORES // max(1, heads * tokens))
    for begin in range(0, tokens, step):
        end = min(begin + step, tokens)
        low, high = mask.keys(begin, end, tokens, targets)
        places = torch.arange(tokens, device=device)
        hidden_MN = ~mask.seen_MN(places[begin:end], places[low:high], tokens, targets)
        yield _Block(row, slice(first + begin, first + end), slice(first + low, first + high), hidden_MN)


def _last_blocks(offsets_B1: Tensor, mask: Mask, device: torch.device) -> Iterator[_Block]:
    for row, (first, last) in enumerate(_rows(offsets_B1)):
        places = torch.arange(last - first, device=device)
        hidden_1N = ~mask.seen_MN(places[-1:], places, last - first, _targets(row, mask))
        yield _Block(row, slice(row, row + 1), slice(first, last), hidden_1N)


def _wide(rows_THD: Tensor) -> Tensor:
    """Heads first, in the precision of the computation."""
    return rows_THD.to(_precise(rows_THD)).transpose(0, 1)


def _precise(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _room(q: Tensor, k: Tensor, v: Tensor, into: Into | None) -> Into:
    if into is not None:
        return into
    return (
        torch.zeros_like(q, memory_format=torch.contiguous_format),
        torch.zeros_like(k, memory_format=torch.contiguous_format),
        torch.zeros_like(v, memory_format=torch.contiguous_format),
    )


def activations(offsets_B1: Tensor, k_THA: Tensor, *, last_only: bool = False) -> int:
    """Evaluations of SiLU: one for every pair of tokens that see each other, and head."""
    lengths_B = offsets_B1.diff().double()
    pairs = float((lengths_B if last_only else lengths_B.square() / 2).sum())
    return round(pairs * k_THA.shape[1])


def flops(offsets_B1: Tensor, k_THA: Tensor, v_THV: Tensor, *, backward: bool = False, last_only: bool = False) -> int:
    """Of the attention of all rows; a token sees itself and what lies before it, or only the last one sees."""
    lengths_B = offsets_B1.diff().double()
    twice_pairs = float((2 * lengths_B if last_only else lengths_B.square()).sum())
    heads, qk, width = k_THA.shape[1], k_THA.shape[2], v_THV.shape[2]
    return round(twice_pairs * heads * (3 * qk + 2 * width if backward else qk + width))
