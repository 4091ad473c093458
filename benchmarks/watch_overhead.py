"""What recperf.watch costs: training loops with and without it, in turns.

    python benchmarks/watch_overhead.py                 # steps of 1, 10 and 100 ms
    python benchmarks/watch_overhead.py --device cuda   # steps of a GPU

A turn is a loop of some seconds from its first step on, so that the looks at its beginning count. On a CPU one thread
computes, and its CPU time counts. Goal: below 2 % of the step. Exit 5 where it is missed.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from os import getloadavg
from statistics import median
from time import perf_counter, process_time

import torch
from torch import nn

import recperf
from _rows import record, row, show

GOAL = 0.02
TURNS, SECONDS = 11, 2.0
ROWS, IDS = 500_000, 4
DEVICE = torch.device(sys.argv[sys.argv.index("--device") + 1] if "--device" in sys.argv else "cpu")
CLOCK = process_time if DEVICE.type == "cpu" else perf_counter


class Clicks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, 32, sparse=True)
        self.tower = nn.Sequential(nn.Linear(32 * IDS, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.tower(self.table(ids).flatten(1)).squeeze(1)
        return logits


class Loop:
    def __init__(self) -> None:
        self.model = Clicks().to(DEVICE)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.batch(16)

    def batch(self, rows: int) -> None:
        self.ids = torch.randint(0, ROWS, (rows, IDS), device=DEVICE)
        self.labels = (self.ids.sum(1) % 2).float()

    def seconds(self, count: int) -> float:
        """Seconds of a step of a loop of so many."""
        began = CLOCK()
        for _ in range(count):
            loss = nn.functional.binary_cross_entropy_with_logits(self.model(self.ids), self.labels)
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        return (CLOCK() - began) / count

    def grow(self, ms: float) -> None:
        """Take a batch whose step takes about so long here."""
        rows = 16
        while rows < 1 << 22:
            self.batch(rows)
            self.seconds(3)
            took = min(self.seconds(3) for _ in range(3)) * 1e3
            if took >= 0.8 * ms:
                break
            rows = max(rows + 16, int(rows * min(4.0, 0.95 * ms / took)))


def main() -> int:
    torch.set_num_threads(1)
    entries, worst = [], 0.0
    for ms in (1, 10, 100):
        loop = Loop()
        loop.grow(ms)
        count = int(SECONDS * 1e3 / ms)
        loop.seconds(max(3, count // 10))
        shares: list[float] = []
        plain: list[float] = []
        watched: list[float] = []
        stated: list[float] = []
        for turn in range(TURNS):
            took = {}
            for watching in (True, False) if turn % 2 else (False, True):
                with recperf.watch(loop.model, loop.optimizer) if watching else nullcontext() as watch:
                    took[watching] = loop.seconds(count)
                if watch is not None:
                    stated.append(watch.report().cost)
            shares.append(took[True] / took[False] - 1)
            plain.append(took[False])
            watched.append(took[True])
        conditions = {"step_ms": median(plain) * 1e3, "rows": len(loop.ids), "steps_of_a_turn": count,
                      "stated": median(stated), "fastest_turns": min(watched) / min(plain) - 1,
                      "load": getloadavg()[0], "device": str(DEVICE), "threads": torch.get_num_threads()}  # fmt: skip
        entry = row("watch_overhead", f"steps of {ms} ms, {DEVICE.type}", "overhead", "of a step", shares, conditions)
        entries.append(entry)
        worst = max(worst, entry["p50"])
        print(
            f"{show(entry)}; the report states {median(stated):.2%}; "
            f"of the fastest turns {conditions['fastest_turns']:.2%}",
            flush=True,
        )
    print(f"largest {worst:.2%}, goal below {GOAL:.0%}; rows in {record(entries)}")
    return 0 if worst < GOAL else 5


if __name__ == "__main__":
    sys.exit(main())
