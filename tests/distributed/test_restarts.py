"""What a rank's end means: who is named, what stays for ranks that are started again, and when they are."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from recperf.cli import run as run_command
from recperf.cli.options import choose, read_options
from recperf.config import to_json, with_absolute_paths
from recperf.distributed import launch, library, notes, roll_call
from recperf.distributed.world import RendezvousError, World, enter
from recperf.errors import DataError, MachineError, RecperfError, Stopped, UsageError
from recperf.machine import out_of_memory
from recperf.measure import spans
from recperf.runs.record import Run
from recperf.train.stop import StopFlag


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a launcher of ours looks."""
    monkeypatch.setenv(notes.VARIABLE, str(tmp_path))
    monkeypatch.setattr(notes, "_page", None)
    monkeypatch.setattr(launch, "LINGER_S", 0.0)
    yield tmp_path
    spans.follow(None)


@pytest.fixture
def torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As a rank of a job of torchrun, without a launcher of ours."""
    monkeypatch.delenv(notes.VARIABLE, raising=False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    monkeypatch.setattr(notes, "_page", None)
    monkeypatch.setattr(notes.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(roll_call, "answer", lambda world, said: [])
    enter(World(size=2))
    yield
    enter(World())
    spans.follow(None)


def raising(error: BaseException) -> Callable[..., int]:
    def work(*_: Any, **__: Any) -> int:
        raise error

    return work


def ended(error: BaseException, rank: int = 0) -> tuple[int, list[str], dict[str, Any]]:
    told: list[RecperfError] = []
    code = launch.run_as_rank(World(rank=rank, size=2, local_rank=rank, joined=True), raising(error), told.append)
    place = notes.folder()
    assert place is not None
    return code, [error.what for error in told], notes.word(place, rank) or {}


def test_only_torch_says_that_others_are_gone(place: Path) -> None:
    code, told, word = ended(RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer"))
    assert (code, told, word["lost"]) == (4, [], "gone")
    # The folder of a run has such a word in its name.
    stopped = Stopped("stopped by SIGTERM", where={"run": "runs/gloo-2"}, fix="recperf run --resume runs/gloo-2")
    assert ended(stopped)[:2] == (75, ["stopped by SIGTERM"])
    assert launch.verdict(place, 1, {0: 75}, None, pytest.fail) == 75


def test_words_of_this_torch_for_no_memory(place: Path) -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 46)
    assert out_of_memory(raised.value)
    code, told, word = ended(raised.value, rank=1)
    assert (code, told, word["lost"], word["full"]) == (4, ["out of memory"], "", True)
    assert not out_of_memory(DataError("the disk is out of memory"))


def test_ranks_that_do_not_meet_say_so_once_a_host(place: Path) -> None:
    assert ended(RendezvousError("the ranks did not meet within 5 s"), rank=0)[:2] == (
        4,
        ["the ranks did not meet within 5 s"],
    )
    assert ended(RendezvousError("the ranks did not meet within 5 s"), rank=1)[:2] == (4, [])


def test_which_failures_are_worth_another_start(place: Path) -> None:
    def judged(died: dict[int, int]) -> bool:
        told: list[RecperfError] = []
        assert launch.verdict(place, 2, died, None, told.append) == 4
        return launch.curable(place, 2, told)

    notes.leave_word(0, code=4, lost="gone", full=False, time=2.0)
    assert judged({1: -9})
    # It left by itself without a word.
    assert not judged({1: 1})
    notes.leave_word(0, code=4, lost="silent", full=False, time=2.0)
    assert judged({1: -9})
    notes.leave_word(1, code=4, lost="", full=True, time=1.0)
    assert judged({1: 4})
    # A full disk, say, would be full again.
    notes.leave_word(1, code=4, lost="", full=False, time=1.0)
    assert not judged({1: 4})


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What the starts of a launcher come to, each taken from this list: what died, and the signal received."""
    planned: list[Any] = []

    def attempt(words: list[str], ranks: int, place: Path) -> Any:
        (place / notes.RUN).write_text("runs/mine")
        found = planned.pop(0)
        if isinstance(found, BaseException):
            raise found
        return found

    monkeypatch.setattr(launch, "_attempt", attempt)
    monkeypatch.setattr(library, "require_torchrec", lambda: None)
    yield planned
    assert planned == []


def launched(restarts: int) -> tuple[int, list[str], list[str]]:
    said: list[RecperfError] = []
    noticed: list[str] = []
    code = launch.launch([], 2, said.append, restarts=restarts, notice=noticed.append)
    return code, [error.what for error in said], noticed


