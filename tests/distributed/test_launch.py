"""`recperf run` as several ranks: one run folder, one message, one exit code."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rank_jobs import events
from rank_pool import home, needs_torchrec, start

from recperf.cli import main
from recperf.distributed import notes
from recperf.distributed.launch import require_ranks, verdict, without_ranks
from recperf.distributed.world import World
from recperf.errors import RecperfError, UsageError

WORDS = [
    "--data.history.length", "6", "--data.history.scan", "20", "--data.windows.min-history", "2",
    "--data.windows.seconds", str(50 * 86_400), "--train.batch-size", "32", "--train.device", "cpu",
    "--train.threads", "1", "--target.beat", "none", "--model.table-dim", "16", "--model.encoder-hidden", "8",
    "--model.item-hidden", "8", "--model.head-hidden", "8", "--model.positions", "32", "--model.time-buckets", "16",
    "--model.hstu.dim", "8", "--model.hstu.layers", "1", "--model.hstu.heads", "1", "--model.hstu.qk-dim", "8",
    "--model.hstu.v-dim", "8", "--model.hstu.max-length", "16", "--no-peaks", "--no-report",
]  # fmt: skip


def began(folder: Path, *more: str, ranks: int = 2, trouble: str = "", **how: Any) -> list[Any]:
    (folder / "run").parent.mkdir(exist_ok=True)
    where = ["--data.path", str(events(home() / "events")), "--run-dir", str(folder / "run")]
    return start(ranks, ["run", "dlrm-v4", *where, *WORDS, *more], folder, trouble=trouble, home=str(home()), **how)


def ended(ranks: list[Any], seconds: float = 60.0) -> list[int]:
    end = time.monotonic() + seconds
    for rank in ranks:
        rank.join(max(0.0, end - time.monotonic()))
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
    assert None not in codes, "a rank hangs"
    return codes


def said(folder: Path, rank: int) -> str:
    return (folder / f"rank-{rank}.log").read_text()


def kinds(folder: Path) -> list[str]:
    return [json.loads(line)["kind"] for line in (folder / "run" / "events.jsonl").read_text().splitlines()]


@needs_torchrec
@pytest.mark.long
def test_rank_0_writes_and_the_others_are_silent(tmp_path: Path) -> None:
    assert ended(began(tmp_path, "--train.max-steps", "4", "--mlperf")) == [0, 0]
    assert "which rank holds what" in said(tmp_path, 0)
    assert said(tmp_path, 1) == ""
    assert kinds(tmp_path).count("step") == 4
    assert kinds(tmp_path).count("metric") == 1
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["performance"]["settings"]["ranks"] == "2: gloo"
    log = (tmp_path / "run" / "mlperf.log").read_text()
    assert log.count('"run_start"') == log.count('"run_stop"') == 1


@pytest.mark.long
@needs_torchrec
def test_a_signal_to_one_rank_makes_all_save_and_one_process_can_go_on(tmp_path: Path) -> None:
    how = {"trouble": "fails", "at": 3, "how": "stop", "on": 1}
    assert ended(began(tmp_path, "--train.max-steps", "6", **how)) == [75, 75]
    assert "stopped by SIGTERM at step 3 of 6; the state is saved" in said(tmp_path, 0)
    assert "--ranks 2" in said(tmp_path, 0)
    assert said(tmp_path, 1) == ""
    # What two ranks saved one process goes on with.
    assert main(["run", "--resume", str(tmp_path / "run"), "--no-peaks", "--no-report", "--quiet"]) == 0
    assert kinds(tmp_path).count("step") == 6


@pytest.mark.long
@needs_torchrec
@pytest.mark.parametrize("on", [0, 1])
def test_an_error_of_one_rank_is_said_once_with_its_name(tmp_path: Path, on: int) -> None:
    codes = ended(began(tmp_path, trouble="fails", at=3, how="raise", on=on))
    assert codes[on] == 3
    assert "error: this rank read nonsense" in said(tmp_path, on)
    assert f"rank: {on}" in said(tmp_path, on)
    assert "error:" not in said(tmp_path, 1 - on)
    told: list[RecperfError] = []
    # Its code is the run's, and the launcher adds nothing to what it said.
    assert verdict(tmp_path, 2, {0: codes[0], 1: codes[1]}, None, told.append) == 3
    assert told == []


@needs_torchrec
@pytest.mark.long
def test_a_killed_rank_ends_the_others_and_is_named(tmp_path: Path) -> None:
    codes = ended(began(tmp_path, trouble="fails", at=3, how="kill", on=1))
    assert codes == [4, -signal.SIGKILL]
    told: list[RecperfError] = []
    assert verdict(tmp_path, 2, {1: codes[1]}, None, told.append) == 4
    assert "rank 1 of 2 was ended by SIGKILL" in told[0].what
    assert told[0].where == {"rank": "1", "last seen": "step 2: done"}


@pytest.mark.long
@needs_torchrec
def test_the_launcher_passes_on_what_its_ranks_say(tmp_path: Path) -> None:
    where = ["--data.path", str(events(home() / "events")), "--run-dir", str(tmp_path / "run")]
    words = ["run", "dlrm-v4", "--ranks", "2", *where, *WORDS, "--distributed.placement", "uid=host"]
    found = subprocess.run([sys.executable, "-m", "recperf", *words], capture_output=True, text=True, timeout=120)
    assert found.returncode == 3, found.stderr
    assert found.stderr.count("error:") == 1
    assert "needs a GPU" in found.stderr
    assert not (tmp_path / "run").exists()


def test_a_rank_that_others_wait_for_in_vain_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(notes.VARIABLE, str(tmp_path))
    (tmp_path / "rank-1.note").write_text("step 9: adding up gradients")
    notes.leave_word(0, code=4, lost="silent", time=1.0)
    told: list[RecperfError] = []
    assert verdict(tmp_path, 2, {0: 4, 1: -9}, None, told.append) == 4
    assert "rank 1 of 2 does not answer" in told[0].what
    assert told[0].where["last seen"] == "step 9: adding up gradients"


def test_the_first_failure_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(notes.VARIABLE, str(tmp_path))
    notes.leave_word(0, code=4, lost="gone", time=1.0)
    notes.leave_word(1, code=5, lost="", time=3.0)
    notes.leave_word(2, code=3, lost="", time=2.0)
    assert verdict(tmp_path, 3, {0: 4}, None, pytest.fail) == 3
    notes.leave_word(1, code=0, lost="", time=3.0)
    notes.leave_word(2, code=0, lost="", time=2.0)
    notes.leave_word(0, code=0, lost="", time=2.0)
    assert verdict(tmp_path, 3, {}, None, pytest.fail) == 0


def test_what_cannot_be_several_ranks() -> None:
    with pytest.raises(UsageError, match="one process"):
        require_ranks(World(), 2, "micro-dlrm", False)
    with pytest.raises(UsageError, match="torchrun started 4"):
        require_ranks(World(size=4), 2, "dlrm-v4", True)
    with pytest.raises(UsageError, match="1 to 1024"):
        require_ranks(World(), -1, "dlrm-v4", True)
    require_ranks(World(), 0, "micro-dlrm", False)


def test_a_rank_is_not_told_to_start_ranks() -> None:
    assert without_ranks(["dlrm-v4", "--ranks", "4", "--seed", "1"]) == ["dlrm-v4", "--seed", "1"]
    assert without_ranks(["--ranks=4", "dlrm-v4"]) == ["dlrm-v4"]
