"""Planted causes: what the verdict says about steps whose limit is known, alone and beside a busy loop on every core.

    python benchmarks/planted.py [--device cuda] [--busy] [--advice] [--only TEXT]

One row per case: 1 where the verdict is right, 0 where it is wrong, with its share and confidence; "not judged" is
neither. With --advice, steps with a known defect: the gain that the advice predicts over the gain of following it. Exit
5 where a wrong verdict has a high confidence, fewer than 95 % of those judged are right on a quiet machine, or fewer
than 80 % of the predicted gains are within a factor of 1.3 of the measured ones.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _rows import record, row

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "measure" / "planted"))

from planted_cases import Machine, Planted  # type: ignore[import-not-found]
from recommender_cases import CASES  # type: ignore[import-not-found]

import recperf
from _followed_advice import FOLLOWED, Followed, step_seconds
from recperf.machine import usable_cores
from recperf.measure import peaks

RIGHT, CLOSE, FACTOR = 0.95, 0.8, 1.3


def judged(case: Planted, device: str, folder: str, busy: bool) -> dict[str, Any]:
    """The row of a planted cause."""
    machine = Machine.here(case.threads, device, folder)
    try:
        report = recperf.profile(*case.built(machine), quiet=True)
    finally:
        machine.close()
    verdict, expected = report.verdict, case.expected if device == "cpu" else case.on_gpu
    right = verdict.limit in expected
    conditions = {
        "device": device, "busy": busy, "expected": list(expected),
        "limit": verdict.limit, "share": round(verdict.share, 3), "confidence": verdict.confidence,
        "step_ms": report.step_ms.p50, "other_work": report.other_work,
        "advice": [advice.change for advice in report.advice[:1]],
    }  # fmt: skip
    mark = "" if right or verdict.limit == "not judged" else f"  WRONG, expected {' or '.join(expected)}"
    print(f"{case.name:44} {verdict.limit:14} {verdict.share:5.2f} {verdict.confidence}{mark}", flush=True)
    return row("planted", case.name, "right", "verdict", [float(right)], conditions)


def gained(case: Followed, device: str, folder: str) -> dict[str, Any]:
    """The row of an advice that was followed: the predicted gain, 1 without the advice, over the measured one."""
    machine = Machine.here(case.threads, device, folder)
    try:
        built = case.build(machine, False)
        report = recperf.profile(*built, quiet=True, confirm=False)
        before = step_seconds(built)
        after = step_seconds(case.build(machine, True))
        measured = (before + step_seconds(case.build(machine, False))) / 2 / after
    finally:
        machine.close()
    found = next((advice for advice in report.advice if advice.name == case.advice), None)
    predicted = found.predicted_gain if found else None
    conditions = {
        "device": device, "advice": found.change if found else None, "predicted": predicted, "measured": measured,
        "range": found.predicted_range if found else None, "limit": report.verdict.limit,
        "other_work": report.other_work,
    }  # fmt: skip
    text = "no such advice" if found is None else f"predicted {predicted or 0:5.2f}"
    print(f"{case.name:44} {text}, measured {measured:5.2f}", flush=True)
    # No advice predicts no gain, which is right for a defect that costs nothing here.
    ratio = (predicted or 1.0) / measured
    return row("planted", case.name, "advice", "predicted over measured gain", [ratio], conditions)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--busy", action="store_true", help="run a busy loop on every core meanwhile")
    parser.add_argument("--advice", action="store_true", help="compare predicted gains with measured ones")
    parser.add_argument("--only", default="", help="cases whose name contains this text")
    options = parser.parse_args()
    cases = [case for case in (FOLLOWED if options.advice else CASES) if options.only in case.name]
    cases = [case for case in cases if (case.on_cpu if options.device == "cpu" else case.on_gpu)]
    for threads in sorted({case.threads or usable_cores() for case in cases}):
        peaks.require(threads, print)
    loop = [sys.executable, "-c", "while True: pass"]
    busy = [subprocess.Popen(loop) for _ in range(usable_cores() if options.busy else 0)]
    try:
        with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
            if options.advice:
                entries = [gained(case, options.device, folder) for case in cases]
            else:
                entries = [judged(case, options.device, folder, options.busy) for case in cases]
    finally:
        for process in busy:
            process.kill()
            process.wait()
    if options.advice:
        close = sum(1 / FACTOR <= entry["p50"] <= FACTOR for entry in entries)
        print(f"{close} of {len(entries)} predicted gains within {FACTOR} of the measured; rows in {record(entries)}")
        return 5 if close < CLOSE * len(entries) else 0
    known = [entry for entry in entries if entry["conditions"]["limit"] != "not judged"]
    correct = sum(int(entry["p50"]) for entry in known)
    sure = sum(not entry["p50"] and entry["conditions"]["confidence"] == "high" for entry in known)
    print(
        f"{correct} of {len(known)} right, {len(entries) - len(known)} not judged; {sure} wrong with high confidence; "
        f"rows in {record(entries)}"
    )
    return 5 if sure or (not options.busy and correct < RIGHT * len(known)) else 0


if __name__ == "__main__":
    sys.exit(main())
