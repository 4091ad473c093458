"""The fast MLPs against the plain ones: the same numbers in float32, close ones in bfloat16."""

from __future__ import annotations

import importlib

import pytest
import torch
from golden_cases import INTERPRETED, interpret

from recperf.data.batch import ClickBatch, JaggedFeatures
from recperf.models.arithmetic import Arithmetic, FastArithmetic
from recperf.models.config import DLRMConfig
from recperf.models.dlrm import DLRM
from recperf.ops.relu import native

interpret("relu")
# On a CPU without bfloat16 torch warns once that it uses another product.
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
needs_triton = pytest.mark.skipif(not INTERPRETED, reason="no triton, or a GPU, where tests/gpu runs the kernels")
needs_c = pytest.mark.skipif(isinstance(native.library(), str), reason=f"no C: {native.library()}")
BODIES = ["reference", pytest.param("native", marks=needs_c), pytest.param("triton", marks=needs_triton)]


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


def fast(body: str = "reference", low: torch.dtype = torch.float32, *, copies: bool = False) -> FastArithmetic:
    return FastArithmetic(relu=importlib.import_module(f"recperf.ops.relu.{body}"), low=low, copies=copies)


@pytest.mark.parametrize("interaction", ["dot", "concat", "dcn"])
@pytest.mark.parametrize(("low", "copies"), [(torch.float32, False), (torch.float32, True), (torch.bfloat16, True)])
@pytest.mark.parametrize("body", BODIES[:2])
def test_a_whole_step_is_the_plain_one(body: str, low: torch.dtype, copies: bool, interaction: str) -> None:
    """Also where the ReLU overwrites the gradient that is passed to it."""
    config = DLRMConfig(
        features=("a", "b"), rows=(5, 7), dim=3, bottom=(5, 6, 3), top=(9, 1), interaction=interaction,
        cross_layers=2, cross_rank=2, table_init_std=0.5,
    )  # fmt: skip
    draw = torch.Generator().manual_seed(0)
    bags = [[[1, 2], [], [4], [3, 3]], [[6], [5], [], [0, 1]]]
    batch = ClickBatch(
        torch.randn(4, 5, generator=draw), JaggedFeatures.from_bags(("a", "b"), bags), torch.tensor([1.0, 0, 1, 0])
    )
    results = []
    for arithmetic in (Arithmetic(), fast(body, low, copies=copies)):
        model = DLRM(config, seed=1, arithmetic=arithmetic)
        loss = model.loss(batch)
        loss.backward()
        results.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    tolerance = 1e-5 if low == torch.float32 else 5e-2
    for expected, actual in zip(*results):
        assert actual.dtype == torch.float32
        assert actual.shape == expected.shape
        assert float((actual - expected).norm()) <= tolerance * float(expected.norm()) + 1e-7
