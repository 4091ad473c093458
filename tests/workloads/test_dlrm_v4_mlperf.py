"""A small training whose MLPerf log keeps every rule of the official checker but those of the benchmark's sizes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from recperf import points
from recperf.cli import main
from recperf.data.yambda import synthesize
from recperf.data.yambda.synthesize.config import YambdaLike
from recperf.runs.mlperf.check import verdict
from recperf.runs.mlperf.lines import Line, read

pytest.importorskip("mlperf_logging", reason="mlperf-logging is not installed: pip install 'recperf[mlperf]'")

BATCH = 32
RATE = 1e-6 * BATCH / 8192
"""What the rules want of this batch size."""
EXCUSED = [
    "eval_accuracy: first",
    "eval_accuracy: grid",
    "eval_accuracy: target",
    "eval_samples: value",
    "train_samples: value",
]
"""The numbers of samples of the real data, the evaluations that follow from them, and an AUC of 0.75."""
ONCE = ("cache_clear", "init_start", "init_stop", "run_start", "run_stop", "train_samples", "eval_samples", "seed")


class Killed(BaseException):
    """Nobody catches it, as nobody catches a kill."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("events") / "store"
    synthesize.write_store(YambdaLike(users=24, events_per_user=40, items=60, genres=4, seed=3), folder)
    return folder


def arguments(store: Path, folder: Path) -> list[str]:
    """As near to the benchmark as a tiny model comes: its rates, rise, clipping, row length and cadence."""
    return [
        "run", "dlrm-v4", "--data.path", str(store), "--run-dir", str(folder), "--mlperf",
        "--data.windows.min-history", "2", "--data.windows.seconds", str(50 * 86_400), "--data.holdout-windows", "1",
        "--data.history.length", "6", "--data.history.scan", "20", "--data.leftover", "drop",
        "--train.device", "cpu", "--train.batch-size", str(BATCH), "--train.learning-rate", repr(RATE),
        "--train.table-learning-rate", repr(RATE), "--train.warmup-steps", "24000", "--train.clip", "1",
        "--evaluate.every-share", "0.001", "--evaluate.skip-share", "0.8", "--evaluate.batch-size", "256",
        "--model.hstu.max-length", "4096", "--model.positions", "8192", "--model.row-scale", "1e-6",
        "--model.table-dim", "8", "--model.hstu.dim", "8", "--model.hstu.layers", "1", "--model.hstu.heads", "1",
        "--model.hstu.qk-dim", "8", "--model.hstu.v-dim", "8", "--model.encoder-hidden", "8",
        "--model.item-hidden", "8", "--model.head-hidden", "8", "--train.checkpoint-background", "off",
        "--target.beat", "none", "--no-peaks", "--no-report", "--quiet",
    ]  # fmt: skip


def lines(folder: Path) -> list[Line]:
    return read(folder / "mlperf.log").good


def broken(folder: Path) -> list[str]:
    checked = verdict(folder / "mlperf.log")
    assert checked.division == "closed"
    assert checked.warnings == []
    return sorted(failure.rule for failure in checked.failures)


def test_a_small_run_and_a_killed_one_keep_every_rule_but_those_of_size(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    assert main(arguments(store, straight)) == 0
    assert broken(straight) == EXCUSED

    # What is measured after a training is no part of the log, and takes longer than the training.
    killed.mkdir()
    shutil.copyfile(straight / "profile.json", killed / "profile.json")
    passed: list[str] = []

    def stop(name: str) -> None:
        passed.append(name)
        if passed.count("evaluation: logged") == 2:
            raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(points, "listener", stop)
        with pytest.raises(Killed):
            main(arguments(store, killed))
    assert len(lines(killed)) > 0
    assert main(["run", "--resume", str(killed), "--no-peaks", "--no-report", "--quiet"]) == 0
    assert broken(killed) == EXCUSED
    logged = [[(line.key, line.value, line.metadata) for line in lines(folder)] for folder in (straight, killed)]
    assert logged[0] == logged[1]
    times = [line.time_ms for line in lines(killed)]
    assert times == sorted(times)
    assert [line.key for line in lines(killed) if line.key in ONCE] == [
        "cache_clear", "init_start", "seed", "init_stop", "run_start", "train_samples", "eval_samples", "run_stop",
    ]  # fmt: skip
