"""Matrix products by torch, in the types that hand-written backward passes need.

On a CPU half precision is widened first: torch's own products of it are slow on most, and on some they warn.
Sums are float32 as on a GPU, and the result is rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

WIDE = (torch.float32, torch.float64)


def product(left_MK: Tensor, right_KN: Tensor, plus: Tensor | None = None) -> Tensor:
    """left @ right, plus a row or a matrix, in the type of the left; the others are cast to it."""
    kind = left_MK.dtype
    right_KN, plus = right_KN.to(kind), plus if plus is None else plus.to(kind)
    if kind not in WIDE and left_MK.device.type == "cpu":
        wide = product(left_MK.float(), right_KN.float(), plus if plus is None else plus.float())
        return wide.to(kind)
    return left_MK @ right_KN if plus is None else torch.addmm(plus, left_MK, right_KN)


def weight_gradient(input_TM: Tensor, grad_TN: Tensor, *, rounded: bool = False) -> Tensor:
    """input^T @ grad in float32 (float64 of float64): the sum over T tokens is not rounded to a narrow type.

    `rounded`: round it once after all. A CPU's own instructions for bfloat16, which then compute it, sum in float32.
    """
    left_MT = input_TM.t()
    if input_TM.dtype in WIDE:
        return left_MT @ grad_TN
    if rounded and input_TM.device.type == "cpu":
        return (left_MT @ grad_TN).float()
    if input_TM.device.type == "cuda" and torch.version.hip is None and input_TM.shape[0]:
        return torch.mm(left_MT, grad_TN, out_dtype=torch.float32)
    return left_MT.float() @ grad_TN.float()
