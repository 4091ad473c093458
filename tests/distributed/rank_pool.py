"""Runs a function of rank_jobs, or module.function, as several ranks: forks of one process that has all imports."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from rank_hosts import job_of, run_command

from warm import SERVER, home

needs_torchrec = pytest.mark.skipif(
    importlib.util.find_spec("torchrec") is None or importlib.util.find_spec("fbgemm_gpu") is None,
    reason="TorchRec is not installed: make setup-distributed",
)
CONTEXT = multiprocessing.get_context("forkserver")
SECONDS = 600.0


def _start(process: Any) -> None:
    with mock.patch.object(forkserver, "connect_to_new_process", SERVER.connect_to_new_process):
        process.start()


def _main(job: str, rank: int, size: int, meeting: str, pipe: Any, packed: bytes) -> None:
    arguments = pickle.loads(packed)
    os.environ["RECPERF_HOME"] = str(arguments.pop("home"))
    import torch

    from recperf.distributed.ranks import Ranks, enter

    work = job_of(job)
    torch.set_num_threads(1)
    world = enter(Ranks(rank=rank, size=size, local_rank=rank, local_size=size))
    try:
        world.join("cpu", 300, init_method=f"file://{meeting}")
        # As bytes: tensors would be sent as shared memory, which goes away with the rank.
        pipe.send_bytes(pickle.dumps((True, work(world, **arguments))))
        world.barrier()
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
    os._exit(0)


def run_ranks(size: int, job: str, **arguments: Any) -> list[Any]:
    """The results of the job, by rank."""
    packed = pickle.dumps({"home": home(), **arguments})
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(size):
            ours, theirs = CONTEXT.Pipe()
            words = (job, rank, size, f"{folder}/meeting", theirs, packed)
            process = CONTEXT.Process(target=_main, args=words)
            _start(process)
            theirs.close()
            ranks.append((process, ours))
        end, found = time.monotonic() + SECONDS, []
        for _, ours in ranks:
            assert ours.poll(max(0.0, end - time.monotonic())), f"rank {len(found)} does not answer"
            found.append(pickle.loads(ours.recv_bytes()))
        for process, _ in ranks:
            process.join()
    # The first fault, not that of a rank that only lost the others.
    faults = [text for fine, text in found if not fine]
    assert not faults, min(faults, key=lambda text: "onnection" in text)
    return [value for _, value in found]


def start(size: int, words: list[str], folder: Path, *, trouble: str = "", **more: Any) -> list[Any]:
    """Start `recperf run` as several ranks and return their processes. Each prints to rank-<r>.log."""
    home()
    meeting = folder / "meeting"
    found = []
    for rank in range(size):
        process = CONTEXT.Process(target=_command, args=(words, rank, size, str(folder), str(meeting), trouble, more))
        _start(process)
        found.append(process)
    return found


def _command(
    words: list[str], rank: int, size: int, folder: str, meeting: str, trouble: str, more: dict[str, Any]
) -> None:
    import sys

    handle = os.open(f"{folder}/rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    here = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "OMP_NUM_THREADS": 1}
    elastic = rank_folder(Path(folder), rank)
    elastic.mkdir(parents=True, exist_ok=True)
    os.environ.update({name: str(value) for name, value in here.items()}, TORCHELASTIC_RUN_ID="recperf-ranks-test")
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(elastic / "error.json")
    os.environ["RECPERF_HOME"] = str(more.pop("home"))
    from recperf.distributed.ranks import Ranks

    Ranks.join = functools.partialmethod(Ranks.join, init_method=f"file://{meeting}")
    os._exit(run_command(words, rank, trouble, more))


def rank_folder(folder: Path, rank: int) -> Path:
    """The folder that torch elastic would give a rank."""
    return folder / "job" / "attempt_0" / str(rank)
