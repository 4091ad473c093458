"""hstu: a resumed run ends with the same bits, what follows from the order of items is learned, and what a trained
model recommends and exports."""

from __future__ import annotations

import json
import math
import shutil
import struct
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

import recperf
from recperf.cli import main
from recperf.data.events.imports import import_events
from recperf.data.events.options import ImportOptions
from recperf.data.next_item import Targets
from recperf.distributed.ranks import Ranks
from recperf.errors import RecperfWarning, UsageError
from recperf.models.tiers.config import TablesConfig
from recperf.train.device import applied
from recperf.train.loop import take_step
from recperf.workloads.next_item.build import PreparedSequences
from recperf.workloads.next_item.config import resolve
from recperf.workloads.next_item.hstu import default

EPOCHS, STEPS = 5, 20
RUN = ["run", "hstu", "--data.users", "60", "--train.epochs", str(EPOCHS), "--train.batch-size", "16"]
UNTIL_WORSE = ["--train.learning-rate", "1", "--train.patience", "0", "--target.beat", "none"]
QUIETLY = ["--train.device", "cpu", "--train.threads", "1", "--no-peaks", "--no-report", "--quiet"]


def logged(folder: Path, kind: str) -> list[dict[str, Any]]:
    events = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [event for event in events if event["kind"] == kind]


SAMPLED = ["--model.loss", "sampled", "--model.negatives", "16"]
IN_FILES = ["--tables.placement", "file", "--tables.resident", "96KiB", "--tables.folder", "tables"]


