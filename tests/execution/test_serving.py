"""Scoring with a trained model: equal to the evaluation, and one clear line for each bad input."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch

import recperf
from recperf.cli import main
from recperf.errors import DataError, MachineError, RecperfError, UsageError
from recperf.execution.recommending import highest, likely_logits
from recperf.execution.serving import TrainedModel
from recperf.measure import counting
from recperf.models.tiers.config import TablesConfig
from recperf.train.checkpoint import read_state
from recperf.train.device import applied
from recperf.train.ranking import log_shares, rank_scores

TRAIN = ("--train.max-steps", "30", "--ranking.users", "0", "--no-report", "--no-peaks", "--quiet")
SMALL = ("--model.dim", "8", "--model.top", "8", "1", "--train.batch-size", "64")
RUNS = {
    "micro-dlrm": ("micro-dlrm", "--data.source", "embedded"),
    "dlrm-v4": ("dlrm-v4", "--data.events", "8000", "--data.windows.min-history", "8", "--train.batch-size", "64",
                "--model.rates-hidden", "4"),
    "clicks": ("dlrm", "--data", "CLICKS", "--model.bottom", "4", "8", *SMALL),
}  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def own_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for all tests here: synthetic events are generated once."""
    monkeypatch.setenv("RECPERF_HOME", str(home))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that trains a model for a few steps, once."""
    trained: dict[str, Path] = {}
    folder = tmp_path_factory.mktemp("runs")
    data = {"CLICKS": folder / "clicks"}

    def train(name: str) -> Path:
        if name not in trained:
            if name == "clicks":
                import_clicks(data["CLICKS"])
            trained[name] = folder / f"run-{name}"
            arguments = [str(data.get(argument, argument)) for argument in RUNS[name]]
            assert main(["run", *arguments, "--run-dir", str(trained[name]), *TRAIN]) in (0, 5)
        return trained[name]

    return train


USERS, ITEMS = 40, 30


def click_rows(users: Any, items: Any) -> dict[str, Any]:
    """Users with a city, and items with a price and several tags."""
    tags = ["", "red", "green|blue", "blue"]
    return {
        "who": users, "city": [("Rome", "Oslo", "")[user % 3] for user in users],
        "what": [f"item {item}" for item in items], "price": items * 1.5, "tags": [tags[item % 4] for item in items],
    }  # fmt: skip


def import_clicks(folder: Path) -> None:
    draw = np.random.default_rng(3)
    users, items, clicked = (draw.integers(0, most, 2000) for most in (USERS, ITEMS, 2))
    file = folder.with_suffix(".csv")
    pyarrow.csv.write_csv(pa.table({**click_rows(users, items), "clicked": clicked}), file)
    columns = ("--label", "clicked", "--user", "who", "--item", "what", "--categorical", "who,what,city")
    more = ("--numeric", "price", "--multi", "tags", "--name", "shop")
    assert main(["data", "import", "--clicks", str(file), *columns, *more, "--store", str(folder), "--quiet"]) == 0


@pytest.fixture
def run(runs: Any) -> Path:
    folder: Path = runs("micro-dlrm")
    return folder


def evaluated(folder: Path) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Logits and labels of an evaluation with the weights of the last checkpoint."""
    opened = recperf.open(folder)
    prepared = opened.workload.prepare(opened.config)
    trial = prepared.trial(opened.config.seed)
    trial.restore(read_state(opened.model.checkpoint)["trial"])
    with applied(prepared.settings), torch.no_grad():
        predictions = trial.predictions()
    return predictions.logits_N.numpy(), predictions.labels_N.numpy()


CLICKS = pytest.param("clicks", marks=pytest.mark.long)


@pytest.mark.parametrize("name", ["micro-dlrm", "dlrm-v4", CLICKS])
def test_scores_equal_the_evaluation(name: str, runs: Any, tmp_path: Path) -> None:
    folder, held_out = runs(name), tmp_path / "held-out.parquet"
    assert main(["score", str(folder), "--held-out", "--output", str(held_out), "--quiet"]) == 0
    rows = pq.read_table(held_out)
    logits, labels = evaluated(folder)
    np.testing.assert_array_equal(rows["logit"].to_numpy(), logits)
    np.testing.assert_array_equal(rows["label"].to_numpy(), labels)
    # The same rows from a file.
    again = tmp_path / "again.csv"
    assert main(["score", str(folder), "--input", str(held_out), "--output", str(again), "--quiet"]) == 0
    table = pyarrow.csv.read_csv(again)
    assert table.column_names == rows.column_names
    unique = np.ones(len(rows), bool)
    if name == "dlrm-v4":
        # A file cannot say which of several listens to an item within a second a row is.
        keys = list(zip(*(rows[column].to_pylist() for column in ("user", "item", "time"))))
        events = Counter(keys)
        unique = np.array([events[key] == 1 for key in keys])
    assert unique.mean() > 0.95
    table, logits = table.filter(unique), logits[unique]
    np.testing.assert_array_equal(table["logit"].to_numpy().astype(np.float32), logits)
    assert np.allclose(table["score"].to_numpy(), 1 / (1 + np.exp(-logits.astype(np.float64))), atol=1e-6)


