"""The commands around listening events as a user types them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recperf.cli import main

pytest.importorskip("pyarrow", reason="raw listening events are parquet")

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> tuple[int, str, str]:
        code = main(["data", *words])
        said = capfd.readouterr()
        return code, said.out, said.err

    return call


def answer(call: Call, *words: str) -> dict[str, Any]:
    code, out, err = call(*words, "--json")
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


@pytest.fixture
def raw(run_command: Call) -> Path:
    answer(run_command, "make", "yambda-like", "--path", "raw", "--events", "20000", "--form", "raw")
    return Path("raw").absolute()


def test_made_prepared_checked_and_described(run_command: Call, raw: Path) -> None:
    made = answer(run_command, "make", "yambda-like", "--path", "made", "--events", "20000")
    prepared = answer(run_command, "prepare", "yambda-like", "--path", str(raw), "--store", "prepared")
    assert prepared["prepared"] is True
    assert prepared["digest"] == made["digest"], "raw files and the store made at once are the same events"
    assert prepared["bytes_an_event"] == 11
    again = answer(run_command, "prepare", "yambda-like", "--path", str(raw), "--store", "prepared")
    assert (again["prepared"], again["digest"]) == (False, made["digest"])

    assert answer(run_command, "check", "yambda-like", "--path", "prepared")["store"]["events"] == made["events"]
    checked = answer(run_command, "check", "yambda-like", "--path", str(raw))["raw"]
    assert sum(checked["by_type"].values()) == checked["events"] == prepared["split"]["raw_events"]

    words = ("--min-history", "10", "--history-length", "30", "--window-seconds", "864000", "--plot", "events.svg")
    described = answer(run_command, "info", "yambda-like", "--path", "prepared", *words)
    assert described["synthetic"] is True
    assert described["events"] == made["events"] == sum(described["by_type"].values())
    assert sum(described["shares"].values()) == pytest.approx(1)
    assert described["windows"]["count"] in (30, 31)
    assert 0 < described["anchors"]["total"] < described["by_type"]["listen"]
    assert 0 < described["history"]["mean"] <= 30
    assert sum(described["user_lengths"].values()) == described["users"]
    assert "<svg" in Path("events.svg").read_text()
    assert "anchors with 10 events before them" in Path("events.svg").read_text()


def test_the_reference_layout_is_opened_as_it_is(run_command: Call, raw: Path) -> None:
    words = ("--reference-layout", "theirs", "--history-length", "30", "--min-history", "4", "--store", "ours")
    answer(run_command, "prepare", "yambda-like", "--path", str(raw), *words)
    own = answer(run_command, "info", "yambda-like", "--path", "ours", "--history-length", "30")
    cache = next(Path("theirs").glob("processed_*/hstu_cache_L30"))
    other = answer(run_command, "info", "yambda-like", "--path", str(cache), "--history-length", "30")
    assert other["layout"] == "reference"
    assert other["bytes_an_event"] == 47
    for name in ("events", "users", "by_type", "shares", "anchors", "history", "windows", "user_lengths"):
        assert other[name] == own[name], name
    assert answer(run_command, "check", "yambda-like", "--path", str(cache))["intact"] is True


def test_the_embedded_dataset_is_there_without_asking(run_command: Call) -> None:
    code, out, _ = run_command("info", "yambda-like")
    assert code == 0
    assert "making yambda-like, once" in out
    assert "users by length of their stream" in out
    assert "making" not in run_command("info", "yambda-like")[1]


def test_an_imported_dataset_is_found_by_its_name(run_command: Call) -> None:
    Path("log.csv").write_text(
        "who,what,at,clicked\n" + "".join(f"{u},{u % 3},{t},1\n" for u in (7, 5) for t in range(9))
    )
    words = ("--user", "who", "--item", "what", "--time", "at", "--label", "clicked", "--name", "mine")
    made = answer(run_command, "import", "--events", "log.csv", *words)
    assert (made["events"], made["users"]) == (18, 2)
    assert answer(run_command, "info", "mine", "--min-history", "2")["anchors"]["total"] == 14
    assert answer(run_command, "check", "mine")["store"]["digest"] == made["digest"]
    code, _, err = run_command("import", "--events", "log.csv", *words)
    assert code == 3
    assert "there is a store already" in err


def test_damage_is_found(run_command: Call) -> None:
    answer(run_command, "make", "yambda-like", "--path", "made", "--events", "20000")
    path = Path("made/items.u4")
    content = bytearray(path.read_bytes())
    content[1000] ^= 1
    path.write_bytes(content)
    code, _, err = run_command("check", "yambda-like", "--path", "made")
    assert (code, "items.u4" in err) == (3, True)
    path.write_bytes(content[:-4])
    assert run_command("info", "yambda-like", "--path", "made")[0] == 3
    shutil.rmtree("made")
    assert run_command("info", "yambda-like", "--path", "made")[0] == 3


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["get", "yambda-like"], 2, "built in"),
        (["get", "yambda-5"], 2, "did you mean 'yambda-5b'?"),
        (["get", "yambda-50m", "--offline"], 4, "offline"),
        (["make", "yambda-50m", "--path", "x"], 2, "real data"),
        (["make", "yambda-like"], 2, "needs --path"),
        (["make", "yambda-like", "--path", "x", "--events", "3"], 3, "events is 3"),
        (["prepare", "yambda-50m"], 3, "is not on this machine"),
        (["prepare", "yambda-like"], 2, "is made as a store"),
        (["prepare", "movielens-100k", "--path", "."], 2, "only those are prepared"),
        (["info", "yambda-50m"], 3, "recperf data get yambda-50m"),
        (["info", "mine"], 2, "unknown dataset 'mine'"),
        (["info", "yambda-like", "--plot", "x.doc"], 2, "a plot is one of"),
        (["check", "yambda-50m", "--path", "nowhere"], 3, "there is nothing here"),
        (["import", "--events", "nowhere.csv", "--label", "y"], 3, "nowhere.csv"),
        (["import", "--events", "x.csv"], 2, "exactly one"),
    ],
)
def test_what_cannot_be_done_says_so(run_command: Call, words: list[str], code: int, said: str) -> None:
    got, out, err = run_command(*words)
    assert got == code, err
    assert said in err
    assert "Traceback" not in out + err


def test_every_action_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for action in ("get", "prepare", "check", "info", "make"):
        with pytest.raises(SystemExit):
            main(["data", action, "yambda-50m", "--help"])
        assert "--json" in capsys.readouterr().out
