"""Fixes a profile suggests, predicted and measured: `recperf profile dlrm --preset NAME-plain --try-fixes` as rows.

Run as `python benchmarks/profile_fixes.py [experiment|intended]`, on the machine the claim is about; or with the
profile.json such a command wrote, `python benchmarks/profile_fixes.py FILE`. Exits with 5 where the fixes together miss
their prediction by more than a factor of 1.5.
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
    from recperf.measure import peaks
    from recperf.workloads import WORKLOADS
    from recperf.workloads.profiling import Wish, profile

    workload = WORKLOADS["dlrm"]
    found = peaks.load() or peaks.measure(quick=True, say=lambda text: None)
    made = profile(workload, workload.presets[f"{preset}-plain"](), found, Wish(try_fixes=True), say=print)
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
        ratio = fix["measured_ms"] / fix["predicted_ms"]
        name = f"{fix['name']}, {profile['preset']}"
        rows.append(row("profile_fixes", name, "measured / predicted step", "x", [ratio], conditions))
    return rows


def main(words: list[str]) -> int:
    asked = words or list(PRESETS)
    profiles = [json.loads(Path(word).read_bytes()) if word not in PRESETS else taken(word) for word in asked]
    entries = [entry for profile in profiles for entry in rows_of(profile)]
    for entry in entries:
        print(show(entry))
    print(f"rows appended to {record(entries).name}")
    whole = [entry for entry in entries if entry["variant"].startswith("all together")]
    missed = [entry["variant"] for entry in whole if not 1 / GOAL <= entry["p50"] <= GOAL]
    for name in missed:
        print(f"goal missed: {name} is off by more than {GOAL:g} times")
    return 5 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
