"""Reads and writes Chrome traces event by event, without holding the file in memory.

A trace is a JSON object whose `traceEvents` is a list, or that list alone, plain or gzipped. It is read in pieces, so
a file of gigabytes needs a few megabytes of memory.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from ...errors import DataError
from ...files import atomic_file, open_dataset_file, writing
from ...stop import poll
from ...units import size

Event = dict[str, Any]

PIECE = 1 << 20
"""Characters read at a time."""
LARGEST = 20 << 30
"""Characters of JSON above which a trace is refused: reading it would take more than some minutes."""
LONGEST = 8 << 20
"""Characters of an event, another value or white space above which a trace is refused: memory is bounded."""
_SPACE = re.compile(r"[ \t\r\n]*")
_LONGEST_TOKEN = 64
"""A number or literal that ends this close to the end of the text may continue in the next piece."""


class Scan:
    """One pass over a trace: `events()` yields the events; afterwards `header` holds the other fields."""

    def __init__(self, path: Path, *, piece: int = PIECE) -> None:
        self.path, self.piece = path, piece
        self.header: dict[str, Any] = {}
        self.characters = 0
        self.count = 0
        self._beside = 0
        self._decoder = json.JSONDecoder(strict=False)
        self._text = ""
        self._at = 0
        self._ended = False
        self._file: IO[str] | None = None

    def events(self) -> Iterator[Event]:
        """Every object in the list of events."""
        try:
            with _open(self.path) as self._file:
                yield from self._document()
        except (gzip.BadGzipFile, zlib.error) as error:
            raise self._error(f"the file is not intact gzip: {error}") from error
        except EOFError as error:
            raise self._truncated() from error
        except OSError as error:
            raise self._error(f"the trace cannot be read: {error.strerror or error}") from error

    def _document(self) -> Iterator[Event]:
        first = self._next()
        if first == "[":
            # The format allows a bare list without its closing bracket.
            yield from self._list(closed=False)
            return
        if first != "{":
            what = (
                "the file is empty" if not first else "the file is not a trace: it is neither a JSON object nor a list"
            )
            raise self._error(what)
        has_events = False
        while (mark := self._next()) != "}":
            if mark == ",":
                if self._peek() == ",":
                    raise self._malformed()
                continue
            if mark != '"':
                raise self._truncated() if not mark else self._malformed()
            self._at -= 1
            name = self._value()
            if self._next() != ":":
                raise self._truncated() if self._ended and self._at >= len(self._text) else self._malformed()
            if name == "traceEvents" and self._peek() == "[":
                self._at += 1
                has_events = True
                yield from self._list(closed=True)
            else:
                before = self._place()
                self.header[str(name)] = self._value()
                self._beside += self._place() - before
                if self._beside > LONGEST:
                    raise self._error(f"the fields beside the events have more than {size(LONGEST)}")
        if not has_events:
            raise self._error("the file is JSON but not a trace: it has no list traceEvents")

    def _list(self, *, closed: bool) -> Iterator[Event]:
        while (mark := self._next()) != "]":
            if mark == ",":
                if self._peek() == ",":
                    raise self._malformed()
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
        """The next character that is not whitespace, without consuming it; "" at the end."""
        blank = 0
        while True:
            text, before = self._text, self._at
            self._at = at = _SPACE.match(text, before).end()  # type: ignore[union-attr]
            if at < len(text):
                return text[at]
            blank += at - before
            if blank > LONGEST:
                raise self._error(f"the file has {size(LONGEST)} of white space in one place")
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
                # Only an error near the end of the text can disappear by reading more.
                near = error.pos >= len(self._text) - _LONGEST_TOKEN or error.msg.startswith("Unterminated string")
                if not near:
                    raise self._malformed(error) from error
                if not self._more():
                    raise self._truncated() from error
                continue
            except (RecursionError, ValueError) as error:
                # Python refuses integers of thousands of digits.
                raise self._malformed() from error
            if end > len(self._text) - _LONGEST_TOKEN and not isinstance(value, dict | list) and self._more():
                continue
            self._at = end
            return value

    def _more(self) -> bool:
        """Read another piece; False at the end of the file."""
        assert self._file is not None
        poll()
        if len(self._text) - self._at > LONGEST:
            raise self._error(f"event {self.count + 1:,} or a field beside the events has more than {size(LONGEST)}")
        new = "" if self._ended else self._file.read(max(self.piece, len(self._text) - self._at))
        if not new:
            self._ended = True
            return False
        self.characters += len(new)
        if self.characters > LARGEST:
            raise self._error(
                f"the trace has more than {size(LARGEST)} of JSON",
                fix="record fewer steps, or without stacks and memory",
            )
        self._text, self._at = self._text[self._at :] + new, 0
        return True

    def _place(self) -> int:
        """How many characters of the file are consumed."""
        return self.characters - len(self._text) + self._at

    def _truncated(self) -> DataError:
        return self._error(
            f"the trace ends in the middle, after {self.count:,} events",
            fix="copy or record it again: its program was probably stopped while it wrote the file",
        )

    def _malformed(self, error: json.JSONDecodeError | None = None) -> DataError:
        place = self._place() - self._at + (error.pos if error else self._at)
        why = f": {error.msg}" if error else ""
        return self._error(f"the trace is not valid JSON at character {place:,}{why}")

    def _error(self, what: str, fix: str | None = None) -> DataError:
        return DataError(what, where={"file": self.path}, fix=fix or "use a trace exported by torch.profiler")


def _open(path: Path) -> IO[str]:
    """Opens a plain or gzip file; its content decides which, not its name."""
    with open_dataset_file(path) as raw:  # A fifo would wait for ever.
        packed = raw.read(2) == b"\x1f\x8b"
    # Some programs write names in other encodings; one odd name must not make the trace unreadable.
    return (gzip.open if packed else open)(path, "rt", encoding="utf-8-sig", errors="replace")


def looks_like_trace(path: Path) -> bool:
    """Whether a file may be a trace, from its first megabytes; a damaged file may be one."""
    try:
        with _open(path) as file:
            head = file.read(4 * PIECE)
    except (OSError, EOFError, zlib.error):
        return True
    return head.lstrip().startswith("[") or '"traceEvents"' in head


def write_trace(target: Path, events: Iterable[Event], header: Event, *, fix: str) -> int:
    """Write a gzipped trace and return its size. The file appears complete or not at all."""
    with writing(target, fix=fix):
        target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(target, fix=fix) as raw:
        with gzip.open(raw, "wt", compresslevel=6, encoding="ascii") as file:
            file.write('{"traceEvents":[')
            separator = "\n"
            for event in events:
                file.write(separator + _text(event))
                separator = ",\n"
            file.write("\n],\n" + _text({**header, "traceName": target.name})[1:] + "\n")
        return raw.tell()


def _text(event: Event) -> str:
    try:
        return json.dumps(event, separators=(",", ":"), allow_nan=False)
    except ValueError:
        # NaN and infinity are not JSON, and viewers stop at them.
        return json.dumps(json.loads(json.dumps(event), parse_constant=lambda _: None), separators=(",", ":"))
