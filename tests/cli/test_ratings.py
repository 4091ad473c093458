"""The task ratings, which leads with a metric of which less is better, as a user sees it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

Call = Callable[..., tuple[int, str, str]]
SHORT = ("--data.source", "embedded", "--no-peaks")


@pytest.mark.usefixtures("stored_ceilings")
def test_a_task_is_trained_shown_compared_and_checked_by_its_declaration(call: Call) -> None:
    code, out, err = call("run", "ratings", *SHORT, "--train.epochs", "1", "--seeds", "2", "--run-dir", "longer")
    assert code == 0, err
    assert re.search(r"RMSE 0\.\d{4} \(0\.\d{3} to 0\.\d{3}\), 0\.\d{4} below user \+ item bias", " ".join(out.split()))
    assert "target met" in out
    result = json.loads(Path("longer/result.json").read_text())
    quality = result["quality"]
    assert (result["task"], set(quality["metrics"])) == ("ratings", {"rmse", "mae"})
    rmse = quality["metrics"]["rmse"]
    assert quality["interval"]["low"] < rmse < quality["interval"]["high"] < quality["baselines"]["mean"]["rmse"]
    assert [row["baseline"] for row in quality["differences"]] == ["user_item_bias", "item_bias", "mean"]
    assert {row["standing"] for row in quality["differences"]} == {"below"}
    assert quality["probabilities"][0]["metric"] == "mae"
    assert [segment["name"] for segment in quality["segments"]][-1] == "the_rest"
    code, out, err = call("run", "ratings", *SHORT, "--train.max-steps", "2", "--run-dir", "shorter")
    assert (code, "target missed: above user + item bias" in out) == (5, True), err

    page = " ".join(re.sub(r"<[^>]*>", " ", Path("longer/report.html").read_text()).split())
    assert "RMSE below user + item bias" in page
    assert "Below each RMSE is its 95 % interval" in page
    assert "RMSE, mean rating" in page or "RMSE, user + item bias" in page
    assert "validation RMSE" in page

    code, out, err = call("compare", "shorter", "longer")
    assert code == 0, err
    assert re.search(r"quality +RMSE \d\.\d{4} → 0\.\d{4} .*MAE \d\.\d{4} → 0\.\d{4}", " ".join(out.split()))
    assert "not comparable" not in out
    code, out, err = call("check", "longer")
    assert code == 0, err
    assert "rmse 0." in out
    assert "user_item_bias: below" in out


def test_bench_orders_a_table_by_the_lowest(call: Call) -> None:
    code, out, err = call("bench", "--data", "movielens-like", "--models", "ratings,micro-dlrm", "--json")
    assert code == 0, err
    tables = {table["task"]: table for table in json.loads(out)["tables"]}
    values = [row["metrics"]["rmse"] for row in tables["ratings"]["rows"]]
    assert values == sorted(values)
    assert "auc" not in tables["ratings"]["columns"]
