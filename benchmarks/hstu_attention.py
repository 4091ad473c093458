"""HSTU attention on a GPU, bfloat16: the forward pass, the backward pass and both, softmax attention (SDPA) beside it.

Rates are TFLOP/s by the published count: half of every row's square, two products forward, 2.5 times that backward.
Softmax attention does the same products over rows of equal length; what it does with a score differs. Each of its
backends has rows of its own. Rates of kernels that cannot be run here are constants in the rows' conditions.

Every way is timed twice, the ways taking turns: called one by one, and as a CUDA graph of several calls, so that the
rate of a short kernel does not depend on the host. A reading is a batch of calls, or of graphs, between two events.

The first calls, compiling included, are taken with empty caches of kernels. Errors are against float64 on a small batch
of the same width, relative to the norm of what is compared. `order` says whether a backward pass repeats its bits.

With `--host`: what a call costs the host, in microseconds, for a few rows of 128 tokens, with and without autograd.
Beside it a function of autograd that does nothing: no backward pass of a Python function can cost less.

With `--bias`, on any device: float32 rows of 50 to 200 tokens with a relative bias by position and time, as next-item
models have them, beside plain torch on padded rows. Products may be rounded to TF32 on either side.

Shapes: T tokens of all rows, H heads, A width of q and k a head, V of v, B rows.

Run as `python benchmarks/hstu_attention.py`. Exits with 5 where a goal is missed; `--tiny` runs anywhere.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from _clock import Work, captured, once, readings
from _hstu_peer import BIASED, GPU, PASSES, SHAPES, TINY, WIDTHS, Padded, Shape, Softmax, offsets_of, on_the_gpu
from _rows import RESULTS, record, row, show
from recperf.ops import hstu_attention
from recperf.ops.hstu_attention import Mask, RelativeBias, attention, reference

NAME = "hstu_attention"
SAMPLES, SECONDS = 20, 0.01
CALLS = {"one by one": 1, "graph of 10 calls": 10}
"""How the calls are made: 1, or so many captured in one CUDA graph."""
OURS = "recperf"
SHARE_WIDTH = 0.9
"""Goal of other widths: of the rate at a width of 128."""
REPEATS = 3
GOAL_FIRST = 20.0
"""Seconds until the first forward and backward are done, kernels compiled."""
GOAL_ERROR = 1e-2
"""bfloat16 keeps 8 bits: its rounding alone is 2e-3 a number."""
DTYPE = torch.bfloat16
SEED = 7
HOST_SHAPE = Shape(rows=8, longest=128, shortest=128)
HOST_CALLS = 50
"""Fewer than the launches that the device's queue holds."""


class Recperf:
    """One batch of the shape: views of one U, V, Q, K buffer, as the layer has them."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        lengths_B = shape.lengths(SEED)
        tokens, draw = int(lengths_B.sum()), torch.Generator(device).manual_seed(SEED)
        widths = [shape.heads * width for width in (shape.v, shape.v, shape.qk, shape.qk)]
        uvqk_TF = torch.randn(tokens, sum(widths), device=device, dtype=DTYPE, generator=draw)
        _, v, q, k = (part.view(tokens, shape.heads, -1) for part in torch.split(uvqk_TF, widths, 1))
        self.grad_THV = torch.randn(v.shape, device=device, dtype=DTYPE, generator=draw)
        longest = int(lengths_B.max())
        self.mask = Mask(alpha=shape.qk**-0.5, length=longest, longest=longest)
        self.qkv, self.offsets_B1 = (q, k, v), offsets_of(lengths_B, device)

    def forward(self) -> Tensor:
        return hstu_attention.forward(*self.qkv, self.offsets_B1, self.mask)

    def backward(self) -> tuple[Tensor, ...]:
        return hstu_attention.backward(self.grad_THV, *self.qkv, self.offsets_B1, self.mask, deterministic=False)

    def both(self) -> None:
        self.forward()
        self.backward()

    def exact(self) -> tuple[Tensor, ...]:
        """Output and gradients in float64."""
        q, k, v = (x.double() for x in self.qkv)
        inputs = (q, k, v, self.offsets_B1, self.mask)
        return reference.forward(*inputs), *reference.backward(self.grad_THV.double(), *inputs)


class Biased:
    """A batch of equal rows with a relative bias; events lie seconds to days apart."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        draw, tokens = torch.Generator().manual_seed(SEED), shape.rows * shape.longest
        drawn = (torch.randn(tokens, shape.heads, shape.qk, generator=draw) for _ in range(4))
        self.inputs = tuple(x.to(device, dtype) for x in drawn)
        key_times_T = torch.rand(tokens, generator=draw).mul(12).exp().long().cumsum(0).to(device)
        sizes = shape.longest, 128
        positions_P, buckets_K = self.learned = [
            torch.randn(size, generator=draw).mul(0.02).to(device) for size in sizes
        ]
        self.bias = RelativeBias(
            positions_P.requires_grad_(), buckets_K.requires_grad_(), key_times_T, key_times_T.roll(-1)
        )
        self.mask = Mask(alpha=1.0, length=shape.longest, longest=shape.longest)
        self.offsets_B1 = offsets_of(torch.full((shape.rows,), shape.longest), device)
        self.q, self.k, self.v = (x.detach().requires_grad_() for x in self.inputs[:3])

    def _attend(self) -> Tensor:
        return attention(self.q, self.k, self.v, self.offsets_B1, self.mask, bias=self.bias)

    def forward(self) -> Tensor:
        with torch.no_grad():
            return self._attend()

    def both(self) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self._attend(), (self.q, self.k, self.v, *self.learned), self.inputs[3])


