"""The tasks: the label of a row, the label of an event, the next item of a user. Torch-free."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from .task import BIASES, NDCG, RANKED, RANKED_TITLES, Task

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
