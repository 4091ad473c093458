"""A user's files in every folder that recperf writes to, and processes that outlive the command that started them."""

from __future__ import annotations

import os
import time
from pathlib import Path

from chaos_process import Failure

FOREIGN = {
    "process-2024-results/results.csv": b"year,result\n2024,1\n",
    ".exported.0a1b2c3d/notes.txt": b"kept",
    ".clicks-0a1b2c3d/notes.txt": b"kept",
    ".run.0a1b2c3d/notes.txt": b"kept",
    ".notes.tmp": b"kept",
    ".scores.csv.999999.tmp": b"kept",
    ".exported.999999-abcdefgh/notes.txt": b"kept",
    "notes.txt": b"last line without an end",
    "my.jsonl": b'{"kind": "step"}\nlast line without an end',
}
"""Files of a user, with names that look like those of recperf's own drafts and logs."""
END_S = 15.0
"""Seconds within which processes end once the one that started them is gone."""


class Planted:
    """Files of a user in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, content in FOREIGN.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            # Old enough for whatever removes what nobody has used for a while.
            for old in {path, path.parent} - {folder}:
                os.utime(old, (0, 0))

    def require_untouched(self) -> None:
        for name, content in FOREIGN.items():
            path = self.folder / name
            if not path.is_file() or path.is_symlink() or path.read_bytes() != content:
                raise Failure("touched", f"a user's file was changed or removed: {path}")


def require_none_alive(folder: Path) -> None:
    """Every process that was started in the folder ends by itself soon."""
    end = time.monotonic() + END_S
    while alive := started_in(folder):
        if time.monotonic() > end:
            for pid in alive:
                os.kill(pid, 9)
            raise Failure("left alive", f"processes that outlive theirs: {alive}")
        time.sleep(0.05)


def started_in(folder: Path) -> list[int]:
    """Processes that work in the folder, except this one."""
    pids = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            place, state = Path(os.readlink(entry / "cwd")), (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z" and (place == folder or folder in place.parents):
            pids.append(int(entry.name))
    return pids
