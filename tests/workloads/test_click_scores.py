"""Scores of a user's own clicks: equal from files and frames, with unknown ids counted and no feature overwritten."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import recperf
from recperf.cli import main
from recperf.errors import DataError, RecperfWarning
from recperf.execution.scoring import score_file

ROWS = 240


def columns() -> dict[str, Any]:
    """Clicks whose features are named like roles and like columns of outputs; flags and postal codes decide them."""
    draw = np.random.default_rng(5)
    zips = np.array(["00501", "10001", "02134", "90210"])[draw.integers(0, 4, ROWS)]
    flags = np.array(["True", "False"])[draw.integers(0, 2, ROWS)]
    clicked = ((zips == "00501") ^ (flags == "True")).astype(int)
    return {
        "uid": draw.integers(1, 20, ROWS), "sku": draw.integers(1, 9, ROWS), "user": zips, "item": flags,
        "label": draw.choice(["x", "y"], ROWS), "score": draw.integers(0, 9, ROWS) / 2, "clicked": clicked,
    }  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("clicks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RECPERF_HOME", str(folder / "home"))
        file, store = folder / "clicks.csv", folder / "shop"
        pd.DataFrame(columns()).to_csv(file, index=False)
        features = ("--categorical", "user,item,label", "--numeric", "score", "--min-count", "1")
        roles = ("--label", "clicked", "--user", "uid", "--item", "sku", *features, "--store", str(store), "--quiet")
        assert main(["data", "import", "--clicks", str(file), *roles]) == 0
        small = ("--train.max-steps", "2", "--ranking.users", "0", "--no-report", "--no-peaks", "--quiet")
        assert main(["run", "micro-dlrm", "--data", str(store), "--run-dir", str(folder / "run"), *small]) in (0, 5)
        yield recperf.open(folder / "run", device="cpu")


@pytest.fixture(autouse=True)
def no_warning(recwarn: pytest.WarningsRecorder) -> Any:
    yield
    assert not [one for one in recwarn if issubclass(one.category, RecperfWarning)]


def test_scores_are_equal_from_files_and_frames(run: Any, tmp_path: Path) -> None:
    """The reproduction: booleans and postal codes as pandas reads them."""
    rows = pd.DataFrame(columns()).drop(columns="clicked")
    rows.to_csv(tmp_path / "a.csv", index=False)
    typed = pd.read_csv(tmp_path / "a.csv")
    assert [typed[name].dtype.kind for name in ("user", "item")] == ["i", "b"]
    logits = {"text": run.score(rows)["logit"], "pandas": run.score(typed)["logit"]}
    logits |= {"polars": run.score(pl.from_pandas(typed))["logit"], "arrow": run.score(pa.table(typed))["logit"]}
    logits["dict"] = run.score({name: typed[name].to_numpy() for name in typed})["logit"]
    typed.to_parquet(tmp_path / "a.parquet")
    typed.to_json(tmp_path / "a.jsonl", orient="records", lines=True)
    for name in ("a.csv", "a.parquet", "a.jsonl"):
        summary = score_file(run.model, tmp_path / name, tmp_path / "scores.parquet")
        assert set(summary.unknown.values()) == {0}
        logits[name] = pq.read_table(tmp_path / "scores.parquet")["logit"]
    assert len({np.asarray(one, np.float32).tobytes() for one in logits.values()}) == 1, logits
    assert len(np.unique(np.asarray(logits["text"]))) > 8


def test_features_named_like_outputs_are_not_overwritten(run: Any, tmp_path: Path) -> None:
    held_out, again = tmp_path / "held-out.csv", tmp_path / "again.csv"
    score_file(run.model, None, held_out)
    first = pd.read_csv(held_out)
    assert list(first.columns) == ["uid", "sku", "user", "item", "label", "score", "recperf_label", "recperf_score",
                                   "logit"]  # fmt: skip
    assert set(first["label"]) == {"x", "y"}
    score_file(run.model, held_out, again)
    # Columns of earlier scores, which are no features, are replaced.
    assert pd.read_csv(again).equals(first)
    frame = run.score(first)
    assert np.array_equal(frame["score"], first["score"])
    assert np.array_equal(frame["recperf_score"].astype(np.float32), first["recperf_score"].astype(np.float32))


def test_unknown_ids_are_said_and_mostly_unknown_ones_refused(
    run: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = pd.DataFrame(columns())
    few = rows.assign(uid=[777, *rows["uid"][1:]])
    with pytest.warns(RecperfWarning, match="1 row with an unknown uid"):
        run.score(few)
    most = rows.assign(uid=[f"u{number % 7}" if number < 200 else "3" for number in range(ROWS)])
    message = (
        "column 'uid': 83% of 240 rows have an id that the data of this model has never had, such as 'u0', 'u1', 'u2'"
    )
    with pytest.raises(DataError) as error:
        run.score(most)
    assert error.value.what == message
    with pytest.warns(RecperfWarning, match="90 rows with an unknown uid"):
        run.score(most[:90])
    with pytest.warns(RecperfWarning, match="200 rows with an unknown uid"):
        logits = run.score(most, allow_unknown=True)["logit"]
    file, output = tmp_path / "rows.csv", tmp_path / "scores.parquet"
    most.to_csv(file, index=False)
    capfd.readouterr()
    command = ["score", str(run.folder), "--input", str(file), "--output", str(output), "--device", "cpu", "--json"]
    assert main(command) == 3
    assert json.loads(capfd.readouterr().out)["error"]["what"] == message
    assert not output.exists()
    assert main([*command, "--allow-unknown"]) == 0
    summary = json.loads(capfd.readouterr().out)
    assert (summary["rows"], summary["unknown"]["uid"], summary["unknown"]["user"]) == (ROWS, 200, 0)
    assert np.array_equal(pq.read_table(output)["logit"], logits)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.csv", "scores.parquet"]
