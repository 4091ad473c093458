"""`recperf data import --clicks` of a made-up CSV file: rows a second, and the peak memory of the process.

The file has 10 million rows: a user (a million), an ad, a city, a device, an age, a price, a time and a label. The
import runs in a process of its own; its peak is the resident memory that the kernel counted at its end.

Run as `python benchmarks/click_import.py [--rows N] [--dry]`.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from time import monotonic
from typing import Any

ROWS = 10_000_000
PIECE = 1_000_000
MOST_PEAK = 1 << 30
COLUMNS = ["--label", "clicked", "--categorical", "user,ad,city,device", "--numeric", "age,price", "--time", "ts"]


def write(path: Path, rows: int) -> None:
    """Categories follow power laws; a tenth of the prices is missing."""
    import numpy as np
    import pyarrow as pa
    from pyarrow import csv

    draw = np.random.default_rng(7)
    with path.open("wb") as file:
        for first in range(0, rows, PIECE):
            count = min(PIECE, rows - first)

            def power(most: int, count: int = count) -> Any:
                return (draw.random(count) ** 3 * most).astype(np.int64)

            price = np.round(np.exp(draw.normal(3, 1, count)), 2)
            table = pa.table(
                {
                    "user": power(1_000_000),
                    "ad": pa.array([f"ad-{number:05d}" for number in power(50_000)]),
                    "city": pa.array([f"city {number}" for number in power(5_000)]),
                    "device": np.array(["phone", "tablet", "desktop", "tv"])[draw.integers(0, 4, count)],
                    "age": draw.integers(14, 90, count),
                    "price": pa.array(price, mask=draw.random(count) < 0.1),
                    "ts": 1_700_000_000 + np.arange(first, first + count) // 10,
                    "clicked": (draw.random(count) < 0.05).astype(np.int64),
                }
            )
            csv.write_csv(table, file, csv.WriteOptions(include_header=first == 0, quoting_style="none"))


def import_it(path: Path, folder: Path) -> dict[str, Any]:
    """Import in this process, which does nothing else."""
    from recperf.cli import main

    began = monotonic()
    code = main(["data", "import", "--clicks", str(path), *COLUMNS, "--store", str(folder), "--quiet"])
    seconds, peak = monotonic() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return {"code": code, "seconds": seconds, "peak": peak}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--dry", action="store_true", help="measure and print, but record nothing")
    parser.add_argument("--child", type=Path, nargs=2, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        print(json.dumps(import_it(*chosen.child)))
        return 0

    from _rows import record, row, show

    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "clicks.csv"
        write(path, chosen.rows)
        command = [sys.executable, __file__, "--child", str(path), str(Path(temporary) / "store")]
        output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        measured = json.loads(output.splitlines()[-1])
        facts = {"rows": chosen.rows, "bytes": path.stat().st_size, "columns": 8, "memory_mib": 1024}
    if measured["code"]:
        sys.exit(f"the import failed with code {measured['code']}")
    entries = [
        row("click_import", "csv", "rate", "rows/s", [chosen.rows / measured["seconds"]], facts),
        row("click_import", "csv", "peak memory", "bytes", [measured["peak"]], facts),
    ]
    for entry in entries:
        print(show(entry))
    if chosen.rows == ROWS and not chosen.dry:
        print(f"rows appended to {record(entries).name}")
    if measured["peak"] >= MOST_PEAK:
        print(f"the peak is {measured['peak'] >> 20:,} MiB, not below {MOST_PEAK >> 20:,}")
        return 5
    return 0


if __name__ == "__main__":
    sys.exit(main())
