"""Finished runs that ranked items and predicted labels, written by hand, and the bench of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import example_runs as examples
import numpy as np

from recperf.runs.bench import Bench, BenchModel, bench

METRICS = {"hit_rate_10": 0.0, "ndcg_10": 0.0, "mrr": 0.0}


def ranking(ranks: list[int], **more: Any) -> dict[str, Any]:
    return {"metrics": METRICS, "segments": {}, "ndcg_replicates": [0.1] * 9, "ranks": ranks, **more}


def drawn(seed: int, count: int, p: float) -> list[int]:
    return np.random.default_rng(seed).geometric(p, size=count).tolist()


def make(
    folder: Path,
    workload: str,
    *,
    keys: list[int],
    rules: dict[str, list[int]],
    ranks: list[int],
    auc: tuple[float, float] | None = None,
    digest: str = "rows",
    repeats: bool = False,
) -> BenchModel:
    """A run that ranks the items of users and, with an `auc`, predicts labels; the second one is that of a baseline."""
    examples.make_run(folder, workload=workload, auc=auc[0] if auc else 0.8, measured=())
    noise = np.random.default_rng(9).normal(size=40) / 100
    labels = {} if auc is None else {
        "leading": auc[0], "replicates": {"auc": (auc[0] + noise).tolist(), "log_loss": (0.5 + noise).tolist()}
    }  # fmt: skip
    rows = {} if auc is None else {
        "item_bias": {"leading": auc[1], "replicates": {"auc": (auc[1] + 0.9 * noise).tolist(), "log_loss": [0.6] * 40}}
    }  # fmt: skip
    own = ranking(ranks, one_ms={"p20": 1.0, "p50": 2.0, "p80": 3.0})
    facts = {"users": len(keys), "catalogue": 300, "negatives": 0, "repeats": repeats, "keys": keys,
             "baselines": {name: ranking(of) for name, of in rules.items()}}  # fmt: skip
    saved = {"rows": 4000, "rows_digest": digest, "by": "users", "units": 600, "ranking": facts, "baselines": rows,
             "seeds": {"42": {**labels, "rows_digest": digest, "ranking": own}}}  # fmt: skip
    (folder / "scores.json").write_text(json.dumps(saved))
    detail = {**{name: value for name, value in facts.items() if name not in ("keys", "baselines")}, "metrics": METRICS,
              "baselines": {}, "interval": {"low": 0.0, "high": 0.1}, "differences": [],
              "one_ms": own["one_ms"]}  # fmt: skip
    examples.change(folder, "result.json", "quality.ranking", detail)
    examples.change(folder, "result.json", "quality.target", {"beat": None, "accuracy": None, "auc": None})
    if auc is None:
        examples.change(folder, "result.json", "task", "next-item")
        examples.change(folder, "result.json", "quality.metrics", METRICS)
        examples.change(folder, "result.json", "quality.baselines", {"popularity": METRICS})
    else:
        examples.change(folder, "result.json", "quality.baselines", {"item_bias": {"auc": auc[1], "log_loss": 0.6}})
    return BenchModel(workload=workload, run=str(folder), peak_bytes=300 << 20)


def bench_of(tmp_path: Path) -> Bench:
    """One model that predicts items and ranked all users, and two that predict labels and ranked fewer."""
    count = 600
    rules = {"popularity": drawn(1, count, 0.02), "ease": drawn(2, count, 0.08)}
    few = slice(0, 500)
    counted = {"popularity": rules["popularity"][few], "positives": drawn(6, 500, 0.01)}
    keys = list(range(5000, 5000 + count))
    first = drawn(3, count, 0.2)
    models = [
        make(tmp_path / "one", "one", keys=keys[few], rules=counted, ranks=drawn(4, 500, 0.05), auc=(0.7, 0.65)),
        make(tmp_path / "items", "items", keys=keys, rules=rules, ranks=first),
        make(tmp_path / "two", "two", keys=keys[few], rules=counted, ranks=drawn(5, 500, 0.05), auc=(0.72, 0.65)),
        BenchModel(workload="lost", run=str(tmp_path / "lost"), error="no memory"),
    ]
    return bench("shop", "events", models)
