"""Fixes a profile suggests, predicted and measured: `recperf profile dlrm --preset NAME-plain --try-fixes` as rows.

Run as `python benchmarks/profile_fixes.py [experiment|intended]`, on the machine the claim is about; or with the
profile.json such a command wrote, `python benchmarks/profile_fixes.py FILE`: then machine and versions are those the
profile names, and the commit is unknown. Gains are each against their own step without the fix, measured before and
after it. Exits with 5 where a gain misses its prediction by more than a factor of 1.5, or where none was judged because
the machine was busy or drifted.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from _rows import record, row, show

GOAL = 1.5
PRESETS = ("experiment", "intended")
CONDITIONS = ("switch", "same_numbers", "predicted_ms", "measured_ms", "predicted_gain", "measured_gain",
              "predicted_range", "measured_range")  # fmt: skip


def taken(preset: str) -> dict[str, Any]:
    from recperf.execution.profiling import ProfileOptions, profile
    from recperf.measure import peaks
    from recperf.workloads import find

    workload = find("dlrm")
    found = peaks.require(None, print)
    made = profile(workload, workload.presets[f"{preset}-plain"](), found, ProfileOptions(try_fixes=True), say=print)
    return {**made, "preset": f"{preset}-plain"}


def rows_of(profile: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for each fix whose gain was both predicted and measured; others are printed with the reason."""
    verdict, step = profile["verdict"], profile["overhead"]["plain_ms"]
    where = {"device": profile["device"], "preset": profile["preset"], "step_ms": step,
             "verdict": verdict.get("limit") or verdict.get("name")}  # fmt: skip
    rows = []
    for fix in profile["fixes"]:
        if fix["measured_ms"] is None:
            continue
        predicted, measured = fix["predicted_gain"], fix["measured_gain"]
        if predicted is None or measured is None:
            print(f"not judged: {fix['name']}, {profile['preset']}: {fix['note']}")
            continue
        conditions = {**where, **{key: fix[key] for key in CONDITIONS}}
        name = f"{fix['name']}, {profile['preset']}"
        rows.append(row("profile_fixes", name, "measured / predicted gain", "x", [measured / predicted], conditions))
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
    missed = [entry["variant"] for entry in entries if not 1 / GOAL <= entry["p50"] <= GOAL]
    for name in missed:
        print(f"goal missed: the gain of {name} is off by more than {GOAL:g} times")
    return 5 if missed or not entries else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
