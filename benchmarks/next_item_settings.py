"""Which settings of next-item suit which data: a search over public and made-up logs, and three ways to use it.

FOLDER has the public files `Beauty.txt`, `sequences_sasrec.txt` and `u.data` somewhere inside; without it only made-up
logs are searched:
    python benchmarks/next_item_settings.py search FOLDER --seconds 4     # of CPU time for each training; adds rows
    python benchmarks/next_item_settings.py compare                       # from the rows
The models are alone: with their counts all settings are level on small logs. `compare` states the test NDCG@10 that is
lost, against the best setting of each log, by the best single setting, by a
rule with one threshold (fitted without the log it is tried on), and by two short trials on the log's own validation
targets, each with a quarter of the time, of which the better one gets the rest.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch

from _rows import RESULTS, record, row
from next_item import changed, read
from recperf.data.next_item import NextItemData, Targets
from recperf.train.device import applied
from recperf.train.loop import take_step
from recperf.train.next_item import rank
from recperf.workloads.next_item.build import PreparedSequences
from recperf.workloads.next_item.config import for_data

SETTINGS = {
    "base": ["model.dropout=0.3", "train.batch_size=64"],
    "dropout 0.1": ["model.dropout=0.1", "train.batch_size=64"],
    "dropout 0.5": ["model.dropout=0.5", "train.batch_size=64"],
    "two blocks": ["model.blocks=2", "model.dropout=0.3", "train.batch_size=64"],
    "width 32": ["model.dim=32", "model.head_dim=32", "model.dropout=0.3", "train.batch_size=64"],
    "temperature 0.05": ["model.temperature=0.05", "model.dropout=0.3", "train.batch_size=64"],
    "small batches": ["train.batch_size=16", "train.learning_rate=0.002", "model.dropout=0.3"],
    "hstu": ["model.encoder=hstu", "model.dropout=0.3", "train.batch_size=64"],
}
MARKS = (0.25, 0.5, 0.75, 1.0)
"""Shares of the time at which the best evaluation so far is noted."""
FACTS = ("events", "users", "items", "length")


def made_up(
    users: int, items: int, length: int, groups: int, order: float, power: float, two: bool = False
) -> Callable[[], NextItemData]:
    """Users of about `length` events: the group of the next item follows from the last one (or the last `two`) with a
    probability of `order`, and is the user's own otherwise; items of a group are as popular as 1 / rank^power."""

    def data() -> NextItemData:
        draw = np.random.default_rng([users, items, length])
        size = items // groups
        shares = 1 / np.arange(1.0, size + 1) ** power
        shares, follows = shares / shares.sum(), draw.integers(groups, size=(groups, groups))
        lines = []
        for _ in range(users):
            own, line = draw.integers(groups, size=2), draw.integers(groups, size=2).tolist()
            for _ in range(max(3, int(draw.poisson(length)))):
                chosen = follows[line[-2] if two else 0, line[-1]] if draw.random() < order else draw.choice(own)
                line.append(int(chosen))
            lines.append([1 + group * size + int(draw.choice(size, p=shares)) for group in line[2:]])
        offsets_U1 = np.concatenate([[0], np.cumsum([len(line) for line in lines])])
        events = np.concatenate([np.array(line, np.int32) for line in lines])
        return NextItemData(
            name="made up", items=items, users=users, offsets_U1=offsets_U1, items_E=events, times_E=None
        )

    return data


MADE_UP = {
    "few users, order": made_up(150, 200, 12, 10, 0.8, 1.0),
    "few users, tastes": made_up(150, 200, 12, 10, 0.1, 1.0),
    "many users, order": made_up(3000, 400, 7, 20, 0.7, 1.0),
    "many users, tastes": made_up(3000, 400, 7, 20, 0.1, 1.0),
    "many items": made_up(2000, 4000, 8, 40, 0.6, 0.7),
    "few items": made_up(2000, 40, 8, 8, 0.6, 0.5),
    "long histories, order": made_up(250, 500, 80, 20, 0.7, 1.0),
    "long histories, tastes": made_up(250, 500, 80, 20, 0.2, 1.0),
    "two items decide": made_up(1500, 300, 14, 8, 0.9, 0.8, two=True),
    "little structure": made_up(1500, 300, 10, 30, 0.3, 0.3),
}


