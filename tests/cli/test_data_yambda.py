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

from recperf.cli.data.progress import Bar, Unit
from recperf.cli.terminal import Terminal
from recperf.data.yambda import catalogue, synthesize
from recperf.data.yambda.schema import ALBUMS_FILE, ARTISTS_FILE, EVENTS_FILE

parquet = pytest.importorskip("pyarrow.parquet", reason="raw listening events are parquet")
EVENTS, ARTISTS, ALBUMS = Path(EVENTS_FILE), Path(ARTISTS_FILE), Path(ALBUMS_FILE)

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(call: Call) -> Call:
    return functools.partial(call, "data")


def answer(call: Call, *words: str) -> dict[str, Any]:
    code, out, err = call(*words, "--json")
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
    assert prepared["bytes_an_event"] == 11
    again = answer(call, "prepare", "yambda-like", "--path", str(raw), "--store", "prepared")
    assert (again["prepared"], again["digest"]) == (False, made["digest"])

    assert answer(call, "check", "yambda-like", "--path", "prepared")["store"]["events"] == made["events"]
    checked = answer(call, "check", "yambda-like", "--path", str(raw))["raw"]
    assert sum(checked["by_type"].values()) == checked["events"] == prepared["split"]["raw_events"]

    words = ("--min-history", "10", "--history-length", "30", "--window-seconds", "864000", "--plot", "events.svg")
    described = answer(call, "info", "yambda-like", "--path", "prepared", *words)
    assert described["synthetic"] is True
    assert described["events"] == made["events"] == sum(described["by_type"].values())
    assert sum(described["shares"].values()) == pytest.approx(1)
    assert described["windows"]["count"] in (30, 31)
    assert 0 < described["anchors"]["total"] < described["by_type"]["listen"]
    assert 0 < described["history"]["mean"] <= 30
    assert sum(described["user_lengths"].values()) == described["users"]
    assert "<svg" in Path("events.svg").read_text()
    assert "anchors with at least 10 earlier events" in Path("events.svg").read_text()


def test_the_reference_layout_is_opened_as_it_is(call: Call, raw: Path) -> None:
    words = ("--reference-layout", "theirs", "--history-length", "30", "--min-history", "4", "--store", "ours")
    answer(call, "prepare", "yambda-like", "--path", str(raw), *words)
    own = answer(call, "info", "yambda-like", "--path", "ours", "--history-length", "30")
    cache = next(Path("theirs").glob("processed_*/hstu_cache_L30"))
    other = answer(call, "info", "yambda-like", "--path", str(cache), "--history-length", "30")
    assert other["layout"] == "reference"
    assert other["bytes_an_event"] == 40
    for name in ("events", "users", "by_type", "shares", "anchors", "history", "windows", "user_lengths"):
        assert other[name] == own[name], name
    assert answer(call, "check", "yambda-like", "--path", str(cache))["intact"] is True


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
    said: list[str] = []

    def note(text: str) -> None:
        said.append(text)
        if "waiting" in text:
            go_on.set()

    config = synthesize.of_size(2000)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(catalogue.embedded, say=note, config=config)
        assert begun.wait(60)
        second = pool.submit(catalogue.embedded, say=note, config=config)
        assert first.result(60).digest == second.result(60).digest
    assert made == [1]
    assert said[1:] == ["another process generates yambda-like: waiting for it"]


def test_an_imported_dataset_is_found_by_its_name(call: Call) -> None:
    Path("log.csv").write_text(
        "who,what,at,clicked\n" + "".join(f"{u},{u % 3},{t},1\n" for u in (7, 5) for t in range(9))
    )
    words = ("--user", "who", "--item", "what", "--time", "at", "--label", "clicked", "--name", "mine")
    made = answer(call, "import", "--events", "log.csv", *words)
    assert (made["events"], made["users"]) == (18, 2)
    assert answer(call, "info", "mine", "--min-history", "2")["anchors"]["total"] == 14
    assert answer(call, "check", "mine")["store"]["digest"] == made["digest"]
    assert made["imported"] is True
    again = answer(call, "import", "--events", "log.csv", *words)
    assert (again["imported"], again["digest"]) == (False, made["digest"])
    code, _, err = call("import", "--events", "log.csv", *words, "--ids", "keep")
    assert code == 3
    assert "with other options: ids dense, now keep" in err


