"""Heads of packed sequences as padded ones, as attention wants them, and back; some are rotated by their position:
`reference` (plain torch, any device) or `triton` (a GPU).

q_BHLA, k_BHLA, v_BHLA = padded_heads(qkv_TF, sequences, heads=H, parts=3, rotated=2)
attended_TE = packed_heads(attended_BHLA, sequences)
turned_BHLA = rotated(q_BHLA)                              # of sequences that are padded already

Rotary positions: the halves of a head are the coordinates of A // 2 points, of which point j is turned by its position
times 10000^(-2j / A) radians. So the product of a query and a key depends on how far apart they are. Of an odd width
the last number stays.

Shapes: B sequences, L positions of a padded one, T positions of all, H heads, A width of a head, E = H * A, F = parts
* E, G = parts * H.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from .. import choice
from ..choice import Name
from .reference import rotated as rotated

choose = functools.partial(choice.choose, __name__)


class Sequences(Protocol):
    """Position offsets_B1[b] of a packed batch is the first one of sequence b."""

    @property
    def offsets_B1(self) -> Tensor: ...
    @property
    def longest(self) -> int:
        """Positions of a padded sequence."""

    @property
    def rows_T(self) -> Tensor:
        """The sequence of each position."""

    @property
    def positions_T(self) -> Tensor:
        """Its number in the sequence."""


def padded_heads(
    packed_TF: Tensor, sequences: Sequences, *, heads: int, parts: int, rotated: int = 0, impl: Name = "auto"
) -> tuple[Tensor, ...]:
    """Each of the parts as B x H x L x A, with zeros behind a shorter sequence; the first `rotated` are rotated."""
    body, _ = choose(impl, packed_TF.device)
    padded: tuple[Tensor, ...] = _Padded.apply(packed_TF, sequences, heads, parts, rotated, body)  # type: ignore[no-untyped-call]
    return padded


def packed_heads(padded_BHLA: Tensor, sequences: Sequences, impl: Name = "auto") -> Tensor:
    """All positions, T x E, without what is behind a sequence."""
    body, _ = choose(impl, padded_BHLA.device)
    packed_TE: Tensor = _Packed.apply(padded_BHLA, sequences, body)  # type: ignore[no-untyped-call]
    return packed_TE


class _Padded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, packed_TF: Tensor, sequences: Sequences, heads: int, parts: int, rotated: int, body: ModuleType
    ) -> tuple[Tensor, ...]:
        ctx.sequences, ctx.rotated, ctx.body = sequences, rotated, body
        packed_TGA = packed_TF.view(len(packed_TF), parts * heads, -1)
        padded_BLGA = body.pad(packed_TGA, sequences, rotated * heads)
        return tuple(part_BLHA.transpose(1, 2) for part_BLHA in torch.split(padded_BLGA, heads, 2))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        _, heads, _, width = grads[0].shape
        packed_TGA = grads[0].new_empty(len(ctx.sequences.positions_T), len(grads) * heads, width)
        for part, (grad_BHLA, into_THA) in enumerate(zip(grads, torch.split(packed_TGA, heads, 1))):
            ctx.body.pack(grad_BHLA.transpose(1, 2), ctx.sequences, into_THA, back=part < ctx.rotated)
        return packed_TGA.flatten(1), None, None, None, None, None


class _Packed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, padded_BHLA: Tensor, sequences: Sequences, body: ModuleType) -> Tensor:
        ctx.sequences, ctx.heads, ctx.body = sequences, padded_BHLA.shape[1], body
        packed_THA = padded_BHLA.new_empty(len(sequences.positions_T), ctx.heads, padded_BHLA.shape[3])
        body.pack(padded_BHLA.transpose(1, 2), sequences, packed_THA, back=False)
        return packed_THA.flatten(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad_THA = grads[0].reshape(len(grads[0]), ctx.heads, -1)
        return ctx.body.pad(grad_THA, ctx.sequences, 0).transpose(1, 2), None, None
