"""Checkpoints of GPU tensors: copied in the background, read straight into existing tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiered_states import STACKED, D, R, Table, draws

from recperf.train.checkpoint import CheckpointStore

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")

ROWS, WIDTH = 300_000, 64
"""A table of 77 MB: several chunks."""


def state(seed: int) -> dict[str, dict[str, torch.Tensor | int]]:
    generator = torch.Generator("cuda").manual_seed(seed)
    table = torch.randn(ROWS, WIDTH, device="cuda", generator=generator)
    small = torch.randn(7, device="cuda", generator=generator, dtype=torch.float64)
    return {"trial": {"table": table, "half": table[:1000].bfloat16(), "small": small, "step": 3, "host": small.cpu()}}


@pytest.mark.parametrize("background", [False, True])
def test_a_state_is_read_into_existing_tensors(background: bool, tmp_path: Path) -> None:
    saved, existing = state(1), state(2)
    with CheckpointStore(folder=tmp_path / "kept", notice=print, background=background) as store:
        store.save(5, saved, best=True)
        if background:
            # As the next step does, while the thread still writes.
            saved["trial"]["table"].add_(1.0)  # type: ignore[union-attr]
        loaded = store.load(into=existing)
    assert loaded is not None
    for name, value in state(1)["trial"].items():
        back = loaded["trial"][name]
        if isinstance(value, torch.Tensor):
            assert back is not value
            assert back.device == value.device
            assert back.data_ptr() == existing["trial"][name].data_ptr()  # type: ignore[union-attr]
            assert torch.equal(back, value), name
        else:
            assert back == value


def test_rows_in_tiers_are_read_into_tensors_of_a_gpu(tmp_path: Path) -> None:
    table, store = Table(STACKED), CheckpointStore(folder=tmp_path / "kept", notice=print)
    table.train(torch.arange(0, R, 2), draws())
    store.save(1, {"trial": table.state}, best=False)
    into = {"tables.t": torch.ones(R, D, device="cuda"), "tables.t_state": torch.ones(R, device="cuda")}
    loaded = store.load(into={"trial": into})
    assert loaded is not None
    for name, expected in table.plain().items():
        assert loaded["trial"][name].data_ptr() == into[name].data_ptr()
        assert torch.equal(into[name].cpu(), expected), name
