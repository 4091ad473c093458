"""Fixes a profile suggests, predicted and measured: `recperf profile dlrm --preset NAME-plain --try-fixes` as rows.

Run as `python benchmarks/profile_fixes.py [experiment|intended]`, on the machine the claim is about; or with the
profile.json such a command wrote, `python benchmarks/profile_fixes.py FILE`: then machine and versions are those the
profile names, and the commit is unknown. Exits with 5 where a gain misses its prediction by more than a factor of 1.5.
Gains are each against their own step without fixes; step times are compared beside them, because a noisy step without
fixes moves the former and not the latter.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from _rows import record, row, show

GOAL = 1.5
PRESETS = ("experiment", "intended")


def taken(preset: str) -> dict[str, Any]:
    from recperf.execution.profiling import ProfileOptions, profile
    from recperf.measure import peaks
    from recperf.workloads import find

    workload = find("dlrm")
    found = peaks.require(None, print)
    made = profile(workload, workload.presets[f"{preset}-plain"](), found, ProfileOptions(try_fixes=True), say=print)
    return {**made, "preset": f"{preset}-plain"}


def rows_of(profile: dict[str, Any]) -> list[dict[str, Any]]:
    verdict, step = profile["verdict"], profile["overhead"]["plain_ms"]
    where = {"device": profile["device"], "preset": profile["preset"], "verdict": verdict["name"], "step_ms": step,
             "second": verdict["second"]}  # fmt: skip
    rows = []
    for fix in profile["fixes"]:
        if fix["measured_ms"] is None:
            continue
        conditions = {**where, "switch": fix["switch"], "same_numbers": fix["same_numbers"]}
        conditions |= {key: fix[key] for key in ("predicted_ms", "measured_ms", "predicted_gain", "measured_gain")}
        name = f"{fix['name']}, {profile['preset']}"
        for metric, what in (("gain", "gain"), ("ms", "step")):
            ratio = fix[f"measured_{metric}"] / fix[f"predicted_{metric}"]
            rows.append(row("profile_fixes", name, f"measured / predicted {what}", "x", [ratio], conditions))
    return rows


def of_a_file(path: Path) -> list[dict[str, Any]]:
    """Rows of a profile taken elsewhere: only the time of writing is from here."""
    profile = json.loads(path.read_bytes())
    elsewhere = {"machine": {"gpus": [{"name": profile["device"]}]}, "packages": profile["trust"]["versions"]}
    return [{**entry, **elsewhere, "commit": None, "dirty": None} for entry in rows_of(profile)]


def main(words: list[str]) -> int:
    entries = []
    for word in words or PRESETS:
        entries += rows_of(taken(word)) if word in PRESETS else of_a_file(Path(word))
    for entry in entries:
        print(show(entry))
    print(f"rows appended to {record(entries).name}")
    missed = [e["variant"] for e in entries if e["metric"].endswith("gain") and not 1 / GOAL <= e["p50"] <= GOAL]
    for name in missed:
        print(f"goal missed: the gain of {name} is off by more than {GOAL:g} times")
    return 5 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
