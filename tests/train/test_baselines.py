"""Baselines of click rows: scikit-learn's where it has them, else conditions that a solution meets, and counting."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from recperf.data.order import Samples
from recperf.train import baselines
from recperf.train.baselines import (
    ColumnEncoder,
    ColumnSet,
    FeatureRows,
    bias_logits,
    blend,
    choose,
    click_rules,
    fit_additive,
    majority,
    of_clicks,
    popularity,
    regression,
    synthetic_logits,
    untrained,
)


def clicks(count: int, seed: int = 0) -> tuple[np.random.Generator, torch.Tensor]:
    draw = np.random.default_rng(seed)
    return draw, torch.from_numpy((draw.random(count) < 0.4).astype(np.float32))


def feature_rows(labels_N: torch.Tensor, ids: dict[str, torch.Tensor], **fields: Any) -> FeatureRows:
    values = {"dense_ND": torch.zeros(len(labels_N), 0), **fields}
    return FeatureRows(ids=ids, labels_N=labels_N, **values)


@pytest.mark.parametrize("penalty", [0.5, 1.0, 8.0])
def test_a_regression_is_scikit_learns(penalty: float) -> None:
    draw, labels_N = clicks(200)
    features_NF = draw.normal(size=(200, 3)) + labels_N.numpy()[:, None] * [1.0, 0.0, -2.0]
    weights_F, intercept = regression(features_NF, labels_N.numpy(), penalty=penalty)
    oracle = LogisticRegression(C=1 / penalty, tol=1e-12, max_iter=10_000).fit(features_NF, labels_N)
    np.testing.assert_allclose(weights_F, oracle.coef_[0], rtol=1e-4)
    assert intercept == pytest.approx(oracle.intercept_[0], rel=1e-4)
    assert penalty != 1.0 or regression(features_NF, labels_N.numpy())[1] == intercept, "the default"


def test_a_regression_of_rows_that_a_line_divides_ends() -> None:
    """The penalty alone bounds the weight: its slope is that of the loss."""
    x = np.array([[-1.0], [1.0]])
    (weight,), intercept = regression(x, np.array([0.0, 1.0], np.float32), penalty=1e-6)
    assert weight * 1e-6 == pytest.approx(2 / (1 + math.exp(weight)), rel=1e-4)
    assert intercept == pytest.approx(0.0, abs=1e-6)
    _, only = regression(np.zeros((4, 1)), np.array([1.0, 1, 1, 0], np.float32))
    assert only == pytest.approx(math.log(3), rel=1e-5)
    # The intercept has the penalty 1e-6: a slope that is left.
    assert 3 - 4 / (1 + math.exp(-only)) == pytest.approx(1e-6 * only, rel=1e-3)


@pytest.mark.parametrize("ridge", [0.5, 2.0])
def test_an_additive_model_meets_the_conditions_of_its_minimum(ridge: float) -> None:
    """Of every weight: what its rows' labels exceed their predictions by is the penalty's slope."""
    draw, labels_N = clicks(300, 1)
    one_N = torch.from_numpy(draw.integers(0, 6, 300))
    bags_NL = torch.from_numpy(draw.integers(-1, 5, (300, 3)))
    dense_ND = torch.from_numpy(draw.normal(size=(300, 2)))
    fitted = fit_additive([one_N, bags_NL], labels_N, dense_ND, ridge=ridge, sweeps=400, tolerance=1e-9)
    logits_N = fitted([one_N, bags_NL], dense_ND)
    left_N = labels_N.double() - logits_N.sigmoid()
    assert float(left_N.sum()) == pytest.approx(0.0, abs=1e-5)
    for number, weight in enumerate(fitted.weights[0].tolist()):
        assert float(left_N[one_N == number].sum()) == pytest.approx(ridge * weight, abs=1e-5)
    for number, weight in enumerate(fitted.weights[1].tolist()):
        times_N = (bags_NL == number).sum(1)
        assert float((left_N * times_N).sum()) == pytest.approx(ridge * weight, abs=1e-6)
    assert (dense_ND.T @ left_N).tolist() == pytest.approx((ridge * fitted.slopes_D).tolist(), abs=1e-6)
    # By hand, row by row; an id that training did not have weighs nothing.
    unknown = fitted(
        [torch.tensor([6, 2]), torch.tensor([[-1, 99, 4], [-1, -1, -1]])], torch.tensor([[1.0, 2], [0, 0]])
    )
    first, second = fitted.weights
    expected = [
        float(fitted.intercept + second[4] + fitted.slopes_D[0] + 2 * fitted.slopes_D[1]),
        float(fitted.intercept + first[2]),
    ]
    assert unknown.tolist() == pytest.approx(expected)


def test_sweeps_end_where_weights_no_longer_change() -> None:
    draw, labels_N = clicks(300, 2)
    ids = [torch.from_numpy(draw.integers(0, 6, 300)), torch.from_numpy(draw.integers(0, 4, 300))]
    exact = fit_additive(ids, labels_N, ridge=2.0, sweeps=200, tolerance=0.0)(ids)
    default = fit_additive(ids, labels_N)(ids)
    assert float((default - exact).abs().max()) < 1e-5
    rough = fit_additive(ids, labels_N, tolerance=0.5)(ids)
    assert float((rough - exact).abs().max()) > 1e-4
    one = fit_additive(ids, labels_N, sweeps=1)(ids)
    assert torch.equal(fit_additive(ids, labels_N, sweeps=1, tolerance=0.0)(ids), one)
    assert float((one - exact).abs().max()) > 1e-3
    # Numbers without columns are no numbers.
    assert torch.equal(fit_additive(ids, labels_N, torch.zeros(300, 0))(ids, torch.zeros(300, 0)), default)


def test_the_majority_is_the_log_odds_of_the_rate() -> None:
    assert majority(0.8, 2).tolist() == pytest.approx([math.log(4)] * 2)
    for rate, bound in ((1.0, 1 - 1e-6), (0.0, 1e-6)):
        assert float(majority(rate, 1)) == pytest.approx(math.log(bound / (1 - bound)))


def samples(items: list[int], users: list[int], labels: list[float]) -> Samples:
    ids_FN = torch.tensor([users, items])
    return Samples(
        dense_ND=torch.zeros(len(items), 0), ids_FN=ids_FN, labels_N=torch.tensor(labels), keys=("user", "item")
    )


def test_biases_and_popularity_of_a_few_rows() -> None:
    train = samples([0, 0, 0, 1, 1, 2], [0, 1, 2, 0, 1, 2], [1, 1, 0, 0, 1, 0])
    valid = samples([0, 2, 3], [2, 0, 1], [0, 0, 0])
    logits = bias_logits(train, valid)
    assert logits["majority"].tolist() == [0.0] * 3
    user_N, item_N = train.ids_FN
    item_only, both = fit_additive([item_N], train.labels_N), fit_additive([user_N, item_N], train.labels_N)
    assert torch.equal(logits["item_bias"], item_only([valid.ids_FN[1]]))
    assert torch.equal(logits["user_item_bias"], both([valid.ids_FN[0], valid.ids_FN[1]]))
    counts = np.log1p([3, 3, 3, 2, 2, 1])
    oracle = LogisticRegression(C=1e6, tol=1e-12, max_iter=10_000).fit(counts[:, None], train.labels_N)
    expected = oracle.decision_function(np.log1p([[3], [1], [0]]))
    np.testing.assert_allclose(popularity(train, valid).numpy(), expected, rtol=1e-3)


def test_a_blend_weighs_by_gains_over_the_majority() -> None:
    draw, labels_N = clicks(400, 3)
    labels = labels_N.numpy()
    good, poor = (labels - 0.5) * 2 + draw.normal(size=400), (labels - 0.5) + 2 * draw.normal(size=400)
    one, other, constant = blend(good, 0.3 * poor, labels)

    def loss(logits: np.ndarray) -> float:
        p = 1 / (1 + np.exp(-logits))
        return float(-np.mean(labels * np.log(p) + (1 - labels) * np.log(1 - p)))

    rate = labels.mean()
    base = loss(np.full(400, math.log(rate / (1 - rate))))
    assert one / other == pytest.approx((base - loss(good)) / max(base - loss(0.3 * poor), 1e-9), rel=1e-4)
    mixed = (one * good + other * 0.3 * poor) / (one + other)
    oracle = LogisticRegression(C=1.0, tol=1e-12, max_iter=10_000).fit(mixed[:, None], labels)
    assert one + other == pytest.approx(oracle.coef_[0, 0], rel=1e-4)
    assert constant == pytest.approx(oracle.intercept_[0], rel=1e-3, abs=1e-4)
    # A model that is worse than the majority has no weight to speak of.
    right, wrong, _ = blend(good, -good, labels)
    assert wrong / right == pytest.approx(1e-9 / (base - loss(good)), rel=1e-3)
    assert (
        blend(good, poor, np.ones(400, np.float32)) == blend(good, poor, np.zeros(400, np.float32)) == (0.5, 0.5, 0.0)
    )


def test_planted_logits_are_those_of_the_held_out_batches() -> None:
    class Bags:
        def __len__(self) -> int:
            return 5

        def batch(self, epoch: int, step: int) -> Any:
            assert epoch == 0
            return SimpleNamespace(labels_B=torch.tensor([1.0, float(step == 1), 0.0, 0.0]))

        def held_out(self, count: int) -> Any:
            return range(count)

        def planted_logits(self, batch: int) -> torch.Tensor:
            return torch.tensor([batch, batch + 0.5])

    found = synthetic_logits(Bags(), 2)  # type: ignore[arg-type]
    assert found["planted"].tolist() == [0.0, 0.5, 1.0, 1.5]
    assert found["majority"].tolist() == pytest.approx([math.log(3 / 5)] * 4), "3 of 8"
    # Five batches train, however many are held out: 6 of 20.
    assert synthetic_logits(Bags(), 9)["majority"].tolist() == pytest.approx([math.log(6 / 14)] * 18)  # type: ignore[arg-type]


def test_trees_are_small_and_their_leaves_grow_with_the_rows() -> None:
    for count, leaf in ((100, 5), (1199, 5), (1200, 6), (4000, 20), (10_000, 50), (50_000, 50)):
        labels_N = (np.arange(count) % 2).astype(np.float32)
        parameters = untrained(labels_N, 7, [True, False]).get_params()
        assert parameters["min_samples_leaf"] == leaf
    chosen = {name: parameters[name] for name in ("learning_rate", "max_iter", "max_leaf_nodes", "random_state")}
    assert chosen == {"learning_rate": 0.05, "max_iter": 7, "max_leaf_nodes": 12, "random_state": 0}
    assert parameters["early_stopping"] is False
    assert parameters["categorical_features"] == [True, False]
    assert untrained(np.ones(9, np.float32), 7, []) is None


def test_columns_and_trees_are_chosen_by_their_log_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sets of columns with three trees each: the second tree of the second set is right most often."""
    staged = {0: [[0.0, 0.0], [1.0, 1.0], [9.0, 9.0]], 1: [[0.5, 0.5], [2.0, -2.0], [-2.0, 2.0]]}
    asked: list[int] = []

    def stub(labels_N: Any, trees: int, is_category: list[bool]) -> Any:
        asked.append(trees)
        place = int(is_category[0])
        rows = [np.array(one) for one in staged[place]]
        return SimpleNamespace(fit=lambda x, y: None, staged_decision_function=lambda x: iter(rows))

    monkeypatch.setattr(baselines, "untrained", stub)
    empty = np.zeros((2, 1))
    sets = [ColumnSet(empty, empty, [False]), ColumnSet(empty, empty, [True])]
    labels = np.array([1.0, 0.0], np.float32)
    assert choose(sets, labels, labels) == (1, 2)
    assert choose(sets, labels, 1 - labels) == (1, 3)
    assert choose(sets, labels, np.ones(2, np.float32)) == (0, 3)
    assert choose(sets[::-1], labels, labels) == (0, 2)
    assert asked == 8 * [baselines._MOST_TREES]
    monkeypatch.setattr(baselines, "untrained", lambda *_: None)
    assert choose(sets, labels, labels) is None


