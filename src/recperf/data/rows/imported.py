"""A user's imported clicks, split into training and validation rows, with everything fitted on the training rows only.

A table has row 0 for rare and new categories, row 1 for a missing one, and one row for each category that enough
training rows have. Numbers are scaled by their distribution in the training rows.

Shapes: N rows, D dense features, S slots of ids, F sparse features.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from ...files import sha256
from ..blocks import Column, verified
from ..config import SplitConfig, SplitOptions
from ..events.kinds import ANCHORS
from ..files.values import MISSING as MISSING_TEXTS
from ..known.event_files import open_events
from ..split.events import EventSplit, of_events
from ..split.record import decided, facts_of, of_dataset, with_split
from ..split.rows import RowSplit, default_of
from ..tables import EMPTY, Rows, Split, SplitRows, Unknown, pyarrow
from .columns import UNSEEN, damaged, open_arrays
from .encode import EARLIER, MANIFEST, TITLES, ClickManifest, StoredColumns, encode_table, read_manifest
from .fewer import hide, training_part

T = TypeVar("T", bound=Any)
RARE, MISSING, FIRST = 0, 1, 2
"""Rows of a table: of rare and new categories, of missing ones, and of the first listed category."""
_AT_ONCE = 1 << 18
_MOST_FITTED = 1_000_000
"""Training rows by which numbers are scaled: all, or this many at equal distances."""
_LARGEST = 10.0
"""Scaled numbers are cut at plus and minus this many deviations."""


@dataclass(frozen=True)
class NumberScale:
    """How the numbers of a column become a dense feature; a missing number becomes 0, the mean."""

    mean: float = 0.0
    deviation: float = 1.0

    @staticmethod
    def fit(values: NDArray[np.float32]) -> NumberScale:
        present = values[~np.isnan(values)].astype(np.float64)
        logs = np.sign(present) * np.log1p(np.abs(present))
        return NumberScale(float(logs.mean()), float(logs.std()) or 1.0) if len(present) else NumberScale()

    def __call__(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        x = values.astype(np.float64)
        scaled = (np.sign(x) * np.log1p(np.abs(x)) - self.mean) / self.deviation
        return np.where(np.isnan(x), 0.0, np.clip(scaled, -_LARGEST, _LARGEST)).astype(np.float32)

    def describe(self) -> dict[str, Any]:
        """The formula with its numbers, for programs without recperf."""
        cut = f"cut at {-_LARGEST:g} and {_LARGEST:g}; 0 where x is missing; x is rounded to float32"
        formula = f"(sign(x) * log(1 + abs(x)) - mean) / deviation, {cut}"
        return {"formula": formula, "mean": self.mean, "deviation": self.deviation}


@lru_cache(maxsize=4)
def open_clicks(folder: Path, split: SplitConfig) -> ImportedClicks:
    """Open and fit a dataset once in a process: its sizes are asked for before its rows are read."""
    return ImportedClicks(folder, split)


def divided(config: T) -> T:
    """The config of a run on imported clicks with what decides their split."""
    assert config.path is not None
    return with_split(config, split_of(config.path, config))


def split_of(folder: Path, config: SplitConfig, arrays: Mapping[str, Column] | None = None) -> RowSplit | EventSplit:
    """How the rows in a folder are divided: as the events that they were made of, else row by row."""
    if config.events is not None:
        return of_events(open_events(config.events), config)
    return of_rows(folder, config, arrays)


def of_rows(folder: Path, options: SplitOptions, arrays: Mapping[str, Column] | None = None) -> RowSplit:
    """The split of imported rows, whose arrays may be open already."""
    folder = folder.expanduser()
    manifest = read_manifest(folder)
    arrays = arrays or open_arrays(folder, manifest.arrays, manifest.layout, manifest.rows)
    default = partial(default_of, manifest.has_times)
    return RowSplit(
        name=manifest.name,
        data=manifest.digest,
        rows=manifest.rows,
        options=decided(options, partial(of_dataset, folder, manifest.digest, default)),
        users_N=_role(manifest, arrays, "user"),
        items_N=_role(manifest, arrays, "item"),
        times_N=arrays["times"][:] if "times" in arrays else None,
    )


def _role(manifest: ClickManifest, arrays: Mapping[str, Column], role: str) -> NDArray[np.int32] | None:
    """The user or the item of every row, as codes; None where there is no such column, or one with several values."""
    name, slot = getattr(manifest, role), 0
    for one in manifest.columns:
        if one.name == name:
            return arrays["ids"][:][:, slot] if one.kind == "categorical" else None
        slot += one.slots
    return None


class ImportedClicks(SplitRows):
    """The rows of an imported dataset as a model reads them; `order.ClickOrder` makes batches of them.

    `encode` gives the same for other rows of the same columns, to be scored.
    """

    def __init__(self, folder: Path, split: SplitConfig) -> None:
        self.folder = folder.expanduser()
        self.manifest = read_manifest(self.folder)
        self.columns = StoredColumns.of(self.folder, self.manifest)
        self.rows = self.manifest.rows
        self.keys = tuple(one.name for one, _ in self.columns.sparse)
        self.slots = tuple(one.slots for one, _ in self.columns.sparse)
        self.arrays = open_arrays(self.folder, self.manifest.arrays, self.manifest.layout, self.rows)
        if not self.columns.sparse:
            raise DataError(
                f"{self.manifest.name} has no categorical column, which a model with tables needs",
                where={"folder": self.folder},
                fix="import it with --categorical COLUMNS",
            )
        self.split = split_of(self.folder, split, self.arrays)
        self.targets_N: NDArray[np.bool_] | None = None
        """Of rows that were made of events: the held-out ones that are ranked."""
        if isinstance(self.split, EventSplit):
            valid_N, chooses_N, targets_N = self.split.of_anchors()
            if len(valid_N) != self.rows:
                raise damaged(self.folder / MANIFEST, "has other rows than the events that they were made of")
            self.targets_N = targets_N[valid_N]
        else:
            valid_N, chooses_N = self.split.valid_N, self.split.chooses_N
        if not split.validate:
            chooses_N = np.zeros_like(chooses_N)
        fit_N = training_part(~(valid_N | chooses_N), split, self.split)
        self.index = {
            "train": np.flatnonzero(fit_N | chooses_N),
            "valid": np.flatnonzero(valid_N),
            "fit": np.flatnonzero(fit_N),
            "choose": np.flatnonzero(chooses_N),
        }
        if not len(self.index["fit"]) or not valid_N.any():
            what = f"nothing of {self.manifest.name} is left to {'score' if len(self.index['fit']) else 'train on'}"
            raise DataError(what, where={"folder": self.folder}, fix="use more rows, or another data.split")
        self.rare: dict[str, tuple[int, int, float]] = {}
        """Of the features with such: how many categories share row 0, of how many, and their share of training rows."""
        if earlier := self.manifest.earlier:
            self.tables = list(self.earlier_arrays("tables").values())
            self.scales, self.indicators = [NumberScale(*one) for one in earlier.scales], earlier.indicators
        else:
            self.tables = self._fit_tables()
            self.scales, self.indicators = self._fit_numbers()
        for name in split.without:
            hide(self, name)

    @property
    def digest(self) -> str:
        return self.manifest.digest

    def earlier_arrays(self, name: str) -> dict[int, NDArray[Any]]:
        """What a store has of an earlier one, by the index of a sparse feature: `tables` or `times`."""
        path, stated = self.folder / EARLIER, self.manifest.earlier
        if stated is None or not path.is_file() or sha256(path) != stated.sha256:
            raise damaged(path, "differs from its checksum")
        with np.load(path) as arrays:
            found = {int(key.split()[1]): arrays[key] for key in arrays.files if key.startswith(name)}
        return found

    def titles(self) -> Any:
        """A table with the columns id and title of items; None without titles."""
        path, stated = self.folder / TITLES, self.manifest.titles
        if stated is None:
            return None
        if not path.is_file() or sha256(path) != stated:
            raise damaged(path, "differs from its checksum")
        return pyarrow(".parquet").read_table(str(path))

    @property
    def table_rows(self) -> tuple[int, ...]:
        """Rows that the table of each sparse feature needs."""
        return tuple(int(rows.max()) + 1 for rows in self.tables)

    @property
    def dense_names(self) -> tuple[str, ...]:
        """Names of the dense features: numbers, then indicators of missing ones; without any, a constant."""
        numbers = [one.name for one in self.columns.numeric]
        return (*numbers, *(f"{numbers[at]} missing" for at in self.indicators)) or ("constant",)

    def labels(self, split: Split) -> NDArray[np.uint8]:
        return np.asarray(self.arrays["labels"][self.index[split]])

    def chooses(self) -> NDArray[np.bool_]:
        """Which training rows choose the epoch."""
        return np.isin(self.index["train"], self.index["choose"])

    def _at(self, index: NDArray[np.int64]) -> Rows:
        return self._transform(self._raw("dense", index), self._raw("ids", index), self.arrays["labels"][index])

    def encode(self, table: Any) -> tuple[Rows, dict[str, Unknown]]:
        """The rows of a pyarrow table with the user's own columns, for scoring: exactly what the same row of the
        imported file is to the model; and for each sparse feature the rows with a category that no row of the import
        has, which is table row 0. Labels are 0. A column that is missing is an error."""
        arrays, edges = encode_table(self.columns, table), np.cumsum((0, *self.slots))
        unknown = {
            key: Unknown.of((arrays["ids"][:, first:last] == UNSEEN).any(1), table[key])
            for key, first, last in zip(self.keys, edges, edges[1:])
        }
        return self._transform(arrays["dense"], arrays["ids"], np.zeros(len(table), np.uint8)), unknown

    def indices(self, key: str, column: Any) -> NDArray[np.int64]:
        """Where in the vocabulary of a feature each category of a column is; -1 for a missing or unknown one."""
        columns = replace(self.columns, features=[self.columns.sparse[self.keys.index(key)]])
        codes = encode_table(columns, pyarrow().table({key: column}))["ids"][:, 0]
        return np.maximum(codes.astype(np.int64) - 1, -1)

    def own_columns(self, split: Split, first: int, last: int) -> dict[str, Any]:
        """Rows of a split in the user's own values, as arrays of pyarrow by column; hashed columns are left out."""
        arrow, index = pyarrow(), self.index[split][first:last]
        dense_ND, ids_NS = self._raw("dense", index), self._raw("ids", index)
        columns = {
            one.name: arrow.array(dense_ND[:, at], from_pandas=True) for at, one in enumerate(self.columns.numeric)
        }
        edges = np.cumsum((0, *self.slots))
        for at, (one, vocabulary) in enumerate(self.columns.sparse):
            if vocabulary.values is None:
                continue
            codes = ids_NS[:, edges[at] : edges[at + 1]]
            values = vocabulary.values.take(arrow.array(codes.ravel() - 1, mask=codes.ravel() < 1))
            if one.kind == "multi":
                there = codes > 0
                offsets = np.concatenate([[0], np.cumsum(there.sum(1))]).astype(np.int32)
                lists = arrow.ListArray.from_arrays(offsets, values.filter(arrow.array(there.ravel())))
                values = pyarrow(".compute").binary_join(lists, self.columns.separator)
            columns[one.name] = values
        return {one.name: columns[one.name] for one in self.manifest.columns if one.name in columns}

    def categories(self, key: str) -> list[str | None]:
        """What each row of a table stands for, in the user's own values: None for those of row 0 and 1, and where a
        column is hashed."""
        at = self.keys.index(key)
        names: list[str | None] = [None] * self.table_rows[at]
        vocabulary = self.columns.sparse[at][1]
        if vocabulary.values is not None:
            for row, value in zip(self.tables[at][1:].tolist(), vocabulary.values.to_pylist()):
                if row >= FIRST:
                    names[row] = value
        return names

    def hashed_row(self, key: str) -> str:
        """How the row of a category follows from its key in a hashed column."""
        fact = self.columns.sparse[self.keys.index(key)][0]
        digest = f"blake2b({json.dumps(fact.name + chr(0))} + key, in UTF-8, digest_size=8)"
        return f"row: {MISSING} if missing, else {FIRST} + ({digest} as a little-endian number) % {fact.buckets}"

    def encoding(self) -> dict[str, Any]:
        """How the values of a row become inputs of a model, for programs without recperf."""
        numbers = [one.name for one in self.columns.numeric]
        dense = [{"name": name, "x": name, **scale.describe()} for name, scale in zip(numbers, self.scales)]
        dense += [
            {"name": f"{numbers[at]} missing", "x": numbers[at], "formula": "1 where x is missing, else 0"}
            for at in self.indicators
        ]
        sparse = [
            {
                "name": one.name,
                "kind": one.kind,
                "values": one.values,
                "most": one.slots,
                "hashed": vocabulary.values is None,
            }
            for one, vocabulary in self.columns.sparse
        ]
        return {
            "text": "without whitespace around it; a whole number without its decimals",
            "key": "what texts are compared, ordered and hashed by. If the `values` of a column are number: of a whole "
            "number its digits without a plus and leading zeros, of another the shortest text of its double (1.5, "
            "1e-05); if boolean: the text in small letters; if text: the text",
            "missing": ["", *MISSING_TEXTS],
            "separator": self.columns.separator,
            "several": "the first `most` of the distinct keys in their order; one missing text where there is none",
            "sparse": sparse,
            "dense": dense or [{"name": "constant", "formula": "1"}],
        }

    def role_ids(self, role: str, split: Split) -> NDArray[np.int64] | None:
        """The user or item of every row of a split, as codes of the whole file; None if the dataset has no such
        column."""
        codes_N = _role(self.manifest, self.arrays, role)
        return None if codes_N is None else codes_N[self.index[split]].astype(np.int64)

    def taken(self, split: Split) -> NDArray[np.bool_]:
        """Of which rows the user took the item: as the events say that they were made of, else those with a positive
        label."""
        if not isinstance(self.split, EventSplit):
            return self.labels(split) > 0
        labelled_E = (self.split.store.kinds(slice(None)) & np.uint8(ANCHORS)) > 0
        return np.asarray(self.split.taken(slice(None))[labelled_E][self.index[split]])

    def own_ids(self, role: str) -> Sequence[str] | None:
        """The ids in the user's file by the codes that `role_ids` returns, "" for a missing one; None where the column
        is hashed."""
        name = getattr(self.manifest, role)
        vocabulary = self.columns.sparse[self.keys.index(name)][1]
        return None if vocabulary.values is None else ["", *vocabulary.values.to_pylist()]

    def times(self, split: Split) -> NDArray[np.int64] | None:
        """The time of every row of a split in microseconds; None if the dataset has no times."""
        return np.asarray(self.arrays["times"][self.index[split]]) if "times" in self.arrays else None

    def verified(self) -> dict[str, int]:
        """Bytes of the arrays that this process compared with their digests, and bytes of all of them."""
        return verified(self.arrays.values())

    def describe(self) -> dict[str, Any]:
        """Facts about the data for a result."""
        note = self._split_note()
        return {
            "name": self.manifest.name,
            "digest": self.manifest.digest,
            "rows": self.rows,
            "train_rows": self.count("train"),
            "valid_rows": self.count("valid"),
            "synthetic": False,
            **(self.split.facts(note) if isinstance(self.split, EventSplit) else facts_of(self.split.record, note)),
        }

    def _split_note(self) -> str:
        """What takes the place of time, and what was drawn."""
        note = self.manifest.split_note
        if (
            isinstance(self.split, RowSplit)
            and self.split.options.split in ("last", "time")
            and not self.split.has_times
        ):
            note = "; rows without times, in order of the file" + note
        return note

    def _raw(self, name: str, index: NDArray[np.int64]) -> NDArray[Any]:
        if name not in self.arrays:
            return np.zeros((len(index), 0), np.float32)
        return self.arrays[name][index]

    def _fit_tables(self) -> list[NDArray[np.int32]]:
        """For each sparse feature the table row of every code; the last two entries are those of the codes UNSEEN and
        EMPTY, which are -2 and -1."""
        sizes = [vocabulary.size for _, vocabulary in self.columns.sparse]
        counts = [np.zeros(size + 1, np.int64) for size in sizes]
        edges = np.cumsum((0, *self.slots))
        listed = [vocabulary.values is not None for _, vocabulary in self.columns.sparse]
        if any(listed):
            train = self.index["train"]
            for first in range(0, len(train), _AT_ONCE):
                ids_NS = self._raw("ids", train[first : first + _AT_ONCE])
                for at, count in enumerate(counts):
                    codes = ids_NS[:, edges[at] : edges[at + 1]]
                    count += np.bincount(codes[codes != EMPTY], minlength=len(count))
        tables = []
        for key, size, count, has_list in zip(self.keys, sizes, counts, listed):
            rows = np.full(size + 3, RARE, np.int32)
            frequent = count[1:] >= self.manifest.min_count if has_list else np.ones(size, np.bool_)
            seen = count[1:] > 0
            if (rare := seen & ~frequent).any():
                share = float(count[1:][rare].sum() / count.sum())
                self.rare[key] = int(rare.sum()), int(seen.sum()), share
            rows[1 : size + 1][frequent] = FIRST + np.arange(int(frequent.sum()), dtype=np.int32)
            rows[0], rows[-1] = MISSING, EMPTY
            tables.append(rows)
        return tables

    def _fit_numbers(self) -> tuple[list[NumberScale], list[int]]:
        """The scale of each numeric column, and the columns that some training row lacks."""
        train = self.index["train"]
        sample = self._raw("dense", train[:: -(-len(train) // _MOST_FITTED)])
        scales = [NumberScale.fit(sample[:, at]) for at in range(sample.shape[1])]
        return scales, [at for at in range(sample.shape[1]) if np.isnan(sample[:, at]).any()]

    def _transform(self, dense_ND: NDArray[Any], ids_NS: NDArray[Any], labels_N: NDArray[np.uint8]) -> Rows:
        columns = [scale(dense_ND[:, at]) for at, scale in enumerate(self.scales)]
        columns += [np.isnan(dense_ND[:, at]).astype(np.float32) for at in self.indicators]
        if not columns:
            columns = [np.ones(len(labels_N), np.float32)]
        edges = np.cumsum((0, *self.slots))
        ids = [rows[ids_NS[:, first:last]] for rows, first, last in zip(self.tables, edges, edges[1:])]
        return Rows(np.stack(columns, 1), np.concatenate(ids, 1), np.ascontiguousarray(labels_N))
