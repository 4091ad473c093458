"""Rows of benchmarks name a clean commit of this history."""

from __future__ import annotations

import importlib
import json
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CLEAN_SINCE = "2026-11-16T05:00"
"""Rows from before may name a commit with uncommitted changes, and some name none."""


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    module = importlib.import_module("_rows")
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    module.origin.cache_clear()
    return module


@pytest.mark.parametrize(
    ("origin", "message"),
    [({"commit": "1" * 40, "dirty": True}, "differ from commit"), ({"commit": None, "dirty": None}, "is not known")],
)
def test_rows_without_a_clean_commit_are_printed_and_not_stored(
    rows: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    origin: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.setattr(rows, "origin", lambda: origin)
    entry = rows.row("made", "one", "seconds", "s", [1.0, 2.0], {})
    with pytest.raises(SystemExit, match=message):
        rows.record([entry])
    assert json.loads(capsys.readouterr().out) == entry
    assert not list(rows.RESULTS.iterdir())
    monkeypatch.setattr(rows, "origin", lambda: {"commit": "1" * 40, "dirty": False})
    assert rows.record([rows.row("made", "one", "seconds", "s", [1.0], {})]).exists()


@pytest.mark.parametrize(("words", "dirty", "ends"), [([], True, True), (["--dry"], True, False), ([], False, False)])
def test_a_benchmark_of_changed_files_ends_before_it_measures(
    rows: ModuleType, monkeypatch: pytest.MonkeyPatch, words: list[str], dirty: bool, ends: bool
) -> None:
    monkeypatch.setattr(rows, "origin", lambda: {"commit": "1" * 40, "dirty": dirty})
    monkeypatch.setattr(rows.os, "environ", {})
    start = ROOT / "benchmarks" / "dram_lookup.py", words
    with pytest.raises(SystemExit, match="nothing measured, since rows would not be stored") if ends else nullcontext():
        rows.require_clean_start(*start)
    # Nor do the processes that it starts ask again.
    rows.require_clean_start(*start)


def test_the_default_command_on_a_gpu_has_a_goal(script: Callable[[str], ModuleType]) -> None:
    missed = script("default_speed").goals_missed
    rates = {"micro-dlrm, cuda default over cpu": 2.9, "dlrm-v4, cuda default over cpu": 3.1, "dlrm, cuda eager": 0.1}
    assert missed([{"variant": name, "p50": rate} for name, rate in rates.items()]) == [
        "micro-dlrm, cuda default over cpu: 2.9, the goal is 3"
    ]


def test_a_stamp_names_the_commit_of_files_without_a_history(
    rows: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(rows, "ROOT", tmp_path)
    monkeypatch.setattr(rows, "STAMP", tmp_path / "commit.json")
    monkeypatch.setattr(rows, "checkout", lambda besides: {"commit": None, "dirty": None})
    (tmp_path / "a.py").write_text("1")
    stamp = {"commit": "2" * 40, "digest": rows.digest(["a.py"]), "files": ["a.py"]}
    rows.STAMP.write_text(json.dumps(stamp))
    assert rows.origin() == {"commit": "2" * 40, "dirty": False}
    rows.origin.cache_clear()
    (tmp_path / "a.py").write_text("2")
    assert rows.origin() == {"commit": "2" * 40, "dirty": True}


def test_stored_rows_name_a_clean_commit_of_this_history() -> None:
    listed = subprocess.run(["git", "rev-list", "--all"], cwd=ROOT, capture_output=True, text=True, check=False)
    shallow = subprocess.run(
        ["git", "rev-parse", "--is-shallow-repository"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode or shallow.stdout.strip() != "false":
        pytest.skip("there is no whole git history here")
    known = set(listed.stdout.split())
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.jsonl")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            entry, place = json.loads(line), f"{path.name}, line {number}"
            if entry["time"] >= CLEAN_SINCE:
                assert entry["dirty"] is False, place
            if entry["commit"] is not None or entry["time"] >= CLEAN_SINCE:
                assert entry["commit"] in known, place
