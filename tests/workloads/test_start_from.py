"""A run that starts from another: on new days, with new users and items, and what it exports since."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import recperf
from recperf.cli import main
from recperf.data.events.earlier_ids import matched, with_earlier_ids
from recperf.data.events.item_table import item_values
from recperf.data.known.event_files import open_events
from recperf.execution.exporting import compared
from recperf.execution.serving import TableExport
from recperf.models.init import normal_
from recperf.models.next_item.model import STD
from recperf.workloads.dlrm_v4.own_data import group_names

DAY = 86_400
SMALL = ["--model.dim", "16", "--model.blocks", "1", "--model.head-dim", "8", "--model.max-length", "8"]
SMALL += ["--model.time-buckets", "16"]
TRAIN = ["--train.device", "cpu", "--train.threads", "1", "--no-report", "--no-peaks", "--quiet"]
STILL = ["--train.max-steps", "1", "--train.learning-rate", "1e-30", *TRAIN]
"""One step that moves no weight of an ordinary size."""


@pytest.fixture(scope="module", autouse=True)
def unmeasured() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("recperf.execution.measuring.measure_run", lambda *_: None)
        yield


def log(path: Path, *, users: range, items: range, days: range, seed: int) -> None:
    """Each user takes items in the order of a ring, with some noise; ids are text."""
    draw, rows = np.random.default_rng(seed), ["user,item,time"]
    for user in users:
        place, start = int(draw.integers(len(items))), days.start * DAY + int(draw.integers(DAY))
        gap = (len(days) - 1) * DAY // 12
        for event in range(12):
            rows.append(f"u{user},i{items[place]},{start + event * gap}")
            place = (place + 1 if draw.random() < 0.9 else int(draw.integers(len(items)))) % len(items)
    path.write_text("\n".join(rows))


def imported(folder: Path, name: str, **of: Any) -> Path:
    if of:
        log(folder / f"{name}.csv", **of)
    titled = ["--items", str(folder / "items.csv"), "--store", str(folder / name)]
    assert main(["data", "import", str(folder / f"{name}.csv"), *titled, "--quiet"]) == 0
    return folder / name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on old days; items 0 to 4 have events in the first days only."""
    folder = tmp_path_factory.mktemp("start")
    titles = "".join(f"i{item},Item {item},colour {item // 10}\n" for item in range(55))
    (folder / "items.csv").write_text(f"id,title,colour\n{titles}")
    old = folder / "old.csv"
    log(folder / "first.csv", users=range(20), items=range(10), days=range(1000, 1005), seed=1)
    log(old, users=range(200), items=range(5, 45), days=range(1040, 1060), seed=2)
    old.write_text("\n".join([old.read_text(), *(folder / "first.csv").read_text().splitlines()[1:]]))
    imported(folder, "old")
    imported(folder, "new", users=range(150, 260), items=range(15, 55), days=range(1060, 1070), seed=3)
    arguments = ["run", "hstu", "--data", str(folder / "old"), "--run-dir", str(folder / "run"), *SMALL, *TRAIN]
    arguments += ["--target.beat", "none", "--train.batch-size", "16"]
    assert main([*arguments, "--train.epochs", "12", "--train.learning-rate", "1e-2"]) == 0
    return folder


def start(folder: Path, name: str, *more: str) -> Path:
    arguments = ["run", "--start-from", str(folder / "run"), "--data", str(folder / "new"), "--run-dir"]
    assert main([*arguments, str(folder / name), *more]) == 0
    return folder / name


def item_rows(run: Path) -> dict[str, torch.Tensor]:
    """The embedding of each item by own id."""
    model = recperf.open(run).model.served
    return dict(zip(model.items.values.to_pylist(), model.model.items_ID[1:].detach()))


def feature_rows(run: Path) -> dict[str, torch.Tensor]:
    """The row of each value of a feature."""
    served = recperf.open(run).model.served
    return dict(zip(item_values(served.data.store).names, served.model.features_VD[1:].detach()))


def quality(run: Path) -> float:
    return float(json.loads((run / "result.json").read_text())["quality"]["metrics"]["ndcg_10"])


