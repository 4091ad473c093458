"""Steps whose limit is known because it was put there: one for every limit, and mixtures.

A case is a function that returns a step and its batches (or None). Sizes follow from the machine: `seconds` picks the
number of repetitions so that a piece of work takes that long here, and tables are multiples of the measured knee.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from recperf.machine import usable_cores
from recperf.measure import peaks
from recperf.measure.ceilings import ceilings_of

ANY, NO_ADVICE = None, ""
Step = Callable[..., object]


@dataclass(frozen=True)
class Planted:
    name: str
    build: Callable[[Machine], tuple[Step, Iterable[Any] | None]]
    expected: tuple[str, ...]
    """Limits that are right; several where the cause is a mixture of them."""
    on_gpu: tuple[str, ...]
    """The same where the step runs on a GPU; empty where it makes no sense there."""
    on_cpu: bool = True
    threads: int | None = None
    batches: int | None = None
    """Batches of the iterator; None: it does not end."""
    function: str | None = None
    """Where the cause lies: the function that must be the first place of the limit; None: not stated."""
    advice: str | None = ANY
    """The rule whose advice must come first; NO_ADVICE where every advice is wrong, ANY where the right one depends on
    the machine or is not the only one."""
    advice_on_gpu: str | None = ANY
    never: tuple[str, ...] = ()
    """Rules whose advice is wrong."""

    def built(self, machine: Machine) -> tuple[Step, Iterable[Any] | None]:
        step, batches = self.build(machine)
        return step, batches if self.batches is None or batches is None else islice(batches, self.batches)


@dataclass(frozen=True)
class Machine:
    cache_bytes: int
    device: str = "cpu"
    folder: str = "."
    """On a disk: a file in memory cannot be read without the page cache."""
    keep: list[Any] = field(default_factory=list)

    @classmethod
    def here(cls, threads: int | None, device: str, folder: str) -> Machine:
        """This machine by its measured ceilings. Torch gets this number of threads, by default one for each core."""
        threads = threads or usable_cores()
        torch.set_num_threads(threads)
        name = "cpu" if device == "cpu" else torch.cuda.get_device_name()
        ceilings = ceilings_of(peaks.require(threads, lambda text: None), device=name, threads=threads)
        assert ceilings is not None
        return cls(ceilings.cache_bytes, device=device, folder=folder)

    def seconds(self, work: Callable[[], object]) -> float:
        """The time of some work here: the shortest of a few."""
        best = float("inf")
        for _ in range(3):
            began = time.perf_counter()
            work()
            self.sync()
            best = min(best, time.perf_counter() - began)
        return best

    def times(self, work: Callable[[], object], seconds: float) -> int:
        """How often the work must be repeated to take so long."""
        return max(1, round(seconds / self.seconds(work)))

    @property
    def width(self) -> int:
        """Columns of a product that keeps the device busy."""
        return 1024 if self.device == "cpu" else 8192

    def sync(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def rand(self, *size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.rand(*size, device=self.device).to(dtype)

    def close(self) -> None:
        """Stop the threads and undo the settings of a case."""
        for item in self.keep:
            item() if callable(item) else item.close()
        self.keep.clear()


CASES: list[Planted] = []
Built = tuple[Step, Iterable[Any] | None]


def planted(
    name: str,
    *expected: str,
    on_cpu: bool = True,
    on_gpu: tuple[str, ...] | None = None,
    threads: int | None = None,
    batches: int | None = None,
    **answers: Any,
) -> Any:
    """Adds a case; `answers` are its function and advice."""

    def add(build: Callable[[Machine], Built]) -> Callable[[Machine], Built]:
        same = () if threads else expected
        there = same if on_gpu is None else on_gpu
        CASES.append(Planted(name, build, expected, there, on_cpu, threads, batches, **answers))
        return build

    return add


def on(make: Callable[[Machine], tuple[Any, ...]], work: Callable[..., object], count: int = 1) -> Any:
    """A step that does some work so many times on what a machine makes once."""

    def build(machine: Machine) -> Built:
        made = make(machine)
        return repeated(count, lambda: work(*made)), None

    return build


def products(machine: Machine, side: int = 1024, dtype: torch.dtype = torch.float32) -> Callable[[], object]:
    a, b = machine.rand(side, side, dtype=dtype), machine.rand(side, side, dtype=dtype)
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def trivial(machine: Machine, count: int = 3000) -> Callable[[], object]:
    one = machine.rand(16)

    def calls() -> None:
        for _ in range(count):
            one + one

    return calls


def repeated(count: int, work: Callable[[], object]) -> Step:
    def step() -> None:
        for _ in range(count):
            work()

    return step


def endless(make: Callable[[], Any]) -> Iterable[Any]:
    while True:
        yield make()


class Slow(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, seconds: float, size: tuple[int, ...] = (64,)) -> None:
        self.seconds, self.sample = seconds, torch.ones(*size)

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return self.sample


def loader_case(machine: Machine, seconds: float, part: float, rows: int = 256) -> Built:
    """Products of the batch take `part` of the step, the loader the rest."""
    weight = machine.rand(1024, 1024)

    def work(batch: torch.Tensor) -> object:
        return batch.to(machine.device) @ weight

    batch = torch.rand(rows, 1024)
    count = machine.times(lambda: work(batch), seconds * part)
    loader = torch.utils.data.DataLoader(Slow(seconds * (1 - part), (rows, 1024)), batch_size=None)
    return (lambda batch: [work(batch) for _ in range(count)]), loader


planted("loader sleeps, 60 %", "input", on_gpu=(), function="__getitem__", advice="workers")(
    lambda machine: loader_case(machine, 0.02, 0.4)
)
planted("loader sleeps, 30 %, products 70 %", "compute", on_gpu=(), function="work")(
    lambda machine: loader_case(machine, 0.04, 0.7)
)


def python_loop(seconds: float) -> None:
    until, total = time.perf_counter() + seconds, 0
    while time.perf_counter() < until:
        for value in range(50):
            total += value * value % 7


@planted("slow Python collate", "input", function="python_loop", advice="workers", advice_on_gpu="workers")
def collate(machine: Machine) -> Built:
    def slow(samples: list[torch.Tensor]) -> torch.Tensor:
        python_loop(0.01)
        return torch.stack(samples)

    model = nn.Linear(64, 64).to(machine.device)
    loader = torch.utils.data.DataLoader(Slow(0.0), batch_size=8, collate_fn=slow)
    return (lambda batch: model(batch.to(machine.device)).sum().backward()), loader


@planted("sleep in the update", "blocked", function="step", advice=NO_ADVICE, advice_on_gpu=NO_ADVICE)
def sleep_in_update(machine: Machine) -> Built:
    model = nn.Linear(64, 64).to(machine.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = machine.rand(32, 64)

    def step() -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        time.sleep(0.01)
        optimizer.step()

    return step, None


@planted("a lock that another thread holds", "blocked", function="step", advice=NO_ADVICE, advice_on_gpu=NO_ADVICE)
def lock(machine: Machine) -> Built:
    shared, stop = threading.Lock(), threading.Event()

    def hold() -> None:
        while not stop.is_set():
            with shared:
                time.sleep(0.008)
            time.sleep(0.0005)

    threading.Thread(target=hold, daemon=True).start()
    x = machine.rand(64, 64)

    def step() -> None:
        with shared:
            for _ in range(20):
                x + x
        time.sleep(0.001)

    machine.keep.append(stop.set)
    return step, None


@planted("a file read without the page cache", "blocked", function="step", advice=NO_ADVICE, advice_on_gpu=NO_ADVICE)
def uncached_file(machine: Machine) -> Built:
    size, block = 32 << 20, 4 << 20
    file = tempfile.NamedTemporaryFile(dir=machine.folder, suffix=".planted")
    file.write(os.urandom(1 << 20) * (size >> 20))
    file.flush()
    os.fsync(file.fileno())
    machine.keep.append(file)
    direct = os.open(file.name, os.O_RDONLY | os.O_DIRECT)
    # Direct reads need an aligned buffer, which mmap gives.
    buffer, x, turn = mmap.mmap(-1, block), machine.rand(64, 64), iter(range(1 << 60))

    def step() -> None:
        for _ in range(4):
            os.preadv(direct, [buffer], next(turn) * block % size)
        x + x

    return step, None


@planted("a pure-Python loop", "python", function="python_loop", advice=NO_ADVICE, advice_on_gpu=NO_ADVICE)
def pure_python(machine: Machine) -> Built:
    x = machine.rand(64, 64)

    def step() -> None:
        python_loop(0.01)
        x @ x

    return step, None


CALLS = {"function": "calls", "advice": "compile", "advice_on_gpu": "compile"}
planted("3,000 operators on 16 floats", "dispatch", on_gpu=("launch",), **CALLS)(
    lambda machine: (trivial(machine), None)
)


def mixture(part: float) -> Callable[[Machine], Built]:
    def build(machine: Machine) -> Built:
        calls = trivial(machine)
        seconds = machine.seconds(calls)
        work = products(machine, 256 if machine.device == "cpu" else 2048)
        count = machine.times(work, seconds * part / (1 - part))

        def step() -> None:
            calls()
            for _ in range(count):
                work()

        return step, None

    return build


planted("3,000 operators 80 %, products 20 %", "dispatch", on_gpu=("launch",), **CALLS)(mixture(0.2))
planted("3,000 operators 50 %, products 50 %", "dispatch", "compute", on_gpu=("launch", "compute"))(mixture(0.5))
planted("3,000 operators 20 %, products 80 %", "compute", function="<lambda>")(mixture(0.8))


def product_case(dtype: torch.dtype) -> Callable[[Machine], Built]:
    def build(machine: Machine) -> Built:
        side = 1024 if machine.device == "cpu" else 8192
        while side > 64 and machine.seconds(products(machine, side, dtype)) > 0.3:
            side //= 2
        return products(machine, side, dtype), None

    return build


planted("products of 1,024 x 1,024, one thread", "compute", threads=1, function="<lambda>", advice="threads")(
    product_case(torch.float32)
)
planted("products of 1,024 x 1,024", "compute", function="<lambda>", advice_on_gpu="precision")(
    product_case(torch.float32)
)
planted("the same in float64", "compute", function="<lambda>", advice="precision")(product_case(torch.float64))
planted("the same in bfloat16", "compute", function="<lambda>", advice_on_gpu=NO_ADVICE)(product_case(torch.bfloat16))


LARGE = 100_000_000
planted("an addition over 400 MB", "bandwidth", function="<lambda>", advice="page faults", advice_on_gpu=NO_ADVICE)(
    on(lambda m: (m.rand(LARGE),), lambda x: x + 1.0)
)
planted("the same in place", "bandwidth", function="<lambda>", advice=NO_ADVICE, advice_on_gpu=NO_ADVICE)(
    on(lambda m: (m.rand(LARGE),), lambda x: x.add_(1.0))
)
planted("additions over 0.3 MB", "cache", "dispatch", on_gpu=("launch", "dispatch"))(
    on(lambda m: (m.rand(75_000), m.rand(75_000)), lambda x, y: y.add_(x), 200)
)


@planted("AdamW over 20 M parameters", "bandwidth", function="<lambda>", advice="optimizer", advice_on_gpu="optimizer")
def adamw(machine: Machine) -> Built:
    weight = nn.Parameter(machine.rand(20_000_000))
    weight.grad = machine.rand(20_000_000)
    optimizer = torch.optim.AdamW([weight], lr=1e-3)
    return (lambda: optimizer.step()), None


def random_rows(row_bytes: int, knees: float) -> Callable[[Machine], Built]:
    def build(machine: Machine) -> Built:
        width = row_bytes // 4
        rows = max(64, int(knees * machine.cache_bytes) // row_bytes)
        table = torch.ones(rows, width, device=machine.device)
        ids = max(1024, ((4 << 20) if machine.device == "cpu" else (256 << 20)) // row_bytes)
        out = torch.empty(ids, width, device=machine.device)
        draws = endless(lambda: torch.randint(0, rows, (ids,), device=machine.device))
        count = 64 if machine.device == "cpu" else 8
        prepared = [next(iter(draws)) for _ in range(count)]
        turn = iter(range(1 << 60))
        offsets = torch.arange(0, ids, 32, device=machine.device)

        def step() -> None:
            for _ in range(4):
                chosen = prepared[next(turn) % count]
                if machine.device == "cpu":
                    torch.index_select(table, 0, chosen, out=out)
                else:
                    # torch.index_select is far from the memory's rate on a GPU; sums of rows are not.
                    F.embedding_bag(chosen, table, offsets, mode="sum")

        return step, None

    return build


for _bytes, _memory in ((64, ("latency",)), (1024, ("bandwidth",))):
    for _knees in (0.25, 1, 4, 16):
        _right, _on_gpu = (
            ("cache",) if _knees < 1 else ("cache", *one) if _knees == 1 else one
            for one in (_memory, ("latency", "bandwidth"))
        )
        planted(f"random rows of {_bytes} B, table {_knees} x knee", *_right, on_gpu=_on_gpu)(
            random_rows(_bytes, _knees)
        )


planted("one large sort", "operator", function="<lambda>", advice_on_gpu=NO_ADVICE)(
    on(lambda m: (m.rand(1_000_000 if m.device == "cpu" else 50_000_000),), torch.sort)
)
planted("one cumsum", "operator", on_gpu=())(on(lambda m: (m.rand(8_000_000), 0), torch.cumsum))


@planted("a sort beside 4,000 trivial operators", "operator", on_gpu=("operator", "launch"), function="step")
def sort_beside(machine: Machine) -> Built:
    x, calls = machine.rand(4_000_000), trivial(machine, 4000)
    enough = machine.times(lambda: torch.sort(x), 5 * machine.seconds(calls))

    def step() -> None:
        calls()
        for _ in range(enough):
            torch.sort(x)

    return step, None


@planted("a convolution", "compute", function="<lambda>", never=("optimizer", "sparse", "compile"))
def convolution(machine: Machine) -> Built:
    model = nn.Conv2d(64, 64, 3, padding=1).to(machine.device)
    x = machine.rand(8 if machine.device == "cpu" else 256, 64, 56, 56)
    return (lambda: model(x).sum().backward()), None


@planted("an LSTM of many small steps", "dispatch", on_gpu=("launch",), **(CALLS | {"function": "step"}))
def small_lstm(machine: Machine) -> Built:
    cell = nn.LSTMCell(16, 16).to(machine.device)
    x = machine.rand(200, 4, 16)

    def step() -> None:
        h = c = torch.zeros(4, 16, device=machine.device)
        for inputs in x:
            h, c = cell(inputs, (h, c))
        h.sum().backward()

    return step, None


@planted("attention", "compute", function="<lambda>", never=("attention", "compile"))
def attention(machine: Machine) -> Built:
    size = (4, 8, 1024, 64) if machine.device == "cpu" else (16, 16, 4096, 64)
    q = machine.rand(*size, dtype=torch.float32 if machine.device == "cpu" else torch.bfloat16).requires_grad_()
    return (lambda: F.scaled_dot_product_attention(q, q, q, is_causal=False).sum().backward()), None


def two_layers(machine: Machine) -> nn.Module:
    width = machine.width
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)).to(machine.device)


@planted("a compiled chain over 400 MB", "bandwidth", never=("compile", "passes"))
def compiled_chain(machine: Machine) -> Built:
    x, out = machine.rand(100_000_000), machine.rand(100_000_000)

    @torch.compile
    def chain(x: torch.Tensor) -> None:
        out.copy_((x * 2 + 1).relu() - 0.5)

    chain(x)
    return (lambda: chain(x)), None


@planted("a compiled model of large products", "compute", never=("compile", "passes"))
def compiled_model(machine: Machine) -> Built:
    model = two_layers(machine)
    fast = torch.compile(model)
    x = machine.rand(machine.width, machine.width)
    fast(x).sum().backward()
    return (lambda: fast(x).sum().backward()), None


@planted("a model in eval mode", "compute", function="step", never=("optimizer", "compile"))
def eval_mode(machine: Machine) -> Built:
    model = two_layers(machine).eval()
    x = machine.rand(machine.width, machine.width)

    def step() -> None:
        with torch.inference_mode():
            model(x)

    return step, None


@planted("gradient checkpointing", "compute", function="<lambda>", never=("optimizer", "compile"))
def checkpointing(machine: Machine) -> Built:
    from torch.utils.checkpoint import checkpoint

    model = two_layers(machine)
    x = machine.rand(machine.width, machine.width).requires_grad_()
    return (lambda: checkpoint(model, x, use_reentrant=False).sum().backward()), None


@planted("two threads that share the work", "compute", threads=1)
def two_threads(machine: Machine) -> Built:
    works = [products(machine, 512) for _ in range(2)]

    def step() -> None:
        threads = [threading.Thread(target=lambda work=work: [work() for _ in range(10)]) for work in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return step, None


planted("loader sleeps, 80 %", "input", on_cpu=False, function="__getitem__", advice_on_gpu="workers")(
    lambda machine: loader_case(machine, 0.012, 0.2, rows=4096)
)
planted(".item() after every operator", "sync", on_cpu=False, advice_on_gpu="item")(
    on(lambda m: (m.rand(1024, 1024),), lambda x: x.sum().item(), 50)
)
planted("nonzero in the model", "sync", "launch", on_cpu=False, never=("pinned", "optimizer"))(
    on(lambda m: (m.rand(200_000) - 0.5,), lambda x: x[(x > 0).nonzero().squeeze(1)].sum(), 30)
)
planted("unpinned copies of 50 MB", "transfer", "sync", on_cpu=False, advice_on_gpu="pinned")(
    on(lambda m: (torch.rand(12_500_000), m.device), lambda host, device: host.to(device).mul_(2.0))
)
planted("pinned copies of 50 MB", "transfer", on_cpu=False)(
    on(
        lambda m: (torch.rand(12_500_000).pin_memory(), m.rand(12_500_000)),
        lambda host, target: target.copy_(host, non_blocking=True),
    )
)
planted("a host that queues kernels of 2 us", "launch", on_cpu=False, function="<lambda>", advice_on_gpu="compile")(
    on(lambda m: (m.rand(1024),), lambda x: x.mul_(1.0001), 500)
)
planted("an element-wise chain over 1 GB", "bandwidth", on_cpu=False, function="<lambda>", advice_on_gpu="passes")(
    on(lambda m: (m.rand(250_000_000),), lambda x: x.mul(2.0).add_(1.0).relu_())
)
planted("atomic additions to one address", "operator", "latency", "cache", on_cpu=False, function="<lambda>")(
    on(
        lambda m: (m.rand(1), torch.zeros(20_000_000, dtype=torch.int64, device="cuda"), m.rand(20_000_000)),
        lambda target, ids, ones: target.scatter_add_(0, ids, ones),
    )
)


@planted("one large product in TF32", "compute", on_cpu=False, function="step", never=("compile", "optimizer"))
def tf32(machine: Machine) -> Built:
    a, b = machine.rand(8192, 8192), machine.rand(8192, 8192)

    def step() -> None:
        torch.backends.cuda.matmul.allow_tf32 = True
        a @ b

    machine.keep.append(lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", False))
    return step, None


@planted("two streams that overlap", "compute", on_cpu=False, function="step", never=("compile", "optimizer"))
def streams(machine: Machine) -> Built:
    side = torch.cuda.Stream()
    a, b = machine.rand(4096, 4096, dtype=torch.bfloat16), machine.rand(4096, 4096, dtype=torch.bfloat16)

    def step() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(10):
                a @ b
        for _ in range(10):
            b @ a
        torch.cuda.current_stream().wait_stream(side)

    return step, None


def captured(step: Callable[[], object]) -> Callable[[], object]:
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


planted("a CUDA graph of small kernels", "dispatch", on_cpu=False, never=("compile",))(
    lambda machine: (captured(on(lambda m: (m.rand(1024),), lambda x: x.mul_(1.0001), 500)(machine)[0]), None)
)


@planted("a CUDA graph of large products", "compute", on_cpu=False, never=("compile",))
def graph_large(machine: Machine) -> Built:
    a, b = machine.rand(8192, 8192, dtype=torch.bfloat16), machine.rand(8192, 8192, dtype=torch.bfloat16)
    out = torch.empty_like(a)
    return captured(repeated(4, lambda: torch.mm(a, b, out=out))), None
