"""Ids of any kind to the numbers of a store, and back.

While a file is read, ids get codes as they appear; only at its end is it known which codes they become. What
is kept is one entry a distinct id, however many events there are.

Shapes: B rows of a batch, C codes.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ....errors import DataError
from ....files import writing
from ..schema import MOST_ID
from .read import arrow
from .values import BadValue, encoded, is_text

Mode = Literal["dense", "keep"]
NONE = 0xFFFFFFFF
"""The code of a row without an id, where it may have none."""
_CANONICAL = r"^(0|-?[1-9][0-9]{0,17})$"
_LONG = r"^-?[1-9][0-9]{18,}$"
_MISSING = ("#N/A", "#NA", "-NaN", "-nan", "<NA>", "N/A", "NA", "NULL", "NaN", "None", "\\N", "n/a", "nan", "null")
"""How programs write that there is no value; taken for an id, all users without one would become one user."""
_RENAME = "remove such rows; an id that is really called so needs another name"
_DENSE = "--ids dense gives ids of its own"
_TEXT = "--ids dense takes numbers of any length as text: store the column as text"
_NUMBER_BYTES, _TEXT_BYTES = 24, 160
"""Memory a distinct id needs: sorted, with its code, while merged; a Python string in a dict, beside its letters."""


class Ids:
    """Distinct ids of one role. They are numbers as long as all are integers without leading zeros, else text."""

    def __init__(self, role: str, mode: Mode, *, optional: bool = False) -> None:
        self.role, self.mode, self.optional = role, mode, optional
        self._sorted = np.empty(0, np.int64)
        self._codes = np.empty(0, np.uint32)
        self._text: dict[str, int] | None = None
        self._letters = 0

    def __len__(self) -> int:
        return len(self._sorted) if self._text is None else len(self._text)

    @property
    def bytes(self) -> int:
        return len(self) * (_NUMBER_BYTES if self._text is None else _TEXT_BYTES) + self._letters

    def codes(self, column: Any) -> NDArray[np.uint32]:
        """Each row's code; new ids get the next ones."""
        values, places_B = encoded(column, self.role)
        none = _missing(values)
        if none.any():
            missing_B = (places_B >= 0) & none[places_B]
            if not self.optional and missing_B.any():
                row = int(np.argmax(missing_B))
                value = values[int(places_B[row])].as_py()
                raise BadValue(row, f"no {self.role}: {str(value)!r} stands for a missing value", _RENAME)
            places_B = np.where(missing_B, -1, places_B)
        if not self.optional and (places_B < 0).any():
            raise BadValue(int(np.argmax(places_B < 0)), f"no {self.role}")
        used = np.flatnonzero(np.bincount(places_B + 1, minlength=len(values) + 1)[1:])
        table = np.full(len(values) + 1, NONE, np.uint32)
        try:
            table[used] = self._code(values.take(arrow().array(used)))
        except BadValue as error:
            error.row = int(np.argmax(places_B == used[error.row]))
            raise
        # Place -1 takes the last entry, which is NONE.
        return table[places_B]

    def final(self) -> NDArray[np.uint32]:
        """The id in the store of each code: with dense 1 and on, in ascending order; with keep what it was."""
        final_C = np.empty(len(self), np.uint32)
        if self._text is not None:
            for rank, name in enumerate(sorted(self._text), 1):
                final_C[self._text[name]] = rank
        else:
            final_C[self._codes] = self._sorted if self.mode == "keep" else np.arange(1, len(self) + 1)
        return final_C

    def write_originals(self, path: Path, *, fix: str) -> dict[str, Any]:
        """One JSON value a line: line k has what id k was. Says what was written."""
        digest, encode = hashlib.sha256(), json.JSONEncoder(ensure_ascii=False).encode
        with writing(path, fix=fix), path.open("wb") as file:
            names: Any = self._sorted if self._text is None else sorted(self._text)
            for start in range(0, len(names), 1 << 16):
                part = names[start : start + (1 << 16)]
                lines = map(str, part.tolist()) if self._text is None else map(encode, part)
                block = ("\n".join(lines) + "\n").encode()
                digest.update(block)
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        kind = "number" if self._text is None else "text"
        return {"file": path.name, "lines": len(self), "kind": kind, "sha256": digest.hexdigest()}

    def _code(self, values: Any) -> NDArray[np.uint32]:
        if not len(values):
            # A column that is empty everywhere has no type to judge.
            return np.empty(0, np.uint32)
        numbers = self._as_numbers(values)
        if numbers is None or self._text is not None:
            return self._code_text([str(value) for value in (values.to_pylist() if numbers is None else numbers)])
        if self.mode == "keep" and len(numbers):
            wrong = np.flatnonzero((numbers < 0) | (numbers > MOST_ID))
            if len(wrong):
                raise self._outside(int(wrong[0]), numbers[wrong[0]])
        return self._code_numbers(numbers)

    def _as_numbers(self, values: Any) -> NDArray[np.int64] | None:
        """Distinct values as integers, or None when they are text."""
        pa, compute = arrow(), arrow(".compute")
        if is_text(values.type):
            fits = compute.match_substring_regex(values, _CANONICAL).to_numpy(zero_copy_only=False)
            if fits.all():
                return np.asarray(values.cast(pa.int64()).to_numpy(), np.int64)
            wrong = int(np.argmin(fits))
            if self.mode == "keep":
                if compute.match_substring_regex(values[wrong : wrong + 1], _LONG)[0].as_py():
                    raise self._outside(wrong, values[wrong])
                what = f"{self.role} {values[wrong].as_py()!r} is not an integer"
                raise BadValue(wrong, what, "--ids dense takes any text")
            broken = compute.match_substring_regex(values, r"[\r\n]").to_numpy(zero_copy_only=False)
            if broken.any():
                what = f"{self.role} holds a line break: a quote is left open"
                raise BadValue(int(np.argmax(broken)), what, "look for a quote without its pair")
            return None
        if not (pa.types.is_integer(values.type) or pa.types.is_floating(values.type)):
            raise BadValue(0, f"the {self.role} is of type {values.type}; an id is an integer or text")
        for place in range(len(values)) if not _fits(values) else ():
            if not _fits(values[place : place + 1]):
                raise self._no_number(place, values[place].as_py())
        return np.asarray(values.cast(pa.int64()).to_numpy(), np.int64)

    def _outside(self, place: int, value: Any) -> BadValue:
        return BadValue(place, f"{self.role} is {value}; it must be 0 to {MOST_ID:,}", _DENSE)

    def _no_number(self, place: int, value: int | float) -> BadValue:
        if isinstance(value, float) and value % 1:
            return BadValue(place, f"{self.role} {value} is not a whole number")
        if self.mode == "keep":
            return self._outside(place, value)
        return BadValue(place, f"{self.role} {value} is beyond {(1 << 63) - 1:,}, the largest number of an id", _TEXT)

    def _code_numbers(self, numbers: NDArray[np.int64]) -> NDArray[np.uint32]:
        # In ascending order the search walks through memory once instead of jumping about in it.
        order = np.argsort(numbers)
        ascending = numbers[order]
        places = np.searchsorted(self._sorted, ascending)
        known = np.zeros(len(numbers), bool)
        inside = places < len(self._sorted)
        known[inside] = self._sorted[places[inside]] == ascending[inside]
        new = ~known
        found = np.empty(len(numbers), np.uint32)
        found[known] = self._codes[places[known]]
        found[new] = np.arange(len(self), len(self) + np.count_nonzero(new))
        if new.any():
            self._sorted = np.insert(self._sorted, places[new], ascending[new])
            self._codes = np.insert(self._codes, places[new], found[new])
        codes = np.empty(len(numbers), np.uint32)
        codes[order] = found
        return codes

    def _code_text(self, names: list[str]) -> NDArray[np.uint32]:
        if self._text is None:
            # What was taken for numbers so far were texts without leading zeros, so their digits give them back.
            order = np.argsort(self._codes)
            self._text = {str(number): code for code, number in enumerate(self._sorted[order].tolist())}
            self._sorted, self._codes = np.empty(0, np.int64), np.empty(0, np.uint32)
        known = self._text
        before = len(known)
        codes = np.array([known.setdefault(name, len(known)) for name in names], np.uint32)
        self._letters += sum(len(name) for name, code in zip(names, codes) if code >= before)
        return codes


