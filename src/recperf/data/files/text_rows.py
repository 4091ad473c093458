"""Rows of a text file of a user, and which of them are bad.

Rows are what Python's csv module reads, in its strict mode: a line break within quotes is part of a field, a quote
opens a field only at its beginning, and behind the quote that closes it the field ends. DuckDB reads most files to the
same rows and far faster; `regular_csv` says which, by a look at the bytes. Python reads the others, and those that have
bad rows.

Shapes: N rows of a block.
"""

from __future__ import annotations

import csv
import gzip
import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from ...files import open_dataset_file
from ...jsonfile import Struct
from ...stop import poll
from .file import BOM, LONGEST_LINE, READ_ERRORS, Source, bad_file, unreadable

BLOCK = 4 << 20
"""Bytes of text that are read at once."""
ROWS_AT_ONCE = 1 << 16
NOT_UTF8 = " is not UTF-8 text", "convert it to UTF-8"
NUL = " has a NUL byte", "write the file again, as text"
_MOST_COLUMNS = 2000
"""Of a file that DuckDB reads: with very many it takes longer than Python."""
_LISTED = 20
"""Bad rows that a description of an import lists."""
_FEED, _RETURN, _QUOTE, _SPACE = b'\n\r" '
_NOT_A_BYTE = re.compile("[\ud800-\udfff]")
"""What stands for bytes that are not UTF-8."""
_ONE_MARK = "\ufdd0"
"""Stands for a delimiter of two characters, which the csv module cannot have. No text has this character."""

Positions = NDArray[np.int64]


class SkippedRows(Struct):
    """Rows that an import left out: how many, and what the first of them are."""

    count: int
    first: list[str]


class BadRows:
    """Collects bad rows of a file; one more than `allowed` is an error. None: the command has no such option."""

    def __init__(self, path: Path, allowed: int | None = None) -> None:
        self.path, self.allowed = path, allowed
        self._rows: list[tuple[int, str]] = []
        self._not_loaded: list[int] = []

    @property
    def room(self) -> int:
        """How many more bad rows are allowed."""
        return (self.allowed or 0) - len(self._rows)

    def add(self, row: int, what: str, fix: str) -> None:
        """Leave out a row of the file, counted from 1, while it is read; `what` follows its number in a message."""
        self._record(row, what, fix)
        self._not_loaded.insert(bisect_right(self._not_loaded, row), row)

    def add_loaded(self, loaded: int, what: str, fix: str) -> None:
        """Leave out a row that was loaded; `loaded` is its number among the loaded rows, from 0."""
        rows = self._not_loaded
        before = bisect_right(range(len(rows)), loaded, key=lambda index: rows[index] - index - 1)
        self._record(loaded + 1 + before, what, fix)

    def _record(self, row: int, what: str, fix: str) -> None:
        if self.room <= 0:
            hint = "" if self.allowed is None else "; --skip-bad N leaves out up to N bad rows"
            raise DataError(f"row {row:,}{what}", where={"file": self.path}, fix=fix + hint)
        self._rows.append((row, what))

    @property
    def skipped(self) -> SkippedRows | None:
        """The rows left out, for the description of an import; None if there are none."""
        first = [f"row {row:,}{what}" for row, what in sorted(self._rows)[:_LISTED]]
        return SkippedRows(count=len(self._rows), first=first) if first else None


def read_blocks(source: Source) -> Iterator[tuple[bytes, int]]:
    """A text file in blocks of whole lines, each with the bytes of the file that have been read. A line that is too
    long may be cut."""
    rest, text, mark = b"", BOM, BOM
    with open_dataset_file(source.path) as file:
        stream = gzip.GzipFile(fileobj=file) if source.gzipped else file
        while text:
            poll()
            try:
                text = stream.read(BLOCK)
            except READ_ERRORS as error:
                raise unreadable(source.path, error) from None
            content, mark = rest + text.removeprefix(mark), b""
            # A carriage return and its line feed stay together.
            end = max(content.rfind(b"\n"), content.rfind(b"\r", 0, -1)) + 1
            if not text or len(content) - end > LONGEST_LINE:
                end = len(content)
            rest = content[end:]
            if end:
                yield content[:end], file.tell()


@dataclass(frozen=True, kw_only=True, eq=False)
class TextBlock:
    """Lines of a file, without blank and bad ones."""

    lines: list[str]
    """Without their ends."""
    numbers_N: Positions
    """The number of each line in the file, from 1; blank ones do not count."""
    bytes_read: int
    """Bytes of the file on disk read so far."""


