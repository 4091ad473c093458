"""The files of a store of click rows: arrays of numbers and codes, and the vocabularies of the codes. Torch-free.

Each array is a plain little-endian file; the manifest has the SHA-256 of every block of it.

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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from ...files import read_dataset_file, sha256
from ...jsonfile import Struct
from ...stop import poll
from ..blocks import Column, StoredColumn
from ..files.values import Values, is_value, key
from ..tables import EMPTY, numbers_of, optional_package, pyarrow

DIGEST_BLOCK = 16 << 20
"""Each block of this many bytes has a digest, by which it is verified when it is first read."""
UNSEEN = -2
"""Code of a category that is not in the vocabulary."""
_AT_ONCE = 1 << 16

Layout = Mapping[str, tuple[str, int]]
"""The arrays of a store by name: the type of a value, and how many of them a row has (0: one, not in a list)."""


Arrays = dict[str, StoredColumn]
"""The files of the arrays in a manifest."""


def file_of(folder: Path, name: str) -> Path:
    """The file of an array."""
    return folder / f"{name}.array"


def write_arrays(folder: Path, layout: Layout, pieces: Iterable[Mapping[str, NDArray[Any]]]) -> Arrays:
    """Write arrays that come in pieces, and describe their files."""
    with ExitStack() as stack:
        files = {name: stack.enter_context(file_of(folder, name).open("wb")) for name in layout}
        for arrays in pieces:
            for name, file in files.items():
                file.write(np.ascontiguousarray(arrays[name]).data)
            poll()
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
    return {name: StoredColumn.of(file_of(folder, name), block=DIGEST_BLOCK) for name in layout}


def open_arrays(folder: Path, stored: Arrays, layout: Layout, rows: int) -> dict[str, Column]:
    """Map the arrays of a store, whose blocks are compared with their digests when they are first read. Array files
    that are missing or have another length than the manifest states are an error."""
    columns = {}
    for name, (kind, width) in layout.items():
        path = file_of(folder, name)
        if name not in stored or stored[name].bytes != rows * np.dtype(kind).itemsize * max(1, width):
            raise damaged(path, "has another length than its manifest states")
        columns[name] = stored[name].mapped(path, kind, block=DIGEST_BLOCK, damaged=damaged, width=width)
    return columns


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
        missing = numbers_of(compute.is_null(keys))
        if self.buckets:
            encoded = keys.dictionary_encode()
            hashes = np.array([self._bucket(value) for value in encoded.dictionary.to_pylist()], np.int32)
            indices = numbers_of(encoded.indices.fill_null(0))
            codes = hashes[indices] if len(hashes) else np.zeros(len(keys), np.int32)
        else:
            ambiguous = [] if self.repeated is None else keys.filter(compute.is_in(keys, value_set=self.repeated))
            if len(ambiguous):
                same = self.values.filter(compute.equal(self.keys, ambiguous[0])).to_pylist()[:2]
                what = f"column {self.seed!r} has {ambiguous[0]}, which may be {same[0]!r} or {same[1]!r}"
                raise DataError(what, fix=as_text(self.seed))
            entries = compute.index_in(keys, value_set=self.keys).fill_null(UNSEEN - 1)
            codes = numbers_of(entries).astype(np.int32) + 1
        return np.where(missing, 0, codes).astype(np.int32)

    def slots(self, lists: Any, width: int) -> NDArray[np.int32]:
        """The codes of a pyarrow array of lists, a row for each: missing if the list is empty, further ones cut."""
        offsets = numbers_of(lists.offsets)
        codes = self.codes(lists.flatten())
        lengths = np.minimum(np.diff(offsets), width)
        slots = np.full((len(lists), width), EMPTY, np.int32)
        row = np.repeat(np.arange(len(lists)), lengths)
        column = np.arange(len(row)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        slots[row, column] = codes[(offsets[:-1] - offsets[0])[row] + column]
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
        content = read_dataset_file(path)
    except OSError:
        raise damaged(path, "cannot be read") from None
    if hashlib.sha256(content).hexdigest() != stored.sha256:
        raise damaged(path, "differs from its checksum")
    table = pyarrow(".parquet").ParquetFile(pyarrow().BufferReader(content)).read(["value", "key"])
    values, keys = (table[name].combine_chunks() for name in ("value", "key"))
    differ = keys.null_count < len(keys)
    return Vocabulary(values=values, keys=pyarrow(".compute").coalesce(keys, values) if differ else values)
