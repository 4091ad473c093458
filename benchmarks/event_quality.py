"""AUC and NDCG@10 of models with the defaults for own data, beside their baselines, over seeds.

Runs `recperf run dlrm-v4 --data STORE --seeds N` on made-up events and your own: NAME=FILE.csv with columns user, item,
time and rating or label, or NAME=FOLDER of an imported store; the last fifth of the events is held out. On made-up
clicks it runs micro-dlrm and dlrm; a random fifth is held out. Arguments after `--` go to the command, for example
`-- --ranking.users 303 --ranking.negatives 0`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from _rows import record, row, show
from recperf.data.events.imports import import_events
from recperf.data.events.options import ImportOptions
from recperf.data.rows.imports import import_clicks
from recperf.data.rows.options import ClickOptions

TARGET_MISSED = 5
"""Exit code of a run that trained and did not reach its target."""
SECONDS = 200 * 86_400
FIRST_SECOND = 1_599_955_200
"""Midnight in UTC."""
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


def tweets(draw: np.random.Generator) -> Columns:
    """Ratings posted soon after a release: 9,000 users with 5 events on average, 3,000 items of which few have most
    events and all fade within weeks, and a taste of users that drifts."""
    users, items, events, moments = 9000, 3000, 45_000, 300
    user = draw.choice(users, events, p=_shares(draw.pareto(1.5, users) + 0.3))
    begin_U = draw.uniform(0, 0.95, users)
    time = np.clip(begin_U[user] + draw.exponential(0.05, events), 0, 0.9999)
    born_I, fame_I = draw.uniform(-0.2, 0.98, items), 1 / np.arange(1, items + 1)
    item, moment = np.empty(events, np.int64), (time * moments).astype(np.int64)
    for one in np.unique(moment):
        age_I = one / moments - born_I
        at, weights = np.flatnonzero(moment == one), fame_I * np.where(age_I < 0, 0, np.exp(-age_I / 0.03) + 0.01)
        item[at] = draw.choice(items, len(at), p=_shares(weights + 1e-12))
    drifting = draw.normal(0, 0.8, (moments // 50, 6))[moment // 50, draw.integers(0, 6, items)[item]]
    logits = draw.normal(0, 0.7, items)[item] + draw.normal(0, 0.8, users)[user] + drifting
    return log(draw, user, item, time, logits)


def planted(effect: str, draw: np.random.Generator) -> Columns:
    """120,000 events of 2,400 users on 300 items in 6 hidden groups. What decides a label is known, and so is the best
    AUC: the groups of the item and of the one before, of the two before, of the item and the hour, or the item and
    the user alone."""
    events, users, items, groups = 120_000, 2400, 300, 6
    user, item = np.sort(draw.integers(0, users, events)), draw.integers(0, items, events)
    time = draw.random(events)
    time = time[np.lexsort((time, user))]
    group = draw.integers(0, groups, items)[item]
    before = [np.where(user == np.roll(user, back), np.roll(group, back), groups) for back in (1, 2)]
    hour = (SECONDS * time).astype(np.int64) // 3600 % 24
    if effect == "last_item":
        logits = draw.normal(0, 2, (groups, groups + 1))[group, before[0]]
    elif effect == "last_two":
        logits = draw.normal(0, 2, (groups, groups + 1, groups + 1))[group, before[0], before[1]]
    elif effect == "hour":
        logits = draw.normal(0, 2, (groups, 6))[group, hour // 4]
    else:
        logits = draw.normal(0, 0.8, items)[item] + draw.normal(0, 0.8, users)[user]
    return log(draw, user, item, time, logits)


def possible_auc(columns: Columns) -> float | None:
    """The expected AUC of the true probabilities on the last fifth of the events."""
    if "possible" not in columns:
        return None
    latest = columns["time"] >= np.quantile(columns["time"], 0.8)
    values, place = np.unique(columns["possible"][latest], return_inverse=True)
    positive, negative = (np.bincount(place) * share for share in (values, 1 - values))
    below = np.cumsum(negative) - negative / 2
    return float((positive * below).sum() / (positive.sum() * negative.sum()))


def _shares(weights: np.ndarray) -> np.ndarray:
    return np.asarray(weights / weights.sum())


def ids(draw: np.random.Generator) -> Columns:
    """Clicks that depend on the item and on hidden groups of user and item: 20,000 rows, 600 users, 400 items."""
    rows, groups = 20_000, 6
    user, item = draw.integers(0, 600, rows), draw.integers(0, 400, rows)
    cells = draw.normal(0, 1.5, (groups, groups))[
        draw.integers(0, groups, 600)[user], draw.integers(0, groups, 400)[item]
    ]
    return log(draw, user, item, np.sort(draw.random(rows)), cells + draw.normal(0, 0.7, 400)[item])


def columns(draw: np.random.Generator) -> Columns:
    """Clicks that depend on a product and a distance of numbers and on a cross of two categories: 5,000 rows."""
    rows = 5000
    x = {f"x{number}": draw.normal(0, 1, rows) for number in range(4)}
    page, site = draw.integers(0, 12, rows), draw.integers(0, 300, rows)
    logits = 1.5 * x["x0"] * x["x1"] + 1.5 * np.abs(x["x2"]) - 1.2
    logits += draw.normal(0, 1.5, (12, 4))[page, draw.integers(0, 4, 300)[site]]
    return {**x, "page": page, "site": site, "label": draw.random(rows) < 1 / (1 + np.exp(-logits))}


def log(draw: np.random.Generator, user: Any, item: Any, time: Any, logits: Any) -> Columns:
    possible = 1 / (1 + np.exp(-logits))
    label = (draw.random(len(logits)) < possible).astype(np.int64)
    seconds = (FIRST_SECOND + time * SECONDS).astype(np.int64)
    return {"user": user, "item": item, "time": seconds, "label": label, "possible": possible}


MADE_UP: dict[str, Callable[[np.random.Generator], Columns]] = {"courses": courses, "offers": offers, "tweets": tweets}
CLICKS: dict[str, Callable[[np.random.Generator], Columns]] = {"ids": ids, "columns": columns}
PLANTED = {effect: partial(planted, effect) for effect in ("last_item", "last_two", "hour", "no_order")}
CLICK_OPTIONS: dict[str, dict[str, str]] = {
    "ids": {"user": "user", "item": "item", "time": "time"},
    "columns": {"categorical": "page,site", "numeric": "x0,x1,x2,x3"},
}


def imported(name: str, file: Path, folder: Path) -> Path:
    """A file as the store that its models read."""
    if name in CLICKS:
        options = ClickOptions(clicks=file, label="label", name=name, **CLICK_OPTIONS[name])  # type: ignore[arg-type]
        import_clicks(options, folder)
        return folder
    return import_events(ImportOptions(events=file, name=name), folder)


def measured(
    name: str, model: str, store: Path, arguments: list[str], folder: Path, possible: float | None
) -> list[dict[str, Any]]:
    """AUC and NDCG@10 of the model, a value for each seed, and of each baseline."""
    command = ["run", model, "--data", str(store), "--run-dir", str(folder), "--no-report", "--no-peaks"]
    done = subprocess.run([sys.executable, "-m", "recperf", *command, *arguments], check=False)
    if done.returncode not in (0, TARGET_MISSED):
        sys.exit(done.returncode)
    result, scores = (json.loads((folder / f"{file}.json").read_text()) for file in ("result", "scores"))
    quality, performance = result["quality"], result["performance"]
    facts = {"device": performance["device"], "seconds": (performance["overall"] or {}).get("seconds")}
    facts |= {key: result["data"][key] for key in ("train_rows", "valid_rows", "split")}
    facts |= {"probabilities": quality.get("probabilities"), "possible_auc": possible}
    own = [seed["metrics"]["auc"] for seed in quality["seeds"]]
    rows = beside(f"{name}: {model}", "auc", own, quality, facts)
    if ranking := quality.get("ranking"):
        facts |= {key: ranking.get(key) for key in ("users", "catalogue", "negatives", "repeats", "meeting", "lists")}
        own = [seed["ranking"]["metrics"]["ndcg_10"] for seed in scores["seeds"].values()]
        rows += beside(f"{name}: {model}", "ndcg_10", own, ranking, facts)
    return rows


def beside(
    name: str, metric: str, own: list[float], part: dict[str, Any], facts: dict[str, Any]
) -> list[dict[str, Any]]:
    """Rows of the model and of every baseline, with the paired difference between them."""
    differences = {one["baseline"]: one for one in part["differences"]}
    rows = [row("event_quality", name, metric, "", own, {**facts, "interval": part["interval"]})]
    for rule, metrics in part["baselines"].items():
        conditions = {**facts, "model_less_this": differences[rule]}
        rows.append(row("event_quality", f"{name}, {rule}", metric, "", [metrics[metric]], conditions))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", help="NAME=FILE.csv, or NAME=FOLDER of an imported store")
    parser.add_argument("--seeds", type=int, default=5)
    made_up = MADE_UP | CLICKS | PLANTED
    parser.add_argument("--made-up", nargs="*", default=list(made_up), choices=list(made_up))
    parser.add_argument("--dry", action="store_true", help="print rows and do not store them")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, more = parser.parse_args(sys.argv[1:end]), sys.argv[end + 1 :]
    rows, possible = [], {}
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(path) for name, path in (entry.split("=", 1) for entry in options.files)}
        for name in options.made_up:
            columns = made_up[name](np.random.default_rng(list(made_up).index(name)))
            possible[name] = possible_auc(columns)
            columns.pop("possible", None)
            files[name] = Path(folder, f"{name}.csv")
            table = np.stack(list(columns.values()), 1)
            np.savetxt(files[name], table, "%.10g", ",", header=",".join(columns), comments="")
        for name, store in files.items():
            store = imported(name, store, Path(folder, f"{name}-store")) if store.is_file() else store
            for model in ("micro-dlrm", "dlrm") if name in CLICKS else ("dlrm-v4",):
                arguments = ["--seeds", str(options.seeds), *more]
                run = Path(folder, f"{name}-{model}")
                measurements = measured(name, model, store, arguments, run, possible.get(name))
                print("\n".join(map(show, measurements)), flush=True)
                rows += measurements
    if not options.dry:
        record(rows)


if __name__ == "__main__":
    main()
