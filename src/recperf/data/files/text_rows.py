"""Rows of a text file of a user in blocks, and which of them are bad. numpy finds rows without reading their fields.

Rows end as Python's csv module ends them: a line break within quotes is part of a field. A quote opens a field only at
its beginning, and the field ends with the quote that closes it; quotes anywhere else are refused, unless no field of a
block begins with one: then they are ordinary characters.

Shapes: N rows of a block.
"""

from __future__ import annotations

import gzip
from bisect import bisect_right
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from ...files import open_dataset_file
from ...jsonfile import Struct
from ...stop import poll
from .file import BOM, LONGEST_LINE, READ_ERRORS, Source, bad_file, unreadable

BLOCK = 12 << 20
"""Bytes of text that are read at once: DuckDB is faster with more rows than its row groups have, 122,880."""
NOT_UTF8 = " is not UTF-8 text", "convert it to UTF-8"
_LISTED = 20
"""Bad rows that a description of an import lists."""
_FEED, _RETURN, _QUOTE, _SPACE = b'\n\r" '

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


@dataclass(frozen=True, kw_only=True, eq=False)
class TextBlock:
    """Rows of a file, without blank and bad ones."""

    content: bytes
    """Each row ends with a line feed."""
    ends_N: Positions
    """Where in `content` each row ends."""
    numbers_N: Positions
    """The number of each row in the file, from 1; blank lines do not count."""
    quoted: bool
    """Whether some field is in quotes."""
    trimmed: bool
    """Whether no field has whitespace around it or is an empty text in quotes."""
    bytes_read: int
    """Bytes of the file on disk read so far."""


def read_blocks(source: Source, bad: BadRows) -> Generator[TextBlock, None, None]:
    """The rows of a text file after its header; bad ones are left out and recorded."""
    number, rest = 0 if source.has_header else 1, b""
    with open_dataset_file(source.path) as file:
        stream = gzip.GzipFile(fileobj=file) if source.gzipped else file
        text, first = b"begin", True
        while text:
            poll()
            try:
                text = stream.read(BLOCK)
                # A carriage return and its line feed stay together.
                while text.endswith(b"\r") and (more := stream.read(1)):
                    text += more
            except READ_ERRORS as error:
                raise unreadable(source.path, error) from None
            content = rest + (text.removeprefix(BOM) if first else text)
            first = False
            if not text and content and not content.endswith((b"\n", b"\r")):
                content += b"\n"
            rows = _Rows(content, source, number)
            rest = content[rows.end :]
            rows.require_legal(is_last=not text)
            if rows.end:
                block, number = rows.checked(bad, file.tell())
                yield block