@pytest.mark.parametrize(
    "tables", [pytest.param([], marks=pytest.mark.long, id="device"), pytest.param([*SAMPLED, *IN_FILES], id="file")]
)
def test_a_run_killed_after_its_best_epoch_ends_with_the_same_bits(
    tables: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropout draws from torch's own generators, so that their state must come back with the weights; and so must the
    weights of the epoch that validation chose, which is not the last at so high a rate."""
    monkeypatch.chdir(tmp_path)
    whole, resumed = Path("whole"), Path("resumed")
    options = ["--train.checkpoint-steps", "3", "--train.keep-last", "30", "--train.checkpoint-background", "off"]
    assert main([*RUN, *tables, *UNTIL_WORSE, *QUIETLY, *options, "--run-dir", str(whole)]) == 0
    scores = [event["validation_ndcg_10"] for event in logged(whole, "metric")]
    best = STEPS // EPOCHS * (1 + scores.index(max(scores)))
    assert best < STEPS
    shutil.copytree(whole, resumed)
    for name in ("seal.json", "result.json", "trial-42.json", "profile.json"):
        (resumed / name).unlink()
    checkpoints = resumed / "checkpoints" / "seed-42"
    saved = sorted(path.name for path in checkpoints.glob("step-*"))
    chosen = f"step-{best:08d}"
    last = saved[saved.index(chosen) + 1]
    for name in saved:
        if name > last:
            shutil.rmtree(checkpoints / name)
    (checkpoints / "index.json").write_text(json.dumps({"last": last, "best": chosen}))
    assert main(["run", "--resume", str(resumed), "--no-peaks", "--no-report", "--quiet"]) == 0
    assert (resumed / "trial-42.json").read_bytes() == (whole / "trial-42.json").read_bytes()
    losses = [[event["loss"] for event in logged(folder, "step")] for folder in (whole, resumed)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == STEPS
    ends = [folder / "checkpoints" / "seed-42" / f"step-{STEPS:08d}" for folder in (whole, resumed)]
    weights, theirs = ([path.read_bytes() for path in sorted(end.glob("*.safetensors"))] for end in ends)
    assert weights
    assert weights == theirs


@pytest.mark.long
def test_items_in_files_are_trained_ranked_and_served_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The cache holds 256 of 321 rows, so that rows leave it and come back."""
    monkeypatch.chdir(tmp_path)
    run, places = [*RUN, *SAMPLED, "--target.beat", "none", *QUIETLY], {"file": IN_FILES, "device": []}
    for place, options in places.items():
        assert main([*run, *options, "--train.table-optimizer", "adam", "--run-dir", place]) == 0
    in_files, on_device = ([event["loss"] for event in logged(Path(place), "step")] for place in places)
    assert in_files == on_device
    assert len(in_files) == STEPS
    assert Path("file/trial-42.json").read_bytes() == Path("device/trial-42.json").read_bytes()
    lists = [recperf.open(place).recommend([[1, 2, 3], [7]], k=20) for place in places]
    recperf.open("file").export("exported")
    vectors_ID = recperf.open("device").model.served.vectors_ID
    assert Path("exported/items.faiss").read_bytes().endswith(vectors_ID.detach().numpy().tobytes())
    monkeypatch.setattr("recperf.workloads.next_item.serve.TablesConfig", partial(TablesConfig, placement="file"))
    lists.append(recperf.open("file").recommend([[1, 2, 3], [7]], k=20))
    for column in ("item", "logit"):
        assert lists[0][column].tolist() == lists[1][column].tolist() == lists[2][column].tolist()
    capfd.readouterr()
    for options, fix in (
        (IN_FILES, "--model.loss sampled"),
        ([*SAMPLED, *IN_FILES, "--train.table-optimizer", "adamw"], "--train.table-optimizer adam"),
    ):
        assert main([*RUN, *options, *QUIETLY]) == 3
        assert fix in capfd.readouterr().err
    monkeypatch.setattr("recperf.workloads.next_item.build.current", lambda: Ranks(size=2))
    with pytest.raises(UsageError, match="need a single process"):
        PreparedSequences(recperf.open("file").config)


def reached(prepared: PreparedSequences, enough: float = 1.0) -> float:
    """The best hit rate of the test items over the epochs of a training, which ends with one that is enough."""
    torch.manual_seed(1)
    trial, best = prepared.trial(1), 0.0
    with applied(prepared.settings):
        for epoch in range(prepared.config.train.epochs):
            trial.model.train()
            batches = trial.recipe.order.batches(epoch)
            for step in range(len(trial.recipe.order)):
                take_step(trial.recipe, batches, step)
            trial.model.eval()
            best = max(best, trial.metrics(trial.predictions())["hit_rate_10"])
            if best >= enough:
                break
    return best


@pytest.mark.long
def test_what_follows_from_the_last_two_items_is_learned() -> None:
    """The default model on fewer users and items: the rule of the data itself is the most that is possible."""
    config = default()
    config = replace(config, data=replace(config.data, users=1200, groups=5, group_items=20))
    config = resolve(replace(config, train=replace(config.train, batch_size=16, device="cpu", threads=1)))
    prepared = PreparedSequences(config)
    ranking = prepared.ranking()
    hits = {name: ranking.metrics(ranks_N)["hit_rate_10"] for name, ranks_N in ranking.baseline_ranks.items()}
    possible = hits.pop("planted")
    assert max(hits.values()) < 0.8 * possible
    assert reached(prepared, 0.9 * possible) >= 0.9 * possible


def test_features_of_items_tell_of_rare_items(tmp_path: Path) -> None:
    """The category of the next item follows from that of the last one; an item has about three training events, of
    which its own row learns little. Of a category of 15 items a list of 10 has two thirds."""
    draw, categories, size = np.random.default_rng(3), 20, 15
    follows = draw.permutation(categories)
    lines = []
    for user in range(150):
        chain = [int(draw.integers(categories))]
        while len(chain) < 8:
            chain.append(int(follows[chain[-1]]))
        lines.append(" ".join(map(str, [f"u{user}", *(1000 + size * one + draw.integers(size) for one in chain)])))
    (tmp_path / "log.txt").write_text("\n".join(lines))
    items = (f"{1000 + item},Item {item},c{item // size}|{item % 2}\n" for item in range(categories * size))
    (tmp_path / "items.csv").write_text("id,title,category\n" + "".join(items))
    options = ImportOptions(events=tmp_path / "log.txt", sequences=True, items=tmp_path / "items.csv", name="rare")
    store = import_events(options, tmp_path / "store")
    config = replace(default(), model=replace(default().model, counts="off"))
    train = replace(config.train, epochs=8, batch_size=16, learning_rate=0.01, device="cpu", threads=1)
    hits = {}
    for features in (False, True):
        data = replace(config.data, path=store, features=features)
        hits[features] = reached(PreparedSequences(resolve(replace(config, data=data, train=train))))
    assert hits[True] > 0.4
    assert hits[True] > 2 * hits[False]


ITEMS = 30
SMALL = ["--model.dim", "8", "--model.blocks", "1", "--model.head-dim", "4", "--model.max-length", "6"]
SMALL += ["--train.batch-size", "4"]


@pytest.fixture(
    scope="module", params=[pytest.param(False, marks=pytest.mark.long, id="sequences"), pytest.param(True, id="times")]
)
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
    arguments = ["run", "hstu", "--data", str(folder / "store"), "--run-dir", str(folder / "run"), *SMALL]
    arguments += ["--train.max-steps", "3", "--no-report", "--no-peaks", "--quiet"]
    assert main(arguments) in (0, 5)
    opened = recperf.open(folder / "run")
    return opened, sequences, timed


def test_a_history_gets_what_its_user_gets_without_the_items_met(run: Any, capfd: pytest.CaptureFixture[str]) -> None:
    opened, sequences, timed = run
    # The user with the newest event.
    user, history = "a8", sequences["a8"]
    of_user, of_history = opened.recommend([user], k=ITEMS), opened.recommend([history, [history[-1]]], k=ITEMS)
    own = of_history["history"] == 1
    # Events come at an even pace, which a history without times is read with.
    assert of_user["item"].tolist() == of_history["item"][own].tolist()
    np.testing.assert_allclose(of_user["logit"], of_history["logit"][own], rtol=1e-5, atol=1e-5)
    assert set(of_user["item"]) == set(range(100, 100 + ITEMS)) - set(history)
    assert set(opened.recommend([history], k=ITEMS, exclude_seen=False)["item"]) == set(range(100, 100 + ITEMS))
    whole = opened.recommend([user], k=ITEMS, exclude_seen=False)
    assert whole["score"].sum() == pytest.approx(1, abs=1e-5)
    titles = dict(zip(of_user["item"], of_user["title"].fillna("")))
    assert all(title == (f"Item {item - 100}" if item % 2 == 0 else "") for item, title in titles.items())
    capfd.readouterr()
    joined = ",".join(map(str, history))
    assert main(["recommend", str(opened.folder), "--history", joined, "--k", "3", "--json"]) == 0
    printed = json.loads(capfd.readouterr().out)["recommendations"]
    assert [row["item"] for row in printed] == of_user["item"][:3].tolist()
    with pytest.warns(RecperfWarning, match="1 row with an unknown item"):
        assert opened.recommend([[*history, 999]], k=3)["item"].tolist() == of_user["item"][:3].tolist()
    if timed:
        # At the time of the tenth event the user has nine, and the request comes when that one does.
        early = opened.recommend([user], k=ITEMS, time=60 * 9)
        assert set(early["item"]) == set(range(100, 100 + ITEMS)) - set(history[:9])
        served = opened.model.served
        index = served.users.indices(pa.array([user]))
        nine = replace(served._stored(Targets(index, served.data.offsets_U1[index] + 9)), nexts_B=np.array([540]))
        batch = served._batch(nine)
        assert (len(batch.items_T), int(batch.next_times_T[-1])) == (6, 540)
        logits_I = served.model.scored(served.last(batch) @ served.vectors_ID.t(), batch)[0].detach()
        places = [item - 100 for item in early["item"]]
        np.testing.assert_allclose(early["logit"], logits_I[places], rtol=1e-5, atol=1e-5)
        assert main(["recommend", str(opened.folder), "--users", user, "--time", "1970-01-01T00:09", "--json"]) == 0
        printed = json.loads(capfd.readouterr().out)["recommendations"]
        assert [row["item"] for row in printed] == early["item"][:10].tolist()
        assert main(["recommend", str(opened.folder), "--users", user, "--time", "noon"]) == 2
        assert "--time is 'noon', which is no time" in capfd.readouterr().err
    else:
        with pytest.raises(UsageError, match="do not depend on the time of a request"):
            opened.recommend([user], time=5)
    with pytest.raises(UsageError, match="it scores no rows"):
        opened.score({"user": ["a7"], "item": [100]})


def test_an_export_has_the_encoder_and_an_index_of_items(run: Any, tmp_path: Path) -> None:
    opened, _, timed = run
    weights_CP = opened.model.served.model.counting.weights_CP
    weights_CP.copy_(torch.randn(weights_CP.shape, generator=torch.Generator().manual_seed(2)))
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
    if not timed:
        listed = opened.recommend([history], k=ITEMS, exclude_seen=False)
        scores = added_up(tmp_path / "exported", table["id"].to_pylist(), vectors @ users[0].numpy(), history)
        assert listed["logit"].tolist() == pytest.approx([scores[item] for item in listed["item"]], rel=1e-4)
        assert len(listed) == ITEMS


def added_up(folder: Path, ids: list[Any], products: Any, history: list[Any]) -> dict[Any, float]:
    """The score of each item as a server computes it from exported files."""
    facts, past = json.loads((folder / "manifest.json").read_text())["encoding"]["counting"], history[::-1]
    counts = pq.read_table(folder / "counts.parquet").to_pylist()
    events = {row["id"]: row["events"] for row in pq.read_table(folder / "events.parquet").to_pylist()}
    logits = {item: float(product) / facts["temperature"] for item, product in zip(ids, products)}
    parts = {"model": logits, "popularity": {item: math.log1p(events[item]) for item in ids}}
    for name in ("follows", "alike"):
        sums = dict.fromkeys(ids, 0.0)
        for age, item in enumerate(past[:10]):
            for row in counts:
                if (row["part"], row["item"]) == (name, item):
                    sums[row["other"]] += facts["decays"][name] ** age * row["value"]
        total = max(sum(sums.values()), 1e-30)
        parts[name] = {item: math.log1p(sums[item] / total / 1e-4) for item in ids}
    best = sorted(logits.values(), reverse=True)
    known = [1, math.log1p(len(past)), sum(math.log1p(events[item]) for item in past[:10]) / len(past[:10])]
    known += [best[0], best[0] - best[9]]
    known = [(one - mean) / scale for one, mean, scale in zip(known, facts["means"], facts["scales"])]
    weights = {name: sum(k * w for k, w in zip(known, facts["weights"][name])) for name in facts["parts"]}
    assert weights.keys() == parts.keys()
    return {item: sum(weights[name] * parts[name][item] for name in parts) for item in ids}
