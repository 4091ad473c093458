"""The task of sequence models: the item that a user takes next, ranked among all items."""

from .task import NDCG, RANKED, RANKED_TITLES, Task

CHOOSING = f"validation_{NDCG}"

NEXT_ITEM = Task(
    name="next-item",
    summary="the next item of each user's sequence, ranked among all items",
    leading=NDCG,
    choosing=CHOOSING,
    lowest_chooses=False,
    scored_rows="test items after the epoch with the highest NDCG@10 of validation items",
    progress=("hit_rate_10", NDCG),
    columns=RANKED,
    titles={**RANKED_TITLES, CHOOSING: "validation NDCG@10"},
    baselines={
        "popularity": "item popularity",
        "recent_popularity": "item popularity just before",
        "item_to_item": "counts of what follows the last items",
        "item_knn": "item-kNN",
    },
    held_out={"leave-one-out": "the last item of each user", "time": "each user's first later item"},
    assessment="recperf.execution.ranked_quality:RankedAssessment",
)