def biased(shapes: Sequence[Shape], device: torch.device, samples: int, seconds: float) -> list[dict[str, Any]]:
    """Milliseconds of a pass by either side, and how many times as fast ours is."""
    torch.backends.cuda.matmul.allow_tf32 = True
    entries = []
    for shape in shapes:
        ours = Biased(shape, device)
        ways: dict[str, Any] = {OURS: ours, "padded torch": Padded(ours.inputs, shape.rows, ours.mask, ours.bias)}
        if device.type == "cuda":
            ways[f"{OURS}, bfloat16"] = Biased(shape, device, torch.bfloat16)
        at: dict[str, Any] = {"device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"}
        at |= {"heads": shape.heads, "width": shape.qk, "rows": shape.rows, "longest": shape.longest, "goal": None}
        at |= {"threads": torch.get_num_threads()}
        for what in ("forward", "both"):
            works = {name: getattr(way, what) for name, way in ways.items()}
            for timing, calls in CALLS.items() if device.type == "cuda" else [("one by one", 1)]:
                timed = works if calls == 1 else graphs_of(works, calls, device)
                taken = readings(timed, device, samples=samples, seconds=seconds)
                name = f"B{shape.rows} N{shape.longest}, {shape.heads} heads of {shape.qk}, {what}, {timing}"
                here = at | {"what": what, "timing": timing}
                for who, times in taken.items():
                    ms = [one * 1e3 / calls for one in times]
                    entries.append(row(NAME, f"bias, {who}, {name}", "time", "ms", ms, here | {"who": who}))
                if "padded torch" in taken:
                    ratios = [slow / fast for slow, fast in zip(taken["padded torch"], taken[OURS])]
                    entries.append(row(NAME, f"bias, ratio, {name}", "speed_ratio", "x", ratios, here))
                for entry in entries[-len(taken) - 1 :]:
                    print(f"{entry['variant']:<76} {entry['p50']:9.3f} {entry['unit']}", flush=True)
    return entries


class Nothing(torch.autograd.Function):
    """Takes and returns what attention does."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return v.view_as(v)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.saved_tensors


def host_costs(device: torch.device, samples: int) -> list[dict[str, Any]]:
    """Microseconds of the host for a call, the device's queue empty before."""
    shape = HOST_SHAPE
    ours = Recperf(shape, device)
    leaves = [x.detach().requires_grad_() for x in ours.qkv]
    padded = [x.detach().view(shape.rows, shape.longest, shape.heads, -1).transpose(1, 2) for x in ours.qkv]
    turned = [x.requires_grad_() for x in padded]
    grad = ours.grad_THV.view(shape.rows, shape.longest, shape.heads, -1).transpose(1, 2)
    ways: dict[str, tuple[Callable[[], Tensor], list[Tensor], Tensor]] = {
        OURS: (lambda: attention(leaves[0], leaves[1], leaves[2], ours.offsets_B1, ours.mask), leaves, ours.grad_THV),
        "softmax": (
            lambda: scaled_dot_product_attention(turned[0], turned[1], turned[2], is_causal=True),
            turned,
            grad,
        ),
        "no work": (lambda: Nothing.apply(*leaves), leaves, ours.grad_THV),  # type: ignore[no-untyped-call]
    }

    def cost(work: Callable[[int], object]) -> float:
        torch.cuda.synchronize(device)
        began = perf_counter()
        for call in range(HOST_CALLS):
            work(call)
        took = perf_counter() - began
        torch.cuda.synchronize(device)
        return took / HOST_CALLS * 1e6

    def taken(attend: Callable[[], Tensor], inputs: list[Tensor], grad: Tensor) -> dict[str, float]:
        outs: list[Tensor] = []
        costs = {"forward, autograd": cost(lambda _: outs.append(attend()))}
        costs["backward, autograd"] = cost(lambda call: torch.autograd.grad(outs[call], inputs, grad))
        with torch.no_grad():
            costs["forward"] = cost(lambda _: attend())
        return costs

    found: dict[str, list[float]] = {}
    for turn in range(samples + 1):
        for who, way in ways.items():
            costs = taken(*way)
            if who == OURS:
                costs["backward"] = cost(lambda _: ours.backward())
            for what, microseconds in costs.items() if turn else ():
                found.setdefault(f"host, {who}, {what}", []).append(microseconds)
    at = {"device": torch.cuda.get_device_name(device), "rows": shape.rows, "longest": shape.longest, "goal": None}
    entries = [row(NAME, name, "host time", "us", values, at) for name, values in found.items()]
    for entry in entries:
        print(show(entry), flush=True)
    return entries


