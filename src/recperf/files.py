"""Files: atomic writes, digests, and one-line errors when the disk refuses."""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import json
import numbers
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, BinaryIO

from .errors import DataError, MachineError
from .stop import FLAG, poll

_CAUSES = {
    errno.ENOSPC: ("the disk is full", "free some space, or choose another folder with --run-dir"),
    errno.EDQUOT: ("the disk quota is used up", "free some space, or choose another folder with --run-dir"),
    errno.EROFS: ("the file system is read-only", "choose another folder with --run-dir"),
    errno.EACCES: ("permission denied", "choose a folder you may write with --run-dir"),
    errno.EPERM: ("permission denied", "choose a folder you may write with --run-dir"),
    errno.EIO: ("the disk reported an input/output error", "check the disk"),
    errno.ENOTDIR: ("a part of the path is a file, not a folder", "choose another folder with --run-dir"),
    errno.ENAMETOOLONG: ("the path is too long", "choose a shorter --run-dir"),
    errno.ELOOP: ("it is a link, which is not followed", "put the file itself in its place"),
    errno.ENXIO: ("it is not a regular file", "put the file itself in its place"),
    errno.EISDIR: ("a folder of that name is in the way", "move the folder away"),
}

_FULL = (errno.ENOSPC, errno.EDQUOT)
NOT_FILES = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.EINVAL)
"""Errors of a system that works, about files that are missing or are not files."""

_DRAFT = re.compile(r"\.(?P<name>.+)\.(?P<process>\d+)-(?P<stamp>[0-9a-f]{16})\.(?:tmp|aside)", re.S)


def stamp_of(name: str) -> str:
    """What the name of a draft ends with. No file of a user has it by chance, so a draft that it fits is ours."""
    return hashlib.sha256(f"draft of recperf: {name}".encode(errors="surrogateescape")).hexdigest()[:16]


def draft_of(path: Path, end: str = "tmp") -> Path:
    """Where this process prepares a file or folder; with `aside`, where it puts one that it removes."""
    own = f"{path.name}.{os.getpid()}"
    return path.with_name(f".{own}-{stamp_of(own)}.{end}")


def draft_owner(draft: str) -> tuple[str, int] | None:
    """Of a name that `draft_of` made the name of what was to be written and the process; None of any other name."""
    match = _DRAFT.fullmatch(draft)
    if match is None or stamp_of(f"{match['name']}.{match['process']}") != match["stamp"]:
        return None
    return match["name"], int(match["process"])


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns a failed read into one line that names the file."""
    try:
        yield
    except OSError as error:
        fix = _CAUSES[error.errno][1] if error.errno in (errno.ELOOP, errno.ENXIO) else None
        raise DataError(f"cannot read {path.name}: {error.strerror or error}", where={"file": path}, fix=fix) from None


def open_regular(path: Path, flags: int = os.O_RDONLY, *, named: bool = False) -> int:
    """Open a file of a run: not through a link, and neither a fifo, on which a process hangs, nor a device.

    One that the user has `named` may be a link or a pipe; a fifo that nothing writes to is empty.
    """
    try:
        handle = os.open(path, flags | (0 if named else os.O_NOFOLLOW) | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno == errno.ELOOP or error.errno == errno.ENXIO:
            raise OSError(error.errno, _CAUSES[error.errno][0], str(path)) from None
        raise
    kind = stat.S_IFMT(os.fstat(handle).st_mode)
    if named and kind == stat.S_IFIFO:
        os.set_blocking(handle, True)
    elif kind != stat.S_IFREG:
        os.close(handle)
        code = errno.EISDIR if kind == stat.S_IFDIR else errno.ENXIO
        raise OSError(code, "it is a folder" if kind == stat.S_IFDIR else _CAUSES[errno.ENXIO][0], str(path))
    return handle


def read_regular(path: Path) -> bytes:
    """The content of a file of a run."""
    with open(open_regular(path), "rb") as file:
        return file.read()


def open_dataset_file(path: Path) -> BinaryIO:
    """Open a file of a dataset, which may be a link to a file, but not to a fifo or a device."""
    return open(open_regular(Path(os.path.realpath(path))), "rb")


def read_dataset_file(path: Path) -> bytes:
    with open_dataset_file(path) as file:
        return file.read()


def append(handle: int, content: bytes) -> None:
    """Append all of the content to a file, or nothing: one write may be short, and half a line is no line."""
    size, left = os.fstat(handle).st_size, memoryview(content)
    try:
        while left:
            left = left[os.write(handle, left) :]
    except OSError:
        with suppress(OSError):
            os.ftruncate(handle, size)
        raise


def end_of_lines(handle: int, block: int = 1 << 20) -> int:
    """Where the last whole line of a file ends, read from its end: a log may be larger than memory."""
    end = os.fstat(handle).st_size
    while end:
        start = max(0, end - block)
        newline = os.pread(handle, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


@contextmanager
def writing(path: Path, *, fix: str | None = None) -> Iterator[None]:
    """Turn the operating system's refusal to write into an error that names the file and the remedy.

    `fix` replaces the usual remedy, which is to choose another run folder.
    """
    try:
        yield
    except OSError as error:
        cause, usual = _CAUSES.get(error.errno or 0, (error.strerror or str(error), "check the folder"))
        if fix is not None:
            usual = f"free some space; {fix}" if error.errno in _FULL else f"check the folder; {fix}"
        raise MachineError(f"cannot write {path.name}: {cause}", where={"file": path}, fix=usual) from error


def require_writable(folder: Path) -> None:
    """Refuse a folder that cannot be created or written, without creating it."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    with writing(folder):
        if not place.is_dir():
            raise OSError(errno.ENOTDIR, "not a folder")
        if not os.access(place, os.W_OK | os.X_OK):
            raise OSError(errno.EACCES, "permission denied")


