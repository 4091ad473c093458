"""What a rank's end means: who reports it, what remains for ranks that are restarted, and when they are."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from recperf.distributed import job, launch, library
from recperf.distributed.job import Exit
from recperf.distributed.launch import Outcome, judge, judge_stop, require_ranks
from recperf.distributed.ranks import Ranks
from recperf.errors import DataError, Interrupted, MachineError, RecperfError, Stopped, UsageError
from recperf.machine import out_of_memory
from recperf.stop import FLAG


@pytest.fixture
def error_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The error file of rank 1 of `recperf run --ranks`, which this process is."""
    path = tmp_path / "job" / "attempt_0" / "1" / "error.json"
    path.parent.mkdir(parents=True)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", f"{job.LAUNCHER}test")
    return path


def raising(error: BaseException) -> Callable[..., int]:
    def work(*_: Any, **__: Any) -> int:
        raise error

    return work


def ended(error: BaseException, error_file: Path, rank: int = 1) -> tuple[int, list[str], Exit]:
    reported: list[RecperfError] = []
    world = Ranks(rank=rank, size=2, local_rank=rank, joined=True, timeout_s=2.0)
    code = launch.run_as_rank(world, raising(error), reported.append)
    end = job.read_exit(error_file)
    assert end is not None
    return code, [error.what for error in reported], end


def test_only_errors_of_torch_mean_that_others_are_gone(error_file: Path) -> None:
    code, reported, end = ended(RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer"), error_file)
    assert (code, reported, end.lost, end.waited_s) == (4, [], True, 0.0)
    end = ended(RuntimeError("[gloo] Timed out waiting 2000ms for recv operation to complete"), error_file)[2]
    assert (end.lost, end.waited_s) == (True, 2.0)
    # Such words in a path mean nothing.
    full = MachineError("cannot write state.json: the disk is full", where={"folder": "/mnt/nccl/socket"})
    assert ended(full, error_file)[:2] == (4, ["cannot write state.json: the disk is full"])
    stopped = Stopped("stopped by SIGTERM", fix="recperf run --resume runs/gloo-2")
    assert ended(stopped, error_file, rank=0)[:2] == (75, ["stopped by SIGTERM"])
    assert ended(stopped, error_file, rank=1)[:2] == (75, []), "rank 0 reports what all ranks know"


def test_torchs_out_of_memory_error_is_recognised(error_file: Path) -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 46)
    assert out_of_memory(raised.value)
    code, reported, end = ended(raised.value, error_file)
    assert (code, reported, end.lost, end.out_of_memory) == (4, ["out of memory"], False, True)
    assert not out_of_memory(DataError("the disk is out of memory"))


LOST, STOPPED = Exit(code=4, lost=True), Exit(code=75, message="error: stopped by SIGTERM")
WAITED = Exit(code=4, lost=True, waited_s=300, collective="all_reduce")


@pytest.mark.parametrize(
    ("ends", "exit_codes", "expected"),
    [
        ({0: LOST}, {0: 4, 1: -9}, (4, True, "rank 1 of 2 was killed by SIGKILL, perhaps out of memory")),
        # Torch's agent asked rank 0 to stop.
        ({0: STOPPED}, {1: -9, 0: 75}, (4, True, "rank 1 of 2 was killed by SIGKILL, perhaps out of memory")),
        ({0: LOST}, {1: 1}, (4, False, "rank 1 of 2 ended with code 1")),
        ({0: WAITED}, {0: 4, 1: -9}, (4, True, "rank 1 of 2 does not respond")),
        ({0: WAITED, 1: WAITED}, {0: 4, 1: 4}, (4, True, "the ranks wait for each other")),
        ({0: LOST, 1: LOST}, {0: 4, 1: 4}, (4, True, "the ranks lost the connection to each other")),
        ({0: LOST, 1: Exit(code=4, out_of_memory=True)}, {0: 4, 1: 4}, (4, True, "")),
        ({0: LOST, 1: Exit(code=3)}, {0: 4, 1: 3}, (3, False, "")),
        ({0: STOPPED, 1: STOPPED}, {1: 75, 0: 75}, (75, False, "")),
        ({0: LOST, 1: STOPPED}, {1: 75, 0: 4}, (75, False, "stopped by SIGTERM")),
        ({0: Exit(code=0), 1: Exit(code=0)}, {}, (0, False, "")),
    ],
)
def test_the_first_failure_decides_and_some_are_worth_a_restart(
    ends: dict[int, Exit], exit_codes: dict[int, int], expected: tuple[int, bool, str]
) -> None:
    found = judge(2, ends, exit_codes)
    assert (found.code, found.restartable, found.error.what.partition(";")[0] if found.error else "") == expected


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ({0: STOPPED, 1: STOPPED}, (75, "")),
        ({0: STOPPED}, (75, "")),
        ({0: LOST, 1: STOPPED}, (75, "stopped by SIGTERM")),
        ({0: Exit(code=3), 1: LOST}, (3, "")),
        ({0: Exit(code=0), 1: Exit(code=0)}, (0, "")),
        ({1: Exit(code=0)}, (75, "stopped; not all ranks confirmed that they saved")),
    ],
)
def test_the_outcome_of_a_signal(ends: dict[int, Exit], expected: tuple[int, str]) -> None:
    found = judge_stop(2, ends, signal.SIGTERM)
    assert (found.code, found.error.what if found.error else "") == expected
    assert not found.restartable


@pytest.mark.parametrize("stopped", [False, True])
def test_all_ranks_are_restarted_as_often_as_allowed(monkeypatch: pytest.MonkeyPatch, stopped: bool) -> None:
    attempts: list[int] = []

    def attempt(agent: launch.Agent) -> Outcome:
        attempts.append(1)
        if stopped:
            monkeypatch.setattr(FLAG, "received", signal.SIGINT)
        return Outcome(code=4, error=MachineError("rank 1 of 2 was killed"), restartable=True)

    monkeypatch.setattr(launch.Agent, "run", attempt)
    monkeypatch.setattr(launch.Agent, "has_run", lambda agent: True)
    monkeypatch.setattr(library, "require_torchrec", lambda: None)
    reported: list[RecperfError] = []
    notices: list[str] = []
    if stopped:
        with pytest.raises(Interrupted):
            launch.launch([], 2, reported.append, restarts=1, notice=notices.append)
        assert len(attempts) == 1
    else:
        code = launch.launch([], 2, reported.append, restarts=1, notice=notices.append)
        assert (code, len(attempts), len(reported)) == (4, 2, 1)
    assert notices == ["rank 1 of 2 was killed; restarting all ranks (1 of 1)"]


def test_commands_that_cannot_be_several_ranks() -> None:
    with pytest.raises(UsageError, match="single process"):
        require_ranks(Ranks(), 2, "micro-dlrm", False)
    with pytest.raises(UsageError, match="torchrun started 4"):
        require_ranks(Ranks(size=4), 2, "dlrm-v4", True)
    with pytest.raises(UsageError, match="1 to 1024"):
        require_ranks(Ranks(), -1, "dlrm-v4", True)
    require_ranks(Ranks(), 0, "micro-dlrm", False)