def ways_of(shape: Shape, device: torch.device) -> dict[str, Recperf | Softmax]:
    """Ours, and those of torch's backends that accept the shape on this device."""
    ours = Recperf(shape, device)
    ways: dict[str, Recperf | Softmax] = {OURS: ours}
    for name, backend in Softmax.BACKENDS.items() if shape.equal else ():
        with suppress(RuntimeError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ways[f"softmax, {name}"] = Softmax((*ours.qkv, ours.grad_THV), shape.rows, backend)
    return ways


def errors_of(shape: Shape, device: torch.device) -> dict[str, dict[str, float]]:
    """Of every way's out, dq, dk and dv on three rows, of odd lengths where they may differ."""
    errors = {}
    for equal in (False, True):
        small = replace(shape, rows=3, longest=300, shortest=300 if equal else 33)
        for name, way in ways_of(small, device).items():
            if isinstance(way, Softmax) == equal:
                pairs = zip(("out", "dq", "dk", "dv"), (way.forward(), *way.backward()), way.exact())
                errors[name] = {part: float((x.double() - right).norm() / right.norm()) for part, x, right in pairs}
    return errors


def order_of(way: Recperf | Softmax) -> str:
    """Whether the backward pass adds up in one order, by the bits of repeats: those of atomics differ."""
    first, *others = (way.backward() for _ in range(REPEATS))
    same = (torch.equal(*pair) for other in others for pair in zip(first, other))
    return "fixed" if all(same) else "varies"


def graphs_of(works: dict[str, Work], calls: int, device: torch.device) -> dict[str, Work]:
    graphs = {}
    for name, work in works.items():
        try:
            graphs[name] = captured(work, calls, device)
        except RuntimeError:
            if name.startswith(OURS):
                raise
            print(f"{name}: not available in a CUDA graph")
    return graphs


def entries_of(shape: Shape, device: torch.device, samples: int, seconds: float) -> list[dict[str, Any]]:
    errors, ways = errors_of(shape, device), ways_of(shape, device)
    for name in Softmax.BACKENDS if shape.equal else ():
        if f"softmax, {name}" not in ways:
            print(f"softmax, {name}, {shape.name}: not available")
    lengths_B = shape.lengths(SEED)
    shared = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "shape": shape.name,
        "tokens": int(lengths_B.sum()),
        "dtype": str(DTYPE),
        "mask": "causal",
        "seed": SEED,
    }
    made, orders = [], {name: order_of(way) for name, way in ways.items()}
    for what, times in PASSES.items():
        works = {name: getattr(way, what) for name, way in ways.items()}
        for timing, calls in CALLS.items() if device.type == "cuda" else [("one by one", 1)]:
            timed = works if calls == 1 else graphs_of(works, calls, device)
            taken = readings(timed, device, samples=samples, seconds=seconds)
            for who, times_taken in taken.items():
                rates = [times * shape.flops(lengths_B) * calls / one / 1e12 for one in times_taken]
                at = shared | shape.conditions(what) | {"who": who, "what": what, "timing": timing}
                at |= {"ms": statistics.median(times_taken) * 1e3 / calls, "relative_error": errors[who]}
                at |= {
                    "goal": shape.goal(what) if who == OURS else None,
                    "order": "fixed" if what == "forward" else orders[who],
                }
                made.append(row(NAME, f"{who}, {shape.name}, {what}, {timing}", "rate", "TFLOP/s", rates, at))
    return made


def set_relative_goals(entries: list[dict[str, Any]]) -> None:
    """Goals that are shares of another rate of the same run."""
    rates = {_key(entry): entry["p50"] for entry in entries}
    for entry in entries:
        at = entry["conditions"]
        who, shape, what, timing = _key(entry)
        same = rates.get((OURS, shape.partition(" width ")[0], what, timing))
        if who == OURS and " width " in shape and same is not None and at["goal"] is None:
            at |= {"share_of_width_128": entry["p50"] / same, "goal": SHARE_WIDTH * same}


def _key(entry: dict[str, Any]) -> tuple[str, ...]:
    return tuple(entry["conditions"][name] for name in ("who", "shape", "what", "timing"))


