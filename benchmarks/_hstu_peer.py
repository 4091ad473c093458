"""What HSTU is measured against: softmax attention through torch (SDPA) and, with a bias, plain torch on padded rows in
the same run, and figures of other kernels.

The reference's and NVIDIA's kernels cannot be run here, so their rates are constants, taken on one NVIDIA H200 (torch
2.11, triton 3.6, CUDA 13.0). Rates are only compared with them on such a GPU.

Shapes: B rows, N tokens of a row, T tokens of all rows, H heads, A width of q and k a head, V of v.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from recperf.ops.hstu_attention import Mask, RelativeBias

GPU = "H200"
GEMM_TFLOPS = 795.0
"""Best bf16 product measured on that GPU."""
DATASHEET_TFLOPS = 989.0

PASSES = {"forward": 1.0, "backward": 2.5, "both": 3.5}
"""FLOPs of a pass over those of a forward pass; scores that the backward pass recomputes count once."""
REFERENCE, CUTLASS = "MLPerf reference, Triton", "NVIDIA, CUTLASS (FBGEMM)"
Rates = tuple[float, float, float]
"""TFLOP/s of each of the passes."""


@dataclass(frozen=True)
class Shape:
    """Rows of one batch, their lengths drawn evenly between the shortest and the longest."""

    rows: int
    longest: int
    shortest: int
    heads: int = 4
    qk: int = 128
    v: int = 128
    others: dict[str, Rates] = field(default_factory=dict)
    """Other kernels on the same kind of GPU."""
    goals: Rates | None = None

    @property
    def name(self) -> str:
        length = f"{self.longest}" if self.equal else f"{self.shortest}..{self.longest}"
        return f"B{self.rows} N{length}" + ("" if self.qk == 128 else f" width {self.qk}")

    @property
    def equal(self) -> bool:
        return self.shortest == self.longest

    def lengths(self, seed: int) -> Tensor:
        draw = torch.Generator().manual_seed(seed)
        return torch.randint(self.shortest, self.longest + 1, (self.rows,), generator=draw)

    def flops(self, lengths_B: Tensor) -> float:
        """Of a forward pass, as the published figures count: the half of each square, two products."""
        return float(lengths_B.double().square().sum()) / 2 * self.heads * (self.qk + self.v) * 2

    def conditions(self, what: str) -> dict[str, Any]:
        """Of a row about one of the passes."""
        at, place = {"rows": self.rows, "longest": self.longest, "shortest": self.shortest}, list(PASSES).index(what)
        at |= {"heads": self.heads, "qk": self.qk, "v": self.v}
        return at | {"other_kernels_tflops": {name: rates[place] for name, rates in self.others.items()}}

    def goal(self, what: str) -> float | None:
        return self.goals[list(PASSES).index(what)] if self.goals else None


SHAPES = (
    Shape(32, 4096, 4096, others={REFERENCE: (282, 256, 263), CUTLASS: (503, 439, 456)}, goals=(600, 470, 500)),
    Shape(32, 2048, 2048, others={REFERENCE: (168, 210, 196), CUTLASS: (359, 355, 356)}, goals=(500, 400, 420)),
    Shape(64, 1024, 1024, others={REFERENCE: (128, 135, 133), CUTLASS: (302, 288, 291)}, goals=(420, 320, 340)),
    Shape(128, 512, 512, others={REFERENCE: (72, 104, 92), CUTLASS: (212, 203, 205)}, goals=(330, 230, 250)),
    Shape(64, 4096, 512, others={REFERENCE: (240, 150, 168), CUTLASS: (445, 399, 411)}, goals=(550, 440, 460)),
)
H100 = "NVIDIA, published for an H100"
PUBLISHED = {2048: (537.0, 321.0, 369.0), 4096: (622.0, 360.0, 403.0), 16384: (637.0, 385.0, 432.0)}
"""Heads of 256, by the length of rows."""
WIDTHS = (
    replace(SHAPES[1], qk=64, v=64, others={}, goals=None),
    *(
        Shape(min(32, 131072 // length), length, length, qk=256, v=256, others={H100: rates}, goals=rates)
        for length, rates in PUBLISHED.items()
    ),
)
"""Other widths of a head: 64 to be compared with 128 at the same lengths, 256 with NVIDIA's kernels."""

BIASED = tuple(
    Shape(128, longest, longest, heads=heads, qk=width, v=width)
    for heads, width in ((2, 25), (8, 32))
    for longest in (50, 100, 200)
)
"""Rows of next-item models, with a relative bias."""

TINY = (Shape(2, 48, 48, heads=2, qk=16, v=16), Shape(3, 40, 5, heads=2, qk=16, v=16))

STACK_REFERENCE = {
    "B32 x 4096": {"samples_per_s": 850.0, "tflops": 268.0, "gib": 2.8},
    "B256, mean 2663": {"samples_per_s": 1627.0, "tflops": 273.0, "gib": 23.7},
}
"""Three STU layers of the reference, forward and backward."""


