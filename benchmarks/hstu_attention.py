"""HSTU attention on a GPU, bfloat16: the shapes the reference was measured at, softmax flash attention beside it.

Forward, and forward and backward together, as TFLOP/s by the published count: half of every row's square, two products
forward, 3.5 times that with backward. Softmax attention does the same products of rows of equal length; what it does
with a score differs. The reference's own rates are constants in every row's conditions. A reading is a batch of calls
between two events; ours and softmax take turns.

The first calls, compiling included, are taken with an empty cache of kernels. The error is against float64 on a small
batch, relative to the norm of what is compared.

Shapes: T tokens of all rows, H heads, A width of q and k a head, V of v, B rows.

Run as `python benchmarks/hstu_attention.py`. Exits with 5 where a goal is missed; `--tiny` runs anywhere.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from _clock import once, readings
from _hstu_peer import BOTH, SHAPES, TINY, Shape, Softmax, offsets_of, on_the_gpu
from _rows import record, row, show
from recperf.ops import hstu_attention
from recperf.ops.hstu_attention import Mask, reference

NAME = "hstu_attention"
SAMPLES, SECONDS = 30, 0.02
GOAL_FIRST = 20.0
"""Seconds until the first forward and backward are done, kernels compiled."""
GOAL_ERROR = 1e-2
"""bfloat16 keeps 8 bits: its rounding alone is 2e-3 a number."""
SEED = 7


@dataclass(frozen=True)
class Case:
    """One batch, its mask and the gradient of what comes out."""

    q_THA: Tensor
    k_THA: Tensor
    v_THV: Tensor
    grad_THV: Tensor
    offsets_B1: Tensor
    mask: Mask

    def forward(self) -> Tensor:
        return hstu_attention.forward(self.q_THA, self.k_THA, self.v_THV, self.offsets_B1, self.mask)

    def backward(self) -> tuple[Tensor, Tensor, Tensor]:
        return hstu_attention.backward(self.grad_THV, self.q_THA, self.k_THA, self.v_THV, self.offsets_B1, self.mask)

    def both(self) -> None:
        self.forward()
        self.backward()


def make_case(shape: Shape, device: torch.device, dtype: torch.dtype, layout: str) -> Case:
    """Views of one U, V, Q, K buffer, as the layer has them, or tensors of their own."""
    lengths_B = shape.lengths(SEED)
    tokens, draw = int(lengths_B.sum()), torch.Generator(device).manual_seed(SEED)
    widths = [shape.heads * width for width in (shape.v, shape.v, shape.qk, shape.qk)]
    uvqk_TF = torch.randn(tokens, sum(widths), device=device, dtype=dtype, generator=draw)
    _, v, q, k = (part.view(tokens, shape.heads, -1) for part in torch.split(uvqk_TF, widths, 1))
    if layout == "separate":
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    grad_THV = torch.randn(v.shape, device=device, dtype=dtype, generator=draw)
    longest = int(lengths_B.max())
    # The score's one target is the row's last token: with one, the mask is the plain causal one.
    mask = Mask(alpha=shape.qk**-0.5, length=longest, longest=longest)
    return Case(q, k, v, grad_THV, offsets_of(lengths_B, device), mask)


def errors_of(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Of out, dq, dk and dv on three rows of odd lengths, against the reference in float64."""
    shape = Shape(3, 300, 33)
    case = make_case(shape, device, dtype, "packed")
    q, k, v, grad = (x.double() for x in (case.q_THA, case.k_THA, case.v_THV, case.grad_THV))
    exact = (
        reference.forward(q, k, v, case.offsets_B1, case.mask),
        *reference.backward(grad, q, k, v, case.offsets_B1, case.mask),
    )
    ours = (case.forward(), *case.backward())
    return {
        name: float((mine.double() - right).norm() / right.norm())
        for name, mine, right in zip(("out", "dq", "dk", "dv"), ours, exact)
    }


def first_calls(shape: Shape, device: torch.device, dtype: torch.dtype, layout: str) -> dict[str, float]:
    case = make_case(shape, device, dtype, layout)
    return {"forward": once(case.forward, device), "backward": once(case.backward, device)}


