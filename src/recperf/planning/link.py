"""The link between two ranks of this host, measured: latency and bandwidth of messages, and how late ranks come.

Two processes send each other messages as ranks of a run do: by NCCL where the host has two GPUs, else by gloo.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, median
from time import perf_counter
from typing import Any

from ..config import within
from ..distributed.launch import LOCAL
from ..distributed.ranks import Ranks
from ..folders import temporary_folder
from ..models.config import DLRMConfig

SMALL, LARGE = 16, 8 << 20
"""Bytes of the messages that latency and bandwidth are measured with."""
WARM_UP, READINGS = 20, 100
TIMEOUT_S = 120.0
SMALL_DLRM = DLRMConfig(features=("user", "item"), rows=(1000, 2000), dim=8, bottom=(2, 16, 8), top=(64, 32, 1))
SAMPLES = 64
"""Model and samples of a step whose kernels take less time than their calls."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """What was measured between two ranks."""

    backend: str
    latency_s: float
    """Seconds of an all-to-all of a few bytes, the ranks' own calls included."""
    bytes_per_s: float
    """Bandwidth of a large all-to-all, one direction."""
    late: float
    """Share of their own time for which ranks with equal work wait for the last of them."""

    def __post_init__(self) -> None:
        within(0.0, self.latency_s, 60.0, "link.latency_s")
        within(1e3, self.bytes_per_s, 1e16, "link.bytes_per_s")
        within(0.0, self.late, 10.0, "link.late")


def measure(device: str) -> Link:
    """Starts two ranks of this host and measures their messages on this kind of device."""
    from torch import multiprocessing

    kept = {name: os.environ.get(name) for name in (*LOCAL, "OMP_NUM_THREADS")}
    # As `recperf run --ranks` starts them, with a core each.
    os.environ.update(LOCAL, OMP_NUM_THREADS="1")
    try:
        with temporary_folder("recperf-link-") as folder:
            context = multiprocessing.get_context("spawn")
            results = context.SimpleQueue()
            arguments = (device, f"file://{folder / 'store'}", results)
            multiprocessing.spawn(_rank, arguments, nprocs=2)  # type: ignore[attr-defined, no-untyped-call]
            link: Link = results.get()
            return link
    finally:
        for name, value in kept.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def eager_step(device: str) -> Callable[[], None]:
    """A step of a small DLRM whose operators are called one by one."""
    import torch

    from ..data.batch import ClickBatch, JaggedFeatures
    from ..models.dlrm import DLRM
    from ..train.optim import AdamW

    model = DLRM(SMALL_DLRM, seed=0).to(device)
    optimizer = AdamW([(list(model.parameters()), 0.0)])
    ids_FB = torch.arange(2 * SAMPLES, device=device).view(2, SAMPLES)
    dense_BD, labels_B = torch.ones(SAMPLES, 2, device=device), torch.ones(SAMPLES, device=device)
    batch = ClickBatch(dense_BD, JaggedFeatures.from_ids(SMALL_DLRM.features, ids_FB), labels_B)

    def step() -> None:
        model.loss(batch).backward()
        optimizer.step(1e-3)

    return step


def _rank(number: int, device: str, meeting: str, results: Any) -> None:
    import torch

    torch.set_num_threads(1)
    world = Ranks(rank=number, size=2, local_rank=number, local_size=2)
    world.join(device, TIMEOUT_S, init_method=meeting)
    link = between(world)
    if world.is_leader:
        results.put(link)
    world.leave()


def between(world: Ranks) -> Link:
    """The link between these two ranks, measured by both; each must call this."""
    import torch
    from torch import distributed

    small, large = (torch.zeros(size // 4, device=world.device) for size in (SMALL, LARGE))
    received = torch.empty_like(large)
    step = eager_step(world.device)

    def wait() -> None:
        if world.device == "cuda":
            torch.cuda.synchronize()

    def seconds(call: Callable[[], object]) -> list[float]:
        readings = []
        for _ in range(WARM_UP + READINGS):
            # Ranks leave a collective together, so the next one has nobody to wait for.
            distributed.all_reduce(small)
            wait()
            began = perf_counter()
            call()
            wait()
            readings.append(perf_counter() - began)
        return readings[WARM_UP:]

    latency = median(seconds(lambda: distributed.all_to_all_single(received[: SMALL // 4], small)))
    whole = median(seconds(lambda: distributed.all_to_all_single(received, large)))
    own = world.all_gather(seconds(step))
    waits = [max(pair) - fmean(pair) for pair in zip(*own, strict=True)]
    return Link(
        backend="nccl" if world.device == "cuda" else "gloo",
        latency_s=latency,
        bytes_per_s=LARGE / 2 / max(whole - latency, 1e-9),
        late=fmean(waits) / fmean(map(fmean, own)),
    )
