"""Imports hold their memory and stop at once for any distribution of users, items and times."""

from __future__ import annotations

import gzip
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from recperf.data.events import imports, negatives
from recperf.data.events.imports import import_events
from recperf.data.events.kinds import DRAWN
from recperf.data.events.options import ImportOptions
from recperf.data.events.store import EventStore, open_store, verify

LIMIT_MIB = 64
BASE_MIB = 240
"""The interpreter, its libraries, what DuckDB does not count, and rows on their way: it does not grow with the file."""
IMPORT = """
import sys
from pathlib import Path
from recperf.data.events.options import ImportOptions
from recperf.data.events.imports import import_events
path = Path(sys.argv[1])
import_events(ImportOptions(events=path, memory_mib=int(sys.argv[2])), path.parent / "store")
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
"""


def one_user(path: Path, rows: int) -> Path:
    """One user, one item and one time."""
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b"user,item,timestamp\n")
        for _ in range(rows >> 14):
            file.write(b"1,2,1000000000\n" * (1 << 14))
    return path


def test_a_huge_user_is_imported_within_the_memory_limit(tmp_path: Path) -> None:
    """What was held of a user took 500 bytes an event: 130 MB here."""
    path = one_user(tmp_path / "log.csv.gz", 1 << 18)
    command = [sys.executable, "-c", IMPORT, str(path), str(LIMIT_MIB)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert int(out) >> 10 < LIMIT_MIB + BASE_MIB
    assert open_store(tmp_path / "store").events == 1 << 18


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), pytest.param(signal.SIGINT, 130, marks=pytest.mark.long)]
)
def test_an_import_of_a_huge_user_stops_at_once_and_leaves_nothing(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    path = one_user(tmp_path / "log.csv.gz", 1 << 18)
    command = [sys.executable, "-m", "recperf", "data", "import", str(path), "--store", str(tmp_path / "store")]
    environment = {**os.environ, "RECPERF_HOME": str(tmp_path / "home")}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    items = tmp_path / "store.building" / "items.u4"
    until = time.monotonic() + 120
    while process.poll() is None and not (items.exists() and items.stat().st_size) and time.monotonic() < until:
        time.sleep(0.01)
    assert process.poll() is None, "it ended before it was stopped"
    used = cpu_seconds(process.pid)
    process.send_signal(number)
    while process.poll() is None:
        last = cpu_seconds(process.pid)
        time.sleep(0.005)
    _, messages = process.communicate()
    # Time of the processor: other processes may use it too.
    assert max(0.0, last - used) < 2
    assert process.returncode == code, messages
    assert sorted(one.name for one in tmp_path.iterdir() if one.name != "home") == ["log.csv.gz"]


def cpu_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def imported(folder: Path, lines: str, name: str, **options: object) -> EventStore:
    path = folder / f"{name}.csv"
    path.write_text(f"user_id,item_id,ts\n{lines}")
    store = open_store(import_events(ImportOptions(events=path, negatives=3, **options), folder / name))  # type: ignore[arg-type]
    verify(store)
    return store


@pytest.mark.parametrize("by", ["uniform", "popularity"])
@pytest.mark.parametrize(
    ("users", "items", "times"), [(1, 700, 2000), (40, 1, 500), (4, 900, 1), (30, 25, 9)],
    ids=["one user", "one item", "one time", "nearly every item"],
)  # fmt: skip
def test_parts_of_users_give_what_whole_ones_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, users: int, items: int, times: int, by: str
) -> None:
    random = np.random.default_rng(3)
    columns = (random.integers(0, most, 5000) for most in (users, items, times))
    lines = "".join(f"{user},{item},{time}\n" for user, item, time in zip(*columns))
    whole = imported(tmp_path, lines, "whole", negatives_by=by)
    monkeypatch.setattr(imports, "_BATCH_ROWS", 2048)
    monkeypatch.setattr(negatives, "_AT_ONCE", 700)
    parts = imported(tmp_path, lines, "parts", negatives_by=by)
    assert parts.digest == whole.digest
    assert parts.imported.negatives == whole.imported.negatives
    # None is an item that the user had by then, ties included; each that was left out had none to draw.
    rows = slice(0, whole.events)
    drawn, times_E, items_E = (whole.kinds(rows) & DRAWN) > 0, whole.times_E[rows], whole.items_at(rows)
    users_E = whole.users_of(np.arange(whole.events))
    since: dict[tuple[int, int], int] = {}
    for user, item, at in zip(users_E[~drawn].tolist(), items_E[~drawn].tolist(), times_E[~drawn].tolist()):
        since.setdefault((user, item), at)
    for user, item, at in zip(users_E[drawn].tolist(), items_E[drawn].tolist(), times_E[drawn].tolist()):
        assert since.get((user, item), at + 1) > at
    had = {}
    for (user, _), at in since.items():
        had.setdefault(user, []).append(at)
    left = sum(
        3 for user, at in zip(users_E[~drawn].tolist(), times_E[~drawn].tolist())
        if sum(one <= at for one in had[user]) == items
    )  # fmt: skip
    assert whole.imported.negatives is not None
    assert whole.imported.negatives.left_out == left
