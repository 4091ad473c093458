"""What two gloo ranks of this host wait for: messages, and each other; and the link as `plan --calibrate` measures it.

Each workload is profiled on two ranks (`recperf profile --ranks 2`) between two measurements of the link, so that both
see the machine in the same state. plan_validate.py predicts the waits from the link. Needs TorchRec.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from typing import Any

from _rows import record, row, show
from recperf.planning import link

NAME = "rank_messages"
QUICK = ("--no-peaks", "--no-report", "--no-confirm")
WORKLOADS = ("micro-dlrm", "dlrm-v4")


def profiled(workload: str) -> dict[str, Any]:
    """The section `communication` of a profile."""
    command = ["profile", workload, "--ranks", "2", "--train.device", "cpu", "--json", *QUICK]
    with tempfile.TemporaryDirectory() as folder:
        full = [sys.executable, "-m", "recperf", *command]
        done = subprocess.run(full, cwd=folder, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return dict(json.loads(done.stdout)["workload"]["communication"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    parser.add_argument("--times", type=int, default=3, help="profiles of each workload")
    parser.add_argument("--dry", action="store_true", help="print, store no rows")
    options = parser.parse_args()
    for workload in options.workloads:
        rows, links, waits = [], [asdict(link.measure("cpu"))], []
        for _ in range(options.times):
            waits.append(profiled(workload))
            links.append(asdict(link.measure("cpu")))
        for metric in ("moving_ms", "late_ms"):
            conditions = {
                "own_ms": sorted(one["own_ms"] for one in waits)[len(waits) // 2],
                "links": links,
                "collectives": waits[-1]["collectives"],
            }
            rows.append(row(NAME, workload, metric, "ms", [one[metric] for one in waits], conditions))
            print(show(rows[-1]), flush=True)
        if not options.dry:
            print(f"rows appended to {record(rows)}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
