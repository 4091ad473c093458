"""What Python does is what the commands do: the same results, whatever the process was before and is afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch

import recperf
import short
import warm
from recperf import stop
from recperf.data.events.item_table import columns_of
from recperf.data.events.store import open_store
from recperf.errors import ConfigError, DataError, UsageError

QUICK = {"train": {"epochs": 1, "device": "cpu"}, "peaks": False, "quiet": True}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet: None) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RECPERF_HOME", str(tmp_path / "home"))


def frame() -> pd.DataFrame:
    draw, rows = np.random.default_rng(3), 1500
    return pd.DataFrame(
        {
            "customer": [f"c{number}" for number in draw.integers(0, 40, rows)],
            "product": [f"p{number}" for number in draw.integers(0, 30, rows)],
            "when": 1_600_000_000 + 60 * np.arange(rows),
            "stars": draw.integers(1, 6, rows),
        }
    )


@pytest.fixture
def shop() -> Any:
    return recperf.dataset(frame(), user="customer", item="product", time="when", rating="stars")


def losses(run: recperf.OpenRun) -> list[float]:
    events = map(json.loads, (run.folder / "events.jsonl").read_text().splitlines())
    return [event["loss"] for event in events if event["kind"] == "step" and "loss" in event]


@pytest.mark.usefixtures("warm_starts")
def test_a_run_is_that_of_the_command_and_leaves_the_process_as_it_was(shop: Any) -> None:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    torch.manual_seed(11)
    before = torch.get_rng_state(), torch.get_num_threads(), dict(os.environ), np.random.get_state()[1].tolist()
    first = recperf.run("micro-dlrm", shop, **QUICK)
    made: list[recperf.OpenRun] = []
    thread = threading.Thread(target=lambda: made.append(recperf.run("micro-dlrm", shop, **QUICK)))
    thread.start()
    thread.join()
    after = torch.get_rng_state(), torch.get_num_threads(), dict(os.environ), np.random.get_state()[1].tolist()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    assert {number: signal.getsignal(number) for number in handlers} == handlers
    words = ["micro-dlrm", "--data", shop.name, "--train.epochs", "1", "--train.device", "cpu", "--no-peaks"]
    command = warm.python(short.PROGRAM, "run", *words, "--run-dir", "command", "--quiet")
    assert subprocess.run(command, stderr=subprocess.PIPE).returncode in (0, 5)
    assert losses(first) == losses(made[0]) == losses(recperf.open("command"))
    # The same files, the page too, and a typed result that also reads as a dict.
    assert {path.name for path in first.folder.iterdir()} == {path.name for path in Path("command").iterdir()}
    result = first.result
    assert result["quality"]["metrics"] == result.quality.metrics == dict(result)["quality"]["metrics"]
    assert result.performance.device == "cpu"
    assert "quality" in str(first)
    assert "<iframe" in (first._repr_html_() or "")


def test_frames_come_back_as_they_went_in(shop: Any) -> None:
    run, rows = recperf.run("micro-dlrm", shop, data={"holdout": 0.3}, **QUICK), frame().head(7)
    divided = run.result.data.held_out
    assert divided is not None
    assert (divided.kind, divided.holdout) == ("time", 0.3)
    scored = run.score(rows)
    assert list(scored.columns) == ["customer", "product", "when", "stars", "score", "logit"]
    assert isinstance(run.score(pl.from_pandas(rows)), pl.DataFrame)
    assert isinstance(run.score(pa.Table.from_pandas(rows)), pa.Table)
    assert isinstance(run.score(rows.to_dict("list")), dict)
    array = rows[["customer", "product"]].to_numpy()
    np.testing.assert_array_equal(run.score(array), scored["score"])
    np.testing.assert_array_equal(run.score(rows[["customer", "product"]].to_records(index=False)), scored["score"])
    with pytest.raises(UsageError, match=r"shape \(7, 3\); the model needs the columns customer, product"):
        run.score(rows[["customer", "product", "stars"]].to_numpy())
    assert isinstance(run.recommend(["c1", "c2"], k=3), pd.DataFrame)
    assert isinstance(run.recommend(pl.Series(["c1"]), k=3), pl.DataFrame)
    goods = pd.DataFrame({"product": [f"p{number}" for number in range(30)], "sort": ["tea", "cups"] * 15})
    for made, items, kind in (
        (pl.from_pandas(frame()), goods, pl.DataFrame),
        (frame().to_dict("list"), goods.to_dict("list"), dict),
    ):
        columns = {"user": "customer", "item": "product", "time": "when"}
        other = recperf.dataset(made, name=f"of-{kind.__name__.lower()}", items=items, split="leave-one-out", **columns)
        assert columns_of(open_store(other.folder))["sort"].values.to_pylist()[1:3] == ["tea", "cups"]
        assert json.loads((other.folder / "split.json").read_text())["kind"] == "leave-one-out"
        assert isinstance(recperf.OpenRun(run.folder, frames=other.frames).recommend(["c1"], k=3), kind)


def test_ctrl_c_saves_and_the_run_is_resumed_to_the_same_losses(shop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    saving = {"checkpoint_steps": 10, "checkpoint_background": "off"}
    fields = {**QUICK, "train": {"epochs": 400, "device": "cpu", "max_steps": 40, **saving}}
    whole = recperf.run("micro-dlrm", shop, **fields)
    points: list[str] = []

    def press_after_the_first_save(point: str) -> None:
        points.append(point)
        if point == "save: folder synced" and points.count(point) == 1:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(stop, "listener", press_after_the_first_save)
    stopped = recperf.run("micro-dlrm", shop, run_dir="stopped", **fields)
    monkeypatch.setattr(stop, "listener", None)
    assert not stopped.finished
    with pytest.raises(DataError, match="this run has no result yet"):
        _ = stopped.result
    again = recperf.run(resume="stopped", peaks=False, quiet=True)
    assert again.finished
    assert losses(again) == losses(whole)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: recperf.run("micro-dlrm", train={"epoch": 3}), ConfigError, "field 'train.epoch'; did you mean"),
        (lambda: recperf.run("micro-dlrm", train={"epochs": "3"}), ConfigError, "train.epochs is '3'; allowed: an"),
        (lambda: recperf.run("micro-dlrm", data_fields={"split": "lst"}), ConfigError, "data.split is 'lst'; allowed"),
        (lambda: recperf.run("micro-dlrm", data={"split": "lst"}), ConfigError, "data.split is 'lst'; allowed"),
        (lambda: recperf.run("micro-dlrm", "one", data="two"), UsageError, "two datasets are given"),
        (lambda: recperf.run("micro-dlm"), UsageError, "unknown workload 'micro-dlm'"),
        (lambda: recperf.run("micro-dlrm", "nothing"), UsageError, "there is no dataset and no file 'nothing'"),
        (lambda: recperf.run("micro-dlrm", resume="r", preset="p"), UsageError, "exclude each other"),
        (lambda: recperf.dataset(frame(), usr="customer"), UsageError, "no option 'usr'; did you mean 'user'"),
        (lambda: recperf.dataset(3), UsageError, "rows cannot be read from a int"),
        (lambda: recperf.plan("dlrm-v4", gpus="h200"), UsageError, "no option 'gpus'; did you mean 'gpu'"),
        (lambda: recperf.plan("dlrm-v4", gpu="h201"), UsageError, "h201"),
        (lambda: recperf.compare("here", "there"), DataError, "nothing at this path"),
    ],
)
def test_mistakes_are_errors_of_recperf(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


def test_plans_and_comparisons_are_printed_and_shown_as_pages(shop: Any) -> None:
    # A package of that name would take the function's place once it is imported.
    import recperf.planning.request

    plan = recperf.plan("dlrm-v4", gpu=["h200", "b200"], ranks=[8, 16], price="3USD")
    assert [one.device for one in plan.plans] == ["h200", "b200"]
    assert "h200" in str(plan)
    assert plan.page("plan.html").is_file()
    run = recperf.run("micro-dlrm", shop, **QUICK)
    compared = recperf.compare(run, run.folder)
    assert compared.step.old_ms == compared.step.new_ms
    assert "the same or within noise" in str(compared)
    assert "<iframe" in compared._repr_html_()


def test_an_import_of_the_same_frame_is_used_again(shop: Any) -> None:
    again = recperf.dataset(frame(), user="customer", item="product", time="when", rating="stars")
    assert again == shop
    assert recperf.dataset(shop.name).folder == shop.folder
    assert shop.rows == 1500


@pytest.mark.long
def test_a_bench_is_a_frame(shop: Any) -> None:
    table = recperf.bench(shop, models=["micro-dlrm", "dlrm"], quiet=True)
    rows = table.frame()
    assert {"micro-dlrm", "dlrm"} <= set(rows[rows.model].name)
    assert rows[rows.model].peak_bytes.gt(1e7).all()
    assert "<iframe" in table._repr_html_()