def of_users(data: NextItemData, count: int) -> NextItemData:
    """The events of some users, drawn at random."""
    users = np.sort(np.random.default_rng(7).permutation(data.users)[:count])
    lines = [data.items_E[data.offsets_U1[user] : data.offsets_U1[user + 1]] for user in users]
    kept, items_E = np.unique(np.concatenate(lines), return_inverse=True)
    offsets_U1 = np.concatenate([[0], np.cumsum([len(line) for line in lines])])
    return replace(
        data, users=len(users), items=len(kept), offsets_U1=offsets_U1, items_E=(items_E + 1).astype(np.int32)
    )


def ratings(path: Path) -> NextItemData:
    """MovieLens-100K, by time; ratings of one second in the order of the file."""
    rows = np.loadtxt(path, dtype=np.int64)
    rows = rows[np.lexsort((np.arange(len(rows)), rows[:, 3], rows[:, 0]))]
    counts = np.unique(rows[:, 0], return_counts=True)[1]
    return NextItemData(
        name=path.stem, items=int(rows[:, 1].max()), users=len(counts),
        offsets_U1=np.concatenate([[0], np.cumsum(counts)]), items_E=rows[:, 1].astype(np.int32), times_E=None,
    )  # fmt: skip


def logs(folder: Path | None) -> Iterator[tuple[str, NextItemData]]:
    yield from ((name, data()) for name, data in MADE_UP.items())
    for path in sorted(folder.rglob("*")) if folder else ():
        if path.name == "u.data":
            yield "MovieLens-100K", ratings(path)
        elif path.name == "Beauty.txt":
            yield "Beauty, 4,000 users", of_users(read(path), 4000)
        elif path.name == "sequences_sasrec.txt":
            yield "ML-1M, 500 users", of_users(read(path), 500)


def trained(data: NextItemData, settings: list[str], seconds: float) -> list[dict[str, float]]:
    """Validation and test NDCG@10 of the best evaluation up to each mark of the CPU time."""
    config = for_data(data)
    sizes: dict[str, Any] = {
        "encoder": "transformer",
        "dim": 64,
        "blocks": 1,
        "heads": 1,
        "head_dim": 64,
        "counts": "off",
    }
    model = replace(config.model, items=data.items, time_buckets=0, **sizes)
    config = replace(config, train=replace(config.train, device="cpu", threads=1), model=model)
    prepared = PreparedSequences(changed(config, settings), data)
    torch.manual_seed(1)
    trial = prepared.trial(1)
    recipe, seen = trial.recipe, prepared.sequences.seen
    best, marks, spent, number = {"validation": -1.0, "test": 0.0}, list(MARKS), 0.0, 0
    reached = []
    with applied(prepared.settings):
        while marks:
            begun = time.process_time()
            recipe.model.train()
            batches = recipe.order.batches(number)
            for step in range(len(recipe.order)):
                take_step(recipe, batches, number * len(recipe.order) + step)
                if spent + time.process_time() - begun > seconds:
                    break
            spent, number = spent + time.process_time() - begun, number + 1
            recipe.model.train(False)
            with torch.no_grad():
                trial.fit_counting()
                targets = {"validation": prepared.sequences.validation, "test": some(prepared.sequences.test)}
                ndcg = {
                    name: rank(data, part, trial.score, seen=seen).metrics()["ndcg_10"]
                    for name, part in targets.items()
                }
            best = max(best, ndcg, key=lambda one: one["validation"])
            while marks and spent >= marks[0] * seconds:
                reached.append(dict(best))
                marks.pop(0)
    return reached


