"""Tables in tiers, of which a checkpoint holds only the rows that were ever written, in increments.

An increment is the rows that changed since the checkpoint before: for every tensor their numbers, ascending, and their
values, in files of that increment alone ("rows3-00000.safetensors"). A new checkpoint links the files of the increments
before it, so that every checkpoint is complete by itself; of a row that is in several increments the last one holds.
Rows in none of them have their initial values, which a few JSON values describe.

Shapes: R rows of a tensor, W width, N rows of an increment, n rows of a chunk.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..files import open_regular
from ..models.init import InitialRows
from .checkpoint_file import CHUNK, ChunkedTensor, SyncedFile, TensorFile
from .checkpoint_shards import Rectangle

MOST_INCREMENTS = 64
"""A checkpoint of more increments than this, of which each is a file at least, is written anew as one."""
_FILE = re.compile(r"rows(\d+)-\d+\.safetensors")


@runtime_checkable
class TieredTensor(Protocol):
    """A tensor whose rows lie in tiers, as a leaf of a state: some columns of the records of one table.

    All calls come between two steps, from one thread. They see what the last step wrote, wherever it lies.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """(R, W), or (R,) where there is one number for each row."""
        ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def in_files(self) -> bool:
        """Whether the rows lie in files, since memory for them is scarce."""
        ...

    @property
    def initial(self) -> dict[str, Any]:
        """What `initial_rows` computes the rows from that were never written, as JSON values."""
        ...

    def written(self) -> int:
        """How many rows were ever written or loaded: those of `changed(0)`."""
        ...

    def changed(self, since: int) -> tuple[Tensor, int]:
        """The rows written or loaded after generation `since`, and the number of the generation that ends now.

        The rows are int64, ascending, on the host. `since` is 0, for every row that was ever written, or a number that
        this method has returned for this tensor. A save that fails does not use the number that it got: the next one
        asks with the older number again, and gets the rows of both. Several tensors of one table may count together.
        """
        ...

    def values(self, rows_N: Tensor) -> Tensor:
        """A copy of these rows in host memory, contiguous: (N, W), or (N,)."""
        ...

    def load(self, rows_N: Tensor, values: Tensor) -> None:
        """Write these rows, ascending, from host memory. The other columns of their records, which other tensors of
        the table hold, keep their values: the initial ones where a record was never written."""
        ...

    def clear(self) -> None:
        """Forget all rows of the table: each has its initial value again, in all columns of its record, and counts as
        never written. It is called, where rows were written, for all tensors of a state before anything is loaded."""
        ...


def tiered_tensors(value: Any) -> Iterator[TieredTensor]:
    """The tensors in tiers of a tree."""
    if isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from tiered_tensors(inner)
    elif not isinstance(value, Tensor) and isinstance(value, TieredTensor):
        yield value


class Chain(NamedTuple):
    """The increments of a checkpoint that this process wrote or loaded itself, which the next one may continue."""

    folder: Path
    files: dict[str, dict[str, Any]]
    """Size and digest of the files with rows."""
    increments: dict[str, list[dict[str, Any]]]
    """By the path of a tensor, as the manifest has them."""
    generations: dict[str, int]
    """By the path of a tensor, the generation that ended with this checkpoint."""

    @property
    def rows(self) -> int:
        return sum(entry["count"] for entries in self.increments.values() for entry in entries)

    @property
    def number(self) -> int:
        """The number of the next increment."""
        return max((int(name[4 : name.index("-")]) + 1 for name in self.files), default=0)

    @classmethod
    def of(cls, folder: Path, manifest: dict[str, Any], generations: dict[str, int]) -> Chain:
        """The increments of the tensors that have a generation, from a manifest."""
        files = {name: facts for name, facts in manifest["files"].items() if _FILE.fullmatch(name)}
        increments = {path: manifest["tensors"][path]["increments"] for path in generations}
        return cls(folder, files, increments, generations)