def test_every_tenth_row_chooses_where_none_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    labels_N = torch.arange(40).float()
    train = feature_rows(labels_N, {"a": torch.arange(40) % 3}, before={"b": torch.arange(40) % 2})
    calls: list[tuple[list[int], list[tuple[int, ...]], list[float], list[float]]] = []

    def stub(choices: list[ColumnSet], fitted_N: Any, choosing_M: Any) -> None:
        shapes = [one.fitted_NF.shape for one in choices]
        calls.append(([len(one.choosing_MF) for one in choices], shapes, fitted_N.tolist(), choosing_M.tolist()))

    monkeypatch.setattr(baselines, "choose", stub)
    assert of_clicks(train) is None
    chooses_N = torch.arange(40) < 15
    assert of_clicks(replace(train, chooses_N=chooses_N, before={})) is None
    assert calls[0][0] == [4, 4]
    assert calls[0][1] == [(36, 1), (36, 2)]
    assert calls[0][3] == [0.0, 10.0, 20.0, 30.0]
    assert calls[0][2] == [float(row) for row in range(40) if row % 10]
    assert calls[1] == ([15], [(25, 1)], [float(row) for row in range(15, 40)], [float(row) for row in range(15)])
    part = train.at(torch.tensor([3, 5]))
    assert (part.labels_N.tolist(), part.ids["a"].tolist(), part.before["b"].tolist()) == ([3, 5], [0, 2], [1, 1])


