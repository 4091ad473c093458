"""The tasks: the label of a row, the label of an event, the next item of a user. Torch-free.

A task is what a model predicts, and by what it is scored, compared and shown. What trains, chooses an epoch, compares
or reports asks the task of a workload or of a result.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

ORACLES = ("planted",)
"""Baselines that know what no model can."""
AUC, NDCG = "auc", "ndcg_10"
"""The metrics with bootstrap intervals: of labels, and of ranked items."""
RANKED = (NDCG, "hit_rate_10")
"""Metrics of ranked items that tables show; the first orders their rows."""
RANKED_TITLES = {"hit_rate_10": "HR@10", NDCG: "NDCG@10", "mrr": "MRR"}
BIASES = {"user_item_bias": "user + item bias", "item_bias": "item bias", "majority": "majority class"}
"""Baselines of labels of users and items, the strongest first."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a model predicts. A workload names its task; results, pages and comparisons recognise it by its metrics."""

    name: str
    summary: str
    """What is predicted, for which rows."""
    leading: str
    """The metric by which models are compared; higher is better."""
    choosing: str
    """The metric of rows that are neither trained on nor scored, by which the epoch is chosen."""
    lowest_chooses: bool
    """Whether the epoch with its lowest value is chosen, or with its highest."""
    scored_rows: str
    """The rows that are scored, and after which epoch, where such rows chose it."""
    progress: tuple[str, ...]
    """Metrics of an evaluation that the terminal shows during training."""
    columns: tuple[str, ...]
    """Metrics that tables of several models show; the first orders their rows."""
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
        if self.choosing in metrics:
            return -metrics[self.choosing] if self.lowest_chooses else metrics[self.choosing]
        return metrics[self.leading]


CLICK_LABELS = Task(
    name="click-labels",
    summary="the label of a row, which is held out at random, by time or by user",
    leading="auc",
    choosing="validation_log_loss",
    lowest_chooses=True,
    scored_rows="held-out rows after the epoch with the lowest log loss on others, inside the training time",
    progress=("accuracy", "auc", "log_loss"),
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
    lowest_chooses=False,
    scored_rows="test items after the epoch with the highest NDCG@10 of validation items",
    progress=("hit_rate_10", NDCG),
    columns=RANKED,
    titles={**RANKED_TITLES, f"validation_{NDCG}": "validation NDCG@10"},
    baselines={
        "popularity": "item popularity",
        "recent_popularity": "item popularity just before",
        "item_to_item": "counts of what follows the last items",
        "item_knn": "item-kNN",
    },
    held_out={"leave-one-out": "the last item of each user", "time": "each user's first later item"},
    assessment="recperf.execution.ranked_quality:RankedAssessment",
)

BaselineName = Literal[
    "majority", "item_bias", "user_item_bias", "popularity", "logistic", "gradient_boosting", "running_means",
    "item_knn", "rates_regression", "recent_popularity", "item_to_item",
]  # fmt: skip
"""The baselines of all tasks, which a target may name."""
TASKS = (CLICK_LABELS, EVENT_LABELS, NEXT_ITEM)
"""All tasks. Of several that are compared by the same metric, reports show the first."""


def leading_metrics() -> tuple[str, ...]:
    return tuple(dict.fromkeys(task.leading for task in TASKS))


def of(metrics: Iterable[str]) -> Task:
    """The task of a run, by the names of its metrics: the first task that is compared by one of them."""
    names = set(metrics)
    return next((task for task in TASKS if task.leading in names), TASKS[0])


def merit(metrics: Mapping[str, float]) -> float:
    """What the evaluations of a training are compared by; higher is better."""
    return of(metrics).merit(metrics)


def chosen_evaluation(history: Sequence[Mapping[str, float]]) -> int:
    """Which evaluation has the weights that a training ends with, from their metrics: the one with the most merit or,
    where no rows choose the epoch, the last."""
    task = of(history[-1])
    if task.choosing not in history[-1]:
        return len(history) - 1
    return max(range(len(history)), key=lambda place: task.merit(history[place]))


def baseline_to_beat(beat: str | None, baselines: Mapping[str, Mapping[str, float]]) -> str | None:
    """The baseline that a target's `beat` means: of best, the one with the highest leading metric that does not know
    what no model can."""
    if beat != "best":
        return beat
    leading = {name: of(metrics).leading for name, metrics in baselines.items() if name not in ORACLES}
    scored = {name: baselines[name][metric] for name, metric in leading.items() if metric in baselines[name]}
    return max(scored, key=lambda name: scored[name]) if scored else beat
