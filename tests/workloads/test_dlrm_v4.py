"""dlrm-v4: its cost is known before it runs, it trains on the past alone, and it resumes bit for bit."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recperf.cli import main
from recperf.data.events import store as store_module
from recperf.data.events.imports import import_events
from recperf.data.events.options import ImportOptions
from recperf.data.events.store import EventStore, file_of, open_store
from recperf.data.known.yambda import synthesize
from recperf.data.known.yambda.yambda_like import of_size
from recperf.data.streaming.config import HistoryConfig, Leftover, WindowConfig
from recperf.errors import DataError
from recperf.train.loop import Position
from recperf.units import size
from recperf.workloads.dlrm_v4 import config as dlrm_v4
from recperf.workloads.dlrm_v4 import data as data_module
from recperf.workloads.dlrm_v4.build import HistoryTrial, PreparedHistories
from recperf.workloads.dlrm_v4.config import (
    DLRMv4WorkloadConfig,
    EvaluationConfig,
    EventsConfig,
    HistoryTrainConfig,
    laptop,
    mlperf,
    mlperf_first_samples,
)

DAY = 86_400
EVENTS = EventsConfig(
    events=3_000,
    history=HistoryConfig(length=12, scan=40),
    windows=WindowConfig(min_history=5, seconds=30 * DAY),
    holdout_windows=2,
)
TRAIN = HistoryTrainConfig(batch_size=64, device="cpu")


def small(data: EventsConfig = EVENTS, **changes: Any) -> DLRMv4WorkloadConfig:
    model = replace(laptop().model, row_scale=0.02)
    return replace(laptop(), **({"data": data, "train": TRAIN, "model": model} | changes))


def test_held_out_users_are_never_trained_on() -> None:
    windows = WindowConfig(train_share=0.7, min_history=5, seconds=30 * DAY)
    data = replace(EVENTS, windows=windows, holdout_first=4, holdout_windows=3)
    prepared = PreparedHistories(small(data))
    users = prepared.store.users_of
    trained, scored = (
        {int(user) for number in range(len(order)) for user in users(order.batch(number))}
        for order in (prepared.train_order(), prepared.valid_order(prepared.holdout))
    )
    assert trained
    assert scored
    assert not trained & scored
    assert "held-out users" in prepared.data["split"]


@pytest.mark.parametrize(("batch_size", "first_block"), [(1024, 21), (32768, 41)])
def test_the_benchmark_s_first_evaluation(batch_size: int, first_block: int) -> None:
    total = 2_290_835_423
    block = -(-total // (1000 * batch_size))
    first = mlperf().evaluate.first_step(total, batch_size)
    assert -(-first // block) == first_block
    assert first * batch_size >= mlperf_first_samples(batch_size)
    assert EvaluationConfig(skip_share=0.5).first_step(1000, 100) == 5


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the steps that are measured at the end of a run."""
    monkeypatch.setattr("recperf.execution.measuring.measure_run", lambda *_: None)


def arguments(folder: str, *more: str) -> list[str]:
    return [
        "run", "dlrm-v4", "--data.events", "3000", "--data.history.length", "12", "--data.history.scan", "40",
        "--data.windows.min-history", "5", "--data.windows.seconds", str(30 * DAY), "--data.holdout-windows", "2",
        "--train.batch-size", "64", "--train.device", "cpu", "--target.beat", "none", "--no-peaks", "--no-report",
        "--quiet", "--model.row-scale", "0.02", "--run-dir", folder, *more,
    ]  # fmt: skip