def entries_of(
    shape: Shape, device: torch.device, dtype: torch.dtype, layout: str, samples: int, seconds: float,
    shared: dict[str, Any],
) -> list[dict[str, Any]]:  # fmt: skip
    case = make_case(shape, device, dtype, layout)
    lengths_B = case.offsets_B1.diff()
    softmax = Softmax(case.q_THA, case.k_THA, case.v_THV, case.grad_THV, shape.rows) if shape.equal else None
    at = shared | shape.told() | {"tokens": int(lengths_B.sum()), "layout": layout, "dtype": str(dtype)}
    made = []
    for what, times in (("forward", 1.0), ("both", BOTH)):
        ways = {"recperf": getattr(case, what)}
        if softmax:
            ways["softmax"] = getattr(softmax, what)
        found, flops = readings(ways, device, samples=samples, seconds=seconds), times * shape.flops(lengths_B)
        for who, taken in found.items():
            rates = [flops / one / 1e12 for one in taken]
            more = {"who": who, "what": what, "ms": statistics.median(taken) * 1e3, "goal": shape.least(times > 1)}
            title = "forward" if what == "forward" else "forward + backward"
            made.append(row(NAME, f"{who}, {shape.name}, {title}", "rate", "TFLOP/s", rates, at | more))
    return made


def goals_missed(entries: list[dict[str, Any]]) -> list[str]:
    missed = []
    for entry in entries:
        at, p50 = entry["conditions"], entry["p50"]
        if at.get("who") == "recperf" and p50 < at["goal"]:
            missed.append(f"{entry['variant']}: {p50:,.0f} TFLOP/s, the goal is {at['goal']:,.0f}")
        if entry["metric"] == "first calls" and p50 > GOAL_FIRST:
            missed.append(f"{entry['variant']} take {p50:,.1f} s, the goal is {GOAL_FIRST:,.0f}")
        for name, error in at.get("relative_error", {}).items():
            if entry["metric"] == "first calls" and not error < GOAL_ERROR:
                missed.append(f"{name} is off by {error:.1e}, the limit is {GOAL_ERROR:.0e}")
    return missed


def measure(
    shapes: tuple[Shape, ...], device: torch.device, layout: str, samples: int, seconds: float
) -> list[dict[str, Any]]:
    dtype = torch.bfloat16
    first = first_calls(shapes[0], device, dtype, layout)
    shared = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "relative_error": errors_of(device, dtype),
        "mask": "causal, one target",
        "seed": SEED,
    }
    made = [row(NAME, "first calls", "first calls", "s", [sum(first.values())], shared | {"seconds": first})]
    for shape in shapes:
        made += entries_of(shape, device, dtype, layout, samples, seconds, shared)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return made


def main(words: list[str]) -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="small shapes on any device; no rows, no goals")
    parser.add_argument("--layout", choices=["packed", "separate"], default="packed", help="of q, k and v")
    parser.add_argument("--shapes", type=int, nargs="+", default=list(range(len(SHAPES))), help="numbers, from 0")
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--no-record", action="store_true", help="print the rows and append them nowhere")
    chosen = parser.parse_args(words)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if chosen.tiny:
        entries = measure(TINY, device, chosen.layout, 3, 0.0)
    elif device.type == "cpu":
        print("nothing to measure: torch sees no GPU here")
        return 0
    else:
        with tempfile.TemporaryDirectory() as cache:
            os.environ["TRITON_CACHE_DIR"] = cache
            entries = measure(
                tuple(SHAPES[number] for number in chosen.shapes), device, chosen.layout, chosen.samples, SECONDS
            )
    for entry in entries:
        ms = entry["conditions"].get("ms")
        print(show(entry) + (f" = {ms:,.3f} ms" if ms else ""))
    print("relative error: " + ", ".join(f"{k} {v:.1e}" for k, v in entries[0]["conditions"]["relative_error"].items()))
    if chosen.tiny:
        return 0
    if not chosen.no_record:
        print(f"rows appended to {record(entries).name}")
    missed = goals_missed(entries) if on_the_gpu(device) else []
    for line in missed:
        print(f"goal missed: {line}")
    return 5 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
