"""What profiling costs: the light mode of recperf.Profiler, and `profile --script` on a whole program.

    python benchmarks/profile_overhead.py            # steps with and without the light mode, in turns
    python benchmarks/profile_overhead.py --script   # a program of a minute with and without the profiler; then five
                                                     # profiles of the same program, and one with trials; 7 minutes

Goals: the light mode costs less than 5 % of a step, --script --no-try less than 1 % of the CPU time of a program,
imports apart, and a profile with trials at most two minutes. Five profiles have one verdict, and its shares differ by
at most 0.05. Exit 5 where one is missed.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import nn

import recperf
from _rows import record, row, show

GOAL = 0.05
TURNS = 15
OF_A_PROGRAM, SECONDS = 0.01, 60
WITH_TRIALS_S = 120.0
REPEATS, APART = 5, 0.05
PROGRAM = """
import sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

with open(sys.argv[1], "w") as began:
    began.write(str(time.process_time()))
seconds, most = float(sys.argv[2]), int(sys.argv[3])
ids = torch.randint(0, 500_000, (200_000, 4))
batches = DataLoader(TensorDataset(ids, (ids.sum(1) % 2).float()), batch_size=None, sampler=[
    slice(start, start + 2000) for start in range(0, 200_000, 2000)])
table = nn.Embedding(500_000, 32)
tower = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 1))
optimizer = torch.optim.Adam([*table.parameters(), *tower.parameters()], lr=1e-3)
steps, end = 0, time.perf_counter() + seconds
while steps < most and time.perf_counter() < end:
    for x, y in batches:
        loss = nn.functional.binary_cross_entropy_with_logits(tower(table(x).flatten(1)).squeeze(1), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
        if steps == most:
            break
print("steps", steps)
"""


def training_step(ms: float) -> tuple[object, torch.Tensor]:
    """A small model with a batch that takes about so long here."""
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    rows = 16
    while rows < 1 << 20:
        x = torch.rand(rows, 64)
        step(x)
        began = perf_counter()
        for _ in range(3):
            step(x)
        took = (perf_counter() - began) / 3 * 1e3
        if took >= 0.8 * ms:
            return step, x
        rows = max(rows + 16, int(rows * min(4.0, 0.95 * ms / took)))
    return step, x


def cpu_seconds(folder: Path, seconds: float, steps: int, *profiler: str) -> tuple[float, str]:
    """CPU time of the program from the end of its imports to the end of its process, and what it printed."""
    began, program = folder / "began", folder / "program.py"
    program.write_text(PROGRAM)
    before = getrusage(RUSAGE_CHILDREN)
    arguments = [str(began), str(seconds), str(steps)]
    command = [sys.executable, *profiler, str(program), *(["--"] if profiler else []), *arguments]
    ran = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    after = getrusage(RUSAGE_CHILDREN)
    whole = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return whole - float(began.read_text()), ran.stdout


def of_a_program(folder: Path) -> list[dict[str, Any]]:
    """Rows of a whole program: what profiling it costs, and the shares of five profiles."""
    numbers = itertools.count()

    def profile(*options: str, steps: int = 1 << 40) -> tuple[float, dict[str, Any]]:
        new = str(folder / f"profile{next(numbers)}")
        command = ("-m", "recperf", "profile", "--json", "--quiet", "--no-report", "--run-dir", new, *options)
        used, printed = cpu_seconds(folder, 1e9, steps, *command, "--script")
        return used, json.loads(printed)

    plain, printed = cpu_seconds(folder, SECONDS, 1 << 40)
    steps = int(printed.split()[1])
    profiled, report = profile("--no-try", "--to-the-end", steps=steps)
    # A machine that became slower or faster meanwhile has not profiled.
    again = cpu_seconds(folder, 1e9, steps)[0]
    stated = [note for note in report["notes"] if "CPU time" in note]
    conditions: dict[str, Any] = {"steps": steps, "plain_cpu_s": [plain, again], "profiled_cpu_s": profiled,
                                  "stated": stated}  # fmt: skip
    plain = (plain + again) / 2
    cost = row("profile_overhead", "a program of a minute", "overhead", "of its CPU time", [profiled / plain - 1],
               conditions)  # fmt: skip
    print(f"{show(cost)}; {stated[0]}", flush=True)
    reports = [profile("--no-try")[1] for _ in range(REPEATS)]
    verdicts = [report["verdict"] for report in reports]
    conditions = {"limits": [verdict["limit"] for verdict in verdicts],
                  "confidences": [verdict["confidence"] for verdict in verdicts],
                  "shares": [verdict["share"] for verdict in verdicts],
                  "other_work": [report["other_work"] for report in reports]}  # fmt: skip
    same = row("profile_overhead", "the same program five times", "share", "of the step", conditions["shares"],
               conditions)  # fmt: skip
    print(f"{show(same)}; {conditions['limits']}, {conditions['shares']}")
    began = perf_counter()
    report = profile()[1]
    seconds = perf_counter() - began
    conditions = {"advice": [(one["name"], one["status"], one["measured_gain"]) for one in report["advice"]]}
    trials = row("profile_overhead", "with trials", "wall time", "s", [seconds], conditions)
    print(show(trials))
    return [cost, same, trials]


def script() -> int:
    with tempfile.TemporaryDirectory() as folder:
        entries = of_a_program(Path(folder))
    overhead, shares = entries[0]["p50"], entries[1]["conditions"]["shares"]
    print(f"rows in {record(entries)}")
    one = len(set(entries[1]["conditions"]["limits"])) == 1 and max(shares) - min(shares) <= APART
    return 0 if overhead <= OF_A_PROGRAM and one and entries[2]["p50"] <= WITH_TRIALS_S else 5


def light() -> int:
    entries, worst = [], 0.0
    for ms in (1, 10, 100):
        step, x = training_step(ms)
        count = max(3, 100 // ms)

        def plain(step: object = step, x: torch.Tensor = x, count: int = count) -> float:
            began = perf_counter()
            for _ in range(count):
                step(x)  # type: ignore[operator]
            return (perf_counter() - began) / count

        with recperf.Profiler(light=True, quiet=True) as profiler:

            def profiled(step: object = step, x: torch.Tensor = x, count: int = count) -> float:
                began = perf_counter()
                for batch in profiler.input([x] * count):
                    step(batch)  # type: ignore[operator]
                    profiler.step()
                return (perf_counter() - began) / count

            while not profiler.done:
                profiled()
            pairs = [(profiled(), plain()) for _ in range(TURNS)]
        shares = [with_it / without - 1 for with_it, without in pairs]
        stated = profiler.report.overhead.share
        conditions = {"step_ms": median(without for _, without in pairs) * 1e3, "stated": stated}
        entry = row("profile_overhead", f"steps of {ms} ms", "overhead", "of a step", shares, conditions)
        entries.append(entry)
        worst = max(worst, entry["p50"])
        print(f"{show(entry)}; the report states {stated:.2%}")
    print(f"largest {worst:.2%}, goal below {GOAL:.0%}; rows in {record(entries)}")
    return 0 if worst < GOAL else 5


if __name__ == "__main__":
    sys.exit(script() if "--script" in sys.argv[1:] else light())