class Softmax:
    """Causal softmax attention over rows of equal length by one of torch's backends; RuntimeError where it refuses."""

    BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}  # noqa: RUF012

    def __init__(self, inputs: tuple[Tensor, ...], rows: int, backend: SDPBackend) -> None:
        """Of q, k, v [T, H, width] and the gradient of the output."""
        padded = [x.detach().reshape(rows, -1, *x.shape[1:]).transpose(1, 2).contiguous() for x in inputs]
        self.qkv, self.grad, self.backend = [x.requires_grad_() for x in padded[:3]], padded[3], backend
        self.out = self._attend()

    def _attend(self) -> Tensor:
        q, k, v = self.qkv
        with sdpa_kernel(self.backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self) -> Tensor:
        with torch.no_grad():
            return self._attend()

    def backward(self) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.out, self.qkv, self.grad, retain_graph=True)

    def both(self) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self._attend(), self.qkv, self.grad)

    def exact(self) -> tuple[Tensor, ...]:
        """Output and gradients in float64."""
        wide = [x.detach().double().transpose(1, 2).flatten(0, 1) for x in (*self.qkv, self.grad)]
        peer = Softmax(tuple(wide), self.grad.shape[0], SDPBackend.MATH)
        return peer.forward(), *peer.backward()


class Padded:
    """HSTU attention with a relative bias as a short script writes it: rows of equal length, all scores in memory."""

    def __init__(self, inputs: tuple[Tensor, ...], rows: int, mask: Mask, bias: RelativeBias) -> None:
        """Of q, k, v [T, H, width] and the gradient of the output."""
        *qkv, self.grad = (x.detach().reshape(rows, -1, *x.shape[1:]) for x in inputs)
        assert bias.buckets_K is not None
        assert bias.key_times_T is not None
        assert bias.query_times_T is not None
        self.leaves = [x.detach().requires_grad_() for x in (*qkv, bias.positions_P, bias.buckets_K)]
        self.times = bias.key_times_T.view(rows, 1, -1), bias.query_times_T.view(rows, -1, 1)
        places_N = torch.arange(mask.longest, device=self.grad.device)
        self.distances_NN = (places_N[:, None] - places_N).clamp(min=0)
        self.causal_NN = torch.ones_like(self.distances_NN, dtype=self.grad.dtype).tril()
        self.mask = mask

    def _attend(self) -> Tensor:
        q, k, v, positions_P, buckets_K = self.leaves
        keys, queries = self.times
        logs_BNN = (queries - keys).abs().clamp(min=1).float().log()
        buckets_BNN = (logs_BNN / 0.301).long().clamp(max=len(buckets_K) - 1)
        scores_BHNN = torch.einsum("bmhd,bnhd->bhmn", q, k) * self.mask.alpha
        scores_BHNN = scores_BHNN + (positions_P[self.distances_NN] + buckets_K[buckets_BNN])[:, None]
        weights_BHNN = F.silu(scores_BHNN) / self.mask.length * self.causal_NN
        return torch.einsum("bhmn,bnhd->bmhd", weights_BHNN, v)

    def forward(self) -> Tensor:
        with torch.no_grad():
            return self._attend().flatten(0, 1)

    def both(self) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self._attend(), self.leaves, self.grad)


def on_the_gpu(device: torch.device) -> bool:
    """Whether goals and published figures mean this device."""
    return device.type == "cuda" and GPU in torch.cuda.get_device_name(device)


def jagged_lengths(rows: int, shortest: int, longest: int, mean: float, seed: int) -> Tensor:
    """Lengths between the two bounds whose mean is as asked to the token: even draws on either side of it, mixed."""
    if not shortest <= mean <= longest:
        raise ValueError(f"no lengths of {shortest} to {longest} have a mean of {mean}")
    if shortest == longest:
        return torch.full((rows,), longest)
    draw = torch.Generator().manual_seed(seed)
    low, high = (shortest + mean) / 2, (mean + longest) / 2
    upper_B = torch.rand(rows, generator=draw) < (mean - low) / (high - low)
    place_B = torch.rand(rows, generator=draw)
    lengths_B = torch.where(upper_B, mean + place_B * (longest - mean), shortest + place_B * (mean - shortest))
    lengths_B = lengths_B.round().long().clamp(shortest, longest)
    return _with_sum(lengths_B, round(mean * rows), shortest, longest)


def _with_sum(lengths_B: Tensor, wanted: int, shortest: int, longest: int) -> Tensor:
    lengths = lengths_B.tolist()
    missing, place = wanted - sum(lengths), 0
    while missing:
        step = 1 if missing > 0 else -1
        if shortest <= lengths[place] + step <= longest:
            lengths[place] += step
            missing -= step
        place = (place + 1) % len(lengths)
    return torch.tensor(lengths)


def offsets_of(lengths_B: Tensor, device: torch.device) -> Tensor:
    return F.pad(lengths_B.cumsum(0), (1, 0)).to(device)