def test_rows_of_known_ids_go_on_and_others_are_new(
    folder: Path, capfd: pytest.CaptureFixture[str], untraced: None
) -> None:
    run = start(folder, "still", "--start.forget-days", "30", *STILL)
    before, after = item_rows(folder / "run"), item_rows(run)
    assert set(after) == {f"i{item}" for item in range(5, 55)}
    initial = torch.empty(len(after) + 1, 16)
    normal_(initial, STD, 42, "items")
    for row, (item, embedding_D) in enumerate(after.items(), 1):
        assert torch.equal(embedding_D, before[item] if item in before else initial[row]), item
    started = json.loads((run / "result.json").read_text())["provenance"]["started_from"]
    assert started["run"] == "run"
    assert started["rows"] == {
        "items": {"taken": 30, "without_events": 10, "new": 10, "forgotten": 5},
        "features": {"taken": 5, "without_events": 0, "new": 1, "forgotten": 0},
    }
    values, more = feature_rows(folder / "run"), feature_rows(run)
    assert set(more) - set(values) == {"colour: colour 5"}
    assert all(torch.equal(more[value], values[value]) for value in values)
    # An item that the new days do not have can still be recommended, and read in a history.
    listed = recperf.open(run).recommend([["i5", "i6"]], k=50)
    assert dict(zip(listed["item"], listed["title"]))["i7"] == "Item 7"
    # What followed items in the old days counts, by the numbers of the new.
    served = recperf.open(run).model.served
    first, stop = served.model.counting.earlier.offsets_I1[
        served.items.indices(pa.array(["i20"]))[0] + torch.tensor([0, 1])
    ]
    followed = served.model.counting.earlier.columns_W[first:stop].tolist()
    assert "i21" in served.items.values.take(pa.array(followed)).to_pylist()
    # On the same data everything goes on, and on a third dataset those that were kept, forgotten ones not.
    again = ["run", "--start-from", str(run), "--data", str(folder / "old"), "--run-dir", str(folder / "again")]
    capfd.readouterr()
    assert main([*again, *STILL[:-1]]) == 0
    third = item_rows(folder / "again")
    assert all(torch.equal(third[item], after[item]) for item in after)
    # The new run was trained on later days than those that are scored now.
    facts = [
        json.loads((folder / name / "result.json").read_text())["provenance"]["started_from"]
        for name in ("still", "again")
    ]
    assert [one["held_out_from"] < one["trained_until"] for one in facts] == [False, True]
    assert "its weights may know what is scored" in " ".join(capfd.readouterr().out.split())
    # Those that were kept have no event here, but the time of their last one is known.
    store, new = open_events(recperf.open(run).config.data.path), open_events(folder / "new")
    assert matched(store, new, 9).counts["items"]["forgotten"] == 10
    assert with_earlier_ids(new, store, 9) == new.folder
    capfd.readouterr()
    assert main(["export", str(run), "--since", str(folder / "run"), "--output", str(folder / "changes")]) == 0
    assert "items since" in capfd.readouterr().out
    manifest = json.loads((folder / "changes" / "manifest.json").read_text())
    table = next(one for one in manifest["tables"] if one["name"] == "items")
    assert [table[name] for name in ("new", "changed", "unchanged", "dropped")] == [10, 0, 40, 5]
    rows = pq.read_table(folder / "changes" / table["file"])
    assert sorted(rows["id"].to_pylist()) == sorted(set(after) - set(before))
    embedding_D = after[rows["id"][0].as_py()] + more[f"colour: colour {rows['id'][0].as_py()[1]}"]
    assert torch.allclose(torch.tensor(rows["embedding"].to_pylist()[0]), embedding_D)
    dropped = pq.read_table(folder / "changes" / table["dropped_file"])["id"].to_pylist()
    assert sorted(dropped) == [f"i{item}" for item in range(5)]
    # Rows are numbered anew: also those of ids whose embedding is the same.
    placed = pq.read_table(folder / "changes" / table["rows_file"])
    assert dict(zip(placed["id"].to_pylist(), placed["row"].to_pylist())) == {
        item: row for row, item in enumerate(after, 1)
    }
    assert all(list(before).index(item) + 1 != list(after).index(item) + 1 for item in ("i15", "i20"))


def test_it_is_better_after_few_steps_and_resumes_without_the_other_run(folder: Path) -> None:
    few = ("--train.max-steps", "3", "--model.counts", "off", "--target.beat", "popularity", *TRAIN)
    run = start(folder, "next", *few)
    scratch = ["run", "--config", str(folder / "run"), "--data", str(folder / "new"), *few]
    assert main([*scratch, "--run-dir", str(folder / "scratch")]) == 0
    assert quality(run) > quality(folder / "scratch") + 0.1
    assert main(["check", str(run), "--quiet"]) == 0
    # A copy that was killed before its first checkpoint, on a machine where the other run and its data are gone.
    resumed = folder / "resumed"
    shutil.copytree(run, resumed)
    for name in ("seal.json", "result.json", "trial-42.json", "profile.json"):
        (resumed / name).unlink(missing_ok=True)
    shutil.rmtree(resumed / "checkpoints")
    progress = json.loads((resumed / "progress.json").read_text())
    (resumed / "progress.json").write_text(json.dumps({**progress, "saved": []}))
    for name in ("run", "old"):
        (folder / name).rename(folder / f"away-{name}")
    try:
        assert main(["run", "--resume", str(resumed), "--no-peaks", "--no-report", "--quiet"]) == 0
    finally:
        for name in ("run", "old"):
            (folder / f"away-{name}").rename(folder / name)
    assert (resumed / "trial-42.json").read_bytes() == (run / "trial-42.json").read_bytes()


