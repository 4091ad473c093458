"""Writing so that a crash never leaves a half file under its final name, and a full disk is said in one line."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import MachineError

_CAUSES = {
    errno.ENOSPC: ("the disk is full", "free some space, or choose another place with --run-dir"),
    errno.EDQUOT: ("the disk quota is used up", "free some space, or choose another place with --run-dir"),
    errno.EROFS: ("the file system is read-only", "choose another place with --run-dir"),
    errno.EACCES: ("permission denied", "choose a folder you may write with --run-dir"),
    errno.EPERM: ("permission denied", "choose a folder you may write with --run-dir"),
    errno.EIO: ("the disk reported an input/output error", "check the disk"),
    errno.ENOTDIR: ("a part of the path is a file, not a folder", "choose another place with --run-dir"),
    errno.ENAMETOOLONG: ("the path is too long", "choose a shorter --run-dir"),
}


_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def writing(path: Path, *, fix: str | None = None) -> Iterator[None]:
    """Turn an operating system's refusal to write into an error that says which file and what to do.

    `fix` says what to do where that is not to choose another run folder.
    """
    try:
        yield
    except OSError as error:
        cause, usual = _CAUSES.get(error.errno or 0, (error.strerror or str(error), "check the folder"))
        if fix is not None:
            usual = f"free some space; {fix}" if error.errno in _FULL else f"check the folder; {fix}"
        raise MachineError(f"cannot write {path.name}: {cause}", where={"file": path}, fix=usual) from error


@contextmanager
def alone(folder: Path, *, what: str, again: str | None = None) -> Iterator[None]:
    """Make a folder and hold its lock: two processes must not write the same files."""
    with writing(folder, fix=again):
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("wb")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise MachineError(
                f"another process is {what}", where={"folder": folder}, fix="wait until it is done"
            ) from None
        except OSError:
            # Some network file systems know no locks; being alone there is up to the user.
            pass
        for draft in folder.glob(".*.tmp"):
            # A process killed while it wrote a file could not take its draft away.
            draft.unlink()
        yield


def require_writable(folder: Path) -> None:
    """Refuse a folder that cannot be made or written, without making it."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    with writing(folder):
        if not place.is_dir():
            raise OSError(errno.ENOTDIR, "not a folder")
        if not os.access(place, os.W_OK | os.X_OK):
            raise OSError(errno.EACCES, "permission denied")


def write_atomic(path: Path, content: bytes) -> None:
    """All of the content under the final name, or nothing."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with writing(path):
        try:
            with beside.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    # allow_nan=False: NaN is not JSON, and other tools would choke on it.
    write_atomic(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def sync_folder(folder: Path) -> None:
    """Make a rename inside the folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
