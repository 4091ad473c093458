"""recperf check, as a user types it."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import recperf
from recperf.cli import check, main
from recperf.measure.attribution import divided_ms
from recperf.runs import contract
from recperf.runs.evidence import Evidence, present, seal

Call = Callable[..., tuple[int, str, str]]
QUICK = ["run", "micro-dlrm", "--data.source", "embedded", "--train.epochs", "1", "--target.beat", "none", "--quiet"]
QUICK += ["--train.batch-size", "1000", "--train.device", "cpu", "--train.max-steps", "40", "--no-peaks", "--no-report"]

NO_TARGET = {"beat": None, "accuracy": None, "auc": None}
CLAIMS = (contract.quality_target(lambda *_: NO_TARGET), contract.loss_falls(0.001))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("check") / "run"
    assert main([*QUICK, "--run-dir", str(folder)]) == 0
    seal(folder)
    return folder


def test_the_profile_of_a_run_is_a_report(finished: Path, tmp_path: Path) -> None:
    """One file name, one format: recperf.load reads what a run wrote as well as what a report saved."""
    report, written = recperf.load(finished / "profile.json"), Evidence(finished).profile
    assert written is not None
    assert (report.verdict, report.shares, report.experiments) == (written.verdict, written.shares, written.experiments)
    assert report.operators
    assert report.workload is not None
    assert report.workload == written.workload
    assert "Step budget" in report.text(verbose=True)
    assert divided_ms(report.waits, report.operators) == pytest.approx(report.step_ms.p50, rel=0.05)
    assert report.verdict.limit in str(report)
    assert report.page(tmp_path / "page.html").read_text().startswith("<!doctype html>")
    assert recperf.load(report.save(tmp_path / "profile.json")) == report


@pytest.fixture
def call(call: Call, finished: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Two sealed runs, runs/one and runs/two, and the command."""
    claimed = replace(check.find("micro-dlrm"), claims=lambda config: tuple(CLAIMS))
    monkeypatch.setattr(check, "find", lambda name: claimed)
    for name in ("one", "two"):
        shutil.copytree(finished, Path("runs", name))

    return functools.partial(call, "check")


def test_what_holds_is_listed_claim_by_claim(call) -> None:
    code, out, err = call("runs/one", "runs/two")
    assert (code, err) == (0, "")
    assert out.count("  ok      ") == 2 * (len(contract.ALWAYS) + len(CLAIMS))
    intact = f"evidence is intact: {len(present(Path('runs/one')))} files match seal.json"
    assert f"runs/one (micro-dlrm)\n  ok      {intact}\n" in out
    assert "everything holds (runs: 2, claims: 8, intact checkpoints: 2)" in out


def test_a_failure_is_a_gate_and_says_which(call) -> None:
    Path("runs/two/events.jsonl").unlink()
    code, out, err = call("--all", "runs")
    assert code == 5
    assert "  FAILED  evidence is intact: events.jsonl is missing" in out
    assert "no evidence: events.jsonl is missing" in out
    assert err.startswith("error: 3 of 8 claims failed, in 1 of 2 runs\n")
    assert "runs/two: intact, result, loss" in err
    assert "runs/one" not in err


def test_json_is_one_object_also_on_failure(call) -> None:
    code, out, _ = call("runs/one", "--json")
    checked = json.loads(out)
    assert (code, checked["holds"], "error" in checked) == (0, True, False)
    assert checked["runs"][0]["workload"] == "micro-dlrm"
    assert [row["name"] for row in checked["runs"][0]["claims"]][:2] == ["intact", "result"]
    Path("runs/two/result.json").unlink()
    code, out, err = call("--all", "runs", "--json")
    checked = json.loads(out)
    assert (code, checked["holds"], checked["error"]["exit_code"]) == (5, False, 5)
    assert [run["holds"] for run in checked["runs"]] == [True, False]
    assert "FAILED" in err


def test_a_claim_added_as_the_page_says_is_checked_and_a_wrong_one_fails_in_one_line(
    call, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "contracts.md").read_text()
    added: dict[str, Any] = {}
    exec(page.split("## Adding a claim")[1].split("```python")[1].split("```")[0], added)

    def check_with(claims: Callable[[Any], Any]) -> tuple[int, str]:
        claimed = replace(check.find("micro-dlrm"), claims=claims)
        with monkeypatch.context() as patch:
            patch.setattr(check, "find", lambda name: claimed)
            code, out, err = call("runs/one")
        return code, out + err

    code, said = check_with(lambda config: (added["few_resumes"](2),))
    assert code == 0, said
    assert "the run was resumed at most 2 times: 0 resumes (at most 2)" in said
    unfinished = contract.Claim(name="x", text="x", holds=lambda evidence: True)  # type: ignore[arg-type,return-value]
    code, said = check_with(lambda config: (unfinished,))
    assert code == 5
    assert "TypeError: the claim must return a Finding, not True" in said
    code, said = check_with(lambda config: (config.no_such_field,))
    assert code == 5
    assert "its claims cannot be listed: AttributeError" in said
