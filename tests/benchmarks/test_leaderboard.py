"""The leaderboard has the newest result of each model, with the interval of its seeds, and is that of the rows."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

Script = Callable[[str], ModuleType]


def row(model: str, metric: str, values: list[float], commit: str, **conditions: Any) -> dict[str, Any]:
    return {
        "variant": f"Beauty: {model}", "metric": metric, "p50": sorted(values)[len(values) // 2], "commit": commit * 8,
        "conditions": {"device": "cpu", "seeds": len(values), "by_seed": values, **conditions},
        "machine": {"cpu": "a CPU", "gpus": []},
    }  # fmt: skip


def test_the_page_is_that_of_the_rows(script: Script) -> None:
    assert script("leaderboard").main(["--check"]) == 0, "python benchmarks/leaderboard.py"


def test_a_result_is_the_mean_of_the_newest_seeds_with_its_interval(script: Script) -> None:
    board = script("leaderboard")
    rows = [
        row("next-item", "ndcg_10", [0.01, 0.02], "a"),
        row("next-item", "ndcg_10", [0.061, 0.062, 0.063], "b"),
        row("next-item", "seconds", [30.0, 31.0, 32.0], "b"),
        row("next-item", "ndcg_10", [0.05], "c", set=["model.dim=32"]),
        row("plain", "ndcg_10", [0.058], "c"),
        row("plain", "seconds_to_goal", [3.0], "c"),
    ]
    lines = [line for line in board.page(rows).splitlines() if "a CPU" in line]
    assert [line.split(" | ")[1] for line in lines] == ["next-item", "plain", "next-item"]
    # 0.001 / sqrt(3) x 4.30
    assert lines[0].startswith(
        "| Amazon Beauty | next-item | 0.0620 (± 0.0025) |  | 31.0 (± 2.5) | 3 | a CPU | default"
    )
    assert lines[0].endswith("| bbbbbbbb |")
    assert "| 0.0500 |" in lines[2]
    assert "model.dim=32" in lines[2]
    assert board.shown(rows[4], 4) == "0.0580"
    assert board.STUDENT[5] == pytest.approx(2.776, abs=0.01)
