"""One run on two hosts with addresses of their own: the result of one host, and what is left when a host goes away."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rank_jobs import events
from rank_pool import home, needs_torchrec, start
from two_hosts import Host, NoHosts, two_hosts, until

pytestmark = needs_torchrec
PORT = "29400"
TIMEOUT_S = 10
"""What ranks wait for each other."""
SLACK_S = 60
"""What a busy machine may take for the seconds that docs/launching.md states."""
WORDS = [
    "--data.history.length", "6", "--data.history.scan", "20", "--data.windows.min-history", "2",
    "--data.windows.seconds", str(50 * 86_400), "--train.batch-size", "32", "--train.device", "cpu",
    "--train.threads", "1", "--target.beat", "none", "--model.table-dim", "16", "--model.encoder-hidden", "8",
    "--model.item-hidden", "8", "--model.head-hidden", "8", "--model.positions", "32", "--model.time-buckets", "16",
    "--model.hstu.dim", "8", "--model.hstu.layers", "1", "--model.hstu.heads", "1", "--model.hstu.qk-dim", "8",
    "--model.hstu.v-dim", "8", "--model.hstu.max-length", "16", "--distributed.timeout-s", str(TIMEOUT_S),
    "--no-peaks", "--no-report",
]  # fmt: skip
SHORT = ["--train.max-steps", "4"]
LONG = ["--train.epochs", "1000"]


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    try:
        with two_hosts() as pair:
            yield pair
    except NoHosts as reason:
        pytest.skip(f"no network namespaces here: {reason}")


def command(run: Path, *more: str) -> list[str]:
    return ["run", "dlrm-v4", "--data.path", str(events(home() / "events")), "--run-dir", str(run), *WORDS, *more]


def begin(hosts: tuple[Host, Host], folder: Path, words: list[str], *, meet: str = "fixed", log: str = "host") -> None:
    """An agent on each host, with one rank."""
    first = hosts[0].address
    for number, host in enumerate(hosts):
        how = {
            "fixed": ["--node-rank", str(number), "--master-addr", first, "--master-port", PORT],
            "c10d": [
                "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first}:{PORT}", "--rdzv-id", "tests",
                "--rdzv-conf", f"is_host={int(number == 0)}", "--local-addr", host.address,
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


def test_two_hosts_learn_what_one_does(tmp_path: Path, hosts: tuple[Host, Host]) -> None:
    ranks = start(2, command(tmp_path / "one", *SHORT), tmp_path, home=str(home()))
    for rank in ranks:
        rank.join(120)
    # What is measured already is not measured again, which takes seconds.
    (tmp_path / "two").mkdir()
    shutil.copyfile(tmp_path / "one" / "profile.json", tmp_path / "two" / "profile.json")
    begin(hosts, tmp_path, command(tmp_path / "two", *SHORT), meet="c10d")
    assert [host.ended(120) for host in hosts] == [0, 0], (tmp_path / "host-0.log").read_text()
    found = logged(tmp_path / "two", "step", "metric")
    assert [event["kind"] for event in found] == ["step"] * 4 + ["metric"]
    assert found == logged(tmp_path / "one", "step", "metric")
    two, one = (json.loads((tmp_path / name / "result.json").read_text())["quality"] for name in ("two", "one"))
    assert two == one
    assert "dlrm-v4: starting" not in (tmp_path / "host-1.log").read_text()


@pytest.mark.long
@pytest.mark.parametrize("gone", [0, 1])
@pytest.mark.parametrize("meet", ["fixed", "c10d"])
def test_a_host_that_crashes(tmp_path: Path, hosts: tuple[Host, Host], gone: int, meet: str) -> None:
    """The other is told, and does not wait out the time it would allow."""
    begin(hosts, tmp_path, command(tmp_path / "run", *LONG, "--distributed.timeout-s", "300"), meet=meet)
    training(hosts, tmp_path / "run")
    hosts[gone].crash()
    assert hosts[1 - gone].ended(SLACK_S) == 1, "torchrun's own code"
    assert errors(tmp_path, 1 - gone) == [f"error: rank {gone} of 2 is gone or does not answer; the others stop"]
    assert hosts[1 - gone].processes() == []


@pytest.mark.long
def test_a_cable_that_is_pulled(tmp_path: Path, hosts: tuple[Host, Host]) -> None:
    """Nobody is told, so that both wait as long as they were allowed to, and each names the other."""
    begin(hosts, tmp_path, command(tmp_path / "run", *LONG))
    training(hosts, tmp_path / "run")
    hosts[1].unplug()
    assert [host.ended(TIMEOUT_S + SLACK_S) for host in hosts] == [1, 1]
    for number in (0, 1):
        assert errors(tmp_path, number) == [
            f"error: rank {1 - number} of 2 is gone or does not answer; the others stop"
        ]


@pytest.mark.long
def test_a_signal_to_one_host_makes_both_save_and_the_run_goes_on(tmp_path: Path, hosts: tuple[Host, Host]) -> None:
    """As a batch system does before the time it gave is over."""
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
