"""Reads one line of a Criteo click log: slow and obvious, and it explains what is wrong with a malformed line.

`label \t 13 integers \t 26 hexadecimal categories`; any field but the label may be empty. `parse.py` parses blocks of
lines at once; tests compare it with this file, which also explains the lines that it refuses.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .config import DENSE, SPARSE

COLUMNS = 1 + DENSE + SPARSE
MOST_LINE = 4096
"""Longer lines are not read to their end; a valid one has about 460 bytes at most."""
MOST_DIGITS = 16
MOST_HEX = 8

KINDS = ("length", "encoding", "columns", "label", "integer", "hexadecimal", "gzip")
"""Kinds of faults, gzip of the file, the others of a line. A line counts once, for the first kind that applies."""

_INTEGER = re.compile(rb"-?[0-9]{1,%d}" % MOST_DIGITS)
_HEX = re.compile(rb"[0-9a-fA-F]{1,%d}" % MOST_HEX)


@dataclass(frozen=True)
class Fault:
    kind: str
    what: str


@dataclass(frozen=True)
class Line:
    label: int
    integers: tuple[int | None, ...]
    categories: tuple[int | None, ...]


def read(line: bytes) -> Line | Fault:
    """Read one line without its line feed."""
    line = line.removesuffix(b"\r")
    if len(line) > MOST_LINE:
        return Fault("length", f"longer than {MOST_LINE} bytes")
    if not line.isascii():
        return Fault("encoding", f"byte {next(byte for byte in line if byte > 127):#04x} is not ASCII text")
    fields = line.split(b"\t")
    if len(fields) != COLUMNS:
        what = f"{len(fields)} columns instead of {COLUMNS}" if line else "empty"
        return Fault("columns", what + ("; test files without labels cannot be used" if len(fields) == 39 else ""))
    if fields[0] not in (b"0", b"1"):
        return Fault("label", f"column 1, the label, is {_shown(fields[0])} instead of 0 or 1")
    for column, field in enumerate(fields[1:], start=2):
        if not field:
            continue
        if column <= 1 + DENSE and not _INTEGER.fullmatch(field):
            return Fault("integer", f"column {column} is {_shown(field)}, not an integer")
        if column > 1 + DENSE and not _HEX.fullmatch(field):
            return Fault("hexadecimal", f"column {column} is {_shown(field)}, not a hexadecimal number of 32 bits")
    return Line(
        int(fields[0]),
        tuple(int(field) if field else None for field in fields[1 : 1 + DENSE]),
        tuple(int(field, 16) if field else None for field in fields[1 + DENSE :]),
    )


def _shown(field: bytes) -> str:
    text = repr(field[:24].decode("ascii", "backslashreplace"))
    return text if len(field) <= 24 else f"{text[:-1]}...'"