def require_short(path: Path) -> None:
    """Refuse a path that is too long for the system, before any work is done for it."""
    with writing(path), suppress(FileNotFoundError):
        os.lstat(path)


@contextmanager
def atomic_file(path: Path, *, fix: str | None = None) -> Iterator[BinaryIO]:
    """A file that gets its final name when the block succeeds and the content is on disk; otherwise it is removed."""
    draft = draft_of(path)
    with writing(path, fix=fix), FLAG.before_exit(lambda: draft.unlink(missing_ok=True)):
        try:
            _remove_drafts(path)
            with draft.open("x+b") as file:
                with suppress(OSError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def _remove_drafts(path: Path) -> None:
    """Remove the drafts of a file that killed processes left, and one of this process."""
    for draft in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        name, process = draft_owner(draft.name) or ("", 1)
        if name == path.name and (process == os.getpid() or (not is_alive(process) and is_abandoned(draft))):
            draft.unlink(missing_ok=True)


def is_abandoned(lock: Path) -> bool:
    """Whether nobody holds the lock of a file; where there are no locks, that is not known."""
    try:
        with open(open_regular(lock, os.O_RDWR), "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True


def write_atomic(path: Path, content: bytes, *, fix: str | None = None) -> None:
    """Write all of the content under the final name, or nothing."""
    with atomic_file(path, fix=fix) as file:
        file.write(content)


def write_json(path: Path, value: Any, *, fix: str | None = None) -> None:
    write_atomic(path, json_bytes(value), fix=fix)


def json_bytes(value: Any) -> bytes:
    # NaN is not JSON, and other tools cannot read it.
    return (json.dumps(value, indent=2, allow_nan=False, default=plain_json) + "\n").encode()


def plain_json(value: Any) -> Any:
    """Returns the plain values of a record; a path as text, and a number of numpy as one of Python."""
    if hasattr(value, "__struct_fields__") or is_dataclass(value):
        from msgspec import to_builtins

        return to_builtins(value, enc_hook=plain_json)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def link_or_copy(source: Path, target: Path) -> None:
    """A second name of a file that never changes or, on another disk, a copy."""
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copyfile(source, target)


def sync_folder(folder: Path) -> None:
    """Make a rename inside the folder survive a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(folder: Path) -> None:
    """Create a folder and those above it, and make their names survive a power failure."""
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for place in missing:
        # Nobody but its owner can sync a folder that only lets others in.
        with suppress(PermissionError):
            sync_folder(place.parent)


def sha256(path: Path, progress: Callable[[int], None] = lambda count: None) -> str:
    """The digest of a file's content; `progress` receives the number of bytes of each block read."""
    with open_dataset_file(path) as file:
        return digest_of(file, progress=progress)


def digest_of(file: BinaryIO, size: int | None = None, progress: Callable[[int], None] = lambda count: None) -> str:
    """The digest of the next `size` bytes of an open file, or of all, read in blocks."""
    digest, left = hashlib.sha256(), size
    while block := file.read(1 << 20 if left is None else min(left, 1 << 20)):
        poll()
        digest.update(block)
        progress(len(block))
        left = left if left is None else left - len(block)
    return digest.hexdigest()
