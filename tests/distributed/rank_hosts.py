"""Ranks as separate processes, each of which says that it is alone on its host: NCCL then takes two ranks on one GPU.

They talk over loopback, by gloo between CPUs and by NCCL between GPUs. This file is also the program of such a rank.
"""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "src"
LOOPBACK = {
    "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "MASTER_ADDR": "127.0.0.1",
    "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1",
}  # fmt: skip
TAIL = 40
"""Lines of a rank's output that a failure shows."""


class Hosts:
    """Ranks that were started together, one per host."""

    def __init__(self, folder: Path, size: int, **request: Any) -> None:
        """`request` is `words` of a recperf command, or a `job` of rank_jobs or module.function with `arguments`;
        `trouble` and `how` change a rank before its command."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        (folder / "request").write_bytes(pickle.dumps(request))
        path = os.pathsep.join(filter(None, [str(SOURCES), os.environ.get("PYTHONPATH")]))
        meeting = {"MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size), "PYTHONPATH": path}
        shared = {**os.environ, **LOOPBACK, **meeting}
        self.processes = []
        for rank in range(size):
            with (folder / f"rank-{rank}.log").open("ab") as log:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, __file__, str(folder)],
                        env={**shared, "RANK": str(rank), "NCCL_HOSTID": f"host{rank}"},
                        stdout=log,
                        stderr=log,
                    )
                )

    def ended(self, seconds: float = 600.0, ranks: tuple[int, ...] | None = None) -> list[int | None]:
        """The exit codes, or None of ranks that are not waited for; all are killed afterwards."""
        end = time.monotonic() + seconds
        waited = range(len(self.processes)) if ranks is None else ranks
        try:
            for rank in waited:
                self.processes[rank].wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"rank {rank} has not ended after {seconds:g} s\n{self.tails()}") from None
        finally:
            for process in self.processes:
                if process.poll() is None:
                    process.send_signal(signal.SIGKILL)
                    process.wait()
        return [process.returncode if rank in waited else None for rank, process in enumerate(self.processes)]

    def results(self, seconds: float = 600.0) -> list[Any]:
        """What the job returned, by rank."""
        codes = self.ended(seconds)
        assert codes == [0] * len(codes), f"exit codes {codes}\n{self.tails()}"
        return [pickle.loads((self.folder / f"result-{rank}").read_bytes()) for rank in range(len(codes))]

    def said(self, rank: int) -> str:
        return (self.folder / f"rank-{rank}.log").read_text(errors="replace")

    def tails(self) -> str:
        """The end of each rank's output, for the message of a failure."""
        lines = [self.said(rank).splitlines()[-TAIL:] for rank in range(len(self.processes))]
        return "\n".join(f"---- rank {rank}\n" + "\n".join(tail) for rank, tail in enumerate(lines))


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _on_cpu(value: Any) -> Any:
    """Results without tensors on a device, which would go away with the process."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {name: _on_cpu(part) for name, part in value.items()}
    return [_on_cpu(part) for part in value] if isinstance(value, list) else value


def _work(job: str, device: str, arguments: dict[str, Any]) -> Any:
    import torch

    from recperf.distributed.ranks import Ranks, enter

    torch.set_num_threads(1)
    world = enter(Ranks.from_environment())
    world.join(device, 60)
    result = _on_cpu(job_of(job)(world, **arguments))
    world.barrier()
    return result


def job_of(name: str) -> Any:
    """A function of rank_jobs, or module.function."""
    module, _, function = name.rpartition(".")
    return getattr(importlib.import_module(module or "rank_jobs"), function)


def run_command(words: list[str], rank: int, trouble: str = "", how: dict[str, Any] | None = None) -> int:
    """Run a command of recperf as a rank; `trouble` names what changes it before."""
    import short
    from recperf.cli import main

    short.shorten()
    if trouble:
        job_of(trouble)(rank, **(how or {}))
    return main(words)


def _main(folder: Path) -> int:
    request = pickle.loads((folder / "request").read_bytes())
    if "words" in request:
        return run_command(request["words"], int(os.environ["RANK"]), request.get("trouble", ""), request.get("how"))
    result = _work(request["job"], request["device"], request.get("arguments", {}))
    (folder / f"result-{os.environ['RANK']}").write_bytes(pickle.dumps(result))
    sys.stdout.flush()
    # Without the interpreter's end, which would wait for the process group.
    os._exit(0)


if __name__ == "__main__":
    sys.path[:0] = [str(HERE), str(HERE.parent)]
    sys.exit(_main(Path(sys.argv[1])))