class Attribute:
    """An artist or album for every item: the last one in the file stays."""

    def __init__(self) -> None:
        self._codes = np.empty(0, np.uint32)
        self._disputed = np.empty(0, bool)

    @property
    def disputed(self) -> int:
        """Items that had more than one."""
        return int(self._disputed.sum())

    def take(self, items_B: NDArray[np.uint32], codes_B: NDArray[np.uint32], items: int) -> None:
        if items > len(self._codes):
            room = max(items, 2 * len(self._codes)) - len(self._codes)
            self._codes = np.append(self._codes, np.full(room, NONE, np.uint32))
            self._disputed = np.append(self._disputed, np.zeros(room, bool))
        given = codes_B != NONE
        items_B, codes_B = items_B[given], codes_B[given]
        before_B = self._codes[items_B]
        self._codes[items_B] = codes_B
        differs_B = (codes_B != self._codes[items_B]) | ((before_B != NONE) & (before_B != codes_B))
        self._disputed[items_B[differs_B]] = True

    def final(self, finals_C: NDArray[np.uint32], items: int) -> NDArray[np.uint32]:
        """The attribute of each item code as an id of the store, 0 for none."""
        codes = np.append(self._codes[:items], np.full(max(0, items - len(self._codes)), NONE, np.uint32))
        found = np.append(finals_C, np.uint32(0))
        return found[np.minimum(codes, len(finals_C))]


def originals(folder: Path, role: str) -> list[int | str]:
    """What the ids of a store were where they came from: entry k - 1 is that of id k. Roles: users, items, artists,
    albums."""
    path = folder / f"{role}.jsonl"
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
    except FileNotFoundError:
        what = f"this store has no list of its original {role}"
        raise DataError(what, where={"file": path}, fix="import with --ids dense, which keeps one") from None


def _missing(values: Any) -> NDArray[np.bool_]:
    """Which of some distinct values only say that there is none."""
    pa, compute = arrow(), arrow(".compute")
    if is_text(values.type):
        found = compute.is_in(values, value_set=pa.array(_MISSING))
    elif pa.types.is_floating(values.type):
        found = compute.is_nan(values)
    else:
        return np.zeros(len(values), np.bool_)
    return np.asarray(found.to_numpy(zero_copy_only=False), np.bool_)


def _fits(values: Any) -> bool:
    pa = arrow()
    try:
        values.cast(pa.int64())
    except pa.ArrowInvalid:
        return False
    return True
