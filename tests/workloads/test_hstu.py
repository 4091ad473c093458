"""hstu: a resumed run ends with the same bits, and what follows from the order of items is learned."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from recperf.cli import main
from recperf.train.device import applied
from recperf.train.loop import take_step
from recperf.workloads.hstu.build import PreparedSequences
from recperf.workloads.hstu.config import default, resolve

RUN = ["run", "hstu", "--data.users", "60", "--train.epochs", "2", "--train.batch-size", "16", "--target.beat", "none"]
QUIETLY = ["--train.device", "cpu", "--train.threads", "1", "--no-peaks", "--no-report", "--quiet"]


def logged(folder: Path, kind: str) -> list[dict[str, Any]]:
    events = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [event for event in events if event["kind"] == kind]


def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout draws from torch's own generators, so that their state must come back with the weights."""
    monkeypatch.chdir(tmp_path)
    whole, resumed = Path("whole"), Path("resumed")
    options = ["--train.checkpoint-steps", "3", "--train.keep-last", "9", "--train.checkpoint-background", "off"]
    assert main([*RUN, *QUIETLY, *options, "--run-dir", str(whole)]) == 0
    shutil.copytree(whole, resumed)
    for name in ("seal.json", "result.json", "trial-42.json", "profile.json"):
        (resumed / name).unlink()
    checkpoints = resumed / "checkpoints" / "seed-42"
    for saved in checkpoints.glob("step-*"):
        if saved.name > "step-00000003":
            shutil.rmtree(saved)
    (checkpoints / "index.json").write_text('{"last": "step-00000003"}')
    assert main(["run", "--resume", str(resumed), "--no-peaks", "--no-report", "--quiet"]) == 0
    assert (resumed / "trial-42.json").read_bytes() == (whole / "trial-42.json").read_bytes()
    losses = [[event["loss"] for event in logged(folder, "step")] for folder in (whole, resumed)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 8


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
