"""recperf report as a user types it."""

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
    size = (tmp_path / "new" / "page.html").stat().st_size
    assert json.loads(out) == {"report": "new/page.html", "of": ["one"], "bytes": size}


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["report"], 2, "report needs a run, a profile or a trace"),
        (["report", "--out"], 2, "error: "),
        (["report", "one", "--out", "."], 2, "--out is a folder"),
        (["report", "nowhere"], 3, "there is nothing at this path"),
        (["report", "unfinished"], 3, "recperf run --resume unfinished"),
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
