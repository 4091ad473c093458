"""Ranks of two hosts that torchrun starts again: only the agent whose rank failed counts it, and all go on together."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from rank_pool import needs_torchrec
from test_two_hosts import PORT, command, errors, logged
from two_hosts import Host, NoHosts, two_hosts, until

pytestmark = [needs_torchrec, pytest.mark.long]


def rank_on(host: Host) -> int:
    """The process of the rank there."""
    found = []
    for process in host.processes():
        words = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
        if any(word.startswith(b"RANK=") for word in words):
            found.append(process)
    (rank,) = found
    return rank


def begin(hosts: tuple[Host, Host], folder: Path, words: list[str]) -> None:
    for number, host in enumerate(hosts):
        meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{hosts[0].address}:{PORT}", "--rdzv-id", "restarts"]
        meet += ["--rdzv-conf", f"is_host={int(number == 0)}", "--local-addr", host.address]
        agent = ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "2", *meet, "-m", "recperf", *words]
        host.torchrun(agent, folder / f"host-{number}.log")


@pytest.mark.parametrize("gone", [0, 1])
def test_a_rank_that_is_killed_on_one_host(tmp_path: Path, gone: int) -> None:
    run = tmp_path / "run"
    saving = ["--train.epochs", "1", "--train.checkpoint-steps", "2", "--distributed.timeout-s", "60"]
    try:
        with two_hosts() as hosts:
            begin(hosts, tmp_path, command(run, *saving))
            until(lambda: bool(list(run.glob("checkpoints/seed-*/step-*"))), hosts[0])
            os.kill(rank_on(hosts[gone]), signal.SIGKILL)
            codes = [host.ended(240) for host in hosts]
    except NoHosts as reason:
        pytest.skip(f"no network namespaces here: {reason}")
    said = [(tmp_path / f"host-{number}.log").read_text() for number in range(2)]
    assert codes == [0, 0], said
    assert "the ranks were restarted and resume their run" in "".join(said)
    assert [event["step"] for event in logged(run, "step")] == list(range(1, 21))
    assert json.loads((run / "progress.json").read_text())["resumes"] == 1
    assert errors(tmp_path, 1 - gone) == [f"error: rank {gone} of 2 is gone or does not answer; the others stop"]
