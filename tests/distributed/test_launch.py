"""`recperf run` as several ranks: one run folder, one message, one exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from rank_jobs import events
from rank_pool import home, needs_torchrec, start

from recperf.cli import main
from recperf.distributed import notes
from recperf.distributed.launch import rank_arguments, require_ranks, verdict
from recperf.distributed.watching import Watch
from recperf.distributed.world import World
from recperf.errors import RecperfError, UsageError
from recperf.measure import spans

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


def told_by(folder: Path, died: dict[int, int]) -> RecperfError:
    """The one message of a launcher whose ranks have ended so."""
    told: list[RecperfError] = []
    assert verdict(folder, 2, died, None, told.append) == 4
    (found,) = told
    return found


@needs_torchrec
@pytest.mark.parametrize("on", [1, pytest.param(0, marks=pytest.mark.long)])
def test_a_killed_rank_ends_the_others_and_is_named_with_its_last_span(tmp_path: Path, on: int) -> None:
    codes = ended(began(tmp_path, trouble="fails", at=3, how="kill", on=on))
    assert codes[on] == -signal.SIGKILL
    assert codes[1 - on] == 4
    found = told_by(tmp_path, {on: codes[on]})
    assert f"rank {on} of 2 was ended by SIGKILL" in found.what
    assert found.where == {"rank": str(on), "last seen": "step 2: done", "last span": "after update"}
    assert "error:" not in said(tmp_path, 1 - on)


@needs_torchrec
def test_ranks_that_were_started_with_other_words_are_refused_before_a_run_is_made(tmp_path: Path) -> None:
    assert ended(began(tmp_path, trouble="rank_states.another_seed")) == [3, 3]
    assert "error: rank 1 has seed 43, rank 0 has 42" in said(tmp_path, 0)
    assert said(tmp_path, 1) == ""
    assert not (tmp_path / "run").exists()


@needs_torchrec
def test_a_rank_that_hangs_is_named_with_the_span_it_hangs_in(tmp_path: Path) -> None:
    ranks = began(tmp_path, "--distributed.timeout-s", "2", trouble="fails_inside", at=3, how="hang", on=1)
    ranks[0].join(60)
    ranks[1].kill()
    ranks[1].join()
    assert (ranks[0].exitcode, ranks[1].exitcode) == (4, -signal.SIGKILL)
    found = told_by(tmp_path, {0: 4, 1: -signal.SIGKILL})
    assert "rank 1 of 2 does not answer" in found.what
    assert found.where["last seen"] == "step 3: update"
    assert found.where["last span"] == "sparse_update"


@needs_torchrec
def test_a_rank_without_memory_says_so_with_the_span_it_failed_in(tmp_path: Path) -> None:
    codes = ended(began(tmp_path, trouble="fails_inside", at=3, how="memory", on=1))
    assert codes == [4, 4]
    assert "error: out of memory" in said(tmp_path, 1)
    assert "rank:      1" in said(tmp_path, 1)
    assert "last span: embedding" in said(tmp_path, 1)
    assert "Traceback" not in said(tmp_path, 1)
    assert "error:" not in said(tmp_path, 0)
    assert verdict(tmp_path, 2, {1: 4}, None, pytest.fail) == 4


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


class Started:
    """A launcher in a process of its own, and its ranks."""

    def __init__(self, folder: Path, *words: str, more: Sequence[str] = ("--train.epochs", "1000")) -> None:
        self.folder = folder
        where = ["--data.path", str(events(home() / "events")), "--run-dir", str(folder / "run")]
        train = ["run", "dlrm-v4", *where, *WORDS, *more]
        self.process = subprocess.Popen(
            [sys.executable, "-m", *words[:1], *train, *words[1:]] if words[0] == "recperf" else [*words, *train],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def rank(self, number: int) -> int:
        """Its process, once it is training."""
        end = time.monotonic() + 90
        while time.monotonic() < end and self.process.poll() is None:
            log = self.folder / "run" / "events.jsonl"
            if log.exists() and log.stat().st_size:
                for process in _children(self.process.pid):
                    if f"RANK={number}".encode() in Path(f"/proc/{process}/environ").read_bytes().split(b"\0"):
                        return process
            time.sleep(0.05)
        self.process.kill()
        raise AssertionError(f"it does not train: {self.process.communicate()[1]}")

    def ended(self, seconds: float) -> str:
        """What was said, once the launcher has ended; every rank has to be gone by then."""
        ranks = _children(self.process.pid)
        try:
            _, said = self.process.communicate(timeout=seconds)
        finally:
            self.process.kill()
            left = [rank for rank in ranks if Path(f"/proc/{rank}").exists()]
            for rank in left:
                os.kill(rank, signal.SIGKILL)
        assert left == []
        return str(said)


def _children(process: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


@pytest.mark.long
@needs_torchrec
@pytest.mark.parametrize(
    ("on", "number", "what"),
    [(0, signal.SIGKILL, "was ended by SIGKILL"), (1, signal.SIGSTOP, "does not answer")],
)
def test_the_launcher_names_a_rank_that_was_killed_or_hangs(tmp_path: Path, on: int, number: int, what: str) -> None:
    started = Started(tmp_path, "recperf", "--ranks", "2", "--distributed.timeout-s", "5")
    os.kill(started.rank(on), number)
    # A hang is noticed after 5 seconds, and all have ended 5 later: the rest is room for a busy machine.
    said = started.ended(40)
    assert started.process.returncode == 4
    assert said.count("error:") == 1, said
    assert f"rank {on} of 2 {what}" in said
    assert "last span:" in said


@pytest.mark.long
@needs_torchrec
@pytest.mark.parametrize("on", [0, 1])
def test_under_torchrun_alone_a_rank_that_is_left_names_the_one_that_is_not(tmp_path: Path, on: int) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    started = Started(tmp_path, *torchrun, "-m", "recperf")
    os.kill(started.rank(on), signal.SIGKILL)
    said = started.ended(60)
    assert said.count("error: ") == 1, said
    assert f"rank {on} of 2 is gone or does not answer" in said
    assert "last span:" in said


@pytest.mark.long
@needs_torchrec
@pytest.mark.parametrize("by", ["recperf", "torchrun"])
def test_ranks_that_are_started_again_go_on(tmp_path: Path, by: str) -> None:
    saving = ["--train.epochs", "1", "--train.checkpoint-steps", "2"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = ["recperf", "--ranks", "2", "--restarts", "1"]
    started = Started(
        tmp_path, *([*torchrun, "--max-restarts", "1", "-m", "recperf"] if by == "torchrun" else words), more=saving
    )
    process = started.rank(1)
    while not list((tmp_path / "run" / "checkpoints").glob("seed-*/step-*")):
        time.sleep(0.01)
    os.kill(process, signal.SIGKILL)
    started.ended(240)
    assert started.process.returncode == 0
    assert kinds(tmp_path).count("step") == 20
    assert json.loads((tmp_path / "run" / "progress.json").read_text())["resumes"] == 1


def test_ranks_that_do_not_end_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(notes.VARIABLE, str(tmp_path))
    sleeping = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    for rank, process in enumerate(sleeping):
        (tmp_path / f"rank-{rank}.note").write_bytes(f"{process.pid}".ljust(200).encode())
    try:
        with Watch(tmp_path, 2, end_s=0.1):
            # One that saved and left is no reason.
            notes.leave_word(0, code=75, lost="", time=1.0)
            with pytest.raises(subprocess.TimeoutExpired):
                sleeping[1].wait(1)
            notes.leave_word(0, code=4, lost="silent", time=1.0)
            assert sleeping[1].wait(30) == -signal.SIGKILL
    finally:
        for process in sleeping:
            process.kill()
            process.wait()


def test_a_rank_that_others_wait_for_in_vain_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(notes.VARIABLE, str(tmp_path))
    text = f"{'7':<12}{'step 9: adding up gradients':<120}{'reduce':<68}"
    (tmp_path / "rank-1.note").write_text(text)
    notes.leave_word(0, code=4, lost="silent", time=1.0)
    found = told_by(tmp_path, {0: 4, 1: -9})
    assert "rank 1 of 2 does not answer" in found.what
    assert found.where == {"rank": "1", "last seen": "step 9: adding up gradients", "last span": "reduce"}


@pytest.fixture
def noting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(notes.VARIABLE, str(tmp_path))
    monkeypatch.setattr(notes, "_page", None)
    notes.begin(1)
    yield tmp_path
    spans.follow(None)


def test_the_innermost_span_is_noted(noting: Path) -> None:
    clock = spans.StepClock()
    assert notes.noted(noting, 1) == notes.Note(os.getpid(), "starting", "")
    with spans.span("forward"):
        with spans.span("embedding"):
            assert notes.noted(noting, 1).span == "embedding"
        assert notes.noted(noting, 1).span == "forward"
    assert notes.noted(noting, 1).span == "after forward"
    # Also where the step is measured, which it is as if nobody took notes.
    clock.begin()
    with spans.span("backward"):
        assert notes.noted(noting, 1).span == "backward"
    assert set(clock.end()[1]) == {"other", "backward"}
    with pytest.raises(MemoryError), spans.span("update"), spans.span("dense_update"):
        raise MemoryError
    assert notes.noted(noting, 1).span == "dense_update"
    notes.note("step 4: done")
    assert notes.noted(noting, 1) == notes.Note(os.getpid(), "step 4: done", "dense_update")


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
    assert rank_arguments(["dlrm-v4", "--ranks", "4", "--seed", "1"]) == ["dlrm-v4", "--seed", "1"]
    assert rank_arguments(["--ranks=4", "dlrm-v4", "--restarts", "2"]) == ["dlrm-v4"]
