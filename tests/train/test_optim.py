"""Dense optimizers and the one-cycle schedule equal torch's, the other schedules the public DLRM's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from recperf.train.config import one_cycle, settings_for_rows, warmup_decay
from recperf.train.optim import AdamW, DenseOptimizer, make_dense


def parameters(seed: int) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    draw = torch.Generator().manual_seed(seed)
    return (
        [nn.Parameter(torch.randn(20, 4, generator=draw))],
        [nn.Parameter(torch.randn(4, 3, generator=draw)), nn.Parameter(torch.randn(3, generator=draw))],
    )


def peer(name: str, tables: list[nn.Parameter], dense: list[nn.Parameter], eps: float) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(dense + tables, lr=1.0, fused=True)
    if name == "adamw":
        groups = [{"params": dense, "weight_decay": 0.01}, {"params": tables, "weight_decay": 0.5}]
        return torch.optim.AdamW(groups, fused=True, eps=eps)
    return torch.optim.Adagrad(dense + tables, eps=eps, fused=True)


def ours(
    name: str, tables: list[nn.Parameter], dense: list[nn.Parameter], eps: float, *, plain: bool
) -> DenseOptimizer:
    decays = (0.01, 0.5) if name == "adamw" else (0.0, 0.0)
    return make_dense(name, [(dense, decays[0]), (tables, decays[1])], eps=eps, plain=plain)


@pytest.mark.parametrize("as_rate", [float, lambda rate: torch.tensor([rate])])
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize(("name", "eps"), [("sgd", 0.0), ("rowwise-adagrad", 1e-2), ("adamw", 1e-8)])
def test_twenty_steps_equal_torchs(
    name: str, eps: float, plain: bool, as_rate: Callable[[float], float | torch.Tensor]
) -> None:
    tables, dense = parameters(0)
    their_tables, their_dense = parameters(0)
    mine, theirs = ours(name, tables, dense, eps, plain=plain), peer(name, their_tables, their_dense, eps)
    draw = torch.Generator().manual_seed(1)
    for step in range(20):
        rate = 1e-1 / (step + 1)
        for one, other in zip(tables + dense, their_tables + their_dense):
            one.grad = torch.randn(one.shape, generator=draw)
            other.grad = one.grad.clone()
        for group in theirs.param_groups:
            group["lr"] = rate
        assert [g.shape for g in mine.gradients()] == [p.shape for p in dense + tables]
        mine.step(as_rate(rate))
        theirs.step()
        assert all(p.grad is None for p in tables + dense)
    # A learning rate in a float32 tensor is rounded once more.
    exact = not plain and as_rate is float
    for one, other in zip(tables + dense, their_tables + their_dense):
        torch.testing.assert_close(one, other, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-6)


@pytest.mark.parametrize("plain", [False, True])
def test_averages_are_those_of_the_last_steps_and_change_places_with_the_parameters(plain: bool) -> None:
    tables, dense = parameters(0)
    averaging = AdamW([(dense + tables, 0.0)], average_steps=3, plain=plain)
    draw, expected, every = torch.Generator().manual_seed(1), torch.zeros(0), dense + tables
    averaging.exchange()
    for step in range(1, 7):
        for one in every:
            one.grad = torch.randn(one.shape, generator=draw)
        averaging.step(0.1)
        weights = torch.cat([one.detach().flatten() for one in every])
        # The mean of the first three steps, then a third of every new one.
        expected = weights if step == 1 else expected + (weights - expected) / min(step, 3)
    averaging.exchange()
    torch.testing.assert_close(torch.cat([one.detach().flatten() for one in every]), expected)
    averaging.exchange()
    assert torch.equal(torch.cat([one.detach().flatten() for one in every]), weights)


@pytest.mark.parametrize("total", [10, 313])
def test_one_cycle_equals_torchs(total: int) -> None:
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=5e-3, total_steps=total, pct_start=0.3, cycle_momentum=False
    )
    for step in range(total):
        assert one_cycle(step, total, peak=5e-3, rise=0.3) == pytest.approx(schedule.get_last_lr()[0], rel=1e-9)
        optimizer.step()
        if step < total - 1:
            schedule.step()


class PublicPolicy:
    """The public DLRM's schedule with its state: it counts from 1 and holds the last rate."""

    def __init__(self, base: float, warmup: int, decay_start: int, decay_steps: int) -> None:
        self.base, self.warmup, self.decay_start, self.decay_steps = base, warmup, decay_start, decay_steps
        self.count, self.last = 0, base

    def next(self) -> float:
        self.count += 1
        if self.count < self.warmup:
            return self.base * (1.0 - (self.warmup - self.count) / self.warmup)
        if self.decay_start <= self.count < self.decay_start + self.decay_steps:
            gone = self.count - self.decay_start
            self.last = max(1e-7, self.base * ((self.decay_steps - gone) / self.decay_steps) ** 2)
            return self.last
        return self.last if self.decay_steps and self.count >= self.decay_start else self.base


@pytest.mark.parametrize(
    ("warmup", "decay_start", "decay_steps"),
    [(0, 0, 0), (5, 0, 0), (0, 3, 7), (8, 12, 20)],
)
def test_warm_up_and_decay_equal_the_public_ones(warmup: int, decay_start: int, decay_steps: int) -> None:
    peak = 0.1
    theirs = PublicPolicy(peak, warmup, decay_start, decay_steps)
    for step in range(60):
        ours = warmup_decay(step, peak=peak, warmup=warmup, decay_start=decay_start, decay_steps=decay_steps)
        assert ours == pytest.approx(theirs.next(), rel=1e-12)


def test_the_decay_stops_at_its_floor_and_never_raises_a_small_rate() -> None:
    assert warmup_decay(99, peak=1e-4, warmup=0, decay_start=1, decay_steps=100) == 1e-7
    assert warmup_decay(5000, peak=1e-4, warmup=0, decay_start=1, decay_steps=100) == 1e-7
    assert warmup_decay(99, peak=1e-9, warmup=0, decay_start=1, decay_steps=100) == 1e-9


def test_a_step_on_few_rows_of_own_data_does_not_turn_table_rows_around() -> None:
    decayed = [one["learning_rate"] * one["table_weight_decay"] for one in map(settings_for_rows, (1, 50, 160, 10_000))]
    assert decayed == pytest.approx([0.5, 0.5, 0.5, 0.064], rel=0.01)
