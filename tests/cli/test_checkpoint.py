"""The checkpoints of runs in recperf check, and check --prune."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from recperf.runs.record import Run
from recperf.train.checkpoint import CheckpointStore

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two seeds, each with a few checkpoints; the one before the last is the best."""
    folder = tmp_path / "run"
    Run.create("micro-dlrm", {}, folder=folder).close()
    for seed in (42, 43):
        store = CheckpointStore(folder=folder / "checkpoints" / f"seed-{seed}", notice=print, keep_last=9)
        for step in (10, 20, 30, 40):
            store.save(step, {"weights": torch.full((50,), step)}, best=step == 20)
    return folder


@pytest.fixture
def call(call: Call) -> Call:
    return functools.partial(call, "check")


def steps(run: Path, seed: int) -> list[int]:
    folders = (run / "checkpoints" / f"seed-{seed}").glob("step-*")
    return sorted(int(path.name.removeprefix("step-")) for path in folders)


def test_checkpoints_are_listed(run: Path, call: Call) -> None:
    code, out, _ = call(run)
    assert code == 5, "an unfinished run has no evidence for its claims"
    assert "seed 43  step 40" in out
    code, out, _ = call(run, "--json")
    listed = json.loads(out)["runs"][0]["checkpoints"]
    assert [(entry["seed"], entry["step"]) for entry in listed[:4]] == [(42, 40), (42, 30), (42, 20), (42, 10)]
    assert [(entry["last"], entry["best"]) for entry in listed[:3]] == [(True, False), (False, False), (False, True)]
    assert all(entry["fault"] is None and entry["bytes"] > 100 and entry["files"] == 1 for entry in listed)
    assert listed[0]["when"].endswith("+00:00")


def damage(run: Path, seed: int, step: int, *, cut: bool = False) -> None:
    file = run / "checkpoints" / f"seed-{seed}" / f"step-{step:08d}" / "rank0-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content[:-1] if cut else content)


def test_every_byte_is_read(run: Path, call: Call) -> None:
    damage(run, 43, 30)
    damage(run, 42, 10, cut=True)
    code, out, err = call(run)
    assert code == 3
    assert "2 of 8 checkpoints are damaged" in err
    assert "seed 43 step-00000030: rank0-00000.safetensors does not match its digest" in err
    assert "continues from the newest intact one" in err
    code, out, _ = call(run, "--json")
    assert (code, json.loads(out)["error"]["exit_code"]) == (3, 3)
    assert [entry["step"] for entry in json.loads(out)["runs"][0]["checkpoints"] if entry["fault"]] == [10, 30]
    for step in (20, 30, 40):
        damage(run, 42, step, cut=True)
    assert "restore it from a copy" in call(run)[2]


def test_prune_keeps_the_newest_intact_and_the_best(run: Path, call: Call) -> None:
    damage(run, 43, 40)
    code, out, _ = call(run, "--prune", "--json")
    assert code == 0
    assert steps(run, 42) == [20, 40]
    assert steps(run, 43) == [20, 30]
    gone = json.loads(out)["runs"][0]["removed"]
    assert [entry["step"] for entry in gone] == [30, 10, 40, 10]
    assert gone[2]["why"] == "rank0-00000.safetensors does not match its digest"
    assert call(run)[0] == 5, "no damage is left"
    store = CheckpointStore(folder=run / "checkpoints" / "seed-43", notice=pytest.fail)
    state: Any = store.load()
    assert state["weights"][0] == 30


def test_prune_keeps_off_a_run_in_use(run: Path, call: Call) -> None:
    held = Run.open(run)
    code, _, err = call(run, "--prune")
    held.close()
    assert code == 4
    assert "another process is using this run folder" in err
    assert steps(run, 42) == [10, 20, 30, 40]


@pytest.mark.parametrize("place", ["checkpoints", "checkpoints/seed-42"])
def test_folders_that_are_links_are_not_followed(run: Path, call: Call, tmp_path: Path, place: str) -> None:
    (run / place).rename(tmp_path / "elsewhere")
    (run / place).symlink_to(tmp_path / "elsewhere")
    before = sorted(tmp_path.joinpath("elsewhere").rglob("*"))
    for options in ([], ["--prune"]):
        code, _, err = call(run, *options)
        assert code == 3
        assert f"{Path(place).name} is a link, which is not followed" in err
    assert sorted(tmp_path.joinpath("elsewhere").rglob("*")) == before
