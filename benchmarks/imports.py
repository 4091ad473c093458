"""`recperf data import` of made-up files: time, CPU time and peak memory, beside DuckDB's own read of the same file.

- shop: 1,000,000 events of 8 columns: user, item, time, rating, and title, kind, price and channel
- movielens: 20,000,000 ratings of 138,000 users and 27,000 items, as many as MovieLens 20M has
- criteo: 300,000 lines of a label, 13 numbers and 26 categories, with tabs between them
- clicks: 10,000,000 rows: a user (a million), an ad, a city, a device, an age, a price, a time and a label

Each import and each read runs in a process of its own; its peak is the resident memory that the kernel counted at its
end. `load` is that of the machine before the first one: where other work runs, CPU time says more than time.

Run as `python benchmarks/imports.py [--cases shop criteo] [--dry]`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from time import monotonic
from typing import Any

ROWS = {"shop": 1_000_000, "movielens": 20_000_000, "criteo": 300_000, "clicks": 10_000_000}
PIECE = 1_000_000
OPTIONS = {
    "shop": [],
    "movielens": [],
    "criteo": ["--clicks"],
    "clicks": [
        *("--clicks", "--label", "clicked", "--categorical", "user,ad,city,device", "--numeric", "age,price"),
        *("--time", "ts"),
    ],
}


def write_case(case: str, path: Path) -> None:
    """Write a file of made-up rows."""
    if case == "clicks":
        write_clicks(path, ROWS[case])
        return
    import duckdb

    item = "(hash(i * 7 + 1) % 20000)"
    selected, options = "", "HEADER"
    if case == "shop":
        selected = f"""'u' || (hash(i) % 60000) AS "user", 'p' || {item} AS item, 1700000000 + hash(i * 3) % 20000000 AS
            time, 1 + hash(i * 5) % 5 AS rating, 'Title ' || {item} AS title, 'kind' || ({item} % 40) AS kind,
            ({item} % 997) / 4 AS price, 'ch' || (hash(i * 11) % 6) AS channel"""
    elif case == "movielens":
        selected = """1 + hash(i) % 138000 AS userId, 1 + (pow((hash(i * 7 + 1) % 1000000) / 1e6, 3) * 26999)::INT AS
            movieId, 0.5 * (1 + hash(i * 5) % 10) AS rating, 1100000000 + hash(i * 3) % 300000000 AS timestamp"""
    else:
        options = "HEADER false, DELIMITER '\t'"
        power = "pow((hash(i * {k} + 1) % 100000) / 1e5, {p}) * {most}"
        numbers = (power.format(k=k, p=4, most=10 ** (1 + k % 5)) for k in range(1, 14))
        texts = (power.format(k=k, p=3, most=10 ** (1 + k % 6)) for k in range(20, 46))
        columns = [f"CASE WHEN hash(i * {at}) % 5 > 0 THEN ({one})::INT END" for at, one in enumerate(numbers, 50)]
        hexadecimal = "lpad(printf('%x', (hash(({0})::INT * {1}) % 4294967296)::BIGINT), 8, '0')"
        columns += [
            f"CASE WHEN hash(i * {at}) % 9 > 0 THEN {hexadecimal.format(one, at)} END"
            for at, one in enumerate(texts, 70)
        ]
        selected = ", ".join(["(hash(i) % 4 = 0)::INT", *columns])
    duckdb.connect().execute(f"COPY (SELECT {selected} FROM range({ROWS[case]}) t(i)) TO '{path}' ({options})")


def write_clicks(path: Path, rows: int) -> None:
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


def measured(case: str, path: Path, folder: Path, *, by_duckdb: bool) -> dict[str, Any]:
    """Import or read in this process, which does nothing else."""
    began, code = monotonic(), 0
    if by_duckdb:
        import duckdb

        with duckdb.connect() as connection:
            for setting in (f"temp_directory = '{folder}'", "memory_limit = '512 MiB'"):
                connection.execute(f"SET {setting}")
            delimited = "delim = '\t', header = false, " if case == "criteo" else ""
            connection.execute(f"CREATE TABLE rows AS FROM read_csv('{path}', {delimited}all_varchar = true)")
    else:
        from recperf.cli import main

        code = main(["data", "import", str(path), *OPTIONS[case], "--store", str(folder), "--quiet"])
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu, peak = used.ru_utime + used.ru_stime, used.ru_maxrss << 10
    return {"code": code, "time": monotonic() - began, "CPU time": cpu, "peak memory": peak}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=ROWS, default=[*ROWS])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dry", action="store_true", help="measure and print, but record nothing")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        case, path, folder, by = chosen.child
        print(json.dumps(measured(case, Path(path), Path(folder), by_duckdb=by == "duckdb")))
        return 0

    from _rows import record, row, show

    entries = []
    for case in chosen.cases:
        with tempfile.TemporaryDirectory() as temporary:
            path = Path(temporary) / ("rows.tsv" if case == "criteo" else "rows.csv")
            write_case(case, path)
            load = round(os.getloadavg()[0], 1)
            facts = {"rows": ROWS[case], "bytes": path.stat().st_size, "memory_mib": 1024, "load": load}
            answers: dict[str, list[dict[str, Any]]] = {"recperf": [], "duckdb": []}
            for turn in range(chosen.rounds):
                for by, measurements in answers.items():
                    command = [sys.executable, __file__, "--child", case, str(path), f"{temporary}/{by}{turn}", by]
                    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
                    measurements.append(json.loads(output.splitlines()[-1]))
                    if measurements[-1]["code"]:
                        sys.exit(f"the import of {case} failed with code {measurements[-1]['code']}")
        for by, measurements in answers.items():
            for metric, unit in (("time", "s"), ("CPU time", "s"), ("peak memory", "bytes")):
                values = [float(one[metric]) for one in measurements]
                entries.append(row("imports", f"{case} {by}", metric, unit, values, facts))
                print(show(entries[-1]))
    if not chosen.dry:
        print(f"rows appended to {record(entries).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
