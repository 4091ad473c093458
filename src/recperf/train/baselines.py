"""Baselines, fitted on training rows and scored on the rows a model is scored on.

In gradient boosting training rows that are not fitted choose the columns and the number of trees, so that a column
which says nothing new, or is only memorised, does not make it worse.

Shapes: N rows, M rows that choose, F features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..data.order import Samples
from ..errors import notice_once

if TYPE_CHECKING:
    from ..data.random_bags import RandomBags


T = TypeVar("T")
U = TypeVar("U")


class Unfit(LookupError):
    """A baseline that cannot be fitted to the data."""


class Rules(Mapping[str, T]):
    """Baselines by name, the cheapest first; each is fitted when it is asked for, as far as there is time."""

    def __init__(self, makers: Mapping[str, Callable[[], T | None]]) -> None:
        self._makers = dict(makers)

    def __getitem__(self, name: str) -> T:
        rule = self._makers[name]()
        if rule is None:
            raise Unfit(name)
        return rule

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)

    @staticmethod
    def of(values: Mapping[str, T]) -> Rules[T]:
        """Rules that are fitted already."""
        return Rules({name: partial(lambda value: value, value) for name, value in values.items()})

    def __or__(self, others: Rules[T]) -> Rules[T]:
        return Rules({**self._makers, **others._makers})

    def then(self, use: Callable[[T], U]) -> Rules[U]:
        """What another function makes of each rule."""
        return Rules({name: partial(lambda name: use(self[name]), name) for name in self._makers})


CHOOSING_SHARE = 0.1
"""Share of the training rows that choose."""
MOST_CHOOSING = 50_000
"""Of more training rows these, at equal distances, choose the columns and the number of trees of gradient boosting."""
_MOST_TREES, FEWEST_TREES = 300, 200
"""Trees at most, and at least where it is fitted on more rows than chose: they carry more trees."""
MOST_CATEGORIES = 254
"""Categories of a column; scikit-learn takes at most 255."""
_MOST_INDICATORS = 64
_FOLDS, _PRIOR_ROWS = 5, 10


def can_boost(labels_N: NDArray[np.float32]) -> bool:
    """Whether scikit-learn is installed and there are labels of both classes."""
    if find_spec("sklearn") is None:
        notice_once("no baseline of gradient boosting: it needs scikit-learn (pip install 'recperf[baselines]')")
        return False
    return bool(labels_N.min() != labels_N.max())


def untrained(labels_N: NDArray[np.float32], trees: int, is_category: list[bool]) -> Any:
    """A model of scikit-learn's histogram gradient boosting, to be fitted; None where nothing can be."""
    if not can_boost(labels_N):
        return None
    ensemble = import_module("sklearn.ensemble")
    # Small steps and trees: on tens of thousands of rows they score higher than the defaults.
    return ensemble.HistGradientBoostingClassifier(
        random_state=0, learning_rate=0.05, max_iter=trees, max_leaf_nodes=12, early_stopping=False,
        min_samples_leaf=min(50, max(5, len(labels_N) // 200)), categorical_features=is_category,
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class ColumnSet:
    """A set of columns that gradient boosting may read: of rows to fit, and of rows that choose."""

    fitted_NF: NDArray[Any]
    choosing_MF: NDArray[Any]
    is_category: list[bool]


def choose(
    choices: Sequence[ColumnSet], labels_N: NDArray[np.float32], choosing_M: NDArray[np.float32]
) -> tuple[int, int] | None:
    """Which set of columns, with how many trees, predicts the rows that choose with the lowest log loss; None where
    nothing can be fitted."""
    losses: list[tuple[float, int, int]] = []
    for place, choice in enumerate(choices):
        model = untrained(labels_N, _MOST_TREES, choice.is_category)
        if model is None:
            return None
        model.fit(choice.fitted_NF, labels_N)
        for trees, logits_M in enumerate(model.staged_decision_function(choice.choosing_MF), 1):
            loss = np.mean(np.logaddexp(0.0, logits_M) - choosing_M * logits_M)
            losses.append((float(loss), place, trees))
    _, place, trees = min(losses)
    return place, trees


@dataclass(frozen=True, kw_only=True, eq=False)
class FeatureRows:
    """Click rows as a model reads them: numbers, for each sparse feature the table rows, and labels."""

    dense_ND: Tensor
    ids: dict[str, Tensor]
    """By feature: one id a row, or [rows, most ids] with -1 for none."""
    labels_N: Tensor
    before: dict[str, Tensor] = field(default_factory=dict)
    """Ids of the item that the row's user had before; empty where rows have no user, item or time."""
    chooses_N: Tensor | None = None
    """Which training rows choose; None: every tenth."""

    def at(self, rows_N: Tensor) -> FeatureRows:
        """Some of the rows."""
        ids, before = ({key: column[rows_N] for key, column in part.items()} for part in (self.ids, self.before))
        return FeatureRows(dense_ND=self.dense_ND[rows_N], ids=ids, labels_N=self.labels_N[rows_N], before=before)


def of_clicks(train: FeatureRows) -> Callable[[FeatureRows], Tensor] | None:
    """Gradient boosting on numbers and categories of click rows, with the item before where that helps: a function from
    rows to logits, or None where nothing can be fitted."""
    some_N = torch.arange(0, len(train.labels_N), -(-len(train.labels_N) // MOST_CHOOSING))
    sample, chooses_N = train.at(some_N), torch.arange(len(some_N)) % round(1 / CHOOSING_SHARE) == 0
    if train.chooses_N is not None:
        chooses_N = train.chooses_N[some_N]
    fitted, choosing = sample.at(~chooses_N), sample.at(chooses_N)
    options = [list(train.ids), *([[*train.ids, *train.before]] if train.before else [])]
    encoders = [ColumnEncoder(fitted, keys) for keys in options]
    choices = [ColumnSet(encoder.train_NF, encoder(choosing), encoder.is_category) for encoder in encoders]
    best = choose(choices, fitted.labels_N.numpy(), choosing.labels_N.numpy())
    if best is None:
        return None
    encoder = ColumnEncoder(train, options[best[0]])
    trees = best[1] if len(some_N) == len(train.labels_N) else max(best[1], FEWEST_TREES)
    model = untrained(train.labels_N.numpy(), trees, encoder.is_category)
    model.fit(encoder.train_NF, train.labels_N.numpy())
    return lambda rows: torch.from_numpy(model.decision_function(encoder(rows)))


Columns = Callable[[NDArray[np.int64]], NDArray[Any]]
"""Columns of numbers from the ids of rows, [rows, most ids]."""


class ColumnEncoder:
    """Numbers and categories as columns of gradient boosting. Columns with many categories become their cross-fitted
    mean label; those with several in a row also become indicators of the most common ones."""

    def __init__(self, train: FeatureRows, keys: list[str]) -> None:
        labels_N = train.labels_N.numpy()
        columns, self.is_category = [train.dense_ND.numpy()], [False] * train.dense_ND.shape[1]
        self.encoders: dict[str, list[Columns]] = {}
        for key in keys:
            ids_NL, several = self._ids(train, key)
            if not several and int(ids_NL.max()) < MOST_CATEGORIES:
                self.encoders[key] = [lambda ids_NL: np.where(ids_NL < MOST_CATEGORIES, ids_NL, np.nan)]
                columns.append(ids_NL)
                self.is_category.append(True)
                continue
            means_N1, means_of = _mean_labels(ids_NL, labels_N)
            indicators = [_indicators(ids_NL)] if several else []
            self.encoders[key] = [means_of, *indicators]
            columns += [means_N1, *(indicate(ids_NL) for indicate in indicators)]
            self.is_category += [False] * sum(part.shape[1] for part in columns[-1 - len(indicators) :])
        self.train_NF: NDArray[np.float32] = np.concatenate(columns, 1).astype(np.float32)

    @staticmethod
    def _ids(rows: FeatureRows, key: str) -> tuple[NDArray[np.int64], bool]:
        """The ids of rows, [rows, most ids], and whether a row may have several."""
        ids = rows.ids[key] if key in rows.ids else rows.before[key]
        return ids.reshape(len(ids), -1).numpy(), ids.ndim == 2

    def __call__(self, rows: FeatureRows) -> NDArray[np.float32]:
        columns = [rows.dense_ND.numpy()]
        for key, encode in self.encoders.items():
            ids_NL, _ = self._ids(rows, key)
            columns += [one(ids_NL) for one in encode]
        return np.concatenate(columns, 1).astype(np.float32)


def _indicators(ids_NL: NDArray[np.int64]) -> Columns:
    """Whether rows have each of the ids that most training rows have."""
    counts = np.bincount(ids_NL[ids_NL >= 0])
    common = np.argsort(-counts, kind="stable")[: min(_MOST_INDICATORS, np.count_nonzero(counts))]
    # The last place is of all other ids, and of -1.
    places = np.full(len(counts) + 1, len(common))
    places[common] = np.arange(len(common))

    def columns(ids_NL: NDArray[np.int64]) -> NDArray[np.float32]:
        has = np.zeros((len(ids_NL), len(common) + 1), np.float32)
        np.put_along_axis(has, places[np.minimum(ids_NL, len(counts))], 1.0, axis=1)
        return has[:, :-1]

    return columns


def _mean_labels(ids_NL: NDArray[np.int64], labels_N: NDArray[np.float32]) -> tuple[NDArray[np.float64], Columns]:
    """The mean label of each row's categories among training rows of other folds, drawn to that of all rows; and the
    same for rows that are not training rows."""
    count, rate = int(ids_NL.max()) + 1, float(labels_N.mean())
    fold_N1 = (np.arange(len(ids_NL)) % _FOLDS)[:, None]
    own_NL, present_NL = fold_N1 * count + ids_NL, ids_NL >= 0
    by_fold = [
        np.bincount(own_NL[present_NL], np.broadcast_to(values[:, None], ids_NL.shape)[present_NL], _FOLDS * count)
        for values in (labels_N, np.ones_like(labels_N))
    ]
    # One more category: those that no training row has.
    clicks, shown = (np.append(part.reshape(_FOLDS, count).sum(0), 0.0) for part in by_fold)

    def mean(ids_NL: NDArray[np.int64], clicks: NDArray[np.float64], shown: NDArray[np.float64]) -> NDArray[np.float64]:
        present_NL = ids_NL >= 0
        means_NL = np.where(present_NL, (clicks + _PRIOR_ROWS * rate) / (shown + _PRIOR_ROWS), 0.0)
        present_N1 = np.maximum(present_NL.sum(1, keepdims=True), 1)
        means_N1: NDArray[np.float64] = means_NL.sum(1, keepdims=True) / present_N1
        return means_N1

    def columns(ids_NL: NDArray[np.int64]) -> NDArray[np.float64]:
        known_NL = np.minimum(ids_NL, count)
        return mean(ids_NL, clicks[known_NL], shown[known_NL])

    others = (total[ids_NL] - part[own_NL] for total, part in zip((clicks, shown), by_fold))
    return mean(ids_NL, *others), columns


def bias_logits(train: Samples, valid: Samples) -> dict[str, Tensor]:
    """Logits of the validation rows by majority class, item bias, and user + item bias logistic regression."""
    logits = {"majority": majority(float(train.labels_N.double().mean()), len(valid))}
    for name, keys in (("item_bias", ["item"]), ("user_item_bias", ["user", "item"])):
        places = [train.keys.index(key) for key in keys]
        fitted = fit_additive([train.ids_FN[place] for place in places], train.labels_N)
        logits[name] = fitted([valid.ids_FN[place] for place in places])
    return logits


def popularity(train: Samples, valid: Samples) -> Tensor:
    """Logistic regression on the logarithm of how often an item is in the training rows."""
    item = train.keys.index("item")
    train_N, valid_N = train.ids_FN[item], valid.ids_FN[item]
    counts = torch.bincount(train_N, minlength=int(max(train_N.max(), valid_N.max())) + 1).double().log1p()
    weights_1, intercept = regression(counts[train_N, None].numpy(), train.labels_N.numpy(), penalty=1e-6)
    return intercept + float(weights_1[0]) * counts[valid_N]


def regression(
    features_NF: NDArray[Any], labels_N: NDArray[np.float32], *, penalty: float = 1.0
) -> tuple[NDArray[np.float64], float]:
    """Weights and intercept of a logistic regression by Newton's method; penalty / 2 * weight^2 is added to the loss,
    summed over rows, for each weight."""
    design_NF = np.concatenate([features_NF, np.ones((len(features_NF), 1), np.float32)], 1).astype(np.float64)
    weights_F = np.zeros(design_NF.shape[1])
    penalty_FF = np.diag([penalty] * features_NF.shape[1] + [1e-6])
    for _ in range(30):
        p_N = 1 / (1 + np.exp(-np.clip(design_NF @ weights_F, -30, 30)))
        slope_F = design_NF.T @ (labels_N - p_N) - penalty_FF @ weights_F
        curvature_FF = design_NF.T @ (design_NF * (p_N * (1 - p_N))[:, None]) + penalty_FF
        change_F = np.linalg.solve(curvature_FF, slope_F)
        weights_F += change_F
        if np.abs(change_F).max() < 1e-8:
            break
    return weights_F[:-1], float(weights_F[-1])


def blend(
    logits_N: NDArray[np.float64], others_N: NDArray[np.float64], labels_N: NDArray[np.float32]
) -> tuple[float, float, float]:
    """Weights of two logits, and a constant. The weights are as their gains in log loss over the majority class, and
    only their sum is fitted: a regression on both would prefer the one that happens to fit the users of one time."""
    rate = float(labels_N.mean())
    if rate in (0.0, 1.0):
        return 0.5, 0.5, 0.0
    both_2N = np.stack([logits_N, others_N])
    losses_2 = (np.logaddexp(0.0, both_2N) - labels_N * both_2N).mean(1)
    entropy = -rate * math.log(rate) - (1 - rate) * math.log(1 - rate)
    gains_2 = np.maximum(entropy - losses_2, 1e-9)
    shares_2 = gains_2 / gains_2.sum()
    (total,), constant = regression((shares_2 @ both_2N)[:, None], labels_N)
    return float(total * shares_2[0]), float(total * shares_2[1]), constant


def synthetic_logits(bags: RandomBags, held_out_batches: int) -> dict[str, Tensor]:
    """The majority class of as many training batches as are held out, and the logits that labels were drawn from."""
    first = (bags.batch(0, step) for step in range(min(len(bags), held_out_batches)))
    rate = float(torch.cat([batch.labels_B for batch in first]).double().mean())
    planted_N = torch.cat([bags.planted_logits(batch) for batch in bags.held_out(held_out_batches)]).cpu()
    return {"majority": majority(rate, len(planted_N)), "planted": planted_N}


def majority(rate: float, count: int) -> Tensor:
    """The log odds of the share of training labels that are 1, `count` times."""
    rate = min(max(rate, 1e-6), 1 - 1e-6)
    return torch.full((count,), math.log(rate / (1 - rate)), dtype=torch.float64)


@dataclass(frozen=True, kw_only=True, eq=False)
class Additive:
    """A logistic regression with an intercept, one weight for each id and one for each number."""

    intercept: Tensor
    weights: list[Tensor]
    slopes_D: Tensor

    def __call__(self, ids: list[Tensor], dense_ND: Tensor | None = None) -> Tensor:
        """Logits of rows; an id above those of the training rows has weight 0."""
        logits_N = self.intercept.expand(len(ids[0])).clone()
        for ids_N, weight in zip(ids, self.weights):
            logits_N += _looked_up(torch.nn.functional.pad(weight, (0, 1)), ids_N.clamp_max(len(weight)))
        return logits_N if dense_ND is None else logits_N + dense_ND.double() @ self.slopes_D


def fit_additive(
    ids: list[Tensor],
    labels_N: Tensor,
    dense_ND: Tensor | None = None,
    *,
    ridge: float = 2.0,
    sweeps: int = 60,
    tolerance: float = 1e-6,
) -> Additive:
    """Fit a regression whose weights are penalised by ridge / 2 * weight^2.

    Newton steps, one group of weights at a time: within a group the problem splits into one-dimensional ones. Ids may
    have several columns, of which negative ones are ignored.
    """
    labels_N = labels_N.double()
    weights = [torch.zeros(int(ids_N.max()) + 1, dtype=torch.float64) for ids_N in ids]
    intercept = majority(float(labels_N.mean()), 1)[0]
    logits_N = intercept.expand_as(labels_N).clone()
    numbers_ND = dense_ND.double() if dense_ND is not None and dense_ND.shape[1] else None
    slopes_D = torch.zeros(0 if dense_ND is None else dense_ND.shape[1], dtype=torch.float64)
    for _ in range(sweeps):
        largest = 0.0
        for ids_N, weight in zip(ids, weights):
            p_N = logits_N.sigmoid()
            # Ids of one row move its logit together: smaller steps keep their sum from overshooting.
            most = ids_N.shape[1] if ids_N.ndim == 2 else 1
            slope = _totals(ids_N, labels_N - p_N, len(weight)) - ridge * weight
            curvature = _totals(ids_N, p_N * (1 - p_N), len(weight)) * most + ridge
            change = slope / curvature
            weight += change
            logits_N += _looked_up(change, ids_N)
            largest = max(largest, float(change.abs().max()))
        if numbers_ND is not None:
            p_N = logits_N.sigmoid()
            slope = numbers_ND.T @ (labels_N - p_N) - ridge * slopes_D
            curved = numbers_ND.T @ (numbers_ND * (p_N * (1 - p_N)).unsqueeze(1))
            change = torch.linalg.solve(curved + ridge * torch.eye(len(slopes_D), dtype=torch.float64), slope)
            slopes_D += change
            logits_N += numbers_ND @ change
            largest = max(largest, float(change.abs().max()))
        p_N = logits_N.sigmoid()
        shift = (labels_N - p_N).sum() / (p_N * (1 - p_N)).sum().clamp_min(1e-12)
        intercept = intercept + shift
        logits_N += shift
        if max(largest, abs(float(shift))) < tolerance:
            break
    return Additive(intercept=intercept, weights=weights, slopes_D=slopes_D)


def _totals(ids: Tensor, values_N: Tensor, count: int) -> Tensor:
    """The sum of the values of each id's rows."""
    if ids.ndim == 1:
        return torch.bincount(ids, values_N, count)
    return torch.bincount(ids[ids >= 0], values_N.unsqueeze(1).expand_as(ids)[ids >= 0], count)


def _looked_up(weight: Tensor, ids: Tensor) -> Tensor:
    """The weight of each row's id, or the sum of those of its ids."""
    return weight[ids] if ids.ndim == 1 else torch.where(ids >= 0, weight[ids.clamp_min(0)], 0.0).sum(1)


MOST_TRAINING_ROWS = 300_000
"""Baselines of click rows are fitted on at most this many training rows, at equal distances."""


ClickRule = Callable[[FeatureRows], Tensor]
"""Logits of click rows."""


def click_rules(train: FeatureRows, *, user: str | None, item: str | None) -> Rules[ClickRule]:
    """Rules and models of the same features, fitted on training rows: the majority class, biases of user and item,
    logistic regression, and gradient boosting if scikit-learn is installed."""
    rate = float(train.labels_N.double().mean())
    rules: dict[str, Callable[[], ClickRule | None]] = {
        "majority": lambda: lambda rows: majority(rate, len(rows.labels_N))
    }
    if item is not None:
        rules["item_bias"] = lambda: _additive(train, [item])
    if user is not None and item is not None:
        rules["user_item_bias"] = lambda: _additive(train, [user, item])
    rules["logistic"] = lambda: _logistic(train)
    if can_boost(train.labels_N.numpy()):
        rules["gradient_boosting"] = lambda: of_clicks(train)
    return Rules(rules)


def _logistic(train: FeatureRows) -> ClickRule:
    fitted = fit_additive(list(train.ids.values()), train.labels_N, train.dense_ND, sweeps=20, tolerance=1e-4)
    return lambda rows: fitted([rows.ids[key] for key in train.ids], rows.dense_ND)


def _additive(train: FeatureRows, keys: list[str]) -> ClickRule:
    fitted = fit_additive([train.ids[key] for key in keys], train.labels_N)
    return lambda rows: fitted([rows.ids[key] for key in keys])
