"""A small training whose MLPerf log keeps every rule of the official checker but those of the benchmark's sizes."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from recperf import stop as points
from recperf.cli import main
from recperf.data.known.yambda import synthesize
from recperf.data.known.yambda.yambda_like import YambdaLike
from recperf.data.streaming.config import HistoryConfig, WindowConfig
from recperf.distributed.config import DistributedConfig
from recperf.distributed.ranks import Ranks
from recperf.folders import alone
from recperf.runs.mlperf.check import Line, read, verdict
from recperf.runs.mlperf.log import MLPerfLog
from recperf.workloads.dlrm_v4.build import PreparedHistories, submission
from recperf.workloads.dlrm_v4.config import EventsConfig, laptop

pytest.importorskip("mlperf_logging", reason="mlperf-logging is not installed: pip install 'recperf[mlperf]'")

BATCH = 32
RATE = 1e-6 * BATCH / 8192
"""What the rules want of this batch size."""
EXCUSED = ["data.history.length", "eval_accuracy", "eval_samples", "log", "model.hstu.layers", "train_samples"]
"""Layers and history length, the numbers of samples of the real data, the evaluations that follow from them, and an AUC
of 0.75."""
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
        "run", "dlrm-v4", "--data.path", str(store), "--run-dir", str(folder), "--mlperf.log",
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
    return sorted(checked.failures)


def test_a_small_run_and_a_killed_one_keep_every_rule_but_those_of_size(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    assert main(arguments(store, straight)) == 0
    assert broken(straight) == EXCUSED

    # What is measured after a training is no part of the log, and takes longer than the training.
    with alone(killed, what="starting a run", ours=".*"):
        pass
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


def test_the_log_of_several_ranks_states_what_they_send_and_the_share_of_each(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = EventsConfig(path=store, windows=WindowConfig(min_history=2, seconds=50 * 86_400))
    data = replace(data, history=HistoryConfig(length=6, scan=20))
    config = replace(laptop(), data=data, distributed=DistributedConfig(all_to_all="bf16"))
    config = replace(config, train=replace(config.train, device="cpu", batch_size=33))
    trial = PreparedHistories(config).trial(1)
    for ranks, sent, share in ((1, "fp32", 33), (4, "bfloat16", 9)):
        for module in ("workloads.dlrm_v4.build", "execution.submission"):
            monkeypatch.setattr(f"recperf.{module}.current", lambda ranks=ranks: Ranks(0, ranks))
        facts = submission(trial, 1, cast(MLPerfLog, None)).facts
        logged = dict(facts.prologue(config.mlperf, "a laptop"))
        assert logged["lowest_numerical_precision_in_comm"] == sent
        assert (logged["global_batch_size"], logged["micro_batch_size"]) == (33, share)
