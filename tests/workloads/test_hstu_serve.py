"""A trained hstu: recommendations for users and for histories, by own ids and with titles, and its export."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

import recperf
from recperf.cli import main
from recperf.errors import RecperfWarning, UsageError

ITEMS = 30
SMALL = (
    "--model.dim",
    "8",
    "--model.blocks",
    "1",
    "--model.head-dim",
    "4",
    "--model.max-length",
    "6",
    "--train.batch-size",
    "4",
)
TRAIN = ("--train.max-steps", "3", "--no-report", "--no-peaks", "--quiet")


@pytest.fixture(scope="module", params=[False, True], ids=["sequences", "times"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Users a0, a1 and so on with items 100 and up, of which every second one has a title."""
    folder = tmp_path_factory.mktemp("hstu")
    draw = np.random.default_rng(5)
    sequences = {f"a{user}": (100 + draw.permutation(ITEMS)[: 4 + user % 9]).tolist() for user in range(24)}
    timed, log = request.param, folder / "log.csv"
    if timed:
        rows = [f"{user},{item},{60 * at}" for user, items in sequences.items() for at, item in enumerate(items)]
        log.write_text("\n".join(["user,item,time", *rows]))
    else:
        log.write_text("\n".join(" ".join(map(str, [user, *items])) for user, items in sequences.items()))
    (folder / "items.csv").write_text("id,title\n" + "".join(f"{100 + at},Item {at}\n" for at in range(0, ITEMS, 2)))
    more = () if timed else ("--sequences",)
    store = ("--items", str(folder / "items.csv"), "--store", str(folder / "store"), "--quiet")
    assert main(["data", "import", str(log), *more, *store]) == 0
    arguments = ["run", "hstu", "--data", str(folder / "store"), "--run-dir", str(folder / "run"), *SMALL, *TRAIN]
    assert main(arguments) in (0, 5)
    opened = recperf.open(folder / "run")
    return opened, sequences, timed


def test_a_history_gets_what_its_user_gets_without_the_items_met(run: Any, capfd: pytest.CaptureFixture[str]) -> None:
    opened, sequences, _ = run
    user, history = "a7", sequences["a7"]
    of_user, of_history = opened.recommend([user], k=ITEMS), opened.recommend([history, [history[-1]]], k=ITEMS)
    own = of_history["history"] == 1
    # Events come at an even pace, which a history without times is read with.
    assert of_user["item"].tolist() == of_history["item"][own].tolist()
    np.testing.assert_allclose(of_user["logit"], of_history["logit"][own], rtol=1e-5, atol=1e-5)
    assert set(of_user["item"]) == set(range(100, 100 + ITEMS)) - set(history)
    assert set(opened.recommend([history], k=ITEMS, exclude_seen=False)["item"]) == set(range(100, 100 + ITEMS))
    whole = opened.recommend([user], k=ITEMS, exclude_seen=False)
    assert whole["score"].sum() == pytest.approx(1, abs=1e-5)
    titles = dict(zip(of_user["item"], of_user["title"]))
    assert all(title == (f"Item {item - 100}" if item % 2 == 0 else None) for item, title in titles.items())
    capfd.readouterr()
    joined = ",".join(map(str, history))
    assert main(["recommend", str(opened.folder), "--history", joined, "--k", "3", "--json"]) == 0
    printed = json.loads(capfd.readouterr().out)["recommendations"]
    assert [row["item"] for row in printed] == of_user["item"][:3].tolist()
    with pytest.warns(RecperfWarning, match="1 row with an unknown item"):
        assert opened.recommend([[*history, 999]], k=3)["item"].tolist() == of_user["item"][:3].tolist()
    with pytest.raises(UsageError, match="it scores no rows"):
        opened.score({"user": ["a7"], "item": [100]})


def test_lists_of_all_users_are_described(run: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    opened, sequences, _ = run
    output = tmp_path / "all.parquet"
    capfd.readouterr()
    assert main(["recommend", str(opened.folder), "--all-users", "--output", str(output), "--k", "5", "--json"]) == 0
    lists = json.loads(capfd.readouterr().out)["lists"]
    rows = pq.read_table(output)
    assert len(rows) == 5 * len(sequences)
    assert lists["coverage"] == pytest.approx(len(rows["item"].unique()) / ITEMS)
    assert 0 < lists["overlap"] < 1
    assert 0 < lists["popularity"] < 1


def test_an_export_has_the_encoder_and_an_index_of_items(run: Any, tmp_path: Path) -> None:
    opened, _, timed = run
    manifest = opened.export(tmp_path / "exported")
    assert manifest["program"]["largest_difference"] < 1e-5
    assert ("times_BL" in [one["name"] for one in manifest["program"]["inputs"]]) == timed
    content = (tmp_path / "exported" / "items.faiss").read_bytes()
    kind, width, items, _, _, trained, metric, numbers = struct.unpack_from("<4siqqq?iQ", content)
    assert (kind, width, items, trained, metric, numbers) == (b"IxFI", 8, ITEMS, True, 0, 8 * ITEMS)
    vectors = np.frombuffer(content, np.float32, offset=struct.calcsize("<4siqqq?iQ")).reshape(items, width)
    table = pq.read_table(tmp_path / "exported" / manifest["tables"][0]["file"])
    np.testing.assert_array_equal(vectors, np.stack(table["embedding"].to_pylist()).astype(np.float32))
    example = load_file(tmp_path / "exported" / "example.safetensors")
    expected = example.pop("logits")
    users = torch.export.load(tmp_path / "exported" / "program.pt2").module()(**example).detach()
    torch.testing.assert_close(users, expected, rtol=1e-5, atol=1e-5)
    history = [table["id"][row - 1].as_py() for row in example["rows_BL"][0][: example["lengths_B"][0]].tolist()]
    ranked = [table["id"][place].as_py() for place in np.argsort(-(vectors @ users[0].numpy()))]
    if not timed:
        assert opened.recommend([history], k=ITEMS, exclude_seen=False)["item"].tolist() == ranked
