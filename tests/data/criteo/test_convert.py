"""Conversion: bounded memory, resumable after any kill, clear errors."""

from __future__ import annotations

import errno
import gzip
import os
import signal
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recperf.data.click_store import columns
from recperf.data.criteo import convert, lines, source, synthesize
from recperf.data.criteo.config import CriteoConfig
from recperf.data.criteo.store import CriteoStore, describe
from recperf.errors import ConfigError, DataError, MachineError
from recperf.folders import alone

LINES = 300
SMALL = {"piece": 64, "block": 5000}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "train.txt"
    synthesize.write(path, lines=LINES, seed=3)
    return path


def config(path: Path, cache: str = "cache", **more: Any) -> CriteoConfig:
    return CriteoConfig(path=path, cache=path.parent / cache, rows=(1000,), **more)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != ".recperf"}


def damage(path: Path, line: int, text: bytes) -> None:
    every = path.read_bytes().split(b"\n")
    every[line - 1] = text
    path.write_bytes(b"\n".join(every))


def test_arrays_hold_the_lines_of_the_log(log: Path) -> None:
    store = CriteoStore.open(config(log))
    read = [lines.read(line) for line in log.read_bytes().splitlines()]
    rows = store.read(0, LINES)
    assert rows.labels_N.tolist() == [line.label for line in read if isinstance(line, lines.Line)]
    missing = [[value is None for value in line.categories] for line in read if isinstance(line, lines.Line)]
    assert (rows.ids_NS == 0).tolist() == missing
    assert rows.ids_NS.max() < 1000
    assert rows.dense_ND.min() == 0.0


@pytest.mark.parametrize(("piece", "block"), [(31, 300), (64, 5000), (50, 100_000), (1000, 17)])
def test_blocks_and_packing_do_not_show_in_the_arrays(log: Path, piece: int, block: int) -> None:
    whole = convert.convert(config(log), piece=piece)
    packed = log.parent / "packed" / "train.txt.gz"
    packed.parent.mkdir()
    half = log.read_bytes()[:20_000]
    packed.write_bytes(gzip.compress(half) + gzip.compress(log.read_bytes()[20_000:]) + b"\0" * 512)
    other = convert.convert(config(packed), piece=piece, block=block)
    for index, name in ((0, "dense"), (0, "ids"), (0, "labels")):
        file = columns.column_name(index, name)
        assert (whole.folder / file).read_bytes() == (other.folder / file).read_bytes()
    assert whole.manifest["digest"] == other.manifest["digest"]
    assert whole.rows == other.rows == LINES


