"""The files of a store of click rows: arrays of numbers and codes, and the vocabularies of the codes. Torch-free.

Each array is a plain little-endian file; another one has the SHA-256 of every piece of the arrays. The manifest holds
the number of rows, the rows of a piece and the `chain`, a digest over the digests of all pieces.

Codes of a column: 0 is a missing category, k is entry k - 1 of its vocabulary, the most frequent first. Hashed columns
have no vocabulary: their codes are 1 to `buckets`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from ...files import open_linked, read_linked, sha256
from ...jsonfile import Count, Meta, Struct
from ...stop import poll
from ..blocks import Blocks, Column
from ..rows import EMPTY, optional_package, pyarrow
from ..user_files.values import Values, is_value, key

DIGESTS = "digests"
"""File of the SHA-256 of every piece of the arrays."""
UNSEEN = -2
"""Code of a category that is not in the vocabulary."""
_DIGEST = hashlib.sha256().digest_size
_AT_ONCE = 1 << 16

Layout = Mapping[str, tuple[str, int]]
"""The arrays of a store by name: the type of a value, and how many of them a row has (0: one, not in a list)."""


class StoredPart(Struct):
    """The array files in a manifest."""

    rows: Count
    piece: Annotated[int, Meta(ge=1, le=1 << 40)]
    chain: str


def file_of(folder: Path, name: str) -> Path:
    """The file of an array."""
    return folder / f"part-000.{name}"


def _chained(chain: str, digests: bytes) -> str:
    return hashlib.sha256(chain.encode() + digests).hexdigest()


def write_columns(folder: Path, layout: Layout, pieces: Iterable[Mapping[str, NDArray[Any]]], piece: int) -> StoredPart:
    """Write arrays that come in pieces of as many rows each, the last one shorter, with the digests of every piece."""
    part = StoredPart(rows=0, piece=piece, chain="")
    with ExitStack() as stack:
        files = {name: stack.enter_context(file_of(folder, name).open("wb")) for name in (*layout, DIGESTS)}
        for arrays in pieces:
            contents = {name: arrays[name].tobytes() for name in layout}
            contents[DIGESTS] = b"".join(hashlib.sha256(content).digest() for content in contents.values())
            for name, content in contents.items():
                files[name].write(content)
            part.rows += len(next(iter(arrays.values())))
            part.chain = _chained(part.chain, contents[DIGESTS])
            poll()
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
    return part


def open_columns(folder: Path, part: StoredPart, layout: Layout) -> dict[str, Column]:
    """Map the arrays of a store, whose pieces are compared with their digests when they are first read. Array files
    that are missing or have another length than the manifest states are an error."""
    widths = {name: np.dtype(kind).itemsize * max(1, count) for name, (kind, count) in layout.items()}
    for name, width in widths.items():
        path = file_of(folder, name)
        if not path.is_file() or path.stat().st_size != part.rows * width:
            raise damaged(path, "is missing or has another length than its manifest states")
    digests, columns = _piece_digests(folder, part, layout), {}
    for name, (kind, count) in layout.items():
        path = file_of(folder, name)
        with open_linked(path) as file:
            content = np.memmap(file, dtype=np.uint8, mode="r", shape=(part.rows * widths[name],))
        blocks = Blocks(path, content, digests[name], block=part.piece * widths[name], damaged=damaged)
        shape = (part.rows, count) if count else (part.rows,)
        columns[name] = Column(content.view(kind).reshape(shape), blocks)
    return columns


def _piece_digests(folder: Path, part: StoredPart, layout: Layout) -> dict[str, list[str]]:
    """Digests of the pieces of each array."""
    path = file_of(folder, DIGESTS)
    try:
        content, chain = read_linked(path), ""
    except OSError:
        raise damaged(path, "cannot be read") from None
    width = _DIGEST * len(layout)
    pieces = [content[at : at + width] for at in range(0, len(content), width)]
    for digests in pieces:
        chain = _chained(chain, digests)
    if chain != part.chain:
        raise damaged(path, "differs from its checksum")
    # A last piece without rows may have digests too.
    filled = pieces[: -(-part.rows // part.piece)]
    return {name: [one[at * _DIGEST :][:_DIGEST].hex() for one in filled] for at, name in enumerate(layout)}


def damaged(path: Path, how: str) -> DataError:
    return DataError(
        f"the imported clicks are damaged: {path.name} {how}",
        where={"file": path},
        fix=f"remove {path.parent} and import again",
    )


class StoredVocabulary(Struct):
    """The file of a vocabulary."""

    file: str
    entries: int
    sha256: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Vocabulary:
    """Maps the categories of a column to codes."""

    values: Any = None
    """A pyarrow array of text in the order of codes, as the import read it; None for a hashed column."""
    keys: Any = None
    """What `values` are compared by."""
    repeated: Any = None
    """Keys of several values, where there may be any."""
    buckets: int = 0
    seed: str = ""
    """The column's name, so that hashed columns collide independently."""

    @property
    def size(self) -> int:
        """The largest code."""
        return self.buckets or len(self.values)

    def codes(self, keys: Any) -> NDArray[np.int32]:
        """The code of each key of a pyarrow array."""
        compute = pyarrow(".compute")
        missing = np.asarray(compute.is_null(keys))
        if self.buckets:
            encoded = keys.dictionary_encode()
            hashes = np.array([self._bucket(value) for value in encoded.dictionary.to_pylist()], np.int32)
            indices = encoded.indices.fill_null(0).to_numpy(zero_copy_only=False)
            codes = hashes[indices] if len(hashes) else np.zeros(len(keys), np.int32)
        else:
            ambiguous = [] if self.repeated is None else keys.filter(compute.is_in(keys, value_set=self.repeated))
            if len(ambiguous):
                same = self.values.filter(compute.equal(self.keys, ambiguous[0])).to_pylist()[:2]
                what = f"column {self.seed!r} has {ambiguous[0]}, which may be {same[0]!r} or {same[1]!r}"
                raise DataError(what, fix=as_text(self.seed))
            entries = compute.index_in(keys, value_set=self.keys).fill_null(UNSEEN - 1)
            codes = entries.to_numpy(zero_copy_only=False).astype(np.int32) + 1
        return np.where(missing, 0, codes).astype(np.int32)

    def slots(self, lists: Any, width: int) -> NDArray[np.int32]:
        """The codes of a pyarrow array of lists, a row for each: missing if the list is empty, further ones cut."""
        offsets = lists.offsets.to_numpy()
        codes = self.codes(lists.flatten())
        lengths = np.minimum(np.diff(offsets), width)
        slots = np.full((len(lists), width), EMPTY, np.int32)
        row = np.repeat(np.arange(len(lists)), lengths)
        place = np.arange(len(row)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        slots[row, place] = codes[(offsets[:-1] - offsets[0])[row] + place]
        slots[lengths == 0, 0] = 0
        return slots

    def _bucket(self, value: str) -> int:
        digest = hashlib.blake2b(f"{self.seed}\0{value}".encode(), digest_size=8).digest()
        return 1 + int.from_bytes(digest, "little") % self.buckets


def as_text(column: str) -> str:
    """How to read a column so that categories stay as they are written."""
    return f"read the column as text: pd.read_csv(..., dtype={{{column!r}: str}})"


@lru_cache(maxsize=64)
def denoted(vocabulary: Vocabulary, values: Values, column: str) -> Vocabulary:
    """The vocabulary of a column of text for a lookup by numbers or booleans: each means the one text that denotes
    it."""
    arrow = pyarrow()
    with optional_package("duckdb").connect() as connection:
        connection.register("texts", arrow.table({"value": vocabulary.values}))
        sql = f"CASE WHEN {is_value('value', values)} THEN {key('value', values)} END"
        keys = connection.sql(f"SELECT {sql} AS key FROM texts").to_arrow_table()["key"].combine_chunks()
    counts = keys.drop_null().value_counts()
    repeated = counts.field("values").filter(pyarrow(".compute").greater(counts.field("counts"), 1))
    return Vocabulary(values=vocabulary.values, keys=keys, repeated=repeated, seed=column)


def write_vocabulary(connection: Any, query: str, path: Path) -> StoredVocabulary:
    """Write the rows of a query (value, key, count) as Parquet in their order, and describe the file. A key that equals
    its value is NULL."""
    arrow, parquet = pyarrow(), pyarrow(".parquet")
    schema = arrow.schema([("value", arrow.string()), ("key", arrow.string()), ("count", arrow.int64())])
    entries = 0
    with parquet.ParquetWriter(str(path), schema) as writer:
        for batch in connection.sql(query).to_arrow_reader(_AT_ONCE):
            writer.write_batch(batch.cast(schema))
            entries += len(batch)
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    return StoredVocabulary(file=path.name, entries=entries, sha256=sha256(path))


def read_vocabulary(folder: Path, stored: StoredVocabulary) -> Vocabulary:
    """Open a vocabulary, compared with its digest."""
    path = folder / Path(stored.file).name
    try:
        content = read_linked(path)
    except OSError:
        raise damaged(path, "cannot be read") from None
    if hashlib.sha256(content).hexdigest() != stored.sha256:
        raise damaged(path, "differs from its checksum")
    table = pyarrow(".parquet").read_table(pyarrow().BufferReader(content), columns=["value", "key"])
    values, keys = (table[name].combine_chunks() for name in ("value", "key"))
    differ = keys.null_count < len(keys)
    return Vocabulary(values=values, keys=pyarrow(".compute").coalesce(keys, values) if differ else values)