@pytest.mark.parametrize("rule", ["rowwise-adagrad", pytest.param("rowwise-adam", marks=pytest.mark.long)])
def test_rows_of_dlrm_v4_go_on_with_the_state_of_their_optimizer(folder: Path, rule: str) -> None:
    small = ["--train.max-steps", "2", "--train.epochs", "1", "--ranking.users", "0", "--data.baselines", "bias"]
    small += [*TRAIN, "--train.table-optimizer", rule]
    runs = [folder / f"{rule}{name}" for name in ("", "-next")]
    assert main(["run", "dlrm-v4", "--data", str(folder / "old"), "--run-dir", str(runs[0]), *small]) == 0
    still = ("--train.table-learning-rate", "1e-30", "--train.learning-rate", "1e-30")
    start = ["run", "--start-from", str(runs[0]), "--data", str(folder / "new"), *small, *still]
    assert main([*start, "--run-dir", str(runs[1])]) == 0
    rows, states, counts, exported = [], [], [], []
    for run in runs:
        served = recperf.open(run).model.served
        exported.append(served._tables())
        ids, numbers = served.items.values.to_pylist(), served.items.numbers_V
        tables = served.model.tables
        rows.append(dict(zip(ids, tables.table("item_id")[numbers])))
        counts.append(tables.updates)
        states.append(dict(zip(ids, tables.state("item_id")[numbers].tolist())))
    assert set(rows[1]) == {f"i{item}" for item in range(55)}
    assert all(torch.equal(rows[1][item], rows[0][item]) for item in rows[0])
    groups = {ids: served.store.groups_IG[number, 0] for ids, number in zip(ids, numbers)}
    colours = group_names(served.store)["first group"]
    assert {item: colours[group - 1] for item, group in groups.items()} == {
        f"i{item}": f"colour {item // 10}" for item in range(55)
    }
    without_events = [f"i{item}" for item in range(15)]
    assert [states[1][item] for item in without_events] == [states[0][item] for item in without_events]
    assert max(torch.tensor(states[0][item]).max() for item in without_events) > 0
    # Two updates, and two more.
    assert [None if count is None else int(count) for count in counts] == (
        [2, 4] if rule == "rowwise-adam" else [None, None]
    )
    # Users without events in the new days are exported too.
    users = next(one for one in compared(exported[1], exported[0]) if one.table.name == "uid")
    assert (users.counts["new"], users.counts["dropped"]) == (60, 0)


def test_entries_without_an_id_and_tables_without_ids_are_compared_row_by_row() -> None:
    weight_RW = torch.arange(8.0).view(4, 2)
    ids = pa.array([None, None, "a", "b"])
    table = TableExport(name="t", weight_RW=weight_RW, ids=ids, rows_I=np.arange(4), meaning="")
    before = replace(table, ids=pa.array([None, "b", "c", None]), rows_I=np.array([0, 3, 2, 2]))
    (change,) = compared([table], [before])
    assert change.counts == {"new": 1, "changed": 1, "unchanged": 2, "dropped": 1}
    assert change.table.ids.to_pylist() == [None, "a"]
    assert change.dropped.to_pylist() == ["c"]
    hashed = replace(table, ids=None, rows_I=None)
    (change,) = compared([hashed], [replace(hashed, weight_RW=weight_RW.index_fill(0, torch.tensor(2), 9.0))])
    assert change.table.ids.to_pylist() == [2]


def test_what_cannot_be_started_from_is_refused_in_a_line(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = folder / "numbers.csv"
    numbers.write_text(re.sub(r"\b[ui](\d+)", r"\1", (folder / "new.csv").read_text()))
    assert main(["data", "import", str(numbers), "--store", str(folder / "numbers"), "--quiet"]) == 0
    damaged = folder / "damaged"
    shutil.copytree(folder / "run", damaged)
    for file in damaged.glob("checkpoints/seed-42/step-*/rank0-00000.safetensors"):
        file.write_bytes(file.read_bytes()[:-1] + b"x")
    new, run = ("--data", str(folder / "new")), str(folder / "run")
    refused = {
        ("hstu", "--start-from", run): "--start-from needs --data",
        ("dlrm-v4", "--start-from", run, *new): "the config is for workload 'hstu', not 'dlrm-v4'",
        ("--start-from", run, "--data", str(folder / "numbers")): "the ids of users have kind number in",
        ("--start-from", run, *new, "--model.dim", "8"): "the model has items_ID of (8,), that of run has",
        ("--start-from", str(damaged), *new): "of damaged is damaged: rank0-00000.safetensors does not match its",
        ("dlrm", "--start.run", run, *new): "run is a run of hstu, whose weights dlrm cannot start from",
        ("--start-from", run, *new, "--data.split", "leave-one-out"): "data.split is leave-one-out, that of run time",
        ("--start-from", run, *new, "--distributed.all-to-all", "fp16"): "distributed.all_to_all",
        ("--start-from", run, *new): "the tables of run, 35.7 KiB, do not fit into memory: 1.0 KiB are free",
    }
    for arguments, message in refused.items():
        if "tables" in message:
            monkeypatch.setattr("recperf.execution.starting.available_bytes", lambda: 1000)
        target = folder / "refused"
        assert main(["run", *arguments, "--run-dir", str(target), "--no-peaks", "--quiet"]) in (2, 3, 4), arguments
        assert message in capfd.readouterr().err.splitlines()[0]
        assert not target.exists()
