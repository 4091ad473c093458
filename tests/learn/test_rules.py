"""What a training shows of what limits its quality, by hand: each rule names its limit, and a healthy training none."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from recperf.learn.kinds import LIMITS
from recperf.learn.records import (
    GroupSeen,
    InputSeen,
    Mean,
    PartSeen,
    QualityEvidence,
    RepeatsSeen,
    TargetsSeen,
)
from recperf.learn.rules import Trained, limit_of
from recperf.tasks import CLICK_LABELS, NEXT_ITEM


def mean(value: float, error: float = 0.01, rows: int = 1000) -> Mean:
    return Mean(value=value, error=error, rows=rows)


def column(name: str, costs: float, error: float, alone: float) -> InputSeen:
    return InputSeen(name=name, costs=mean(costs, error), alone=alone)


def part(name: str, moved: float, distance: float, kind: str = "weight") -> PartSeen:
    return PartSeen(name=name, kind=kind, rows=50, moved=moved, distance=distance)


def clicks(**changes: Any) -> Trained:
    """A training with nothing wrong, as changed: fields of the evidence, or of what is around it."""
    seen: dict[str, Any] = {
        "held": mean(0.51),
        "trained": [mean(0.50)] * 4,
        "inputs": [column("x", 0.1, 0.01, 0.65), column("page", 0.05, 0.01, 0.6)],
        "parts": [part("top", 1.0, 0.6), part("bottom", 0.9, 0.5), part("table", 0.8, 3.0, "table")],
        "ages": [],
    }
    around: dict[str, Any] = {
        "task": CLICK_LABELS,
        "curve": [-0.60, -0.53, -0.515, -0.51, -0.5102, -0.51, -0.5101, -0.51],
        "epochs": 8,
        "losses": [0.65, 0.6, 0.55, 0.53, 0.52, 0.51, 0.505, 0.50],
        "value": 0.81,
        "half": 0.02,
        "units": 1000,
        "rules": {"majority": 0.5, "logistic": 0.76},
        "behind": -0.03,
    }
    for name, value in changes.items():
        (seen if name in QualityEvidence.__struct_fields__ else around)[name] = value
    return Trained(evidence=QualityEvidence(**seen), **around)


BELOW: dict[str, Any] = {"behind": 0.08, "below": True, "rules": {"gradient_boosting": 0.88}}
STILL = {"parts": [part("top", 1.0, 0.1), part("bottom", 1.0, 0.08)], **BELOW}
LABELLED = {
    "nothing wrong": ({}, "noise"),
    "a baseline is better, and nothing says why": ({**BELOW, "trained": [mean(0.4)] * 4}, "unclear"),
    "the same rows on both sides": ({"repeats": RepeatsSeen(rows=300, of=1000, agree=1.0)}, "leak"),
    "equal contexts with other labels": ({"repeats": RepeatsSeen(rows=300, of=1000, agree=0.8)}, "noise"),
    "a time after the row's that scores depend on": ({"later": {"x": 0.4}}, "leak"),
    "a later time that scores do not depend on": (
        {"later": {"x": 0.4}, "inputs": [column("x", 0.001, 0.01, 0.5)]},
        "noise",
    ),
    "a column that is the label": ({"strongest": column("refund", 1.0, 0.1, 0.99)}, "leak"),
    "users that train by another id": ({"known_users": {"customer_id": 0.9}}, "leak"),
    "few rows": ({"half": 0.12, "units": 60, "value": 0.61}, "protocol"),
    "a part that did not move": ({"parts": [part("top", 1.0, 0.5), part("bottom", 0.0, 0.2)], **BELOW}, "dead"),
    "little moved in many epochs": (STILL, "rate"),
    "nothing moved, whatever the number of epochs": (
        {"parts": [part("top", 0.0, 1e-5), part("bottom", 0.0, 2e-5)], **BELOW, "epochs": 1, "curve": [-0.69]},
        "rate",
    ),
    "nothing moved, and later batches were harder": (
        {"parts": [part("top", 0.0, 1e-5)], **BELOW, "epochs": 1, "losses": [0.65, 0.6, 0.64, 0.69, 0.69]},
        "rate",
    ),
    "little moved in one": ({**STILL, "epochs": 1, "curve": [-0.68]}, "steps"),
    "the training loss goes up": ({**BELOW, "losses": [0.65, 0.6, 0.64, 0.69, 0.69, 0.69, 0.69, 0.69]}, "rate"),
    "thrown about": ({**BELOW, "parts": [part("top", 1.0, 9.0), part("bottom", 1.0, 7.0)]}, "rate"),
    "still better": ({"curve": [-0.6, -0.58, -0.56, -0.54, -0.53, -0.52, -0.51, -0.50]}, "steps"),
    "memorised": (
        {"trained": [mean(0.3)] * 4, "curve": [-0.6, -0.51, -0.55, -0.6, -0.7, -0.8, -0.9, -1.0]},
        "overfit",
    ),
    "a column that changes no score": (
        {"inputs": [column("x", 0.1, 0.01, 0.65), column("page", 0.0, 0.0, 0.62)], **BELOW},
        "ignored",
    ),
    "a column that tells nothing": (
        {"inputs": [column("x", 0.1, 0.01, 0.65), column("page", 0.0, 0.0, 0.51)]},
        "noise",
    ),
    "unseen users": (
        {
            "groups": [
                GroupSeen(name="user", at_most=0, loss=mean(0.6, 0.01, 600)),
                GroupSeen(name="user", loss=mean(0.47, 0.01, 400)),
            ]
        },
        "unseen",
    ),
    "time goes on": (
        {
            "trained": [mean(0.56), mean(0.50), mean(0.50), mean(0.57)],
            "held": mean(0.61),
            "ages": [mean(0.63), mean(0.64), mean(0.66), mean(0.68)],
        },
        "drift",
    ),
    "too small": (BELOW, "capacity"),
    "no rows choose the epoch": ({"held": None}, "not measured"),
}


@pytest.mark.parametrize("name", LABELLED)
def test_a_training_on_labels(name: str) -> None:
    changes, limit = LABELLED[name]
    found = limit_of(clicks(**changes))
    assert found.limit == limit, found
    assert found.confidence == "low"
    assert found.because
    assert "too small" in found.because[0] or not name.startswith("nothing moved")
    assert found.limit in {*LIMITS, "unclear", "not measured"}


def test_a_metric_among_drawn_items_is_doubted() -> None:
    assert not limit_of(clicks()).doubts
    (doubt,) = limit_of(clicks(drawn=100)).doubts
    assert "among 100 drawn items" in doubt


SAME_LISTS: dict[str, Any] = {"lists": {"overlap": 1.0}, "inputs": [column("the last item", 0.001, 0.002, 0.5)]}


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        ({}, "noise"),
        ({"targets": TargetsSeen(in_history=1.0, last=1.0, training=1.0)}, "leak"),
        ({**SAME_LISTS, "rules": {"popularity": 0.3, "item_to_item": 0.42}}, "popularity"),
        ({**SAME_LISTS, "rules": {"popularity": 0.3, "item_to_item": 0.3}}, "noise"),
        # A loss of 0.6 nats says that 1.8 items are left to choose from; the ranks say otherwise.
        ({"losses": [1.2, 0.6], "trained": [mean(0.78)] * 4}, "negatives"),
        ({"losses": [1.2, 0.6], "trained": [mean(0.2)] * 4, "held": mean(0.21)}, "noise"),
        ({"inputs": [column("the order of items", 0.0, 0.0, 0.5), column("x", 0.1, 0.01, 0.5)]}, "ignored"),
    ],
)
def test_a_training_on_next_items(changes: dict[str, Any], limit: str) -> None:
    usual: dict[str, Any] = {
        "task": NEXT_ITEM, "value": 0.4, "curve": [0.2, 0.3, 0.39, 0.41, 0.4, 0.4], "losses": [3.0, 2.9, 2.85],
        "held": mean(0.59), "trained": [mean(0.58)] * 4, "rules": {"popularity": 0.3},
    }  # fmt: skip
    assert limit_of(clicks(**{**usual, **changes})).limit == limit


def test_the_page_lists_the_limits_in_their_order() -> None:
    page = (Path(__file__).parents[2] / "docs" / "quality.md").read_text()
    assert re.findall(r"^- `(\w+)`: ([^.]+)\.", page, re.MULTILINE) == [
        (limit.name, limit.meaning) for limit in LIMITS.values()
    ]
