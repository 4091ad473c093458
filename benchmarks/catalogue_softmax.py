"""The exact softmax over a catalogue beside torch in chunks, the same compiled, and the fused heads of Liger and
cut-cross-entropy where they are installed: time, memory and error of the loss and both gradients.

python benchmarks/catalogue_softmax.py            the shapes of this machine's device; rows are appended
python benchmarks/catalogue_softmax.py --sweep    first tries sizes of tiles on a GPU, and prints the best

Users and items have length 1, scores are their products over a temperature of 0.05. Rates count three products: that
for the scores and those for the two gradients. Errors are norms of differences to float64 on the same rounded inputs.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from _clock import Work, captured, once, peak_memory, readings, wait
from _rows import record, row
from recperf.ops.catalogue_softmax import softmax_loss

NAME = "catalogue_softmax"
TEMPERATURE = 0.05
OURS, CHUNKS = "recperf", "torch in chunks"
SCORES = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Scores that torch in chunks holds at a time."""
GOAL_ERROR = 1.2
"""Times the error of torch in chunks."""
GOAL_CPU = 1.5
"""Times the speed of torch in chunks, by the median of turns."""
Way = Callable[[], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class Shape:
    positions: int
    items: int
    width: int
    kind: torch.dtype = torch.bfloat16
    goal_ms: float | None = None
    """On an H200."""
    goal_bytes: int | None = None
    """Above inputs and gradients, on a GPU."""

    @property
    def name(self) -> str:
        return f"{self.positions:,} x {self.items:,} x {self.width}"

    @property
    def flops(self) -> int:
        return 6 * self.positions * self.items * self.width

    def drawn(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        draw = torch.Generator(device).manual_seed(1)
        users, items = (
            F.normalize(torch.randn(count, self.width, generator=draw, device=device), dim=1).to(self.kind)
            for count in (self.positions, self.items)
        )
        targets = torch.randint(self.items, (self.positions,), generator=draw, device=device)
        return users.requires_grad_(), items.requires_grad_(), targets


WIDE = Shape(25_600, 1_000_000, 256)
GPU = (
    Shape(25_600, 40_000, 96, goal_ms=1.7),
    Shape(25_600, 1_000_000, 96, goal_ms=38.0, goal_bytes=1 << 30),
    Shape(25_600, 1_000_000, 256, goal_ms=WIDE.flops / 450e12 * 1e3),
)
CPU = (Shape(2_048, 40_000, 64, torch.float32), Shape(2_048, 40_000, 96, torch.float32))
TINY = (Shape(70, 300, 96, torch.float32),)


def in_chunks(users: Tensor, items: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and both gradients by torch, some positions against all items at a time, each score computed once."""
    wide = torch.promote_types(users.dtype, torch.float32)
    total, d_users = users.new_zeros((), dtype=wide), torch.empty_like(users)
    d_items = torch.zeros(items.shape, dtype=wide, device=items.device)
    sharp, weight = users / TEMPERATURE, 1 / len(users)
    together = max(1, SCORES[users.device.type] // len(items))
    for first in range(0, len(users), together):
        part = slice(first, first + together)
        loss, d_part, d_part_items = one_chunk(sharp[part], items, targets[part, None], weight)
        total += loss
        d_users[part] = d_part
        d_items += d_part_items
    return total, d_users / TEMPERATURE, d_items.to(items.dtype)


def one_chunk(sharp: Tensor, items: Tensor, own: Tensor, weight: float) -> tuple[Tensor, Tensor, Tensor]:
    scores = torch.mm(sharp, items.t())
    wide = torch.promote_types(scores.dtype, torch.float32)
    own_scores = scores.gather(1, own).to(wide)
    powers = scores.to(wide).exp()
    sums = powers.sum(1, keepdim=True)
    shares = (powers.scatter_add(1, own, -sums) * (weight / sums)).to(items.dtype)
    return ((sums.log() - own_scores) * weight).sum(), torch.mm(shares, items), torch.mm(shares.t(), sharp).to(wide)


def as_today(users: Tensor, items: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same for a CPU, where passes over the scores and new memory cost more than on a GPU: in place."""
    total, sharp, weight = users.new_zeros(()), users / TEMPERATURE, 1 / len(users)
    d_users, d_items = torch.empty_like(users), torch.zeros_like(items)
    together = max(1, SCORES["cpu"] // len(items))
    for first in range(0, len(users), together):
        part = slice(first, first + together)
        own = targets[part, None]
        scores = torch.mm(sharp[part], items.t())
        own_scores = scores.gather(1, own)
        sums = scores.exp_().sum(1, keepdim=True)
        scores.scatter_add_(1, own, -sums)
        total += ((sums.log() - own_scores) * weight).sum()
        torch.mm(scores, items, out=d_users[part])
        d_users[part] *= weight / sums
        d_items.addmm_(scores.t(), sharp[part] * (weight / sums))
    return total, d_users.div_(TEMPERATURE), d_items


def by_autograd(loss_of: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: tuple[Tensor, Tensor, Tensor]) -> Any:
    loss = loss_of(*inputs)
    return loss.detach(), *torch.autograd.grad(loss, inputs[:2])


def ours(users: Tensor, items: Tensor, targets: Tensor) -> Tensor:
    return softmax_loss(users, items, targets, temperature=TEMPERATURE, bounded=True)


def ways_of(inputs: tuple[Tensor, Tensor, Tensor], device: torch.device) -> dict[str, Way]:
    plain = tuple(one.detach() for one in inputs)
    chunks = as_today if device.type == "cpu" else in_chunks
    ways: dict[str, Way] = {OURS: partial(by_autograd, ours, inputs), CHUNKS: torch.no_grad()(partial(chunks, *plain))}
    if device.type == "cpu":
        return ways
    compiled = torch.compile(one_chunk)

    @torch.no_grad()
    def chunks_compiled() -> tuple[Tensor, Tensor, Tensor]:
        globals()["one_chunk"], before = compiled, one_chunk
        try:
            return in_chunks(*plain)
        finally:
            globals()["one_chunk"] = before

    ways["the same compiled"] = chunks_compiled
    with suppress(ImportError):
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy as liger

        ways["Liger"] = partial(by_autograd, lambda u, i, t: liger(u / TEMPERATURE, i, t), inputs)
    with suppress(ImportError):
        from cut_cross_entropy import linear_cross_entropy as cut

        ways["cut-cross-entropy"] = partial(by_autograd, lambda u, i, t: cut(u / TEMPERATURE, i, t), inputs)
    return ways


def errors_of(ways: dict[str, Way], inputs: tuple[Tensor, Tensor, Tensor]) -> dict[str, dict[str, float]]:
    """Of the loss and both gradients, against float64 on the same inputs."""
    with torch.no_grad():
        exact = in_chunks(inputs[0].double(), inputs[1].double(), inputs[2])
    errors = {}
    for name, way in ways.items():
        parts = zip(("loss", "d_users", "d_items"), way(), exact)
        errors[name] = {part: float((x.double() - right).norm() / right.norm()) for part, x, right in parts}
    return errors


def available(ways: dict[str, Way], device: torch.device) -> tuple[dict[str, Way], dict[str, float]]:
    """The ways that run on this shape, and the seconds of their first call."""
    working, first = {}, {}
    for name, way in ways.items():
        try:
            first[name] = once(way, device)
            working[name] = way
        except Exception as error:
            if name == OURS:
                raise
            print(f"{name}: not available: {str(error).splitlines()[0] if str(error) else type(error).__name__}")
    return working, first


def on_a_gpu(shape: Shape, device: torch.device, samples: int, seconds: float) -> list[dict[str, Any]]:
    inputs = shape.drawn(device)
    ways, first = available(ways_of(inputs, device), device)
    errors = errors_of(ways, inputs)
    held = torch.cuda.memory_allocated(device)
    # Gradients are outputs: they count as little as the inputs.
    gradients = sum(one.nbytes for one in inputs[:2])
    most = {name: (peak_memory(way, device) or 0) - held - gradients for name, way in ways.items()}
    loss, *others = ways[OURS]()
    repeated = all(torch.equal(*pair) for pair in zip((loss, *others), ways[OURS]()))
    works: dict[str, Work] = {**ways}
    taken = readings(works, device, samples=samples, seconds=seconds)
    with suppress(RuntimeError):
        graph = captured(ways[OURS], 1, device)
        taken[f"{OURS}, in a CUDA graph"] = readings({"": graph}, device, samples=samples, seconds=seconds)[""]
    rows = []
    for name, times in taken.items():
        ms, who = [1e3 * one for one in times], name.partition(",")[0]
        at: dict[str, Any] = {"device": torch.cuda.get_device_name(device), "kind": str(shape.kind)}
        at |= {"shape": shape.name, "who": name}
        at |= {"tflops": shape.flops / float(np.median(times)) / 1e12, "relative_error": errors[who]}
        at |= {"bytes_above": most[who], "first_call_s": first[who]}
        if who == OURS:
            at |= {"goal": shape.goal_ms, "goal_bytes": shape.goal_bytes, "repeats_equal": repeated}
        rows.append(row(NAME, f"{name}, {shape.name}", "time", "ms", ms, at))
        print(
            f"{rows[-1]['variant']:<58} {rows[-1]['p50']:9.3f} ms {at['tflops']:6.0f} TFLOP/s, "
            f"{most[who] / 2**30:6.2f} GiB, errors {', '.join(f'{one:.1e}' for one in errors[who].values())}",
            flush=True,
        )
    return rows


def on_a_cpu(shape: Shape, samples: int) -> list[dict[str, Any]]:
    """Ratios of turns, because other work on the machine hits both."""
    inputs, device = shape.drawn(torch.device("cpu")), torch.device("cpu")
    ways = ways_of(inputs, device)
    errors = errors_of(ways, inputs)
    wall: dict[str, list[float]] = {name: [] for name in ways}
    busy: dict[str, list[float]] = {name: [] for name in ways}
    for turn, (name, way) in itertools.product(range(samples + 1), ways.items()):
        began, cpu = time.perf_counter(), time.process_time()
        way()
        if turn:
            wall[name].append(time.perf_counter() - began)
            busy[name].append(time.process_time() - cpu)
    memory = {name: memory_of(name, shape) for name in ways}
    at = {"device": "cpu", "shape": shape.name, "kind": str(shape.kind), "threads": torch.get_num_threads()}
    at |= {"load": os.getloadavg()[0], "relative_error": errors, "peak_mib": memory, "goal": GOAL_CPU}
    for name in ways:
        at |= {f"least_s, {name}": min(wall[name]), f"least_cpu_s, {name}": min(busy[name])}
    ratios = [slow / fast for slow, fast in zip(wall[CHUNKS], wall[OURS])]
    rows = [row(NAME, f"ratio, {shape.name}", "speed_ratio", "x", ratios, at)]
    by_least, by_cpu = (min(one[CHUNKS]) / min(one[OURS]) for one in (wall, busy))
    print(
        f"{rows[0]['variant']:<34} {rows[0]['p50']:5.2f} x by median, {by_least:.2f} by least times, {by_cpu:.2f} by "
        f"least CPU seconds; MiB {memory}; errors {errors}",
        flush=True,
    )
    return rows


def memory_of(name: str, shape: Shape) -> int:
    """MiB by which the most memory of a process grows in a call; of a process of its own, after a tiny call."""
    sizes = [str(size) for size in (shape.positions, shape.items, shape.width)]
    words = [sys.executable, __file__, "--no-record", "--memory", name, *sizes, str(torch.get_num_threads())]
    return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)


def print_memory(name: str, positions: str, items: str, width: str, threads: str) -> None:
    torch.set_num_threads(int(threads))
    ways_of(TINY[0].drawn(torch.device("cpu")), torch.device("cpu"))[name]()
    shape = Shape(int(positions), int(items), int(width), torch.float32)
    way = ways_of(shape.drawn(torch.device("cpu")), torch.device("cpu"))[name]

    def held(field: str) -> int:
        with open("/proc/self/status") as status:
            return int(re.findall(rf"{field}:\s+(\d+) kB", status.read())[0])

    with open("/proc/self/clear_refs", "w") as peak:
        peak.write("5")
    before = held("VmRSS")
    way()
    print((held("VmHWM") - before) >> 10)


def goals_missed(rows: list[dict[str, Any]]) -> list[str]:
    missed = []
    chunks = {one["conditions"]["shape"]: one["conditions"] for one in rows if one["conditions"].get("who") == CHUNKS}
    for one in rows:
        at, name = one["conditions"], one["variant"]
        if at["device"] == "cpu":
            if one["p50"] < GOAL_CPU:
                missed.append(f"{name}: {one['p50']:.2f} x, the goal is {GOAL_CPU}")
            if at["peak_mib"][OURS] > at["peak_mib"][CHUNKS]:
                missed.append(f"{name}: {at['peak_mib'][OURS]} MiB, {CHUNKS} {at['peak_mib'][CHUNKS]}")
            pairs = at["relative_error"][OURS], at["relative_error"][CHUNKS]
        elif at["who"] == OURS:
            if at["goal"] and one["p50"] > at["goal"]:
                missed.append(f"{name}: {one['p50']:.2f} ms, the goal is {at['goal']:.1f}")
            if at["goal_bytes"] and at["bytes_above"] > at["goal_bytes"]:
                missed.append(f"{name}: {at['bytes_above'] / 2**30:.2f} GiB above inputs and gradients")
            if not at["repeats_equal"]:
                missed.append(f"{name}: repeats differ")
            pairs = at["relative_error"], chunks[at["shape"]]["relative_error"]
        else:
            continue
        for part, error in pairs[0].items():
            # Where float32 rounds a loss, no way is closer.
            if error > GOAL_ERROR * max(pairs[1][part], 2.0**-24):
                missed.append(f"{name}: {part} is off by {error:.1e}, {CHUNKS} by {pairs[1][part]:.1e}")
    return missed


def candidates(width: int) -> Iterator[Any]:
    """Tiles that fit on a Hopper's multiprocessor, by registers and shared memory."""
    from recperf.ops.catalogue_softmax.triton import Tiles

    narrow = width <= 96
    for own, other, warps in ((128, 64, 8), (128, 128, 8), (64, 64, 4), (64, 128, 4), (256, 64, 8), (128, 32, 8)):
        for stages, engine in itertools.product((2, 3, 4), (True, False)):
            if 2 * stages * other * width + 2 * own * width > 220 << 10:
                continue
            for programs, emulated in itertools.product((1, 2, 3) if narrow else (1,), (0, 1) if narrow else (0,)):
                registers = {1: None, 2: 65536 // (64 * warps), 3: 65536 // (96 * warps) // 8 * 8}[programs]
                yield Tiles(own, other, warps, stages, programs, engine=engine, emulated=emulated, registers=registers)


def compiled_ahead(job: tuple[Any, int]) -> str:
    """Compile the kernels with these tiles into the cache on disk, in a process of its own."""
    from recperf.ops.catalogue_softmax import triton as body

    (tiles, width), device = job, torch.device("cuda")
    body.tiles_of = lambda *_, items_own: tiles._replace(parts=1)
    try:
        by_autograd(ours, Shape(256, 256, width).drawn(device))
        wait(device)
    except Exception as error:
        return f"{tuple(tiles)}: {str(error).splitlines()[0][:90] if str(error) else type(error).__name__}"
    return ""


def sweep(shape: Shape, device: torch.device, samples: int, most: int) -> None:
    """Time each kernel with each of the tiles, and print the fastest."""
    from recperf.ops.catalogue_softmax import triton as body
    from recperf.ops.catalogue_softmax.reference import Scoring

    tried = list(candidates(shape.width))[:most]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        faults = list(pool.map(compiled_ahead, [(tiles, shape.width) for tiles in tried]))
    print(f"{shape.name}: {len(tried)} tiles, {sum(map(bool, faults))} of them do not compile", flush=True)
    for fault in filter(None, faults):
        print(f"  {fault}")
    users, items, targets = (one.detach() for one in shape.drawn(device))
    scoring = Scoring(scale=1 / TEMPERATURE, targets_T=targets, bounded=True)
    weights = torch.full((len(users),), 1 / len(users), device=device)
    logs, one = body.forward(users, items, scoring)[0], torch.ones((), device=device)
    sides = {
        "positions": lambda: body.forward(users, items, scoring),
        "items": lambda: body.items_backward(users, items, scoring, logs, weights, one),
    }
    usual = body.tiles_of
    for number, (side, work) in enumerate(sides.items()):
        found = []
        for tiles, fault in zip(tried, faults):
            if fault:
                continue
            body.tiles_of = lambda *_, items_own, tiles=tiles: tiles
            try:
                found.append((min(readings({"": work}, device, samples=samples, seconds=0.02)[""]), tiles))
            except Exception as error:
                print(f"  {side} {tuple(tiles)}: {str(error).splitlines()[0][:90]}")
        body.tiles_of = usual
        usual_ms = 1e3 * min(readings({"": work}, device, samples=samples, seconds=0.02)[""])
        print(f"  {side}: {usual_ms:.3f} ms as they are {tuple(usual(shape.width, 2, True, items_own=bool(number)))}")
        for seconds, tiles in sorted(found)[:8]:
            print(
                f"    {1e3 * seconds:9.3f} ms {shape.flops * 2 / 3 / seconds / 1e12:5.0f} TFLOP/s {tiles}", flush=True
            )


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="try sizes of tiles first; a GPU only")
    parser.add_argument("--most", type=int, default=1000, help="tiles that are tried at most")
    parser.add_argument("--shapes", type=int, nargs="*", help="numbers of the shapes, from 0")
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2, help="on a CPU")
    parser.add_argument("--no-record", action="store_true", help="print and append nothing")
    parser.add_argument("--memory", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.memory:
        print_memory(*options.memory)
        return 0
    rows = []
    if torch.cuda.is_available():
        # The default stream cannot be captured, and a backward pass runs on the stream of its forward pass.
        device = torch.device("cuda")
        torch.cuda.set_stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
        for number in options.shapes or range(len(GPU)):
            if options.sweep:
                sweep(GPU[number], device, options.samples, options.most)
            rows += on_a_gpu(GPU[number], device, options.samples, 0.2)
            torch.cuda.empty_cache()
    else:
        torch.set_num_threads(options.threads)
        for number in options.shapes or range(len(CPU)):
            rows += on_a_cpu(CPU[number], options.samples)
    if not options.no_record:
        print(f"rows appended to {record(rows).name}")
    missed = goals_missed(rows)
    for line in missed:
        print(f"goal missed: {line}")
    return 5 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