def read_lines(source: Source, bad: BadRows) -> Iterator[TextBlock]:
    """The lines of a text file after its header; bad ones are left out and recorded."""
    number = 0 if source.has_header else 1
    for content, bytes_read in read_blocks(source):
        lines, numbers = list[str](), list[int]()
        for line in filter(None, content.splitlines()):
            if len(line) > LONGEST_LINE:
                raise _endless(source, number)
            text = line.decode(errors="surrogateescape")
            if number and (fault := _fault(text)):
                bad.add(number, *fault)
            elif number:
                lines.append(text)
                numbers.append(number)
            number += 1
        yield TextBlock(lines=lines, numbers_N=np.array(numbers, np.int64), bytes_read=bytes_read)


def read_records(source: Source, bad: BadRows) -> Iterator[tuple[list[list[str]], int]]:
    """The rows of a delimited file after its header as Python reads them, many at a time, and the bytes of the file
    that have been read; bad ones are left out and recorded."""
    number, width, mark = 0 if source.has_header else 1, len(source.names), source.delimiter
    lines, rows = _Lines(source), list[list[str]]()
    records = csv.reader(lines, delimiter=mark if len(mark) == 1 else _ONE_MARK, strict=True)
    limit = csv.field_size_limit()
    while True:
        fault = None
        try:
            csv.field_size_limit(LONGEST_LINE)
            fields = next(records, None)
        except csv.Error as error:
            is_last = "end of data" in str(error)
            why = "a quote without its pair" if is_last else "text beside the quotes of a field"
            fields, fault = [], (f" is not valid CSV: {why}", 'write a " within quotes as ""')
        finally:
            # It is one of the whole process.
            csv.field_size_limit(limit)
        if lines.length > LONGEST_LINE + 2:
            raise _endless(source, number)
        if fields is None:
            break
        lines.length = 0
        if not (fields or fault):
            continue
        if len(mark) == 2:
            fields = [field.replace(_ONE_MARK, mark) for field in fields]
        if number:
            if not fault and len(fields) != width:
                what = f" has {len(fields)} columns; the first line has {width}"
                fault = what, "repair that row, or set --delimiter"
            fault = fault or _fault("".join(fields))
            if fault:
                bad.add(number, *fault)
            else:
                rows.append(fields)
        number += 1
        if len(rows) == ROWS_AT_ONCE:
            yield rows, lines.bytes_read
            rows = []
    yield rows, lines.bytes_read


class _Lines:
    """The lines of a text file for the csv module, and how many bytes those of one record have."""

    def __init__(self, source: Source) -> None:
        self.source, self.length, self.bytes_read = source, 0, 0

    def __iter__(self) -> Iterator[str]:
        mark = self.source.delimiter
        for content, bytes_read in read_blocks(self.source):
            self.bytes_read = bytes_read
            for line in content.splitlines(keepends=True):
                self.length += len(line)
                # The csv module is told that the record ends where it is too long.
                if self.length > LONGEST_LINE + 2:
                    return
                text = line.decode(errors="surrogateescape")
                yield text if len(mark) == 1 else text.replace(mark, _ONE_MARK)


def _endless(source: Source, number: int) -> DataError:
    what = f"row {number:,} does not end within {LONGEST_LINE:,} characters"
    return bad_file(source.path, what, "end every line, and look for a quote without its pair")


def _fault(text: str) -> tuple[str, str] | None:
    """What is wrong with the characters of a row."""
    if _NOT_A_BYTE.search(text):
        return NOT_UTF8
    return NUL if "\0" in text else None


@dataclass(frozen=True, kw_only=True)
class RegularCsv:
    """How DuckDB reads a file exactly as Python's csv module does."""

    rows: int
    """Without the header."""
    quoted: bool
    """Whether some field is in quotes; else a quote is a character like any other."""
    returns: bool
    """Whether lines end with a carriage return and a line feed."""
    broken: bool
    """Whether some field has a line break."""
    trimmed: bool
    """Whether no field has whitespace around it."""


def regular_csv(source: Source) -> RegularCsv | None:
    """How DuckDB reads a delimited file as Python does; None if it may not, or if some row is bad.

    DuckDB would read differently: a field with a quote beside its text or beside whitespace, lines that end in several
    ways, an empty column more than there are, NUL characters, and blank lines of a single column.
    """
    if not 2 <= len(source.names) <= _MOST_COLUMNS or not source.delimiter.isascii():
        return None
    look = _Look(source.delimiter.encode())
    for content, _ in read_blocks(source):
        if not look.add(content):
            return None
    return look.regular(len(source.names), source.has_header)


