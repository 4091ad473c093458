"""The commands around listening events as a user types them."""

from __future__ import annotations

import functools
import json
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from recperf.data.yambda import catalogue, synthesize
from recperf.data.yambda.schema import ALBUMS_FILE, ARTISTS_FILE, EVENTS_FILE

parquet = pytest.importorskip("pyarrow.parquet", reason="raw listening events are parquet")
EVENTS, ARTISTS, ALBUMS = Path(EVENTS_FILE), Path(ARTISTS_FILE), Path(ALBUMS_FILE)

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
def raw(call: Call) -> Path:
    answer(call, "make", "yambda-like", "--path", "raw", "--events", "20000", "--form", "raw")
    return Path("raw").absolute()


def test_made_prepared_checked_and_described(call: Call, raw: Path) -> None:
    made = answer(call, "make", "yambda-like", "--path", "made", "--events", "20000")
    prepared = answer(call, "prepare", "yambda-like", "--path", str(raw), "--store", "prepared")
    assert prepared["prepared"] is True
    assert prepared["digest"] == made["digest"], "raw files and the store made at once are the same events"
    assert prepared["bytes_an_event"] == 9
    again = answer(call, "prepare", "yambda-like", "--path", str(raw), "--store", "prepared")
    assert (again["prepared"], again["digest"]) == (False, made["digest"])

    assert answer(call, "check", "yambda-like", "--path", "prepared")["store"]["events"] == made["events"]
    checked = answer(call, "check", "yambda-like", "--path", str(raw))["raw"]
    assert sum(checked["by_type"].values()) == checked["events"] == prepared["split"]["raw_events"]

    arguments = ("--min-history", "10", "--history-length", "30", "--window-seconds", "864000")
    described = answer(call, "info", "yambda-like", "--path", "prepared", *arguments)
    assert described["synthetic"] is True
    assert described["events"] == made["events"] == sum(described["by_type"].values())
    assert sum(described["shares"].values()) == pytest.approx(1)
    assert described["windows"]["count"] in (30, 31)
    assert 0 < described["anchors"]["total"] < described["by_type"]["listen"]
    assert 0 < described["history"]["mean"] <= 30
    assert sum(described["user_lengths"].values()) == described["users"]


def test_the_embedded_dataset_is_there_without_asking(call: Call) -> None:
    code, out, _ = call("info", "yambda-like")
    assert code == 0
    assert "generating yambda-like once" in out
    assert "users by number of events" in out
    assert "generating" not in call("info", "yambda-like")[1]
    checked = answer(call, "check", "yambda-like")
    assert checked["intact"] is True
    assert checked["store"]["events"] == answer(call, "info", "yambda-like")["events"]


def test_who_comes_second_waits_for_the_embedded_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on, made = threading.Event(), threading.Event(), []
    plain = synthesize.write_store

    def slow(*args: Any, **options: Any) -> Path:
        begun.set()
        assert go_on.wait(60)
        made.append(1)
        return plain(*args, **options)

    monkeypatch.setattr(synthesize, "write_store", slow)
    message: list[str] = []

    def note(text: str) -> None:
        message.append(text)
        if "waiting" in text:
            go_on.set()

    config = synthesize.of_size(2000)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(catalogue.embedded, say=note, config=config)
        assert begun.wait(60)
        second = pool.submit(catalogue.embedded, say=note, config=config)
        assert first.result(60).digest == second.result(60).digest
    assert made == [1]
    assert message[1:] == ["another process generates yambda-like: waiting for it"]


def test_an_imported_dataset_is_found_by_its_name(call: Call) -> None:
    Path("log.csv").write_text(
        "who,what,at,clicked\n" + "".join(f"{u},{u % 3},{t},1\n" for u in (7, 5) for t in range(9))
    )
    arguments = ("--user", "who", "--item", "what", "--time", "at", "--label", "clicked", "--name", "mine")
    made = answer(call, "import", "--events", "log.csv", *arguments)
    assert (made["events"], made["users"]) == (18, 2)
    assert answer(call, "info", "mine", "--min-history", "2")["anchors"]["total"] == 14
    assert answer(call, "check", "mine")["store"]["digest"] == made["digest"]
    assert made["imported"] is True
    again = answer(call, "import", "--events", "log.csv", *arguments)
    assert (again["imported"], again["digest"]) == (False, made["digest"])
    code, _, err = call("import", "--events", "log.csv", *arguments, "--ids", "keep")
    assert code == 3
    assert "with other options: ids dense, now keep" in err