def test_a_conversion_is_made_once(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = convert.convert(config(log))
    monkeypatch.setattr(convert, "_Converter", None)
    assert convert.convert(config(log)).manifest == first.manifest
    assert convert.convert(config(log, holdout=0.4)).folder == first.folder


def test_another_source_or_setting_makes_another(log: Path) -> None:
    first = convert.convert(config(log))
    assert convert.convert(CriteoConfig(path=log, cache=log.parent / "cache", rows=(999,))).folder != first.folder
    assert convert.convert(config(log, hash_seed=1)).folder != first.folder
    before = log.stat()
    text = bytearray(log.read_bytes())
    at = text.index(b"\n0\t") + 1
    text[at : at + 1] = b"1"
    log.write_bytes(bytes(text))
    os.utime(log, ns=(before.st_atime_ns, before.st_mtime_ns))
    changed = convert.convert(config(log))
    assert changed.folder != first.folder
    assert changed.manifest["digest"] != first.manifest["digest"]


def die_at(name: str, call: int) -> Callable[[], None]:
    def arm() -> None:
        original, seen = getattr(os, name), 0

        def dying(*arguments: Any, **named: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **named)

        setattr(os, name, dying)

    return arm


def killed(arm: Callable[[], None], settings: CriteoConfig) -> bool:
    """Convert in a child that dies without warning; whether it did."""
    child = os.fork()
    if not child:
        try:
            arm()
            convert.convert(settings, **SMALL)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("packed", [True, pytest.param(False, marks=pytest.mark.long)])
def test_killed_anywhere_it_resumes_with_the_same_bytes(tmp_path: Path, packed: bool) -> None:
    for day in range(2):
        synthesize.write(tmp_path / f"day_{day}", lines=LINES, seed=3, day=day, packed=packed)
        damage_packed(tmp_path / f"day_{day}", packed)
    settings = CriteoConfig(path=tmp_path, cache=tmp_path / "whole", on_error="skip")
    whole = convert.convert(settings, **SMALL)
    deaths = 0
    for name, calls in (("fsync", range(1, 60, 4)), ("replace", range(1, 14))):
        for call in calls:
            again = CriteoConfig(path=tmp_path, cache=tmp_path / f"{name}-{call}", on_error="skip")
            deaths += killed(die_at(name, call), again)
            resumed = convert.convert(again, **SMALL)
            assert content(resumed.folder) == content(whole.folder)
    assert deaths > 20
    assert whole.skipped == {"columns": 2}


def damage_packed(path: Path, packed: bool) -> None:
    text = gzip.decompress(path.read_bytes()) if packed else path.read_bytes()
    every = text.split(b"\n")
    every[100] = b"nothing"
    path.write_bytes(gzip.compress(b"\n".join(every), mtime=0) if packed else b"\n".join(every))


def test_a_full_disk_is_an_error_and_can_be_resumed(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = convert.convert(config(log, "whole"), **SMALL)
    original, calls = os.fsync, 0

    def full(handle: int) -> None:
        nonlocal calls
        calls += 1
        if calls > 7:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(handle)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(MachineError, match="the disk is full") as caught:
            convert.convert(config(log), **SMALL)
    assert "it resumes" in str(caught.value.fix)
    assert convert.find(config(log)).rows == 64
    assert content(convert.convert(config(log), **SMALL).folder) == content(whole.folder)


def test_too_little_room_is_refused_before_the_work(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("usage", (), {"free": 1000})
    monkeypatch.setattr(convert.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(MachineError, match="KiB are free"):
        convert.convert(config(log), **SMALL)


def test_a_bad_line_is_named(log: Path) -> None:
    damage(log, 217, b"1\tx")
    with pytest.raises(DataError, match="line 217 is malformed: 2 columns instead of 40") as caught:
        convert.convert(config(log), **SMALL)
    assert caught.value.where["file"] == str(log)
    assert caught.value.where["line"] == "217"


def test_skipping_counts_and_remembers(log: Path) -> None:
    good = log.read_bytes().split(b"\n")
    damage(log, 2, b"1\tx")
    damage(log, 70, b"7" + good[69][1:])
    damage(log, 71, b"\xff" * 10)
    damage(log, 299, b"x" * 50_000)
    conversion = convert.convert(config(log, on_error="skip"), **SMALL)
    assert conversion.skipped == {"length": 1, "encoding": 1, "columns": 1, "label": 1}
    assert [(bad["line"], bad["kind"]) for bad in conversion.first_bad] == [
        (2, "columns"), (70, "label"), (71, "encoding"), (299, "length"),
    ]  # fmt: skip
    assert conversion.rows == LINES - 4
    with pytest.raises(DataError, match="line 2 is malformed"):
        convert.convert(config(log), **SMALL)


def test_after_a_stop_skipping_resumes(log: Path) -> None:
    damage(log, 217, b"1\tx")
    with pytest.raises(DataError):
        convert.convert(config(log), **SMALL)
    assert convert.find(config(log, on_error="skip")).rows == 192
    assert convert.convert(config(log, on_error="skip"), **SMALL).rows == LINES - 1


@pytest.mark.parametrize("fault", ["ends early", "damaged"])
def test_a_broken_gzip_is_named(tmp_path: Path, fault: str) -> None:
    path = tmp_path / "train.txt.gz"
    synthesize.write(path, lines=5000, packed=True)
    content = bytearray(path.read_bytes())
    if fault == "ends early":
        content = content[: len(content) // 2]
    else:
        content[-8] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(
        DataError, match=f"line [0-9,]+ is malformed: the gzip file {'is ' * (fault == 'damaged')}{fault}"
    ):
        convert.convert(config(path))
    conversion = convert.convert(config(path, on_error="skip"))
    assert conversion.skipped == {"gzip": 1}
    assert 1000 < conversion.rows < 5001
    assert conversion.first_bad[0]["line"] == conversion.rows + 1


@pytest.mark.parametrize("packed", [False, True])
def test_memory_does_not_grow_with_the_log(tmp_path: Path, packed: bool) -> None:
    peaks = []
    for count in (4_000, 16_000):
        path = tmp_path / f"{count}.txt"
        synthesize.write(path, lines=count, packed=packed)
        tracemalloc.start()
        convert.convert(config(path), block=1 << 16, piece=1 << 12)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0]
    assert peaks[1] < 4 << 20


def test_a_file_without_line_ends_does_not_fill_memory(tmp_path: Path) -> None:
    path = tmp_path / "train.txt.gz"
    path.write_bytes(gzip.compress(b"0" * (32 << 20)))
    tracemalloc.start()
    with pytest.raises(DataError, match="line 1 is malformed: longer than 4096 bytes"):
        convert.convert(config(path))
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


def test_days_are_read_in_order_and_the_last_validates(tmp_path: Path) -> None:
    for day, count in ((10, 30), (2, 20), (0, 10)):
        synthesize.write(tmp_path / f"day_{day}", lines=count, day=day)
    store = CriteoStore.open(CriteoConfig(path=tmp_path, cache=tmp_path / "cache"))
    assert [part["rows"] for part in store.conversion.parts] == [10, 20, 30]
    assert store.bounds("train") == (0, 30)
    assert store.bounds("valid") == (30, 60)
    assert store.conversion.log.missing_days == [1, 3, 4, 5, 6, 7, 8, 9]
    assert describe(store)["split"] == "last day"
    assert store.click_rate("valid") == store.read(30, 60).labels_N.mean()
    assert np.array_equal(store.read(5, 45).ids_NS, store.read(0, 60).ids_NS[5:45])


def test_what_a_result_says(log: Path) -> None:
    facts = describe(CriteoStore.open(config(log, holdout=0.25)))
    digest = facts.pop("digest")
    assert len(digest) == 64
    assert facts == {
        "name": "criteo-like", "rows": 300, "train_rows": 225, "valid_rows": 75, "split": "last 0.25 of the rows",
        "synthetic": True,
    }  # fmt: skip
    every = log.read_bytes().split(b"\n")
    log.write_bytes(b"\n".join(every[1:]))
    assert describe(CriteoStore.open(config(log)))["name"] == "criteo-kaggle"


def test_paths_that_cannot_be_used(tmp_path: Path, log: Path) -> None:
    with pytest.raises(ConfigError, match="the path of the Criteo click log is missing"):
        source.locate(CriteoConfig())
    with pytest.raises(DataError, match="no such file"):
        source.locate(config(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"no train\.txt and no day_0"):
        source.locate(config(tmp_path / "empty"))
    (tmp_path / "day_0").write_bytes(b"")
    with pytest.raises(DataError, match="both layouts"):
        source.locate(config(tmp_path))
    assert source.locate(config(tmp_path, layout="kaggle")).sources[0].path == log
    (tmp_path / "day_0.gz").write_bytes(b"")
    with pytest.raises(DataError, match="there are both"):
        source.locate(config(tmp_path, layout="terabyte"))


def test_an_empty_log_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_bytes(b"")
    with pytest.raises(DataError, match="0 rows are not enough"):
        CriteoStore.open(config(tmp_path))


@pytest.mark.parametrize("text", ["{", "[]", '{"key": 1}'])
def test_a_damaged_manifest_is_named(log: Path, text: str) -> None:
    conversion = convert.convert(config(log))
    (conversion.folder / convert.MANIFEST).write_text(text)
    with pytest.raises(DataError, match="manifest") as caught:
        convert.convert(config(log))
    assert str(conversion.folder) in str(caught.value.fix)


def test_arrays_that_were_cut_are_not_read(log: Path) -> None:
    conversion = convert.convert(config(log))
    (conversion.folder / columns.column_name(0, "ids")).write_bytes(b"")
    with pytest.raises(DataError, match="another length than its manifest"):
        convert.convert(config(log))


def test_two_at_once_are_refused(log: Path) -> None:
    with (
        alone(convert.find(config(log)).folder, what="converting", ours=".*"),
        pytest.raises(MachineError, match="another process"),
    ):
        convert.convert(config(log))


def test_a_log_that_changes_underway_is_refused(log: Path) -> None:
    def grow(done: int, total: int, rows: int) -> None:
        with log.open("ab") as file:
            file.write(b"\n")

    with pytest.raises(DataError, match=r"changed while it was read|is malformed: empty"):
        convert.convert(config(log), progress=grow, **SMALL)


@pytest.mark.parametrize("name", [*convert.LAYOUT.widths, columns.DIGESTS])
@pytest.mark.parametrize("piece", [64, LINES])
def test_a_flipped_bit_is_found_when_its_piece_is_read(log: Path, name: str, piece: int) -> None:
    """With one piece, an empty one follows it."""
    conversion = convert.convert(config(log), piece=piece)
    width, row = convert.LAYOUT.widths.get(name, 1), 100
    path = conversion.folder / columns.column_name(0, name)
    changed = bytearray(path.read_bytes())
    changed[min(row * width, len(changed) - 1)] ^= 1
    path.write_bytes(changed)
    says = f"the converted log is damaged: {path.name} differs from its checksum"
    if name == columns.DIGESTS:
        with pytest.raises(DataError, match=says):
            CriteoStore(conversion, 0.1)
        return
    store = CriteoStore(conversion, 0.1)
    if piece < row:
        store.read(0, piece)
        store.read(2 * piece, LINES)
        assert store.verified() == {"bytes": (LINES - piece) * convert.ROW_BYTES, "of": LINES * convert.ROW_BYTES}
    for first in (0, row):
        with pytest.raises(DataError, match=f"{says} in block {row // piece} ") as caught:
            store.read(first, row + 1)
    assert caught.value.exit_code == 3


def test_a_line_without_an_end_is_cut_and_can_be_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, polls = tmp_path / "train.txt.gz", []
    path.write_bytes(gzip.compress(b"1\t" * (10 << 20)))
    monkeypatch.setattr(source, "poll", lambda: polls.append(1))
    (block,) = source.blocks(source.examine(path))
    assert (len(block.text), block.span) == (2 * lines.MOST_LINE + 1, 20 << 20)
    assert len(polls) >= (20 << 20) // source.BLOCK
