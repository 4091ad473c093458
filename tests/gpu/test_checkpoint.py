"""Checkpoints of GPU tensors: copied in the background, read straight into existing tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiered_states import STACKED, D, R, Table, draws

from recperf.execution.training import _random_state, _set_random_state
from recperf.train.checkpoint import CheckpointStore
from recperf.train.metrics import Tally

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


def test_a_second_save_reuses_the_pinned_copies(tmp_path: Path) -> None:
    with CheckpointStore(folder=tmp_path / "kept", notice=print, background=True) as store:
        store.save(1, state(1), best=True)
        store.wait()
        places = {name: copy.data_ptr() for name, copy in store._host_copies.items()}
        assert all(copy.is_pinned() for name, copy in store._host_copies.items() if name != "trial/host")
        store.save(2, state(2), best=True)
        store.wait()
        assert places == {name: copy.data_ptr() for name, copy in store._host_copies.items()}
        loaded = store.load()
    assert loaded is not None
    assert torch.equal(loaded["trial"]["table"], state(2)["trial"]["table"].cpu())  # type: ignore[union-attr]


def test_the_generators_of_a_gpu_go_on_where_they_were() -> None:
    torch.manual_seed(9)
    torch.rand(3, device="cuda")
    kept = _random_state()
    wanted = torch.rand(5, device="cuda"), torch.rand(5)
    torch.manual_seed(10)
    _set_random_state(kept)
    assert torch.equal(torch.rand(5, device="cuda"), wanted[0])
    assert torch.equal(torch.rand(5), wanted[1])


def test_a_tally_counts_as_on_the_host() -> None:
    logits = 3 * torch.randn(100_000, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    labels = (torch.rand(100_000, generator=torch.Generator().manual_seed(4)) < logits.sigmoid()).double()
    here, there = Tally(), Tally(device="cuda")
    for part in range(0, 100_000, 9_000):
        chosen = slice(part, part + 9_000)
        here.add(logits[chosen], labels[chosen])
        there.add(logits[chosen].cuda(), labels[chosen].cuda())
    wanted, loaded = here.metrics(), there.metrics()
    assert wanted is not None
    assert loaded is not None
    # A logit at a bin's edge may fall to either side: exponentials of two devices differ in the last bit.
    assert int((here.counts_2K != there.counts_2K.cpu()).sum()) <= 4
    for name, value in wanted.items():
        assert loaded[name] == pytest.approx(value, rel=1e-9), name


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
