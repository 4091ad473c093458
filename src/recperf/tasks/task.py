"""What a task is: what a model predicts, and by what it is scored, compared and shown. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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
