"""A user's own clicks after training: scores are equal from files and frames, unknown ids are counted, no feature is
overwritten, and inputs computed from an export alone are the model's own."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import recperf
from recperf.cli import main
from recperf.data.config import SplitConfig
from recperf.data.rows.imported import ImportedClicks
from recperf.data.rows.imports import import_clicks
from recperf.data.rows.options import ClickOptions
from recperf.errors import DataError, RecperfError, RecperfWarning
from recperf.execution import exporting
from recperf.execution.scoring import score_file
from recperf.execution.serving import Export
from recperf.models.config import DLRMConfig
from recperf.models.dlrm import DLRM
from recperf.train.config import TrainConfig
from recperf.train.device import choose
from recperf.workloads.click_serve import ServedImported

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


OUTSIDE = "../../outside"


def served(folder: Path, **options: Any) -> ServedImported:
    """An untrained model of made-up clicks, of which one column is named like a path."""
    draw, rows = np.random.default_rng(5), 300
    places = np.array(["Rome", "Oslo", "São Paulo", ""])[draw.integers(0, 4, rows)]
    places[:2] = ["once", "once"]
    table = pa.table({
        OUTSIDE: places,
        "zip": np.array(["00501", "10001", "02134", "1.50"])[draw.integers(0, 4, rows)],
        "tags": ["|".join(sorted(draw.choice(["a", "b", "c"], draw.integers(0, 4), replace=False))) for _ in places],
        "price": [None if one < 0 else one for one in draw.normal(40, 30, rows).round(2)],
        "clicked": draw.integers(0, 2, rows),
    })  # fmt: skip
    pq.write_table(table, folder / "clicks.parquet")
    columns = {"label": "clicked", "categorical": f"{OUTSIDE},zip", "numeric": "price", "multi": "tags", "min_count": 3}
    import_clicks(ClickOptions(clicks=folder / "clicks.parquet", **{**columns, **options}), folder / "store")
    clicks = ImportedClicks(folder / "store", SplitConfig())
    config = DLRMConfig(
        features=clicks.keys, rows=clicks.table_rows, dim=4, bottom=(len(clicks.dense_names), 4), top=(4, 1),
        table_init_std=1.0,
    )  # fmt: skip
    settings = choose(TrainConfig(device="cpu"), largest_product_flops=1)
    return ServedImported(clicks, DLRM(config), settings)


EXPORTED = pa.table({
    OUTSIDE: ["Rome", " Oslo ", "NA", None, "once", "never"],
    "zip": ["501", "00501", "1.5", None, "2134", "7"],
    "tags": ["b|a", "", "c|d|c", None, "a", "null"],
    "price": [12.5, None, -3.0, 1e6, 0.0, 40.0],
})  # fmt: skip


def inputs_of(row: dict[str, Any], content: Export, folder: Path) -> tuple[list[float], list[np.ndarray[Any, Any]]]:
    """The dense features and the embeddings of a row, from nothing but what an export has."""
    encoding = json.loads(json.dumps(content.encoding))

    def text(value: str | None) -> str | None:
        return None if value is None or value.strip() in encoding["missing"] else value.strip()

    dense = []
    for one in encoding["dense"]:
        x = row[one["x"]]
        if one["name"].endswith(" missing"):
            dense.append(float(x is None))
        elif x is None:
            dense.append(0.0)
        else:
            dense.append((np.sign(x) * np.log1p(abs(np.float32(x))) - one["mean"]) / one["deviation"])
    embeddings = []
    for number, (table, one) in enumerate(zip(content.tables, encoding["sparse"])):
        entries = pq.read_table(folder / exporting._write_table(folder, table, number)["file"]).to_pylist()
        values = [text(row[one["name"]])]
        if one["kind"] == "multi":
            parts = {text(part) for part in (row[one["name"]] or "").split(encoding["separator"])} - {None}
            values = list(sorted(parts, key=str)[: one["most"]]) or [None]
        embeddings.append(np.sum([embedding(entries, one, value) for value in values], 0))
    return np.clip(dense, -10, 10).tolist(), embeddings


def key(value: str | None, column: dict[str, Any]) -> str | None:
    """What a text is compared by, as the export's `key` says."""
    if value is None or column["values"] == "text":
        return value
    return repr(float(value)).removesuffix(".0")


