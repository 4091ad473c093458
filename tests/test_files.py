"""Nothing of the user's is removed or changed, and what killed processes left is."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from recperf import folders
from recperf.errors import DataError, MachineError, Stopped
from recperf.files import write_atomic
from recperf.folders import MARK, alone, foreign, new_folder, temporary_folder
from recperf.stop import StopFlag

KILLED = """import os, sys
from pathlib import Path
from recperf.files import *
from recperf.folders import *
place = Path(sys.argv[1])
"""


def kill_inside(block: str, place: Path) -> None:
    """Run a process that is killed inside a block."""
    code = f"{KILLED}with {block} as held:\n    os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", code, str(place)]).returncode == -signal.SIGKILL


def test_what_killed_processes_left_is_removed_and_nothing_else(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    foreign = [".new.old/x", ".new.marked/.recperf", ".new.2024.tmp/x", ".table.csv.tmp", ".table.csv.999999.tmp"]
    foreign += [".table.csv.999999-0123456789abcdef.tmp"]
    for name in foreign:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    for name in (".new.999999-abcdefgh", ".new.999999-01234567-0123456789abcdef"):
        (tmp_path / name).mkdir()  # Empty folders of the user.
    before = set(tmp_path.iterdir())
    kill_inside("new_folder(place / 'new')", tmp_path)
    (kept,) = set(tmp_path.iterdir()) - before
    (kept / "notes.txt").write_text("mine")
    kill_inside("new_folder(place / 'new')", tmp_path)
    kill_inside("atomic_file(place / 'table.csv')", tmp_path)
    assert len(list(tmp_path.iterdir())) == len(before) + 3
    with new_folder(tmp_path / "new") as folder:
        (folder / "content").touch()
    write_atomic(tmp_path / "table.csv", b"1")
    assert f"note: {kept} stays, because recperf did not write all of it: notes.txt" in capfd.readouterr().err
    assert set(tmp_path.iterdir()) == {*before, kept, tmp_path / "new", tmp_path / "table.csv"}
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["content"], "the mark stays behind"
    assert {(tmp_path / name).read_text() for name in (*foreign, kept / "notes.txt")} == {"mine"}


@pytest.mark.parametrize("name", [MARK, "notes.txt", "part-7", "link", "part-1/x"])
@pytest.mark.parametrize("marked", [False, True])
def test_a_folder_with_files_of_others_is_refused_unchanged(tmp_path: Path, name: str, marked: bool) -> None:
    folder, ours = tmp_path / "folder", r"part-\d"
    if marked:
        with alone(folder, what="writing", ours=ours):
            (folder / "part-1").touch() if name != "part-1/x" else None
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).symlink_to(tmp_path) if name == "link" else (folder / name).write_text("mine")
    if marked and name == "part-7":
        with alone(folder, what="writing", ours=ours), pytest.raises(MachineError, match="another process is writing"):
            alone(folder, what="writing", ours=ours).__enter__()
        return

    def state() -> list[tuple[Path, int, int]]:
        paths = sorted([folder, *folder.iterdir()])
        return [(path, path.lstat().st_mtime_ns, path.lstat().st_size) for path in paths]

    before = state()
    with pytest.raises(DataError, match=f"recperf did not write .*: {re.escape(name.split('/')[0])}") as caught:
        alone(folder, what="writing", ours=ours).__enter__()
    assert caught.value.exit_code == 3
    assert state() == before


def test_the_folder_of_a_running_process_is_not_removed(tmp_path: Path) -> None:
    with temporary_folder("process-", beside=tmp_path) as mine:
        code = f"{KILLED}with temporary_folder('process-', beside=place): print(len(os.listdir(place)))"
        done: Any = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
        assert done.stdout == "2\n", done.stderr
        assert mine.is_dir()
    assert os.listdir(tmp_path) == []


def test_two_processes_remove_what_a_killed_one_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kill_inside("temporary_folder('process-', beside=place)", tmp_path)
    (left,) = tmp_path.iterdir()

    original, calls = folders.is_marked, []

    def marked(folder: Path) -> bool:
        calls.append(original(folder))
        if len(calls) == 2:  # Between finding it and listing its content.
            shutil.rmtree(left)
        return calls[-1]

    monkeypatch.setattr(folders, "is_marked", marked)
    with temporary_folder("process-", beside=tmp_path) as mine:
        assert os.listdir(tmp_path) == [mine.name]


def test_a_link_to_itself_is_a_file_of_others(tmp_path: Path) -> None:
    (tmp_path / "users").symlink_to("users")
    assert foreign(tmp_path, "users") == ["users"]


def test_a_signal_does_not_end_a_save_in_the_background() -> None:
    flag, errors = StopFlag(), []
    flag.received = signal.SIGTERM
    thread = threading.Thread(target=lambda: errors.append(flag.poll()))
    thread.start()
    thread.join()
    assert errors == [None]
    with pytest.raises(Stopped):
        flag.poll()


def test_of_two_that_write_a_folder_the_slower_one_gets_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="another process has written this folder") as slower:  # noqa: SIM117
        with new_folder(tmp_path / "new") as draft:
            (draft / "content").write_text("slower")
            with new_folder(tmp_path / "new") as faster:
                (faster / "content").write_text("faster")
    assert slower.value.exit_code == 3
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    assert (tmp_path / "new" / "content").read_text() == "faster"
