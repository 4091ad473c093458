"""recperf checkpoint, as a user types it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from recperf.cli import main
from recperf.runs.record import Run
from recperf.train.checkpoint import CheckpointStore


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


def call(capfd: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main(["checkpoint", *map(str, words)])
    said = capfd.readouterr()
    return code, said.out, said.err


def steps(run: Path, seed: int) -> list[int]:
    found = (run / "checkpoints" / f"seed-{seed}").glob("step-*")
    return sorted(int(path.name.removeprefix("step-")) for path in found)


def test_list_says_what_there_is(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capfd, "list", run)
    assert code == 0
    assert "seed 43  step 40" in out
    code, out, _ = call(capfd, "list", run, "--json")
    found = json.loads(out)["checkpoints"]
    assert [(entry["seed"], entry["step"]) for entry in found[:4]] == [(42, 40), (42, 30), (42, 20), (42, 10)]
    assert [(entry["last"], entry["best"]) for entry in found[:3]] == [(True, False), (False, False), (False, True)]
    assert all(entry["fault"] is None and entry["bytes"] > 100 and entry["files"] == 1 for entry in found)
    assert found[0]["when"].endswith("+00:00")


def test_nothing_saved_yet(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Run.create("micro-dlrm", {}, folder=tmp_path / "run").close()
    for action in ("list", "verify", "prune"):
        code, out, _ = call(capfd, action, tmp_path / "run")
        assert code == 0
        assert "no checkpoints yet" in out


def damage(run: Path, seed: int, step: int, *, cut: bool = False) -> None:
    file = run / "checkpoints" / f"seed-{seed}" / f"step-{step:08d}" / "rank0-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content[:-1] if cut else content)


def test_verify_reads_every_byte(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert call(capfd, "verify", run)[0] == 0
    damage(run, 43, 30)
    damage(run, 42, 10, cut=True)
    code, out, _ = call(capfd, "list", run)
    assert code == 0
    assert "rank0-00000.safetensors has" in out
    assert out.count("damaged") == 1
    code, out, err = call(capfd, "verify", run)
    assert code == 3
    assert "2 of 8 checkpoints are damaged" in err
    assert "seed 43 step-00000030: rank0-00000.safetensors does not match its digest" in err
    code, out, _ = call(capfd, "verify", run, "--json")
    assert code == 3
    assert json.loads(out)["error"]["exit_code"] == 3
    assert [entry["step"] for entry in json.loads(out)["checkpoints"] if entry["fault"]] == [10, 30]


def test_verify_notices_that_all_are_gone(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for path in (run / "checkpoints" / "seed-42").glob("step-*"):
        shutil.rmtree(path)
    code, _, err = call(capfd, "verify", run)
    assert code == 3
    assert "all checkpoints of this seed are missing" in err


def test_prune_keeps_the_newest_intact_and_the_best(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    damage(run, 43, 40)
    code, out, _ = call(capfd, "prune", run, "--json")
    assert code == 0
    assert steps(run, 42) == [20, 40]
    assert steps(run, 43) == [20, 30]
    gone = json.loads(out)["removed"]
    assert [entry["step"] for entry in gone] == [30, 10, 40, 10]
    assert gone[2]["why"] == "rank0-00000.safetensors does not match its digest"
    assert call(capfd, "verify", run)[0] == 0
    store = CheckpointStore(folder=run / "checkpoints" / "seed-43", notice=pytest.fail)
    state: Any = store.load()
    assert state["weights"][0] == 30


def test_prune_keeps_as_many_as_asked(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    damage(run, 42, 30)
    assert call(capfd, "prune", run, "--keep", 2)[0] == 0
    assert steps(run, 42) == [20, 40]
    assert steps(run, 43) == [20, 30, 40]
    assert call(capfd, "prune", run, "--keep", 0)[0] == 2


def test_prune_removes_nothing_where_nothing_is_intact(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for step in (10, 20, 30, 40):
        damage(run, 43, step)
    code, _, err = call(capfd, "prune", run)
    assert code == 3
    assert "no checkpoint of seed-43 is intact" in err
    assert steps(run, 42) == steps(run, 43) == [10, 20, 30, 40]


def test_prune_keeps_off_a_run_in_use(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    held = Run.open(run)
    code, _, err = call(capfd, "prune", run)
    held.close()
    assert code == 4
    assert "another process is using this run folder" in err
    assert steps(run, 42) == [10, 20, 30, 40]
    # Looking is always possible.
    assert call(capfd, "list", run)[0] == 0


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["lists", "x"], 2, "did you mean 'list'?"),
        (["list"], 2, "recperf checkpoint list --help"),
        (["list", "nowhere"], 3, "there is no such run"),
        (["verify", "."], 3, "no config there"),
    ],
)
def test_mistakes(
    words: list[str],
    code: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    found, _, err = call(capfd, *words)
    assert found == code
    assert message in err
    assert "Traceback" not in err


def test_it_never_imports_torch(run: Path) -> None:
    code = (
        "import sys; from recperf.cli import main\n"
        "assert main(sys.argv[1:]) == 0\n"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    for action in ("list", "verify", "prune"):
        subprocess.run([sys.executable, "-c", code, "checkpoint", action, str(run)], check=True, capture_output=True)
