"""Three STU layers on a GPU, forward and backward, bfloat16: in full, with the last layer for the candidate alone, and
keeping only the layers' inputs.

Weights are float32 and cast for every product, as in training; gradients of the input and of all weights are computed.
FLOPs are counted for the lengths really there and for the layers really asked for; what a way computes twice counts
once. Memory is the most torch held, inputs, weights and gradients included. The reference's figures, whose layers are
all in full, are constants in the rows' conditions. The ways take turns.

Shapes: T tokens of all rows, D width of a token, B rows.

Run as `python benchmarks/stu_stack.py`. Exits with 5 where a goal is missed; `--tiny` runs anywhere. With `--kernels`
it prints instead how long each kernel of one forward and backward takes, by torch's profiler.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from _clock import once, peak_memory, readings
from _hstu_peer import STACK_REFERENCE, jagged_lengths, offsets_of, on_the_gpu
from _rows import record, row, show
from recperf.models.dlrm_v4.config import HSTUConfig
from recperf.models.dlrm_v4.cost import stack_flops
from recperf.models.dlrm_v4.hstu import HSTU, STU, DropoutMoment, TokenRows

NAME = "stu_stack"
SAMPLES, SECONDS = 25, 0.2
SEED = 5
KERNELS = 25
"""How many lines `--kernels` prints."""
REAL, NARROW = "B256, mean 2663", "B256, mean 2663, the reference's FLOPs"
WAYS = {
    "full": {"candidate_only": False},
    "candidate only": {"candidate_only": True},
    "full, recompute": {"candidate_only": False, "recompute": True},
}
GOALS = {(NARROW, "full"): 2700.0, (NARROW, "candidate only"): 3700.0}
"""Samples a second on one NVIDIA H200."""
GOAL_GIB = {(NARROW, "full"): 18.4, (NARROW, "candidate only"): 13.9}


@dataclass(frozen=True)
class Shape:
    """`mean`: of lengths drawn between the shortest and the longest; none: all are of the longest."""

    name: str
    rows: int
    longest: int
    shortest: int = 512
    mean: float | None = None

    def lengths(self) -> Tensor:
        if self.mean is None:
            return torch.full((self.rows,), self.longest)
        return jagged_lengths(self.rows, self.shortest, self.longest, self.mean, SEED)


SHAPES = (
    Shape("B32 x 4096", 32, 4096),
    Shape(REAL, 256, 4096, mean=2663),
    # Between these bounds the layers have the 42.9 TFLOP that the reference's rate and time say its run had.
    Shape(NARROW, 256, 3588, shortest=1738, mean=2663),
)
TINY = (Shape("B2 x 24", 2, 24), Shape("B4, mean 15", 4, 30, shortest=3, mean=15))
CONFIG = HSTUConfig(layers=3, dim=512, heads=4, qk_dim=128, v_dim=128, max_length=4096, dropout=0.1)
TINY_CONFIG = replace(CONFIG, dim=32, heads=2, qk_dim=16, v_dim=16, max_length=30)


def dtype_on(device: torch.device) -> torch.dtype:
    """Not every CPU has products of bfloat16."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


class Side:
    """One way through the layers; its input, weights and the gradient that comes back are its own."""

    def __init__(self, config: HSTUConfig, lengths_B: Tensor, device: torch.device) -> None:
        self.config, self.lengths = config, lengths_B.tolist()
        longest = max(self.lengths)
        self.rows = TokenRows(offsets_of(lengths_B, device), longest, longest)
        self.model = HSTU(config)
        self.model.reset(SEED, "stack")
        self.model.to(device)
        draw = torch.Generator(device).manual_seed(SEED)
        shape, dtype = (sum(self.lengths), config.dim), dtype_on(device)
        self.x_TD = torch.randn(shape, device=device, dtype=dtype, generator=draw).requires_grad_()
        asked = (len(self.lengths), config.dim) if config.candidate_only else shape
        self.grad = torch.randn(asked, device=device, dtype=dtype, generator=draw)

    def step(self) -> tuple[Tensor, ...]:
        """Gradients of the input and of every weight."""
        moment = DropoutMoment(SEED, 1)
        if self.config.candidate_only:
            out = self.model(self.x_TD, self.rows, moment)
        else:
            # The whole output, not only what is read of it, gets a gradient: as the reference was measured.
            out = self.x_TD
            for index, layer in enumerate(self.model.layers):
                out = layer(out, self.rows, moment.dropout(self.config.dropout, index, STU))
        return torch.autograd.grad(out, (self.x_TD, *self.model.parameters()), self.grad)


