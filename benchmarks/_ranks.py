"""A benchmark's own script as several gloo ranks of this host."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

from recperf.distributed.ranks import Ranks, enter


def start(ranks: int) -> int:
    """This script, with --meeting, as so many ranks; the first code that is not 0."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *sys.argv, "--meeting", f"{folder}/meeting"]
        fixed = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
        running = []
        for number in range(ranks):
            who = {"RANK": str(number), "LOCAL_RANK": str(number)}
            running.append(subprocess.Popen(command, env={**os.environ, **fixed, **who}))
        return next(filter(None, [process.wait() for process in running]), 0)


def join(meeting: str) -> Ranks:
    """What a rank of it begins with; it computes with one thread."""
    import torch

    torch.set_num_threads(1)
    world = enter(Ranks.from_environment())
    world.join("cpu", 300, init_method=f"file://{meeting}")
    return world