class ChangedRows(NamedTuple):
    """Rows of one tensor that a checkpoint adds to those of the ones before."""

    path: str
    rows_N: Tensor
    values: Tensor | ChunkedTensor

    @property
    def nbytes(self) -> int:
        return self.rows_N.nbytes + self.values.nbytes

    def copied(self) -> ChangedRows:
        """The same, with values that training does not change."""
        return self._replace(values=self.values if isinstance(self.values, Tensor) else self.values.copied())

    def parts(self, nbytes: int) -> Iterator[ChangedRows]:
        """The same in pieces of about that size, of which each goes to one file."""
        count = max(1, nbytes * len(self.rows_N) // self.nbytes)
        for start in range(0, len(self.rows_N), count):
            part = slice(start, min(start + count, len(self.rows_N)))
            yield ChangedRows(self.path, self.rows_N[part], self.values[part])

    def tensors(self) -> dict[str, Tensor | ChunkedTensor]:
        """By their keys in a file."""
        key = f"{self.path}@{int(self.rows_N[0])}"
        return {f"{key}.rows": self.rows_N, f"{key}.values": self.values}

    def entry(self, file: str) -> dict[str, Any]:
        """As the manifest describes it."""
        keys = dict(zip(("rows", "values"), self.tensors()))
        return {"file": file, **keys, "count": len(self.rows_N)}


@dataclass(frozen=True, kw_only=True)
class Increment:
    """What a checkpoint adds to the increments of an earlier one, or all rows ever written where it follows none."""

    changes: list[ChangedRows]
    generations: dict[str, int]
    chain: Chain | None

    @classmethod
    def of(cls, tensors: Mapping[str, TieredTensor], chain: Chain | None) -> Increment:
        if chain is not None and chain.generations.keys() == tensors.keys() and chain.number < MOST_INCREMENTS:
            increment = cls._since(tensors, chain)
            rows = chain.rows + sum(len(change.rows_N) for change in increment.changes)
            # So a checkpoint takes at most twice the room and time to read that one increment would.
            if rows <= 2 * sum(tensor.written() for tensor in tensors.values()):
                return increment
        return cls._since(tensors, None)

    @classmethod
    def _since(cls, tensors: Mapping[str, TieredTensor], chain: Chain | None) -> Increment:
        changes, generations = [], {}
        for path, tensor in tensors.items():
            rows_N, generations[path] = tensor.changed(chain.generations[path] if chain else 0)
            if len(rows_N):
                changes.append(ChangedRows(path, rows_N, _values(tensor, rows_N)))
        return cls(changes=changes, generations=generations, chain=chain)

    @property
    def nbytes(self) -> int:
        return sum(change.nbytes for change in self.changes)

    @property
    def number(self) -> int:
        return self.chain.number if self.chain else 0


def _values(tensor: TieredTensor, rows_N: Tensor) -> ChunkedTensor:
    """The values of rows, read when they are written: a copy of all of them may not fit into memory."""
    return ChunkedTensor(
        shape=(len(rows_N), *tensor.shape[1:]),
        dtype=tensor.dtype,
        read=lambda start, stop: tensor.values(rows_N[start:stop]),
    )


def link(source: Path, target: Path) -> bool:
    """Give a file a second name in another folder; without links, as on some file systems, copy it and return False."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        with open(open_regular(source), "rb") as original, SyncedFile(target) as file:
            while block := original.read(CHUNK):
                file.write(block)
        return False
    return True


Fill = Callable[[Tensor, int], None]
"""Fills a contiguous tensor with the initial rows of a table, beginning at a row."""


def initial_rows(initial: Mapping[str, Any], shape: tuple[int, ...]) -> Fill:
    """How the rows of a tensor of that shape begin.

    zero: all are 0; uniform (bound, seed): as DLRMv4's tables; pattern (rows, dim, std, seed, name): as the tables of
    bags; stacked (parts, each with its rows and its initial): tables one below the other.
    """
    fields = dict(initial)
    return _KINDS[fields.pop("kind")](shape, **fields)


def _zero(shape: tuple[int, ...]) -> Fill:
    def fill(out: Tensor, first_row: int) -> None:
        out.zero_()

    return fill


def _uniform(shape: tuple[int, ...], *, bound: float, seed: int) -> Fill:
    from ..models.dlrm_v4.tables import fill_uniform_

    return lambda out, first_row: fill_uniform_(out, bound, seed, first_row)


def _pattern(shape: tuple[int, ...], *, rows: int, dim: int, std: float | None, seed: int, name: str) -> Fill:
    if (rows, dim) != shape:
        raise ValueError(f"initial rows of shape {(rows, dim)} are not those of a tensor of shape {shape}")
    return InitialRows(rows, dim, std=std, seed=seed, name=name).fill_


def _stacked(shape: tuple[int, ...], *, parts: list[dict[str, Any]]) -> Fill:
    if sum(part["rows"] for part in parts) != shape[0] or any(part["rows"] < 1 for part in parts):
        raise ValueError(f"initial rows of {len(parts)} tables are not those of a tensor of shape {shape}")
    fills = [initial_rows(part["initial"], (part["rows"], *shape[1:])) for part in parts]

    def fill(out: Tensor, first_row: int) -> None:
        start = 0
        for part, fill_part in zip(parts, fills):
            first, stop = max(start, first_row), min(start + part["rows"], first_row + out.shape[0])
            if first < stop:
                fill_part(out[first - first_row : stop - first_row], first - start)
            start += part["rows"]

    return fill


_KINDS: dict[str, Callable[..., Fill]] = {"zero": _zero, "uniform": _uniform, "pattern": _pattern, "stacked": _stacked}


@dataclass(frozen=True)
class StoredRows:
    """A tensor in a checkpoint that holds its rows in increments; what makes no sense is a ValueError."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    initial: dict[str, Any]
    increments: list[dict[str, Any]]
    open_file: Callable[[str], TensorFile]

    def __post_init__(self) -> None:
        if len(self.shape) not in (1, 2) or any(type(size) is not int or size < 1 for size in self.shape):
            raise ValueError(f"a table cannot have the shape {self.shape}")
        if any(type(entry["count"]) is not int or entry["count"] < 1 for entry in self.increments):
            raise ValueError("an increment has no valid number of rows")
        keys = [(entry["file"], entry[kind]) for entry in self.increments for kind in ("rows", "values")]
        if len(set(keys)) < len(keys):
            raise ValueError("an increment is listed twice")

    def load(self, into: TieredTensor) -> None:
        """Load the rows into a tensor in tiers, in which none was written yet."""
        if into.initial != self.initial:
            raise ValueError(f"its rows begin as {self.initial}, those of this model as {into.initial}")
        for rows_n, values in self._chunks():
            into.load(rows_n, values)

    def fill_(self, out: Tensor, place: Rectangle) -> None:
        """Fill a plain tensor, the rectangle of this one at `place`: initial rows, and over them those written."""
        _fill_rectangle_(out, place, initial_rows(self.initial, self.shape), self.shape)
        columns = slice(place.first_column, place.first_column + place.columns)
        for rows_n, values in self._chunks():
            # They are ascending.
            first, stop = torch.searchsorted(rows_n, torch.tensor([place.first_row, place.first_row + place.rows]))
            own = values[first:stop, columns] if out.dim() == 2 else values[first:stop]
            out.index_copy_(0, (rows_n[first:stop] - place.first_row).to(out.device), own.to(out.device))

    def _chunks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows and their values, in the order in which they were written."""
        for entry in self.increments:
            file, count = self.open_file(entry["file"]), entry["count"]
            size = rows_at_a_time(self.shape, self.dtype)
            last = -1
            for start in range(0, count, size):
                rows_n = torch.empty(min(size, count - start), dtype=torch.int64)
                values = torch.empty(len(rows_n), *self.shape[1:], dtype=self.dtype)
                file.read(entry["rows"], (count,), rows_n, start)
                file.read(entry["values"], (count, *self.shape[1:]), values, start)
                ascending = bool((rows_n.diff() > 0).all()) and int(rows_n[0]) > last
                last = int(rows_n[-1])
                if not ascending or last >= self.shape[0]:
                    raise ValueError(f"rows in {file.name} are not ascending numbers below {self.shape[0]}")
                yield rows_n, values


def rows_at_a_time(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """How many rows of a tensor are a chunk."""
    return min(shape[0], max(1, CHUNK // (dtype.itemsize * (shape[1] if len(shape) == 2 else 1))))


def _fill_rectangle_(out: Tensor, place: Rectangle, fill: Fill, shape: tuple[int, ...]) -> None:
    if out.is_contiguous() and out.shape[1:] == shape[1:]:
        fill(out, place.first_row)
        return
    size = rows_at_a_time(shape, out.dtype)
    for start in range(0, place.rows, size):
        part = out[start : start + size]
        scratch = torch.empty(len(part), *shape[1:], dtype=out.dtype, device=out.device)
        fill(scratch, place.first_row + start)
        columns = slice(place.first_column, place.first_column + place.columns)
        part.copy_(scratch if out.dim() == 1 else scratch[:, columns])


def load_plain(into: TieredTensor, read: Callable[[int, Tensor], None]) -> None:
    """Load all rows of a plain tensor, which `read` gives from a row on; those with their initial bits are skipped."""
    fill, size = initial_rows(into.initial, into.shape), rows_at_a_time(into.shape, into.dtype)
    for start in range(0, into.shape[0], size):
        values = torch.empty(min(size, into.shape[0] - start), *into.shape[1:], dtype=into.dtype)
        initial = torch.empty_like(values)
        read(start, values)
        fill(initial, start)
        differs_n = (_bits(values) != _bits(initial)).any(dim=1)
        if differs_n.any():
            into.load(differs_n.nonzero().flatten() + start, values[differs_n])


def _bits(rows: Tensor) -> Tensor:
    return rows.reshape(len(rows), -1).view(torch.uint8)
