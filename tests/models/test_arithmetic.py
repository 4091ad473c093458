"""The fast MLPs against the plain ones: the same numbers in float32, close ones in bfloat16."""

from __future__ import annotations

import importlib

import pytest
import torch
from golden_cases import INTERPRETED, interpret

from recperf.data.batch import ClickBatch, JaggedFeatures
from recperf.models.arithmetic import Arithmetic, FastArithmetic, weight_gradient
from recperf.models.config import DLRMConfig
from recperf.models.dlrm import DLRM
from recperf.models.mlp import MLP
from recperf.ops.relu import native

interpret("relu")
# On a CPU without bfloat16 torch warns once that it uses another product.
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
needs_triton = pytest.mark.skipif(not INTERPRETED, reason="no triton, or a GPU, where tests/gpu runs the kernels")
needs_c = pytest.mark.skipif(isinstance(native.library(), str), reason=f"no C: {native.library()}")
BODIES = ["reference", pytest.param("native", marks=needs_c), pytest.param("triton", marks=needs_triton)]
WIDTHS = [(16, 8, 1), (13, 32, 16, 8)]


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


def fast(body: str = "reference", low: torch.dtype = torch.float32, *, copies: bool = False) -> FastArithmetic:
    return FastArithmetic(relu=importlib.import_module(f"recperf.ops.relu.{body}"), low=low, copies=copies)


def computed(
    arithmetic: Arithmetic, widths: tuple[int, ...], *, last_relu: bool, passes: int = 1, samples: int = 33
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Output and input gradient of the last pass, and the gradients of all parameters over all passes."""
    mlp = MLP(widths, last_relu=last_relu)
    mlp.reset(1, "mlp")
    with torch.no_grad():
        for bias in mlp.flat[1::2]:
            bias.uniform_(-0.3, 0.3, generator=torch.Generator().manual_seed(2))
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for _ in range(passes):
            x, gradient = (
                torch.randn(samples, widths[0], generator=draw),
                torch.randn(samples, widths[-1], generator=draw),
            )
            arithmetic.begin((mlp,))
            activations = arithmetic.forward(mlp, x)
            input_gradient = arithmetic.backward(mlp, gradient, activations, input_gradient=True)
            assert input_gradient is not None
            arithmetic.begin((mlp,))
            assert arithmetic.backward(mlp, gradient, arithmetic.forward(mlp, x), input_gradient=False) is None
    gradients = [parameter.grad for parameter in mlp.flat if parameter.grad is not None]
    assert len(gradients) == len(mlp.flat)
    return [activations[-1], input_gradient], gradients


@pytest.mark.parametrize("last_relu", [False, True])
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("body", BODIES)
def test_float32_is_the_plain_arithmetic(body: str, copies: bool, widths: tuple[int, ...], last_relu: bool) -> None:
    plain = computed(Arithmetic(), widths, last_relu=last_relu, passes=2)
    mine = computed(fast(body, copies=copies), widths, last_relu=last_relu, passes=2)
    for actual, expected in zip(mine[0] + mine[1], plain[0] + plain[1]):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6 * max(1.0, float(expected.abs().max())))


@pytest.mark.parametrize("last_relu", [False, True])
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("body", BODIES)
def test_bfloat16_is_near_float32(body: str, copies: bool, widths: tuple[int, ...], last_relu: bool) -> None:
    plain = computed(Arithmetic(), widths, last_relu=last_relu)
    values, gradients = computed(fast(body, torch.bfloat16, copies=copies), widths, last_relu=last_relu)
    assert {value.dtype for value in values} == {torch.bfloat16}
    for actual, expected in zip(values + gradients, plain[0] + plain[1]):
        error = (actual.float() - expected).norm() / expected.norm().clamp(min=1e-9)
        # A mantissa of 8 bits, and a ReLU that may open or close by rounding.
        assert float(error) < 0.05


@pytest.mark.parametrize("body", BODIES)
def test_weight_gradients_are_summed_in_float32(body: str) -> None:
    """The sum of 300 ones is 300 for weight and bias; in bfloat16 it would stop at 256."""
    mlp = MLP((1, 1), last_relu=True)
    with torch.no_grad():
        mlp.flat[0].fill_(1.0)
        mlp.flat[1].fill_(0.0)
        arithmetic, ones = fast(body, torch.bfloat16), torch.ones(300, 1)
        arithmetic.begin((mlp,))
        arithmetic.backward(mlp, ones, arithmetic.forward(mlp, ones), input_gradient=False)
    for parameter in mlp.flat:
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32
        assert float(parameter.grad) == 300.0
    low = torch.ones(300, 1, dtype=torch.bfloat16)
    assert [float(weight_gradient(low, low, rounded=rounded)) for rounded in (False, True)] == [300.0, 300.0]


@pytest.mark.parametrize("low", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("copies", [False, True])
def test_copies_follow_the_weights(low: torch.dtype, copies: bool) -> None:
    """After an update the next step must read the new weights, not the copies of the last one."""
    mlp, x = MLP((5, 4, 2), last_relu=False), torch.ones(3, 5)
    mlp.reset(1, "mlp")
    arithmetic = fast(low=low, copies=copies)
    with torch.no_grad():
        arithmetic.begin((mlp,))
        before = arithmetic.forward(mlp, x)[-1]
        for parameter in mlp.flat:
            parameter.mul_(2)
        arithmetic.begin((mlp,))
        after = arithmetic.forward(mlp, x)
        input_gradient = arithmetic.backward(mlp, torch.ones(3, 2), after, input_gradient=True)
        plain = Arithmetic()
        expected = plain.forward(mlp, x)
        expected_gradient = plain.backward(mlp, torch.ones(3, 2), expected, input_gradient=True)
    assert not torch.equal(before, after[-1])
    assert input_gradient is not None
    assert expected_gradient is not None
    tolerance = 1e-5 if low == torch.float32 else 5e-2
    torch.testing.assert_close(after[-1].float(), expected[-1], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(input_gradient.float(), expected_gradient, rtol=tolerance, atol=tolerance)


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
