"""Which parts of a model learned: a frozen one did not, and neither did one that only decayed."""

from __future__ import annotations

import torch
from torch import nn

from recperf.learn.movement import ROWS, moved, sampled


def test_a_frozen_part_and_one_that_only_decayed_did_not_move() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(6, 5) for name in ("learns", "frozen", "decayed")})
    # A checkpoint may have averages in place of the weights.
    averages = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    start = sampled(model, [], averages)
    with torch.no_grad():
        model["learns"].weight += 0.1 * torch.randn(5, 6)
        for _ in range(500):
            model["decayed"].weight *= 0.999
    seen = {part.name: part for part in moved(start)}
    assert seen["learns.weight"].moved == 1
    assert seen["frozen.weight"].moved == seen["decayed.weight"].moved == 0
    assert seen["decayed.weight"].distance > 0.3
    assert {part.kind for part in seen.values()} == {"weight", "vector"}


def test_stacked_tables_are_parts_of_their_own_and_no_random_number_is_drawn() -> None:
    state, before = {"tables.weight_RD": torch.rand(3 * ROWS, 4)}, torch.get_rng_state()
    start = sampled(None, [("user", 2 * ROWS), ("item", ROWS)], state)
    state["tables.weight_RD"][: 2 * ROWS] += torch.rand(2 * ROWS, 4, generator=torch.Generator().manual_seed(1))
    user, item = moved(start)
    assert torch.equal(torch.get_rng_state(), before)
    assert (user.name, user.rows, user.moved) == ("tables.user", ROWS, 1)
    assert (item.name, item.rows, item.moved) == ("tables.item", ROWS, 0)
