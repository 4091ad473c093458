"""Measures a workload at every combination of several config values."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from ..config import to_json
from ..machine import machine_facts
from ..measure.peaks.records import Peaks
from ..measure.profile_records import Profile
from ..measure.sections import swept_ms
from ..train.device import applied
from .measuring import measure_window
from .workload import Workload

STEPS = 24


def sweep(
    workload: Workload,
    points: list[tuple[dict[str, str], Any]],
    peaks: Peaks | None,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Measure a window of steps at each point, without training: settings, step time and its parts."""
    rows = []
    for settings, config in points:
        say("  ".join(f"{name} {value}" for name, value in settings.items()))
        prepared = workload.prepare(config)
        with applied(prepared.settings):
            trial = prepared.trial(config.seed)
            profile, *_ = measure_window(prepared, trial, peaks, steps=STEPS)
        del trial
        rows.append({"settings": settings, "config": to_json(config), "profile": profile})
    parts = shown_parts([row["profile"] for row in rows])
    facts = {"schema": 2, "workload": workload.name, "machine": machine_facts(), "parts": parts}
    return {**facts, "rows": rows, "fits": fits(rows, parts)}


def shown_parts(profiles: list[Profile]) -> list[str]:
    """The step, and its lookups or, in a workload that names no part so, the largest part of all profiles."""
    names = set.intersection(*({part.name for part in profile.components} for profile in profiles))
    if "embedding" in names or not names:
        return ["step", *(names & {"embedding"})]
    return ["step", max(names, key=lambda name: sum(swept_ms(profile, name).p50 for profile in profiles))]


def fits(rows: list[dict[str, Any]], parts: list[str]) -> list[dict[str, Any]]:
    """The least-squares line through each part's median where one numeric field was swept, and its r2."""
    names = list(rows[0]["settings"])
    if len(names) != 1 or len(rows) < 3:
        return []
    try:
        x = [float(row["settings"][names[0]]) for row in rows]
    except ValueError:
        return []
    lines = []
    for part in parts:
        y = [swept_ms(row["profile"], part).p50 for row in rows]
        slope, intercept, r2 = line(x, y)
        lines.append({"field": names[0], "part": part, "slope_ms": slope, "intercept_ms": intercept, "r2": r2})
    return lines


def line(x: list[float], y: list[float]) -> tuple[float, float, float]:
    """Slope, intercept and r2 of the least-squares line."""
    slope, intercept = statistics.linear_regression(x, y) if len(set(x)) > 1 else (0.0, statistics.fmean(y))
    mean = statistics.fmean(y)
    total = sum((b - mean) ** 2 for b in y)
    residual = sum((b - slope * a - intercept) ** 2 for a, b in zip(x, y))
    return slope, intercept, 1 - residual / total if total else 1.0
