"""dlrm-v4 on two ranks, of which one is killed: resumed, the run ends bit for bit as one without a failure."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

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
    """Start the same command again: its ranks find the run they had begun. Returns their exit codes."""
    (folder / "run").mkdir(parents=True, exist_ok=True)
    if profile().exists():
        # A profile that exists is not measured again, which would take seconds.
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


def test_ranks_killed_at_the_worst_moments_resume_bit_for_bit(tmp_path: Path) -> None:
    """One run is killed again and again: in a step, while a rank writes its shards, and around the commit of rank 0."""
    straight()
    killed(tmp_path, trouble="fails", on=1, at=5, how="kill")
    assert (tmp_path / "run" / "checkpoints").is_dir()
    killed(tmp_path, trouble="killing_jobs.in_call", on=1, function="fsync", nth=1)
    killed(tmp_path, trouble="killing_jobs.at_point", on=0, point="save: tensors written", nth=1)
    killed(tmp_path, trouble="killing_jobs.at_point", on=0, point="save: renamed", nth=1)
    assert run(tmp_path) == [0, 0], (tmp_path / "rank-0.log").read_text()
    assert outcome(tmp_path / "run") == straight()
    assert json.loads((tmp_path / "run" / "progress.json").read_text())["resumes"] == 4
    log = (tmp_path / "rank-0.log").read_text()
    assert "the ranks were restarted and resume their run" in log
    assert "resumes at step" in log
