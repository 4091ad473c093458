"""A measurement is one JSON line: p20 / p50 / p80, n, machine, versions, commit, conditions.

Only rows of a clean commit are stored. A machine that gets a copy of the files without their history is told the commit
by a stamp: `python benchmarks/_rows.py` writes it in a clean checkout, and it holds where every file is still the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from recperf.machine import machine_facts
from recperf.runs.record import checkout, packages

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
STAMP = ROOT / ".carry" / "commit.json"
"""Ignored by git: it is carried along with the files, by name."""
ROWS = "benchmarks/results"
"""What earlier benchmarks appended does not change what a later one measures."""
STARTED = "RECPERF_BENCHMARK"
"""Set for the processes that a benchmark starts."""
NO_ROWS = {"--dry", "--kernels", "--no-record", "--table", "-h", "--help"}


@cache
def origin() -> dict[str, Any]:
    """Commit of the files and whether they differ from it: by git, or where there is no history by the stamp."""
    found = checkout(besides=ROWS)
    if found["dirty"] is not False and STAMP.exists():
        stamp = json.loads(STAMP.read_text())
        return {"commit": stamp["commit"], "dirty": digest(stamp["files"]) != stamp["digest"]}
    return found


def digest(files: list[str]) -> str:
    """Of names and contents; a file that is missing counts as empty."""
    whole = hashlib.sha256()
    for name in files:
        path = ROOT / name
        content = path.read_bytes() if path.is_file() else b""
        whole.update(f"{name} {hashlib.sha256(content).hexdigest()}\n".encode())
    return whole.hexdigest()


def stamp() -> None:
    """Write the stamp of a clean checkout."""
    STAMP.unlink(missing_ok=True)
    found = checkout(besides=ROWS)
    if found["dirty"] is not False:
        sys.exit(f"no stamp written: {unclean(found)}")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [name for name in listed.split("\0") if name and not name.startswith(ROWS)]
    STAMP.parent.mkdir(exist_ok=True)
    STAMP.write_text(json.dumps({"commit": found["commit"], "digest": digest(files), "files": files}))
    print(f"{STAMP.relative_to(ROOT)}: {found['commit']}")


def unclean(found: dict[str, Any]) -> str:
    """Why rows of this origin are not stored; empty where they are."""
    if found["commit"] is None:
        return "the commit is not known: run from a checkout, or carry a stamp (python benchmarks/_rows.py)"
    return f"the files differ from commit {found['commit'][:12]}: commit first" if found["dirty"] else ""


def require_clean_start(script: Path, words: list[str]) -> None:
    """End a benchmark before it measures for minutes what will not be stored."""
    if script.resolve().parent != ROOT / "benchmarks" or script.name == Path(__file__).name or STARTED in os.environ:
        return
    os.environ[STARTED] = script.name
    why = "" if NO_ROWS & set(words) else unclean(origin())
    if why:
        sys.exit(f"{script.name}: nothing measured, since rows would not be stored: {why}")


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
        **origin(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def record(rows: list[dict[str, Any]]) -> Path:
    """Append rows to the benchmark's file; those that name no clean commit are printed instead, and the script ends."""
    why = next(filter(None, map(unclean, rows)), "")
    if why:
        print("\n".join(map(json.dumps, rows)))
        sys.exit(f"rows not stored: {why}")
    path = RESULTS / f"{rows[0]['benchmark']}.jsonl"
    with path.open("a") as file:
        for entry in rows:
            file.write(json.dumps(entry) + "\n")
    return path


def show(entry: dict[str, Any]) -> str:
    spread = f"p20 {entry['p20']:,.4g}, p80 {entry['p80']:,.4g}, n {entry['n']}"
    return f"{entry['variant']:<28} {entry['metric']:<16} {entry['p50']:>12,.4g} {entry['unit']:<10} ({spread})"


if __name__ == "__main__":
    stamp()
else:
    require_clean_start(Path(sys.argv[0]), sys.argv[1:])
