"""Dense optimizers on a GPU: torch's numbers, and a captured step that rereads its rate."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from recperf.train.optim import DenseOptimizer, make_dense

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")

NAMES = ["sgd", "adagrad", "adamw"]


def parameters() -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(*shape, generator=draw).cuda()) for shape in ((70, 33), (33,))]


def gradients(step: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(100 + step)
    return [torch.randn(p.shape, generator=draw).cuda() for p in parameters()]


def ours(name: str, given: list[nn.Parameter], *, plain: bool = False) -> DenseOptimizer:
    return make_dense(name, [(given, 0.1 if name == "adamw" else 0.0)], plain=plain)


def torchs(name: str, steps: int) -> list[nn.Parameter]:
    given = parameters()
    kinds = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adamw": torch.optim.AdamW}
    more = {"adagrad": {"eps": 1e-8}, "adamw": {"weight_decay": 0.1}}.get(name, {})
    optimizer = kinds[name](given, lr=1.0, foreach=False, **more)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        for parameter, gradient in zip(given, gradients(step)):
            parameter.grad = gradient
        optimizer.step()
    return given


def rate(step: int) -> float:
    return 0.1 / (step + 1)


def close(one: list[nn.Parameter], other: list[nn.Parameter]) -> None:
    for mine, theirs in zip(one, other, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_twenty_steps_are_torchs(name: str, on_device: bool, plain: bool) -> None:
    given = parameters()
    optimizer = ours(name, given, plain=plain)
    for step in range(20):
        for parameter, gradient in zip(given, gradients(step)):
            parameter.grad = gradient
        optimizer.step(torch.tensor([rate(step)], device="cuda") if on_device else rate(step))
    close(given, torchs(name, 20))


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_captured_step_takes_the_rate_of_each_replay(name: str, plain: bool) -> None:
    given = parameters()
    optimizer = ours(name, given, plain=plain)
    rate_1 = torch.zeros(1, device="cuda")
    inputs = gradients(0)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for parameter, held in zip(given, inputs):
            # A copy: a step may use a gradient up.
            parameter.grad = held.clone()
        optimizer.step(rate_1)
    for step in range(6):
        rate_1.fill_(rate(step))
        for held, gradient in zip(inputs, gradients(step)):
            held.copy_(gradient)
        graph.replay()
    close(given, torchs(name, 6))
