"""recperf bench as a user types it, on logs of a moment: each model trains in a process of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import warm
from recperf import locations
from recperf.runs.evidence import Evidence
from recperf.runs.schemas import SavedScores
from recperf.workloads import benching

Call = Callable[..., tuple[int, str, str]]


def write(path: Path, users: int = 60, items: int = 40) -> Path:
    """Clicks that depend on the user and the item, in the order of time."""
    draw = np.random.default_rng(3)
    tastes, kinds = draw.normal(size=(users, 2)), draw.normal(size=(items, 2))
    lines = ["user,item,clicked,time"]
    for day in range(30):
        for user in range(users):
            item = int(draw.integers(items))
            clicked = int(draw.random() < 1 / (1 + np.exp(-2 * tastes[user] @ kinds[item])))
            lines.append(f"{user},{item},{clicked},{1_700_000_000 + 86_400 * day + user}")
    path.write_text("\n".join(lines) + "\n")
    return path


SHORT = f"""
import sys
sys.path.append({str(Path(__file__).parents[1])!r})
from recperf.cli import main
import short
short.shorten()
from recperf.workloads.next_item import hstu
hstu.training_for = lambda data: dict(batch_size=16, epochs=4, patience=2)
sys.exit(main(sys.argv[1:]))
"""
"""A command that trains few epochs and measures steps only for a moment."""


@pytest.mark.usefixtures("warm_starts")
def test_bench_says_which_model_to_take_in_one_table_for_each_task(
    call: Call, tmp_path: Path, runs_without_torch: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benching, "child", lambda command: warm.python(SHORT, *command[3:]))
    log = write(tmp_path / "log.csv")
    assert call("data", "import", log, "--label", "clicked", "--name", "seen")[0] == 0
    runs_without_torch("bench", "--help")
    assert call("bench", "--data", "seen", "--models", "micro-dlrm-dram")[0] == 2

    code, out, err = call("bench", "--data", "seen", "--models", "micro-dlrm,hstu", "--out", "b", "--json", "--quiet")
    assert code == 0, err
    bench = json.loads(out)
    assert bench == json.loads(Path("b/bench.json").read_text())
    items, labels = bench["tables"]
    runs = {name: Evidence(Path("b") / name) for name in ("micro-dlrm", "hstu")}
    scores = {name: run.file("scores.json", SavedScores) for name, run in runs.items()}
    # Both rank the same item of each user among the same items.
    facts = [one.ranking for one in scores.values()]
    assert facts[0] is not None
    assert facts[1] is not None
    assert facts[0].keys == facts[1].keys
    assert (facts[0].catalogue, facts[0].negatives, facts[0].repeats) == (40, 0, facts[1].repeats)
    assert items["units"] == len(facts[0].keys) > 30
    quality = runs["hstu"].result.quality
    assert {row["name"] for row in items["rows"]} >= {"micro-dlrm", "hstu", "als", "ease", *quality.baselines}
    by_name = {row["name"]: row for row in items["rows"]}
    assert by_name["hstu"]["metrics"]["ndcg_10"] == pytest.approx(quality.metrics["ndcg_10"])
    assert by_name["ease"]["metrics"]["ndcg_10"] == pytest.approx(quality.baselines["ease"]["ndcg_10"])
    differing = [row for row in items["rows"] if row["to_best"]]
    assert len(differing) == len(items["rows"]) - 1
    for row in differing:
        assert row["to_best"]["low"] <= row["to_best"]["difference"] <= row["to_best"]["high"]
    assert {row["name"] for row in labels["rows"]} == {"micro-dlrm", *runs["micro-dlrm"].result.quality.baselines}
    for row in (by_name["micro-dlrm"], by_name["hstu"]):
        assert row["model"]["peak_bytes"] > 50 << 20
        assert row["model"]["waited"] > row["model"]["seconds"] > 0
        assert row["model"]["one_ms"]["p50"] > 0
    assert call("report", "b", "--out", "models.svg")[0] == 0
    assert ">hstu</text>" in Path("models.svg").read_text()
    page = Path("b/bench.html").read_text()
    assert '<a href="hstu/report.html">hstu</a>' in page
    assert Path("b/hstu/report.html").is_file()

    code, out, _ = call("compare", "b/micro-dlrm", "b/hstu")
    assert code == 0
    assert out.startswith("micro-dlrm → hstu · different models\n  quality   NDCG@10 ")
    assert "slower" not in out
    code, _, err = call("compare", "b/micro-dlrm", "b/hstu", "--gate", "5%")
    assert (code, "different models" in err) == (2, True)

    for file in locations.dataset_folder("seen").rglob("*"):
        if file.is_file() and file.name != "store.json":
            file.unlink()
    code, out, _ = call("bench", "--data", "seen", "--models", "hstu", "--out", "f", "--quiet", "--json")
    failed = json.loads(out)
    assert (code, failed["tables"], failed["error"]["what"]) == (4, [], "no model could be trained")
    assert failed["models"][0]["error"] in Path("f/bench.html").read_text()
