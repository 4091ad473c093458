"""recperf bench as a user types it, on logs of a moment: each model trains in a process of its own."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from recperf import locations
from recperf.runs.derive import best_of
from recperf.runs.evidence import Evidence
from recperf.runs.report import bench as benches
from recperf.runs.report.bench import BenchModel
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


SHORT = """
import sys
from recperf.cli import main
from recperf.execution import measuring
from recperf.train import baselines
measuring.SECONDS = measuring.REPEAT_SECONDS = measuring.OBSERVED_SECONDS = 0.0
measuring.ROUNDS = 2
baselines._MOST_TREES = 60
sys.exit(main(sys.argv[1:]))
"""
"""A command that measures steps only for a moment."""


def test_bench_puts_models_and_baselines_of_one_split_into_one_table(
    call: Call, tmp_path: Path, runs_without_torch: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benching, "child", lambda command: [sys.executable, "-c", SHORT, *command[3:]])
    log = write(tmp_path / "log.csv")
    assert call("data", "import", log, "--label", "clicked", "--name", "seen")[0] == 0
    columns = ["--categorical", "user,item", "--item", "item", "--time", "time"]
    assert call("data", "import", "--clicks", log, "--label", "clicked", *columns, "--name", "shop")[0] == 0
    runs_without_torch("bench", "--help")
    assert call("bench", "--data", "shop", "--models", "hstu")[0] == 2

    code, out, err = call("bench", "--data", "shop", "--models", "micro-dlrm", "--out", "b", "--json", "--quiet")
    assert code == 0, err
    bench = json.loads(out)
    assert bench == json.loads(Path("b/bench.json").read_text())
    labels = next(table for table in bench["tables"] if table["task"] == "labels")
    quality = Evidence(Path("b/micro-dlrm")).result.quality
    assert {row["name"] for row in labels["rows"]} == {"micro-dlrm", *quality.baselines}
    own = next(row for row in labels["rows"] if row["name"] == "micro-dlrm")
    best = best_of(quality.differences)
    assert best is not None
    assert (own["standing"]["baseline"], own["standing"]["standing"]) == (best.baseline, best.standing)
    for name, ends in own["intervals"].items():
        assert ends["low"] < own["metrics"][name] < ends["high"]
    assert len(own["intervals"]) == 2
    assert own["model"]["seconds"] > 0
    assert own["model"]["peak_bytes"] > 50 << 20
    page = Path("b/bench.html").read_text()
    assert "micro-dlrm" in page
    assert "against the best baseline" in page

    models = [BenchModel(workload=name, run="b/micro-dlrm") for name in ("one", "another")]
    merged = benches.bench("shop", "clicks", models).tables[0]
    assert sorted(row.name for row in merged.rows) == sorted(["one", "another", *quality.baselines])

    for file in locations.dataset_folder("seen").rglob("*"):
        if file.is_file() and file.name != "store.json":
            file.unlink()
    code, out, _ = call("bench", "--data", "seen", "--models", "hstu", "--out", "f", "--quiet", "--json")
    failed = json.loads(out)
    assert (code, failed["tables"], failed["error"]["what"]) == (4, [], "no model could be trained")
    assert failed["models"][0]["error"] in Path("f/bench.html").read_text()
