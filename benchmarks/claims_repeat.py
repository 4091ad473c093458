"""`recperf run micro-dlrm-dram && recperf check`, repeated: on a quiet machine, and beside a busy loop on every core.

Run as `python benchmarks/claims_repeat.py [QUIET [BUSY]]`, by default 20 and 5 times. A quiet repeat takes less than a
minute on two cores, one beside busy loops two to three. Ceilings are those stored, or are measured by the first run.
Exits with 5 where a check fails, or where a claim of a quiet repeat was not judged.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

from _rows import record, row
from recperf.machine import usable_cores

RECPERF = (sys.executable, "-m", "recperf")


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    loops = [subprocess.Popen((sys.executable, "-c", "while True: pass")) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def repeat() -> dict[str, Any]:
    """One run and its check, with the readings behind the claims."""
    with tempfile.TemporaryDirectory() as folder:
        began = perf_counter()
        quiet = ("run", "micro-dlrm-dram", "--quiet", "--no-report")
        subprocess.run((*RECPERF, *quiet), cwd=folder, check=True, stdout=subprocess.DEVNULL)
        seconds = perf_counter() - began
        checked = subprocess.run((*RECPERF, "check", "--json"), cwd=folder, capture_output=True, text=True, check=False)
        [run] = Path(folder, "runs").iterdir()
        pair, profile = (json.loads((run / name).read_text()) for name in ("pair.json", "profile.json"))
    claims = json.loads(checked.stdout)["runs"][0]["claims"]
    verdict = profile["verdict"]
    return {
        "ratio": pair["ratio"]["embedding"],
        "expected": [pair["expected"][name] for name in ("low", "expected", "high")],
        "pair_other_work": pair["other_work"],
        "steps_other_work": profile["other_work"] or 0.0,
        "limit": f"{verdict['limit']} {verdict['share']:.2f}",
        "exit": checked.returncode,
        "failed": [claim["name"] for claim in claims if claim["holds"] is False],
        "not_judged": [claim["name"] for claim in claims if claim["holds"] is None],
        "seconds": round(seconds, 1),
    }


def line(variant: str, number: int, one: dict[str, Any]) -> str:
    low, middle, high = one["expected"]
    outcome = f"FAILED {', '.join(one['failed'])}" if one["exit"] else "passed"
    outcome += f", {len(one['not_judged'])} not judged" if one["not_judged"] else ""
    others = f"{one['pair_other_work']:6.1%} {one['steps_other_work']:6.1%}"
    return (
        f"{variant:<6} {number:>3}  {one['ratio']:5.2f}  {middle:5.2f} ({low:.2f} to {high:.2f})  {others}  "
        f"{one['limit']:<16} {one['seconds']:5.0f} s  {outcome}"
    )


def repeats(variant: str, count: int) -> list[dict[str, Any]]:
    done = []
    for number in range(1, count + 1):
        done.append(repeat())
        print(line(variant, number, done[-1]), flush=True)
    return done


def main() -> int:
    counts = [int(argument) for argument in sys.argv[1:3]]
    quiet_count, busy_count = (*counts, *(20, 5)[len(counts) :])
    print("         cold/hot  expected            other work: pair, steps  limit  run  check")
    quiet = repeats("quiet", quiet_count)
    with busy_loops(usable_cores() if busy_count else 0):
        busy = repeats("busy", busy_count)
    entries = [
        row("claims_repeat", variant, "cold/hot", "x", [one["ratio"] for one in done], {"repeats": done})
        for variant, done in (("quiet", quiet), ("busy", busy))
        if done
    ]
    if entries:
        print(f"rows appended to {record(entries).name}")
    return 5 if any(one["exit"] for one in (*quiet, *busy)) or any(one["not_judged"] for one in quiet) else 0


if __name__ == "__main__":
    sys.exit(main())
