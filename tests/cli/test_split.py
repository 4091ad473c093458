"""The split of a dataset: chosen at the import, changed by name, printed by every run, and kept by the runs that have
begun."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from recperf import locations

Recperf = Callable[..., str]
WARNING = "leave-one-out: training sees later events of other users; --data.split time holds them out"
QUICKLY = ("--no-peaks", "--no-report", "--target.beat", "none", "--train.device", "cpu")


@pytest.fixture
def recperf(call: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Recperf:
    """What a command prints; another exit code than expected is an error."""
    monkeypatch.setenv("RECPERF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("recperf.execution.measuring.measure_run", lambda *_: None)

    def run(*words: object, code: int = 0) -> str:
        found, out, err = call(*words)
        assert found == code, (words, out, err)
        return out + err

    return run


def purchases(path: Path) -> str:
    """Twenty buyers with ten purchases each, one a day for each buyer."""
    draw, lines = random.Random(2), ["customer,product,when,stars"]
    for buyer in range(20):
        begin = datetime(2026, 1, 1 + buyer % 5, buyer, tzinfo=UTC)
        for day in range(10):
            when = (begin + timedelta(days=day)).isoformat()
            lines.append(f"c{buyer},p{draw.randrange(12)},{when},{draw.randrange(1, 6)}")
    path.write_text("\n".join([*lines, ""]))
    return path.name


def data_of(run: str) -> Any:
    return json.loads(Path(run, "data.json").read_text())


def test_a_run_keeps_its_split_when_that_of_the_dataset_changes(recperf: Recperf, tmp_path: Path) -> None:
    said = recperf("data", "import", purchases(tmp_path / "log.csv"), "--name", "shop")
    assert "  held out    time, 40 of 200 events from 2026-01-1" in said
    train = ("run", "micro-dlrm", "--data", "shop", *QUICKLY, "--train.max-steps", 2)
    said = recperf(*train, "--run-dir", "first")
    assert "  held out  time, 40 of 200 events from 2026-01-1" in said
    first = data_of("first")["held_out"]
    assert (first["kind"], first["held_out"]["rows"]) == ("time", 40)

    said = recperf("data", "split", "shop", "--split", "leave-one-out")
    assert "held out of shop: leave-one-out, the last event of 20 users: 20 of 200 events" in said
    assert said.count(WARNING) == 1
    assert "leave-one-out, the last event of 20 users" in recperf("data", "info", "shop")
    assert recperf(*train, "--run-dir", "second").count(WARNING) == 1
    assert data_of("second")["held_out"]["kind"] == "leave-one-out"
    # An option is for one run, and says less about a dataset that is divided otherwise.
    dry = recperf(
        "run", "dlrm", "--data", "shop", "--data.split", "time", "--data.holdout", "0.3", "--dry-run", "--json"
    )
    asked = json.loads(dry[dry.index("{") : dry.rindex("}") + 1])["config"]["data"]
    assert (asked["split"], asked["holdout"], asked["boundary"]) == ("time", 0.3, None)
    assert "holdout is 0.3, but leave-one-out" in recperf(*train, "--data.holdout", "0.3", code=3)

    longer = ("--allow-change", "train.max_steps", "--train.max-steps", 4, "--quiet")
    Path("first", "seal.json").unlink()
    Path("first", "trial-42.json").unlink()
    recperf("run", "--resume", "first", *longer)
    assert data_of("first")["held_out"] == first
    recperf("score", "first", "--input", "log.csv", "--output", "scores.csv")

    file = locations.dataset_folder("shop") / "store" / "split.json"
    whole = file.read_text()
    file.write_text(whole.replace('"rows": 20', '"rows": 21'))
    assert "split.json is damaged: it was changed after it was written" in recperf(*train, "--run-dir", "x", code=3)
    assert "split.json is damaged" in recperf("data", "split", "shop", code=3)
    recperf("score", "second", "--input", "log.csv", "--output", "scores.csv", "--force")
    said = recperf("data", "split", "shop", "--split", "time", "--boundary", "2026-01-12")
    assert "held out of shop: time, " in said
    assert " from 2026-01-12 on, of " in said
    recperf("data", "split", "shop", "--holdout", "0.1")
    assert json.loads(file.read_text())["boundary"] is None

    # A dataset of an earlier version has no such file.
    file.unlink()
    assert "time, 40 of 200 events" in recperf("data", "split", "shop")
    recperf("data", "import", "log.csv", "--name", "shop", "--split", "leave-one-out")
    assert "leave-one-out, " in recperf("data", "split", "shop")
    # The same file again, without a split, changes none.
    recperf("data", "import", "log.csv", "--name", "shop")
    assert "leave-one-out, " in recperf("data", "split", "shop")
    named = "runs of the dataset before, which can no longer be resumed or scored"
    assert named not in recperf("data", "import", "log.csv", "--name", "shop", "--replace")
    assert "time, 40 of 200 events" in recperf("data", "split", "shop")


def test_rows_with_a_label_have_their_own_choices(recperf: Recperf, tmp_path: Path) -> None:
    purchases(tmp_path / "log.csv")
    recperf("data", "import", "log.csv", "--clicks", "--name", "rows", "--split", "cold", "--holdout", "0.25")
    assert "cold, 50 of 200 rows drawn with seed 42, of 5 users; unseen in training: 5 users" in recperf(
        "data", "split", "rows"
    )
    assert "rows, 200 rows, split cold" in recperf("run", "micro-dlrm", "--data", "rows", "--dry-run")
    said = recperf("data", "split", "rows", "--split", "random", "--split-seed", 7)
    assert "random, 40 of 200 rows drawn with seed 7" in said
    assert "last, 40 of 200 rows, of 20 users" in recperf("data", "split", "rows", "--split", "last")
    assert "leave-one-out divides events" in recperf("data", "split", "rows", "--split", "leave-one-out", code=3)
    assert "last, 40 of 200 rows" in recperf("data", "split", "rows"), "a refused split changes nothing"
    (tmp_path / "plain.csv").write_text("a,label\n" + "".join(f"{at % 7},{at % 2}\n" for at in range(100)))
    said = recperf("data", "import", "plain.csv", "--clicks", "--categorical", "a")
    assert "  held out    random, 20 of 100 rows drawn with seed 42" in said
    assert "needs a user column" in recperf("data", "split", "plain", "--split", "cold", code=3)
    refused = recperf("data", "import", "plain.csv", "--clicks", "--name", "other", "--split", "cold", code=3)
    assert "needs a user column" in refused
    assert not locations.dataset_folder("other").exists(), "an import that fails leaves nothing"
    assert "is no dataset that you imported" in recperf("data", "split", "movielens-like", "--split", "time", code=2)


def test_a_run_of_an_earlier_version_is_refused_where_it_was_divided_otherwise(
    recperf: Recperf, tmp_path: Path
) -> None:
    recperf("data", "import", purchases(tmp_path / "log.csv"), "--name", "shop")
    recperf("run", "hstu", "--data", "shop", "--run-dir", "r", "--train.max-steps", 2, *QUICKLY)
    Path("r", "seal.json").unlink()
    data = data_of("r")
    del data["held_out"]
    Path("r", "data.json").write_text(json.dumps({**data, "valid_rows": 7}))
    assert "the run started with another split of its data: time: 7 of 200 rows" in recperf(
        "run", "--resume", "r", code=3
    )
    saved = json.loads(Path("r", "config.json").read_text())
    saved["config"]["data"]["validation_share"] = 0.1
    Path("r", "config.json").write_text(json.dumps(saved))
    said = recperf("recommend", "r", "--users", "c1", code=3)
    assert "which held out other rows of the data" in said
    assert "train anew: recperf run hstu --data shop" in said