def embedding(entries: list[dict[str, Any]], column: dict[str, Any], value: str | None) -> Any:
    value = key(value, column)
    if column["hashed"]:
        digest = hashlib.blake2b(f"{column['name']}\0{value}".encode(), digest_size=8).digest()
        return entries[1 if value is None else 2 + int.from_bytes(digest, "little") % (len(entries) - 2)]["embedding"]
    keys = [key(one["id"], column) for one in entries]
    kind = "missing" if value is None else "id" if value in keys else "other"
    return next(one["embedding"] for one, name in zip(entries, keys) if one["entry"] == kind and name in (value, None))


@pytest.mark.parametrize("options", [{}, {"hash": 20}])
def test_inputs_follow_from_the_export_alone(tmp_path: Path, options: dict[str, Any]) -> None:
    model = served(tmp_path, **options)
    encoded = model.encode({name: EXPORTED[name] for name in EXPORTED.column_names})
    if not options:
        # A rare category of the training rows is known; one of several that no row has is not.
        assert {name: one.rows for name, one in encoded.unknown.items()} == {OUTSIDE: 1, "zip": 1, "tags": 1}
    with torch.no_grad():
        content = model.export(EXPORTED, encoded.inputs)
    folder = tmp_path / "a" / "export"
    folder.mkdir(parents=True)
    for at, row in enumerate(EXPORTED.to_pylist()):
        dense, embeddings = inputs_of(row, content, folder)
        np.testing.assert_allclose(content.inputs["dense"][at], dense, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(content.inputs["embeddings"][at], embeddings, rtol=1e-6)
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["export"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "clicks.parquet", "store"]
    # The check of the program: rounding passes, a weight that is one part in a thousand off does not.
    expected = exporting._expected_difference(content, "float32")
    with torch.no_grad():
        assert (content.program(**content.inputs) - content.logits_B).abs().max() <= expected
        next(content.program.parameters()).mul_(1.001)
        assert (content.program(**content.inputs) - content.logits_B).abs().max() > expected


def _frame(**more: Any) -> pd.DataFrame:
    return pd.DataFrame({**columns(), **more}).drop(columns="clicked")


TWICE = pd.concat([_frame(), _frame()[["user"]]], axis=1)
NOT_FRAMES: dict[str, Any] = {
    "lazy": pl.from_pandas(_frame()).lazy(), "series": _frame()["user"], "polars series": pl.Series([1, 2]),
    "twice": TWICE, "chunks": pa.chunked_array([[1]]), "none": None, "number": 3, "text": "rows", "rows": [{"uid": 1}],
    "scalars": dict.fromkeys(columns(), 1), "texts": dict.fromkeys(columns(), "ab"), "lazy columns": {
        name: iter(values) for name, values in columns().items()
    }, "lengths": {**columns(), "uid": [1, 2]}, "squares": {**columns(), "uid": np.zeros((ROWS, 2))},
    "objects": {**columns(), "uid": [object()] * ROWS}, "frames": {**columns(), "uid": _frame()},
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_FRAMES)
def test_what_is_not_a_frame_is_one_typed_error(run: Any, name: str) -> None:
    with pytest.raises(RecperfError) as refused:
        run.score(NOT_FRAMES[name], allow_unknown=True)
    assert refused.value.exit_code in (2, 3)
    assert "\n" not in refused.value.what


@pytest.mark.parametrize(
    "users", [3, None, "1", {"user": [1]}, pl.DataFrame({"user": [1]}), object()], ids=lambda one: type(one).__name__
)
def test_what_is_not_a_list_of_users_is_one_typed_error(run: Any, users: Any) -> None:
    with pytest.raises(RecperfError):
        run.recommend(users)
