"""AUC of dlrm-v4 with the defaults for own events, beside its baselines, over seeds; the last fifth is held out.

Made-up logs of two shapes, and files of your own: NAME=FILE.csv with columns user, item, time and rating or label.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from _rows import record, row, show
from recperf.data.yambda.imports import ImportOptions, import_events
from recperf.train.device import applied
from recperf.train.loop import Position, take_step
from recperf.train.metrics import binary_metrics
from recperf.workloads.dlrm_v4.build import PreparedHistories
from recperf.workloads.dlrm_v4.config import following

Columns = dict[str, np.ndarray]


def courses(draw: np.random.Generator) -> Columns:
    """Eight kinds of users and a small catalogue: 2,500 users, 24 events each, half of them positive."""
    users, items, events = 2500, 300, 60_000
    kind_U, taste_KI = draw.integers(0, 8, users), draw.normal(0, 1.0, (8, items))
    quality_I = draw.normal(0, 0.6, items)
    user, item = draw.integers(0, users, events), draw.integers(0, items, events)
    logits = taste_KI[kind_U[user], item] + quality_I[item] + draw.normal(0, 0.5, users)[user]
    begin_U = draw.uniform(0, 0.9, users)
    time = begin_U[user] + draw.exponential(0.05, events)
    return log(draw, user, item, time, logits)


def offers(draw: np.random.Generator) -> Columns:
    """Items that come and go: 12,000 users, 7 events each, 500 items that live a tenth of the time, 15 % positive."""
    users, items, events = 12_000, 500, 84_000
    born_I, quality_I = draw.uniform(-0.05, 0.95, items), draw.normal(0, 0.9, items)
    side_I, side_U = draw.normal(0, 1, (items, 4)), draw.normal(0, 0.8, (users, 4))
    time, user = draw.uniform(0, 1, events), draw.integers(0, users, events)
    item = np.empty(events, np.int64)
    for place, now in enumerate(time):
        alive = np.flatnonzero((born_I <= now) & (now < born_I + 0.1))
        item[place] = draw.choice(alive) if len(alive) else draw.integers(items)
    logits = quality_I[item] + (side_U[user] * side_I[item]).sum(1) / 2 + draw.normal(0, 0.5, users)[user] - 2.2
    return log(draw, user, item, time, logits)


def log(draw: np.random.Generator, user: Any, item: Any, time: Any, logits: Any) -> Columns:
    label = draw.random(len(logits)) < 1 / (1 + np.exp(-logits))
    seconds = (1_600_000_000 + time * 200 * 86_400).astype(np.int64)
    return {"user": user, "item": item, "time": seconds, "label": label.astype(np.int64)}


MADE_UP: dict[str, Callable[[np.random.Generator], Columns]] = {"courses": courses, "offers": offers}


def scores(store: Path, seeds: int, device: Any) -> tuple[dict[str, list[float]], dict[str, Any]]:
    config = following(store)
    prepared = PreparedHistories(replace(config, train=replace(config.train, device=device)))
    labels_N = prepared.scored_rows().labels_N
    aucs = {name: [binary_metrics(values, labels_N)["auc"]] for name, values in prepared.baseline_logits().items()}
    with applied(prepared.settings):
        for seed in range(1, seeds + 1):
            aucs.setdefault("dlrm-v4", []).append(trained(prepared, seed))
    facts = {name: prepared.data[name] for name in ("train_rows", "valid_rows", "split")}
    return aucs, {**facts, "device": prepared.settings.device_name}


def trained(prepared: PreparedHistories, seed: int) -> float:
    trial = prepared.trial(seed)
    recipe, at = trial.recipe, Position()
    recipe.model.train()
    for epoch in range(recipe.epochs):
        batches = recipe.order.batches(epoch, 0)
        for _ in range(len(recipe.order)):
            take_step(recipe, batches, at.step)
            at = replace(at, step=at.step + 1)
    return float(trial.score()["auc"])


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("files", nargs="*", help="NAME=FILE.csv, or NAME=FOLDER of an imported store")
    words.add_argument("--seeds", type=int, default=5)
    words.add_argument("--device", default="auto")
    words.add_argument("--made-up", nargs="*", default=list(MADE_UP))
    words.add_argument("--dry", action="store_true", help="print rows and do not store them")
    options = words.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(path) for name, path in (entry.split("=", 1) for entry in options.files)}
        for number, name in enumerate(options.made_up):
            columns = MADE_UP[name](np.random.default_rng(number))
            files[name] = Path(folder, f"{name}.csv")
            table = np.stack(list(columns.values()), 1)
            np.savetxt(files[name], table, "%d", ",", header=",".join(columns), comments="")
        rows = []
        for name, file in files.items():
            store = file
            if file.is_file():
                store = import_events(ImportOptions(events=file, name="benchmark"), Path(folder, f"{name}-store"))
            aucs, facts = scores(store, options.seeds, options.device)
            rows += [row("event_quality", f"{name}: {rule}", "auc", "", values, facts) for rule, values in aucs.items()]
            print("\n".join(map(show, rows[-len(aucs) :])), flush=True)
    if not options.dry:
        record(rows)


if __name__ == "__main__":
    main()
