"""A user's own clicks as a user types it: import, train, resume, on data of a moment."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from recperf import locations
from recperf.data.rows.imported import open_clicks

Call = Callable[..., tuple[int, str, str]]
QUICKLY = ["--no-peaks", "--no-report", "--quiet", "--train.device", "cpu", "--train.epochs", "2"]


def write(path: Path, rows: int = 1500) -> Path:
    """Clicks that depend on the user, the ad and the price."""
    draw = np.random.default_rng(5)
    users, ads, price = draw.integers(0, 40, rows), draw.integers(0, 25, rows), draw.normal(10, 3, rows)
    odds = draw.normal(size=40)[users] + draw.normal(size=25)[ads] - 0.3 * (price - 10)
    clicks = draw.random(rows) < 1 / (1 + np.exp(-odds))
    lines = [
        f"u{user},ad {ad},{value:.2f},{1_700_000_000 + at},{['a|b', 'b', ''][at % 3]},{int(click)}"
        for at, (user, ad, value, click) in enumerate(zip(users, ads, price, clicks))
    ]
    path.write_text("user,ad,price,ts,tags,clicked\n" + "\n".join(lines) + "\n")
    return path


@pytest.fixture
def data(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("RECPERF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("recperf.execution.measuring.measure_run", lambda *_: None)
    more = ["--categorical", "user,ad", "--numeric", "price", "--item", "ad", "--time", "ts", "--name", "mine"]
    code, out, err = call("data", "import", "--clicks", write(tmp_path / "a.csv"), "--label", "clicked", *more)
    assert code == 0, err
    assert "next: recperf run dlrm --data mine" in out
    assert "1,500 rows" in out
    assert "2023-11-14 to 2023-11-14" in out
    return "mine"


@pytest.mark.long
def test_few_clicks_are_learnt_and_the_best_baseline_decides(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product of two numbers, which trees approximate and a regression cannot see; two thousand rows."""
    monkeypatch.setattr("recperf.execution.measuring.measure_run", lambda *_: None)
    draw = np.random.default_rng(2)
    x, y, page = draw.normal(size=2000), draw.normal(size=2000), draw.integers(0, 12, 2000)
    clicks = (draw.random(2000) < 1 / (1 + np.exp(-2.5 * x * y))).astype(int)
    rows = "\n".join(f"{a:.3f},{b:.3f},{one},{label}" for a, b, one, label in zip(x, y, page, clicks))
    (tmp_path / "few.csv").write_text(f"x,y,page,clicked\n{rows}\n")
    columns = ["--categorical", "page", "--numeric", "x,y", "--store", tmp_path / "few"]
    assert call("data", "import", "--clicks", tmp_path / "few.csv", "--label", "clicked", *columns)[0] == 0
    code, _, err = call("run", "micro-dlrm", "--data", tmp_path / "few", "--run-dir", "few-run", *QUICKLY[:-2])
    quality = json.loads(Path("few-run", "result.json").read_text())["quality"]
    best, baselines = quality["differences"][0], quality["baselines"]
    assert quality["metrics"]["auc"] > max(
        baselines["gradient_boosting"]["auc"] - 0.02, baselines["logistic"]["auc"] + 0.2
    )
    assert (quality["target"]["beat"], best["baseline"]) == ("best", "gradient_boosting")
    assert quality["met"] == (best["standing"] == "above") == (code == 0), err


def test_dlrm_trains_on_imported_clicks_and_resumes(call: Call, data: str) -> None:
    options = ["--model.interaction", "dot", "--data.split", "time", "--train.max-steps", "4", "--run-dir", "r"]
    code, _, err = call("run", "dlrm", "--data", data, *options, *QUICKLY)
    assert code in (0, 5), err
    saved = json.loads(Path("r", "config.json").read_text())["config"]
    assert (saved["model"]["features"], saved["model"]["bottom"][0]) == (["user", "ad"], 1)
    assert saved["model"]["rows"] == [42, 27]
    resume = ["run", "--resume", "r", "--allow-change", "train.max_steps", "--train.max-steps", "0", "--quiet"]
    path = locations.dataset_folder(data) / "clicks" / "clicks.json"
    content = path.read_text()
    path.write_text(content.replace('"min_count": 5', '"min_count": 6'))
    open_clicks.cache_clear()  # Another process would have to read it.
    for command in (resume, ["score", "r", "--input", "a.csv", "--output", "s.csv"]):
        code, _, err = call(*command)
        assert (code, err.count("error:")) == (3, 1)
        assert "clicks.json is damaged: it was changed after it was written" in err
    path.write_text(content)
    code, _, err = call(*resume)
    assert code in (0, 5), err
    quality = json.loads(Path("r", "result.json").read_text())["quality"]
    assert set(quality["baselines"]) == {"majority", "item_bias", "user_item_bias", "logistic", "gradient_boosting"}
    assert quality["baselines"]["logistic"]["auc"] > 0.7
