"""Folders that recperf fills and may empty again: their mark and lock, drafts, and what killed processes left."""

from __future__ import annotations

import errno
import fcntl
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from .errors import DataError, MachineError, notice_once
from .files import (
    draft_owner,
    is_abandoned,
    is_alive,
    make_folder,
    open_regular,
    read_regular,
    stamp_of,
    sync_folder,
    writing,
)
from .stop import FLAG

MARK, LOCK = ".recperf", ".recperf.lock"
"""The file that marks a folder as ours, which is also its lock; and the lock of a folder where others have files too.

Nothing is removed from a folder without the mark, and no file in it is changed.
"""
_MARK_TEXT = b"recperf wrote this folder\n"


def require_own_folders(run: Path, *names: str) -> Path:
    """The folder under a run with these names, of which none may be a link: what a run writes stays in its folder."""
    place = run
    for name in names:
        place = place / name
        if place.is_symlink():
            raise DataError(
                f"{name} is a link, which is not followed",
                where={"folder": place},
                fix="put the folder itself in its place; --run-dir itself may be a link",
            )
    return place


def is_marked(folder: Path) -> bool:
    """Whether recperf wrote a folder."""
    try:
        return read_regular(folder / MARK) == _MARK_TEXT
    except OSError:
        return False


def foreign(folder: Path, ours: str) -> list[str]:
    """The names in a folder that recperf did not write: all if it has no mark, otherwise those that are not `ours`.

    `ours` is a pattern. The name of a folder ends with a slash; a link is never ours.
    """
    marked, pattern = is_marked(folder), re.compile(rf"{re.escape(MARK)}|{ours}")
    with os.scandir(folder) as entries:
        names = {entry.name + "/" * entry.is_dir(follow_symlinks=False): entry.is_symlink() for entry in entries}
    own = {name for name, link in names.items() if not link and (pattern.fullmatch(name) or draft_owner(name))}
    return sorted(names if not marked else names.keys() - own)


def refuse_foreign(folder: Path, ours: str = ".*") -> None:
    """Refuse a folder with files that recperf did not write."""
    others = foreign(folder, ours) if folder.is_dir() else []
    # An empty mark: another process is about to write it, or was killed there.
    if others and (others != [MARK] or (folder / MARK).stat().st_size):
        raise DataError(
            f"recperf did not write these files in the folder, which was not changed: {', '.join(others[:4])}",
            where={"folder": folder},
            fix="choose another folder, or move them away",
        )


def remove_folder(folder: Path, ours: str) -> None:
    """Remove a folder with our mark; where it has other names than `ours` it stays as it is, and a note says so."""
    import shutil

    try:
        others = foreign(folder, ours)
    except (FileNotFoundError, NotADirectoryError):
        # Ranks that start together remove what killed ones left: another was faster.
        return
    if others:
        notice_once(f"{folder} stays, because recperf did not write all of it: {', '.join(others[:4])}")
        return
    # The mark goes last: where a signal ends the process before, the folder is still known as ours.
    with suppress(OSError):
        for name in os.listdir(folder):
            if name != MARK:
                path = folder / name
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        if os.listdir(folder) == [MARK]:
            (folder / MARK).unlink()
        folder.rmdir()


@contextmanager
def alone(folder: Path, *, what: str, ours: str | None = None, again: str | None = None) -> Iterator[None]:
    """Create a folder and hold its lock, because two processes must not write the same files.

    With `ours`, a pattern of names, the folder gets our mark, and one that has other files is refused.
    """
    with writing(folder, fix=again):
        folder.mkdir(parents=True, exist_ok=True)
        if ours is not None:
            refuse_foreign(folder, ours)
        path = folder / (LOCK if ours is None else MARK)
        lock = open(open_regular(path, os.O_RDWR | os.O_CREAT), "r+b", buffering=0)
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise MachineError(
                f"another process is {what}", where={"folder": folder}, fix="wait until it is done"
            ) from None
        except OSError:
            # Some network file systems have no locks; there the user must not start two processes.
            pass
        if ours is None and not _is_still(lock.fileno(), path):
            # The owner before removed the file when it was done; a third process may have made another.
            raise MachineError(f"another process was {what}", where={"folder": folder}, fix="try again")
        if ours is not None and not is_marked(folder):
            with writing(path, fix=again):
                os.write(lock.fileno(), _MARK_TEXT)
                # After a power cut no file of ours may be there without the mark.
                os.fsync(lock.fileno())
                sync_folder(folder)
        try:
            yield
        finally:
            if ours is None:
                path.unlink(missing_ok=True)


