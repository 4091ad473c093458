"""Vocabularies: what the codes of a categorical column were in the user's file.

Codes of a column: 0 is a missing category, k is entry k - 1 of its vocabulary, the most frequent first. Hashed columns
have no vocabulary: their codes are 1 to `buckets`.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from ...files import read_linked
from ..user_files.database import optional_package
from .rows import EMPTY

UNSEEN = -2
"""Code of a category that is not in the vocabulary; `EMPTY` is a slot without one."""
_AT_ONCE = 1 << 16


@dataclass(frozen=True, kw_only=True, eq=False)
class Vocabulary:
    """Maps the categories of a column to codes."""

    values: Any = None
    """A pyarrow array of text in the order of codes; None for a hashed column."""
    buckets: int = 0
    seed: str = ""
    """The column's name, so that hashed columns collide independently."""

    @property
    def size(self) -> int:
        """The largest code."""
        return self.buckets or len(self.values)

    def codes(self, texts: Any) -> NDArray[np.int32]:
        """The code of each text of a pyarrow array."""
        compute = optional_package("pyarrow.compute")
        missing = np.asarray(compute.is_null(texts))
        if self.buckets:
            encoded = texts.dictionary_encode()
            hashes = np.array([self._bucket(value) for value in encoded.dictionary.to_pylist()], np.int32)
            indices = encoded.indices.fill_null(0).to_numpy(zero_copy_only=False)
            codes = hashes[indices] if len(hashes) else np.zeros(len(texts), np.int32)
        else:
            entries = compute.index_in(texts, value_set=self.values).fill_null(UNSEEN - 1)
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


def write_vocabulary(connection: Any, query: str, path: Path) -> dict[str, Any]:
    """Write the rows of a query (value, count) as Parquet in their order, and describe the file."""
    arrow, parquet = optional_package("pyarrow"), optional_package("pyarrow.parquet")
    schema = arrow.schema([("value", arrow.string()), ("count", arrow.int64())])
    entries = 0
    with parquet.ParquetWriter(str(path), schema) as writer:
        for batch in connection.sql(query).to_arrow_reader(_AT_ONCE):
            writer.write_batch(batch.cast(schema))
            entries += len(batch)
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    return {"file": path.name, "entries": entries, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def read_vocabulary(folder: Path, facts: dict[str, Any]) -> Vocabulary:
    """Open a vocabulary, compared with its digest."""
    arrow, parquet = optional_package("pyarrow"), optional_package("pyarrow.parquet")
    path = folder / Path(facts["file"]).name
    again = f"remove {folder} and import again"
    try:
        content = read_linked(path)
    except OSError as error:
        what = f"a vocabulary cannot be read: {error.strerror}"
        raise DataError(what, where={"file": path}, fix=again) from None
    if hashlib.sha256(content).hexdigest() != facts["sha256"]:
        raise DataError("a vocabulary differs from its checksum", where={"file": path}, fix=again)
    table = parquet.read_table(arrow.BufferReader(content), columns=["value"])
    return Vocabulary(values=table["value"].combine_chunks())
