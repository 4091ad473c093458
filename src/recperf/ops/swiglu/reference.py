"""silu(gate) * up in plain torch. Shapes: see the package."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def forward(both_TG: Tensor) -> Tensor:
    gate_TF, up_TF = both_TG.chunk(2, dim=-1)
    return F.silu(gate_TF).mul_(up_TF)


def backward(grad_TF: Tensor, both_TG: Tensor) -> Tensor:
    """The gradients of gate and up."""
    gate_TF, up_TF = both_TG.chunk(2, dim=-1)
    grad_TG = torch.empty_like(both_TG)
    of_gate_TF, of_up_TF = grad_TG.chunk(2, dim=-1)
    torch.mul(grad_TF, F.silu(gate_TF), out=of_up_TF)
    torch.mul(grad_TF, up_TF, out=of_gate_TF)
    of_gate_TF.copy_(torch.ops.aten.silu_backward(of_gate_TF, gate_TF))
    return grad_TG
