"""Both implementations of moving rows, in memory and in files, against numpy and against each other."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recperf.ops.rows import RecordFiles, Request, native, reference

BODIES = [pytest.param(reference, id="reference"), pytest.param(native, id="native")]
WIDTHS = [1, 3, 17, 513]
TABLES = (700, 1, 299)
ROWS = sum(TABLES)


@pytest.fixture(autouse=True)
def _compiled(native_code: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several threads and waits for the disk also in small calls."""
    monkeypatch.setattr(native, "SMALL", 1 << 10)
    monkeypatch.setattr(native, "_cores", lambda: 3)


@pytest.fixture
def files(tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    """A function that opens empty files of records."""
    opened: list[int] = []

    def open_files(width: int, tables: tuple[int, ...] = TABLES) -> RecordFiles:
        starts_T1 = np.cumsum([0, *tables])
        handles = [os.open(tmp_path / f"{len(opened)}-{at}", os.O_RDWR | os.O_CREAT) for at in range(len(tables))]
        opened.extend(handles)
        result = RecordFiles(tuple(handles), starts_T1, width)
        for handle, count in zip(handles, tables):
            os.ftruncate(handle, count * result.record_bytes)
        return result

    yield open_files
    for handle in opened:
        os.close(handle)


def values(count: int, width: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal((count, width), np.float32)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("body", BODIES)
def test_rows_in_memory(body: Any, width: int) -> None:
    draw, table_RW = np.random.default_rng(width), values(ROWS, width)
    rows_N = draw.integers(0, ROWS, 1500)
    out_NW = np.full((1500, width), np.nan, np.float32)
    body.gather(table_RW, rows_N, out_NW)
    assert np.array_equal(out_NW, table_RW[rows_N])
    rows_N, new_NW = draw.permutation(ROWS)[:333], values(333, width, seed=1)
    expected_RW = table_RW.copy()
    expected_RW[rows_N] = new_NW
    body.scatter(table_RW, rows_N, new_NW)
    assert np.array_equal(table_RW, expected_RW)
    none_N, none_NW = np.empty(0, np.int64), np.empty((0, width), np.float32)
    body.gather(table_RW, none_N, none_NW)
    body.scatter(table_RW, none_N, none_NW)
    assert np.array_equal(table_RW, expected_RW)


PLACES = {
    "all": np.arange(ROWS),
    "none": np.empty(0, np.int64),
    "first and last of every file": np.array([0, 699, 700, 701, 999]),
    "runs and gaps": np.flatnonzero(np.arange(ROWS) % 7 < 3),
    "random": np.random.default_rng(5).permutation(ROWS)[:400],
}


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("width", WIDTHS)
def test_records_are_the_same_bytes_in_both(files: Any, width: int, name: str) -> None:
    places_N, sides = PLACES[name], []
    rows_N = np.random.default_rng(3).permutation(len(places_N)) * 1000
    written_NW = values(len(rows_N), width)
    for body in (reference, native):
        opened = files(width)
        body.write_records(opened, Request.of(rows_N, places_N), written_NW)
        sides.append((opened, [os.pread(handle, 1 << 24, 0) for handle in opened.handles]))
    assert sides[0][1] == sides[1][1]
    for (opened, _), body in zip(sides, (native, reference)):
        out_NW = np.full_like(written_NW, np.nan)
        body.read_records(opened, Request.of(rows_N, places_N), out_NW)
        assert np.array_equal(out_NW, written_NW)
        twice_N = np.random.default_rng(4).permutation(np.repeat(np.arange(len(rows_N)), 2))
        out_NW = np.full((len(twice_N), width), np.nan, np.float32)
        body.read_records(opened, Request.of(rows_N[twice_N], places_N[twice_N]), out_NW)
        assert np.array_equal(out_NW, written_NW[twice_N])


@pytest.mark.parametrize("body", BODIES)
def test_places_and_rows_beyond_32_bits(body: Any, files: Any) -> None:
    """Files with holes stand for large ones; only what is written takes place on the disk."""
    opened = files(513, (6_000_000, 3_000_000))
    request = Request.of(np.array([1 << 33, 7, (1 << 40) + 1]), np.array([8_999_999, 5_999_999, 6_000_000]))
    written_NW, out_NW = values(3, 513), np.empty((3, 513), np.float32)
    body.write_records(opened, request, written_NW)
    body.read_records(opened, request, out_NW)
    assert np.array_equal(out_NW, written_NW)
