"""What HSTU is measured against: softmax flash attention through torch in the same run, and published figures.

The reference's own kernels cannot be run here, so its figures are constants, taken on one NVIDIA H200 (torch 2.11,
triton 3.6). Rates are only compared with them on such a GPU.

Shapes: B rows, N tokens of a row, T tokens of all rows, H heads, A width of q and k a head, V of v.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

GPU = "H200"
GEMM_TFLOPS = 795.0
"""Best bf16 product measured on that GPU."""


@dataclass(frozen=True)
class Figures:
    """TFLOP/s of the reference and, where rows are equally long, of softmax flash attention, as published."""

    forward: float
    both: float
    """Forward and backward together."""
    softmax: tuple[float, float] | None = None


@dataclass(frozen=True)
class Shape:
    """Rows of one batch, their lengths drawn evenly between the shortest and the longest."""

    rows: int
    longest: int
    shortest: int
    heads: int = 4
    qk: int = 128
    v: int = 128
    published: Figures | None = None
    goals: tuple[float, float] | None = None
    """TFLOP/s forward, and forward and backward; none: 1.4 times the reference."""

    @property
    def name(self) -> str:
        length = f"{self.longest}" if self.equal else f"{self.shortest}..{self.longest}"
        return f"B{self.rows} N{length}"

    @property
    def equal(self) -> bool:
        return self.shortest == self.longest

    def lengths(self, seed: int) -> Tensor:
        draw = torch.Generator().manual_seed(seed)
        return torch.randint(self.shortest, self.longest + 1, (self.rows,), generator=draw)

    def flops(self, lengths_B: Tensor) -> float:
        """Of a forward pass, as the published figures count: the half of each square, two products."""
        return float(lengths_B.double().square().sum()) / 2 * self.heads * (self.qk + self.v) * 2

    def least(self, both: bool) -> float:
        """TFLOP/s this shape is to reach."""
        if self.goals:
            return self.goals[both]
        return 0.0 if self.published is None else 1.4 * (self.published.both if both else self.published.forward)

    def told(self) -> dict[str, Any]:
        """For a row's conditions."""
        found: dict[str, Any] = {"rows": self.rows, "longest": self.longest, "shortest": self.shortest}
        found |= {"heads": self.heads, "qk": self.qk, "v": self.v}
        if self.published:
            found["published_tflops"] = {"reference": [self.published.forward, self.published.both]}
            if self.published.softmax:
                found["published_tflops"]["softmax"] = list(self.published.softmax)
        return found


BOTH = 3.5
"""Times a forward pass: forward and backward together, recomputed scores counted once."""

SHAPES = (
    Shape(32, 4096, 4096, published=Figures(282, 263, (559, 479)), goals=(500, 360)),
    Shape(32, 2048, 2048, published=Figures(168, 196, (439, 339))),
    Shape(64, 1024, 1024, published=Figures(128, 133, (313, 220))),
    Shape(128, 512, 512, published=Figures(72, 92, (236, 165))),
    Shape(64, 4096, 512, published=Figures(240, 168)),
)

TINY = (Shape(2, 48, 48, heads=2, qk=16, v=16), Shape(3, 40, 5, heads=2, qk=16, v=16))

STACK_REFERENCE = {
    "B32 x 4096": {"samples_per_s": 850.0, "tflops": 268.0, "gib": 2.8},
    "B256, mean 2663": {"samples_per_s": 1627.0, "tflops": 273.0, "gib": 23.7},
}
"""Three STU layers of the reference, forward and backward."""


class Softmax:
    """Causal softmax attention over rows of equal length by torch's own flash kernel."""

    def __init__(self, q_THA: Tensor, k_THA: Tensor, v_THV: Tensor, grad_THV: Tensor, rows: int) -> None:
        def padded(x: Tensor) -> Tensor:
            """[B, H, N, width]."""
            return x.detach().reshape(rows, -1, *x.shape[1:]).transpose(1, 2)

        self.q, self.k, self.v = (padded(x).contiguous().requires_grad_() for x in (q_THA, k_THA, v_THV))
        self.grad = padded(grad_THV).contiguous()

    def forward(self) -> Tensor:
        with torch.no_grad():
            return F.scaled_dot_product_attention(self.q, self.k, self.v, is_causal=True)

    def both(self) -> tuple[Tensor, ...]:
        out = F.scaled_dot_product_attention(self.q, self.k, self.v, is_causal=True)
        return torch.autograd.grad(out, (self.q, self.k, self.v), self.grad)


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