def entries_of(
    shape: Shape, config: HSTUConfig, device: torch.device, samples: int, seconds: float
) -> list[dict[str, Any]]:
    lengths_B = shape.lengths()
    configs = {name: replace(config, **changes) for name, changes in WAYS.items()}  # type: ignore[arg-type]
    first, peaks = {}, {}
    for name, way in configs.items():
        side = Side(way, lengths_B, device)
        first[name] = once(side.step, device)
        peaks[name] = peak_memory(side.step, device)
        del side
    sides = {name: Side(way, lengths_B, device) for name, way in configs.items()}
    found = readings({name: side.step for name, side in sides.items()}, device, samples=samples, seconds=seconds)
    shared = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "rows": shape.rows,
        "tokens": int(lengths_B.sum()),
        "longest": int(lengths_B.max()),
        "mean_length": float(lengths_B.double().mean()),
        "sum_of_squares": int(lengths_B.square().sum()),
        "reference": STACK_REFERENCE.get(shape.name),
        "dtype": str(dtype_on(device)),
        "dropout": config.dropout,
        "seed": SEED,
    }
    made = []
    for name, taken in found.items():
        flops = stack_flops(configs[name], lengths_B.tolist())
        at = shared | {"shape": shape.name, "way": name, "ms": statistics.median(taken) * 1e3, "flops": flops}
        at |= {"first_call_s": first[name], "goal": GOALS.get((shape.name, name))}
        title = f"{name}, {shape.name}"
        made.append(row(NAME, title, "throughput", "samples/s", [shape.rows / one for one in taken], at))
        made.append(row(NAME, title, "rate", "TFLOP/s", [flops / one / 1e12 for one in taken], at))
        peak = peaks[name]
        if peak is not None:
            at = at | {"goal": GOAL_GIB.get((shape.name, name))}
            made.append(row(NAME, title, "peak memory", "GiB", [peak / 2**30], at))
    return made


def goals_missed(entries: list[dict[str, Any]]) -> list[str]:
    missed = []
    for entry in entries:
        goal, p50 = entry["conditions"]["goal"], entry["p50"]
        if goal is None:
            continue
        slow = entry["metric"] == "throughput" and p50 < goal
        large = entry["metric"] == "peak memory" and round(p50, 1) > goal
        if slow or large:
            missed.append(f"{entry['variant']}: {p50:,.1f} {entry['unit']}, the goal is {goal:,.1f}")
    return missed


def print_kernels(shape: Shape, config: HSTUConfig, device: torch.device) -> None:
    """Time of one forward and backward by kernel name, the longest first; on a CPU by operator."""
    kind = DeviceType.CUDA if device.type == "cuda" else DeviceType.CPU
    activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    for way in ("full", "candidate only"):
        side = Side(replace(config, **WAYS[way]), shape.lengths(), device)  # type: ignore[arg-type]
        for _ in range(2):
            once(side.step, device)
        with profile(activities=[activity]) as taken:
            once(side.step, device)
        kernels = [one for one in taken.key_averages() if one.device_type == kind]
        times = [one.self_device_time_total if device.type == "cuda" else one.self_cpu_time_total for one in kernels]
        print(f"{way}, {shape.name}: {sum(times) / 1e3:,.2f} ms in {sum(one.count for one in kernels):,} calls")
        for time, one in sorted(zip(times, kernels), key=lambda pair: -pair[0])[:KERNELS]:
            print(f"{time / 1e3:9.3f} ms {time / sum(times):6.1%} {one.count:4} x {one.key[:90]}")


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description="three STU layers, forward and backward, on a GPU")
    parser.add_argument("--tiny", action="store_true", help="small shapes on any device; no rows, no goals")
    parser.add_argument("--kernels", action="store_true", help="print the time of every kernel; no rows, no goals")
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--no-record", action="store_true", help="print the rows and append them nowhere")
    options = parser.parse_args(words)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not options.tiny:
        print("nothing to measure: torch sees no GPU here")
        return 0
    if options.kernels:
        print_kernels(TINY[1] if options.tiny else SHAPES[2], TINY_CONFIG if options.tiny else CONFIG, device)
        return 0
    entries = []
    for shape in TINY if options.tiny else SHAPES:
        config, samples = (TINY_CONFIG, 3) if options.tiny else (CONFIG, options.samples)
        entries += entries_of(shape, config, device, samples, 0.0 if options.tiny else SECONDS)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    for entry in entries:
        print(show(entry) + (f" = {entry['conditions']['ms']:,.2f} ms" if entry["metric"] == "throughput" else ""))
    if options.tiny:
        return 0
    if not options.no_record:
        print(f"rows appended to {record(entries).name}")
    missed = goals_missed(entries) if on_the_gpu(device) else []
    for line in missed:
        print(f"goal missed: {line}")
    return 5 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
