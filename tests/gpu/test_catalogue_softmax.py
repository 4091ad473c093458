"""The softmax over a catalogue compiled for a GPU, against torch in float64, on memory that holds NaN before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from recperf.models.next_item.softmax import full_loss
from recperf.ops.catalogue_softmax import Masks, softmax_loss, top

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
    pytest.mark.usefixtures("poisoned", "exact_products"),
]
TEMPERATURE = 0.05


def drawn(positions: int, items: int, width: int, kind: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    of: dict[str, Any] = {"device": "cuda", "generator": torch.Generator("cuda").manual_seed(width)}
    users, rows = (F.normalize(torch.randn(count, width, **of), dim=1).to(kind) for count in (positions, items))
    return users.requires_grad_(), rows.requires_grad_(), torch.randint(items, (positions,), **of)


def apart(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize(("kind", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 6e-3)])
@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize(
    ("positions", "items", "width"),
    [(1, 63, 96), (5, 1, 16), (1000, 5000, 96), (300, 777, 50), (257, 3001, 256), (63, 9999, 64), (400, 700, 128)],
)
def test_losses_and_gradients(
    positions: int, items: int, width: int, bounded: bool, kind: torch.dtype, limit: float, no_waiting: Any
) -> None:
    users, rows, targets = drawn(positions, items, width, kind)

    def both() -> tuple[Tensor, ...]:
        loss = softmax_loss(users, rows, targets, temperature=TEMPERATURE, bounded=bounded, impl="triton")
        return loss.detach(), *torch.autograd.grad(loss, (users, rows))

    both()
    with no_waiting():
        ours, again = both(), both()
    assert all(map(torch.equal, ours, again))
    leaves = [one.detach().double().requires_grad_() for one in (users, rows)]
    loss = F.cross_entropy(leaves[0] @ leaves[1].t() / TEMPERATURE, targets)
    if items > 1:
        for got, expected in zip(ours, (loss.detach(), *torch.autograd.grad(loss, leaves))):
            assert apart(got, expected) < limit


def test_bias_masks_and_weights() -> None:
    users, rows, targets = drawn(300, 2000, 96, torch.bfloat16)
    bias = torch.randn(2000, device="cuda").requires_grad_()
    hidden = torch.rand(7, 2000, device="cuda") < 0.3
    masks_T, weights = torch.randint(7, (300,), device="cuda"), torch.rand(300, device="cuda")
    offsets = F.pad(hidden.sum(1).cumsum(0), (1, 0))
    masks = Masks(offsets, hidden.nonzero()[:, 1], masks_T)
    loss = softmax_loss(
        users, rows, targets, temperature=0.2, bias_I=bias, masks=masks, weights_T=weights, smoothing=0.1
    )
    ours = loss.detach(), *torch.autograd.grad(loss, (users, rows, bias))
    leaves = [one.detach().double().requires_grad_() for one in (users, rows, bias)]
    hidden = hidden[masks_T].scatter(1, targets[:, None], False)
    logs = (leaves[0] @ leaves[1].t() / 0.2 + leaves[2]).masked_fill(hidden, -torch.inf).log_softmax(1)
    even = logs.masked_fill(hidden, 0).sum(1) / (~hidden).sum(1)
    expected = -((0.9 * logs.gather(1, targets[:, None]).squeeze(1) + 0.1 * even) * weights).sum()
    for got, right in zip(ours, (expected.detach(), *torch.autograd.grad(expected, leaves))):
        assert apart(got, right) < 1e-2


def test_items_in_host_memory_give_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recperf.ops.catalogue_softmax.STREAMED", 1000)
    users, rows, targets = drawn(500, 3300, 96, torch.float32)
    host = rows.detach().cpu().pin_memory().requires_grad_()
    results = []
    for items in (rows, host):
        loss = softmax_loss(users, items, targets, temperature=TEMPERATURE, bounded=True)
        results.append([loss.detach(), *(one.cuda() for one in torch.autograd.grad(loss, (users, items)))])
    for streamed, whole in zip(*results):
        assert apart(streamed, whole.double()) < 1e-5


def test_memory_is_that_of_inputs_and_gradients() -> None:
    users, rows, targets = drawn(4096, 400_000, 96, torch.bfloat16)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = softmax_loss(users, rows, targets, temperature=TEMPERATURE, bounded=True)
    torch.autograd.grad(loss, (users, rows))
    # The scores alone are 3.3 GB; the gradient of the items is summed in float32.
    assert torch.cuda.max_memory_allocated() - before < 3 * 2 * rows.nbytes


def test_a_cuda_graph_replays_it() -> None:
    users, rows, targets = drawn(300, 2000, 96, torch.bfloat16)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step = lambda: torch.autograd.grad(  # noqa: E731
            softmax_loss(users, rows, targets, temperature=TEMPERATURE, bounded=True), (users, rows)
        )
        expected = [one.clone() for one in step()]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = step()
        graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, captured, expected))


def test_the_highest_scores() -> None:
    users, rows, targets = (one.detach() for one in drawn(200, 150_000, 64, torch.float32))
    for items in (rows, rows.cpu()):
        scores, numbers, reached = top(users, items, 20, targets_T=targets)
        right, order = (users @ rows.t()).sort(dim=1, descending=True, stable=True)
        torch.testing.assert_close(scores, right[:, :20])
        assert (numbers == order[:, :20]).float().mean() > 0.999
        assert reached is not None
        own = (order == targets[:, None]).nonzero()[:, 1] + 1
        assert (reached == own).float().mean() > 0.99


def test_next_items_in_bfloat16_use_the_kernel_and_come_close() -> None:
    users, rows, targets = (one.detach() for one in drawn(300, 2000, 96, torch.float32))
    losses = []
    for low in (False, True):
        leaves = [one.clone().requires_grad_() for one in (users, rows)]
        loss = full_loss(leaves[0], leaves[1], targets, TEMPERATURE, low=low)
        losses.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    for rounded, exact in zip(losses[1], losses[0]):
        assert rounded.dtype == torch.float32
        assert 0 < apart(rounded, exact.double()) < 2e-2
