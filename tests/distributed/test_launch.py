"""`recperf run` as several ranks: one run folder, one message, one exit code, whatever happens to a rank."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rank_jobs import events
from rank_pool import home, needs_torchrec, rank_folder, start

import short
from recperf.cli import main
from recperf.distributed.job import read_exit
from recperf.distributed.launch import Outcome, judge
from recperf.measure.trace.merge import inspect

WORDS = [
    "--data.history.length", "6", "--data.history.scan", "20", "--data.windows.min-history", "2",
    "--data.windows.seconds", str(50 * 86_400), "--train.batch-size", "32", "--train.device", "cpu",
    "--train.threads", "1", "--target.beat", "none", "--model.table-dim", "16", "--model.encoder-hidden", "8",
    "--model.item-hidden", "8", "--model.head-hidden", "8", "--model.positions", "32", "--model.time-buckets", "16",
    "--model.hstu.dim", "8", "--model.hstu.layers", "1", "--model.hstu.heads", "1", "--model.hstu.qk-dim", "8",
    "--model.hstu.v-dim", "8", "--model.hstu.max-length", "16", "--no-peaks", "--no-report",
]  # fmt: skip


def command(run: Path, *more: str) -> list[str]:
    return ["run", "dlrm-v4", "--data.path", str(events(home() / "events")), "--run-dir", str(run), *WORDS, *more]


def begin(folder: Path, *more: str, trouble: str = "", **how: Any) -> list[Any]:
    """Two ranks, as forks of a warm process."""
    folder.mkdir(exist_ok=True)
    return start(2, command(folder / "run", *more), folder, trouble=trouble, home=str(home()), **how)


def ended(ranks: list[Any], seconds: float = 300.0) -> list[int]:
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


def outcome(folder: Path, exit_codes: dict[int, int]) -> Outcome:
    """The launcher's verdict on two ranks."""
    ends = {rank: read_exit(rank_folder(folder, rank) / "error.json") for rank in (0, 1)}
    return judge(2, {rank: end for rank, end in ends.items() if end}, exit_codes)


def kinds(folder: Path) -> list[str]:
    return [json.loads(line)["kind"] for line in (folder / "run" / "events.jsonl").read_text().splitlines()]


@needs_torchrec
def test_a_signal_to_one_rank_makes_all_save_and_ranks_can_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    how = {"trouble": "fails", "at": 3, "how": "stop", "on": 1}
    assert ended(begin(tmp_path, "--train.max-steps", "6", "--mlperf.log", **how)) == [75, 75]
    assert "stopped by SIGTERM at step 3 of 6; the state is saved" in said(tmp_path, 0)
    assert "--ranks 2" in said(tmp_path, 0)
    assert said(tmp_path, 1) == "", "only rank 0 prints"
    resume = ["run", "--resume", str(tmp_path / "run"), "--no-peaks", "--no-report", "--quiet"]
    # The MLPerf log states the samples of one of two ranks.
    assert main(resume) == 3
    assert "needs one number of ranks: its log has 16 samples a rank, now 32" in capsys.readouterr().err
    (tmp_path / "again").mkdir()
    assert ended(start(2, resume, tmp_path / "again", home=str(home()))) == [0, 0], said(tmp_path / "again", 0)
    assert (kinds(tmp_path).count("step"), kinds(tmp_path).count("metric")) == (6, 1)
    log = (tmp_path / "run" / "mlperf.log").read_text()
    assert log.count('"run_start"') == log.count('"run_stop"') == 1


@pytest.mark.long
@needs_torchrec
def test_an_error_of_one_rank_is_printed_once_with_its_rank(tmp_path: Path) -> None:
    codes = ended(begin(tmp_path, trouble="fails", at=3, how="raise", on=1))
    assert codes[1] == 3
    assert "error: this rank read nonsense" in said(tmp_path, 1)
    assert "rank: 1" in said(tmp_path, 1)
    assert "error:" not in said(tmp_path, 0)
    assert outcome(tmp_path, {0: codes[0], 1: 3}) == Outcome(code=3), "the launcher adds nothing"


@needs_torchrec
def test_a_killed_rank_ends_the_others_and_is_named(tmp_path: Path) -> None:
    codes = ended(begin(tmp_path, trouble="fails", at=3, how="kill", on=0))
    assert codes == [-signal.SIGKILL, 4]
    found = outcome(tmp_path, {1: codes[1], 0: codes[0]})
    assert found.error is not None
    assert found.restartable
    assert "rank 0 of 2 was killed by SIGKILL" in found.error.what
    assert "error:" not in said(tmp_path, 1)


@needs_torchrec
def test_a_rank_that_hangs_is_named_with_the_collective_that_waits_for_it(tmp_path: Path) -> None:
    ranks = begin(tmp_path, "--distributed.timeout-s", "10", trouble="fails", at=3, how="freeze", on=1)
    ranks[0].join(300)
    ranks[1].kill()
    ranks[1].join()
    assert (ranks[0].exitcode, ranks[1].exitcode) == (4, -signal.SIGKILL)
    found = outcome(tmp_path, {0: 4, 1: -signal.SIGKILL})
    assert found.error is not None
    assert found.restartable
    assert "rank 1 of 2 does not respond" in found.error.what
    assert found.error.where["waited"].startswith("rank 0, 10 s in ")
    assert "All2All" in found.error.where["waited"]


