"""One run on two hosts, which are network namespaces: the losses of one host, restarts, and a host that goes away."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rank_pool import needs_torchrec
from test_launch import begin as begin_on_one_host
from test_launch import command, ended
from two_hosts import Host, NoHosts, two_hosts, until

pytestmark = needs_torchrec
PORT = "29400"
TIMEOUT_S = 10
"""How long ranks wait for each other."""
SLACK_S = 60
"""Room for a busy machine beyond the seconds that docs/launching.md states."""
LONG = ["--train.epochs", "1000", "--distributed.timeout-s", str(TIMEOUT_S)]


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    try:
        with two_hosts() as pair:
            yield pair
    except NoHosts as reason:
        pytest.skip(f"no network namespaces here: {reason}")


def begin(hosts: tuple[Host, Host], folder: Path, words: list[str], *, meet: str = "fixed", log: str = "host") -> None:
    """Start an agent with one rank on each host."""
    first = hosts[0].address
    for number, host in enumerate(hosts):
        how = {
            "fixed": ["--node-rank", str(number), "--master-addr", first, "--master-port", PORT],
            "c10d": [
                "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first}:{PORT}", "--rdzv-id", "tests",
                "--max-restarts", "1", "--rdzv-conf", f"is_host={int(number == 0)}", "--local-addr", host.address,
            ],
        }[meet]  # fmt: skip
        agent = ["--nnodes", "2", "--nproc-per-node", "1", *how, "-m", "recperf", *words]
        host.torchrun(agent, folder / f"{log}-{number}.log")


def logged(run: Path, *kinds: str) -> list[dict[str, Any]]:
    path = run / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("}")]
    return [{name: value for name, value in event.items() if name != "t"} for event in found if event["kind"] in kinds]


def training(hosts: tuple[Host, Host], run: Path) -> None:
    until(lambda: len(logged(run, "step")) >= 3, hosts[0])


def errors(folder: Path, number: int, log: str = "host") -> list[str]:
    lines = (folder / f"{log}-{number}.log").read_text().splitlines()
    return [line for line in lines if line.startswith("error:")]


def rank_on(host: Host) -> int:
    """The process of the rank there."""
    (rank,) = (
        process
        for process in host.processes()
        if any(entry.startswith(b"RANK=") for entry in Path(f"/proc/{process}/environ").read_bytes().split(b"\0"))
    )
    return rank


@pytest.mark.long
def test_two_hosts_train_as_one_restart_after_a_kill_and_notice_a_host_that_crashes(
    tmp_path: Path, hosts: tuple[Host, Host]
) -> None:
    run = tmp_path / "run"
    more = [*LONG, "--train.checkpoint-steps", "2"]
    begin(hosts, tmp_path, command(run, *more), meet="c10d")
    until(lambda: len(logged(run, "step")) >= 5, hosts[0])
    # A rank is killed: the ranks of both hosts are restarted, although agents count only failures of their own ranks.
    os.kill(rank_on(hosts[0]), signal.SIGKILL)
    until(lambda: json.loads((run / "progress.json").read_text())["resumes"] == 1, hosts[0])
    restarted_at = len(logged(run, "step"))
    until(lambda: len(logged(run, "step")) >= restarted_at + 2, hosts[0])
    # Then a host crashes: the other notices at once, and its agent has no restart left.
    hosts[1].crash()
    assert hosts[0].ended(SLACK_S) == 1, "torchrun's own code"
    lost = "lost the connection to another rank; it stops"
    assert errors(tmp_path, 0) == [f"error: rank 0 of 2 {lost}"]
    assert errors(tmp_path, 1) == [f"error: rank 1 of 2 {lost}"]
    assert hosts[0].processes() == []
    stop = {"trouble": "fails", "at": 6, "how": "stop"}
    assert ended(begin_on_one_host(tmp_path / "one", *more, **stop)) == [75, 75]
    both = [[step["loss"] for step in logged(path, "step")][:5] for path in (run, tmp_path / "one" / "run")]
    assert both[0] == both[1]
    assert "dlrm-v4: starting" not in (tmp_path / "host-1.log").read_text()


@pytest.mark.long
def test_a_cable_that_is_pulled(tmp_path: Path, hosts: tuple[Host, Host]) -> None:
    """Neither host is notified, so both end after the timeout."""
    begin(hosts, tmp_path, command(tmp_path / "run", *LONG))
    training(hosts, tmp_path / "run")
    hosts[1].unplug()
    assert [host.ended(TIMEOUT_S + SLACK_S) for host in hosts] == [1, 1]
    for number in (0, 1):
        assert errors(tmp_path, number) == [
            f"error: rank {number} of 2 waited {TIMEOUT_S} s for another rank; it stops"
        ]


@pytest.mark.long
def test_a_signal_to_one_host_makes_both_save_and_the_run_resumes(tmp_path: Path, hosts: tuple[Host, Host]) -> None:
    """A batch system sends it before the time limit."""
    begin(hosts, tmp_path, command(tmp_path / "run", *LONG))
    training(hosts, tmp_path / "run")
    hosts[1].started[-1].send_signal(signal.SIGTERM)
    for host in hosts:
        host.ended(SLACK_S)
    (said,) = errors(tmp_path, 0)
    assert said.startswith("error: stopped by SIGTERM at step ")
    assert said.endswith("; the state is saved")
    assert errors(tmp_path, 1) == []
    done = len(logged(tmp_path / "run", "step"))
    more = ["--train.max-steps", str(done + 2), "--allow-change", "train.max_steps"]
    begin(hosts, tmp_path, ["run", "--resume", str(tmp_path / "run"), *more, "--no-peaks", "--no-report"], log="again")
    assert [host.ended(120) for host in hosts] == [0, 0], (tmp_path / "again-0.log").read_text()
    steps = [event["step"] for event in logged(tmp_path / "run", "step")]
    assert steps == list(range(1, done + 3))
