"""Changes of a program from outside: what each does to torch's constructors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from recperf.execution.program_changes import changed
from recperf.measure.program_facts import optimizer_facts


def train(model: nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss = model(ids).square().mean()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def test_a_table_gets_sparse_gradients_and_sparse_adam() -> None:
    ids = torch.arange(8)

    def losses() -> tuple[list[float], list[Any]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(1000, 4), nn.Linear(4, 2))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        values = [train(model, optimizer, ids) for _ in range(5)]
        return values, [model[0].weight.grad.is_sparse, [tuple(p.shape) for p in optimizer.param_groups[0]["params"]]]

    plain, before = losses()
    with changed({"sparse": [[1000, 4]]}):
        sparse, after = losses()
    assert before == [False, [(1000, 4), (2, 4), (2,)]]
    assert after == [True, [(2, 4), (2,)]]
    # The same rows are used in every step, so that both optimizers do the same to them.
    assert sparse == pytest.approx(plain, rel=1e-4)
    assert not nn.Embedding(1000, 4).sparse


def test_a_model_of_nothing_but_tables_keeps_an_optimizer() -> None:
    with changed({"sparse": [[1000, 4]]}):
        model = nn.Embedding(1000, 4)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        first, *_, last = (train(model, optimizer, torch.arange(8)) for _ in range(5))
    assert last < first


def test_loaders_get_another_batch_size() -> None:
    with changed({"batch_size": 8}):
        sizes = [loader.batch_size for loader in (DataLoader(range(64), 4), DataLoader(range(64), batch_size=None))]  # type: ignore[arg-type]
    assert sizes == [8, None]


def test_one_batch_comes_again_and_again_as_often_as_there_are_batches() -> None:
    with changed({"replay": True}):
        loader = DataLoader(range(10), 4)  # type: ignore[arg-type, var-annotated]
        epochs = [[batch.tolist() for batch in loader] for _ in range(2)]
    assert epochs == [[[0, 1, 2, 3]] * 3] * 2


def test_optimizers_run_another_way() -> None:
    weight = nn.Parameter(torch.ones(4))
    weight.grad = torch.ones(4)
    for way in ("fused", "foreach"):
        with changed({"optimizer": way}):
            optimizer = torch.optim.Adam([weight])
            optimizer.step()
        assert optimizer_facts(optimizer).way == way
    assert optimizer_facts(torch.optim.Adam([weight])).way == "for-loop"
    with changed({"optimizer": "fused"}):
        assert optimizer_facts(torch.optim.RMSprop([weight])).way == "for-loop", "it has no such option"


def test_loaders_gradients_and_threads() -> None:
    rows = list(range(8))
    with changed({"workers": 1, "zero_grad": True}):
        loader = DataLoader(rows, 2, False)
        assert (loader.num_workers, loader.batch_size, loader.persistent_workers) == (1, 2, True)
        weight = nn.Parameter(torch.ones(4))
        weight.grad = torch.ones(4)
        torch.optim.SGD([weight]).zero_grad(set_to_none=False)
        assert weight.grad is None
    assert DataLoader(rows, 2).num_workers == 0
    threads = torch.get_num_threads()
    try:
        with changed({"threads": 1}):
            torch.set_num_threads(2)
            assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)


def test_outermost_modules_compute_in_another_precision() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4)), torch.rand(8, 64)
    plain = model(x)
    with changed({"autocast": "bfloat16"}):
        low = model(x)
        with torch.no_grad():
            assert torch.equal(model(x), plain)
    assert low.dtype == torch.float32
    assert torch.equal(low, low.bfloat16().float())
    assert torch.allclose(low, plain, atol=0.02)
    assert torch.equal(model(x), plain)
