"""Known failures on public data: what the free sentence of a run and `recperf diagnose` say of them, and what the
advice gains.

    python benchmarks/public_quality.py --ratings ml-100k/u.data --beauty Beauty.txt [--only TEXT] [--minutes N]
        [--to FILE]
    python benchmarks/public_quality.py --rows FILE

Settings made for billions of events on a small log, HSTU blocks on users with few events, a deep transformer with a
sampled softmax, and NDCG@10 among drawn items. Each case runs `recperf run` and `recperf diagnose` as commands, on a
part of the users, so that two cores manage. Exit 5 where a limit is not named by either. With --to, rows are appended
to a file when they end, and cases that it has are not run again; --rows stores such a file. `--beauty` has a user and
the items in their order in each line.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _rows import record, row, show

GATE_MISSED = 5
FIRST, DAY = 1_400_000_000, 86_400
Line = tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    data: str
    """ratings, as labels or as items that were taken; or beauty."""
    workload: str
    users: int
    expected: tuple[str, ...]
    """Limits that explain it."""
    options: tuple[str, ...]
    minutes: float
    """The budget of its experiments."""


PUBLISHED = (
    *("--train.learning-rate", "1e-6", "--train.table-learning-rate", "1e-6", "--train.warmup-steps", "24000"),
    *("--train.epochs", "1", "--train.weight-decay", "0", "--train.final-rate", "1", "--model.token-scale", "0"),
    *("--model.position-std", "0", "--model.recent", "0", "--model.rates-hidden", "0"),
)
ALONE = ("--model.counts", "off", "--train.patience", "3", "--train.threads", "1")
CASES = (
    Case(
        name="dlrm-v4, published rates and warm-up, ML-100K", data="labels", workload="dlrm-v4", users=150,
        expected=("rate",), options=PUBLISHED, minutes=12,
    ),
    Case(
        name="hstu blocks, Amazon Beauty", data="beauty", workload="hstu", users=3000,
        expected=("overfit", "complement", "data", "unseen"), options=(*ALONE, "--train.epochs", "15"), minutes=6,
    ),
    Case(
        name="transformer of 8 blocks, sampled softmax, ML-100K", data="items", workload="next-item", users=300,
        expected=("rate", "negatives", "popularity", "steps"), minutes=6,
        options=(
            *ALONE, "--train.epochs", "6", "--model.encoder", "transformer", "--model.blocks", "8",
            "--model.loss", "sampled", "--model.dim", "32", "--model.max-length", "50",
        ),
    ),
)  # fmt: skip


def lines_of(case: Case, ratings: Path, beauty: Path) -> Iterator[Line]:
    """The columns of a file to import, with their names first."""
    yield ("user", "item", "time", "label") if case.data == "labels" else ("user", "item", "time")
    if case.data == "beauty":
        for number, line in enumerate(beauty.read_text().splitlines()[: case.users]):
            user, *items = line.split()
            yield from ((user, item, FIRST + DAY * place + number) for place, item in enumerate(items))
        return
    for line in ratings.read_text().splitlines():
        person, taken, rating, time = map(int, line.split("\t"))
        if person <= case.users:
            yield (person, taken, time, int(rating >= 4)) if case.data == "labels" else (person, taken, time)


def command(folder: Path, *words: str) -> Any:
    """What a command prints as JSON."""
    environment = {**os.environ, "RECPERF_HOME": str(folder / "home")}
    line = [sys.executable, "-m", "recperf", *words, "--json"]
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in (0, GATE_MISSED):
        sys.exit(f"{' '.join(words[:3])}: {done.stderr.strip()[-600:]}")
    return json.loads(done.stdout)


def judged(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder, minutes = Path(name), options.minutes or case.minutes
        with (folder / "log.csv").open("w") as file:
            csv.writer(file).writerows(lines_of(case, options.ratings, options.beauty))
        split = "time" if case.data == "labels" else "leave-one-out"
        command(folder, "data", "import", "log.csv", "--name", "log", "--split", split)
        run = command(folder, "run", case.workload, "--data", "log", "--run-dir", "run", *case.options)
        found = command(folder, "diagnose", "run", "--minutes", f"{minutes:g}")
    free, verdict, advised = run["quality"]["limit"], found["verdict"], found["advised"]
    print(f"{case.name}: {free['limit']}; {verdict['limit']} ({verdict['confidence']}) {found['advice']}", flush=True)
    facts = {
        "case": case.name, "users": case.users, "options": " ".join(case.options), "expected": case.expected,
        "free": free["limit"], "free because": free["because"], "limit": verdict["limit"],
        "confidence": verdict["confidence"], "because": verdict["because"], "advice": found["advice"],
        "metric": found["metric"], "score": found["score"], "best": found["best"], "advised": advised,
        "baseline": found["baseline"], "baseline_name": found["baseline_name"], "minutes": minutes,
        "seconds": found["seconds"], "left_out": found["left_out"],
    }  # fmt: skip
    named = verdict["limit"] in case.expected or free["limit"] in case.expected
    return row("public_quality", case.name, "named", "case", [float(named)], facts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ratings", type=Path, help="u.data of MovieLens-100K")
    parser.add_argument("--beauty", type=Path, help="sequences of Amazon Beauty")
    parser.add_argument("--only", default="", help="cases whose name contains this text")
    parser.add_argument("--minutes", type=float, help="budget of the experiments of each case")
    parser.add_argument("--to", type=Path, metavar="FILE", help="append each row to this file, and store none")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="store the rows of such a file")
    parser.add_argument("--dry", action="store_true", help="store no rows")
    options = parser.parse_args()
    file = options.rows or options.to
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file and file.exists() else []
    done = {one["variant"] for one in rows}
    for case in () if options.rows else CASES:
        if options.only in case.name and case.name not in done:
            if options.ratings is None or options.beauty is None:
                parser.error("--ratings and --beauty are needed")
            rows.append(judged(case, options))
            if options.to:
                with options.to.open("a") as into:
                    into.write(json.dumps(rows[-1]) + "\n")
    print("\n".join(map(show, rows)))
    if rows and not options.dry and not options.to:
        print(f"rows in {record(rows)}")
    return 0 if all(one["p50"] for one in rows) else 5


if __name__ == "__main__":
    sys.exit(main())
