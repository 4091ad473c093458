"""The task of click models: the label of a row."""

from .task import BIASES, Task

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
