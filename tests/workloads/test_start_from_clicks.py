"""A run on clicks that starts from another: table rows by category, scales of the other, what it exports since."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch

import recperf
from recperf.cli import main

DAY, ROWS = 86_400, 1200
TRAIN = [
    "--train.device",
    "cpu",
    "--train.threads",
    "1",
    "--ranking.users",
    "0",
    "--no-report",
    "--no-peaks",
    "--quiet",
]
STILL = ["--train.epochs", "1", "--train.max-steps", "1", "--train.learning-rate", "1e-30"]
STILL += ["--train.weight-decay", "0", "--train.table-weight-decay", "0"]
"""One step that moves no weight of an ordinary size."""


@pytest.fixture(scope="module", autouse=True)
def unmeasured() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("recperf.execution.measuring.measure_run", lambda *_: None)
        yield


def log(users: range, ads: range, days: range, seed: int) -> pd.DataFrame:
    """Whether a user clicks an ad depends on both and on a price, which is ten times as high in later days."""
    draw = np.random.default_rng(seed)
    user, ad = draw.integers(users.start, users.stop, ROWS), draw.integers(ads.start, ads.stop, ROWS)
    return pd.DataFrame({
        "user": [f"u{one}" for one in user], "ad": ad, "tags": [f"t{one % 3}|t{one % 7}" for one in ad],
        "price": np.exp(draw.normal(size=ROWS)) * (days.start // 100),
        "clicked": (draw.random(ROWS) < np.where((user + ad) % 2, 0.9, 0.1)).astype(int),
        "time": days.start * DAY + draw.integers(0, len(days) * DAY, ROWS),
    })  # fmt: skip


def imported(folder: Path, name: str, rows: pd.DataFrame, *more: str) -> Path:
    rows.to_csv(folder / f"{name}.csv", index=False)
    features = [] if more else ["--categorical", "user,ad", "--numeric", "price", "--multi", "tags", "--time", "time"]
    roles = ["--label", "clicked", "--user", "user", "--item", "ad", "--store", str(folder / name), "--quiet"]
    assert main(["data", "import", "--clicks", str(folder / f"{name}.csv"), *roles, *features, *more]) == 0
    return folder / name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on old days; ads 0 to 4 are in the first days only."""
    folder = tmp_path_factory.mktemp("start")
    first = log(range(40), range(5), range(1000, 1005), 1)[:200]
    imported(folder, "old", pd.concat([log(range(40), range(5, 30), range(1040, 1060), 2), first]))
    imported(folder, "new", log(range(30, 60), range(15, 40), range(10600, 10620), 3))
    run = ["run", "dlrm", "--data", str(folder / "old"), "--run-dir", str(folder / "run"), "--data.split", "time"]
    assert main([*run, "--train.epochs", "3", *TRAIN]) in (0, 5)
    return folder


def start(folder: Path, name: str, *more: str, run: str = "run", data: str = "new") -> Path:
    arguments = ["run", "--start-from", str(folder / run), "--data", str(folder / data), "--run-dir"]
    assert main([*arguments, str(folder / name), *more, *TRAIN]) in (0, 5)
    return folder / name


def table(run: Path, key: str) -> dict[str | None, torch.Tensor]:
    """The table row of each category; those of row 0 and 1 by number."""
    served = recperf.open(run, device="cpu").model.served
    names = served.clicks.categories(key)
    return dict(zip([0, 1, *names[2:]], served.model.embeddings.table(key)))


def dense(run: Path) -> list[torch.Tensor]:
    return [*recperf.open(run, device="cpu").model.served.model.dense_parameters()]


def test_rows_of_known_categories_go_on_and_others_are_new(folder: Path, untraced: None) -> None:
    run = start(folder, "still", *STILL)
    for key in ("user", "ad", "tags"):
        before, after = table(folder / "run", key), table(run, key)
        # Known categories keep their very rows, and new ones follow.
        assert [*after][: len(before)] == [*before]
        assert all(torch.equal(after[name], before[name]) for name in before), key
    assert set(table(run, "ad")) - set(table(folder / "run", "ad")) == {str(ad) for ad in range(30, 40)}
    assert all(map(torch.equal, dense(run), dense(folder / "run")))
    started = json.loads((run / "result.json").read_text())["provenance"]["started_from"]["rows"]
    assert started["ad"] == {"taken": 15, "without_events": 15, "new": 10, "forgotten": 0}
    # Numbers keep their scale, so that a row means the same: its score is that of the other run.
    rows = pd.read_csv(folder / "old.csv").drop(columns="clicked")[:100]
    logits = [np.asarray(recperf.open(one, device="cpu").score(rows)["logit"]) for one in (folder / "run", run)]
    assert (logits[0] == logits[1]).all()
    changes = folder / "changes"
    assert main(["export", str(run), "--since", str(folder / "run"), "--output", str(changes), "--quiet"]) == 0
    tables = {one["name"]: one for one in json.loads((changes / "manifest.json").read_text())["tables"]}
    assert [tables["ad"][name] for name in ("new", "changed", "dropped")] == [10, 0, 0]
    assert set(pq.read_table(changes / tables["ad"]["file"])["id"].to_pylist()) == {str(ad) for ad in range(30, 40)}
    assert main(["report", str(run)]) == 0
    assert "15 taken over, 15 without events, 10 new" in (run / "report.html").read_text()


