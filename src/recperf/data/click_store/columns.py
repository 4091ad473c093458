"""Click rows on disk and in memory. Torch-free.

On disk each array is a plain little-endian file with the digest of every piece of its rows; a manifest holds the number
of rows, the rows of a piece and the `chain`, a digest over the digests of all pieces.

Shapes: N rows, D numbers, S slots of ids (one for each id a row can have).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from ...files import open_linked, read_linked, writing
from ...jsonfile import Count, Meta, Struct
from ..blocks import Blocks, Column
from ..user_files.database import RESTART

PIECE = 1 << 18
"""Rows between two commits, each with digests of its own."""
DIGESTS = "digests"
"""File of the SHA-256 of every piece of the arrays."""
Split = Literal["train", "valid", "fit", "choose"]
"""Training and held-out rows; of the training rows those that steps are made of, and those that choose the epoch."""
EMPTY = -1
"""In the slots of a feature with several ids: no id."""
_DIGEST = hashlib.sha256().digest_size


@dataclass(frozen=True, eq=False)
class Rows:
    """Some click rows, copied into memory."""

    dense_ND: NDArray[np.float32]
    ids_NS: NDArray[np.int32]
    labels_N: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.labels_N)

    def take(self, order_N: NDArray[np.int64]) -> Rows:
        """The same rows in another order."""
        return Rows(self.dense_ND.take(order_N, axis=0), self.ids_NS.take(order_N, axis=0), self.labels_N.take(order_N))


class StoredPart(Struct):
    """The array files in a manifest."""

    rows: Count
    piece: Annotated[int, Meta(ge=1, le=1 << 40)]
    chain: str


@dataclass(frozen=True)
class Layout:
    """The arrays of a store by name: the type of a value, and how many of them a row has (0: one, not in a list)."""

    arrays: Mapping[str, tuple[str, int]]

    @property
    def widths(self) -> dict[str, int]:
        """Bytes of a row of each array."""
        return {name: np.dtype(kind).itemsize * max(1, count) for name, (kind, count) in self.arrays.items()}


def path_of(folder: Path, name: str) -> Path:
    return folder / f"part-000.{name}"


def chained(chain: str, digests: bytes) -> str:
    return hashlib.sha256(chain.encode() + digests).hexdigest()


class ColumnWriter:
    """Writes the array files of a store and their digests."""

    def __init__(self, folder: Path, layout: Layout) -> None:
        self.layout = layout
        self.paths = {name: path_of(folder, name) for name in (*layout.arrays, DIGESTS)}
        self.files: dict[str, IO[bytes]] = {}
        self.digests = {name: hashlib.sha256() for name in layout.arrays}

    def __enter__(self) -> ColumnWriter:
        for name, path in self.paths.items():
            with writing(path, fix=RESTART):
                self.files[name] = path.open("wb")
        return self

    def __exit__(self, *_: object) -> None:
        for file in self.files.values():
            # The error of rows that were not written was raised already.
            with suppress(OSError):
                file.close()

    def append(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        for name in self.layout.arrays:
            content = arrays[name].tobytes()
            self.digests[name].update(content)
            with writing(self.paths[name], fix=RESTART):
                self.files[name].write(content)

    def commit(self, chain: str) -> str:
        """Sync the files, and chain the digests of this piece to those of the previous ones."""
        digests = b"".join(digest.digest() for digest in self.digests.values())
        self.digests = {name: hashlib.sha256() for name in self.layout.arrays}
        with writing(self.paths[DIGESTS], fix=RESTART):
            self.files[DIGESTS].write(digests)
        for name, file in self.files.items():
            with writing(self.paths[name], fix=RESTART):
                file.flush()
                os.fsync(file.fileno())
        return chained(chain, digests)


def open_columns(folder: Path, part: StoredPart, layout: Layout) -> dict[str, Column]:
    """Map the arrays of a store, whose pieces are compared with their digests when they are first read. Array files
    that are missing or have another length than the manifest states are an error."""
    for name, width in layout.widths.items():
        path = path_of(folder, name)
        if not path.is_file() or path.stat().st_size != part.rows * width:
            raise damaged(path, "is missing or has another length than its manifest states")
    digests, columns = _piece_digests(folder, part, layout), {}
    for name, (kind, count) in layout.arrays.items():
        path, width = path_of(folder, name), layout.widths[name]
        with open_linked(path) as file:
            content = np.memmap(file, dtype=np.uint8, mode="r", shape=(part.rows * width,))
        blocks = Blocks(path, content, digests[name], block=part.piece * width, damaged=damaged)
        shape = (part.rows, count) if count else (part.rows,)
        columns[name] = Column(content.view(kind).reshape(shape), blocks)
    return columns


def _piece_digests(folder: Path, part: StoredPart, layout: Layout) -> dict[str, list[str]]:
    """Digests of the pieces of each array."""
    path = path_of(folder, DIGESTS)
    try:
        content, chain = read_linked(path), ""
    except OSError:
        raise damaged(path, "cannot be read") from None
    width = _DIGEST * len(layout.arrays)
    pieces = [content[at : at + width] for at in range(0, len(content), width)]
    for digests in pieces:
        chain = chained(chain, digests)
    if chain != part.chain:
        raise damaged(path, "differs from its checksum")
    # A last piece without rows has digests too.
    filled = pieces[: -(-part.rows // part.piece)]
    return {name: [one[at * _DIGEST :][:_DIGEST].hex() for one in filled] for at, name in enumerate(layout.arrays)}


def damaged(path: Path, how: str) -> DataError:
    return DataError(
        f"the imported clicks are damaged: {path.name} {how}",
        where={"file": path},
        fix=f"remove {path.parent} and import again",
    )