def test_made_files_do_not_mix_with_others(call: Call, raw: Path) -> None:
    make = ("make", "yambda-like", "--events", "20000", "--path")
    answer(call, *make, "made")
    before = sorted(path.name for path in Path("made").iterdir())
    code, _, err = call(*make, "made", "--form", "raw")
    assert code == 3
    assert "raw files do not belong there" in err
    assert sorted(path.name for path in Path("made").iterdir()) == before
    for folder, what in (("made", "of another source"), (str(raw), "is not empty")):
        code, _, err = call("make", "yambda-like", "--events", "21000", "--path", folder)
        assert code == 3
        assert what in err
    assert answer(call, *make, "made")["events"]
    # Maps without events are those of an interrupted call where they are synthetic, else another dataset's.
    shutil.rmtree(raw / "flat")
    answer(call, *make, str(raw), "--form", "raw")
    shutil.rmtree(raw / "flat")
    other = parquet.read_table(raw / ARTISTS).replace_schema_metadata({})
    parquet.write_table(other, raw / ARTISTS)
    code, _, err = call(*make, str(raw), "--form", "raw")
    assert code == 3
    assert "there is a map of other events here" in err
    assert parquet.read_table(raw / ARTISTS).equals(other)


def test_advice_leads_somewhere(call: Call, raw: Path) -> None:
    def refused(*arguments: str) -> str:
        code, _, err = call(*arguments)
        assert code == 3, err
        assert "Traceback" not in err
        return err

    answer(call, "make", "yambda-like", "--events", "20000", "--path", "made")
    Path("made/store.json").unlink()
    Path("x.png").write_bytes(b"\x89PNG")
    Path("empty").mkdir()
    Path("hstu_cache_L30").mkdir()
    for action in ("info", "check"):
        assert "store.json, which is written last, is missing" in refused(action, "yambda-like", "--path", "made")
        assert "_READY, which is written last" in refused(action, "yambda-50m", "--path", "hstu_cache_L30")
        assert "x.png is damaged or not a parquet file" in refused(action, "yambda-50m", "--path", "x.png")
        for nothing in ("empty", "."):
            assert "there is no multi_event.parquet of this dataset here" in refused(
                action, "yambda-like", "--path", nothing
            )
        other = refused(action, "yambda-50m", "--path", str(raw))
        assert "but of yambda-like" in other
        assert f"yambda-like --path {raw}" in other
    message = refused("info", "yambda-like", "--path", str(raw))
    assert f"recperf data prepare yambda-like --path {raw}" in message
    catalogue.raw_folder("yambda-5b").mkdir(parents=True)
    assert "recperf data get yambda-5b" in refused("info", "yambda-5b")


def test_damage_is_found(call: Call) -> None:
    answer(call, "make", "yambda-like", "--path", "made", "--events", "20000")
    path = Path("made/items.u4")
    content = bytearray(path.read_bytes())
    content[1000] ^= 1
    path.write_bytes(content)
    code, _, err = call("check", "yambda-like", "--path", "made")
    assert (code, "items.u4" in err) == (3, True)
    path.write_bytes(content[:-4])
    assert call("info", "yambda-like", "--path", "made")[0] == 3
    shutil.rmtree("made")
    assert call("info", "yambda-like", "--path", "made")[0] == 3


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["get", "yambda-like"], 2, "generated locally"),
        (["get", "yambda-50m", "--offline"], 4, "offline"),
        (["make", "yambda-50m", "--path", "x"], 2, "real data"),
        (["make", "yambda-like", "--path", "x", "--events", "3"], 3, "events is 3"),
        (["prepare", "yambda-50m"], 3, "is not on this machine"),
        (["prepare", "yambda-like"], 2, "is generated as a store"),
        (["prepare", "movielens-100k", "--path", "."], 2, "only those are prepared"),
        (["info", "mine"], 2, "unknown dataset 'mine'"),
        (["check", "yambda-50m", "--path", "nowhere"], 3, "the path does not exist"),
        (["import", "--events", "nowhere.csv", "--label", "y"], 3, "nowhere.csv"),
        (["import", "x.csv", "--label", "y", "--rating", "r"], 2, "rating and label are given"),
    ],
)
def test_what_cannot_be_done_says_so(call: Call, arguments: list[str], code: int, message: str) -> None:
    got, out, err = call(*arguments)
    assert got == code, err
    assert message in err
    assert "Traceback" not in out + err
