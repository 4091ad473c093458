"""The commands around listening events as a user types them."""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(call: Call) -> Call:
    return functools.partial(call, "data")


def answer(call: Call, *arguments: str) -> dict[str, Any]:
    code, out, err = call(*arguments, "--json")
    assert code == 0, err
    facts: dict[str, Any] = json.loads(out)
    return facts


@pytest.fixture
def raw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    importlib.import_module("_yambda_prepare").raw_files(tmp_path / "raw", 20_000)
    return tmp_path / "raw"


def test_made_prepared_checked_and_described(call: Call, raw: Path) -> None:
    made = answer(call, "make", "yambda-like", "--path", "made", "--events", "20000")
    prepared = answer(call, "prepare", "yambda-like", "--path", str(raw), "--store", "prepared")
    assert prepared["prepared"] is True
    assert prepared["digest"] == made["digest"], "raw files and the store made at once are the same events"
    assert prepared["bytes_an_event"] == 9
    again = answer(call, "prepare", "yambda-like", "--path", str(raw), "--store", "prepared")
    assert (again["prepared"], again["digest"]) == (False, made["digest"])

    assert answer(call, "check", "yambda-like", "--path", "prepared")["store"]["events"] == made["events"]

    arguments = ("--min-history", "10", "--window-seconds", "864000")
    described = answer(call, "info", "yambda-like", "--path", "made", *arguments)
    assert described["synthetic"] is True
    assert described["events"] == made["events"] == sum(described["by_type"].values())
    assert 0.9 < sum(described["shares"].values()) <= 1
    assert described["windows"]["count"] in (30, 31)
    assert 0 < described["anchors"]["total"] < described["by_type"]["listen"]


def test_an_imported_dataset_is_found_by_its_name(call: Call) -> None:
    Path("log.csv").write_text(
        "who,what,at,clicked\n" + "".join(f"{u},{u % 3},{t},1\n" for u in (7, 5) for t in range(9))
    )
    arguments = ("--user", "who", "--item", "what", "--time", "at", "--label", "clicked", "--name", "mine")
    made = answer(call, "import", "--events", "log.csv", *arguments)
    assert (made["events"], made["users"]) == (18, 2)
    assert answer(call, "info", "mine")["labelled"] == 18
    assert answer(call, "check", "mine")["store"]["digest"] == made["digest"]
    assert made["imported"] is True
    again = answer(call, "import", "--events", "log.csv", *arguments)
    assert (again["imported"], again["digest"]) == (False, made["digest"])
    code, _, err = call("import", "--events", "log.csv", *arguments, "--positives", "1")
    assert code == 3
    assert "with other options: positives [], now ['1']" in err
