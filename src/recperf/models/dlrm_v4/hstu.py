"""HSTU: layers that gate the output of a SiLU attention, over packed rows of different lengths.

A layer saves its input, one buffer with gates, values, queries and keys, and the attention's output; the backward pass
recomputes the rest, and with `recompute` everything but the input. The gradients share one buffer too.

Shapes: B rows, T tokens of all rows, D width of a token, H heads, A and V width of a query and a value, E = H * V,
K = H * A, F = 2 E + 2 K, M = E + K.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...measure.spans import span
from ...ops import hstu_attention, stu_input, stu_output
from ...ops.dropout import Dropout, dropout_seed
from ...ops.hstu_attention import Mask
from ..init import xavier_uniform_
from .config import EPS, HSTUConfig

STU = "stu"
"""The purpose of the layers' dropout; each purpose draws other random numbers in a step."""
RECOMPUTE = "recompute"
"""The span of recomputation."""


@dataclass(frozen=True, eq=False)
class TokenRows:
    """The rows that tokens belong to."""

    offsets_B1: Tensor
    longest: int
    """Tokens of the longest row."""
    whole_longest: int
    """Tokens of the longest row of the whole batch, of which this may be a part."""
    numbers_T: Tensor | None = None
    """The number of each token in the whole batch; None: 0, 1, 2 and so on."""

    @property
    def last_B(self) -> Tensor:
        """The last token of every row."""
        return self.offsets_B1[1:] - 1


@dataclass(frozen=True)
class DropoutMoment:
    """The point in a training at which a forward pass happens; it determines the dropout."""

    seed: int = 0
    step: int = 0
    part: int = 0
    """Index of the part of the step's batch."""

    def dropout(self, rate: float, layer: int, purpose: str, numbers_T: Tensor | None = None) -> Dropout:
        return Dropout(rate, dropout_seed(self.seed, self.step, layer, f"{purpose}/{self.part}"), numbers_T)


class Weights(NamedTuple):
    norm_D: Tensor
    norm_bias_D: Tensor
    uvqk_DF: Tensor
    uvqk_bias_F: Tensor
    output_norm_E: Tensor
    output_norm_bias_E: Tensor
    output_3ED: Tensor

    @property
    def norm(self) -> tuple[Tensor, Tensor]:
        return self.norm_D, self.norm_bias_D

    @property
    def output_norm(self) -> tuple[Tensor, Tensor]:
        return self.output_norm_E, self.output_norm_bias_E


