"""Planted causes: what the verdict says about steps whose limit is known, alone and beside a busy loop on every core.

    python benchmarks/planted.py [--device cuda] [--busy] [--only TEXT]

One row per case: 1 where the verdict is right, 0 where it is wrong, with its share and confidence. Exit 5 where a wrong
verdict has a high confidence, or fewer than nine of ten are right on a quiet machine.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from _rows import record, row

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "measure" / "planted"))

from planted_cases import CASES, Machine, Planted  # type: ignore[import-not-found]

import recperf
from recperf.machine import usable_cores
from recperf.measure import peaks
from recperf.measure.ceilings import ceilings_of


def profile(case: Planted, device: str, folder: str) -> recperf.Report:
    threads = case.threads or usable_cores()
    torch.set_num_threads(threads)
    name = "cpu" if device == "cpu" else torch.cuda.get_device_name()
    ceilings = ceilings_of(peaks.require(threads, lambda text: None), device=name, threads=threads)
    assert ceilings is not None
    machine = Machine(ceilings.knee, device=device, folder=folder)
    try:
        step, batches = case.build(machine)
        return recperf.profile(step, batches, quiet=True)
    finally:
        machine.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--busy", action="store_true", help="run a busy loop on every core meanwhile")
    parser.add_argument("--only", default="", help="cases whose name contains this text")
    options = parser.parse_args()
    cases = [case for case in CASES if options.only in case.name]
    cases = [case for case in cases if (case.on_cpu if options.device == "cpu" else case.on_gpu)]
    for threads in sorted({case.threads or usable_cores() for case in cases}):
        peaks.require(threads, print)
    loop = [sys.executable, "-c", "while True: pass"]
    busy = [subprocess.Popen(loop) for _ in range(usable_cores() if options.busy else 0)]
    entries, sure = [], 0
    try:
        with tempfile.TemporaryDirectory(dir=".") as folder:
            for case in cases:
                report = profile(case, options.device, folder)
                verdict = report.verdict
                expected = case.expected if options.device == "cpu" else case.on_gpu
                right = verdict.limit in expected
                sure += not right and verdict.confidence == "high"
                conditions = {
                    "device": options.device, "busy": options.busy, "expected": list(expected),
                    "limit": verdict.limit, "share": round(verdict.share, 3), "confidence": verdict.confidence,
                    "step_ms": report.step_ms["p50"], "other_work": report.as_json()["other_work"],
                }  # fmt: skip
                entries.append(row("planted", case.name, "right", "verdict", [float(right)], conditions))
                mark = "" if right else f"  WRONG, expected {' or '.join(expected)}"
                print(f"{case.name:44} {verdict.limit:14} {verdict.share:5.2f} {verdict.confidence}{mark}", flush=True)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    correct = sum(int(entry["p50"]) for entry in entries)
    print(f"{correct} of {len(entries)} right; {sure} wrong with high confidence; rows in {record(entries)}")
    return 5 if sure or (not options.busy and correct < 0.9 * len(entries)) else 0


if __name__ == "__main__":
    sys.exit(main())