def some(targets: Targets, most: int = 2000) -> Targets:
    step = max(1, -(-len(targets) // most))
    return Targets(targets.users_N[::step], targets.positions_N[::step])


def search(options: argparse.Namespace) -> None:
    for name, data in logs(options.folder):
        facts = {"events": len(data.items_E), "users": data.users, "items": data.items}
        for setting, changes in SETTINGS.items():
            marks = trained(data, changes, options.seconds)
            conditions = {**facts, "length": len(data.items_E) / data.users, "seconds": options.seconds, "marks": marks}
            rows = [row("next_item_settings", f"{name}: {setting}", "ndcg_10", "", [marks[-1]["test"]], conditions)]
            print(f"{name:<24} {setting:<18} {[round(mark['test'], 4) for mark in marks]}", flush=True)
            if not options.dry:
                record(rows)


def compare(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The mean share of the best test NDCG@10 of each log that every way loses."""
    tables: dict[str, dict[str, list[dict[str, float]]]] = {}
    facts: dict[str, dict[str, float]] = {}
    for one in rows:
        name, setting = one["variant"].split(": ")
        tables.setdefault(name, {})[setting] = one["conditions"]["marks"]
        facts[name] = {fact: one["conditions"][fact] for fact in FACTS}
    names = list(tables)
    settings = [setting for setting in SETTINGS if all(setting in tables[name] for name in names)]
    ends = np.array([[tables[name][one][-1]["test"] for one in settings] for name in names])
    lost_LS = 1 - ends / ends.max(1, keepdims=True)

    def rule(inside: list[int]) -> tuple[float, str, float, int, int]:
        """The best rule: below a threshold of a fact one setting, else another."""
        found = []
        for fact in FACTS:
            values = np.array([facts[names[at]][fact] for at in inside])
            for edge in np.unique(values):
                for low, high in ((a, b) for a in range(len(settings)) for b in range(len(settings))):
                    lost = np.where(values < edge, lost_LS[inside, low], lost_LS[inside, high]).mean()
                    found.append((float(lost), fact, float(edge), low, high))
        return min(found)

    def by_rule(at: int, of: tuple[float, str, float, int, int]) -> float:
        _, fact, edge, low, high = of
        return float(lost_LS[at, low if facts[names[at]][fact] < edge else high])

    def by_trials(at: int, pair: tuple[int, int]) -> float:
        table = tables[names[at]]
        first, *_ = sorted(pair, key=lambda one: -table[settings[one]][0]["validation"])
        # Of the time a quarter went to the other trial.
        return float(1 - table[settings[first]][2]["test"] / ends[at].max())

    every = list(range(len(names)))
    without = [[one for one in every if one != at] for at in every]
    single = [float(lost_LS[at, lost_LS[others].mean(0).argmin()]) for at, others in zip(every, without)]
    ruled = [by_rule(at, rule(others)) for at, others in zip(every, without)]
    pairs = list(combinations(range(len(settings)), 2))
    tried = []
    for at, others in zip(every, without):
        lost = {pair: sum(by_trials(one, pair) for one in others) for pair in pairs}
        tried.append(by_trials(at, min(pairs, key=lambda pair: lost[pair])))
    _, fact, edge, low, high = rule(every)
    return {
        "logs": len(names),
        "single setting": float(np.mean(single)),
        "rule": float(np.mean(ruled)),
        "two short trials": float(np.mean(tried)),
        "best single setting": settings[int(lost_LS.mean(0).argmin())],
        "best rule": f"{settings[low]} below {edge:g} {fact}, else {settings[high]}",
        "lost by setting": dict(zip(settings, lost_LS.mean(0).round(4).tolist())),
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["search", "compare"])
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--seconds", type=float, default=4.0, help="of CPU time for each training")
    parser.add_argument("--rows", type=Path, default=RESULTS / "next_item_settings.jsonl")
    parser.add_argument("--dry", action="store_true", help="print and do not store")
    options = parser.parse_args(arguments)
    if options.what == "search":
        search(options)
    else:
        print(json.dumps(compare([json.loads(line) for line in options.rows.read_text().splitlines()]), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
