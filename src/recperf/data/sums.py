"""Compares the files of a folder with a list of SHA-256 sums, in the format of `sha256sum`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from ..errors import DataError, MachineError
from ..files import read_linked, sha256
from ..jsonfile import Struct

_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")


class ComparedFiles(Struct, kw_only=True):
    folder: str
    intact: bool
    compared: int
    bytes: int
    missing: list[str]
    differing: list[str]
    extra: list[str]
    """Files that the list does not have."""


def check_sums(folder: Path, sums: Path, progress: Callable[[int, int], None]) -> ComparedFiles:
    """Compares the files with their sums. `progress` receives the bytes read and the total."""
    folder, sums = folder.expanduser(), sums.expanduser()
    if not folder.is_dir():
        raise DataError("there is no such folder", where={"folder": folder}, fix="name the folder of the listed files")
    expected = read_sums(sums)
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    present = [name for name in expected if name in files]
    total, done = sum(files[name].stat().st_size for name in present), 0

    def tick(count: int) -> None:
        nonlocal done
        done += count
        progress(done, total)

    differing = []
    for name in present:
        try:
            if sha256(files[name], tick) != expected[name]:
                differing.append(name)
        except OSError as error:
            what = f"{name} cannot be read: {error.strerror}"
            raise MachineError(what, where={"file": files[name]}, fix="check its permissions and the disk") from error
    missing = sorted(expected.keys() - files.keys())
    extra = sorted(name for name in files.keys() - expected.keys() if not files[name].samefile(sums))
    return ComparedFiles(
        folder=str(folder),
        intact=not (missing or differing or extra),
        compared=len(present),
        bytes=total,
        missing=missing,
        differing=sorted(differing),
        extra=extra,
    )


def read_sums(path: Path) -> dict[str, str]:
    """The sum of each file by its path below the folder, from lines of a sum, two spaces and a path."""
    try:
        lines = read_linked(path).decode().splitlines()
    except FileNotFoundError:
        raise DataError("there is no such list of sums", where={"file": path}, fix="check --sums") from None
    except UnicodeDecodeError:
        raise DataError("the list of sums is not text", where={"file": path}, fix="check --sums") from None
    except OSError as error:
        what = f"the list of sums cannot be read: {error.strerror}"
        raise MachineError(what, where={"file": path}, fix="check --sums and its permissions") from error
    sums: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        match = _LINE.fullmatch(line)
        name = PurePosixPath(match[2]) if match else PurePosixPath("..")
        if match is None or name.is_absolute() or ".." in name.parts:
            raise DataError(
                f"line {number}: {line[:80]!r} is not a SHA-256 sum, two spaces and a path below the folder",
                where={"file": path, "line": number},
                fix="a list as sha256sum writes it",
            )
        sums[name.as_posix()] = match[1].lower()
    if not sums:
        raise DataError("the list of sums is empty", where={"file": path}, fix="check --sums")
    return sums
