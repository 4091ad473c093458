"""The array files of click rows: plain little-endian files that only grow, with the digest of every piece of rows.

A part is a run of rows in files of their own; a manifest holds, for each part, its rows, the rows of a piece and the
`chain`, a digest over the digests of all pieces.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from ...files import open_linked, read_linked, writing
from ...jsonfile import Count, Meta
from ..blocks import Blocks, Column

PIECE = 1 << 18
"""Rows between two commits, each with digests of its own."""
DIGESTS = "digests"
"""File of the SHA-256 of every piece of a part's arrays."""
_DIGEST = hashlib.sha256().digest_size


class StoredPart(TypedDict):
    """A part in a manifest."""

    rows: Count
    piece: Annotated[int, Meta(ge=1, le=1 << 40)]
    chain: str


@dataclass(frozen=True)
class Layout:
    """The arrays of a part by name: the type of a value, and how many of them a row has (0: one, not in a list)."""

    arrays: Mapping[str, tuple[str, int]]

    @property
    def widths(self) -> dict[str, int]:
        """Bytes of a row of each array."""
        return {name: np.dtype(kind).itemsize * max(1, count) for name, (kind, count) in self.arrays.items()}

    @property
    def row_bytes(self) -> int:
        return sum(self.widths.values())


def column_name(index: int, name: str) -> str:
    return f"part-{index:03d}.{name}"


def chained(chain: str, digests: bytes) -> str:
    return hashlib.sha256(chain.encode() + digests).hexdigest()


class ColumnWriter:
    """The array files of one part and their digests, which grow; `again` says how to resume after a failure."""

    def __init__(self, folder: Path, index: int, part: StoredPart, layout: Layout, *, again: str) -> None:
        self.layout, self.again = layout, again
        self.lengths = {name: part["rows"] * width for name, width in layout.widths.items()}
        self.lengths[DIGESTS] = part["rows"] // part["piece"] * _DIGEST * len(layout.arrays)
        self.paths = {name: folder / column_name(index, name) for name in self.lengths}
        self.files: dict[str, IO[bytes]] = {}
        self.digests = {name: hashlib.sha256() for name in layout.arrays}

    def __enter__(self) -> ColumnWriter:
        for name, path in self.paths.items():
            with writing(path, fix=self.again):
                self.files[name] = path.open("ab")
                length = self.lengths[name]
                if self.files[name].tell() < length:
                    raise DataError(
                        f"{path.name} is shorter than its manifest states",
                        where={"file": path},
                        fix=f"remove {path.parent} and import again",
                    )
                self.files[name].truncate(length)
        return self

    def __exit__(self, *_: object) -> None:
        for file in self.files.values():
            try:
                file.close()
            except OSError:
                # Unwritten rows are not in the manifest; the error was raised already.
                continue

    def append(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        for name in self.layout.arrays:
            content = arrays[name].tobytes()
            self.digests[name].update(content)
            with writing(self.paths[name], fix=self.again):
                self.files[name].write(content)

    def commit(self, chain: str) -> str:
        """Sync the files, and chain the digests of this piece to those of the previous ones."""
        digests = b"".join(digest.digest() for digest in self.digests.values())
        self.digests = {name: hashlib.sha256() for name in self.layout.arrays}
        with writing(self.paths[DIGESTS], fix=self.again):
            self.files[DIGESTS].write(digests)
        for name, file in self.files.items():
            with writing(self.paths[name], fix=self.again):
                file.flush()
                os.fsync(file.fileno())
        return chained(chain, digests)


def piece_digests(folder: Path, index: int, part: StoredPart, layout: Layout) -> dict[str, list[str]]:
    """Digests of the pieces of each array of a part."""
    path = folder / column_name(index, DIGESTS)
    try:
        content, chain = read_linked(path), ""
    except OSError:
        raise damaged(path, "cannot be read") from None
    width = _DIGEST * len(layout.arrays)
    pieces = [content[at : at + width] for at in range(0, len(content), width)]
    for digests in pieces:
        chain = chained(chain, digests)
    if chain != part["chain"]:
        raise damaged(path, "differs from its checksum")
    # A last piece without rows has digests too.
    filled = pieces[: -(-part["rows"] // part["piece"])]
    return {name: [one[at * _DIGEST :][:_DIGEST].hex() for one in filled] for at, name in enumerate(layout.arrays)}


def damaged(path: Path, how: str) -> DataError:
    return DataError(
        f"the imported clicks are damaged: {path.name} {how}",
        where={"file": path},
        fix=f"remove {path.parent} and import again",
    )


def require_arrays(folder: Path, parts: Sequence[StoredPart], layout: Layout) -> None:
    """Refuse array files that are missing or have another length than their manifest states."""
    for index, part in enumerate(parts):
        for name, width in layout.widths.items():
            path = folder / column_name(index, name)
            if not path.is_file() or path.stat().st_size != part["rows"] * width:
                raise DataError(
                    f"{path.name} is missing or has another length than its manifest states",
                    where={"file": path},
                    fix=f"remove {folder} and import again",
                )


def open_columns(
    folder: Path,
    index: int,
    part: StoredPart,
    layout: Layout,
    damaged: Callable[[Path, str], DataError] = damaged,
) -> dict[str, Column]:
    """Map the arrays of a part, whose pieces are compared with their digests when they are first read."""
    digests, columns = piece_digests(folder, index, part, layout), {}
    for name, (kind, count) in layout.arrays.items():
        path, width = folder / column_name(index, name), layout.widths[name]
        with open_linked(path) as file:
            content = np.memmap(file, dtype=np.uint8, mode="r", shape=(part["rows"] * width,))
        blocks = Blocks(path, content, digests[name], block=part["piece"] * width, damaged=damaged)
        shape = (part["rows"], count) if count else (part["rows"],)
        columns[name] = Column(content.view(kind).reshape(shape), blocks)
    return columns
