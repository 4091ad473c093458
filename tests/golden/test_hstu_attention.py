"""Our attention against the public HSTU's: the output and every gradient, by every implementation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from golden_cases import INTERPRETED, cases, close, interpret

from recperf.ops.hstu_attention import Mask, attention, choose

interpret("hstu_attention")
pytestmark = pytest.mark.usefixtures("interpreter")
CASES = cases("hstu_attention")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
needs_triton = pytest.mark.skipif(DEVICE.type == "cpu" and not INTERPRETED, reason="no triton")
BODIES = ["reference", pytest.param("triton", marks=needs_triton)]


def mask_of(case: dict[str, torch.Tensor]) -> Mask:
    return Mask(
        alpha=float(case["alpha"]),
        length=int(case["max_seq_len"]),
        longest=int(case["offsets"].diff().max()),
        targets_B=case["num_targets"] if case["num_targets"].numel() else None,
        window=int(case["max_attn_len"]),
        context=int(case["contextual_seq_len"]),
    )


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("path", CASES)
def test_the_output_and_the_gradients_are_the_public_ones(path: Path, body: str) -> None:
    case = {name: torch.from_numpy(array).to(DEVICE) for name, array in np.load(path).items()}
    inputs = [case[name].requires_grad_() for name in "qkv"]
    out = attention(*inputs, case["offsets"], mask_of(case), impl=body)  # type: ignore[arg-type]
    out.backward(case["grad_out"])
    for name, actual in zip(("out", "dq", "dk", "dv"), (out, *(tensor.grad for tensor in inputs))):
        assert actual is not None
        close(actual, case[name], name)


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("path", CASES)
def test_the_last_token_alone_gets_the_public_output(path: Path, body: str) -> None:
    case = {name: torch.from_numpy(array).to(DEVICE) for name, array in np.load(path).items()}
    lengths = case["offsets"].diff()
    # Rows without tokens have no last token.
    offsets = torch.cat([case["offsets"][:1], case["offsets"][1:][lengths > 0]])
    targets = case["num_targets"][lengths > 0] if case["num_targets"].numel() else case["num_targets"]
    last = offsets[1:] - 1
    implementation, _ = choose(body, DEVICE)  # type: ignore[arg-type]
    out = implementation.forward_last(
        case["q"][last], case["k"], case["v"], offsets, mask_of(case | {"offsets": offsets, "num_targets": targets})
    )
    close(out, case["out"][last])
