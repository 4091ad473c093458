"""micro-dlrm-dram and the commands around it, on a table small enough for a test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recperf.execution.measuring import pair_sentence
from recperf.measure.peaks import sampling
from recperf.measure.profile_records import ColdOverHot

SMALL = ["--model.rows", "20000", "--model.dim", "16", "--data.batches", "12", "--data.ids-per-bag", "4"]
SMALL += ["--train.batch-size", "128", "--train.device", "cpu", "--data.held-out-batches", "2"]


pytestmark = pytest.mark.usefixtures("stored_ceilings")


def read(name: str) -> Any:
    return json.loads(Path("r", name).read_text())


def test_a_run_leaves_profile_pair_ceilings_and_seal(call) -> None:
    code, out, err = call("run", "micro-dlrm-dram", *SMALL, "--run-dir", "r", "--json")
    assert code == 0, err
    result, profile, pair = json.loads(out), read("profile.json")["workload"], read("pair.json")
    assert result["data"]["synthetic"] is True
    assert set(result["quality"]["baselines"]) == {"majority", "planted"}
    assert sum(part["share"] for part in profile["components"]) == pytest.approx(1)
    names = {part["name"] for part in profile["components"]}
    assert {"data", "hash", "embedding", "embedding_backward", "dense_update", "sparse_update", "other"} <= names
    assert profile["ids"]["lookups"] == 128 * 3 * 4
    assert 0 < profile["ids"]["unique_rows"] <= profile["ids"]["lookups"]
    assert profile["ids"]["working_set_bytes"] == 20000 * 16 * 4
    assert 0 < profile["ids"]["touched_bytes"] <= profile["ids"]["working_set_bytes"]
    assert profile["overhead"]["plain_ms"] > 0
    for part in ("bottom", "top", "embedding"):
        hot, cold = ({c["name"]: c for c in pair[arm]["components"]}[part] for arm in ("hot", "cold"))
        assert hot["flops"] == cold["flops"]
        # Counted bytes are those of different rows: fewer of them are hot.
        assert hot["bytes"] < cold["bytes"] if part == "embedding" else hot["bytes"] == cold["bytes"]
    assert pair["hot"]["ids"]["lookups"] == pair["cold"]["ids"]["lookups"]
    # What the ids can reach, whatever the number of steps.
    assert pair["ids"]["hot"] < pair["ids"]["cold"] == 20000
    hot, cold, expected = pair["lookups"]["hot"], pair["lookups"]["cold"], pair["expected"]
    assert expected["expected"] == pytest.approx(cold["p50"] / hot["p50"])
    assert (expected["low"], expected["high"]) == pytest.approx((cold["p20"] / hot["p80"], cold["p80"] / hot["p20"]))
    assert 0 <= pair["other_work"] <= 1
    assert read("peaks.json")["machine"]["fingerprint"] == result["provenance"]["machine"]
    assert read("seal.json")["files"].keys() >= {"result.json", "events.jsonl", "profile.json", "pair.json"}
    code, out, _ = call("check", "r", "--json")
    assert {row["name"]: row["holds"] for row in json.loads(out)["runs"][0]["claims"]}["intact"]


def test_pair_prints_the_ratio_and_what_is_expected(call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "QUICK", sampling.TINY)
    monkeypatch.setattr("recperf.measure.peaks.other_work.OtherWork.share", lambda *_: 0.0)
    code, out, _ = call("pair", *SMALL, "--train.threads", "3")
    assert code == 0
    assert "cold / hot" in out
    assert "measuring the ceilings for 3 threads" in out
    assert "is expected (" in out or "is wider than a factor of 2" in " ".join(out.split())
    code, out, _ = call("pair", *SMALL, "--preset", "zipf")
    assert "no ratio is expected, because the ids are not equally likely" in " ".join(out.split())
    assert call("pair", "micro-dlrm", "--data.source", "embedded")[0] == 2


@pytest.mark.parametrize(
    ("low", "high", "other_work", "sentence"),
    [
        (2.0, 4.0, 0.1, ". From rows of the same table, outside a step, 2.50 is expected (2.00 to 4.00)."),
        (1.9, 4.0, 0.1, "; not judged: 1.90 to 4.00 is wider than a factor of 2; to narrow it, measure it on a quiet"),
        (-0.1, 0.1, 0.1, "; not judged: -0.10 to 0.10 is wider than a factor of 2"),
        (2.4, 2.6, 0.2, "; not judged: other work took 20% of the cores while they were measured."),
    ],
)
def test_the_sentence_of_a_pair_names_a_range_only_where_it_is_narrow(
    low: float, high: float, other_work: float, sentence: str
) -> None:
    text = pair_sentence(2.6, ColdOverHot(low, 2.5, high), other_work)
    assert text.startswith(f"Lookups of cold ids take 2.60 times as long as those of hot ids{sentence}")


def test_sweep_measures_every_combination(call) -> None:
    arguments = ["sweep", "micro-dlrm-dram", *SMALL, "--model.dim", "8,16,32", "--out", "s", "--json"]
    code, out, _ = call(*arguments)
    assert code == 0
    swept = json.loads(out)
    assert [row["settings"] for row in swept["rows"]] == [{"model.dim": "8"}, {"model.dim": "16"}, {"model.dim": "32"}]
    assert {fit["part"] for fit in swept["fits"]} == {"embedding", "step"}
    assert json.loads(Path("s/sweep.json").read_text()) == swept
    assert call("sweep", "micro-dlrm-dram")[0] == 2
