"""`recperf.run` on several ranks: those that it starts, and those of a program that torchrun started."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rank_pool import home, needs_torchrec, start

import recperf
from recperf.errors import UsageError

TRAIN = {"epochs": 400, "max_steps": 300, "checkpoint_steps": 5, "device": "cpu", "threads": 1}


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet: None) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(3)
    columns = {name: draw.integers(0, 40, 1500) for name in ("user", "item", "label")}
    columns["label"] %= 2
    shop = recperf.dataset(columns, clicks=True, label="label", user="user", item="item")
    return {"data": str(shop.folder), "train": TRAIN, "peaks": False, "report": False, "quiet": True}


def losses(run: Path) -> list[float]:
    lines = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["kind"] == "step" and "loss" in line]


def by_torchrun(folder: Path, options: dict[str, Any]) -> list[Path]:
    """The runs of a program on two ranks that trains twice with one config."""
    ranks = start(2, [], folder, trouble="python", options=options, home=str(home()))
    for rank in ranks:
        rank.join(300)
    texts = [(folder / f"rank-{rank}.log").read_text() for rank in (0, 1)]
    assert [rank.exitcode for rank in ranks] == [0, 0], texts
    assert texts[0] == texts[1], "each rank has the result, and nothing else is printed"
    refused, *runs = texts[0].splitlines()
    assert refused == "recperf.run connects the ranks itself, but torch.distributed is initialized already"
    assert [run.split()[1] for run in runs] == ["True", "True"]
    assert len({run.split()[2] for run in runs}) == 1
    return [Path(run.split()[0]) for run in runs]


@needs_torchrec
def test_runs_on_two_ranks_are_the_same_however_they_are_started(options: dict[str, Any], tmp_path: Path) -> None:
    options["train"] = {**TRAIN, "max_steps": 40}
    first, second = by_torchrun(tmp_path, options)
    assert first != second
    assert len(losses(first)) == 40
    assert losses(first) == losses(second)
    run = recperf.run("micro-dlrm", ranks=2, **options)
    assert run.finished
    assert losses(run.folder) == losses(first)
    assert run.result.performance.settings["ranks"] == "2: gloo"


@needs_torchrec
@pytest.mark.long
def test_ranks_of_python_stop_and_are_resumed_to_the_same_losses(options: dict[str, Any]) -> None:
    """Each start of ranks takes seconds; tests/distributed/test_launch.py stops and resumes those of the command."""
    whole = recperf.run("micro-dlrm", ranks=2, **options)

    def press() -> None:
        while not list(Path("stopped").glob("checkpoints/seed-*/step-*")):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()
    stopped = recperf.run("micro-dlrm", ranks=2, run_dir="stopped", **options)
    assert not stopped.finished
    with pytest.raises(UsageError, match="ranks resume a run as it is"):
        recperf.run(resume="stopped", ranks=2, train={"max_steps": 300})
    again = recperf.run(resume="stopped", ranks=2, peaks=False, report=False, quiet=True)
    assert again.finished
    assert losses(again.folder) == losses(whole.folder)


def test_ranks_that_torchrun_did_not_start_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="--ranks 3, but torchrun started 2"):
        recperf.run("micro-dlrm", ranks=3)
    with pytest.raises(UsageError, match="a single process"):
        recperf.run("micro-dlrm-dram")
