"""What a rank's end means: who reports it, what remains for ranks that are restarted, and when they are."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from recperf.cli import run as run_command
from recperf.cli.options import choose, read_options
from recperf.config import to_json, with_absolute_paths
from recperf.distributed import exits, launch, library, progress
from recperf.distributed.launch import Outcome, judge, rank_arguments, require_ranks
from recperf.distributed.progress import Exit, Progress
from recperf.distributed.ranks import Ranks, enter
from recperf.distributed.world import RendezvousError, World
from recperf.errors import DataError, Interrupted, MachineError, RecperfError, Stopped, UsageError
from recperf.machine import out_of_memory
from recperf.measure import spans
from recperf.runs import record
from recperf.runs.record import JOB, Run
from recperf.stop import FLAG, SIGNALS


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, Path]]:
    """The folders of two ranks of `recperf run --ranks`; this process is rank 1."""
    places = {rank: tmp_path / "job" / "attempt_0" / str(rank) for rank in (0, 1)}
    for place in places.values():
        place.mkdir(parents=True)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(places[1] / "error.json"))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", f"{progress.LAUNCHER}test")
    monkeypatch.setattr(progress, "_page", None)
    monkeypatch.setattr(exits, "LINGER_S", 0.0)
    yield places
    spans.follow(None)


@pytest.fixture
def torchrun(folders: dict[int, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A rank of a torchrun job, without a launcher of ours."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    enter(Ranks(size=2))
    yield
    enter(Ranks())


def raising(error: BaseException) -> Callable[..., int]:
    def work(*_: Any, **__: Any) -> int:
        raise error

    return work


def ended(error: BaseException, rank: int = 1) -> tuple[int, list[str], Exit]:
    reported: list[RecperfError] = []
    world = World(rank=rank, size=2, local_rank=rank, joined=True)
    code = exits.run_as_rank(world, raising(error), reported.append)
    place = progress.folder()
    assert place is not None
    end = progress.read_exit(place)
    assert end is not None
    return code, [error.what for error in reported], end


def recorded(folder: Path, end: Exit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(folder / "error.json"))
    progress.record_exit(end)


def test_the_innermost_span_is_recorded(folders: dict[int, Path]) -> None:
    progress.begin()
    assert progress.read_progress(folders[1]) == Progress("starting", "")
    with spans.span("forward"):
        with spans.span("embedding"):
            assert cast(Progress, progress.read_progress(folders[1])).span == "embedding"
        assert cast(Progress, progress.read_progress(folders[1])).span == "forward"
    assert cast(Progress, progress.read_progress(folders[1])).span == "after forward"
    # While the step is measured too, and the measurement does not change.
    clock = spans.StepClock()
    clock.begin()
    with spans.span("backward"):
        assert cast(Progress, progress.read_progress(folders[1])).span == "backward"
    assert set(clock.end()[1]) == {"other", "backward"}
    with pytest.raises(MemoryError), spans.span("update"), spans.span("dense_update"):
        raise MemoryError
    progress.note("step 4: done")
    assert progress.read_progress(folders[1]) == Progress("step 4: done", "dense_update")
    assert progress.read_progress(folders[0]) is None


def test_a_host_reports_what_is_wrong_with_itself_before_ranks_have_met(folders: dict[int, Path]) -> None:
    for local, lines in ((0, ["no GPU"]), (1, [])):
        reported: list[RecperfError] = []
        world = World(rank=2 + local, size=4, local_rank=local, local_size=2)
        assert exits.run_as_rank(world, raising(MachineError("no GPU")), reported.append) == 4
        assert [error.what for error in reported] == lines


def test_only_errors_of_torch_mean_that_others_are_gone(folders: dict[int, Path]) -> None:
    code, reported, end = ended(RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer"))
    assert (code, reported, end.lost) == (4, [], "gone")
    assert ended(RuntimeError("[gloo] Timed out waiting 2000ms for recv"))[2].lost == "silent"
    # Such words in a path mean nothing.
    full = MachineError("cannot write state.json: the disk is full", where={"folder": "/mnt/nccl/socket"})
    assert ended(full)[:2] == (4, ["cannot write state.json: the disk is full"])
    stopped = Stopped("stopped by SIGTERM", fix="recperf run --resume runs/gloo-2")
    assert ended(stopped, rank=0)[:2] == (75, ["stopped by SIGTERM"])
    assert ended(stopped, rank=1)[:2] == (75, []), "rank 0 reports what all ranks know"


def test_torchs_out_of_memory_error_is_recognised(folders: dict[int, Path]) -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 46)
    assert out_of_memory(raised.value)
    code, reported, end = ended(raised.value)
    assert (code, reported, end.lost, end.out_of_memory) == (4, ["out of memory"], "", True)
    assert not out_of_memory(DataError("the disk is out of memory"))


def test_ranks_that_do_not_meet_are_reported_once_per_host(folders: dict[int, Path]) -> None:
    error = RendezvousError("the ranks did not meet within 5 s")
    assert ended(error, rank=0)[:2] == (4, [error.what])
    assert ended(error, rank=1)[:2] == (4, [])


def test_the_first_failure_decides_and_some_failures_are_worth_a_restart(
    folders: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def outcome(exit_codes: dict[int, int], received: int | None = None) -> tuple[int, bool, str]:
        found = judge(folders, exit_codes, received)
        return found.code, found.restartable, found.error.what.partition(";")[0] if found.error else ""

    recorded(folders[0], Exit(code=4, lost="gone"), monkeypatch)
    assert outcome({1: -9}) == (4, True, "rank 1 of 2 was killed by SIGKILL, perhaps out of memory")
    assert outcome({1: 1}) == (4, False, "rank 1 of 2 ended with code 1"), "it would do so again"
    recorded(folders[0], Exit(code=4, lost="silent"), monkeypatch)
    assert outcome({0: 4, 1: -9}) == (4, True, "rank 1 of 2 does not respond")
    recorded(folders[1], Exit(code=4, out_of_memory=True), monkeypatch)
    assert outcome({1: 4}) == (4, True, "")
    recorded(folders[0], Exit(code=3, time=time.time() + 1), monkeypatch)
    assert outcome({0: 3, 1: 4}) == (4, True, "")
    recorded(folders[1], Exit(code=75), monkeypatch)
    recorded(folders[0], Exit(code=75), monkeypatch)
    assert outcome({}, signal.SIGTERM) == (75, False, "")
    (folders[0] / "error.json").unlink()
    recorded(folders[1], Exit(code=0), monkeypatch)
    assert outcome({}, signal.SIGINT) == (130, False, "interrupted")
    recorded(folders[0], Exit(code=0), monkeypatch)
    assert outcome({}) == (0, False, "")


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


def test_a_rank_that_alone_received_a_signal_is_reported_by_the_launcher(
    folders: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded(folders[0], Exit(code=4, lost="gone"), monkeypatch)
    recorded(folders[1], Exit(code=75, message="error: stopped by SIGHUP"), monkeypatch)
    found = judge(folders, {1: 75}, None)
    assert (found.code, found.restartable) == (75, False)
    assert found.error is not None
    assert found.error.what == "stopped by SIGHUP"


class Command:
    """A command of micro-dlrm, as rank 0 reads it."""

    def __init__(self, *arguments: str) -> None:
        self.choice = choose(["micro-dlrm", *arguments])
        self.options: Any = read_options(run_command.Options, self.choice, verb="run", description="")
        self.config = with_absolute_paths(self.options.values)

    def begun(self) -> Path | None:
        return run_command.begun(self.choice, self.options, self.config, progress.remembered_run())


def test_restarted_ranks_find_their_run(torchrun: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    command = Command()
    assert command.begun() is None
    Run.create("micro-dlrm", to_json(command.config), folder=folder).close()
    progress.remember_run(folder)
    assert command.begun() == folder
    assert Command("--seed", "7").begun() is None
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    assert command.begun() is None, "ranks started by hand are not restarted"


@pytest.mark.parametrize(("job", "count", "found"), [("mine", "0", True), ("none", "0", False), ("none", "1", True)])
def test_rank_0_on_another_host_finds_a_run_of_its_job(
    torchrun: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str, count: str, found: bool
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", job)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
    folder = tmp_path / "run"
    command = Command("--run-dir", str(folder))
    Run.create("micro-dlrm", to_json(command.config), folder=folder).close()
    assert command.begun() is None
    (folder / JOB).write_text(job)
    assert (command.begun() == folder) is found
    (folder / JOB).write_text("another")
    assert command.begun() is None


def test_every_host_remembers_the_run(torchrun: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that rank 0 may be on another host after a restart, without --run-dir."""
    folder, command = tmp_path / "run", Command()
    Run.create("micro-dlrm", to_json(command.config), folder=folder).close()
    world = SimpleNamespace(broadcast=lambda value: value, share_run=lambda record: SimpleNamespace(folder=folder))
    monkeypatch.setattr(run_command, "current", lambda: world)
    monkeypatch.setattr("recperf.execution.execute.execute", lambda *_, **__: {})
    assert command.begun() is None
    run_command.follow(command.choice, command.options, cast(Any, None))
    assert command.begun() == folder


