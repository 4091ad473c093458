"""hstu: a resumed run ends with the same bits, and what follows from the order of items is learned."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recperf.cli import main
from recperf.data.yambda.import_options import ImportOptions
from recperf.data.yambda.imports import import_events
from recperf.train.device import applied
from recperf.train.loop import take_step
from recperf.workloads.hstu.build import PreparedSequences
from recperf.workloads.hstu.config import default, resolve

EPOCHS, STEPS = 5, 20
RUN = ["run", "hstu", "--data.users", "60", "--train.epochs", str(EPOCHS), "--train.batch-size", "16"]
UNTIL_WORSE = ["--train.learning-rate", "1", "--train.patience", "0", "--target.beat", "none"]
QUIETLY = ["--train.device", "cpu", "--train.threads", "1", "--no-peaks", "--no-report", "--quiet"]


def logged(folder: Path, kind: str) -> list[dict[str, Any]]:
    events = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [event for event in events if event["kind"] == kind]


def test_a_run_killed_after_its_best_epoch_ends_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropout draws from torch's own generators, so that their state must come back with the weights; and so must the
    weights of the epoch that validation chose, which is not the last at so high a rate."""
    monkeypatch.chdir(tmp_path)
    whole, resumed = Path("whole"), Path("resumed")
    options = ["--train.checkpoint-steps", "3", "--train.keep-last", "30", "--train.checkpoint-background", "off"]
    assert main([*RUN, *UNTIL_WORSE, *QUIETLY, *options, "--run-dir", str(whole)]) == 0
    scores = [event["validation_ndcg_10"] for event in logged(whole, "metric")]
    best = STEPS // EPOCHS * (1 + scores.index(max(scores)))
    assert best < STEPS
    shutil.copytree(whole, resumed)
    for name in ("seal.json", "result.json", "trial-42.json", "profile.json"):
        (resumed / name).unlink()
    checkpoints = resumed / "checkpoints" / "seed-42"
    saved = sorted(path.name for path in checkpoints.glob("step-*"))
    chosen = f"step-{best:08d}"
    last = saved[saved.index(chosen) + 1]
    for name in saved:
        if name > last:
            shutil.rmtree(checkpoints / name)
    (checkpoints / "index.json").write_text(json.dumps({"last": last, "best": chosen}))
    assert main(["run", "--resume", str(resumed), "--no-peaks", "--no-report", "--quiet"]) == 0
    assert (resumed / "trial-42.json").read_bytes() == (whole / "trial-42.json").read_bytes()
    losses = [[event["loss"] for event in logged(folder, "step")] for folder in (whole, resumed)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == STEPS
    ends = [folder / "checkpoints" / "seed-42" / f"step-{STEPS:08d}" for folder in (whole, resumed)]
    weights, theirs = ([path.read_bytes() for path in sorted(end.glob("*.safetensors"))] for end in ends)
    assert weights
    assert weights == theirs


def reached(prepared: PreparedSequences, enough: float = 1.0) -> float:
    """The best hit rate of the test items over the epochs of a training, which ends with one that is enough."""
    torch.manual_seed(1)
    trial, best = prepared.trial(1), 0.0
    with applied(prepared.settings):
        for epoch in range(prepared.config.train.epochs):
            trial.model.train()
            batches = trial.recipe.order.batches(epoch)
            for step in range(len(trial.recipe.order)):
                take_step(trial.recipe, batches, step)
            trial.model.eval()
            best = max(best, trial.metrics(trial.predictions())["hit_rate_10"])
            if best >= enough:
                break
    return best


def test_what_follows_from_the_last_two_items_is_learned() -> None:
    """The default model on fewer users and items: the rule of the data itself is the most that is possible."""
    config = default()
    config = replace(config, data=replace(config.data, users=1200, groups=5, group_items=20))
    config = resolve(replace(config, train=replace(config.train, batch_size=16, device="cpu", threads=1)))
    prepared = PreparedSequences(config)
    ranking = prepared.ranking()
    hits = {name: ranking.metrics(ranks_N)["hit_rate_10"] for name, ranks_N in ranking.baseline_ranks().items()}
    possible = hits.pop("planted")
    assert max(hits.values()) < 0.8 * possible
    assert reached(prepared, 0.9 * possible) >= 0.9 * possible


def test_features_of_items_tell_of_rare_items(tmp_path: Path) -> None:
    """The category of the next item follows from that of the last one; an item has about three training events, of
    which its own row learns little. Of a category of 15 items a list of 10 has two thirds."""
    draw, categories, size = np.random.default_rng(3), 20, 15
    follows = draw.permutation(categories)
    lines = []
    for user in range(150):
        chain = [int(draw.integers(categories))]
        while len(chain) < 8:
            chain.append(int(follows[chain[-1]]))
        lines.append(" ".join(map(str, [f"u{user}", *(1000 + size * one + draw.integers(size) for one in chain)])))
    (tmp_path / "log.txt").write_text("\n".join(lines))
    items = (f"{1000 + item},Item {item},c{item // size}|{item % 2}\n" for item in range(categories * size))
    (tmp_path / "items.csv").write_text("id,title,category\n" + "".join(items))
    options = ImportOptions(events=tmp_path / "log.txt", sequences=True, items=tmp_path / "items.csv", name="rare")
    store = import_events(options, tmp_path / "store")
    config = default()
    train = replace(config.train, epochs=8, batch_size=16, learning_rate=0.01, device="cpu", threads=1)
    hits = {}
    for features in (False, True):
        data = replace(config.data, path=store, features=features)
        hits[features] = reached(PreparedSequences(resolve(replace(config, data=data, train=train))))
    assert hits[True] > 0.4
    assert hits[True] > 2 * hits[False]