def test_a_killed_rank_starts_all_again_as_often_as_allowed(attempts: list[Any]) -> None:
    attempts += [({1: -9}, None)] * 2
    code, said, noticed = launched(1)
    assert (code, len(said), len(noticed)) == (4, 1, 1)
    assert "rank 1 of 2 was ended by SIGKILL" in said[0]
    assert noticed[0].endswith("they are started again, 1 of 1")


def test_after_a_signal_nothing_is_started_again(attempts: list[Any]) -> None:
    from torch.distributed.elastic.multiprocessing import SignalException

    attempts.append(({1: -9}, signal.SIGTERM))
    assert launched(3) == (75, ["stopped; the ranks did not say that they saved"], [])
    # Between two starts, where torch's handlers are still there.
    attempts += [({1: -9}, None), SignalException("got it", signal.SIGINT)]
    code, said, noticed = launched(3)
    assert (code, said, len(noticed)) == (130, ["interrupted; the ranks did not say that they saved"], 1)


def test_only_rank_0_says_that_a_run_is_done(torchrun: None, tmp_path: Path) -> None:
    notes.leave_run(tmp_path / "run")
    for rank, code, kept in ((1, 0, True), (0, 4, True), (0, 0, False)):
        assert launch.run_as_rank(World(rank=rank, size=2), lambda code=code: code, pytest.fail) == code  # type: ignore[misc]
        assert (notes.left_run() == tmp_path / "run") is kept, (rank, code)


def test_what_an_earlier_torchrun_left_is_not_found(torchrun: None, tmp_path: Path) -> None:
    place = notes.folder()
    assert place is not None
    process, _, began = place.name.removeprefix(notes._own()).partition("-")
    # Its number was given out again.
    older = place.with_name(f"{notes._own()}{process}-{int(began) - 1}")
    older.mkdir()
    (older / notes.RUN).write_text(str(tmp_path / "run"))
    assert notes.left_run() is None
    notes.begin(0)
    assert not older.exists()
    assert place.exists()


class Asked:
    """A command of micro-dlrm, as rank 0 reads it."""

    def __init__(self, *words: str) -> None:
        self.choice = choose(["micro-dlrm", *words])
        self.options: Any = read_options(run_command.Options, self.choice, verb="run", description="")
        self.config = with_absolute_paths(self.options.values)

    def begun(self) -> Path | None:
        return run_command.begun(self.choice, self.options, self.config)


def test_ranks_started_again_find_their_run(torchrun: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    asked = Asked()
    assert asked.begun() is None
    Run.create("micro-dlrm", to_json(asked.config), folder=folder).close()
    notes.leave_run(folder)
    # Also where this host's agent did not count a start.
    assert asked.begun() == folder
    assert Asked("--seed", "7").begun() is None
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert asked.begun() is None


@pytest.mark.parametrize(("job", "count", "goes_on"), [("mine", "0", True), ("none", "0", False), ("none", "1", True)])
def test_rank_0_on_another_host_finds_a_run_of_its_job(
    torchrun: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str, count: str, goes_on: bool
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", job)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
    folder = tmp_path / "run"
    asked = Asked("--run-dir", str(folder))
    Run.create("micro-dlrm", to_json(asked.config), folder=folder).close()
    assert asked.begun() is None
    (folder / run_command.JOB).write_text(job)
    assert (asked.begun() == folder) is goes_on
    (folder / run_command.JOB).write_text("another")
    assert asked.begun() is None


@pytest.mark.parametrize(("count", "said"), [("0", 0), ("1", 1)])
def test_where_nothing_is_found_a_new_run_begins_and_that_is_said(
    torchrun: None, monkeypatch: pytest.MonkeyPatch, count: str, said: int
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
    monkeypatch.setattr(Run, "create", raising(UsageError("a new one")))
    asked, noticed = Asked(), list[str]()
    with pytest.raises(UsageError, match="a new one"):
        run_command.run(asked.choice, asked.options, StopFlag(), cast(Any, SimpleNamespace(notice=noticed.append)))
    assert sum("no run of theirs is found here: a new one begins" in text for text in noticed) == said


def test_a_machine_error_is_no_loss_of_others(place: Path) -> None:
    error = MachineError("cannot write state.json: the disk is full", where={"folder": "/mnt/nccl/socket"})
    assert ended(error, rank=1)[:2] == (4, ["cannot write state.json: the disk is full"])