def test_a_new_run_names_its_job_before_it_has_a_config(
    torchrun: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host lost in between leaves no run that its own job does not know."""
    folder, write = tmp_path / "run", record.write_json
    command = Command("--run-dir", str(folder))

    def checked(path: Path, value: Any) -> None:
        assert (path.name, (folder / JOB).read_text()) == ("config.json", "mine")
        assert command.begun() is None
        write(path, value)

    monkeypatch.setattr(record, "write_json", checked)
    Run.create("micro-dlrm", to_json(command.config), folder=folder, job="mine").close()
    assert command.begun() == folder


def test_restarted_ranks_that_find_no_run_say_so(torchrun: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setattr(Run, "create", raising(UsageError("a new one")))
    command, notices = Command(), list[str]()
    with pytest.raises(UsageError, match="a new one"):
        run_command.run(command.choice, command.options, cast(Any, SimpleNamespace(notice=notices.append)))
    assert any("starting a new one" in text for text in notices)


def test_commands_that_cannot_be_several_ranks() -> None:
    with pytest.raises(UsageError, match="single process"):
        require_ranks(World(), 2, "micro-dlrm", False)
    with pytest.raises(UsageError, match="torchrun started 4"):
        require_ranks(World(size=4), 2, "dlrm-v4", True)
    with pytest.raises(UsageError, match="1 to 1024"):
        require_ranks(World(), -1, "dlrm-v4", True)
    require_ranks(World(), 0, "micro-dlrm", False)


def test_a_rank_does_not_start_ranks() -> None:
    assert rank_arguments(["dlrm-v4", "--ranks", "4", "--seed", "1"]) == ["dlrm-v4", "--seed", "1"]
    assert rank_arguments(["--ranks=4", "dlrm-v4", "--restarts", "2"]) == ["dlrm-v4"]


def test_ranks_of_nohup_ignore_its_signal_and_a_failed_start_leaves_none_blocked(tmp_path: Path) -> None:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes

    rank = "import signal; raise SystemExit(signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN)"
    logs, before = DefaultLogsSpecs(log_dir=str(tmp_path)), signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with FLAG.listening(), launch._forwarding():
            with pytest.raises(OSError, match="no-such-program"):
                start_processes("ranks", "no-such-program", {0: ()}, envs={0: {}}, logs_specs=logs)
            assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & set(SIGNALS)
            ended = start_processes("ranks", sys.executable, {0: ("-c", rank)}, envs={0: {}}, logs_specs=logs).wait(30)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert ended is not None
        assert not ended.failures
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_reaches_ranks_that_have_just_been_started(tmp_path: Path) -> None:
    """The default action of a signal would kill them before they listen."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes

    rank = (
        "from recperf.stop import FLAG; import time; FLAG.listen()\n"
        "while FLAG.received is None: time.sleep(0.01)\n"
        "raise SystemExit(75)"
    )
    words, logs = dict.fromkeys((0, 1), ("-c", rank)), DefaultLogsSpecs(log_dir=str(tmp_path))
    with FLAG.listening(), launch._forwarding():
        ranks = start_processes("ranks", sys.executable, words, envs={0: {}, 1: {}}, logs_specs=logs)
        signal.raise_signal(signal.SIGHUP)
        ended = ranks.wait(30, period=0.05)
    assert ended is not None
    assert {failure.exitcode for failure in ended.failures.values()} == {75}
