"""Steps with a known defect beside the same steps without it: what an advice predicts, and what following it gains."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from planted_cases import Built, Machine, Slow, products  # type: ignore[import-not-found]
from torch import nn
from torch.nn import functional as F

Build = Callable[[Machine, bool], Built]


@dataclass(frozen=True)
class Followed:
    name: str
    advice: str
    """The rule that must suggest it."""
    build: Build
    """The step and its batches; with True as after the change."""
    on_gpu: bool = True
    on_cpu: bool = True
    threads: int | None = None


FOLLOWED: list[Followed] = []


def followed(
    name: str, advice: str, *, on_gpu: bool = True, on_cpu: bool = True, threads: int | None = None
) -> Callable[[Build], Build]:
    def add(build: Build) -> Build:
        FOLLOWED.append(Followed(name, advice, build, on_gpu, on_cpu, threads))
        return build

    return add


def embedding_step(machine: Machine, optimizer: Callable[[Iterable[nn.Parameter]], Any], *, sparse: bool) -> Built:
    width, ids = 32, 2048
    rows = max(100_000, 8 * machine.cache_bytes // (4 * width))
    embedding = nn.Embedding(rows, width, sparse=sparse, device=machine.device)
    head = nn.Linear(width, 1, device=machine.device)
    of_table, of_head = optimizer(embedding.parameters()), torch.optim.SGD(head.parameters(), lr=0.01)
    batches = [torch.randint(0, rows, (ids,), device=machine.device) for _ in range(64)]

    def step(batch: torch.Tensor) -> None:
        of_table.zero_grad()
        of_head.zero_grad()
        head(embedding(batch)).square().mean().backward()
        of_table.step()
        of_head.step()

    return step, batches


@followed("dense Adam over a table", "sparse")
def dense_adam(machine: Machine, changed: bool) -> Built:
    kind = torch.optim.SparseAdam if changed else torch.optim.Adam
    return embedding_step(machine, lambda parameters: kind(list(parameters), lr=1e-3), sparse=changed)


@followed("dense gradient of an embedding", "sparse")
def dense_gradient(machine: Machine, changed: bool) -> Built:
    return embedding_step(machine, lambda parameters: torch.optim.SGD(parameters, lr=0.01), sparse=changed)


@followed("AdamW operator by operator", "optimizer")
def slow_optimizer(machine: Machine, changed: bool) -> Built:
    weights = [nn.Parameter(machine.rand(1000, 2000)) for _ in range(10)]
    for weight in weights:
        weight.grad = machine.rand(1000, 2000)
    optimizer = torch.optim.AdamW(weights, lr=1e-3, fused=changed or None, foreach=None if changed else False)
    return (lambda: optimizer.step()), None


@followed("products in float64", "precision", on_gpu=False)
def double_products(machine: Machine, changed: bool) -> Built:
    return products(machine, dtype=torch.float32 if changed else torch.float64), None


@followed("products in float32 where TF32 is faster", "precision", on_cpu=False)
def tf32_products(machine: Machine, changed: bool) -> Built:
    a, b = machine.rand(8192, 8192), machine.rand(8192, 8192)
    torch.backends.cuda.matmul.allow_tf32 = changed
    machine.keep.append(lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", False))
    return (lambda: a @ b), None


@followed("a loader without workers", "workers", on_gpu=False)
def no_workers(machine: Machine, changed: bool) -> Built:
    """Preparing a batch takes as long as the step; it sleeps, so that a second process needs no core."""
    weight = machine.rand(1024, 1024)
    x = machine.rand(256, 1024)
    count = machine.times(lambda: x @ weight, 0.02)
    loader = torch.utils.data.DataLoader(Slow(0.02, (256, 1024)), batch_size=None, num_workers=2 if changed else 0)
    return (lambda batch: [batch.to(machine.device) @ weight for _ in range(count)]), loader


@followed("attention operator by operator", "attention")
def own_attention(machine: Machine, changed: bool) -> Built:
    size = (2, 8, 512, 64) if machine.device == "cpu" else (16, 16, 2048, 64)
    q = machine.rand(*size, dtype=torch.float32 if machine.device == "cpu" else torch.bfloat16)

    def step() -> None:
        if changed:
            F.scaled_dot_product_attention(q, q, q)
        else:
            ((q @ q.transpose(-1, -2)) * size[-1] ** -0.5).softmax(-1) @ q

    return step, None


@followed("one thread of several", "threads", on_gpu=False, threads=1)
def one_thread(machine: Machine, changed: bool) -> Built:
    from recperf.machine import usable_cores

    torch.set_num_threads(usable_cores() if changed else 1)
    return products(machine), None


@followed("new memory in every step", "page faults", on_gpu=False)
def new_memory(machine: Machine, changed: bool) -> Built:
    x = machine.rand(50_000_000)
    out = torch.empty_like(x)
    return (lambda: torch.add(x, 1.0, out=out) if changed else x + 1.0), None


@followed("a metric in every step", "reports")
def metric(machine: Machine, changed: bool) -> Built:
    """Every hundredth step computes it after the change."""
    from sklearn.metrics import roc_auc_score

    model = nn.Linear(64, 1, device=machine.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, labels = machine.rand(4096, 64), (torch.rand(4096) > 0.5).numpy()
    turn = iter(range(1 << 60))

    def step() -> None:
        optimizer.zero_grad()
        scores = model(x)
        scores.square().mean().backward()
        optimizer.step()
        if not changed or next(turn) % 100 == 0:
            roc_auc_score(labels, scores.detach().reshape(-1).cpu().numpy())

    return step, None


@followed("unpinned copies", "pinned", on_cpu=False)
def unpinned(machine: Machine, changed: bool) -> Built:
    x = torch.rand(12_500_000)
    x = x.pin_memory() if changed else x
    return (lambda: x.to("cuda", non_blocking=changed)), None


@followed("many small operators", "compile")
def small_operators(machine: Machine, changed: bool) -> Built:
    x = machine.rand(64, 64)

    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(60):
            x = (x * 1.01 + 0.5).relu() - 0.25
        return x

    run = torch.compile(chain) if changed else chain
    run(x)
    return (lambda: run(x)), None


def step_seconds(built: Built, seconds: float = 0.5) -> float:
    """The median time of a step with its wait for input, over blocks of steps."""
    step, batches = built
    feed = iter(batches) if batches is not None else None

    def once() -> None:
        nonlocal feed
        if feed is None:
            step()
            return
        batch = next(feed, None)
        if batch is None:
            feed = iter(batches or ())
            batch = next(feed)
        step(batch)

    for _ in range(4):
        once()
    _sync()
    times: list[float] = []
    began, block = time.perf_counter(), 1
    while len(times) < 5 or time.perf_counter() - began < seconds:
        start = time.perf_counter()
        for _ in range(block):
            once()
        _sync()
        times.append((time.perf_counter() - start) / block)
        # As in a training loop, the host of a device runs ahead, and what every hundredth step does counts.
        block = max(1, min(100, round(0.1 / times[-1])))
    return sorted(times)[len(times) // 2]


def _sync() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
