"""Where oneDNN pays for a linear layer, on one thread and on all: the rule behind --train.onednn auto."""

from __future__ import annotations

from time import perf_counter

import torch
from torch.nn import functional as F

from _rows import record, row, show
from recperf.train.device import allow_onednn

SHAPES = ((256, 16, 8), (256, 32, 32), (256, 64, 64), (1024, 32, 32), (2048, 32, 32), (1024, 64, 64), (256, 128, 128),
          (8192, 32, 32), (1024, 128, 128), (1024, 512, 512))  # fmt: skip
LARGE = ((2048, 128, 128), (2048, 256, 256), (1024, 512, 512), (2048, 512, 512), (2048, 1024, 1024))
"""Products that are shared by all threads."""


def seconds(batch: int, before: int, after: int, rounds: int) -> float:
    x, weight, bias = torch.randn(batch, before), torch.randn(after, before), torch.randn(after)
    for _ in range(5):
        F.linear(x, weight, bias)
    began = perf_counter()
    for _ in range(rounds):
        F.linear(x, weight, bias)
    return (perf_counter() - began) / rounds


def main() -> None:
    cases = [(1, shape) for shape in SHAPES] + [(torch.get_num_threads(), shape) for shape in LARGE]
    entries = []
    for threads, (batch, before, after) in cases:
        torch.set_num_threads(threads)
        flops = 2 * batch * before * after
        rounds = max(5, min(300, int(1e8 / flops)))
        ratios = []
        for _ in range(9):
            taken = {}
            for on in (True, False):
                allow_onednn(on)
                taken[on] = seconds(batch, before, after, rounds)
            ratios.append(taken[True] / taken[False])
        conditions = {"batch": batch, "in": before, "out": after, "mflop": flops / 1e6, "threads": threads}
        entries.append(row("onednn_crossover", f"{batch}x{before}x{after}", "on / off", "x", ratios, conditions))
        print(f"{threads} threads {flops / 1e6:8.2f} MFLOP  {show(entries[-1])}")
    print(f"rows appended to {record(entries).name}")


if __name__ == "__main__":
    main()