def test_a_small_import_is_described(call: Call) -> None:
    Path("log.csv").write_text("user,item,time,y\n1,1,1,1\n1,2,2,0\n")
    answer(call, "import", "--events", "log.csv", "--label", "y", "--name", "mine")
    facts = answer(call, "info", "mine", "--plot", "mine.SVG")
    assert (facts["events"], facts["anchors"]["total"], facts["windows"]["count"]) == (2, 0, 0)
    assert Path("mine.SVG").is_file()
    code, out, err = call("info", "mine")
    assert code == 0, err
    assert "users by number of events" in out


def test_checks_say_what_no_digest_vouches_for(call: Call, raw: Path) -> None:
    names = [path.name for path in (EVENTS, ARTISTS, ALBUMS)]
    facts = answer(call, "check", "yambda-like", "--path", str(raw))["raw"]
    assert (facts["verified_by_digest"], facts["not_verified_by_digest"]) == ([], names)

    shutil.copytree(raw, catalogue.raw_folder("yambda-50m"))
    (catalogue.raw_folder("yambda-50m") / "flat/like").rename(catalogue.raw_folder("yambda-50m") / "flat/50m")
    facts = answer(call, "check", "yambda-50m")["raw"]
    assert facts["verified_by_digest"] == []
    assert set(facts["not_verified_by_digest"]) == {str(ARTISTS), str(ALBUMS), f"flat/50m/{EVENTS}"}
    code, out, _ = call("check", "yambda-50m")
    assert code == 0
    assert "raw_not_verified_by_digest" in out


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
    def refused(*words: str) -> str:
        code, _, err = call(*words)
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
    said = refused("info", "yambda-like", "--path", str(raw))
    assert f"recperf data prepare yambda-like --path {raw}" in said
    catalogue.raw_folder("yambda-5b").mkdir(parents=True)
    assert "recperf data get yambda-5b" in refused("info", "yambda-5b")


def test_bars_count_what_they_say(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    clock = iter(range(0, 10_000, 10))
    monkeypatch.setattr("recperf.cli.data.progress.monotonic", lambda: float(next(clock)))

    def lines(unit: Unit, *calls: tuple[int, ...]) -> list[str]:
        bar = Bar(Terminal(as_json=False, quiet=False), "work", unit)
        for call in calls:
            bar(*call)
        return capsys.readouterr().out.splitlines()

    assert lines("events", (0, 5000), (2000, 5000))[-1] == "work  2 k of 5 k events  200 events/s  15 s left"
    assert lines("bytes", (0, 4096, 0), (2048, 4096, 7))[-1] == "work  2 KiB of 4 KiB  7 rows  10 s left"
    assert lines("share", (0, 3000), (1000, 3000))[-1] == "work  33 %  20 s left"
    assert lines("events", (5000, 5000)) == [], "nothing is known of a rate"
    # A second part counts from its own start.
    assert lines("share", (0, 100), (100, 100), (0, 1000), (250, 1000))[-1] == "work  25 %  30 s left"


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
    ("words", "code", "said"),
    [
        (["get", "yambda-like"], 2, "generated locally"),
        (["get", "yambda-50m", "--offline"], 4, "offline"),
        (["make", "yambda-50m", "--path", "x"], 2, "real data"),
        (["make", "yambda-like", "--path", "x", "--events", "3"], 3, "events is 3"),
        (["prepare", "yambda-50m"], 3, "is not on this machine"),
        (["prepare", "yambda-like"], 2, "is generated as a store"),
        (["prepare", "movielens-100k", "--path", "."], 2, "only those are prepared"),
        (["info", "mine"], 2, "unknown dataset 'mine'"),
        (["info", "yambda-like", "--plot", "x.doc"], 2, "a plot is one of"),
        (["check", "yambda-50m", "--path", "nowhere"], 3, "the path does not exist"),
        (["import", "--events", "nowhere.csv", "--label", "y"], 3, "nowhere.csv"),
        (["import", "--events", "x.csv"], 2, "exactly one"),
    ],
)
def test_what_cannot_be_done_says_so(call: Call, words: list[str], code: int, said: str) -> None:
    got, out, err = call(*words)
    assert got == code, err
    assert said in err
    assert "Traceback" not in out + err


def test_help_without_a_name_says_which_there_are(call: Call) -> None:
    for action, known, unknown in (
        ("get", "yambda-5b", "criteo"),
        ("check", "criteo", "--seed"),
        ("info", "a dataset you imported", "--seed"),
        ("make", "movielens-like", "movielens-100k"),
    ):
        code, out, _ = call(action, "--help")
        assert code == 0
        assert known in out
        assert unknown not in out
        assert f"recperf data {action} NAME --help" in out
        code, _, err = call(action)
        assert code == 2
        assert "needs the name of a dataset" in err
