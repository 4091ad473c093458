"""recperf report and recperf compare as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import example_runs as examples
import pytest


def test_a_page_goes_into_its_run(call, tmp_path: Path) -> None:
    examples.make_run(tmp_path / "one", measured=("profile",))
    assert call("report", "one")[:2] == (0, "one/report.html\n")
    assert (tmp_path / "one" / "report.html").read_text().startswith("<!doctype html>")


def test_several_runs_go_here_and_out_chooses_the_place(call, tmp_path: Path) -> None:
    for name in ("one", "two"):
        examples.make_run(tmp_path / name, measured=())
    assert call("report", "one", "two")[:2] == (0, "report-compare.html\n")
    code, out, _ = call("report", "one", "--out", "new/page.html", "--json")
    assert code == 0
    assert json.loads(out) == {"report": "new/page.html", "runs": ["one"]}
    assert (tmp_path / "new" / "page.html").exists()


def test_compare_in_words(call, tmp_path: Path) -> None:
    examples.make_run(tmp_path / "one")
    examples.make_run(tmp_path / "two", auc=0.83, config={"seed": 7})
    code, out, _ = call("compare", "one", "two", "--out", "page.html")
    assert code == 0
    for expected in (
        "One config field differs; AUC 0.8212 → 0.8300",
        "WARNING: Synthetic data",
        "one seed: may be chance",
        "embedding, backward",
        "dispatch",
        "page: page.html",
    ):
        assert expected in out
    assert "train.epochs" not in out
    assert (tmp_path / "page.html").exists()


def test_compare_as_json(call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recperf.cli.compare.write", lambda runs, out: out)
    examples.make_run(tmp_path / "one")
    examples.make_run(tmp_path / "two", workload="other", measured=())
    code, out, err = call("compare", "one", "two", "one", "--json", "--out", "page.html")
    assert code == 0
    comparison = json.loads(out)
    assert [run["name"] for run in comparison["runs"]] == ["one (1)", "two", "one (2)"]
    assert comparison["limit"] == ["dispatch", None, "dispatch"]
    assert comparison["report"] == "page.html"
    assert "page: page.html" in err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["report"], 2, "report needs the folder of a run"),
        (["report", "--out"], 2, "error: "),
        (["report", "one", "--out", "."], 2, "--out is a folder"),
        (["report", "nowhere"], 3, "there is no such run"),
        (["report", "unfinished"], 3, "recperf run --resume unfinished"),
        (["compare", "one"], 2, "compare needs at least two runs"),
    ],
)
def test_mistakes_are_answered(call, tmp_path: Path, arguments: list[str], code: int, message: str) -> None:
    examples.make_run(tmp_path / "one", measured=())
    (examples.make_run(tmp_path / "unfinished", measured=()) / "result.json").unlink()
    exit_code, _, err = call(*arguments)
    assert exit_code == code
    assert message in err
    assert err.startswith("error: ")
    assert "Traceback" not in err
    assert not list(tmp_path.rglob("*.html"))
