"""The task of models of events: whether an event that follows a history is positive."""

from dataclasses import replace

from .click_labels import CLICK_LABELS
from .task import BIASES

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
