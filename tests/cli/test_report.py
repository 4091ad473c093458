"""recperf report as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import example_runs as examples


def test_a_page_goes_into_its_run(call, tmp_path: Path) -> None:
    examples.make_run(tmp_path / "one", measured=("profile",))
    code, out, _ = call("report", "one")
    assert code == 0
    assert out.startswith("micro-dlrm · movielens-like (synthetic) · 2 epochs · target met\n  quality   AUC 0.8212")
    assert out.endswith("  page      one/report.html\n")
    assert (tmp_path / "one" / "report.html").read_text().startswith("<!doctype html>")


def test_several_runs_go_here_and_out_chooses_the_place(call, tmp_path: Path) -> None:
    for name in ("one", "two"):
        examples.make_run(tmp_path / name, measured=())
    assert call("report", "one", "two")[:2] == (0, "  page      report-compare.html\n")
    code, out, _ = call("report", "one", "--out", "new/page.html", "--json")
    assert code == 0
    size = (tmp_path / "new" / "page.html").stat().st_size
    assert json.loads(out) == {"report": "new/page.html", "of": ["one"], "bytes": size}
