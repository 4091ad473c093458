"""The files of a click log, and their text in blocks of whole lines. Torch-free."""

from __future__ import annotations

import hashlib
import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ...errors import ConfigError, DataError
from ...files import open_linked
from ...stop import poll
from .config import CriteoConfig
from .lines import MOST_LINE

BLOCK = 1 << 18
"""Bytes read at a time; the arrays of larger blocks do not fit into the caches."""
_EDGE = 1 << 16
_DAY = re.compile(r"day_([0-9]+)(\.gz)?")
_TRAIN = ("train.txt", "train.txt.gz")
_GZIP = b"\x1f\x8b"


@dataclass(frozen=True, kw_only=True)
class Source:
    """One file of a log, and the facts that identify it."""

    path: Path
    size: int
    mtime_ns: int
    edges: str
    """SHA-256 of the first and the last 64 KiB."""
    packed: bool

    @property
    def facts(self) -> dict[str, object]:
        return {"name": self.path.name, "size": self.size, "mtime_ns": self.mtime_ns, "edges": self.edges}


@dataclass(frozen=True, kw_only=True)
class Log:
    """The files of a click log, sorted by day."""

    path: Path
    layout: str
    sources: tuple[Source, ...]

    @property
    def size(self) -> int:
        return sum(source.size for source in self.sources)

    @property
    def missing_days(self) -> list[int]:
        days = [int(match[1]) for source in self.sources if (match := _DAY.fullmatch(source.path.name))]
        return sorted(set(range(max(days) + 1)) - set(days)) if self.layout == "terabyte" and days else []


class BrokenGzip(Exception):
    """A gzip file ends early or is damaged; the text before that place was returned."""


@dataclass(frozen=True)
class Block:
    text: bytes
    """Whole lines, each with its line feed."""
    span: int
    """Bytes of the uncompressed file that it covers."""
    read: int
    """Bytes of the file on disk read so far."""


def locate(config: CriteoConfig) -> Log:
    """Find the files of a log; missing or ambiguous files are errors."""
    if config.path is None:
        raise ConfigError(
            "the path of the Criteo click log is missing", fix="--path FILE_OR_FOLDER; nothing is downloaded"
        )
    path = config.path.expanduser()
    if path.is_file():
        kind = "terabyte" if _DAY.fullmatch(path.name) else "kaggle"
        layout = kind if config.layout == "auto" else config.layout
        return Log(path=path, layout=layout, sources=(examine(path),))
    if not path.is_dir():
        raise DataError(
            "there is no such file or folder", where={"path": path}, fix="name the TSV file or its folder with --path"
        )
    days = {name: int(match[1]) for name in os.listdir(path) if (match := _DAY.fullmatch(name))}
    trains = [name for name in _TRAIN if (path / name).is_file()]
    layout = config.layout
    if layout == "auto":
        if days and trains:
            raise DataError(
                "the folder holds both layouts", where={"folder": path}, fix="--layout kaggle or --layout terabyte"
            )
        layout = "terabyte" if days else "kaggle"
    names = sorted(days, key=lambda name: days[name]) if layout == "terabyte" else trains
    if not names:
        names_by_layout = {
            "terabyte": "day_0, day_1, ...",
            "kaggle": "train.txt",
            "auto": "train.txt and no day_0, day_1, ...",
        }
        raise DataError(
            f"the folder has no {names_by_layout[config.layout]} (or .gz)",
            where={"folder": path},
            fix="name the file itself with --path",
        )
    _refuse_duplicates(path, names, days)
    return Log(path=path, layout=layout, sources=tuple(examine(path / name) for name in names))


def _refuse_duplicates(folder: Path, names: list[str], days: dict[str, int]) -> None:
    seen: dict[object, str] = {}
    for name in names:
        twin = seen.setdefault(days.get(name, "train"), name)
        if twin != name:
            raise DataError(f"there are both {twin} and {name}", where={"folder": folder}, fix="move one of them away")


