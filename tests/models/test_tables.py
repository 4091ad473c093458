"""Tables with a sparse gradient have the values and gradients of those with a dense one, in every implementation."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from golden_cases import INTERPRETED, interpret

from recperf.data.batch import ClickBatch, JaggedFeatures
from recperf.errors import ConfigError, DataError
from recperf.models.config import DLRMConfig
from recperf.models.dlrm import DLRM
from recperf.models.embeddings import StackedTables
from recperf.models.published import load_public_parameters, public_parameters
from recperf.models.tables import SparseTables
from recperf.models.torchrec_weights import load_torchrec_parameters, torchrec_parameters
from recperf.ops.bag import native

interpret("bag")
needs_native = pytest.mark.skipif(isinstance(native.library(), str), reason=str(native.library()))
needs_triton = pytest.mark.skipif(not INTERPRETED, reason="no triton, or a GPU, where tests/gpu runs the kernels")
ALL = ["reference", pytest.param("native", marks=needs_native), pytest.param("triton", marks=needs_triton)]

KEYS, ROWS, DIM = ("a", "b", "c"), (5, 1, 30), 4
CONFIG = DLRMConfig(features=KEYS, rows=ROWS, dim=DIM, bottom=(3, 6, DIM), top=(8, 1), interaction="dot")


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


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
@pytest.mark.parametrize("bag", ALL)
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


@pytest.mark.parametrize("bag", ALL)
def test_backward_passes_add_up_until_the_gradient_is_taken(bag: str) -> None:
    tables = made(bag)
    twin, total = dense_twin(tables), 0
    for seed, samples in ((0, 5), (1, 2), (2, 7)):
        features = batch(seed, samples).features
        gradient = torch.randn(3, samples, DIM, generator=torch.Generator().manual_seed(seed))
        tables.backward(tables.record(features)[1], features, gradient)
        twin.backward(twin.rows_of(features), features, gradient)
        total += features.values_V.numel()
    torch.testing.assert_close(tables.dense_gradient(), twin.weight_RD.grad, rtol=1e-5, atol=1e-6)
    used = tables.take_gradient()
    assert used.ids_V.numel() == total
    assert used.gradient_ND.shape == (3 * 14, DIM)
    with pytest.raises(AssertionError, match="no backward pass"):
        tables.take_gradient()


@pytest.mark.parametrize("bag", ALL)
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


def test_features_of_another_model_are_refused() -> None:
    with pytest.raises(ValueError, match="the batch has features"):
        made().record(JaggedFeatures.from_bags(("a", "b", "d"), [[[0]], [[0]], [[0]]]))
    with pytest.raises(ValueError, match="3 tables need as many row counts"):
        SparseTables(KEYS, (1, 2), DIM)


def test_a_table_is_a_view_and_the_state_dict_has_one_tensor() -> None:
    tables = made()
    assert [tuple(tables.table(key).shape) for key in KEYS] == [(5, 4), (1, 4), (30, 4)]
    tables.table("c").fill_(7.0)
    assert bool((tables.table_RD[6:] == 7).all())
    assert not bool((tables.table_RD[:6] == 7).any())
    assert set(tables.state_dict()) == {"table_RD"}
    assert list(tables.parameters()) == []


def test_initial_rows_are_a_function_of_the_seed_and_the_name() -> None:
    first, again, other = (SparseTables(KEYS, (400, 9, 400), 8) for _ in range(3))
    for tables, seed in ((first, 1), (again, 1), (other, 2)):
        tables.reset(0.0, seed)
    assert torch.equal(first.table_RD, again.table_RD)
    assert not torch.equal(first.table_RD, other.table_RD)
    assert not torch.equal(first.table("a"), first.table("c"))
    for key, rows in zip(KEYS, first.rows):
        values = first.table(key)
        assert float(values.abs().max()) <= rows**-0.5
        assert float(values.std()) == pytest.approx((rows * 3) ** -0.5, rel=0.15)
    first.reset(0.2, 1)
    assert float(first.table_RD.std()) == pytest.approx(0.2, rel=0.05)


@pytest.mark.parametrize("interaction", ["dot", "dcn"])
def test_weights_of_other_programs_can_be_loaded_and_exported(interaction: Any) -> None:
    config = replace(CONFIG, interaction=interaction, cross_layers=2, cross_rank=3)
    source = DLRM(replace(config, table_init_std=0.5), seed=5)
    conversions = [(torchrec_parameters, load_torchrec_parameters)]
    if interaction == "dot":
        conversions.append((public_parameters, load_public_parameters))
    sample = batch()
    for parameters, load in conversions:
        model = DLRM(config, seed=1, embeddings=made())
        load(model, parameters(source))
        torch.testing.assert_close(
            model(sample.dense_BD, sample.features),
            source(sample.dense_BD, sample.features).detach(),
            rtol=1e-5,
            atol=1e-6,
        )
        for name, value in parameters(source).items():
            assert torch.equal(parameters(model)[name], value), name


def test_the_public_names_are_views() -> None:
    model = DLRM(CONFIG, embeddings=made())
    parameters = public_parameters(model)
    parameters["emb_l.2.weight"].fill_(3.0)
    assert bool((model.embeddings.table("c") == 3).all())
    before = {name: value.clone() for name, value in parameters.items()}
    wrong = {name: value + 1 for name, value in parameters.items()}
    wrong["top_l.0.weight"] = torch.zeros(6, DIM)
    with pytest.raises(DataError, match=r"top_l.0.weight has shape \(6, 4\), the model"):
        load_public_parameters(model, wrong)
    for name, value in public_parameters(model).items():
        assert torch.equal(value, before[name]), "nothing is copied if something does not fit"
    with pytest.raises(ConfigError, match="no counterpart of interaction dcn"):
        public_parameters(DLRM(replace(CONFIG, interaction="dcn", cross_layers=1, cross_rank=2)))


@pytest.mark.parametrize("ids", [[[1, 2], [3, 7]], [[5, 2], [3, 6]], [[1, 2], [-1, 6]]], ids=str)
def test_a_stacked_lookup_refuses_an_id_of_another_table(ids: list[list[int]]) -> None:
    tables = StackedTables(("a", "b"), (5, 7), 4)
    tables.reset(0.1, 1)
    with pytest.raises(DataError, match=r"its table has \d rows"):
        tables(JaggedFeatures.from_ids(("a", "b"), torch.tensor(ids)))


def test_a_copied_model_looks_up_the_same_rows() -> None:
    tables = SparseTables(("a", "b"), (5, 7), 4)
    tables.reset(0.1, 1)
    features = JaggedFeatures.from_ids(("a", "b"), torch.tensor([[1, 2], [3, 6]]))
    assert torch.equal(copy.deepcopy(tables)(features)["b"], tables(features)["b"])
