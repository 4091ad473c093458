"""Updates of the rows a step used, against torch's optimizers on dense gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from golden_cases import INTERPRETED, interpret
from torch import nn

from recperf.data.batch import JaggedFeatures
from recperf.models.tables import SparseTables
from recperf.ops.bag import native
from recperf.train.optim import make_dense
from recperf.train.sparse import SparseRows, SplitOptimizer

interpret("bag")
needs_native = pytest.mark.skipif(isinstance(native.library(), str), reason=str(native.library()))
needs_triton = pytest.mark.skipif(not INTERPRETED, reason="no triton, or a GPU, where tests/gpu runs the kernels")
ALL = ["reference", pytest.param("native", marks=needs_native), pytest.param("triton", marks=needs_triton)]
KEYS, ROWS, DIM, SAMPLES = ("a", "b"), (6, 40), 3, 5


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


def made(bag: Any) -> SparseTables:
    tables = SparseTables(KEYS, ROWS, DIM, bag=bag)
    tables.reset(0.5, seed=3)
    return tables


def step_of(seed: int) -> tuple[JaggedFeatures, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (2, SAMPLES), generator=draw).tolist()
    bags = [[torch.randint(0, r, (n,), generator=draw).tolist() for n in feature] for r, feature in zip(ROWS, lengths)]
    return JaggedFeatures.from_bags(KEYS, bags), torch.randn(2, SAMPLES, DIM, generator=draw)


def dense_gradient(tables: SparseTables, features: JaggedFeatures, gradient: torch.Tensor) -> torch.Tensor:
    rows = tables.rows_of(features)
    per_id = gradient.reshape(-1, DIM).repeat_interleave(features.offsets_FB1.diff(), dim=0)
    return torch.zeros_like(tables.table_RD).index_add_(0, rows, per_id)


def rate(step: int) -> float:
    return 0.1 / (step + 1)


@pytest.mark.parametrize("kind", ["sgd", "adagrad"])
@pytest.mark.parametrize("bag", ALL)
def test_ten_steps_equal_torchs(bag: str, kind: str) -> None:
    """SGD and element-wise Adagrad, with which a dense optimizer does not change unused rows either."""
    tables = made(bag)
    weight = nn.Parameter(tables.table_RD.clone())
    peer: Any = torch.optim.SGD([weight], lr=1.0)
    if kind == "adagrad":
        peer = torch.optim.Adagrad([weight], lr=1.0, eps=1e-6)
    sparse = SparseRows(tables, adagrad=kind == "adagrad", each=True, eps=1e-6)
    for step in range(10):
        features, gradient = step_of(step)
        tables.backward(tables.record(features)[1], features, gradient)
        sparse.step(rate(step) if step % 2 else torch.tensor([rate(step)]))
        weight.grad = dense_gradient(tables, features, gradient)
        peer.param_groups[0]["lr"] = rate(step)
        peer.step()
    torch.testing.assert_close(tables.table_RD, weight.detach(), rtol=1e-5, atol=1e-6)
    if kind == "adagrad":
        torch.testing.assert_close(sparse.state_R, peer.state[weight]["sum"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bag", ALL)
def test_row_wise_adagrad_sums_the_mean_square_of_a_row(bag: str) -> None:
    decay = 0.3
    tables = made(bag)
    weight, state = tables.table_RD.clone(), torch.zeros(sum(ROWS))
    sparse = SparseRows(tables, adagrad=True, eps=1e-6, decay=decay)
    for step in range(5):
        features, gradient = step_of(step)
        tables.backward(tables.record(features)[1], features, gradient)
        sparse.step(rate(step), scale=0.5)
        whole = dense_gradient(tables, features, gradient) * 0.5
        used = torch.zeros(sum(ROWS), dtype=torch.bool)
        used[tables.rows_of(features)] = True
        state += whole.square().mean(1)
        weight[used] *= 1 - rate(step) * decay
        weight -= rate(step) * whole / (state.sqrt() + 1e-6)[:, None]
    assert sparse.state_R is not None
    assert sparse.state_R.shape == (sum(ROWS),)
    torch.testing.assert_close(sparse.state_R, state, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(tables.table_RD, weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [{"adagrad": False}, {"adagrad": True, "each": True}], ids=str)
@pytest.mark.parametrize("bag", ALL)
def test_slices_before_one_update_are_one_step(bag: str, kind: dict[str, bool]) -> None:
    results = []
    for together in (True, False):
        tables = made(bag)
        sparse = SparseRows(tables, **kind)
        features, gradient = step_of(8)
        for first, last in ((0, SAMPLES),) if together else ((0, 1), (1, 3), (3, SAMPLES)):
            part = features.slice(first, last)
            tables.backward(tables.record(part)[1], part, gradient[:, first:last])
        sparse.step(0.1)
        results.append(tables.table_RD)
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


@needs_triton
def test_scattered_sgd_equals_sgd_and_needs_it() -> None:
    results = []
    for scatter in (True, False):
        tables = made("triton")
        sparse = SparseRows(tables, adagrad=False, scatter=scatter)
        assert tables.group_early is not scatter
        for step in range(3):
            features, gradient = step_of(step)
            tables.backward(tables.record(features)[1], features, gradient)
            sparse.step(rate(step))
            assert tables.used == []
        results.append(tables.table_RD)
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)
    for wrong in ({"adagrad": True}, {"adagrad": False, "decay": 0.1}):
        with pytest.raises(ValueError, match="scatter needs SGD without weight decay"):
            SparseRows(made("triton"), scatter=True, **wrong)


def test_both_parts_follow_one_schedule_and_can_be_saved() -> None:
    def built() -> tuple[SparseTables, nn.Parameter, SplitOptimizer]:
        tables, weight = made("reference"), nn.Parameter(torch.ones(2, 2))
        dense = make_dense("adagrad", [([weight], 0.0)])
        return tables, weight, SplitOptimizer(dense, SparseRows(tables, adagrad=True, each=True), table_ratio=2.0)

    def step(training: tuple[SparseTables, nn.Parameter, SplitOptimizer], seed: int) -> None:
        tables, weight, optimizer = training
        features, gradient = step_of(seed)
        tables.backward(tables.record(features)[1], features, gradient)
        weight.grad = torch.full((2, 2), 0.5)
        optimizer.step(0.1)

    straight, again = built(), built()
    for seed in (0, 1):
        step(straight, seed)
    step(again, 0)
    resumed = built()
    resumed[0].load_state_dict(again[0].state_dict())
    resumed[1].data.copy_(again[1].data)
    resumed[2].load_state_dict(again[2].state_dict())
    step(resumed, 1)
    assert torch.equal(resumed[0].table_RD, straight[0].table_RD)
    assert torch.equal(resumed[1], straight[1])
    # The first step of Adagrad equals the learning rate, whatever the gradient: tables move twice as far.
    start, first = made("reference").table_RD, again[0].table_RD
    moved = (first - start).abs()
    assert float(moved.max()) == pytest.approx(0.2, rel=1e-3)
    assert float((again[1].detach() - 1).abs().max()) == pytest.approx(0.1, rel=1e-3)


def test_clipping_counts_both_parts() -> None:
    tables, weight = made("reference"), nn.Parameter(torch.zeros(3))
    start = tables.table_RD.clone()
    clip = SplitOptimizer(make_dense("sgd", [([weight], 0.0)]), SparseRows(tables, adagrad=False), clip=0.5)
    features, gradient = step_of(2)
    tables.backward(tables.record(features)[1], features, gradient)
    whole = dense_gradient(tables, features, gradient)
    weight.grad = torch.full((3,), 2.0)
    norm = float((whole.square().sum() + 12.0).sqrt())
    clip.step(1.0)
    torch.testing.assert_close(weight.detach(), torch.full((3,), -2.0 * 0.5 / norm))
    torch.testing.assert_close(tables.table_RD, start - whole * 0.5 / norm)
