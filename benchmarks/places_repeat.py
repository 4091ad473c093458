"""Places of planted programs, profiled again and again, alone and beside a load of 30 % of every core.

    python benchmarks/places_repeat.py [--only TEXT] [--repeats N] [--load PART ...] [--no-record]

One row per program and load: the part of the shares of its first places whose 95 % interval holds their median over the
repeats. Exit 5 where a verdict at high names another limit or line than the planted one, or where fewer than 90 % of
all shares are within. By default 6 programs, 5 times each without and with a load: about 12 minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from _rows import record, row
from recperf.machine import usable_cores

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "measure" / "planted"))

from planted_programs import PROGRAMS, PlantedProgram  # type: ignore[import-not-found]

NAMES = (
    "gc.collect", "strings hashed in collate", "a loop per user", "negatives drawn in Python",
    "one-hot times a matrix", "a softmax over 50,000 items",
)  # fmt: skip
STEPS = 3000
FIRST, WITHIN = 3, 0.9
PERIOD_S = 0.1
LOAD = f"""
import sys, time
busy = float(sys.argv[1]) * {PERIOD_S}
while True:
    ends = time.perf_counter() + busy
    while time.perf_counter() < ends:
        pass
    time.sleep({PERIOD_S} - busy)
"""


@contextmanager
def loaded(part: float) -> Iterator[None]:
    """Inside, a process on every core works this part of its time."""
    command = [sys.executable, "-c", LOAD, str(part)]
    loops = [subprocess.Popen(command) for _ in range(usable_cores() if part else 0)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def profiled(case: PlantedProgram) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(case.text.replace("STEPS", str(STEPS)))
        command = [sys.executable, "-m", "recperf", "profile", "--script", "train.py", "--json", "--quiet"]
        command += ["--no-try", "--no-report", "--run-dir", "profile"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def key(place: dict[str, Any]) -> str:
    backward = "backward of " if place["backward"] else ""
    return f"{backward}{place['file']}:{place['line']}, {place['limit']}"


def wrong_at_high(case: PlantedProgram, report: dict[str, Any]) -> bool:
    line = next(number for number, one in enumerate(case.text.splitlines(), 1) if case.slow in one)
    lines = {place["line"] for place in report["places"][:FIRST]}
    right = report["verdict"]["limit"] in case.limits and line in lines
    return report["verdict"]["confidence"] == "high" and not right


def repeated(case: PlantedProgram, part: float, repeats: int) -> dict[str, Any]:
    """The row of a program beside a load."""
    with loaded(part):
        reports = [profiled(case) for _ in range(repeats)]
    # A place that one repeat names first is looked at in all of them.
    names = dict.fromkeys(key(place) for report in reports for place in report["places"][:1])
    shares: dict[str, list[list[float]]] = {name: [] for name in names}
    for report in reports:
        places = {key(place): place for place in report["places"]}
        for name, seen in shares.items():
            one = places.get(name)
            seen.append([one["share"], one["low"] or 0.0, one["high"] or 1.0] if one else [0.0, 0.0, 0.0])
    inside = [
        float(low <= median(share for share, *_ in seen) <= high) for seen in shares.values() for _, low, high in seen
    ]
    verdicts = [report["verdict"] for report in reports]
    conditions: dict[str, Any] = {
        "load": part, "places": shares, "limits": [one["limit"] for one in verdicts],
        "confidences": [one["confidence"] for one in verdicts],
        "wrong_at_high": sum(wrong_at_high(case, report) for report in reports),
        "other_work": [report["other_work"] for report in reports], "inside": inside,
    }  # fmt: skip
    first = next(iter(shares.items()))
    text = ", ".join(f"{share:.0%} ({low:.0%} to {high:.0%})" for share, low, high in first[1])
    print(f"{case.name:28} load {part:.0%}: {sum(inside):.0f} of {len(inside)} within, "
          f"{conditions['wrong_at_high']} wrong at high; {sorted(set(conditions['limits']))}; {first[0]}: {text}",
          flush=True)  # fmt: skip
    part_inside = sum(inside) / len(inside)
    return row("places_repeat", f"{case.name}, load {part:.0%}", "within", "part of shares", [part_inside], conditions)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="programs whose name contains this text, of all planted ones")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--load", type=float, nargs="+", default=[0.0, 0.3], help="parts of every core")
    parser.add_argument("--no-record", action="store_true", help="print the figures only")
    options = parser.parse_args()
    chosen = [case for case in PROGRAMS if (options.only in case.name if options.only else case.name in NAMES)]
    entries = [repeated(case, part, options.repeats) for case in chosen for part in options.load]
    facts = [entry["conditions"] for entry in entries]
    inside = [one for fact in facts for one in fact["inside"]]
    wrong = sum(fact["wrong_at_high"] for fact in facts)
    print(f"{sum(inside):.0f} of {len(inside)} shares within their interval, {wrong} verdicts wrong at high"
          + ("" if options.no_record else f"; rows in {record(entries)}"))  # fmt: skip
    return 0 if not wrong and sum(inside) >= WITHIN * len(inside) else 5


if __name__ == "__main__":
    sys.exit(main())
