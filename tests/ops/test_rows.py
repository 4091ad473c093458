"""Both implementations of moving rows, in memory and in files, against numpy and against each other."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recperf.errors import ArgumentError
from recperf.ops.rows import Fault, RecordFault, RecordFiles, Request, native, reference

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
def test_records_longer_than_a_buffer_and_rows_that_the_kernel_does_not_hold(body: Any, files: Any) -> None:
    opened, request = files(70_001, (40,)), Request.of(np.arange(20), np.arange(0, 40, 2))
    written_NW = values(20, 70_001)
    body.write_records(opened, request, written_NW)
    os.fsync(opened.handles[0])
    os.posix_fadvise(opened.handles[0], 0, 0, os.POSIX_FADV_DONTNEED)
    out_NW = np.empty_like(written_NW)
    body.read_records(opened, request, out_NW)
    assert np.array_equal(out_NW, written_NW)


@pytest.mark.parametrize("body", BODIES)
def test_places_and_rows_beyond_32_bits(body: Any, files: Any) -> None:
    """Files with holes stand for large ones; only what is written takes place on the disk."""
    opened = files(513, (6_000_000, 3_000_000))
    request = Request.of(np.array([1 << 33, 7, (1 << 40) + 1]), np.array([8_999_999, 5_999_999, 6_000_000]))
    written_NW, out_NW = values(3, 513), np.empty((3, 513), np.float32)
    body.write_records(opened, request, written_NW)
    body.read_records(opened, request, out_NW)
    assert np.array_equal(out_NW, written_NW)


def test_one_or_two_changed_bits_change_the_checksum() -> None:
    words, bits = values(1, 22).view(np.uint64), np.arange(11 * 64)
    flipped = np.repeat(words, len(bits), axis=0)
    flipped[bits, bits // 64] ^= np.uint64(1) << (bits % 64).astype(np.uint64)
    changed = reference.checksums(np.full(len(bits), 8, np.uint64), flipped)
    others = reference.checksums(np.array([8, 9], np.uint64), np.repeat(words, 2, axis=0))
    # Two flips that gave the same checksum would cancel each other.
    assert len({*changed.tolist(), *others.tolist()}) == len(bits) + 2


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize(
    ("fault", "row"), [(Fault.SHORT, 640), (Fault.EMPTY, 10), (Fault.OTHER_ROW, 11), (Fault.DAMAGED, 650)]
)
def test_a_wrong_record_is_found(body: Any, files: Any, fault: Fault, row: int) -> None:
    opened, request = files(17), Request.of(np.arange(ROWS), np.arange(ROWS))
    body.write_records(opened, request, values(ROWS, 17))
    handle, place, count = opened.handles[0], row * opened.record_bytes, opened.record_bytes
    if fault is Fault.SHORT:
        os.ftruncate(handle, place + 9)
    elif fault is Fault.EMPTY:
        os.pwrite(handle, bytes(count), place)
    elif fault is Fault.OTHER_ROW:
        os.pwrite(handle, os.pread(handle, count, place + count), place)
    else:
        os.pwrite(handle, bytes([os.pread(handle, 1, place + 50)[0] ^ 1]), place + 50)
    with pytest.raises(RecordFault) as caught:
        body.read_records(opened, request, np.empty((ROWS, 17), np.float32))
    assert (caught.value.fault, caught.value.row) == (fault, row)


@pytest.mark.parametrize("body", BODIES)
def test_what_would_leave_the_tables_is_refused(body: Any, files: Any) -> None:
    table_RW, opened = values(5, 2), files(2, (5,))
    for rows_N in (np.array([0, 5]), np.array([-1, 2])):
        for call in (body.gather, body.scatter):
            with pytest.raises(ArgumentError, match="allowed: 0 to 4"):
                call(table_RW, rows_N, values(2, 2))
        for call in (body.read_records, body.write_records):
            with pytest.raises(ArgumentError, match="allowed: 0 to 4"):
                call(opened, Request.of(np.arange(2), rows_N), values(2, 2))
    with pytest.raises(ArgumentError, match="ascending order"):
        body.read_records(opened, Request(np.arange(2), np.array([3, 2]), np.arange(2)), values(2, 2))
    with pytest.raises(ArgumentError, match="there is one twice"):
        body.write_records(opened, Request.of(np.arange(2), np.array([3, 3])), values(2, 2))
    with pytest.raises(ArgumentError, match="order_N has numbers from 0 to 2"):
        body.read_records(opened, Request(np.arange(2), np.array([2, 3]), np.array([0, 2])), values(2, 2))
