"""Files of the user in every folder that a command writes to, with names like ours: none is removed or changed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from recperf.cli import main

Call = Callable[..., tuple[int, str, str]]
QUICKLY = ("--no-peaks", "--no-report", "--quiet", "--train.device", "cpu", "--train.max-steps", "3")
DLRM = ("dlrm", "--model.rows", "50", "60", "--data.batches", "6", "--data.held-out-batches", "2")
DLRM += ("--data.ids-per-bag", "2", "--model.bottom", "4", "8", "--model.dim", "8", "--model.top", "8", "1")
DLRM += ("--train.batch-size", "64")
ROWS = "user,item,price,clicked\n" + "".join(f"u{at % 7},i{at % 5},{at}.5,{at % 2}\n" for at in range(60))
CLICKS = ("--label", "clicked", "--user", "user", "--item", "item", "--name", "shop")

NAMES = (
    "process-2024-results/x", "process-1-1/0000-a.recperf-rows", "process-1-1/lock", "events.jsonl", "machine.json",
    "baselines.json", ".lock", "lock", ".clicks-old/x", ".clicks.old/x", ".exported.abc/x", ".notes.tmp", ".t.csv.tmp",
    "events.building/journal.json", "step-00000001/x", "u.item", ".recperf/x",
)  # fmt: skip
COMMANDS = {
    "tables": (("run", *DLRM, "--tables.placement", "file", "--tables.folder", "theirs", "--run-dir", "r"), (0, 5)),
    "run": (("run", *DLRM, "--run-dir", "theirs"), (3,)),
    "profile": (("profile", *DLRM, "--run-dir", "theirs", "--no-peaks"), (3,)),
    "dry run": (("run", *DLRM, "--run-dir", "theirs", "--dry-run"), (3,)),
    "score": (("score", "RUN", "--held-out", "--output", "theirs/t.csv"), (0,)),
    "export": (("export", "RUN", "--output", "theirs/exported"), (0,)),
    "export over": (("export", "RUN", "--output", "theirs"), (3,)),
    "clicks": (("data", "import", "--clicks", "rows.csv", *CLICKS, "--store", "theirs/clicks"), (0,)),
    "clicks over": (("data", "import", "--clicks", "rows.csv", *CLICKS, "--store", "theirs"), (3,)),
    "events": (("data", "import", "--events", "rows.csv", "--name", "e", "--store", "theirs/events"), (3,)),
    "yambda": (("data", "make", "yambda-like", "--events", "2000", "--path", "theirs"), (3,)),
    "report": (("report", "RUN", "--out", "theirs/t.html"), (0,)),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert main(["run", "micro-dlrm", "--data.source", "embedded", "--run-dir", str(folder), *QUICKLY]) in (0, 5)
    return folder


def plant(folder: Path) -> dict[Path, bytes]:
    """Files without a last newline, as old as what a killed process left days ago."""
    for name in NAMES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"mine\nnot whole")
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (time.time() - 1e6,) * 2)
    return contents(folder)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if name == "export" else []) for name in COMMANDS]
)
def test_files_of_the_user_survive(name: str, call: Call, trained: Path, tmp_path: Path) -> None:
    arguments, codes = COMMANDS[name]
    (tmp_path / "rows.csv").write_text(ROWS)
    before = plant(tmp_path / "theirs")
    quickly = QUICKLY if arguments[0] == "run" else ()
    code, _, err = call(*(trained if argument == "RUN" else argument for argument in arguments), *quickly)
    assert code in codes, err
    assert before.items() <= contents(tmp_path / "theirs").items()
    if code == 3:
        assert contents(tmp_path / "theirs") == before
        assert len([line for line in err.splitlines() if line.startswith("error: ")]) == 1
        assert "not changed" in err or "not empty" in err


@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL"])
def test_the_same_import_removes_what_a_killed_one_left(how: str, call: Call, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(ROWS)
    arguments = ["data", "import", "--clicks", "rows.csv", *CLICKS, "--store", "shop/clicks"]
    code = (
        "import os, signal, sys; from recperf.cli import main; from recperf.data.rows import imports\n"
        f"def end(*_): os.kill(os.getpid(), signal.{how}); imports.poll()\n"
        "from recperf.stop import poll; imports.poll = poll; imports._Build._write = end; sys.exit(main(sys.argv[1:]))"
    )
    ended = subprocess.run([sys.executable, "-c", code, *arguments], cwd=tmp_path, check=False, capture_output=True)
    assert ended.returncode == (75 if how == "SIGTERM" else -signal.SIGKILL), ended.stderr
    assert len(os.listdir(tmp_path / "shop")) == (how == "SIGKILL")
    assert call(*arguments)[0] == 0
    assert os.listdir(tmp_path / "shop") == ["clicks"]
