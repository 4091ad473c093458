"""The MLPerf log: its content, and that kills, resumes and disk faults never change it."""

from __future__ import annotations

import errno
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from recperf.errors import DataError, MachineError
from recperf.runs.mlperf.check import verdict
from recperf.runs.mlperf.log import MLPerfLog

ONCE = (
    "cache_clear", "init_start", "init_stop", "run_start", "run_stop", "train_samples", "eval_samples", "seed",
    "global_batch_size", "submission_benchmark", "config_filename", "micro_batch_size",
)  # fmt: skip
PROLOGUE = 38
"""Lines until training begins."""


def events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in path.read_text().splitlines()]


def timeless(path: Path) -> list[tuple[Any, ...]]:
    return [(e["event_type"], e["key"], e["value"], e["metadata"]) for e in events(path)]


@pytest.fixture
def fresh(made: ModuleType, tmp_path: Path) -> MLPerfLog:
    """A log that has just started, of a run with 1,000 samples."""
    log = MLPerfLog(tmp_path / "mlperf.log", made.SUBMISSION)
    log.begin()
    log.start(made.facts(64, train_samples=1000))
    return log


def test_order_of_events_and_sample_counts(write: Callable[..., Path], made: ModuleType) -> None:
    logged = events(write(last=26))
    keys = [event["key"] for event in logged]
    assert keys[:3] == ["cache_clear", "init_start", "submission_benchmark"]
    assert keys.index("global_batch_size") < keys.index("opt_base_learning_rate")
    at = keys.index("init_stop")
    assert keys[at : at + 5] == ["init_stop", "run_start", "train_samples", "eval_samples", "block_start"]
    evaluation = ["block_stop", "eval_start", "eval_accuracy", "eval_stop"]
    assert keys[at + 5 :] == [
        *["train_loss"] * 25, *evaluation, "block_start", "train_loss", *evaluation, "run_stop",
    ]  # fmt: skip
    placed = [event for event in logged if event["key"] in (*evaluation, "block_start", "run_stop")]
    for event in placed:
        samples = event["metadata"]["samples_count"]
        assert samples in (0, 25 * made.interval(8192), 26 * made.interval(8192))
        assert event["metadata"]["epoch_num"] == samples / made.TRAIN
    assert logged[-1]["metadata"]["status"] == "success"
    losses = [event for event in logged if event["key"] == "train_loss"]
    assert losses[1]["value"] == 0.138
    assert losses[1]["metadata"]["samples_count"] == 2 * made.interval(8192)
    assert losses[1]["metadata"]["lr"] == 1e-6 * (2 * made.interval(8192) / 8192 - 1) / 24_000


def test_the_log_does_not_show_where_recperf_is_installed(write: Callable[..., Path]) -> None:
    assert {event["metadata"]["file"] for event in events(write())} == {"recperf/runs/mlperf/log.py"}


def resumed(path: Path, made: ModuleType, saves: list[tuple[int, dict[str, Any]]], last: int) -> None:
    """What the process after a kill does."""
    size = path.stat().st_size
    done, state = next(((b, s) for b, s in reversed(saves) if s["bytes"] <= size), (0, None))
    log = made.begun(path, made.facts(), state)
    made.Training(log, made.facts(), last).go(done)
    log.close()


def test_killed_between_any_two_lines_and_inside_them(made: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "mlperf.log"
    log = made.begun(path, made.facts())
    saves: list[tuple[int, dict[str, Any]]] = []
    # A checkpoint every third block, so that a resume has lines to drop, evaluations among them.
    made.Training(log, made.facts(), 27, lambda b: saves.append((b, log.state())) if b % 3 == 1 else None).go()
    log.close()
    straight, content = timeless(path), path.read_bytes()
    ends = [0, *(index + 1 for index, byte in enumerate(content) if byte == 10)]
    assert len(ends) == len(straight) + 1 > 70
    for index, end in enumerate(ends[::4]):
        for torn in {0, 17} if end < len(content) else {0}:
            path.write_bytes(content[: end + torn])
            resumed(path, made, saves, 27)
            assert timeless(path) == straight
            times = [event["time_ms"] for event in events(path)]
            assert times == sorted(times)
        if index % 6 == 0:
            checked = verdict(path)
            assert checked.passed, checked.failures
        counted = Counter(event["key"] for event in events(path))
        assert [counted[key] for key in ONCE] == [1] * len(ONCE)


def test_the_log_of_a_run_that_never_started_starts_over(made: ModuleType, tmp_path: Path, monkeypatch: Any) -> None:
    log = MLPerfLog(tmp_path / "mlperf.log", made.SUBMISSION)
    log.begin()
    log.close()
    monkeypatch.setattr("time.time", lambda: 4e9)
    log = MLPerfLog(log.path, made.SUBMISSION)
    log.begin()
    assert [(event["key"], event["time_ms"]) for event in events(log.path)] == [
        ("cache_clear", 4_000_000_000_000),
        ("init_start", 4_000_000_000_000),
    ]


def test_a_resumed_run_must_have_the_same_settings(fresh: MLPerfLog, made: ModuleType) -> None:
    fresh.close()
    size = fresh.path.stat().st_size
    log = MLPerfLog(fresh.path, made.SUBMISSION)
    with pytest.raises(DataError, match="started with global_batch_size 64, this run has 128"):
        log.start(made.facts(128, train_samples=1000))
    assert fresh.path.stat().st_size == size


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content[:-30], "shorter than its checkpoint"),
        (lambda content: content.replace(b"recperf", b"somebody"), "changed since its checkpoint"),
    ],
)
def test_a_log_must_match_its_checkpoint(fresh: MLPerfLog, made: ModuleType, damage: Any, message: str) -> None:
    state = fresh.state()
    fresh.close()
    fresh.path.write_bytes(damage(fresh.path.read_bytes()))
    log = MLPerfLog(fresh.path, made.SUBMISSION)
    with pytest.raises(DataError, match=message) as raised:
        log.rewind(state)
    assert "\n" not in raised.value.what


def test_a_full_disk_leaves_whole_lines(fresh: MLPerfLog, monkeypatch: Any) -> None:
    before, real, room = fresh.path.read_bytes(), os.write, [10]

    def full(handle: int, content: bytes) -> int:
        count, room[0] = room[0], 0
        if not count:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(handle, content[:count])

    with monkeypatch.context() as patched:
        patched.setattr("os.write", full)
        with pytest.raises(MachineError, match=r"cannot write mlperf\.log: the disk is full"):
            fresh.train_loss(64, 0.1, 1e-9)
    assert fresh.path.read_bytes() == before
    fresh.train_loss(64, 0.1, 1e-9)
    fresh.rewind(fresh.state())
    assert len(events(fresh.path)) == PROLOGUE + 1
