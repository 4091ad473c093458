"""Datasets by name, and files held against a list of checksums."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def mine(call: Call) -> str:
    """A small log of ratings, imported as `mine`."""
    rows = [
        f"{user},{10 * item},{1 + (user + item) % 5},{1000 * item + user}" for user in range(40) for item in range(30)
    ]
    Path("ratings.csv").write_text("userId,movieId,rating,timestamp\n" + "\n".join(rows) + "\n")
    columns = ("--user", "userId", "--item", "movieId", "--rating", "rating", "--time", "timestamp")
    code, _, err = call("data", "import", "ratings.csv", *columns, "--name", "mine")
    assert code == 0, err
    return "mine"


@pytest.mark.parametrize("workload", ["micro-dlrm", "dlrm", "dlrm-v4"])
def test_workloads_take_imported_ratings_by_name(call: Call, mine: str, workload: str) -> None:
    code, out, err = call("run", workload, "--data", mine, "--dry-run", "--json")
    assert code == 0, err
    assert "mine, 1,200 " in json.loads(out)["data"]


def test_a_dataset_chooses_the_workload(call: Call, mine: str) -> None:
    assert json.loads(call("show", "--data", mine, "--json")[1])["workload"] == "next-item"
    assert json.loads(call("show", "--data", "movielens-like", "--json")[1])["workload"] == "micro-dlrm"


def test_datasets_are_listed_with_the_command_that_trains_on_them(call: Call, mine: str) -> None:
    listed = {row["name"]: row for row in json.loads(call("data", "list", "--json")[1])["datasets"]}
    assert listed["mine"]["rows"] == 1200
    assert listed["mine"]["bytes"] > 1200 * 11
    assert listed["mine"]["train"] == "recperf run next-item --data mine"
    assert "movielens-100k" not in listed, "it is not on this machine"
    assert "mine" in call("data", "list")[1]
    described = call("data", "info", "mine")[1]
    assert "mine: 1,200 events" in described
    assert "1970-01-01 to 1970-01-01" in described
    facts = json.loads(call("data", "info", "mine", "--json")[1])
    assert facts["events_in_file"] == 1200
    assert not {"artists", "albums", "by_type", "anchors"} & facts.keys()
    assert "describes listening events" in call("data", "info", "mine", "--min-history", "2")[2]


def test_names_and_paths_that_do_not_fit_are_one_line_each(call: Call, mine: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for arguments, code, message in [
        (("run", "dlrm-v4", "--data", "mime"), 2, "did you mean 'mine'?"),
        (("run", "dlrm-v4", "--data.path", "mine"), 3, "recperf run dlrm-v4 --data mine"),
        (("run", "dlrm-v4", "--data", "movielens-like"), 2, "dlrm-v4 cannot train on movielens-like"),
        (("run", "dlrm-v4", "--data", "yambda-50m"), 3, "recperf data get yambda-50m"),
        (("show", "--data", "ratings.csv"), 3, "recperf data import"),
        (("show", "--data", folder), 3, "no dataset that recperf knows"),
        (("data", "info", "mime"), 2, "did you mean 'mine'?"),
    ]:
        found, _, err = call(*arguments)
        assert (found, message in err) == (code, True), (arguments, err)
        assert err.count("error:") == 1


def test_dlrm_reads_genres_and_drawn_negatives_of_imported_events(call: Call) -> None:
    rows = [{"user": f"u{user}", "item": item, "genres": ["War", "Drama"][: item % 3]} for user in range(20) for item in
            range(user, user + 9)]  # fmt: skip
    Path("log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out, err = call("data", "import", "log.jsonl", "--negatives", "2")
    assert code == 0, err
    assert "next: recperf run next-item --data log" in out
    code, out, err = call("run", "dlrm", "--data", "log", "--dry-run", "--json")
    assert code == 0, err
    dry = json.loads(out)
    assert (
        "540 rows, split leave-one-out; events without times, in random order; 2 negatives drawn per event"
        in dry["data"]
    )
    assert dry["config"]["model"]["features"] == ["user", "item", "genres"]
    # micro-dlrm reads one category of a column.
    code, out, err = call("run", "micro-dlrm", "--data", "log", "--dry-run", "--json")
    assert json.loads(out)["config"]["model"]["features"] == ["user", "item"]
    assert "once without the lists of genres, which dlrm reads, in" in err
    code, _, err = call("data", "import", "log.jsonl", "--clicks", "--label", "item", "--name", "log")
    assert code == 3
    assert "there is a dataset 'log' of events already" in err


Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with three files and its list, which lies in it as publishers put it there."""
    folder = tmp_path / "data"
    (folder / "deep").mkdir(parents=True)
    lines = []
    for name, content in (("a.npy", b"one"), ("deep/b.npy", b"two"), ("with space", b"")):
        (folder / name).write_bytes(content)
        lines.append(f"{hashlib.sha256(content).hexdigest()} {'*' if content else ' '}./{name}")
    (folder / "SHA256SUMS").write_text("\n".join(lines) + "\n")
    monkeypatch.chdir(tmp_path)
    return folder


def test_files_as_listed_and_not(call: Call, listed: Path) -> None:
    arguments = ("data", "check", "data", "--sums", "data/SHA256SUMS")
    code, out, err = call(*arguments)
    assert (code, out, err) == (0, "3 files as listed, 6 bytes\n", "")
    (listed / "a.npy").write_bytes(b"One")
    (listed / "deep/b.npy").rename(listed / "deep/c.npy")
    code, out, err = call(*arguments)
    assert code == 3
    assert out.splitlines() == ["missing    deep/b.npy", "differing  a.npy", "extra      deep/c.npy"]
    assert "1 missing, 1 differing, 1 extra" in err
    code, out, _ = call(*arguments, "--json")
    facts = json.loads(out)
    assert (code, facts["intact"], facts["extra"]) == (3, False, ["deep/c.npy"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"\xff", "not text"),
        (b"abc  a.npy\n", "line 1"),
        (b"0" * 64 + b"  ../a.npy\n", "below the folder"),
        (None, "cannot read SHA256SUMS: No such file or directory"),
    ],
)
def test_lists_that_are_none(call: Call, listed: Path, content: bytes | None, message: str) -> None:
    (listed / "SHA256SUMS").unlink() if content is None else (listed / "SHA256SUMS").write_bytes(content)
    code, _, err = call("data", "check", str(listed), "--sums", str(listed / "SHA256SUMS"))
    assert code == 3
    assert message in err