class Started:
    """A launcher in its own process, and its ranks."""

    def __init__(self, folder: Path, *more: str) -> None:
        self.folder = folder
        words = [sys.executable, "-c", short.PROGRAM, *command(folder / "run", *more)]
        self.log = folder / "launcher.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(words, stdout=log, stderr=log)

    def rank(self, number: int, *, steps: int) -> int:
        """The process of a rank, once that many steps are logged."""
        end = time.monotonic() + 300
        while time.monotonic() < end and self.process.poll() is None:
            log = self.folder / "run" / "events.jsonl"
            if log.exists() and log.read_text().count('"step"') >= steps:
                for process in _children(self.process.pid):
                    if f"RANK={number}".encode() in _environment(process):
                        return process
            time.sleep(0.05)
        self.process.kill()
        raise AssertionError(f"it does not train: {self.log.read_text()}")

    def steps(self) -> int:
        return (self.folder / "run" / "events.jsonl").read_text().count('"step"')

    def resumes(self) -> int:
        return int(json.loads((self.folder / "run" / "progress.json").read_text())["resumes"])

    def ended(self, seconds: float) -> str:
        """What was printed, once the launcher has ended; every rank has to be gone by then."""
        ranks = _children(self.process.pid)
        try:
            self.process.wait(seconds)
        finally:
            self.process.kill()
            left = [rank for rank in ranks if Path(f"/proc/{rank}").exists()]
            for rank in left:
                os.kill(rank, signal.SIGKILL)
        assert left == []
        return self.log.read_text()


def _children(process: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def _listening(processes: list[int]) -> set[str]:
    """Addresses at which processes listen for TCP connections."""
    own = {os.readlink(place) for process in processes for place in Path(f"/proc/{process}/fd").iterdir()}
    tables = [Path(f"/proc/net/{name}") for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables if table.exists() for line in table.read_text().splitlines()[1:]]
    return {row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own}


def _environment(process: int) -> list[bytes]:
    try:
        return Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


SAVING = ("--train.epochs", "1000", "--train.checkpoint-steps", "2")


@pytest.mark.long
@needs_torchrec
def test_the_launcher_restarts_after_a_kill_and_a_signal_to_it_makes_all_ranks_save(tmp_path: Path) -> None:
    """And nothing listens at another address than loopback's."""
    started = Started(tmp_path, "--ranks", "2", "--restarts", "1", *SAVING)
    processes = [started.process.pid, *(started.rank(number, steps=5) for number in (0, 1))]
    # gloo's, at 127.0.0.1 as /proc writes it.
    assert {address.partition(":")[0] for address in _listening(processes)} == {"0100007F"}
    os.kill(processes[2], signal.SIGKILL)
    while not started.resumes():
        assert started.process.poll() is None, started.log.read_text()
        time.sleep(0.1)
    started.rank(1, steps=started.steps() + 2)
    started.process.send_signal(signal.SIGINT)
    printed = started.ended(300)
    assert started.process.returncode == 130
    assert "rank 1 of 2 was killed by SIGKILL" in printed
    assert "restarting all ranks (1 of 1)" in printed
    assert printed.count("error:") == 1, printed
    assert "; the state is saved" in printed


SLEEP_S = 0.25
"""Much longer than anything else in these steps, also on a busy machine."""


@pytest.mark.long
@needs_torchrec
def test_a_profile_of_two_ranks_has_a_trace_each_which_merge(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    where = ["--data.path", str(events(home() / "events")), "--run-dir", str(run), "--save-trace", "--steps", "5"]
    words = (word for word in WORDS if word not in ("--target.beat", "none", "--no-report"))
    ranks = start(
        2, ["profile", "dlrm-v4", *where, *words], tmp_path, home=str(home()), trouble="sleeps", seconds=SLEEP_S
    )
    assert ended(ranks) == [0, 0], said(tmp_path, 0)
    found = json.loads((run / "profile.json").read_text())
    assert found["workload"]["communication"]["slowest"] == 1
    assert found["workload"]["trace"]["file"] == "trace.rank1.json.gz"
    assert found["operators"]
    assert found["workload"]["no_advice"] == {"missing": "fixes are predicted and tried in a single process only"}
    assert any(text.startswith("Rank 1 of 2 is the slowest") for text in found["verdict"]["because"])
    assert "Rank 1 of 2 is the slowest" in said(tmp_path, 0)
    assert "Rank 1 of 2 is the slowest" in (run / "profile.html").read_text()
    sources = [inspect(run / f"trace.rank{rank}.json.gz") for rank in (0, 1)]
    assert sources[0].run == sources[1].run
    assert main(["profile", "--trace", str(run), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["trace"]["merged"]
    assert told["clock"] == "one host's clock"
    assert told["of"] == len(told["ranks"]) == 2
    assert main(["profile", "--trace", str(run / "trace.merged.json.gz")]) == 3


def test_profile_options_for_a_single_process_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "dlrm-v4", "--ranks", "2", "--try-fixes"]) == 2
    assert "for one process" in capsys.readouterr().err
