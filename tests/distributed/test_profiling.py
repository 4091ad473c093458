"""Profiles of several ranks: the slow rank is named, and waiting for it is separated from moving bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rank_jobs import events
from rank_pool import home, needs_torchrec, start
from test_launch import WORDS, ended, said

from recperf.cli import main
from recperf.measure.trace.merge import inspect

SLEEP_S = 0.25
"""Much longer than anything else in these steps, also on a busy machine."""


@pytest.mark.long
@needs_torchrec
def test_a_profile_of_two_ranks_has_a_trace_each_which_merge(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    where = ["--data.path", str(events(home() / "events")), "--run-dir", str(run), "--save-trace", "--steps", "5"]
    words = (word for word in WORDS if word not in ("--target.beat", "none", "--no-report"))
    ranks = start(
        2, ["profile", "dlrm-v4", *where, *words], tmp_path, home=str(home()), trouble="sleeps", seconds=SLEEP_S
    )
    assert ended(ranks, 200.0) == [0, 0], said(tmp_path, 0)
    found = json.loads((run / "profile.json").read_text())
    assert found["communication"]["slowest"] == 1
    assert found["trace"]["file"] == "trace.rank1.json.gz"
    assert found["observed"]["operators"]
    assert found["fixes"] == {"missing": "fixes are predicted and tried in a single process only"}
    assert "Rank 1 of 2 is the slowest" in said(tmp_path, 0)
    assert "Rank 1 of 2 is the slowest" in (run / "profile.html").read_text()
    sources = [inspect(run / f"trace.rank{rank}.json.gz") for rank in (0, 1)]
    assert sources[0].run == sources[1].run
    assert sources[0].marks.keys() == sources[1].marks.keys() != set()
    assert main(["profile", "--trace", str(run), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["merged"]
    assert told["clock"] == "one host's clock"
    assert told["of"] == len(told["ranks"]) == 2
    assert main(["profile", "--trace", str(run / "trace.merged.json.gz")]) == 3


def test_profile_options_for_a_single_process_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "dlrm-v4", "--ranks", "2", "--try-fixes"]) == 2
    assert "for one process" in capsys.readouterr().err
