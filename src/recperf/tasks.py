"""The tasks: the label of a row, the label of an event, the next item of a user. Torch-free.

A task is what a model predicts, and by what it is scored, compared and shown. A workload declares its task; config.json
and result.json of a run name it. What trains, chooses an epoch, compares or reports asks that task.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from .errors import DataError

ORACLES = ("planted",)
"""Baselines that know what no model can."""
AUC, NDCG = "auc", "ndcg_10"
"""The metrics that lead: of labels, and of ranked items."""
RANKED = (NDCG, "hit_rate_10")
"""Metrics of ranked items that tables show; the first orders their rows."""
RANKED_TITLES = {
    "hit_rate_10": "HR@10", NDCG: "NDCG@10", "hit_rate_50": "HR@50", "ndcg_50": "NDCG@50", "mrr": "MRR",
}  # fmt: skip
BIASES = {"user_item_bias": "user + item bias", "item_bias": "item bias", "majority": "majority class"}
"""Baselines of labels of users and items, the strongest first."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a model predicts. Rows are scored by the class that `assessment` names; the other fields are what targets,
    epochs, reports and comparisons ask."""

    name: str
    """What config.json and result.json call it."""
    summary: str
    """What is predicted, for which rows."""
    leading: str
    """The metric by which models are compared, with bootstrap replicates of its own and of baselines."""
    chance: float = 0.0
    """The leading metric of a model that knows nothing."""
    matters: float = 0.1
    """A difference in the leading metric below this share of the distance from chance counts as none."""
    choosing: str
    """The metric of rows that are neither trained on nor scored, by which the epoch is chosen."""
    lower: tuple[str, ...] = ()
    """Metrics of which a lower value is better."""
    bounds: tuple[str, ...] = ()
    """Metrics to which a target can set a bound."""
    scored_rows: str
    """The rows that are scored, and after which epoch, where such rows chose it."""
    progress: tuple[str, ...]
    """Metrics of an evaluation that the terminal shows during training."""
    table: str
    """How tables of several models call what is scored; tasks that call it the same can share a table."""
    columns: tuple[str, ...]
    """Metrics that such tables show; the first orders their rows."""
    titles: Mapping[str, str]
    """How reports call its metrics, where that is not the name with spaces."""
    baselines: Mapping[str, str]
    """The simple rules that a model is compared with, and how reports call them."""
    held_out: Mapping[str, str] = field(default_factory=dict)
    """Of a task that ranks items: which item of a user is held out, by the name of the split."""
    assessment: str
    """"module:Class" that records the scores of the baselines and of a trained model."""

    @property
    def ranks_items(self) -> bool:
        """Whether held-out items are ranked and nothing is labelled."""
        return bool(self.held_out)

    def merit(self, metrics: Mapping[str, float]) -> float:
        """What the evaluations of a training are compared by; higher is better."""
        name = self.choosing if self.choosing in metrics else self.leading
        return signed(name, metrics[name])

    def chosen(self, history: Sequence[Mapping[str, float]]) -> int:
        """Which evaluation has the weights that a training ends with, from their metrics: the one with the most merit
        or, where no rows choose the epoch, the last."""
        if self.choosing not in history[-1]:
            return len(history) - 1
        return max(range(len(history)), key=lambda place: self.merit(history[place]))

    def baseline_to_beat(self, beat: str | None, baselines: Mapping[str, Mapping[str, float]]) -> str | None:
        """The baseline that a target's `beat` means: of best, the best one in the leading metric that does not know
        what no model can."""
        if beat != "best":
            return beat
        rules = [name for name, row in baselines.items() if self.leading in row and name not in ORACLES]
        return max(rules, key=lambda name: signed(self.leading, baselines[name][self.leading]), default=beat)


CLICK_LABELS = Task(
    name="click-labels",
    summary="the label of a row, which is held out at random, by time or by user",
    leading="auc",
    chance=0.5,
    matters=0.05,
    choosing="validation_log_loss",
    lower=("log_loss", "calibration_error", "validation_log_loss"),
    bounds=("accuracy", AUC),
    scored_rows="held-out rows after the epoch with the lowest log loss on others, inside the training time",
    progress=("accuracy", "auc", "log_loss"),
    table="labels",
    columns=("auc", "log_loss"),
    titles={"auc": "AUC"},
    baselines={"logistic": "logistic", **BIASES, "gradient_boosting": "gradient boosting"},
    assessment="recperf.execution.quality:Assessment",
)

EVENT_LABELS = replace(
    CLICK_LABELS,
    name="event-labels",
    summary="the label of an event, from the events of its user before it; trained on the past, scored on the future",
    titles={**CLICK_LABELS.titles, "lifetime_auc": "lifetime AUC"},
    baselines={
        **BIASES,
        "popularity": "item popularity",
        "running_means": "running means",
        "gradient_boosting": "gradient boosting",
        "rates_regression": "logistic regression on running rates",
        "item_knn": "item-kNN",
    },
)

NEXT_ITEM = Task(
    name="next-item",
    summary="the next item of each user's sequence, ranked among all items",
    leading=NDCG,
    choosing=f"validation_{NDCG}",
    scored_rows="test items after the epoch with the highest NDCG@10 of validation items",
    progress=("hit_rate_10", NDCG),
    table="next items",
    columns=RANKED,
    titles={
        **RANKED_TITLES,
        f"validation_{NDCG}": "validation NDCG@10",
        f"validation_{NDCG}_model": "the model alone (validation)",
        f"validation_{NDCG}_counts": "counting alone (validation)",
    },
    baselines={
        "popularity": "item popularity",
        "recent_popularity": "item popularity just before",
        "item_to_item": "counts of what follows the last items",
        "item_knn": "item-kNN",
        "als": "matrix factorisation",
        "ease": "EASE",
    },
    held_out={
        "leave-one-out": "the last item of each user",
        "time": "each user's first positive event from the boundary on",
    },
    assessment="recperf.execution.ranked_quality:RankedAssessment",
)

BaselineName = Literal[
    "majority", "item_bias", "user_item_bias", "popularity", "logistic", "gradient_boosting", "running_means",
    "item_knn", "rates_regression", "recent_popularity", "item_to_item", "als", "ease",
]  # fmt: skip
"""The baselines of all tasks, which a target may name."""
TASKS = (CLICK_LABELS, EVENT_LABELS, NEXT_ITEM)
"""All tasks."""


def named(name: str) -> Task:
    """The task that a run names."""
    task = next((task for task in TASKS if task.name == name), None)
    if task is None:
        what = f"the task {name!r} is not known: there are {', '.join(task.name for task in TASKS)}"
        raise DataError(what, fix="declare it in TASKS of recperf/tasks.py, or use the version of recperf that has it")
    return task


def of(metrics: Iterable[str]) -> Task:
    """The task of a run from before runs named it, by its metrics: of those that are compared by one of them, the one
    that has a title for most."""
    names = set(metrics)
    led = [task for task in TASKS if task.leading in names]
    return max(led, key=lambda task: len(names & task.titles.keys()), default=TASKS[0])


def lower_is_better(metric: str) -> bool:
    return any(metric in task.lower for task in TASKS)


def margin(metric: str, value: float) -> float | None:
    """The difference in a leading metric that counts as none, of models that reach this value; None for another."""
    task = next((task for task in TASKS if task.leading == metric), None)
    return None if task is None else task.matters * abs(value - task.chance)


def signed(metric: str, value: float) -> float:
    """The value of a metric with the sign that makes higher better."""
    return -value if lower_is_better(metric) else value