def first_calls(shape: Shape, device: torch.device) -> dict[str, Any]:
    ours = Recperf(shape, device)
    seconds = {"forward": once(ours.forward, device), "backward": once(ours.backward, device)}
    return row(
        NAME, "first calls", "first calls", "s", [sum(seconds.values())], {"seconds": seconds, "goal": GOAL_FIRST}
    )


def goals_missed(entries: list[dict[str, Any]]) -> list[str]:
    missed = []
    for entry in entries:
        at, p50 = entry["conditions"], entry["p50"]
        if at["goal"] is not None and (p50 > at["goal"] if entry["unit"] == "s" else p50 < at["goal"]):
            missed.append(f"{entry['variant']}: {p50:,.1f} {entry['unit']}, the goal is {at['goal']:,.1f}")
        for name, error in at.get("relative_error", {}).items():
            if not error < GOAL_ERROR:
                missed.append(f"{entry['variant']}: {name} is off by {error:.1e}, the limit is {GOAL_ERROR:.0e}")
    return missed


def measure(shapes: list[Shape], device: torch.device, samples: int, seconds: float) -> list[dict[str, Any]]:
    entries = [first_calls(shapes[0], device)]
    print(show(entries[0]), flush=True)
    for shape in shapes:
        entries += entries_of(shape, device, samples, seconds)
        set_relative_goals(entries[1:])
        for entry in entries:
            at = entry["conditions"]
            if at.get("shape") == shape.name:
                error = max(at["relative_error"].values())
                print(
                    f"{entry['variant']:<64} {entry['p50']:6,.0f} TFLOP/s, {at['ms']:.3f} ms, error {error:.1e}",
                    flush=True,
                )
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return entries


def table() -> str:
    """The newest stored rows of the other kernels' GPU, as docs/performance.md has them: forward / backward / both."""
    stored = [json.loads(line) for line in (RESULTS / f"{NAME}.jsonl").read_text().splitlines()]
    stored = [entry for entry in stored if GPU in entry["conditions"].get("device", "")]
    newest = {_key(entry): entry for entry in stored if {"shape", "timing"} <= entry["conditions"].keys()}
    alone, graph = CALLS
    ways = [(OURS, graph), (OURS, alone), *((f"softmax, {name}", graph) for name in Softmax.BACKENDS)]
    others = dict.fromkeys(name for shape in (*SHAPES, *WIDTHS) for name in shape.others)
    titles = ["shape", *(who if timing == graph else f"{who}, {timing}" for who, timing in ways), *others]
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for shape in (*SHAPES, *WIDTHS):
        rates = [[newest.get((who, shape.name, what, timing)) for what in PASSES] for who, timing in ways]
        cells = [[f"{one['p50']:.0f}" if one else "-" for one in passes] for passes in rates]
        cells += [[f"{rate:.0f}" for rate in shape.others.get(name, ())] for name in others]
        lines.append(f"| {shape.name} | " + " | ".join(" / ".join(cell) for cell in cells) + " |")
    return "\n".join(lines)


def main(words: list[str]) -> int:
    assert __doc__ is not None
    every = [*SHAPES, *WIDTHS]
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="small shapes on any device; no rows, no goals")
    parser.add_argument("--shapes", type=int, nargs="+", default=list(range(len(every))), help="numbers, from 0")
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--no-record", action="store_true", help="print the rows and append them nowhere")
    parser.add_argument("--host", action="store_true", help="only what calls cost the host")
    parser.add_argument("--bias", action="store_true", help="only rows with a relative bias; on any device")
    parser.add_argument("--table", action="store_true", help="only print the newest stored rows as a table")
    options = parser.parse_args(words)
    if options.table:
        print(table())
        return 0
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        # A backward pass runs on the stream of its forward pass, and the default stream cannot be captured.
        torch.cuda.set_stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
    if options.bias:
        entries = biased(BIASED, device, options.samples, SECONDS)
        if not options.no_record:
            print(f"rows appended to {record(entries).name}")
        return 0
    if options.tiny:
        measure(list(TINY), device, 3, 0.0)
        biased(TINY[:1], device, 3, 0.0)
        return 0
    if device.type == "cpu":
        print("nothing to measure: torch sees no GPU here")
        return 0
    if options.host:
        entries = host_costs(device, options.samples)
        if not options.no_record:
            print(f"rows appended to {record(entries).name}")
        return 0
    with tempfile.TemporaryDirectory() as cache:
        os.environ |= {"TRITON_CACHE_DIR": cache, "RECPERF_HOME": cache}
        entries = measure([every[number] for number in options.shapes], device, options.samples, SECONDS)
    if not options.no_record:
        print(f"rows appended to {record(entries).name}")
    missed = goals_missed(entries) if on_the_gpu(device) else []
    for line in missed:
        print(f"goal missed: {line}")
    return 5 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