def pairs(rows: int) -> dict[str, Any]:
    return {"user": np.arange(rows) % 90 + 1, "item": np.arange(rows) % 70 + 1}


def test_a_stopped_score_leaves_nothing_and_blocks_do_not_change_a_bit(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output = tmp_path / "rows.csv", tmp_path / "scores.parquet"
    pyarrow.csv.write_csv(pa.table({**pairs(40_000), "note": np.arange(40_000)}), source)
    command = ["score", str(run), "--input", str(source), "--output", str(output), "--quiet"]
    assert main(command) == 0
    whole = output.read_bytes()
    assert pq.read_table(output).column_names == ["user", "item", "note", "score", "logit"]
    output.unlink()
    monkeypatch.setattr("recperf.execution.serving.Served.block_rows", 8192)
    score = TrainedModel.score

    def stopping(model: TrainedModel, rows: pa.Table, columns: Any) -> Any:
        if int(rows["note"][0].as_py()) > 20_000:
            os.kill(os.getpid(), 15)
        return score(model, rows, columns)

    with monkeypatch.context() as patch:
        patch.setattr(TrainedModel, "score", stopping)
        assert main(command) == 75
    assert [path.name for path in tmp_path.iterdir()] == ["rows.csv"]
    assert main(command) == 0
    assert output.read_bytes() == whole


@pytest.mark.parametrize("name", ["micro-dlrm", "dlrm-v4", CLICKS])
def test_recommendations_are_the_highest_scores(
    name: str, runs: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    opened = recperf.open(runs(name))
    served = opened.model.served
    user, items = served.users.values[3].as_py(), served.items.values.to_pylist()
    frame: dict[str, Any] = {"user": np.full(len(items), user), "item": np.array(items)}
    if name == "clicks":
        frame = click_rows(np.full(len(items), int(user)), np.array([int(item.split()[1]) for item in items]))
    logits = opened.score(frame)["logit"].astype(np.float64)
    meeting = served.meeting()[0].numpy()
    np.testing.assert_allclose(np.exp(meeting).sum(), 1)
    scores = meeting - np.log1p(np.exp(-logits))
    best = np.argsort(-scores, kind="stable")[:5]
    rows = opened.recommend([user], k=5)
    assert rows["item"].tolist() == [items[place] for place in best]
    np.testing.assert_allclose(rows["logit"], logits[best], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(rows["rank_score"], scores[best], rtol=1e-5, atol=1e-6)
    capfd.readouterr()
    command = ["recommend", str(opened.folder), "--users", str(user), "--k", "5", "--json", "--exclude-seen"]
    assert main(command) == 0
    unseen = [row["item"] for row in json.loads(capfd.readouterr().out)["recommendations"]]
    seen = {items[place] for place in served.seen(3)}
    assert seen
    ranked = [items[place] for place in np.argsort(-scores, kind="stable")]
    assert unseen == [item for item in ranked if item not in seen][:5]


class CostlyItems:
    """A model with these logits that counts the items it is asked for."""

    batch_size = 16

    def __init__(self, logits_I: torch.Tensor) -> None:
        self.served, self.logits_I, self.asked = self, logits_I, 0

    def rank_items(self, user: Any, items_N: Any) -> torch.Tensor:
        self.asked += len(items_N)
        return self.logits_I[torch.from_numpy(items_N)]


@pytest.mark.parametrize(("k", "seen"), [(1, None), (10, [0, 7]), (5, []), (2000, None)])
def test_items_that_cannot_be_among_the_best_are_not_scored(k: int, seen: list[int] | None) -> None:
    draw = torch.Generator().manual_seed(k)
    logits_I, meeting_I = torch.randn(2000, generator=draw), log_shares(torch.arange(2000, 0, -1) ** 4)
    meeting_I = meeting_I[torch.randperm(2000, generator=draw)]
    model: Any = CostlyItems(logits_I)
    expected_I = rank_scores(logits_I, meeting_I)
    left_out = None if seen is None else torch.tensor(seen, dtype=torch.int64)
    found_I = rank_scores(likely_logits(model, None, meeting_I, k, left_out), meeting_I)
    if seen:
        expected_I[seen] = found_I[seen] = -torch.inf
    expected, found = highest(expected_I[None], k), highest(found_I[None], k)
    assert all(torch.equal(one, other) for one, other in zip(expected, found))
    assert model.asked < 1500 or k == 2000


@pytest.mark.long
def test_columns_that_belong_to_neither_user_nor_item_cannot_recommend(runs: Any) -> None:
    opened = recperf.open(runs("clicks"))
    _, item = opened.model.served.owned
    item.by_item_D[:] = False
    with pytest.raises(UsageError, match="belong neither to the user nor to the item: price"):
        opened.recommend(["1"])


READER = """
import json, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "recperf":
            raise ImportError("recperf is not installed here")
sys.meta_path.insert(0, Blocked())
import numpy, pyarrow.parquet as parquet, torch
from safetensors.torch import load_file
for folder in sys.argv[1:]:
    manifest = json.load(open(folder + "/manifest.json"))
    program = torch.export.load(folder + "/program.pt2").module()
    inputs = load_file(folder + "/example.safetensors")
    logits = inputs.pop("logits")
    tables = {table["name"]: parquet.read_table(folder + "/" + table["file"]) for table in manifest["tables"]}
    rows = parquet.read_table(folder + "/example.parquet")
    def embedding(name, ids):
        table = tables[name]
        keys = table[table.column_names[0]].to_pylist()
        rows = [keys.index(one) if one in keys else 0 for one in ids]
        return torch.tensor(numpy.stack(table["embedding"].to_numpy()[rows]))
    names = ("who", "what") if "who" in rows.column_names else ("user", "item")
    user, item = (rows[name].to_pylist() for name in names)
    if "embeddings" in inputs:
        for name, ids in zip(names, (user, item)):
            inputs["embeddings"][:, [table["name"] for table in manifest["tables"]].index(name)] = embedding(name, ids)
    else:
        inputs["context_BCW"][:, 0] = embedding("uid", user)
        inputs["candidate_BW3"][:, : inputs["item_BLW"].shape[2]] = embedding("item_id", item)
    assert set(load_file(folder + "/dense.safetensors")) == set(program.state_dict())
    assert "recperf" not in sys.modules
    for rows in (8, 3, 1):
        part = program(**{name: one[:rows] for name, one in inputs.items()})
        print(float((part - logits[:rows]).abs().max()))
"""


@pytest.mark.parametrize("name", ["micro-dlrm", CLICKS, pytest.param("dlrm-v4", marks=pytest.mark.long)])
def test_an_export_needs_no_recperf(name: str, runs: Any, tmp_path: Path) -> None:
    folder = tmp_path / "exported"
    # Of clicks the tables are as wide as the example has rows; and while somebody counts operators.
    with counting.Counter(1 << 20, 1 << 20) as counter:
        counter.begin_step()
        manifest = recperf.open(runs(name), device="cpu").export(folder)
    assert manifest["program"]["largest_difference"] < 1e-6
    done = subprocess.run([sys.executable, "-I", "-c", READER, folder], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    differences = list(map(float, done.stdout.split()))
    assert len(differences) == 3
    assert max(differences) < 1e-6
    with pytest.raises(DataError, match="exists already"):
        recperf.open(runs(name)).export(folder)


COMPILED = """
import sys, torch
from safetensors.torch import load_file
program = torch._inductor.aoti_load_package(sys.argv[1] + "/compiled.pt2")
inputs = load_file(sys.argv[1] + "/example.safetensors")
logits = inputs.pop("logits")
for rows in (8, 3, 1):
    print(float((program(**{name: one[:rows] for name, one in inputs.items()}) - logits[:rows]).abs().max()))
"""


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs a C++ compiler")
def test_a_compiled_program_gives_what_the_model_gives(runs: Any, tmp_path: Path) -> None:
    folder = tmp_path / "exported"
    manifest = recperf.open(runs("micro-dlrm"), device="cpu").export(folder, compiled=True)
    assert manifest["program"]["compiled"] == "compiled.pt2"
    assert manifest["program"]["largest_difference"] < 1e-6
    assert "compiled.pt2" in (folder / "README.md").read_text()
    command = [sys.executable, "-I", "-c", COMPILED, str(folder)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert max(map(float, done.stdout.split())) < 1e-6


@pytest.mark.long
@pytest.mark.parametrize(("name", "seeds"), [("dlrm-v4", 1), ("clicks", 2)])
def test_a_model_larger_than_memory_is_scored_where_its_tables_lie(
    name: str, seeds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trained with tables in files, scored with them in memory and in files: the last seed, whose rows begin as that
    seed drew them."""
    tables = ("--tables.placement", "file", "--tables.resident", "8MiB", "--tables.folder", str(tmp_path / "tables"))
    if name == "clicks":
        import_clicks(tmp_path / "clicks")
        tables += ("--train.optimizer", "rowwise-adagrad", "--train.schedule", "constant", "--train.weight-decay", "0",
                   "--train.table-weight-decay", "0")  # fmt: skip
    arguments = [str(tmp_path / "clicks") if one == "CLICKS" else one for one in RUNS[name]]
    options = [*arguments, *tables, "--seeds", str(seeds), "--run-dir", str(tmp_path / "run"), *TRAIN]
    assert main(["run", *options]) in (0, 5)
    score, logits = ["score", str(tmp_path / "run"), "--held-out", "--seed", str(41 + seeds), "--quiet"], []
    for place in ("memory", "file"):
        if place == "file":
            serve = {"dlrm-v4": "recperf.workloads.dlrm_v4.serve", "clicks": "recperf.workloads.click_serve"}[name]
            monkeypatch.setattr(f"{serve}.TablesConfig", partial(TablesConfig, placement="file"))
        output = tmp_path / f"{place}.parquet"
        assert main([*score, "--output", str(output)]) == 0
        logits.append(pq.read_table(output)["logit"].to_numpy())
    np.testing.assert_array_equal(*logits)
    with pytest.raises(MachineError, match="do not fit here: file: requested"):
        recperf.open(tmp_path / "run").export(tmp_path / "export")


def refused(*arguments: object) -> RecperfError:
    """The error of a score command."""
    from recperf.cli.score import command

    with pytest.raises(RecperfError) as error:
        command([*map(str, arguments), "--quiet"])
    assert "\n" not in error.value.what
    return error.value


def test_bad_inputs_are_one_line_each(run: Path, tmp_path: Path) -> None:
    file, output = tmp_path / "rows.csv", tmp_path / "scores.csv"
    arguments = (run, "--input", file, "--output", output)
    file.write_text("usr,item\n1,2\n")
    error = refused(*arguments)
    assert error.what == "the rows have no column 'user'; is it 'usr'?"
    file.write_text("")
    assert refused(*arguments).what == "the file is empty"
    file.write_text("user,item\n")
    assert refused(*arguments).what == "the file has no rows"
    file.write_text("user,item\n1,2\n")
    error = refused(*arguments, "--columns", "itm")
    assert error.what == "--columns: the file has no column 'itm'; did you mean 'item'?"
    assert (
        "does not end in .parquet or .pq or .csv"
        in refused(run, "--input", file, "--output", tmp_path / "scores.txt").what
    )
    assert refused(run, "--input", file, "--output", file).what == "the output is the input"
    assert [path.name for path in tmp_path.iterdir()] == ["rows.csv"]


def test_bad_checkpoints_are_one_line_each(run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file, copy = tmp_path / "rows.csv", tmp_path / "run"
    file.write_text("user,item\n1,2\n")
    arguments = (copy, "--input", file, "--output", tmp_path / "scores.csv")
    shutil.copytree(run, copy)
    assert "no checkpoint 'step-1'" in refused(*arguments, "--checkpoint", "step-1").what
    assert refused(*arguments, "--seed", 7).what == "this run has no checkpoint of seed 7"
    data = json.loads((copy / "data.json").read_text())
    (copy / "data.json").write_text(json.dumps({**data, "digest": "0" * 64}))
    assert refused(*arguments).what == "the data changed since the model was trained"
    assert data.pop("features")[2:4] == ["user count", "item count"]
    (copy / "data.json").write_text(json.dumps(data))
    # As runs have it whose model was trained on users' mean labels: it reads 16 numbers too, but others.
    others = "the run was trained on other features of the ratings than this version computes"
    assert refused(*arguments).what == others
    (copy / "seal.json").unlink()
    assert main(["run", "--resume", str(copy), "--quiet"]) == 3
    assert capfd.readouterr().err.splitlines()[0] == f"error: {others}"
    shutil.copy(run / "data.json", copy / "data.json")
    assert main(["score", *map(str, arguments)]) == 0
    assert "this run is not finished; its checkpoint of step 30 is used" in capfd.readouterr().out
    weights = next(copy.glob("checkpoints/seed-42/*/*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    error = refused(*arguments)
    assert isinstance(error, DataError)
    assert error.what.startswith("checkpoint step-00000030 is damaged: ")
    shutil.rmtree(copy / "checkpoints")
    assert refused(*arguments).what == "this run has no checkpoint"


def test_opening_a_run_imports_no_torch(run: Path) -> None:
    program = f"import recperf, sys; recperf.open({str(run)!r}).result; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
