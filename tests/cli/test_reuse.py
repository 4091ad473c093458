"""`recperf data reuse`: the curve of a dataset, of a workload's own data, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from recperf.units import byte_count

Call = Callable[..., tuple[int, str, str]]
DLRM = (
    *("--model.rows", 50_000, 300, "--model.bottom", 4, 8, "--model.dim", 8, "--model.top", 8, 1),
    *("--data.no-distinct", "--data.ids", "zipf"),
)


def test_the_curve_of_random_clicks_rises_with_the_cache(call: Call) -> None:
    options = ("--data.batches", 30, "--train.batch-size", 128, "--train.optimizer", "rowwise-adagrad")
    code, out, err = call("data", "reuse", "--workload", "dlrm", *DLRM, *options, "--memory", "100KiB", "--json")
    assert code == 0, err
    facts = json.loads(out)
    assert facts["steps"] == {"read": 30, "of": 30}
    assert facts["record_bytes"] == 4 * 9
    assert facts["followed_share"] == 1
    sizes, served = [p["bytes"] for p in facts["curve"]], [p["served"] for p in facts["curve"]]
    assert sizes == sorted(sizes)
    assert served == sorted(served)
    assert 100 * 1024 // 36 in [p["rows"] for p in facts["curve"]]
    whole = facts["curve"][-1]
    assert whole["served"] == pytest.approx(1 - facts["first_use_share"])
    assert (whole["in_bytes_per_step"], whole["out_bytes_per_step"]) == (0, 0)
    best = facts["recommended"]
    option, recommended = best["option"].split()
    assert option == "--tables.device-bytes"
    assert best["bytes"] <= (byte_count(recommended) or 0) < best["bytes"] + (1 << 20)
    assert best["served"] >= 0.99 * (1 - facts["first_use_share"])
