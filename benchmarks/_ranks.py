"""A benchmark's own script as several ranks of this host: by gloo between CPUs, or by NCCL on one GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from time import perf_counter, sleep
from typing import Any

from torch import distributed

from recperf.distributed.ranks import Ranks, enter

ONE_GPU = {"LOCAL_WORLD_SIZE": "1", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
"""NCCL takes several ranks on one GPU only where each says that it is on another host; they talk over loopback."""


def start(ranks: int, device: str = "cpu") -> int:
    """This script, with --meeting, as so many ranks; the first code that is not 0."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *sys.argv, "--meeting", f"{folder}/meeting"]
        fixed = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
        running = []
        for number in range(ranks):
            who = {"RANK": str(number), "LOCAL_RANK": str(number)}
            if device == "cuda":
                who = {**who, **ONE_GPU, "LOCAL_RANK": "0", "NCCL_HOSTID": f"host{number}"}
            running.append(subprocess.Popen(command, env={**os.environ, **fixed, **who}))
        return next(filter(None, [process.wait() for process in running]), 0)


def join(meeting: str, device: str = "cpu") -> Ranks:
    """What a rank of it begins with; it computes with one thread."""
    import torch

    torch.set_num_threads(1)
    world = enter(Ranks.from_environment())
    world.join(device, 300, init_method=f"file://{meeting}")
    return world


class Late(distributed.Work):
    """A collective whose end is seen no earlier than at some moment; TorchRec asks whether it is a `Work`."""

    def __init__(self, work: Any, ready: float) -> None:
        super().__init__()
        self.work, self.ready = work, ready

    def wait(self, *arguments: Any, **options: Any) -> bool:
        done = self.work.wait(*arguments, **options)
        sleep(max(0.0, self.ready - perf_counter()))
        return bool(done)
