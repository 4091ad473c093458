"""Next-item quality and the time to it: next-item and hstu beside plain torch by the same recipes, in the same run.

FILE has a line "user item" for each event in the order of time, or a line "user item item ..." for each user:
    python benchmarks/next_item.py FILE --seeds 5 --device cuda --goal 0.06
Each user's last item is the test and the one before it the validation. After each epoch all items are ranked for both,
those of the history left out; the epoch with the best validation NDCG@10 counts. next-item has its settings for the
data and the device, and its counts; hstu and both plain models have none. Evaluations and their end are as configured,
as are the users whose validation items choose the epoch. Times are those of training alone, without
evaluations, from the first step on; `cpu_seconds` has all that the process did up to the best epoch.

`--sides counts` has popularity, what followed and item-kNN, whose settings the validation chose. FILE may also be the
folder of an event store (`recperf data import --store FOLDER`), with its times or not, split by time or leave-one-out.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from _next_item_plain import PlainTraining
from _rows import record, row, show
from recperf.config import to_json
from recperf.data.config import EventSplitOptions
from recperf.data.events.store import open_store
from recperf.data.next_item import NextItemData, Targets
from recperf.data.split.events import of_events
from recperf.tasks import NEXT_ITEM
from recperf.train.device import applied
from recperf.train.item_rules import baselines
from recperf.train.loop import take_step
from recperf.train.next_item import Scorer, rank
from recperf.workloads.next_item.build import PreparedSequences
from recperf.workloads.next_item.config import NextItemRunConfig, for_data, with_sizes
from recperf.workloads.next_item.hstu import dense, sparse
from recperf.workloads.next_item.own_data import DENSE, mean_events

GOAL = 0.172
"""NDCG@10 that was published for HSTU on ML-1M."""
SIDES = ("next-item", "hstu", "plain transformer", "plain", "counts")


def read(path: Path, split: str | None = None, times: bool = True) -> NextItemData:
    if path.is_dir():
        store = open_store(path)
        chosen = of_events(store, EventSplitOptions(split=split))  # type: ignore[arg-type]
        data = NextItemData.from_store(store, chosen)
        return data if times else replace(data, times_E=None)
    lines = [line.split() for line in path.read_text().splitlines() if line.strip()]
    if len(lines[0]) == 2:
        users, items = np.array(lines, np.int64).T
        order = np.argsort(users, kind="stable")
        items, counts = items[order], np.unique(users, return_counts=True)[1]
    else:
        items = np.concatenate([np.array(line[1:], np.int64) for line in lines])
        counts = np.array([len(line) - 1 for line in lines])
    offsets_U1 = np.concatenate([[0], np.cumsum(counts)])
    return NextItemData(
        name=path.stem, items=int(items.max()), users=len(counts), offsets_U1=offsets_U1,
        items_E=items.astype(np.int32), times_E=None,
    )  # fmt: skip


@dataclass(frozen=True)
class Side:
    """A training: takes an epoch, and scores items."""

    epoch: Callable[[int], None]
    score: Scorer
    sync: Callable[[], None]
    fit: Callable[[], None] = lambda: None
    """What comes before an evaluation."""


def ours(data: NextItemData, config: NextItemRunConfig, seed: int) -> tuple[PreparedSequences, Side]:
    prepared = PreparedSequences(config, data)
    torch.manual_seed(seed)
    trial = prepared.trial(seed)
    recipe = trial.recipe

    def epoch(number: int) -> None:
        recipe.model.train()
        batches = recipe.order.batches(number)
        for place in range(len(recipe.order)):
            take_step(recipe, batches, number * len(recipe.order) + place)

    def score(targets: Targets) -> torch.Tensor:
        return trial.score(targets)

    def fit() -> None:
        recipe.model.train(False)
        trial.fit_counting()

    return prepared, Side(epoch, score, prepared.settings.sync or (lambda: None), fit)


def measured(
    data: NextItemData, side: Side, targets: tuple[Targets, Targets], options: argparse.Namespace, label: str
) -> dict[str, float]:
    """The best epoch by validation, its test metrics, and how long training took to the goal and to that epoch."""
    seconds, reached, best, waited, began = 0.0, float("nan"), {NEXT_ITEM.choosing: -1.0}, 0, time.process_time()
    for number in range(options.epochs):
        side.sync()
        start = time.perf_counter()
        side.epoch(number)
        side.sync()
        seconds += time.perf_counter() - start
        if (number + 1) % options.every and seconds < options.seconds:
            continue
        side.fit()
        test, validation = (rank(data, part, side.score, seen="left-out").metrics() for part in targets)
        if test["ndcg_10"] >= options.goal and not reached <= seconds:
            reached = seconds
        waited += 1
        if validation["ndcg_10"] > best[NEXT_ITEM.choosing]:
            best, waited = (
                {**test, NEXT_ITEM.choosing: validation["ndcg_10"], "epoch": number + 1, "seconds": seconds},
                0,
            )
            best["cpu_seconds"] = time.process_time() - began
        print(
            f"{label}  epoch {number + 1}  {seconds:.1f} s  validation NDCG@10 {validation['ndcg_10']:.4f}  "
            f"test NDCG@10 {test['ndcg_10']:.4f}  HR@10 {test['hit_rate_10']:.4f}",
            flush=True,
        )
        if waited >= options.patience or seconds >= options.seconds:
            break
    return {**best, "seconds_to_goal": reached, "seconds_an_epoch": seconds / (number + 1)}


def changed(config: NextItemRunConfig, settings: list[str]) -> NextItemRunConfig:
    """The config with settings such as model.dropout=0.3."""
    for setting in settings:
        (part, name), value = setting.split("=")[0].split("."), setting.split("=")[1]
        section = getattr(config, part)
        kind = type(next(getattr(section, one.name) for one in fields(section) if one.name == name))
        config = replace(config, **{part: replace(section, **{name: kind(value)})})
    return config


def config_of(kind: str, data: NextItemData, options: argparse.Namespace) -> NextItemRunConfig:
    """The settings of next-item for the data and the device, or a preset of hstu."""
    if kind == "next-item":
        config = for_data(data)
        config = replace(config, model=replace(config.model, encoder="transformer"))
    else:
        config = dense() if mean_events(data) >= DENSE else sparse()
    buckets = 0 if data.times_E is None else config.model.time_buckets
    config = replace(config, model=replace(config.model, items=data.items, time_buckets=buckets))
    config = changed(replace(config, train=replace(config.train, device=options.device)), options.set)
    return with_sizes(config, data)


def plain_sizes(kind: str, config: NextItemRunConfig) -> dict[str, Any]:
    """The sizes of the plain model beside ours."""
    model = config.model
    sizes = {"dim": model.dim, "blocks": model.blocks, "heads": model.heads, "dropout": model.dropout}
    if kind == "plain":
        # As published where users have many events.
        return sizes if model.blocks < 8 else {}
    more = {"length": model.max_length, "temperature": model.temperature, "batch": config.train.batch_size}
    return {**sizes, **more}


def counted_rows(data: NextItemData, name: str, conditions: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each metric of each baseline that counts."""
    rows = []
    for baseline, make in baselines(data).items():
        metrics = rank(data, data.test(), make(), seen="left-out").metrics()
        for metric in ("ndcg_10", "hit_rate_10"):
            facts = {**conditions, "device": "cpu", "seeds": 1, "by_seed": [metrics[metric]]}
            rows.append(row("next_item", f"{name}: {baseline}", metric, "", [metrics[metric]], facts))
            print(show(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--sides", nargs="*", default=SIDES, choices=SIDES)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--every", type=int, default=0, help="evaluate after so many epochs; 0: as configured")
    parser.add_argument("--goal", type=float, default=GOAL, help="NDCG@10 to which the time counts")
    parser.add_argument("--patience", type=int, default=0, help="evaluations without a better one; 0: as configured")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of training after which a side stops")
    parser.add_argument("--split", choices=["time", "leave-one-out"], help="of an event store")
    parser.add_argument("--no-times", action="store_true", help="leave the times of an event store out")
    parser.add_argument("--set", nargs="*", default=[], help="settings of our models, such as model.dropout=0.3")
    parser.add_argument("--dry", action="store_true", help="print rows and do not store them")
    options = parser.parse_args()
    data = read(options.file, options.split, not options.no_times)
    name = options.file.stem + (f", split {options.split}" if options.split else "") + ", no times" * options.no_times
    configs = {kind: config_of(kind, data, options) for kind in ("next-item", "hstu")}
    rows = []
    for kind in options.sides:
        results = []
        if kind == "counts":
            facts = {"file": options.file.name, "users": data.users, "items": data.items, "set": []}
            rows += counted_rows(data, name, facts)
            continue
        for seed in range(1, options.seeds + 1):
            prepared, side = ours(data, configs["hstu" if kind in ("hstu", "plain") else "next-item"], seed)
            with applied(prepared.settings):
                if kind.startswith("plain"):
                    training = PlainTraining(data, options.device, seed, **plain_sizes(kind, prepared.config))
                    side = Side(training.epoch, training.score, side.sync)
                label = f"{kind} {'' if kind.startswith('plain') else ' '.join(options.set)} seed {seed}"
                targets, train = (data.test(), prepared.sequences.validation), prepared.config.train
                looks = argparse.Namespace(**vars(options))
                looks.every, looks.patience = options.every or train.evaluate_epochs, options.patience or train.patience
                results.append(measured(data, side, targets, looks, label))
        conditions = {
            "file": options.file.name, "users": data.users, "items": data.items, "device": options.device,
            "seeds": options.seeds, "set": [] if kind.startswith("plain") else options.set,
            "graph": "off" if kind.startswith("plain") else prepared.settings.reasons["graph"],
            "model": to_json(prepared.config.model), "batch_size": prepared.config.train.batch_size,
            "threads": prepared.settings.threads, "best_epochs": [result["epoch"] for result in results],
        }  # fmt: skip
        seconds = ("seconds_to_goal", "seconds", "seconds_an_epoch", "cpu_seconds")
        for metric in ("ndcg_10", "hit_rate_10", *seconds):
            values = [result[metric] for result in results]
            conditions |= {"goal": options.goal, "by_seed": values}
            unit = "s" if metric in seconds else ""
            rows.append(row("next_item", f"{name}: {kind}", metric, unit, values, dict(conditions)))
            print(f"{show(rows[-1])}  mean {np.mean(values):.4f}", flush=True)
    if not options.dry:
        record(rows)


if __name__ == "__main__":
    main()
