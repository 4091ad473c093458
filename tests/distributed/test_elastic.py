"""torchrun with --nnodes 2:3: a host that is lost for good, and one that comes back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rank_hosts import LOOPBACK, free_port
from rank_pool import home, needs_torchrec, start
from test_launch import SAVING, command, ended

pytestmark = [needs_torchrec, pytest.mark.long]
ADDRESSES = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
"""torchrun numbers hosts in the order of their addresses, so rank 0 is on the first."""
STORE = ADDRESSES[1]
SECONDS = 600.0


class Hosts:
    """torchrun agents with one rank each, as if on hosts of their own."""

    def __init__(self, folder: Path, command: list[str]) -> None:
        self.folder, self.command, self.port = folder, command, free_port()
        self.agents: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, address: str) -> None:
        conf = f"is_host={int(address == STORE)},last_call_timeout=2,keep_alive_interval=1"
        arguments = [
            "--nnodes", "2:3", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d",
            "--rdzv-endpoint", f"{STORE}:{self.port}", "--rdzv-id", "elastic", "--rdzv-conf", conf,
            "--local-addr", address, "-m", "recperf", *self.command,
        ]  # fmt: skip
        own = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "NCCL_HOSTID": address, "RECPERF_HOME": str(home())}
        environment = {**os.environ, **LOOPBACK, **own}
        with (self.folder / f"{address}.log").open("ab") as log:
            call = [sys.executable, "-m", "torch.distributed.run", *arguments]
            self.agents[address] = subprocess.Popen(call, env=environment, stdout=log, stderr=log)

    def lose(self, address: str) -> None:
        """Every process of the host ends at once."""
        agent = self.agents.pop(address)
        ranks = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        for process in (agent.pid, *map(int, ranks)):
            os.kill(process, signal.SIGKILL)
        agent.wait()

    def stop(self) -> None:
        for agent in self.agents.values():
            agent.send_signal(signal.SIGTERM)
        for agent in self.agents.values():
            agent.wait(SECONDS)

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + SECONDS
        while not condition():
            waiting = time.monotonic() < end and all(agent.poll() is None for agent in self.agents.values())
            assert waiting, "\n".join(path.read_text()[-3000:] for path in sorted(self.folder.glob("*.log")))
            time.sleep(0.05)


@contextmanager
def hosts(folder: Path, command: list[str]) -> Iterator[Hosts]:
    made = Hosts(folder, command)
    try:
        yield made
    finally:
        for address in tuple(made.agents):
            if made.agents[address].poll() is None:
                made.lose(address)


def logged(run: Path, *kinds: str) -> list[dict[str, Any]]:
    path = run / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("}")]
    return [{name: value for name, value in event.items() if name != "t"} for event in found if event["kind"] in kinds]


def losses(run: Path) -> list[float]:
    return [event["loss"] for event in logged(run, "step")]


def rank_changes(run: Path) -> list[tuple[int, int, int]]:
    return [(event["was"], event["now"], event["step"]) for event in logged(run, "change") if event["field"] == "ranks"]


def test_a_run_goes_on_without_a_lost_host_and_with_one_that_comes_back(tmp_path: Path) -> None:
    run = tmp_path / "run"
    home()
    with hosts(tmp_path, command(run, *SAVING)) as cluster:
        for address in ADDRESSES:
            cluster.start(address)
        cluster.until(lambda: len(losses(run)) >= 5)
        # The host of rank 0: another one writes the run from now on.
        cluster.lose(ADDRESSES[0])
        cluster.until(lambda: len(rank_changes(run)) == 1)
        done = len(losses(run))
        cluster.until(lambda: len(losses(run)) >= done + 3)
        cluster.start(ADDRESSES[0])
        cluster.until(lambda: len(rank_changes(run)) == 2)
        done = len(losses(run))
        cluster.until(lambda: len(losses(run)) >= done + 3)
        cluster.stop()
    (_, _, lost), (_, _, joined) = rank_changes(run)
    assert rank_changes(run) == [(3, 2, lost), (2, 3, joined)]
    last = len(losses(run))
    assert [event["step"] for event in logged(run, "step")] == list(range(1, last + 1))

    more = ["--train.max-steps", str(last + 1), "--allow-change", "train.max_steps", "--no-peaks", "--no-report"]
    ranks = start(2, ["run", "--resume", str(run), *more], tmp_path, home=str(home()))
    assert ended(ranks, SECONDS) == [0, 0]
    result = json.loads((run / "result.json").read_text())
    changes = [change for change in result["provenance"]["changes"] if change["field"] == "ranks"]
    assert [(change["was"], change["now"], change["after_step"]) for change in changes] == [
        (3, 2, lost), (2, 3, joined), (3, 2, last),
    ]  # fmt: skip
    assert result["performance"]["settings"]["ranks"].startswith("2: ")
