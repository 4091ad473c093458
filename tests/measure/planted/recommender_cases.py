"""Planted causes of recommender programs: sparse gradients, table-batched embeddings, ids modulo rows, metrics in the
step, tables in files, late ranks.

Random rows limit those with tables: ids of a few hot rows make these steps two to five times as fast.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from datetime import timedelta
from importlib.util import find_spec
from itertools import cycle

import numpy
import torch
from planted_cases import CASES as CASES
from planted_cases import NO_ADVICE, Built, Machine, planted
from torch import nn

WIDTH = 64
BAG = 20
MEMORY = ("latency", "bandwidth")


def rows_beyond(machine: Machine, knees: int = 16) -> int:
    return knees * machine.cache_bytes // (4 * WIDTH)


def bags(machine: Machine, rows: int) -> tuple[Iterable[torch.Tensor], torch.Tensor]:
    """Batches of random ids, and the offsets that all of them have."""
    count = 40_000 if machine.device == "cpu" else 400_000
    draws = [torch.randint(0, rows, (count,), device=machine.device) for _ in range(16)]
    return cycle(draws), torch.arange(0, count + 1, BAG, device=machine.device)


def trained_table(
    optimizer: type[torch.optim.Optimizer], *, sparse: bool = True, knees: int = 16
) -> Callable[[Machine], Built]:
    def build(machine: Machine) -> Built:
        rows = rows_beyond(machine, knees)
        table = nn.EmbeddingBag(rows, WIDTH, mode="sum", sparse=sparse, include_last_offset=True, device=machine.device)
        update = optimizer(table.parameters(), lr=0.01)  # type: ignore[call-arg]
        batches, offsets = bags(machine, rows)

        def step(ids: torch.Tensor) -> None:
            update.zero_grad()
            table(ids, offsets).sum().backward()
            update.step()

        return step, batches

    return build


planted("sparse gradients, SGD", *MEMORY, on_gpu=(*MEMORY, "launch"), never=("sparse", "optimizer"))(
    trained_table(torch.optim.SGD)
)
planted("sparse gradients, SGD, 30 batches", *MEMORY, on_gpu=(*MEMORY, "launch"), batches=30, never=("sparse",))(
    trained_table(torch.optim.SGD)
)
# These sort the ids of the gradient first, for up to a third of the step.
planted("sparse gradients, Adagrad", *MEMORY, "operator", on_gpu=(), never=("sparse", "optimizer"))(
    trained_table(torch.optim.Adagrad)
)
planted("sparse gradients, SparseAdam", *MEMORY, "operator", on_gpu=(), never=("sparse", "optimizer"))(
    trained_table(torch.optim.SparseAdam)
)


planted("dense Adam over a large table", "bandwidth", function="step", advice="sparse", advice_on_gpu="sparse")(
    trained_table(torch.optim.Adam, sparse=False, knees=8)
)


def table_batched(optimizer: str) -> Callable[[Machine], Built]:
    def build(machine: Machine) -> Built:
        from fbgemm_gpu import split_table_batched_embeddings_ops_training as training
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation

        rows = rows_beyond(machine)
        tables = training.SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, WIDTH, EmbeddingLocation.HOST, training.ComputeDevice.CPU)],
            optimizer=getattr(training.OptimType, optimizer),
        )
        batches, offsets = bags(machine, rows)
        gradient = torch.ones(offsets.numel() - 1, WIDTH)
        return (lambda ids: tables(ids, offsets).backward(gradient)), batches

    return build


if find_spec("fbgemm_gpu"):
    # Adam runs on a GPU only.
    for _optimizer in ("EXACT_SGD", "EXACT_ADAGRAD", "EXACT_ROWWISE_ADAGRAD"):
        planted(
            f"FBGEMM's tables, {_optimizer}", *MEMORY, on_gpu=(), function="<lambda>", never=("sparse", "optimizer")
        )(table_batched(_optimizer))


@planted("ids modulo the rows of several tables", "compute", "operator", on_gpu=("bandwidth",), function="step")
def modulo(machine: Machine) -> Built:
    # On a GPU of 2025 it takes as long as an addition of the same bytes, once these are more than launching it costs.
    count = max(100_000, machine.cache_bytes // 64) if machine.device == "cpu" else 50_000_000
    ids = torch.randint(0, 1 << 40, (count,), device=machine.device)
    out = torch.empty_like(ids)

    def step() -> None:
        for rows in (99_991, 49_999, 9_973, 997):
            torch.remainder(ids, rows, out=out)
            torch.floor_divide(ids, rows, out=out)

    return step, None


@planted("numpy's product in the step", "python", on_gpu=(), function="<lambda>", advice=NO_ADVICE)
def numpy_product(machine: Machine) -> Built:
    left, x = numpy.ones((512, 512), numpy.float32), machine.rand(64)
    return (lambda: (left @ left, x + x)), None


if find_spec("pandas"):

    @planted("pandas in the step", "python", on_gpu=(), function="<lambda>", advice=NO_ADVICE)
    def pandas_groups(machine: Machine) -> Built:
        import pandas

        clicks = pandas.DataFrame({"user": numpy.arange(100_000) % 997, "clicked": numpy.arange(100_000) % 2})
        x = machine.rand(64)
        return (lambda: (clicks.groupby("user").mean(), x + x)), None


if find_spec("sklearn"):

    @planted("scikit-learn's AUC in the step", "python", on_gpu=(), function="step", advice="reports")
    def area_under_curve(machine: Machine) -> Built:
        from sklearn.metrics import roc_auc_score

        model, x, labels = nn.Linear(64, 1), machine.rand(20_000, 64), numpy.arange(20_000) % 2

        def step() -> None:
            logits = model(x)
            logits.sum().backward()
            roc_auc_score(labels, logits.detach().numpy()[:, 0])

        return step, None


def mapped_table(*, cold: bool) -> Callable[[Machine], Built]:
    def build(machine: Machine) -> Built:
        size = (64 << 20) if cold else 16 * machine.cache_bytes
        width = 1024 if cold else WIDTH
        file = tempfile.NamedTemporaryFile(dir=machine.folder, suffix=".planted")
        for _ in range(0, size, 1 << 20):
            file.write(os.urandom(1 << 20))
        file.flush()
        os.fsync(file.fileno())
        machine.keep.append(file)
        pages = mmap.mmap(file.fileno(), 0)
        table = torch.frombuffer(pages, dtype=torch.float32).view(-1, width)
        count = 500 if cold else 40_000
        draws = cycle([torch.randint(0, len(table), (count,)) for _ in range(16)])
        out = torch.empty(count, width)

        def step(ids: torch.Tensor) -> None:
            if cold:
                # Pages leave the page cache only after the process has given them up.
                pages.madvise(mmap.MADV_DONTNEED)
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            torch.index_select(table, 0, ids, out=out)

        return step, draws

    return build


planted("a memory-mapped table, cold", "blocked", on_gpu=())(mapped_table(cold=True))
planted("a memory-mapped table, warm", *MEMORY, on_gpu=(), function="step")(mapped_table(cold=False))

PEER = """
import sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=1, world_size=2)
x = torch.ones(100_000)
while True:
    time.sleep(0.02)
    dist.all_reduce(x)
"""


@planted("a collective whose peer is late", "communication", on_gpu=(), function="step", advice=NO_ADVICE)
def late_peer(machine: Machine) -> Built:
    import torch.distributed as dist

    meeting = os.path.join(tempfile.mkdtemp(dir=machine.folder), "store")
    peer = subprocess.Popen([sys.executable, "-c", PEER, meeting], stderr=subprocess.DEVNULL)
    machine.keep.extend((peer.kill, peer.wait))
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=0, world_size=2, timeout=timedelta(seconds=60)
    )
    machine.keep.append(dist.destroy_process_group)
    x, weight = torch.ones(100_000), machine.rand(256, 256)

    def step() -> None:
        weight @ weight
        dist.all_reduce(x)

    return step, None
