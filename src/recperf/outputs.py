"""Where a command may write the file that its user names: one rule for pages, tables and saved reports.

A file goes under a new name, or in the place of an older one of the same kind that recperf wrote. Other files stay as
they are unless the user forces it, and those of runs, stores and checkpoints stay in any case. A link is written
through: what it leads to has to fit too.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

from .errors import DataError, UsageError
from .files import open_regular, writing
from .folders import is_marked

PAGE_MARKS = (b'<meta name="generator" content="recperf ', b'<svg data-generator="recperf"')
"""What the pages and pictures that recperf writes have near their beginning."""
_HEAD = 1 << 16
"""Bytes at the beginning of a file in which its mark is looked for."""


def output_file(
    path: str | Path,
    *,
    endings: Sequence[str],
    ours: Callable[[Path], bool],
    what: str,
    option: str = "--out",
    force: bool = False,
) -> Path:
    """The file to write for a path that the user named, or an error that says why it is not written.

    `ours` says whether an existing file is `what` this command writes, `endings` how names of such files end.
    """
    named = Path(path).expanduser()
    place = Path(os.path.realpath(named))
    with writing(place, fix=f"choose another {option}"):
        try:
            status = os.stat(place)
        except FileNotFoundError:
            status = None
    if status is not None and not stat.S_ISREG(status.st_mode):
        shown = "a folder" if stat.S_ISDIR(status.st_mode) else "not a regular file"
        raise UsageError(f"{option} is {shown}; name a file", where={"path": named}, fix=f"choose another {option}")
    for one in (named, place):
        if one.suffix.lower() not in endings:
            raise UsageError(
                f"{one.name!r} does not end in {' or '.join(endings)}, as the name of {what} does",
                where={"file": one},
                fix=f"{option} {named.stem}{endings[0]}",
            )
    is_ours = status is not None and ours(place)
    if not is_ours and _is_kept(place, status is not None):
        what = "this file belongs to a run or a dataset, whose own files recperf does not replace"
        raise DataError(what, where={"file": place}, fix=f"choose another {option}")
    if status is None or is_ours or force or status.st_size == 0:
        return place
    raise DataError(
        f"the file exists, and is not {what} that recperf wrote; it was not changed",
        where={"file": place},
        fix=f"choose another {option}, or replace it with --force",
    )


def is_page(path: Path) -> bool:
    """Whether a file is a page or a picture that recperf wrote."""
    with writing(path), open(open_regular(path), "rb") as file:
        head = file.read(_HEAD)
    return any(mark in head for mark in PAGE_MARKS)


def _is_kept(place: Path, exists: bool) -> bool:
    """Whether a file, which `exists` or is new, would be one of a run, a checkpoint or a store.

    Pages and tables may lie beside the files of a run; everything below its folder is its own.
    """
    for folder in place.parents:
        if any((folder / name).exists() for name in ("store.json", "clicks.json")):
            return True
        if is_marked(folder) or all((folder / name).exists() for name in ("config.json", "events.jsonl")):
            return exists or folder != place.parent or place.suffix == ".json"
    return False
