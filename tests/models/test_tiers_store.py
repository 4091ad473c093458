"""Stores of rows in host memory and in files, faults of a disk, and where tables are placed by what fits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recperf.errors import ArgumentError, ConfigError, DataError, MachineError
from recperf.models.tiers.config import TablesConfig, decide
from recperf.models.tiers.store import FileRows, HostRows, RowStore
from recperf.ops.rows import native

TABLES = {"item": 500, "a/../b\x1b[2J" + "é" * 300: 3, "": 200}
ROWS, WIDTH = sum(TABLES.values()), 17
IMPLEMENTATIONS = ["reference", "native"]


@pytest.fixture(params=IMPLEMENTATIONS)
def impl(request: pytest.FixtureRequest) -> Any:
    if request.param == "native" and isinstance(native.library(), str):
        pytest.skip(str(native.library()))
    return request.param


@pytest.fixture
def filed(tmp_path: Path, impl: Any) -> Any:
    store = FileRows(tmp_path, TABLES, WIDTH, impl=impl)
    yield store
    store.close()


def fill(store: RowStore) -> Any:
    values_RW = np.random.default_rng(0).standard_normal((store.rows, store.width), np.float32)
    store.write(np.arange(store.rows), values_RW)
    return values_RW


@pytest.mark.parametrize("kind", ["host", "file"])
def test_a_store_holds_what_was_written_last(kind: str, impl: Any, tmp_path: Path) -> None:
    store: RowStore = (
        HostRows(ROWS, WIDTH, impl=impl) if kind == "host" else FileRows(tmp_path, TABLES, WIDTH, impl=impl)
    )
    draw, expected = np.random.default_rng(1), np.zeros((ROWS, WIDTH), np.float32)
    written_R = np.zeros(ROWS, bool)
    for _ in range(20):
        rows_N = draw.permutation(ROWS)[: draw.integers(0, 90)]
        expected[rows_N] = draw.standard_normal((len(rows_N), WIDTH), np.float32)
        written_R[rows_N] = True
        store.write(rows_N, expected[rows_N])
        assert np.array_equal(store.written(np.arange(ROWS)), written_R)
        rows_N = draw.choice(np.flatnonzero(written_R), 64) if written_R.any() else rows_N
        out_NW = np.full((len(rows_N), WIDTH), np.nan, np.float32)
        store.read(rows_N, out_NW)
        assert np.array_equal(out_NW, expected[rows_N])
    unwritten = np.flatnonzero(~written_R)[:1]
    with pytest.raises(ValueError, match=f"row {unwritten[0]} was never written"):
        store.read(unwritten, np.empty((1, WIDTH), np.float32))
    with pytest.raises(ArgumentError, match="contiguous float32 of shape"):
        store.read(unwritten, np.empty((1, WIDTH + 1), np.float32))
    with pytest.raises(ArgumentError, match="contiguous int64"):
        store.write(unwritten.astype(np.int32), np.empty((1, WIDTH), np.float32))
    with pytest.raises(ArgumentError, match="a row twice"):
        store.write(np.repeat(unwritten, 2), np.empty((2, WIDTH), np.float32))
    with pytest.raises(ArgumentError, match=f"allowed: 0 to {ROWS - 1}"):
        store.write(np.array([ROWS]), np.empty((1, WIDTH), np.float32))
    store.close()
    store.close()


def test_untouched_rows_take_neither_memory_nor_disk(tmp_path: Path) -> None:
    rows, width = 3 << 20, 257  # 3 GiB
    host, filed = HostRows(rows, width), FileRows(tmp_path, {"item": rows}, width)
    assert filed.paths[0].stat().st_blocks == 0
    rows_N, values_NW = np.array([rows - 1, 5]), np.ones((2, width), np.float32)
    for store in (host, filed):
        store.write(rows_N, values_NW)
        out_NW = np.zeros((2, width), np.float32)
        store.read(rows_N, out_NW)
        assert out_NW.all()
    assert filed.paths[0].stat().st_size == 2 * filed._files.record_bytes
    host.close()
    filed.close()


def test_records_that_are_not_what_was_written(filed: FileRows) -> None:
    """Changed, exchanged, empty, and beyond the end of a file that became shorter."""
    fill(filed)
    count = filed._files.record_bytes
    content = bytearray(filed.paths[0].read_bytes())
    content[7 * count + 30] ^= 4
    content[20 * count : 21 * count] = content[21 * count : 22 * count]
    content[40 * count : 41 * count] = bytes(count)
    filed.paths[0].write_bytes(content[: 499 * count])
    out_NW = np.empty((1, WIDTH), np.float32)
    for row, fault, intact in (
        (7, "is damaged: its checksum does not match", 8),
        (20, "is missing: its place in the file holds another row", 21),
        (40, "is missing: its place in the file is empty", 41),
        (499, "is missing: its file became shorter", 500),
    ):
        with pytest.raises(DataError, match=f"row {row} of table 'item' {fault}") as caught:
            filed.read(np.array([row]), out_NW)
        assert caught.value.where == {"file": str(filed.paths[0])}
        filed.read(np.array([intact]), out_NW)


def test_a_full_disk_loses_nothing_that_was_written(filed: FileRows) -> None:
    values_RW = fill(filed)
    kept = os.dup(filed._files.handles[2])
    full = os.open("/dev/full", os.O_RDWR)
    os.dup2(full, filed._files.handles[2])
    with pytest.raises(MachineError, match="row 0 of table '' cannot be written: the disk is full") as caught:
        filed.write(np.array([503, 9]), np.zeros((2, WIDTH), np.float32))
    assert "free" in caught.value.where
    os.dup2(kept, filed._files.handles[2])
    os.close(kept)
    os.close(full)
    filed.write(np.array([9]), values_RW[[9]])
    out_RW = np.empty_like(values_RW)
    filed.read(np.arange(ROWS), out_RW)
    assert np.array_equal(out_RW, values_RW)


GIB = 1 << 30


@pytest.mark.parametrize(
    ("placement", "needed", "device", "expected"),
    [
        ("auto", 40, "cuda", "device"),
        ("auto", 90, "cuda", "host"),
        ("auto", 559, "cuda", "file"),
        ("host", 40, "cuda", "host"),
        ("auto", 40, "cpu", "device"),
        ("auto", 559, "cpu", "file"),
        ("host", 40, "cpu", "device"),
    ],
)
def test_auto_takes_the_first_that_fits(placement: str, needed: int, device: str, expected: str) -> None:
    config = TablesConfig(placement=placement)
    free = {"device_free": 60 * GIB if device == "cuda" else 120 * GIB, "host_free": 120 * GIB}
    tiers = decide(config, needed * GIB, device=device, **free)
    assert tiers.placement == expected
    assert tiers.why.startswith(expected)
    assert 0 < tiers.cache_bytes <= needed * GIB


def test_the_cache_is_as_large_as_requested() -> None:
    config = TablesConfig(device_bytes="40GiB", resident="2GiB")
    assert decide(config, 90 * GIB, device="cuda", device_free=130 * GIB, host_free=120 * GIB).cache_bytes == 40 * GIB
    assert decide(config, 90 * GIB, device="cpu", device_free=9 * GIB, host_free=9 * GIB).cache_bytes == 2 * GIB
    with pytest.raises(ConfigError, match=r"tables\.resident is 'much'"):
        TablesConfig(resident="much")


def test_a_cache_larger_than_the_free_memory_of_the_card_is_refused() -> None:
    free = {"device": "cuda", "device_free": 60 * GIB, "host_free": 120 * GIB}
    for placement in ("auto", "host", "file"):
        with pytest.raises(MachineError, match=r"device_bytes is 70 GiB, 60 GiB of the GPU are free"):
            decide(TablesConfig(placement=placement, device_bytes="70GiB"), 90 * GIB, **free)
    # The rest of a step is only estimated.
    assert decide(TablesConfig(device_bytes="50GiB"), 90 * GIB, **free, others=20 * GIB).cache_bytes == 50 * GIB
    # What does not fit into 9 tenths of the card lies elsewhere, however large the cache may be.
    assert decide(TablesConfig(device_bytes="70GiB"), 58 * GIB, **free).placement == "host"
