"""`recperf data check FOLDER --sums FILE` names every file that is not as listed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

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
        (None, "no such list"),
    ],
)
def test_lists_that_are_none(call: Call, listed: Path, content: bytes | None, message: str) -> None:
    (listed / "SHA256SUMS").unlink() if content is None else (listed / "SHA256SUMS").write_bytes(content)
    code, _, err = call("data", "check", str(listed), "--sums", str(listed / "SHA256SUMS"))
    assert code == 3
    assert message in err
