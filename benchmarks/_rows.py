"""A measurement is one JSON line: p20 / p50 / p80, n, machine, versions, commit, conditions."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from recperf.machine import machine_facts
from recperf.runs.provenance import checkout, packages

RESULTS = Path(__file__).parent / "results"


def row(
    benchmark: str, variant: str, metric: str, unit: str, values: list[float], conditions: dict[str, Any]
) -> dict[str, Any]:
    ordered = sorted(values)
    facts = machine_facts()
    return {
        "benchmark": benchmark,
        "variant": variant,
        "metric": metric,
        "unit": unit,
        **{f"p{share}": float(np.percentile(ordered, share)) for share in (20, 50, 80)},
        "n": len(values),
        "conditions": conditions,
        "machine": {key: facts[key] for key in ("cpu", "cores", "gpus", "fingerprint")},
        "packages": packages(),
        **checkout(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def record(rows: list[dict[str, Any]]) -> Path:
    """Append rows to the benchmark's file."""
    path = RESULTS / f"{rows[0]['benchmark']}.jsonl"
    with path.open("a") as file:
        for entry in rows:
            file.write(json.dumps(entry) + "\n")
    return path


def show(entry: dict[str, Any]) -> str:
    spread = f"p20 {entry['p20']:,.4g}, p80 {entry['p80']:,.4g}, n {entry['n']}"
    return f"{entry['variant']:<28} {entry['metric']:<16} {entry['p50']:>12,.4g} {entry['unit']:<10} ({spread})"
