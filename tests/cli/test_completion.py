"""What a shell completes, in a real bash; completing starts no Python."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from recperf.cli import COMMANDS
from recperf.cli.completion import collect, fish
from recperf.workloads import WORKLOADS

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
ASK = """
source ./script
while IFS=$'\\t' read -r -a COMP_WORDS; do
    if [ "${COMP_WORDS[-1]}" = EMPTY ]; then COMP_WORDS[-1]=; fi
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    _recperf
    (IFS=$'\\t'; echo "${COMPREPLY[*]}")
done
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the script, some runs and imported datasets, one with a hostile name."""
    folder = tmp_path_factory.mktemp("completion")
    program = (
        "import sys; from recperf.cli import main; sys.exit(main(['completion', 'bash']) or 'torch' in sys.modules)"
    )
    (folder / "script").write_bytes(
        subprocess.run([sys.executable, "-c", program], check=True, capture_output=True).stdout
    )
    for name in ("runs/dlrm-1", "runs/dlrm-2", "runs/other", "home/data/mine", "home/data/$(touch oops)"):
        (folder / name).mkdir(parents=True)
    (folder / "train.py").touch()
    return folder


FOLLOWING = [
    (["ru"], ["run"]),
    (["re"], ["report", "recommend"]),
    (["run", "dl"], ["dlrm", "dlrm-v4"]),
    (["run", "dlrm", "--train.ba"], ["--train.batch-size"]),
    (["run", "--train.ba"], ["--train.batch-size"]),
    (["profile", "dlrm-v4", "--evaluate.every-w"], ["--evaluate.every-windows"]),
    (["run", "micro-dlrm", "--evaluate.every-w"], []),
    (["run", "dlrm", "--train.no-checkpoint-e"], ["--train.no-checkpoint-epochs", "--train.no-checkpoint-end"]),
    (["run", "dlrm", "--log", "t"], ["tensorboard"]),
    (["run", "dlrm", "--train.device", "c"], ["cpu", "cuda"]),
    (["run", "dlrm", "--preset", "int"], ["intended", "intended-plain"]),
    (["run", "dlrm-v4", "--preset", "int"], []),
    (["run", "dlrm-v4", "--data", "m"], ["mine", "movielens-100k", "movielens-like"]),
    (["run", "--resume", "runs/o"], ["runs/other"]),
    (["report", "runs/"], ["runs/dlrm-1", "runs/dlrm-2", "runs/other"]),
    (["report", ""], ["runs/dlrm-1", "runs/dlrm-2", "runs/other"]),
    (["checkpoint", "ver"], ["verify"]),
    (["checkpoint", "verify", "runs/d"], ["runs/dlrm-1", "runs/dlrm-2"]),
    (["data", "get", "yambda-50"], ["yambda-50m", "yambda-500m"]),
    (["data", "info", "$(t"], ["$(touch oops)"]),
    (["profile", "--script", "tr"], ["train.py"]),
    (["nonsense", "--x"], []),
]


def test_words_that_follow(folder: Path) -> None:
    asked = "".join("\t".join(["recperf", *words[:-1], words[-1] or "EMPTY"]) + "\n" for words, _ in FOLLOWING)
    done = subprocess.run(
        [str(shutil.which("bash")), "--norc", "-c", ASK], input=asked, cwd=folder, capture_output=True, text=True,
        env={"RECPERF_HOME": "home", "PATH": os.defpath}, check=True, timeout=60,
    )  # fmt: skip
    assert not done.stderr
    answers = [sorted(filter(None, line.split("\t"))) for line in done.stdout.splitlines()]
    assert answers == [sorted(expected) for _, expected in FOLLOWING]
    assert not (folder / "oops").exists()


def test_every_command_and_its_options_are_known() -> None:
    words = collect()
    assert {place.split()[0] for place in words.after if place} == set(COMMANDS)
    assert set(words.fields) == set(WORKLOADS)
    # A command that has options of its own has more than --help.
    assert [place for place, listed in words.after.items() if listed == ["--help"]] in ([], ["completion"])
    lines = fish(words).splitlines()
    assert all(line.startswith(("#", "complete -c recperf ")) for line in lines)
    assert any("-l train.batch-size" in line and "dlrm-v4" in line for line in lines)