class _Rows:
    """The whole rows at the beginning of a text; `number` is that of the first, 0 for a header."""

    def __init__(self, content: bytes, source: Source, number: int) -> None:
        self.source = source
        codes = np.frombuffer(content, np.uint8)
        self.quotes = np.zeros(0, np.int64)
        if source.delimited and b'"' in content:
            quotes = np.flatnonzero(codes == _QUOTE)
            before = codes[quotes - 1]
            opens = (quotes == 0) | np.isin(before, [_FEED, _RETURN, ord(source.delimiter[-1])])
            self.quotes = quotes if opens.any() else self.quotes
        feeds = np.flatnonzero(codes == _FEED)
        if b"\r" in content:
            returns = self._outside(np.flatnonzero(codes == _RETURN))
            pairs = returns[codes[np.minimum(returns + 1, len(codes) - 1)] == _FEED]
            feeds = np.union1d(feeds, np.setdiff1d(returns, pairs, assume_unique=True))
        feeds = self._outside(feeds)
        self.end = int(feeds[-1]) + 1 if len(feeds) else 0
        """Where in the text the last row ends."""
        self.unended = len(content) - self.end
        self.codes, self.ends_N = codes[: self.end], feeds + 1
        self.quotes = self.quotes[self.quotes < self.end]
        if b"\r" in content and self.end:
            self._only_feeds(returns[returns < self.end], pairs)
        self.filled_N = np.diff(self.ends_N, prepend=0) > 1
        self.numbers_N = number - 1 + np.cumsum(self.filled_N)
        """The number of each row; that of a blank one is that of the row before it."""
        self.next = int(self.numbers_N[-1]) + 1 if len(self.ends_N) else number

    def _outside(self, at_N: Positions) -> Positions:
        """Those positions that are not within quotes."""
        return at_N[np.searchsorted(self.quotes, at_N) % 2 == 0] if len(self.quotes) else at_N

    def _only_feeds(self, returns: Positions, pairs: Positions) -> None:
        """End all rows with a line feed only."""
        codes = self.codes.copy()
        codes[returns] = _FEED
        dropped = pairs[pairs < self.end]
        self.codes = np.delete(codes, dropped)
        self.ends_N = self.ends_N - np.searchsorted(dropped, self.ends_N)
        self.quotes = self.quotes - np.searchsorted(dropped, self.quotes)

    def require_legal(self, *, is_last: bool) -> None:
        """Refuse a row that is too long, and quotes that DuckDB and Python could read in different ways."""
        long_N = np.flatnonzero(np.diff(self.ends_N, prepend=0) > LONGEST_LINE + 1)
        if len(long_N) or self.unended > LONGEST_LINE:
            row = int(self.numbers_N[long_N[0]]) if len(long_N) else self.next
            what = f"row {row:,} does not end within {LONGEST_LINE:,} characters"
            raise bad_file(self.source.path, what, "end every line, and look for a quote without its pair")
        opening, closing = self.quotes[::2], self.quotes[1::2]
        allowed = [_FEED, _QUOTE, ord(self.source.delimiter[-1])]
        wrong = np.concatenate(
            [
                opening[(opening > 0) & ~np.isin(self.codes[opening - 1], allowed)],
                closing[~np.isin(self.codes[closing + 1], allowed)],
            ]
        )
        if len(wrong) or (is_last and self.unended):
            at = np.searchsorted(self.ends_N, wrong.min(), side="right") if len(wrong) else 0
            row = int(self.numbers_N[at]) if len(wrong) else self.next
            why = "text beside the quotes of a field" if len(wrong) else "a quote without its pair"
            raise bad_file(self.source.path, f"row {row:,} is not valid CSV: {why}", 'write a " within quotes as ""')

    def checked(self, bad: BadRows, bytes_read: int) -> tuple[TextBlock, int]:
        """The rows without blank and bad ones, and the number of the row after them."""
        content, numbers_N = self.codes.tobytes(), self.numbers_N
        kept_N = self.filled_N & (numbers_N > 0)
        for at, (what, fix) in sorted(self._faults(content, kept_N, bad.room + 1).items()):
            bad.add(int(numbers_N[at]), what, fix)
            kept_N[at] = False
        lengths_N = np.diff(self.ends_N, prepend=0)
        if not kept_N.all():
            content = self.codes[np.repeat(kept_N, lengths_N)].tobytes()
        block = TextBlock(
            content=content,
            ends_N=np.cumsum(lengths_N[kept_N]),
            numbers_N=numbers_N[kept_N],
            quoted=bool(len(self.quotes)),
            trimmed=not len(self.quotes) and content.isascii() and not self._has_spaces(),
            bytes_read=bytes_read,
        )
        return block, self.next

    def _faults(self, content: bytes, kept_N: NDArray[np.bool_], most: int) -> dict[int, tuple[str, str]]:
        """What is wrong with rows, by their position in the block: all, or the first `most` of a kind."""
        faults: dict[int, tuple[str, str]] = {}
        if b"\0" in content:
            for at in np.searchsorted(self.ends_N, np.flatnonzero(self.codes == 0)[: 2 * most], side="right").tolist():
                faults[at] = " has a NUL byte", "write the file again, as text"
        start = 0
        for _ in range(most):
            try:
                content[start:].decode()
                break
            except UnicodeDecodeError as error:
                at = int(np.searchsorted(self.ends_N, start + error.start, side="right"))
                faults[at], start = NOT_UTF8, int(self.ends_N[at])
        if self.source.delimited:
            columns_N, width = self._columns(), len(self.source.names)
            for at in np.flatnonzero((columns_N != width) & kept_N)[:most].tolist():
                what = f" has {columns_N[at]} columns; the first line has {width}"
                faults[at] = what, "repair that row, or set --delimiter"
        return {at: fault for at, fault in faults.items() if kept_N[at]}

    def _has_spaces(self) -> bool:
        """Whether whitespace of ASCII lies beside a delimiter or the end of a row."""
        mark = ord(self.source.delimiter[0])
        spaces = np.flatnonzero((self.codes <= _SPACE) & (self.codes != _FEED) & (self.codes != mark))
        beside = self.codes[np.concatenate([spaces - 1, spaces + 1])]
        return bool(((beside == _FEED) | (beside == mark)).any())

    def _columns(self) -> Positions:
        mark = self.source.delimiter
        marks = self._outside(np.flatnonzero(self.codes == ord(mark[0])))
        if len(mark) == 2:
            # Of the marks of a run every second one begins a delimiter.
            begins = np.flatnonzero(np.diff(marks, prepend=-2) > 1)
            lengths = np.diff(np.append(begins, len(marks)))
            within = np.arange(len(marks)) - np.repeat(begins, lengths)
            marks = marks[(within % 2 == 0) & (within + 1 < np.repeat(lengths, lengths))]
        return np.diff(np.searchsorted(marks, self.ends_N), prepend=0) + 1