def _is_still(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except OSError:
        return False


@contextmanager
def one_at_a_time(path: Path, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold a lock file, so that of several processes that start together one does the work and the others wait for it.

    `waiting` is called before a wait.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = open(open_regular(path, os.O_WRONLY | os.O_CREAT), "wb")
    with lock:
        # Some network file systems have no locks; an atomic rename still keeps the result whole.
        with suppress(OSError):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting()
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def made_once(folder: Path, last: str, notice: str, write: Callable[[Path], None]) -> Path:
    """A folder that follows from other files: written where its `last` file is missing, after a notice. Of several
    processes that start together one writes it."""
    if not (folder / last).is_file():
        make_folder(folder.parent)
        with one_at_a_time(folder.with_name(folder.name + ".lock")):
            if not (folder / last).is_file():
                notice_once(notice)
                with new_folder(folder) as draft:
                    write(draft)
    return folder


@contextmanager
def temporary_folder(prefix: str = "recperf-", *, beside: Path | None = None) -> Iterator[Path]:
    """A folder that is removed with its content after the block, also where a signal ends the process inside.

    Those of the same prefix that killed processes left are removed too. It lies in a folder of the same name, which has
    our mark: whoever renames it takes no mark along.
    """
    import tempfile

    parent = Path(tempfile.gettempdir()) if beside is None else beside
    for name in os.listdir(parent):
        own = re.fullmatch(rf"({re.escape(prefix)}(\d+)-[0-9a-f]{{8}})-([0-9a-f]{{16}})", name)
        if own is None or own[3] != stamp_of(own[1]):
            continue
        if is_marked(parent / name) and is_abandoned(parent / name / MARK):
            remove_folder(parent / name, f"{re.escape(name)}/")
        elif not is_alive(int(own[2])):
            # A kill just before the mark is there, or after it is gone, leaves an empty folder.
            with suppress(OSError):
                (parent / name).rmdir()
    own_name = f"{prefix}{os.getpid()}-{os.urandom(4).hex()}"
    folder = parent / f"{own_name}-{stamp_of(own_name)}"
    folder.mkdir(mode=0o700)
    ours = f"{re.escape(folder.name)}/"
    with (
        alone(folder, what="using this folder", ours=ours),
        FLAG.before_exit(lambda: remove_folder(folder, ours)),
    ):
        try:
            content = folder / folder.name
            content.mkdir()
            yield content
        finally:
            remove_folder(folder, ours)


@contextmanager
def new_folder(folder: Path, *, ours: str | None = None, fix: str | None = None) -> Iterator[Path]:
    """A draft folder that gets its final name when the block succeeds; one that exists and is not empty is refused.

    With `ours`, a pattern of names, the folder gets our mark, and an older one that has it is replaced at the end.
    """
    folder = folder.expanduser().absolute()
    old = ours is not None and folder.is_dir() and not folder.is_symlink() and not foreign(folder, ours)
    if not old:
        refuse_occupied(folder)
    with writing(folder, fix=fix):
        make_folder(folder.parent)
        with temporary_folder(f".{folder.name}.", beside=folder.parent) as draft:
            with alone(draft, what="writing this folder", ours=ours) if ours else nullcontext():
                yield draft
            if old and ours:
                remove_folder(folder, ours)
            take_name(draft, folder)
        sync_folder(folder.parent)


def take_name(draft: Path, folder: Path) -> None:
    """Give a draft its final name, unless another process was faster."""
    try:
        os.rename(draft, folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        raise DataError(
            "another process has written this folder in the meantime; it was not changed",
            where={"folder": folder},
            fix="use what is there, or name a new folder",
        ) from None


def refuse_occupied(folder: Path) -> None:
    try:
        occupied = os.path.lexists(folder) and not (os.path.isdir(folder) and not os.listdir(folder))
    except OSError:
        occupied = True
    if occupied:
        raise DataError(
            "the folder exists already; it was not changed",
            where={"folder": folder},
            fix="name a new folder, or remove that one first",
        )
