"""What the bootstrap replicates of a run say: intervals, differences to baselines with their certainty, warnings.

Computed from scores.json without torch, so that `recperf check` can compute it again.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from typing import Any

from ..train.config import ORACLES, STARTS

FEW_ROWS = 1000
LEAKED_AUC = 0.99


def interval(replicates: Sequence[float]) -> dict[str, float]:
    """The middle 95 % of the replicates."""
    ordered = sorted(replicates)
    return {"low": _quantile(ordered, 0.025), "high": _quantile(ordered, 0.975)}


def _quantile(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def combined(seeds: Sequence[Sequence[float]]) -> list[float]:
    """Replicates of the mean over the seeds: in each replicate the seeds are drawn with replacement, as users are."""
    if len(seeds) == 1:
        return list(seeds[0])
    draw = random.Random(len(seeds))
    return [statistics.fmean(draw.choice(seeds)[place] for _ in seeds) for place in range(len(seeds[0]))]


def detail(scores: dict[str, Any], metrics: dict[str, float]) -> dict[str, Any]:
    """The fields of a result's quality that follow from scores.json; `metrics` are the means over the seeds."""
    seeds, baselines = list(scores["seeds"].values()), scores["baselines"]
    fields: dict[str, Any] = {}
    if seeds:
        bounds = interval(combined([seed["auc_replicates"] for seed in seeds]))
        facts = {name: scores[name] for name in ("by", "units")}
        fields["interval"] = {**bounds, **facts, "replicates": len(seeds[0]["auc_replicates"])}
    paired = [seed for seed in seeds if seed["rows_digest"] == scores["rows_digest"]]
    if paired and baselines:
        fields["baseline_intervals"] = {name: interval(rule["auc_replicates"]) for name, rule in baselines.items()}
        fields["differences"] = [
            _difference(name, baselines[name], paired, "auc")
            for name in sorted(baselines, key=lambda name: -float(baselines[name]["auc"]))
        ]
    if paired:
        fields["segments"] = [_segment(name, facts, paired, scores) for name, facts in scores["segments"].items()]
        fields["calibration"] = [_means(bins) for bins in zip(*(seed["calibration"] for seed in paired))]
    if own := [seed["within_users"] for seed in paired if seed.get("within_users")]:
        rules = {name: rule["within_users"] for name, rule in baselines.items() if rule.get("within_users")}
        fields["within_users"] = {"users": own[0]["users"], **_beside(own, rules, "user_ndcg_10")}
    fields |= _ranking(scores, paired)
    if texts := warnings(scores, metrics):
        fields["warnings"] = texts
    return fields


def _segment(name: str, facts: dict[str, Any], seeds: list[dict[str, Any]], scores: dict[str, Any]) -> dict[str, Any]:
    ranked = [seed["ranking"]["segments"][name] for seed in seeds if name in (seed.get("ranking") or _NONE)["segments"]]
    own = [seed["segments"][name] for seed in seeds if name in seed["segments"]]
    return {
        "name": name,
        **facts,
        "auc": statistics.fmean(own) if own else None,
        "baselines": {
            rule: row["segments"][name] for rule, row in scores["baselines"].items() if name in row["segments"]
        },
        "ranking": _means(ranked) if ranked else None,
    }


_NONE: dict[str, Any] = {"segments": {}}


def _means(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The mean of each number; one that is the same in all rows stays as it is."""
    return {
        name: value if all(row[name] == value for row in rows) else statistics.fmean(row[name] for row in rows)
        for name, value in rows[0].items()
    }


def _ranking(scores: dict[str, Any], seeds: list[dict[str, Any]]) -> dict[str, Any]:
    facts, ranked = scores.get("ranking"), [seed["ranking"] for seed in seeds if seed.get("ranking")]
    if not facts or not ranked:
        return {"not_ranked": scores["not_ranked"]} if scores.get("not_ranked") else {}
    what = {name: facts[name] for name in ("users", "catalogue", "negatives", "repeats", "meeting") if name in facts}
    return {"ranking": {**what, **_beside(ranked, facts["baselines"], "ndcg_10")}}


def _beside(seeds: list[dict[str, Any]], rules: dict[str, dict[str, Any]], metric: str) -> dict[str, Any]:
    """Metrics of the seeds and of the baselines, with the interval and the differences of an NDCG."""
    rows = {name: {**rule, "ndcg": rule["metrics"][metric]} for name, rule in rules.items()}
    own = [{**seed, "ndcg": seed["metrics"][metric]} for seed in seeds]
    best_first = sorted(rows, key=lambda name: -float(rows[name]["ndcg"]))
    return {
        "metrics": _means([seed["metrics"] for seed in seeds]),
        "baselines": {name: rule["metrics"] for name, rule in rules.items()},
        "interval": interval(combined([seed["ndcg_replicates"] for seed in seeds])),
        "differences": [_difference(name, rows[name], own, "ndcg") for name in best_first],
    }


def _difference(name: str, rule: dict[str, Any], seeds: list[dict[str, Any]], metric: str) -> dict[str, Any]:
    """Model less baseline: its mean over the seeds, the interval over users and seeds, and how often it is negative."""
    theirs = rule[f"{metric}_replicates"]
    own = [[one - other for one, other in zip(seed[f"{metric}_replicates"], theirs)] for seed in seeds]
    replicates = combined(own)
    return {
        "baseline": name,
        metric: statistics.fmean(seed[metric] for seed in seeds) - rule[metric],
        **interval(replicates),
        "below_zero": sum(value < 0 for value in replicates) / len(replicates),
        "seeds": len(seeds),
    }


def best_difference(quality: dict[str, Any]) -> dict[str, Any] | None:
    """The difference to the best baseline that counts for a target."""
    return best_of(quality.get("differences") or ())


def best_of(differences: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Of differences with the best baseline first, that to the first one that is neither an oracle nor the start of the
    model."""
    return next((row for row in differences if row["baseline"] not in (*ORACLES, *STARTS)), None)


def start_difference(quality: dict[str, Any]) -> dict[str, Any] | None:
    """The difference to what the model computes before its first step, where that is a baseline."""
    return next((row for row in quality.get("differences") or () if row["baseline"] in STARTS), None)


def few_rows(rows: int) -> str | None:
    if rows >= FEW_ROWS:
        return None
    return f"only {rows:,} rows are scored; below {FEW_ROWS:,} metrics say little: hold out more"


def warnings(scores: dict[str, Any], metrics: dict[str, float]) -> list[str]:
    """Reasons to doubt the metrics."""
    texts = [few_rows(scores["rows"])]
    if metrics["auc"] > LEAKED_AUC:
        text = f"AUC {metrics['auc']:.4f}: a feature may contain the label"
        strongest = scores.get("strongest_feature")
        if strongest:
            text += f"; {strongest['name']} alone reaches {strongest['auc']:.4f}"
        texts.append(text)
    return [text for text in texts if text]
