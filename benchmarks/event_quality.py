"""AUC and NDCG@10 of dlrm-v4 with the defaults for own events, beside its baselines, over seeds.

Runs `recperf run dlrm-v4 --data STORE --seeds N`: the last fifth of the events is held out. Made-up logs of two shapes,
and your own: NAME=FILE.csv with columns user, item, time and rating or label, or NAME=FOLDER of an imported store.
Arguments after `--` go to the command, for example `-- --ranking.users 303 --ranking.negatives 0`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from _rows import record, row, show
from recperf.data.yambda.imports import ImportOptions, import_events

TARGET_MISSED = 5
"""Exit code of a run that trained and did not reach its target."""
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


def measured(name: str, store: Path, arguments: list[str], folder: Path) -> list[dict[str, Any]]:
    """AUC and NDCG@10 of the model, a value for each seed, and of each baseline."""
    command = ["run", "dlrm-v4", "--data", str(store), "--run-dir", str(folder), "--no-report", "--no-peaks"]
    done = subprocess.run([sys.executable, "-m", "recperf", *command, *arguments], check=False)
    if done.returncode not in (0, TARGET_MISSED):
        sys.exit(done.returncode)
    result, scores = (json.loads((folder / f"{file}.json").read_text()) for file in ("result", "scores"))
    quality, facts = result["quality"], {"device": result["performance"]["device"]}
    facts |= {key: result["data"][key] for key in ("train_rows", "valid_rows", "split")}
    own = [seed["metrics"]["auc"] for seed in quality["seeds"]]
    rows = beside(name, "auc", own, quality, facts)
    if ranking := quality.get("ranking"):
        facts |= {key: ranking[key] for key in ("users", "catalogue", "negatives", "repeats", "meeting")}
        own = [seed["ranking"]["metrics"]["ndcg_10"] for seed in scores["seeds"].values()]
        rows += beside(name, "ndcg_10", own, ranking, facts)
    return rows


def beside(
    name: str, metric: str, own: list[float], part: dict[str, Any], facts: dict[str, Any]
) -> list[dict[str, Any]]:
    """Rows of the model and of every baseline, with the paired difference between them."""
    differences = {one["baseline"]: one for one in part["differences"]}
    rows = [row("event_quality", f"{name}: dlrm-v4", metric, "", own, {**facts, "interval": part["interval"]})]
    for rule, metrics in part["baselines"].items():
        conditions = {**facts, "model_less_this": differences[rule]}
        rows.append(row("event_quality", f"{name}: {rule}", metric, "", [metrics[metric]], conditions))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", help="NAME=FILE.csv, or NAME=FOLDER of an imported store")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--made-up", nargs="*", default=list(MADE_UP), choices=list(MADE_UP))
    parser.add_argument("--dry", action="store_true", help="print rows and do not store them")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, more = parser.parse_args(sys.argv[1:end]), sys.argv[end + 1 :]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(path) for name, path in (entry.split("=", 1) for entry in options.files)}
        for number, name in enumerate(options.made_up):
            columns = MADE_UP[name](np.random.default_rng(number))
            files[name] = Path(folder, f"{name}.csv")
            table = np.stack(list(columns.values()), 1)
            np.savetxt(files[name], table, "%d", ",", header=",".join(columns), comments="")
        for name, store in files.items():
            if store.is_file():
                store = import_events(ImportOptions(events=store, name=name), Path(folder, f"{name}-store"))
            arguments = ["--seeds", str(options.seeds), *more]
            measurements = measured(name, store, arguments, Path(folder, f"{name}-run"))
            print("\n".join(map(show, measurements)), flush=True)
            rows += measurements
    if not options.dry:
        record(rows)


if __name__ == "__main__":
    main()
