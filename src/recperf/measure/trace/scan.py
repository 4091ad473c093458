"""The events of a Chrome trace one after another, without holding the file in memory.

A trace is a JSON object whose `traceEvents` is a list, or that list alone. Both are read in pieces, from plain or gzip
files, so that a file of hundreds of megabytes costs a few.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from ...errors import DataError
from ...units import size

PIECE = 1 << 20
"""Characters read at a time."""
LARGEST = 4 << 30
"""Characters of JSON above which a trace is refused: records of its events would no longer fit a usual machine."""
_SPACE = " \t\r\n"
_LONGEST_TOKEN = 64
"""A number or word that ends closer than this to what was read may go on in the next piece."""


class Scan:
    """One pass over a trace. `events()` yields them; `header` then holds what stands beside them."""

    def __init__(self, path: Path, *, largest: int = LARGEST, piece: int = PIECE) -> None:
        self.path, self.largest, self.piece = path, largest, piece
        self.header: dict[str, Any] = {}
        self.characters = 0
        self.count = 0
        self._decoder = json.JSONDecoder(strict=False)
        self._text = ""
        self._at = 0
        self._ended = False
        self._file: IO[str] | None = None

    def events(self) -> Iterator[dict[str, Any]]:
        """Every event that is an object; other things in the list are not events."""
        try:
            with _opened(self.path) as self._file:
                yield from self._document()
        except (gzip.BadGzipFile, zlib.error) as error:
            raise self._error(f"the file is not intact gzip: {error}") from error
        except EOFError as error:
            raise self._truncated() from error
        except OSError as error:
            raise self._error(f"the trace cannot be read: {error.strerror or error}") from error

    def _document(self) -> Iterator[dict[str, Any]]:
        first = self._next()
        if first == "[":
            # The format lets writers leave the closing bracket out of a bare list.
            yield from self._list(closed=False)
            return
        if first != "{":
            what = "the file is empty" if not first else "the file is not a trace: it is no JSON object or list"
            raise self._error(what)
        found = False
        while (mark := self._next()) != "}":
            if mark == ",":
                continue
            if mark != '"':
                raise self._truncated() if not mark else self._malformed()
            self._at -= 1
            name = self._value()
            if self._next() != ":":
                raise self._truncated() if self._ended and self._at >= len(self._text) else self._malformed()
            if name == "traceEvents" and self._peek() == "[":
                self._at += 1
                found = True
                yield from self._list(closed=True)
            else:
                self.header[str(name)] = self._value()
        if not found:
            raise self._error("the file is JSON but no trace: it has no list called traceEvents")

    def _list(self, *, closed: bool) -> Iterator[dict[str, Any]]:
        while (mark := self._next()) != "]":
            if mark == ",":
                continue
            if not mark:
                if closed:
                    raise self._truncated()
                return
            self._at -= 1
            event = self._value()
            if isinstance(event, dict):
                self.count += 1
                yield event

    def _peek(self) -> str:
        """The next character that is not space, or "" at the end; stays before it."""
        while True:
            text, at = self._text, self._at
            while at < len(text) and text[at] in _SPACE:
                at += 1
            self._at = at
            if at < len(text):
                return text[at]
            if not self._more():
                return ""

    def _next(self) -> str:
        mark = self._peek()
        self._at += len(mark)
        return mark

    def _value(self) -> Any:
        if not self._peek():
            raise self._truncated()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                # Only a fault at the end of what was read can be cured by reading on.
                near = error.pos >= len(self._text) - _LONGEST_TOKEN or error.msg.startswith("Unterminated string")
                if not near:
                    raise self._malformed(error) from error
                if not self._more():
                    raise self._truncated() from error
                continue
            except RecursionError as error:
                raise self._malformed() from error
            if end > len(self._text) - _LONGEST_TOKEN and not isinstance(value, dict | list) and self._more():
                continue
            self._at = end
            return value

    def _more(self) -> bool:
        """Read on; false at the end of the file."""
        assert self._file is not None
        new = "" if self._ended else self._file.read(max(self.piece, len(self._text) - self._at))
        if not new:
            self._ended = True
            return False
        self.characters += len(new)
        if self.characters > self.largest:
            raise self._error(
                f"the trace is larger than {size(self.largest)} of JSON, more than is read here",
                fix="record fewer steps, or without stacks and memory",
            )
        self._text, self._at = self._text[self._at :] + new, 0
        return True

    def _truncated(self) -> DataError:
        return self._error(
            f"the trace is cut off after {self.count:,} events",
            fix="copy the file again, or record it again: its program was probably stopped while it wrote",
        )

    def _malformed(self, error: json.JSONDecodeError | None = None) -> DataError:
        place = self.characters - len(self._text) + (error.pos if error else self._at)
        why = f": {error.msg}" if error else ""
        return self._error(f"the trace is not valid JSON at character {place:,}{why}")

    def _error(self, what: str, fix: str | None = None) -> DataError:
        return DataError(what, where={"file": self.path}, fix=fix or "give a trace that torch.profiler exported")


def _opened(path: Path) -> IO[str]:
    """Text of a plain or gzip file; told apart by content, since names lie."""
    with path.open("rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
    # A few programs write names in other encodings; one odd name must not lose the trace.
    return (gzip.open if packed else open)(path, "rt", encoding="utf-8-sig", errors="replace")
