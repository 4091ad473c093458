"""recperf checkpoint, as a user types it."""

from __future__ import annotations

import errno
import functools
import json
import os
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
    return functools.partial(call, "checkpoint")


def steps(run: Path, seed: int) -> list[int]:
    folders = (run / "checkpoints" / f"seed-{seed}").glob("step-*")
    return sorted(int(path.name.removeprefix("step-")) for path in folders)


def test_list_says_what_there_is(run: Path, call: Call) -> None:
    code, out, _ = call("list", run)
    assert code == 0
    assert "seed 43  step 40" in out
    code, out, _ = call("list", run, "--json")
    listed = json.loads(out)["checkpoints"]
    assert [(entry["seed"], entry["step"]) for entry in listed[:4]] == [(42, 40), (42, 30), (42, 20), (42, 10)]
    assert [(entry["last"], entry["best"]) for entry in listed[:3]] == [(True, False), (False, False), (False, True)]
    assert all(entry["fault"] is None and entry["bytes"] > 100 and entry["files"] == 1 for entry in listed)
    assert listed[0]["when"].endswith("+00:00")


def test_nothing_saved_yet(tmp_path: Path, call: Call) -> None:
    Run.create("micro-dlrm", {}, folder=tmp_path / "run").close()
    for action in ("list", "verify", "prune"):
        code, out, _ = call(action, tmp_path / "run")
        assert code == 0
        assert "no checkpoints yet" in out


def damage(run: Path, seed: int, step: int, *, cut: bool = False) -> None:
    file = run / "checkpoints" / f"seed-{seed}" / f"step-{step:08d}" / "rank0-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content[:-1] if cut else content)


def test_verify_reads_every_byte(run: Path, call: Call) -> None:
    assert call("verify", run)[0] == 0
    damage(run, 43, 30)
    damage(run, 42, 10, cut=True)
    code, out, _ = call("list", run)
    assert code == 0
    assert "rank0-00000.safetensors has" in out
    assert out.count("damaged") == 1
    code, out, err = call("verify", run)
    assert code == 3
    assert "2 of 8 checkpoints are damaged" in err
    assert "seed 43 step-00000030: rank0-00000.safetensors does not match its digest" in err
    code, out, _ = call("verify", run, "--json")
    assert code == 3
    assert json.loads(out)["error"]["exit_code"] == 3
    assert [entry["step"] for entry in json.loads(out)["checkpoints"] if entry["fault"]] == [10, 30]


def test_prune_keeps_the_newest_intact_and_the_best(run: Path, call: Call) -> None:
    damage(run, 43, 40)
    code, out, _ = call("prune", run, "--json")
    assert code == 0
    assert steps(run, 42) == [20, 40]
    assert steps(run, 43) == [20, 30]
    gone = json.loads(out)["removed"]
    assert [entry["step"] for entry in gone] == [30, 10, 40, 10]
    assert gone[2]["why"] == "rank0-00000.safetensors does not match its digest"
    assert call("verify", run)[0] == 0
    store = CheckpointStore(folder=run / "checkpoints" / "seed-43", notice=pytest.fail)
    state: Any = store.load()
    assert state["weights"][0] == 30


def test_prune_keeps_no_damaged_best_and_names_it(run: Path, call: Call) -> None:
    damage(run, 42, 20)
    code, out, _ = call("prune", run)
    assert code == 0
    assert "step-00000020 (the best, but damaged: rank0-00000.safetensors does not match its digest)" in out
    assert (steps(run, 42), steps(run, 43)) == ([40], [20, 40])
    assert call("verify", run)[0] == 0


def test_advice_holds_where_nothing_is_intact(run: Path, call: Call) -> None:
    for step in (10, 20, 30, 40):
        damage(run, 42, step, cut=True)
    assert "no checkpoint of seed 42 is intact: restore one" in call("verify", run)[2]
    for step in (10, 20, 30, 40):
        damage(run, 43, step, cut=True)
    assert "complete" not in call("list", run)[1]


def test_prune_keeps_as_many_as_asked(run: Path, call: Call) -> None:
    damage(run, 42, 30)
    assert call("prune", run, "--keep", 2)[0] == 0
    assert steps(run, 42) == [20, 40]
    assert steps(run, 43) == [20, 30, 40]
    assert call("prune", run, "--keep", 0)[0] == 2


def test_prune_removes_nothing_where_nothing_is_intact(run: Path, call: Call) -> None:
    for step in (10, 20, 30, 40):
        damage(run, 43, step)
    code, _, err = call("prune", run)
    assert code == 3
    assert "no checkpoint of seed-43 is intact" in err
    assert steps(run, 42) == steps(run, 43) == [10, 20, 30, 40]


def test_prune_keeps_off_a_run_in_use(run: Path, call: Call) -> None:
    held = Run.open(run)
    code, _, err = call("prune", run)
    held.close()
    assert code == 4
    assert "another process is using this run folder" in err
    assert steps(run, 42) == [10, 20, 30, 40]
    # Looking is always possible.
    assert call("list", run)[0] == 0


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("open", "cannot write .lock: the file system is read-only"),
        ("replace", "cannot remove step-00000030: Read-only"),
    ],
)
def test_prune_on_a_read_only_disk_says_so(
    run: Path, call: Call, monkeypatch: pytest.MonkeyPatch, function: str, message: str
) -> None:
    real = getattr(os, function)

    def refuse(path: Path, *arguments: Any, **options: Any) -> Any:
        if function == "replace" or arguments[0] & os.O_CREAT:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, function, refuse)
    code, _, err = call("prune", run)
    assert code == 4
    assert message in err
    assert "--run-dir" not in err
    assert steps(run, 42) == [10, 20, 30, 40]


@pytest.mark.parametrize("place", ["checkpoints", "checkpoints/seed-42"])
def test_folders_that_are_links_are_not_followed(run: Path, call: Call, tmp_path: Path, place: str) -> None:
    (run / place).rename(tmp_path / "elsewhere")
    (run / place).symlink_to(tmp_path / "elsewhere")
    before = sorted(tmp_path.joinpath("elsewhere").rglob("*"))
    for action in ("list", "verify", "prune"):
        code, _, err = call(action, run)
        assert code == 3
        assert f"{Path(place).name} is a link, which is not followed" in err
    assert sorted(tmp_path.joinpath("elsewhere").rglob("*")) == before


def test_prune_does_not_touch_the_log(run: Path, call: Call) -> None:
    (run / "events.jsonl").write_text("half a line")
    assert call("prune", run)[0] == 0
    assert (run / "events.jsonl").read_text() == "half a line"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["lists", "x"], 2, "did you mean 'list'?"),
        (["list"], 2, "recperf checkpoint list --help"),
        (["list", "nowhere"], 3, "there is no such run"),
        (["verify", "."], 3, "no config there"),
    ],
)
def test_mistakes(call: Call, arguments: list[str], code: int, message: str) -> None:
    exit_code, _, err = call(*arguments)
    assert exit_code == code
    assert message in err


def test_it_never_imports_torch(run: Path, runs_without_torch: Callable[..., None]) -> None:
    for action in ("list", "verify", "prune"):
        runs_without_torch("checkpoint", action, run)
