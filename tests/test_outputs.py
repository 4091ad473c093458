"""What a command writes goes under a new name, or in the place of what recperf wrote; nothing else is replaced."""

from __future__ import annotations

import os
from pathlib import Path

import example_runs as examples
import pytest

from recperf.cli import main
from recperf.errors import RecperfError
from recperf.execution.scoring import table_file
from recperf.folders import alone

LAST = ("score", "logit")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return examples.make_run(Path("run"), measured=())


def report(*arguments: str) -> int:
    return main(["report", "run", *arguments, "--json"])


@pytest.mark.parametrize("force", [(), ("--force",)])
@pytest.mark.parametrize(
    ("out", "code"),
    [("data.csv", 2), ("run/config.json", 2), ("run/checkpoints/seed-42/index.json", 2), ("run/theirs.html", 3),
     ("run/checkpoints/page.html", 3), ("store/page.html", 3), ("link.html", 2), ("folder.html", 2), ("pipe.html", 2)],
)  # fmt: skip
def test_a_page_never_goes_into_other_files(
    run: Path, out: str, code: int, force: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    checkpoints = run / "checkpoints" / "seed-42"
    checkpoints.mkdir(parents=True)
    Path("store").mkdir()
    (Path("store") / "store.json").write_text("{}")
    for path in (Path("data.csv"), checkpoints / "index.json", run / "theirs.html"):
        path.write_text("mine")
    Path("link.html").symlink_to("data.csv")
    Path("folder.html").mkdir()
    os.mkfifo("pipe.html")
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    assert report("--out", out, *force) == code
    error = capfd.readouterr().err
    assert error.startswith("error: ")
    assert error.count("error:") == 1
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before
    assert Path("link.html").is_symlink()


def test_a_page_is_new_or_replaces_a_page_or_is_forced(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    page = Path("page.html")
    assert report("--out", "page.html") == report("--out", "page.html") == 0
    written = page.read_bytes()
    page.write_text("<html>mine</html>")
    assert report("--out", "page.html") == 3
    assert "recperf wrote; it was not changed" in capfd.readouterr().err
    assert page.read_text() == "<html>mine</html>"
    assert report("--out", "page.html", "--force") == 0
    assert page.read_bytes() == written
    page.write_bytes(b"")
    Path("link.html").symlink_to(page)
    assert report("--out", "link.html") == 0
    assert Path("link.html").is_symlink()
    assert page.read_bytes() == written
    assert report() == report() == 0
    assert (run / "report.html").read_bytes() == written


@pytest.mark.parametrize(
    ("content", "taken"),
    [(None, True), ("", True), ('"user","score","logit"\n1,0.5,0\n', True), ("user,recperf_score,logit\n", True),
     ("user,item,clicked\n1,2,0\n", False), ("score,logit,user\n", False), ("\0\1\2", False)],
)  # fmt: skip
def test_a_table_replaces_only_one_of_its_form(tmp_path: Path, content: str | None, taken: bool) -> None:
    path = tmp_path / "t.csv"
    if content is not None:
        path.write_text(content)
    if taken:
        assert table_file(path, LAST) == path
    else:
        with pytest.raises(RecperfError, match="is not a table of this command") as refused:
            table_file(path, LAST)
        assert refused.value.exit_code == 3
        assert table_file(path, LAST, force=True) == path


def test_nothing_of_a_run_or_a_store_is_replaced_even_by_force(tmp_path: Path) -> None:
    with alone(tmp_path / "run", what="writing", ours=".*"):
        pass
    (tmp_path / "run" / "rows.csv").write_text("user,item\n")
    assert table_file(tmp_path / "run" / "new.csv", LAST).name == "new.csv"
    (tmp_path / "link.csv").symlink_to(tmp_path / "run" / "rows.csv")
    for path in ("run/rows.csv", "run/start/new.csv", "link.csv"):
        with pytest.raises(RecperfError, match="belongs to a run or a dataset"):
            table_file(tmp_path / path, LAST, force=True)
