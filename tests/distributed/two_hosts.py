"""Two hosts on one machine: network namespaces with addresses of their own and a cable between them. Needs no root."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

WIRE = "wire"
ADDRESSES = ("10.77.0.1", "10.77.0.2")
HOLD = ["sh", "-c", "echo here; exec sleep 3600"]


class NoHosts(Exception):
    """Why there are none here."""


@dataclass(eq=False)
class Host:
    address: str
    holder: subprocess.Popen[bytes]
    """Keeps the namespace; everything else in it comes and goes."""
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def inside(self) -> list[str]:
        return ["nsenter", "--target", str(self.holder.pid), "--user", "--net"]

    def ip(self, words: str) -> None:
        found = subprocess.run([*self.inside, "ip", *words.split()], capture_output=True, text=True)
        if found.returncode:
            raise NoHosts(f"ip {words}: {found.stderr.strip()}")

    def torchrun(self, words: list[str], log: Path) -> subprocess.Popen[bytes]:
        """Start an agent; what it and its ranks say is in the log."""
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": WIRE, "OMP_NUM_THREADS": "1"}
        command = [*self.inside, sys.executable, "-m", "torch.distributed.run", *words]
        with log.open("wb") as file:
            process = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
        self.started.append(process)
        return process

    def processes(self) -> list[int]:
        """All that are on this host, but for the one that keeps it."""
        ours, found = os.readlink(f"/proc/{self.holder.pid}/ns/net"), []
        for entry in os.listdir("/proc"):
            try:
                if entry.isdigit() and os.readlink(f"/proc/{entry}/ns/net") == ours:
                    found.append(int(entry))
            except OSError:
                continue
        return [process for process in found if process != self.holder.pid]

    def crash(self) -> None:
        """Everything on it ends at once; its system still says so to the others."""
        for process in self.processes():
            os.kill(process, signal.SIGKILL)

    def unplug(self) -> None:
        """Nothing reaches it any more, and nobody is told."""
        self.ip(f"link set {WIRE} down")

    def ended(self, seconds: float) -> int:
        """The exit code of the agent."""
        return self.started[-1].wait(seconds)


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    missing = [name for name in ("unshare", "nsenter", "ip") if shutil.which(name) is None]
    if missing:
        raise NoHosts(f"{', '.join(missing)} missing (util-linux, iproute2)")
    hosts: list[Host] = []
    try:
        first = Host(ADDRESSES[0], _held(["unshare", "--user", "--map-root-user", "--net", *HOLD]))
        hosts.append(first)
        # In the first one's user namespace: whoever lays the cable must own both ends.
        beside = ["nsenter", "--target", str(first.holder.pid), "--user", "unshare", "--net", *HOLD]
        second = Host(ADDRESSES[1], _held(beside))
        hosts.append(second)
        first.ip(f"link add {WIRE} type veth peer name {WIRE} netns {second.holder.pid}")
        for host in hosts:
            host.ip("link set lo up")
            host.ip(f"address add {host.address}/24 dev {WIRE}")
            host.ip(f"link set {WIRE} up")
        yield first, second
    finally:
        for host in hosts:
            host.crash()
            host.holder.kill()
            host.holder.communicate()
            for process in host.started:
                process.wait()


def _held(words: list[str]) -> subprocess.Popen[bytes]:
    holder = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert holder.stdout
    if holder.stdout.readline() != b"here\n":
        _, said = holder.communicate()
        raise NoHosts(f"{words[0]}: {said.decode(errors='replace').strip()}")
    return holder


def until(happened: object, host: Host, seconds: float = 120.0) -> None:
    """Wait for something while an agent runs."""
    assert callable(happened)
    end = time.monotonic() + seconds
    while not happened():
        assert host.started[-1].poll() is None, "the agent ended before"
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.05)
