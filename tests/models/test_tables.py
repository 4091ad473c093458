"""Tables with a sparse gradient have the values and gradients of dense ones; their initial rows all differ."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from golden_cases import BAGS, interpret
from torch import Tensor

from recperf.data.batch import ClickBatch, JaggedFeatures
from recperf.errors import DataError
from recperf.models import init
from recperf.models.embeddings import StackedTables
from recperf.models.init import InitialRows
from recperf.models.tables import HashedTable, SparseTables
from recperf.ops.hashing import rows_torch

interpret("bag")
pytestmark = pytest.mark.usefixtures("interpreter")

KEYS, ROWS, DIM = ("a", "b", "c"), (5, 1, 30), 4


def batch(seed: int = 0, samples: int = 5) -> ClickBatch:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (len(KEYS), samples), generator=draw).tolist()
    bags = [[torch.randint(0, r, (n,), generator=draw).tolist() for n in feature] for r, feature in zip(ROWS, lengths)]
    labels = torch.randint(0, 2, (samples,), generator=draw).float()
    return ClickBatch(torch.randn(samples, 3, generator=draw), JaggedFeatures.from_bags(KEYS, bags), labels)


def one_id(samples: int = 5) -> JaggedFeatures:
    return JaggedFeatures.from_ids(KEYS, torch.stack([torch.arange(samples) % rows for rows in ROWS]))


def made(bag: Any = "reference") -> SparseTables:
    tables = SparseTables(KEYS, ROWS, DIM, bag=bag)
    tables.reset(0.5, seed=3)
    return tables


def dense_twin(tables: SparseTables) -> StackedTables:
    twin = StackedTables(tables.keys, tables.rows, DIM)
    with torch.no_grad():
        twin.weight_RD.copy_(tables.table_RD)
    return twin


@pytest.mark.parametrize("features", [batch().features, one_id()], ids=["bags", "one id"])
@pytest.mark.parametrize("bag", BAGS)
def test_values_and_gradients_are_those_of_dense_tables(bag: str, features: JaggedFeatures) -> None:
    tables = made(bag)
    twin = dense_twin(tables)
    (pooled, saved), (expected, rows) = tables.record(features), twin.record(features)
    torch.testing.assert_close(pooled, expected)
    for key, value in tables(features).items():
        torch.testing.assert_close(value, twin(features)[key])
    assert torch.equal(tables.rows_of(features), rows)
    gradient = torch.randn(pooled.shape, generator=torch.Generator().manual_seed(1))
    tables.backward(saved, features, gradient)
    twin.backward(rows, features, gradient)
    torch.testing.assert_close(tables.dense_gradient(), twin.weight_RD.grad)


@pytest.mark.parametrize("bag", BAGS)
def test_ids_after_the_last_bag_are_ignored(bag: str) -> None:
    plain = batch().features
    padded = replace(plain, values_V=torch.cat([plain.values_V, torch.full((9,), 1 << 60)]), padded=True)
    results = []
    for features in (plain, padded):
        tables = made(bag)
        pooled, saved = tables.record(features)
        tables.backward(saved, features, torch.ones_like(pooled))
        results.append((pooled, tables.dense_gradient(), tables.rows_of(features)))
    for actual, expected in zip(*results):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize(("feature", "index"), [(0, 5), (1, -1), (2, 30)])
def test_ids_outside_their_table_are_refused(feature: int, index: int) -> None:
    bags = [[[0]], [[0]], [[0]]]
    made().check(JaggedFeatures.from_bags(KEYS, bags))
    bags[feature][0].append(index)
    with pytest.raises(DataError, match=f"ids of feature '{KEYS[feature]}'"):
        made().check(JaggedFeatures.from_bags(KEYS, bags))


@pytest.mark.parametrize("bag", BAGS)
def test_ids_of_a_shared_table_are_hashed_with_a_seed_per_feature(bag: Any) -> None:
    table = HashedTable(KEYS, 97, DIM, bag=bag)
    table.reset(0.5, seed=1)
    features = JaggedFeatures.from_bags(KEYS, [[[7, -1], []], [[7], [10**12, 7]], [[], []]])
    rows = [*rows_torch(torch.tensor([7, -1]), 0, 97), *rows_torch(torch.tensor([7, 10**12, 7]), 1, 97)]
    assert table.rows_of(features).tolist() == rows
    weight = table.table_RD.clone().requires_grad_()
    expected = torch.nn.functional.embedding_bag(
        torch.stack(rows), weight, features.offsets_FB1, mode="sum", include_last_offset=True
    ).view(len(KEYS), 2, DIM)
    pooled, saved = table.record(features)
    torch.testing.assert_close(pooled, expected.detach())
    gradient = torch.randn(pooled.shape, generator=torch.Generator().manual_seed(1))
    table.backward(saved, features, gradient)
    expected.backward(gradient)
    torch.testing.assert_close(table.dense_gradient(), weight.grad)


def filled(rows: int, dim: int, std: float | None, seed: int = 1) -> Tensor:
    table_RD = torch.full((rows, dim), torch.nan)
    InitialRows(rows, dim, std=std, seed=seed, name="table").fill_(table_RD)
    return table_RD


@pytest.mark.parametrize("std", [0.1, None])
def test_a_part_of_a_table_has_the_rows_of_the_whole(std: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init, "PATTERN", 64)
    whole_RD, rows = filled(101, 5, std), InitialRows(101, 5, std=std, seed=1, name="table")
    for first, last in ((0, 101), (3, 4), (5, 77), (12, 24), (100, 101)):
        part_RD = torch.full((last - first, 5), torch.nan)
        rows.fill_(part_RD, first)
        assert torch.equal(part_RD, whole_RD[first:last])
    assert not torch.equal(filled(101, 5, std, seed=2), whole_RD)
    assert len(whole_RD.unique(dim=0)) == 101