def examine(path: Path) -> Source:
    try:
        facts = path.stat()
        with open_linked(path) as file:
            head = file.read(_EDGE)
            file.seek(max(0, facts.st_size - _EDGE))
            edges = hashlib.sha256(head + file.read(_EDGE)).hexdigest()
    except OSError as error:
        raise _unreadable(path, error) from error
    packed = head.startswith(_GZIP)
    return Source(path=path, size=facts.st_size, mtime_ns=facts.st_mtime_ns, edges=edges, packed=packed)


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(
        f"cannot read {path.name}: {error.strerror or error}", where={"file": path}, fix="check the file and the disk"
    )


def first_line(source: Source) -> bytes:
    try:
        for text, _ in _unpacked(source, 0, 4 * MOST_LINE):
            return text.split(b"\n", 1)[0]
    except BrokenGzip:
        pass
    return b""


def blocks(source: Source, *, start: int = 0, size: int = BLOCK) -> Iterator[Block]:
    """Text from byte `start` of the uncompressed file, where a line begins. Lines that are too long are truncated."""
    rest, read = b"", 0
    broken: BrokenGzip | None = None
    dropped, dropping = 0, False
    texts = _unpacked(source, start, size)
    while True:
        try:
            text, read = next(texts, (b"", source.size))
        except BrokenGzip as error:
            text, broken = b"", error
        if not text:
            break
        if dropping:
            feed = text.find(b"\n")
            if feed < 0:
                dropped += len(text)
                continue
            yield Block(rest + b"\n", len(rest) + dropped + feed + 1, read)
            rest, text, dropping = b"", text[feed + 1 :], False
        whole = rest + text if rest else text
        cut = whole.rfind(b"\n") + 1
        rest = whole[cut:]
        if cut:
            yield Block(whole[:cut], cut, read)
        if len(rest) > 2 * MOST_LINE:
            dropping, dropped, rest = True, len(rest) - 2 * MOST_LINE, rest[: 2 * MOST_LINE]
    # If a gzip file ends inside a line, the fault is the file's and not the line's.
    if rest and broken is None:
        yield Block(rest + b"\n", len(rest) + (dropped if dropping else 0), read)
    if broken is not None:
        raise broken


def _unpacked(source: Source, start: int, size: int) -> Iterator[tuple[bytes, int]]:
    """Parts of the uncompressed file, each with the bytes of the file on disk read so far."""
    try:
        with open_linked(source.path) as file:
            if source.packed:
                yield from _gunzip(file, start, size)
                return
            file.seek(start)
            while text := file.read(size):
                poll()
                yield text, file.tell()
    except OSError as error:
        raise _unreadable(source.path, error) from error


def _gunzip(packed: IO[bytes], start: int, size: int) -> Iterator[tuple[bytes, int]]:
    """Uncompressed parts of at most `size` bytes; a file may have several members.

    The gzip module is slower, and loses the text before the place of an error.
    """
    engine, waiting, skip, between = zlib.decompressobj(wbits=31), b"", start, False
    while True:
        # A line that is too long, or what a resumed conversion skips, is read without a step of progress.
        poll()
        if not waiting:
            waiting = packed.read(1 << 18)
            if not waiting and between:
                return
            if not waiting:
                raise BrokenGzip("the gzip file ends early")
        if between:
            # Zeros may pad the end of a member, as tar leaves them.
            waiting = waiting.lstrip(b"\0")
            if not waiting:
                continue
        try:
            text = engine.decompress(waiting, size)
        except zlib.error as error:
            raise BrokenGzip(f"the gzip file is damaged ({error})") from None
        between = False
        waiting = engine.unconsumed_tail
        if engine.eof:
            waiting = engine.unused_data
            engine, between = zlib.decompressobj(wbits=31), True
        if skip:
            text, skip = text[skip:], max(0, skip - len(text))
        if text:
            yield text, packed.tell()
