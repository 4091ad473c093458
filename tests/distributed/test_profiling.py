"""Profiles of several ranks: the slow rank is named, and waiting for it is separated from moving bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rank_jobs import events
from rank_pool import home, needs_torchrec, run_ranks, start
from test_launch import WORDS, ended, said
from test_ranks import config

from recperf.cli import main
from recperf.measure.trace.merge import inspect
from recperf.runs.result import fault

SLEEP_MS = 250.0
"""Much longer than anything else in these steps, also on a busy machine."""


@needs_torchrec
def test_the_slow_rank_is_named_and_waiting_for_it_is_late() -> None:
    first, second = run_ranks(2, "window", config=config(), steps=5, slow=1, seconds=SLEEP_MS / 1e3)
    # Both ranks have the window of all.
    assert first["communication"] == second["communication"]
    found = first["communication"]
    fast, slow = found["each"]
    assert found["slowest"] == 1
    assert slow["own_ms"] - fast["own_ms"] > 0.5 * SLEEP_MS
    assert fast["late_ms"] > 0.5 * SLEEP_MS
    assert slow["awaited_ms"] == pytest.approx(fast["late_ms"])
    assert slow["late_ms"] < 0.5 * SLEEP_MS
    for row in (fast, slow):
        assert row["own_ms"] + row["exposed_ms"] == pytest.approx(row["step_ms"])
        assert row["late_ms"] + row["moving_ms"] == pytest.approx(row["exposed_ms"])
    # The exchange of the lookup is the first one, so the other rank waits there.
    rows = {row["part"]: row for row in found["collectives"]}
    assert rows.keys() == {"embedding", "reduce", "sparse_update"}
    assert max(rows, key=lambda part: rows[part]["late_ms"]) == "embedding"
    assert rows["embedding"]["awaited_rank"] == 1
    assert all(row["bytes"] > 0 and row["moving_ms"] > 0 for row in rows.values())
    # The budget is that of the slow rank, and sums to the step.
    parts = {part["name"]: part for part in first["components"]}
    assert parts["data"]["ms"]["p50"] >= SLEEP_MS
    assert parts["embedding_exchange"]["phase"] == "communication"
    assert sum(part["share"] for part in first["components"]) == pytest.approx(1.0)
    assert first["steps"] == 5
    assert "Rank 1 of 2 is the slowest: " in first["verdict"]["because"][-1]
    assert sum(first["shares"].values()) == pytest.approx(1.0)


def taken(folder: Path, verb: str, *more: str, **how: Any) -> Path:
    """A command of two ranks into a folder."""
    where = ["--data.path", str(events(home() / "events")), "--run-dir", str(folder / "run")]
    words = [verb, "dlrm-v4", *where, *(word for word in WORDS if word not in ("--target.beat", "none", "--no-report"))]
    assert ended(start(2, [*words, *more], folder, home=str(home()), **how), 200.0) == [0, 0], said(folder, 0)
    # A torch built for CUDA says on a machine without a driver that there is none.
    assert [line for line in said(folder, 1).splitlines() if "gpuGetDeviceCount" not in line] == []
    return folder / "run"


@pytest.mark.long
@needs_torchrec
def test_a_profile_of_two_ranks_has_a_trace_each_which_merge(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = taken(tmp_path, "profile", "--save-trace", "--steps", "5", trouble="sleeps", seconds=SLEEP_MS / 1e3)
    found = json.loads((run / "profile.json").read_text())
    assert found["communication"]["slowest"] == 1
    assert found["trace"]["file"] == "trace.rank1.json.gz"
    assert found["operator_table"]["rows"]
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


@needs_torchrec
def test_a_run_of_two_ranks_ends_with_the_window_of_both(tmp_path: Path) -> None:
    more = ["--train.max-steps", "3", "--target.beat", "none"]
    run = taken(tmp_path, "run", *more, trouble="sleeps", seconds=SLEEP_MS / 1e3)
    result = json.loads((run / "result.json").read_text())
    assert fault(result) is None
    assert result["performance"]["ranks"]["slowest"] == 1
    assert [row["rank"] for row in result["performance"]["ranks"]["each"]] == [0, 1]
    page = (run / "report.html").read_text()
    assert "Between the ranks" in page
    assert "Rank 1 of 2 is the slowest" in page
    assert main(["report", str(run), "--out", str(tmp_path / "again.html")]) == 0


def test_profile_options_for_a_single_process_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "dlrm-v4", "--ranks", "2", "--try-fixes"]) == 2
    assert "for one process" in capsys.readouterr().err
