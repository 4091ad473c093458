from __future__ import annotations

import pytest
import torch
from torch import nn

from recperf.train.optim import AdamW, one_cycle


def parameters(seed: int) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    draw = torch.Generator().manual_seed(seed)
    return (
        [nn.Parameter(torch.randn(20, 4, generator=draw))],
        [nn.Parameter(torch.randn(4, 3, generator=draw)), nn.Parameter(torch.randn(3, generator=draw))],
    )


def test_steps_are_those_of_torchs_fused_adamw() -> None:
    tables, dense = parameters(0)
    ours = AdamW([(dense, 0.01), (tables, 0.5)])
    their_tables, their_dense = parameters(0)
    theirs = torch.optim.AdamW(
        [{"params": their_dense, "weight_decay": 0.01}, {"params": their_tables, "weight_decay": 0.5}], fused=True
    )
    draw = torch.Generator().manual_seed(1)
    for step in range(20):
        rate = 1e-2 / (step + 1)
        for mine, other in zip(tables + dense, their_tables + their_dense):
            mine.grad = torch.randn(mine.shape, generator=draw)
            other.grad = mine.grad.clone()
        for group in theirs.param_groups:
            group["lr"] = rate
        ours.step(rate)
        theirs.step()
        assert all(p.grad is None for p in tables + dense)
    for mine, other in zip(tables + dense, their_tables + their_dense):
        assert torch.equal(mine, other)


def test_state_goes_through_a_save() -> None:
    tables, dense = parameters(0)
    one = AdamW([(dense, 0.01), (tables, 0.5)])
    other_tables, other_dense = parameters(0)
    other = AdamW([(other_dense, 0.01), (other_tables, 0.5)])
    for step in range(6):
        if step == 3:
            other.load_state_dict(one.state_dict())
            for mine, theirs in zip(other_tables + other_dense, tables + dense):
                mine.data.copy_(theirs.data)
        for pair in zip(tables + dense, other_tables + other_dense):
            for parameter in pair:
                parameter.grad = torch.full_like(parameter, 0.1 * (step + 1))
        one.step(1e-2)
        if step >= 3:
            other.step(1e-2)
    assert all(torch.equal(a, b) for a, b in zip(tables + dense, other_tables + other_dense))


@pytest.mark.parametrize("total", [10, 313, 3130])
def test_one_cycle_is_torchs(total: int) -> None:
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


def test_one_cycle_of_a_single_step_is_defined() -> None:
    assert one_cycle(0, 1, peak=1.0, rise=0.3) == pytest.approx(1 / 25)