class _Look:
    """What the bytes of a delimited file say of its quotes, lines and columns."""

    def __init__(self, delimiter: bytes) -> None:
        self.delimiter = delimiter
        self.returns: bool | None = None
        self.opened = self.irregular = self.broken = self.inside = False
        self.trimmed = self.ended = True
        # Of the whole text, and of what is not in quotes.
        self.lines, self.delimiters = [0, 0], [0, 0]

    def add(self, content: bytes) -> bool:
        """Look at a block of whole lines; False where the file is irregular whatever comes."""
        codes, mark = np.frombuffer(content, np.uint8), self.delimiter[0]
        feeds = codes == _FEED
        ends_N = np.flatnonzero(feeds)
        lengths_N = np.diff(ends_N, prepend=-1)
        unended = len(content) - int(ends_N[-1] + 1 if len(ends_N) else 0)
        longest = max(unended, int(lengths_N.max(initial=0)))
        if longest > LONGEST_LINE or b"\0" in content or not _is_utf8(content):
            return False
        returns = content.count(b"\r")
        if self.returns is None:
            self.returns = returns > 0
        if returns != (content.count(b"\r\n") if self.returns else 0) or (self.returns and returns != len(ends_N)):
            return False
        self.ended = not unended
        blank_N = ends_N[lengths_N == 1 + self.returns]
        marks = codes == mark
        delimiters = content.count(self.delimiter) if len(self.delimiter) == 2 else int(np.count_nonzero(marks))
        self._add((len(ends_N) - len(blank_N), delimiters))
        if b'"' in content or self.inside:
            quotes = self._quotes(codes)
            outside = [self._outside(quotes, at_N) for at_N in (ends_N, blank_N, np.flatnonzero(marks))]
            self.broken |= outside[0] < len(ends_N)
            self._add((outside[0] - outside[1] - len(ends_N) + len(blank_N), outside[2] - delimiters), 1)
            self.inside ^= len(quotes) % 2 == 1
        if self.trimmed:
            edges = feeds | marks | (codes == _RETURN) | (codes == _QUOTE)
            spaces = (codes <= _SPACE) & ~edges
            beside = (spaces[1:] & edges[:-1]).any() or (spaces[:-1] & edges[1:]).any()
            self.trimmed = content.isascii() and not (beside or spaces[0] or spaces[-1])
        return True

    def _add(self, counts: tuple[int, int], first: int = 0) -> None:
        for totals, count in zip((self.lines, self.delimiters), counts):
            for which in range(first, 2):
                totals[which] += count

    def _quotes(self, codes: NDArray[np.uint8]) -> Positions:
        """The positions of quotes; those that neither open nor close a field, nor stand for one, are irregular."""
        quotes = np.flatnonzero(codes == _QUOTE)
        before = np.where(quotes > 0, codes[quotes - 1], _FEED)
        after = np.where(quotes < len(codes) - 1, codes[(quotes + 1) % len(codes)], _FEED)
        begins = np.isin(before, (_FEED, self.delimiter[-1]))
        self.opened |= bool(begins.any())
        opening, closing = slice(int(self.inside), None, 2), slice(int(not self.inside), None, 2)
        self.irregular |= not (begins | (before == _QUOTE))[opening].all()
        self.irregular |= not np.isin(after, (_FEED, _RETURN, self.delimiter[0], _QUOTE))[closing].all()
        return quotes

    def _outside(self, quotes: Positions, at_N: Positions) -> int:
        """How many of these positions are not within quotes."""
        return int(np.count_nonzero((np.searchsorted(quotes, at_N) + self.inside) % 2 == 0))

    def regular(self, columns: int, has_header: bool) -> RegularCsv | None:
        quoted = self.opened
        if quoted and (self.irregular or self.inside or len(self.delimiter) == 2):
            return None
        lines = self.lines[quoted] + (not self.ended)
        if self.delimiters[quoted] != lines * (columns - 1) or self.returns is None:
            return None
        return RegularCsv(
            rows=lines - has_header,
            quoted=quoted,
            returns=self.returns,
            broken=quoted and self.broken,
            # Within quotes these may be whitespace around a text.
            trimmed=self.trimmed and not (quoted and (self.broken or self.delimiter.isspace())),
        )


def _is_utf8(content: bytes) -> bool:
    if content.isascii():
        return True
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True
