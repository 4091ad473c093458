"""dlrm-v4 on two ranks, one of which is killed: gone on with, it ends bit for bit as one that was left alone."""

from __future__ import annotations

import functools
import json
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from mutations import mutate
from rank_jobs import events
from rank_pool import home, needs_torchrec, start
from tiny_v4 import MODEL, QUIETLY, STREAM, outcome

pytestmark = needs_torchrec
SHARDING = "item_id=row,album_id=column,artist_id=data-parallel,uid=table"
WORDS = [
    *STREAM, *MODEL, *QUIETLY, "--model.table-dim", "16", "--train.threads", "1", "--train.max-steps", "11",
    "--evaluate.every-windows", "2", "--train.checkpoint-windows", "1", "--train.checkpoint-steps", "3",
    "--train.keep-last", "2", "--mlperf", "--distributed.sharding", SHARDING,
]  # fmt: skip


def run(folder: Path, *, trouble: str = "", **how: Any) -> list[int]:
    """The same command as often as it is needed: its ranks find what was begun. Their exit codes."""
    (folder / "run").mkdir(parents=True, exist_ok=True)
    if profile().exists():
        # Steps are measured at the end for seconds, unless they were.
        shutil.copyfile(profile(), folder / "run" / "profile.json")
    where = ["--data.path", str(events(home() / "events")), "--run-dir", str(folder / "run")]
    for left in (*folder.glob("rank-*"), folder / "meeting"):
        left.unlink(missing_ok=True)
    ranks = start(2, ["run", "dlrm-v4", *where, *WORDS], folder, trouble=trouble, home=str(home()), **how)
    for rank in ranks:
        rank.join(120)
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
    return codes


def profile() -> Path:
    return home() / "profile-of-ranks.json"


@functools.cache
def straight() -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(dir=home()))
    assert run(folder) == [0, 0], (folder / "rank-0.log").read_text()
    shutil.copyfile(folder / "run" / "profile.json", profile())
    found = outcome(folder / "run")
    assert [event["kind"] for event in found["events"]].count("step") == 11
    return found


def killed(folder: Path, *, trouble: str, on: int, **how: Any) -> None:
    codes = run(folder, trouble=trouble, on=on, **how)
    assert codes[on] == -9, (folder / "rank-0.log").read_text()


def ends_the_same(folder: Path) -> None:
    assert run(folder) == [0, 0], (folder / "rank-0.log").read_text()
    assert outcome(folder / "run") == straight()


def test_a_rank_killed_in_the_middle(tmp_path: Path) -> None:
    straight()
    killed(tmp_path, trouble="fails", on=1, at=8, how="kill")
    ends_the_same(tmp_path)
    progress = json.loads((tmp_path / "run" / "progress.json").read_text())
    assert progress["resumes"] == 1
    assert "the ranks were restarted and resume their run" in (tmp_path / "rank-0.log").read_text()
    assert "resumes at step" in (tmp_path / "rank-0.log").read_text()


@pytest.mark.long
@pytest.mark.parametrize("on", [0, 1])
def test_ranks_killed_at_random_steps(tmp_path: Path, on: int) -> None:
    draw = random.Random(on)
    for _ in range(2):
        killed(tmp_path, trouble="fails", on=on, at=draw.randint(1, 5), how="kill")
    ends_the_same(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(
    "point",
    [
        "save: begun", "save: tensors written", "save: manifest written", "save: renamed", "save: verified",
        "prune: set aside", "evaluation: first batch scored", "evaluation: logged", "window: logged",
    ],
)  # fmt: skip
def test_rank_0_killed_at_an_unkind_moment(tmp_path: Path, point: str) -> None:
    killed(tmp_path, trouble="killing_jobs.at_point", on=0, point=point, nth=2)
    ends_the_same(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(("function", "nth"), [("fsync", 1), ("fsync", 3), ("write", 5)])
def test_another_rank_killed_while_it_writes_its_parts(tmp_path: Path, function: str, nth: int) -> None:
    killed(tmp_path, trouble="killing_jobs.in_call", on=1, function=function, nth=nth)
    ends_the_same(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
def test_damaged_files_of_ranks_are_told_in_a_line(tmp_path: Path, seed: int) -> None:
    """Whatever is damaged, the older checkpoint is taken, or all ranks end with a message."""
    straight()
    killed(tmp_path, trouble="fails", on=1, at=10, how="kill")
    draw = random.Random(seed)
    checkpoints = sorted((tmp_path / "run" / "checkpoints" / "seed-42").glob("step-*"))
    assert len(checkpoints) >= 2
    groups = [sorted(path.iterdir()) for path in checkpoints]
    what = [mutate(groups, draw) for _ in range(1 + seed % 3)]
    codes = run(tmp_path)
    said = "".join((tmp_path / f"rank-{rank}.log").read_text() for rank in range(2))
    assert "Traceback" not in said, what
    assert codes in ([0, 0], [3, 3], [3, 4]), (what, said)
    if codes == [0, 0]:
        # Which is the best may be lost with it.
        ours, theirs = ({**found, "best": "", "kept": ""} for found in (outcome(tmp_path / "run"), straight()))
        assert ours == theirs, what
    else:
        assert said.count("error:") == 1, (what, said)
