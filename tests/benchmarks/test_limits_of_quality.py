"""A table of planted causes that was interrupted covers every kind, and its rows name where each case was measured."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("limits_of_quality")


def test_the_first_cases_cover_every_task_and_kind(table: ModuleType) -> None:
    ordered, kinds = table.in_turns(table.CASES), set(table.KINDS.values())
    assert sorted(case.name for case in ordered) == sorted(table.KINDS)
    assert {table.KINDS[case.name] for case in ordered[: len(kinds)]} == kinds


def test_rows_of_cases_keep_their_commit_and_are_of_one(table: ModuleType) -> None:
    outcomes = ["named", "wrong", "failed"]
    keys = [(case.name, "small", 2) for case in table.HEALTHY if case.workload == "micro-dlrm"][:3]
    single = [
        {**table.entry(key, None, {"limit": "noise", "outcome": one}), "commit": "1" * 40, "dirty": False}
        for key, one in zip(keys, outcomes)
    ]
    whole = table.grouped(single)
    assert [(one["n"], one["commit"], one["p50"]) for one in whole] == [(3, "1" * 40, 0.0)]
    assert {name: whole[0]["conditions"][name] for name in outcomes} == dict.fromkeys(outcomes, 1)
    assert table.ended(whole) == 5
    single[1]["commit"] = "2" * 40
    with pytest.raises(SystemExit, match="several commits"):
        table.grouped(single)
