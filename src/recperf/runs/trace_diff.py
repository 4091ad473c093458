"""Compares two traces by operator, kernel and region: what takes longer in a step, what is new and what is gone.

A difference counts only if the ranges from p20 to p80 over the steps of each trace do not overlap.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..measure.trace.analyse import timed_file
from .profile_diff import FEW_STEPS, Change
from .report.formats import printable

KINDS = ("regions", "operators", "kernels")
NO_SPREAD = 3
"""With fewer steps than this there is no spread, and any difference may be noise."""


@dataclass(frozen=True)
class TraceDiff:
    files: tuple[str, str]
    warnings: list[str]
    """Differences that make the traces incomparable."""
    notes: list[str]
    step: Change
    changes: dict[str, list[Change]]
    """By kind, the largest difference in time first."""

    def as_json(self) -> dict[str, Any]:
        return {
            "traces": list(self.files),
            "warnings": self.warnings,
            "notes": self.notes,
            "step": _json(self.step),
            **{kind: [_json(change) for change in changes] for kind, changes in self.changes.items()},
        }


def diff(old: Path, new: Path) -> TraceDiff:
    """The changes from the first trace to the second. The traces are read one after the other."""
    before, after = timed_file(old), timed_file(new)
    few = min(len(trace["times"]["steps"]) for trace in (before, after)) < NO_SPREAD
    steps = [_spread(trace["times"]["steps"], few) for trace in (before, after)]
    whole = max(steps[0]["p50"], steps[1]["p50"]) or 1.0
    changes = {}
    for kind in KINDS:
        one, other = (trace["times"][kind] for trace in (before, after))
        rows = [
            _change(name, one.get(name), other.get(name), whole, few) for name in dict.fromkeys([*one, *other])
        ]  # fmt: skip
        changes[kind] = sorted(rows, key=lambda row: -abs(difference(row)))
    return TraceDiff(
        files=(printable(old), printable(new)),
        warnings=_warnings(before, after),
        notes=_notes(before, after, few),
        step=Change("step", steps[0], steps[1], 1.0),
        changes=changes,
    )


def difference(change: Change) -> float:
    """Milliseconds that a step takes more."""
    return (change.new["p50"] if change.new else 0.0) - (change.old["p50"] if change.old else 0.0)


def _change(name: str, old: list[float] | None, new: list[float] | None, whole: float, few: bool) -> Change:
    before, after = (None if times is None else _spread(times, few) for times in (old, new))
    share = max(spread["p50"] for spread in (before, after) if spread) / whole
    return Change(printable(name), before, after, share)


def _spread(times: list[float], few: bool) -> dict[str, float]:
    """p20, p50 and p80 over the steps. Work that most steps do not have is compared by its mean."""
    if few or len(times) < NO_SPREAD:
        mean = statistics.fmean(times)
        return {"p20": 0.0, "p50": mean, "p80": float("inf")}
    cuts = statistics.quantiles(times, n=10, method="inclusive")
    return {"p20": cuts[1], "p50": cuts[4] or statistics.fmean(times), "p80": max(cuts[7], cuts[4])}


def _json(change: Change) -> dict[str, Any]:
    """Without steps enough for a spread, there are no p20 and p80."""
    row = {**change.as_json(), "difference_ms": difference(change)}
    for side in ("old_ms", "new_ms"):
        if row[side] and row[side]["p80"] == float("inf"):
            row[side] = {"p50": row[side]["p50"]}
    return row


def _warnings(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    differences = []
    if old["device"] != new["device"]:
        differences.append(
            f"different devices: {old['device']} and {new['device']}; the traces measure different things"
        )
    for one, other, name in ((old, new, "first"), (new, old, "second")):
        if one["window"]["steps_from"] == "whole trace" and other["window"]["steps_from"] != "whole trace":
            differences.append(f"the {name} trace has no steps and counts as one: times per step do not compare")
    return differences


def _notes(old: dict[str, Any], new: dict[str, Any], few: bool) -> list[str]:
    notes = []
    counts = [len(trace["times"]["steps"]) for trace in (old, new)]
    if counts[0] != counts[1]:
        notes.append(f"different numbers of steps: {counts[0]:,} and {counts[1]:,}; all times are per step")
    if few:
        notes.append(f"fewer than {NO_SPREAD} steps have no spread, so every difference may be noise")
    elif min(counts) < FEW_STEPS:
        notes.append(f"only {min(counts)} steps, so the spread says little")
    for what in ("torch", "cuda"):
        if old[what] != new[what] and None not in (old[what], new[what]):
            notes.append(f"version of {what}: {printable(old[what])}, then {printable(new[what])}")
    notes += [trace["part"] for trace in (old, new) if trace["part"]]
    if old["file"] == new["file"]:
        notes.append("a trace is compared with itself")
    return notes
