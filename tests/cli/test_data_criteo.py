"""The commands around a click log as a user types them."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recperf.data.criteo import catalogue

Call = Callable[..., tuple[int, str, str]]


def answer(call: Call, *arguments: str, code: int = 0) -> dict[str, object]:
    got, out, _ = call("data", *arguments, "--json")
    assert got == code
    facts: dict[str, object] = json.loads(out)
    return facts


def test_a_log_is_made_checked_converted_and_described(call: Call) -> None:
    made = answer(call, "make", "criteo", "--path", "train.txt", "--lines", "500", "--gzip")
    assert (made["lines"], made["synthetic"], made["gzip"]) == (500, True, True)
    assert made["bytes"] == Path("train.txt").stat().st_size

    checked = answer(call, "check", "criteo", "--path", "train.txt")
    assert (checked["intact"], checked["lines"], checked["good_lines"], checked["bad_lines"]) == (True, 500, 500, 0)

    assert answer(call, "info", "criteo", "--path", ".")["state"] == "not converted"
    first = answer(call, "convert", "criteo", "--path", ".", "--rows", "1000")
    assert (first["rows"], first["converted"], first["name"]) == (500, True, "criteo-like")
    again = answer(call, "convert", "criteo", "--path", ".", "--rows", "1000")
    assert (again["converted"], again["digest"]) == (False, first["digest"])

    known = answer(call, "info", "criteo", "--path", ".", "--rows", "1000")
    assert (known["state"], known["train_rows"], known["valid_rows"]) == ("converted", 429, 71)
    assert known["array_bytes"] == 500 * 157
    other = answer(call, "info", "criteo", "--path", ".")
    assert (other["state"], other["other_conversions"]) == ("not converted", [first["folder"]])


def test_what_a_person_reads(call: Call) -> None:
    assert call("data", "make", "criteo", "--path", "log", "--lines", "500", "--quiet")[1] == ""
    _, out, _ = call("data", "convert", "criteo", "--path", "log")
    printed = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert printed["rows"] == "500"
    assert printed["synthetic"] == "yes"
    assert printed["array_bytes"] == "76.7 KiB (78,500 bytes)"
    assert "skipped" not in printed


def test_bad_lines_stop_or_are_counted(call: Call) -> None:
    call("data", "make", "criteo", "--path", "log", "--lines", "50")
    lines = Path("log").read_bytes().split(b"\n")
    lines[30] = b"1\tx"
    lines[40] = b"9" + lines[40][1:]
    Path("log").write_bytes(b"\n".join(lines))

    code, out, err = call("data", "check", "criteo", "--path", "log")
    assert code == 3
    assert "log, line 31: 2 columns instead of 40" in out
    assert "log, line 41: column 1, the label, is '9' instead of 0 or 1" in out
    assert "error: 2 of 50 lines are malformed (first: log, line 31" in err
    assert answer(call, "check", "criteo", "--path", "log", code=3)["bad_by_kind"] == {"columns": 1, "label": 1}

    code, _, err = call("data", "convert", "criteo", "--path", "log")
    assert code == 3
    assert "line 31 is malformed" in err
    assert "--on-error skip" in err
    facts = answer(call, "convert", "criteo", "--path", "log", "--on-error", "skip")
    assert (facts["rows"], facts["skipped"]) == (48, {"columns": 1, "label": 1})
    assert [bad["line"] for bad in facts["first_bad"]] == [31, 41]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["get", "criteo"], 2, "does not download"),
        (["check", "criteo"], 2, "recperf data check criteo --path FILE_OR_FOLDER"),
        (["convert", "movielens-100k", "--path", "."], 2, "only click logs are converted"),
        (["convert", "criteo", "--path", ".", "--rows", "1"], 3, "criteo.rows is 1"),
        (["convert", "criteo", "--path", ".", "--rows", "8", "9"], 3, "one number, or 26"),
        (["make", "criteo", "--path", "log", "--lines", "0"], 3, "lines is 0"),
        (["check", "criteo", "--path", "."], 3, "no train.txt"),
        (["info", "movielens-like", "--path", "criteo"], 3, "criteo"),
    ],
)
def test_what_is_refused(call: Call, arguments: list[str], code: int, message: str) -> None:
    got, _, err = call("data", *arguments)
    assert (got, message in " ".join(err.split())) == (code, True), err


def test_an_existing_file_is_left_alone(call: Call) -> None:
    Path("mine").write_text("x")
    assert call("data", "make", "criteo", "--path", "mine")[0] == 2
    assert Path("mine").read_text() == "x"


def test_interrupted_it_says_that_nothing_is_lost(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    call("data", "make", "criteo", "--path", "log", "--lines", "50")

    def interrupt(*_: object, progress: Any, **__: object) -> None:
        signal.raise_signal(signal.SIGINT)
        progress(1, 2)

    monkeypatch.setattr(catalogue, "convert", interrupt)
    code, _, err = call("data", "convert", "criteo", "--path", "log")
    assert code == 130
    assert "it resumes" in err