def test_of_many_rows_some_choose_the_columns_and_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 100 rows every fourth one, of which a tenth chooses; all are fitted, with as many trees as many rows carry."""
    monkeypatch.setattr(baselines, "MOST_CHOOSING", 30)
    monkeypatch.setattr(baselines, "FEWEST_TREES", 7)
    labels_N = (torch.arange(100) % 3 == 0).float()
    train = feature_rows(labels_N, {"a": torch.arange(100) % 5})
    sizes: list[tuple[int, int]] = []
    fitted: list[tuple[int, int]] = []

    def stub(choices: list[ColumnSet], fitted_N: Any, choosing_M: Any) -> tuple[int, int]:
        sizes.append((len(fitted_N), len(choosing_M)))
        return 0, 3

    class Model:
        def __init__(self, trees: int) -> None:
            self.trees = trees

        def fit(self, train_NF: Any, labels_N: Any) -> None:
            fitted.append((len(train_NF), self.trees))

    monkeypatch.setattr(baselines, "choose", stub)
    monkeypatch.setattr(baselines, "untrained", lambda labels_N, trees, is_category: Model(trees))
    assert of_clicks(train) is not None
    assert of_clicks(replace(train, chooses_N=torch.arange(100) >= 80)) is not None
    assert (sizes, fitted) == ([(22, 3), (20, 5)], [(100, 7), (100, 7)])
    of_clicks(train.at(torch.arange(30)))
    assert (sizes[-1], fitted[-1]) == ((27, 3), (30, 3))


def test_few_categories_are_columns_and_many_become_mean_labels() -> None:
    """Numbers below 254 are categories of their own; from there on labels of four other folds are averaged."""
    draw, labels_N = clicks(60, 4)
    few_N, many_N = torch.from_numpy(draw.integers(0, 254, 60)), torch.from_numpy(draw.integers(0, 4, 60))
    few_N[0], many_N[0] = 253, 254
    dense_ND = torch.from_numpy(draw.normal(size=(60, 1))).float()
    train = feature_rows(labels_N, {"few": few_N}, dense_ND=dense_ND, before={"many": many_N})
    encoder = ColumnEncoder(train, ["few", "many"])
    assert encoder.is_category == [False, True, False]
    assert np.array_equal(encoder.train_NF[:, :2], np.stack([dense_ND[:, 0], few_N], 1).astype(np.float32))
    rate, labels, ids = float(labels_N.mean()), labels_N.tolist(), many_N.tolist()

    def mean(keep: Any, own: int) -> float:
        matching = [labels[row] for row in range(60) if keep(row) and ids[row] == own]
        return (sum(matching) + 10 * rate) / (len(matching) + 10)

    expected = [mean(lambda other, row=row: other % 5 != row % 5, ids[row]) for row in range(60)]
    np.testing.assert_allclose(encoder.train_NF[:, 2], expected, rtol=1e-6)
    valid = feature_rows(
        torch.zeros(3), {"few": torch.tensor([253, 254, 0])}, dense_ND=torch.zeros(3, 1),
        before={"many": torch.tensor([2, 999, 254])},
    )  # fmt: skip
    columns = encoder(valid)
    np.testing.assert_allclose(columns[:, 2], [mean(lambda row: True, 2), rate, mean(lambda row: True, 254)], rtol=1e-6)
    assert columns[[0, 2], 1].tolist() == [253.0, 0.0]
    assert math.isnan(columns[1, 1]), "a category that training does not have"


def test_several_categories_of_a_row_are_averaged_and_the_most_common_indicated() -> None:
    draw, labels_N = clicks(50, 5)
    ids_NL = torch.from_numpy(draw.integers(-1, 6, (50, 3)))
    ids_NL[0] = -1
    encoder = ColumnEncoder(feature_rows(labels_N, {"tags": ids_NL}), ["tags"])
    rate, labels, ids = float(labels_N.mean()), labels_N.tolist(), ids_NL.tolist()
    assert encoder.is_category == [False] * 7
    for row in range(50):
        means = []
        for own in (one for one in ids[row] if one >= 0):
            shown = [labels[other] for other in range(50) if other % 5 != row % 5 for one in ids[other] if one == own]
            means.append((sum(shown) + 10 * rate) / (len(shown) + 10))
        assert encoder.train_NF[row, 0] == pytest.approx(np.mean(means) if means else 0.0)
    counts = [sum(row.count(number) for row in ids) for number in range(6)]
    common = sorted(range(6), key=lambda number: (-counts[number], number))
    assert encoder.train_NF[:, 1:].tolist() == [[float(number in row) for number in common] for row in ids]
    other = encoder(feature_rows(torch.zeros(2), {"tags": torch.tensor([[common[0], 77, -1], [-1, -1, -1]])}))
    assert other[:, 1:].tolist() == [[1.0, 0, 0, 0, 0, 0], [0.0] * 6]
    wide = torch.arange(70).repeat(2, 1)
    most = ColumnEncoder(feature_rows(torch.tensor([0.0, 1.0]), {"tags": wide}), ["tags"])
    assert most.train_NF.shape == (2, 1 + 64)


def test_rules_use_the_user_and_the_item_where_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "_MOST_TREES", 5)
    draw, labels_N = clicks(80, 6)
    ids = {name: torch.from_numpy(draw.integers(0, 5, 80)) for name in ("shop", "who", "what")}
    dense_ND = torch.from_numpy(draw.normal(size=(80, 2)))
    train = feature_rows(labels_N, ids, dense_ND=dense_ND)
    rules = click_rules(train, user="who", item="what")
    assert list(rules) == ["majority", "item_bias", "user_item_bias", "logistic", "gradient_boosting"]
    valid = train.at(torch.arange(7))
    rate = float(labels_N.double().mean())
    assert rules["majority"](valid).tolist() == pytest.approx([math.log(rate / (1 - rate))] * 7)
    item = fit_additive([ids["what"]], labels_N)
    assert torch.equal(rules["item_bias"](valid), item([valid.ids["what"]]))
    both = fit_additive([ids["who"], ids["what"]], labels_N)
    assert torch.equal(rules["user_item_bias"](valid), both([valid.ids["who"], valid.ids["what"]]))
    logistic = fit_additive(list(ids.values()), labels_N, dense_ND, sweeps=20, tolerance=1e-4)
    assert torch.equal(rules["logistic"](valid), logistic(list(valid.ids.values()), valid.dense_ND))
    assert rules["gradient_boosting"](valid).shape == (7,)
    assert list(click_rules(train, user="who", item=None))[:2] == ["majority", "logistic"]
    assert "user_item_bias" not in click_rules(train, user=None, item="what")


def test_a_sweep_is_a_step_of_newtons_method() -> None:
    """From the rate of three quarters: labels 1, 1, 1, 0, of which each prediction's variance is 3/16."""
    labels_N = torch.tensor([1.0, 1, 1, 0])
    numbers_ND = torch.tensor([[1.0], [2.0], [0.0], [3.0]])
    fitted = fit_additive([], labels_N, numbers_ND, ridge=2.0, sweeps=1)
    slope = 0.25 * (1 + 2) - 0.75 * 3
    assert fitted.slopes_D.tolist() == pytest.approx([slope / (14 * 3 / 16 + 2)])
    alone = fit_additive([torch.tensor([0, 0, 1, 1])], labels_N, ridge=2.0, sweeps=1)
    assert alone.weights[0].tolist() == pytest.approx([0.5 / (2 * 3 / 16 + 2), -0.5 / (2 * 3 / 16 + 2)])
    # Two ids of a row move its logit together: half of the step.
    pair = fit_additive([torch.tensor([[0, -1], [0, -1], [1, -1], [1, -1]])], labels_N, ridge=2.0, sweeps=1)
    assert pair.weights[0].tolist() == pytest.approx([0.5 / (4 * 3 / 16 + 2), -0.5 / (4 * 3 / 16 + 2)])
    p_N = 1 / (1 + np.exp(-(math.log(3) + alone.weights[0].numpy()[[0, 0, 1, 1]])))
    shift = (labels_N.numpy() - p_N).sum() / (p_N * (1 - p_N)).sum()
    assert float(alone.intercept) == pytest.approx(math.log(3) + shift)
