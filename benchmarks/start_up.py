"""Seconds from the start of `recperf run` to the end of its first training step, by workload and device.

The first start compiles kernels into a new cache folder; the later ones find them there. Beside them in the same run: a
program that only imports torch and puts one number on the device.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _rows import record, row, show

RUNS = {
    "micro-dlrm": ["micro-dlrm"],
    "dlrm experiment": ["dlrm", "--preset", "experiment"],
    "dlrm-v4 laptop": ["dlrm-v4"],
    "hstu": ["hstu"],
}
BARE = """
import os, sys, time
import torch
float(torch.ones(1, device=sys.argv[1]) + 1)
print("first step after", time.time() - float(os.environ["BEGAN"]), flush=True)
os._exit(0)
"""
CHILD = """
import os, sys, time
import recperf.train.loop as loop
from recperf.cli import main
plain = loop.take_step
def first(*arguments):
    done = plain(*arguments)
    float(done[0])  # waits for the device
    print("first step after", time.time() - float(os.environ["BEGAN"]), flush=True)
    os._exit(0)
loop.take_step = first
sys.exit(main(sys.argv[1:]))
"""


def seconds(program: str, words: list[str], home: Path) -> float:
    """One start in a folder of its own; caches lie in `home`."""
    folder = tempfile.mkdtemp(dir=home)
    caches = {"RECPERF_HOME": str(home / "recperf"), "TRITON_CACHE_DIR": str(home / "triton")}
    environment = {**os.environ, **caches, "CUDA_CACHE_PATH": str(home / "cuda"), "BEGAN": str(time.time())}
    done = subprocess.run(
        [sys.executable, "-c", program, *words], cwd=folder, env=environment, capture_output=True, text=True
    )
    for line in done.stdout.splitlines():
        if line.startswith("first step after"):
            return float(line.split()[-1])
    sys.exit(f"{' '.join(words)}: no step was taken: {done.stderr[-2000:]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--samples", type=int, default=5, help="starts after the first")
    parser.add_argument("--no-record", action="store_true", help="print the rows and append them nowhere")
    wish = parser.parse_args()
    rows = list[dict[str, Any]]()
    options = ["--train.device", wish.device, "--no-peaks", "--no-report"]
    programs = {name: (CHILD, ["run", *RUNS[name], *options]) for name in wish.runs}
    for name, program in {"torch alone": (BARE, [wish.device]), **programs}.items():
        with tempfile.TemporaryDirectory() as home:
            took = [seconds(*program, Path(home)) for _ in range(wish.samples + 1)]
        for kind, values in (("first start", took[:1]), ("later starts", took[1:])):
            rows.append(row("start_up", f"{name}, {wish.device}, {kind}", "seconds", "s", values, {}))
            print(show(rows[-1]), flush=True)
    if not wish.no_record:
        record(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