def test_forgotten_categories_are_new_or_gone_also_in_a_third_run(folder: Path) -> None:
    second = imported(folder, "second", log(range(20, 60), range(15, 40), range(1060, 1070), 4))
    run = start(folder, "kept", "--start.forget-days", "40", *STILL, data=second.name)
    assert set(table(run, "ad")) == {0, 1, *(str(ad) for ad in range(5, 40))}
    counts = json.loads((run / "result.json").read_text())["provenance"]["started_from"]["rows"]["ad"]
    assert counts == {"taken": 15, "without_events": 10, "new": 10, "forgotten": 5}
    # Those without a click here are known by the time of their last one.
    third = imported(folder, "third", log(range(20, 60), range(30, 40), range(1070, 1080), 5))
    again = start(folder, "again", "--start.forget-days", "15", *STILL, run="kept", data=third.name)
    before, after = table(run, "ad"), table(again, "ad")
    assert set(after) == {0, 1, *(str(ad) for ad in range(15, 40))}
    assert all(torch.equal(after[name], before[name]) for name in after)


def test_it_resumes_without_the_other_run(folder: Path) -> None:
    run, resumed = start(folder, "next", "--train.epochs", "1"), folder / "resumed"
    shutil.copytree(run, resumed)
    for name in ("seal.json", "result.json", "trial-42.json", "profile.json"):
        (resumed / name).unlink(missing_ok=True)
    shutil.rmtree(resumed / "checkpoints")
    progress = json.loads((resumed / "progress.json").read_text())
    (resumed / "progress.json").write_text(json.dumps({**progress, "saved": []}))
    for name in ("run", "old", "new"):
        (folder / name).rename(folder / f"away-{name}")
    try:
        assert main(["run", "--resume", str(resumed), "--no-peaks", "--no-report", "--quiet"]) in (0, 5)
    finally:
        for name in ("run", "old", "new"):
            (folder / f"away-{name}").rename(folder / name)
    assert (resumed / "trial-42.json").read_bytes() == (run / "trial-42.json").read_bytes()
    assert main(["check", str(resumed), "--quiet"]) in (0, 5)


@pytest.mark.long
def test_hashed_tables_are_taken_over_whole(folder: Path) -> None:
    hashed = ("--categorical", "user,ad", "--numeric", "price", "--hash", "50")
    for name, days, seed in (("hash-old", range(1000, 1010), 6), ("hash-new", range(1010, 1020), 7)):
        imported(folder, name, log(range(40), range(30), days, seed), *hashed)
    plain = ["--train.weight-decay", "0", "--train.table-weight-decay", "0", "--train.epochs", "2"]
    adagrad = ["--train.optimizer", "rowwise-adagrad", "--train.schedule", "constant"]
    for workload, more in (("dlrm", adagrad), ("micro-dlrm", [])):
        run = ["run", workload, "--data", str(folder / "hash-old"), "--run-dir", str(folder / workload), *TRAIN]
        assert main([*run, *plain, *more]) in (0, 5)
        still = ["--train.epochs", "1", "--train.max-steps", "1", "--train.learning-rate", "1e-30"]
        after = start(folder, f"{workload}-next", *still, run=workload, data="hash-new")
        for key in ("user", "ad"):
            old, new = (recperf.open(one, device="cpu").model.served.model for one in (folder / workload, after))
            assert torch.equal(old.embeddings.table(key), new.embeddings.table(key))


@pytest.mark.long
def test_what_cannot_be_started_from_is_refused_in_a_line(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows = pd.read_csv(folder / "new.csv")
    plain = ("--categorical", "user,ad", "--numeric", "price", "--multi", "tags")
    imported(folder, "no-price", rows, "--categorical", "user,ad", "--multi", "tags")
    imported(folder, "more", rows.assign(city="x"), "--categorical", "user,ad,city", *plain[2:])
    imported(folder, "text", rows.assign(ad="a" + rows["ad"].astype(str)), *plain)
    imported(folder, "hashed", rows, *plain, "--hash", "50")
    imported(folder, "moved", rows[["ad", *rows.columns.drop("ad")]], *plain)
    imported(folder, "untimed", rows.drop(columns="time"), *plain)
    narrow = ("--model.dim", "4", "--model.bottom", "1", "16", "4")
    movielens = folder / "movielens"
    assert main(
        ["run", "micro-dlrm", "--data.source", "embedded", "--run-dir", str(movielens), *STILL[:4], *TRAIN]
    ) in (0, 5)
    refused = {
        ("no-price",): "no-price has no column 'price', which old has",
        ("more",): "old has no column 'city', which more has",
        ("text",): "column 'ad' is categorical (text) in text and categorical (number) in old",
        ("hashed",): "column 'user' is categorical (text, hashed to 48 rows) in hashed and categorical (text) in old",
        ("moved",): "the columns of moved are in another order than those of old, from 'ad' on",
        ("untimed", "--start.forget-days", "9"): "untimed has no times, so that nothing in it can be forgotten by time",
        ("new", "--data.holdout", "0.3"): "data.holdout is 0.3, that of run 0.2: its weights may know held-out rows",
        ("new", "--start.run", str(movielens)): "movielens is a run of micro-dlrm, whose weights dlrm cannot start fr",
        (
            "new",
            *narrow,
        ): "the model has bottom.layers.1.weight of (4, 16), that of run has bottom.layers.1.weight of (8, 16)",
    }
    target = folder / "refused"
    capfd.readouterr()
    for (name, *more), message in refused.items():
        arguments = ["run", "--start-from", str(folder / "run"), "--data", str(folder / name), *more]
        assert main([*arguments, "--run-dir", str(target), "--no-peaks", "--quiet"]) in (2, 3, 4), name
        assert message in capfd.readouterr().err.splitlines()[0]
        assert not target.exists()
    single = imported(folder, "single", rows, "--categorical", "user,ad")
    arguments = ["run", "micro-dlrm", "--data", str(single), "--start.run", str(movielens), "--quiet"]
    assert main([*arguments, "--run-dir", str(target)]) == 3
    assert "movielens was not trained on data of your own" in capfd.readouterr().err
