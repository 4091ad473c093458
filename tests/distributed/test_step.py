"""Dense gradients in buckets, by a rank that is alone: what is sent when, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

from recperf.distributed import step
from recperf.distributed.ranks import Ranks
from recperf.distributed.step import Reduction
from recperf.models.mlp import add_gradient
from recperf.stop import SIGNALS

FLAGS = len(SIGNALS) + 1


def named(*parameters: nn.Parameter) -> dict[str, nn.Parameter]:
    return {f"layer{number}.weight": parameter for number, parameter in enumerate(parameters)}


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many numbers each all-reduce has; its sum over two equal ranks."""
    counts: list[int] = []

    def doubled(tensor: Tensor, async_op: bool) -> Any:
        counts.append(tensor.numel())
        tensor.mul_(2)
        return SimpleNamespace(wait=lambda: True)

    monkeypatch.setattr(distributed, "all_reduce", doubled)
    monkeypatch.setattr(step, "BUCKET_BYTES", 4 * 3)
    return counts


@pytest.mark.parametrize("written_out", [True, False])
def test_a_bucket_is_sent_when_its_last_gradient_is_there(sent: list[int], written_out: bool) -> None:
    parameters = [nn.Parameter(torch.ones(size)) for size in (1, 2, 3)]
    reduction = Reduction(named(*parameters), Ranks(), overlap=True)

    def backward(index: int) -> None:
        if written_out:
            add_gradient(parameters[index], torch.full_like(parameters[index], index + 1.0))
        else:
            ((index + 1) * parameters[index].sum()).backward()  # type: ignore[no-untyped-call]

    for number in range(3):
        sent.clear()
        reduction.begin(torch.tensor(5.0))
        during = []
        # The middle one has two gradients, which add up.
        for index in (2, 1, 0, 1):
            backward(index)
            during.append(list(sent))
        assert reduction() == 10
        # The first step learns the order, and sends the same messages after its backward pass.
        assert during == ([[FLAGS]] * 4 if number == 0 else [[FLAGS, 3]] * 3 + [[FLAGS, 3, 4]])
        assert sent == [FLAGS, 3, 4]
        assert [parameter.grad.tolist() for parameter in parameters if parameter.grad is not None] == [
            [2.0], [8.0, 8.0], [6.0] * 3,
        ]  # fmt: skip
        for parameter in parameters:
            parameter.grad = None
    # Outside of a step nothing is sent.
    sent.clear()
    backward(0)
    assert sent == []


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("first", [(0, 1), (0,)])
def test_gradients_that_come_and_go_are_an_error(sent: list[int], overlap: bool, first: tuple[int, ...]) -> None:
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    reduction = Reduction(named(*parameters), Ranks(), overlap=overlap)

    def take(indices: tuple[int, ...]) -> None:
        reduction.begin(torch.tensor(0.0))
        for index in indices:
            add_gradient(parameters[index], torch.ones(2))
        reduction()
        for parameter in parameters:
            parameter.grad = None

    take(first)
    take(first)
    with pytest.raises(RuntimeError, match=r"this step computed others: layer1\.weight\. Use every parameter"):
        take((0,) if len(first) == 2 else (0, 1))