def events(folder: str, kind: str) -> list[dict[str, Any]]:
    lines = Path(folder, "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


@pytest.mark.usefixtures("unmeasured")
def test_the_log_says_what_was_left_of_each_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = ("--data.leftover", "drop", "--evaluate.on", "next-window", "--evaluate.every-windows", "3")
    assert main(arguments("one", *options)) == 0
    windows = events("one", "window")
    assert [event["window"] for event in windows] == list(range(8))
    result = json.loads(Path("one/result.json").read_text())
    left = sum(event["in_no_full_batch"] for event in windows)
    assert left > 0
    assert list(result["data"]["skipped"].values()) == [left]
    assert sum(event["anchors"] for event in windows) - left == result["data"]["train_rows"]
    scored = events("one", "evaluation")
    assert [event["first_window"] for event in scored] == [3, 6, 8]
    assert all(event["rows"] > 0 for event in scored)
    metrics = events("one", "metric")
    assert [event["step"] for event in metrics] == [event["step"] for event in scored]
    assert {"normalized_entropy", "lifetime_auc"} <= set(result["quality"]["metrics"])
    assert [event["step"] for event in events("one", "training")] == [event["step"] for event in metrics]


@pytest.mark.usefixtures("unmeasured")
def test_a_run_reads_nothing_damaged_and_vouches_for_no_more_than_it_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(store_module, "DIGEST_BLOCK", 256)
    opened: list[EventStore] = []
    monkeypatch.setattr(data_module, "open_events", lambda path: opened.append(open_store(path)) or opened[-1])
    folder = synthesize.write_store(of_size(3_000), Path("store"))
    options = ("--data.path", "store", "--data.holdout-first", "1")
    assert main(arguments("intact", *options)) == 0
    blocks = opened[-1].items_E.blocks
    assert blocks is not None
    read, never_read = (int(np.flatnonzero(blocks._verified == state)[0]) for state in (True, False))
    path = file_of(folder, "items")
    whole = path.read_bytes()

    def flip_high_bit(block: int) -> None:
        path.write_bytes(whole[: 256 * block + 3] + bytes([whole[256 * block + 3] ^ 0x80]) + whole[256 * block + 4 :])

    flip_high_bit(never_read)
    assert main(arguments("elsewhere", *options)) == 0
    results = [json.loads(Path(f"{run}/result.json").read_text()) for run in ("intact", "elsewhere")]
    verified = results[1]["provenance"]["data_verified"]
    assert verified == opened[-1].verified()
    assert 0 < verified["bytes"] < verified["of"]
    assert results[0]["quality"] == results[1]["quality"]
    capsys.readouterr()
    main(["check", "elsewhere"])
    assert f"{size(verified['bytes'])} of the data's {size(verified['of'])} matched" in capsys.readouterr().out

    flip_high_bit(read)
    assert main(arguments("damaged", *options)) == 3
    error = capsys.readouterr().err
    assert f"items.u4 differs from its checksum in block {read} (from byte {256 * read:,})" in error
    assert "Traceback" not in error


@dataclass(frozen=True)
class Row:
    user: int
    item: int
    time: int
    ratio: int


ROWS = st.lists(
    st.builds(Row, st.integers(1, 4), st.integers(0, 9), st.integers(0, 12 * DAY), st.sampled_from([0, 49, 50, 100])),
    min_size=12,
    max_size=70,
)


def opened(rows: list[Row], leftover: Leftover, on: Any, batch_size: int, every: int) -> HistoryTrial:
    """From a file of raw events to a training."""
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder, "raw.csv")
        raw.write_text("user,item,time,ratio\n" + "".join(f"{r.user},{r.item},{r.time},{r.ratio}\n" for r in rows))
        store = import_events(ImportOptions(events=raw, rating="ratio", positive_from=50), Path(folder, "store"))
        data = replace(
            EVENTS, path=store, split="windows", windows=WindowConfig(min_history=1, seconds=DAY), holdout_windows=1,
            leftover=leftover,
        )  # fmt: skip
        config = small(
            data,
            train=replace(TRAIN, batch_size=batch_size),
            evaluate=EvaluationConfig(on=on, every_windows=every),
        )
        return PreparedHistories(config).trial(1)


@given(
    rows=ROWS,
    leftover=st.sampled_from(["drop", "carry"]),
    batch_size=st.integers(1, 9),
    every=st.integers(0, 3),
    on=st.sampled_from(["holdout", "next-window"]),
)
@settings(max_examples=8)
def test_nothing_trained_on_is_of_the_time_that_is_scored(
    rows: list[Row], leftover: Leftover, batch_size: int, every: int, on: Any
) -> None:
    try:
        trial = opened(rows, leftover, on, batch_size, every)
    except DataError:
        return
    prepared, order = trial.prepared, trial.order
    latest = -1
    for number in range(len(order)):
        anchors = order.batch(number)
        batch = prepared.histories.batch(anchors)
        latest = max(latest, int(prepared.store.times_E[anchors].max()), max(batch.times_T.tolist(), default=-1))
        at = Position(0, number + 1, number + 1)
        if number + 1 < len(order) and not trial.recipe.evaluate_after(at):
            continue
        part = prepared.part_at(at)
        assert latest < prepared.index.t_min + part.windows.start * DAY
        scored = prepared.valid_order(part)
        assert scored.samples == sum(len(prepared.index.anchors(window)) for window in part.windows) > 0


@pytest.mark.parametrize("preset", dlrm_v4.DLRM_V4.presets)
def test_presets_fit_their_histories(preset: str) -> None:
    config = dlrm_v4.DLRM_V4.presets[preset]()
    assert config.data.history.longest <= config.model.max_history
    memory = dlrm_v4.estimate(config).memory
    assert memory["activations"] > 0
    assert (sum(memory.values()) < 1 << 30) == (preset == "laptop")


def test_a_run_says_where_its_time_went(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments("one", "--train.max-steps", "12")) == 0
    result = json.loads(Path("one/result.json").read_text())
    assert result["data"]["split"] == "windows 0 to 7, scored 8 to 9"
    assert result["data"]["synthetic"] is True
    budget = result["performance"]["budget"]
    assert budget["attention"] > 0
    assert "bottom" not in budget
    assert budget["other"] < 0.2
    assert set(result["quality"]["baselines"]) == {"majority", "item_bias", "user_item_bias", "popularity"}