@dataclass(frozen=True, eq=False)
class LayerCall:
    """The arguments of a layer's forward and backward pass that have no gradient."""

    config: HSTUConfig
    rows: TokenRows
    dropout: Dropout

    @property
    def mask(self) -> Mask:
        """The attention mask; with one candidate at the end of a row no targets have to be masked."""
        config = self.config
        length = config.max_length if config.attention_scale == "fixed" else self.rows.whole_longest
        return Mask(alpha=config.qk_dim**-0.5, length=length, longest=self.rows.longest)

    @property
    def last_dropout(self) -> Dropout:
        """The same dropout, for the last token of each row only."""
        last_B, numbers_T = self.rows.last_B, self.rows.numbers_T
        return replace(self.dropout, rows_T=last_B if numbers_T is None else numbers_T[last_B])

    @property
    def widths(self) -> list[int]:
        """Width of gates and values, and of queries and keys."""
        return [self.config.attention_width, self.config.key_width]

    def by_head(self, x_TE: Tensor) -> Tensor:
        tokens, width = x_TE.shape
        return x_TE.view(tokens, self.config.heads, width // self.config.heads)

    def split(self, uvqk_TF: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Views of gates, values, queries and keys, the latter three by heads."""
        wide, narrow = self.widths
        u_TE, v_TE, q_TK, k_TK = torch.split(uvqk_TF, [wide, wide, narrow, narrow], dim=1)
        return u_TE, self.by_head(v_TE), self.by_head(q_TK), self.by_head(k_TK)

    def halves(self, buffer_TM: Tensor) -> tuple[Tensor, Tensor]:
        """Views of values and keys, or of gates and queries."""
        wide_TE, narrow_TK = torch.split(buffer_TM, self.widths, dim=1)
        return wide_TE, narrow_TK

    def paired(self, uvqk: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of the columns of values and keys, and of those of gates and queries."""
        wide, narrow = self.widths
        u, v, q, k = torch.split(uvqk, [wide, wide, narrow, narrow], dim=-1)
        return torch.cat([v, k], -1), torch.cat([u, q], -1)

    def unpaired(self, vk: Tensor, uq: Tensor) -> Tensor:
        """The inverse of `paired`."""
        (v, k), (u, q) = (torch.split(pair, self.widths, dim=-1) for pair in (vk, uq))
        return torch.cat([u, v, q, k], -1)


class _Layer(torch.autograd.Function):
    """One layer that computes every token."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, call: LayerCall, *parameters: Tensor) -> Tensor:
        weights = Weights(*parameters)
        uvqk_TF, input_stats, attention_TE = _front(x_TD, weights, call)
        with span("stu_output"):
            out_TD, output_stats = stu_output.forward(
                attention_TE, call.split(uvqk_TF)[0], x_TD, *weights.output_norm, weights.output_3ED,
                EPS, call.dropout,
            )  # fmt: skip
        activations = () if call.config.recompute else (uvqk_TF, attention_TE)
        ctx.save_for_backward(x_TD, *parameters, input_stats, output_stats, *activations)
        ctx.call = call
        return out_TD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        call, (x_TD, *saved) = ctx.call, ctx.saved_tensors
        weights, (input_stats, output_stats, *activations) = Weights(*saved[:7]), saved[7:]
        grad_TD = grads[0].contiguous()
        if not activations:
            uvqk_TF, _, attention_TE = _front(x_TD, weights, call, again=True)
        else:
            uvqk_TF, attention_TE = activations
        u_TE, v_THV, q_THA, k_THA = call.split(uvqk_TF)
        gradient_TF = torch.empty_like(uvqk_TF)
        du_TE, dv_THV, dq_THA, dk_THA = call.split(gradient_TF)
        of_gates, of_heads, of_all = _bias_gradient(call, uvqk_TF)
        with span("stu_output_backward"):
            dattention_TE, _, *d_output = stu_output.backward(
                grad_TD, attention_TE, u_TE, *weights.output_norm, weights.output_3ED, output_stats,
                EPS, call.dropout, into_u=du_TE, **of_gates,
            )  # fmt: skip
        with span("attention_backward"):
            attention_body(x_TD).backward(
                call.by_head(dattention_TE), q_THA, k_THA, v_THV, call.rows.offsets_B1, call.mask,
                into=(dq_THA, dk_THA, dv_THV), **of_heads,
            )  # fmt: skip
        with span("stu_input_backward"):
            dx_TD, *d_input = stu_input.backward(
                gradient_TF, x_TD, *weights.norm, weights.uvqk_DF, input_stats, EPS, residual_TD=grad_TD,
                **of_all,
            )  # fmt: skip
        return dx_TD, None, *d_input, *d_output


def _bias_gradient(call: LayerCall, uvqk_TF: Tensor) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Options of the three backward passes of a layer, with which kernels add up the gradient of the map's bias while
    they write what it is the sum of; none on a CPU."""
    if not uvqk_TF.is_cuda or uvqk_TF.dtype == torch.float64:
        return {}, {}, {}
    dbias_F = torch.empty(uvqk_TF.shape[1], dtype=torch.float32, device=uvqk_TF.device)
    du_1E, dv_1HV, dq_1HA, dk_1HA = call.split(dbias_F[None])
    return {"sum_E": du_1E[0]}, {"sums": (dq_1HA[0], dk_1HA[0], dv_1HV[0])}, {"dbias_F": dbias_F}


def _front(x_TD: Tensor, weights: Weights, call: LayerCall, *, again: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Compute a layer up to its attention: the buffer, the norm's statistics, the attention's output."""
    with span(RECOMPUTE if again else "stu_input"):
        uvqk_TF, stats = stu_input.forward(x_TD, *weights.norm, weights.uvqk_DF, weights.uvqk_bias_F, EPS)
    _, v_THV, q_THA, k_THA = call.split(uvqk_TF)
    with span(RECOMPUTE if again else "attention"):
        attention_THV = attention_body(x_TD).forward(q_THA, k_THA, v_THV, call.rows.offsets_B1, call.mask)
    return uvqk_TF, stats, attention_THV.flatten(1)


class _LastToken(torch.autograd.Function):
    """One layer that computes the last token of each row: keys and values of all tokens, the rest of that one only."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, call: LayerCall, *parameters: Tensor) -> Tensor:
        weights = Weights(*parameters)
        x_BD = x_TD.index_select(0, call.rows.last_B)
        vk_TM, uq_BM, attention_BE, *stats = _last_front(x_TD, x_BD, weights, call)
        with span("stu_output"):
            out_BD, output_stats = stu_output.forward(
                attention_BE, call.halves(uq_BM)[0], x_BD, *weights.output_norm, weights.output_3ED,
                EPS, call.last_dropout,
            )  # fmt: skip
        activations = () if call.config.recompute else (vk_TM, uq_BM, attention_BE)
        ctx.save_for_backward(x_TD, *parameters, *stats, output_stats, *activations)
        ctx.call = call
        return out_BD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        call, (x_TD, *saved) = ctx.call, ctx.saved_tensors
        weights, (vk_stats, uq_stats, output_stats, *activations) = Weights(*saved[:7]), saved[7:]
        grad_BD, last_B = grads[0].contiguous(), call.rows.last_B
        x_BD = x_TD.index_select(0, last_B)
        if not activations:
            activations = _last_front(x_TD, x_BD, weights, call, again=True)[:3]
        vk_TM, uq_BM, attention_BE = activations
        (v_TE, k_TK), (u_BE, q_BK) = call.halves(vk_TM), call.halves(uq_BM)
        d_vk_TM, d_uq_BM = torch.empty_like(vk_TM), torch.empty_like(uq_BM)
        (dv_TE, dk_TK), (du_BE, dq_BK) = call.halves(d_vk_TM), call.halves(d_uq_BM)
        with span("stu_output_backward"):
            dattention_BE, _, *d_output = stu_output.backward(
                grad_BD, attention_BE, u_BE, *weights.output_norm, weights.output_3ED, output_stats, EPS,
                call.last_dropout, into_u=du_BE,
            )  # fmt: skip
        with span("attention_backward"):
            attention_body(x_TD).backward_last(
                *map(call.by_head, (dattention_BE, q_BK, k_TK, v_TE)), call.rows.offsets_B1, call.mask,
                into=tuple(map(call.by_head, (dq_BK, dk_TK, dv_TE))),
            )  # fmt: skip
        with span("stu_input_backward"):
            vk_DM, uq_DM = call.paired(weights.uvqk_DF)
            dx_TD, *d_all = stu_input.backward(d_vk_TM, x_TD, *weights.norm, vk_DM, vk_stats, EPS)
            dx_BD, *d_last = stu_input.backward(d_uq_BM, x_BD, *weights.norm, uq_DM, uq_stats, EPS, residual_TD=grad_BD)
            dx_TD[last_B] += dx_BD
            d_norm = (d_all[0] + d_last[0], d_all[1] + d_last[1])
            d_uvqk = (call.unpaired(d_all[2], d_last[2]), call.unpaired(d_all[3], d_last[3]))
        return dx_TD, None, *d_norm, *d_uvqk, *d_output


def _last_front(
    x_TD: Tensor, x_BD: Tensor, weights: Weights, call: LayerCall, *, again: bool = False
) -> tuple[Tensor, ...]:
    """Compute values and keys of all tokens, gates and queries of the last ones, attention, and norm statistics."""
    with span(RECOMPUTE if again else "stu_input"):
        (vk_DM, uq_DM), (vk_M, uq_M) = call.paired(weights.uvqk_DF), call.paired(weights.uvqk_bias_F)
        vk_TM, vk_stats = stu_input.forward(x_TD, *weights.norm, vk_DM, vk_M, EPS)
        uq_BM, uq_stats = stu_input.forward(x_BD, *weights.norm, uq_DM, uq_M, EPS)
    (v_TE, k_TK), (_, q_BK) = call.halves(vk_TM), call.halves(uq_BM)
    with span(RECOMPUTE if again else "attention"):
        attention_BHV = attention_body(x_TD).forward_last(
            *map(call.by_head, (q_BK, k_TK, v_TE)), call.rows.offsets_B1, call.mask
        )
    return vk_TM, uq_BM, attention_BHV.flatten(1), vk_stats, uq_stats


def attention_body(x_TD: Tensor) -> ModuleType:
    """Choose the implementation; kernels compute in float32, which is not enough for float64."""
    return hstu_attention.choose("reference" if x_TD.dtype == torch.float64 else "auto", x_TD.device)[0]


class STULayer(nn.Module):
    def __init__(self, config: HSTUConfig) -> None:
        super().__init__()
        self.config = config
        dim, wide = config.dim, config.attention_width
        self.norm_weight = nn.Parameter(torch.ones(dim))
        self.norm_bias = nn.Parameter(torch.zeros(dim))
        self.uvqk_weight = nn.Parameter(torch.zeros(dim, config.uvqk_width))
        self.uvqk_bias = nn.Parameter(torch.zeros(config.uvqk_width))
        self.output_norm_weight = nn.Parameter(torch.ones(wide))
        self.output_norm_bias = nn.Parameter(torch.zeros(wide))
        self.output_weight = nn.Parameter(torch.zeros(3 * wide, dim))

    def reset(self, seed: int, name: str) -> None:
        xavier_uniform_(self.uvqk_weight, seed, f"{name}.uvqk_weight")
        xavier_uniform_(self.output_weight, seed, f"{name}.output_weight")
        for one in (self.norm_weight, self.output_norm_weight):
            nn.init.ones_(one)
        for zero in (self.norm_bias, self.uvqk_bias, self.output_norm_bias):
            nn.init.zeros_(zero)

    def forward(self, x_TD: Tensor, rows: TokenRows, dropout: Dropout, *, last_only: bool = False) -> Tensor:
        """Compute the output of every token, or of each row's last one; with `last_only` no row may be empty."""
        call, function = LayerCall(self.config, rows, dropout), _LastToken if last_only else _Layer
        weights = Weights(
            self.norm_weight,
            self.norm_bias,
            self.uvqk_weight,
            self.uvqk_bias,
            self.output_norm_weight,
            self.output_norm_bias,
            self.output_weight,
        )
        out: Tensor = function.apply(x_TD, call, *weights)  # type: ignore[no-untyped-call]
        return out


class HSTU(nn.Module):
    """A stack of STU layers; the output is that of each row's last token."""

    def __init__(self, config: HSTUConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(STULayer(config) for _ in range(config.layers))

    def reset(self, seed: int, name: str) -> None:
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, STULayer)
            layer.reset(seed, f"{name}.layers.{index}")

    def forward(self, x_TD: Tensor, rows: TokenRows, moment: DropoutMoment) -> Tensor:
        rate, last = self.config.dropout if self.training else 0.0, len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            dropout = moment.dropout(rate, index, STU, rows.numbers_T)
            x_TD = layer(x_TD, rows, dropout, last_only=self.config.candidate_only and index == last)
        return x_TD if self.config.candidate_only else x_TD.index_select(0, rows.last_B)
