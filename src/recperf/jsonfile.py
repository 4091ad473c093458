"""Reads JSON files and validates their content against declared types with msgspec. Nothing here imports torch.

Every JSON file that recperf reads comes through here: only a regular file of bounded size and depth is parsed, so that
a damaged one always gives one line that names the file, the field and what was expected there.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta as Meta
from msgspec import Struct as Struct

from .errors import DataError
from .files import json_bytes, open_regular, plain_json, reading

T = TypeVar("T")

Number = Annotated[float, Meta(ge=-1e100, le=1e100)]
"""A finite number. No measurement is larger, and arithmetic on larger ones could overflow."""
Count = Annotated[int, Meta(ge=0, le=1 << 60)]
LARGEST = 256 << 20
"""Most bytes of a JSON file: parsed, they take ten times that."""
DEEPEST = 100
"""Most objects and arrays inside each other: code that walks over a value calls itself for each."""

_JSON_TYPES: dict[type, str] = {
    dict: "object", list: "array", str: "str", bool: "bool", int: "int", float: "float", type(None): "null",
}  # fmt: skip
_NAMES = {"int": "an integer", "float": "a number", "str": "a string", "bool": "true or false", "object": "an object",
          "array": "an array", "null": "null"}  # fmt: skip


def decode(content: bytes | bytearray) -> Any:
    """Parse JSON. NaN, infinities, text that is not UTF-8 and absurd nesting are a ValueError."""
    try:
        try:
            value = msgspec.json.decode(content)
        except ValueError as error:
            if "surrogate" not in str(error):
                raise
            # A path whose bytes are not UTF-8: Python writes each such byte as half of a surrogate pair.
            value = json.loads(content, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    # Few brackets cannot be deep, and most lines of a log have few.
    level, depth = [value] if content.count(b"{") + content.count(b"[") > DEEPEST else [], 0
    while level:
        depth += 1
        if depth > DEEPEST:
            raise ValueError("it is nested too deeply")
        nested = (one.values() if isinstance(one, dict) else one for one in level)
        level = [one for inner in nested for one in inner if isinstance(one, (dict, list))]
    return value


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def load(path: Path, *, follow_links: bool = False, named: bool = False) -> Any:
    """The content of a JSON file of a run; an OSError or a ValueError says why there is none.

    With `follow_links` it may be a link, as files of datasets may; one that the user has `named` may also be a pipe.
    """
    return decode(content_of(path, follow_links=follow_links, named=named))


def content_of(path: Path, *, follow_links: bool = False, named: bool = False) -> bytes:
    """The bytes of such a file."""
    with open(open_regular(Path(os.path.realpath(path)) if follow_links else path, named=named), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        # A pipe has no size.
        content = file.read((size or LARGEST) + 1) if size <= LARGEST else b""
    if max(size, len(content)) > LARGEST:
        raise ValueError(f"it has more than {LARGEST >> 20} MiB")
    return content


def read(path: Path, *, follow_links: bool = False, named: bool = False) -> Any:
    """The content of a JSON file as `load` gives it; a file that cannot be read is an error."""
    try:
        with reading(path):
            return load(path, follow_links=follow_links, named=named)
    except ValueError as error:
        raise DataError(f"{path.name} is not JSON: {error}", where={"file": path}) from None


def sealed(record: Any) -> dict[str, Any]:
    """The content of a file with a digest of itself, so that no byte of it can change unnoticed."""
    value: dict[str, Any] = as_json(record)
    content = json.dumps(value, sort_keys=True).encode()
    return {**value, "seal": hashlib.sha256(content).hexdigest()}


def unsealed(value: Any) -> dict[str, Any]:
    """The content of a file that was written as `sealed`, without its seal; a ValueError says that it was changed."""
    if not isinstance(value, dict):
        raise ValueError("it is not an object")
    content = {name: one for name, one in value.items() if name != "seal"}
    if "seal" not in value:
        raise ValueError("it has no seal; files of earlier versions have none")
    if sealed(content)["seal"] != value["seal"]:
        raise ValueError("it was changed after it was written")
    return content


def require_unchanged(value: Any, path: Path) -> None:
    """Refuse the content of a file that was written as `sealed` and changed since."""
    try:
        unsealed(value)
    except ValueError as error:
        what = f"{path.name} is damaged: {error}"
        raise DataError(what, where={"file": path}, fix="restore the file, or measure again") from None


def read_sealed(path: Path, form: tuple[str, int], kind: type[T], *, fix: str) -> T:
    """The content of a dataset's file that was written as `sealed`, with a format and a version, as `kind`."""
    try:
        with reading(path):
            content = content_of(path, follow_links=True)
        value = decode(content)
        if not isinstance(value, dict):
            raise ValueError("it is not an object")
        stated = value.get("format"), value.get("version")
        if stated != form:
            names = [" ".join(map(shorten, pair)) for pair in (stated, form)]
            raise DataError(f"{path.name} has format {names[0]}; this recperf reads {names[1]}")
        record = require({**value, "seal": None}, kind, path, what="is damaged")
        if json_bytes({**unsealed(value), "seal": value["seal"]}) != content:
            raise ValueError("it was changed after it was written")
    except ValueError as error:
        raise DataError(f"{path.name} is damaged: {error}", where={"file": path}, fix=fix) from None
    except DataError as error:
        raise DataError(error.what, where={"file": path}, fix=fix) from None
    return record


@dataclass(frozen=True)
class Problem:
    """The first place at which a value does not fit its declared type."""

    path: tuple[str, ...]
    expected: str
    """What would fit, such as "an integer or null"; empty if the field is missing."""
    value: Any = None

    @property
    def field(self) -> str:
        return ".".join(self.path)

    def __str__(self) -> str:
        if not self.expected:
            return f"{self.field} is missing"
        if self.expected == "unknown":
            return f"{self.field} is not a known field"
        name = _NAMES[_JSON_TYPES[type(self.value)]]
        shown = name if isinstance(self.value, (dict, list)) else shorten(self.value)
        return f"{self.field or 'it'} should be {self.expected}, is {shown}"


def shorten(value: Any) -> str:
    """A value for an error message: at most 60 characters, and no huge number in full."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 1 << 60:
        return "a number of many digits"
    text = repr(value) if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def fit(value: Any, kind: type[T], *, strict: bool = False) -> T | Problem:
    """The value as `kind`, or the first problem. `strict` also refuses fields that `kind` does not declare."""
    try:
        built = msgspec.convert(value, kind, dec_hook=_decode_path)
    except msgspec.ValidationError as error:
        return _problem(str(error), value)
    except UnicodeEncodeError:
        # JSON can escape half of a character, as "\\ud800".
        return Problem((), "valid Unicode", None)
    unknown = _unknown_field(value, built) if strict else None
    return built if unknown is None else Problem(unknown, "unknown")


def as_json(value: Any) -> Any:
    """A record, or what holds records, as objects, arrays and numbers."""
    return msgspec.to_builtins(value, enc_hook=plain_json)


def require(value: Any, kind: type[T], path: Path, *, what: str, at: str = "", fix: str | None = None) -> T:
    """The content of a file, or the part of it under `at`, as `kind`; an error names the file and the field."""
    fitted = fit(value, kind)
    if isinstance(fitted, Problem):
        fitted = replace(fitted, path=(at, *fitted.path)) if at else fitted
        raise DataError(f"{path.name} {what}: {fitted}", where={"file": path}, fix=fix)
    return fitted


def _decode_path(kind: type, value: Any) -> Any:
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise ValueError("Expected `str`")


def _problem(message: str, value: Any) -> Problem:
    """msgspec's message, such as "Expected `int`, got `str` - at `$.seeds[0].step`", in parts."""
    text, _, place = message.partition(" - at `$")
    got, missing = re.search(r"got `(.+)`", text), re.match(r"Object missing required field `(\w+)`", text)

    def at_fault(item: Any) -> bool:
        if missing:
            return isinstance(item, dict) and missing[1] not in item
        if got:
            return _JSON_TYPES[type(item)] == got[1]
        return isinstance(item, (int, float)) and not abs(item) <= 1e100

    steps = [name or index for name, index in re.findall(r"\.(\w+)|\[(\d+|\.\.\.)\]", place)]
    places = list(_places(steps, value))
    path, inner = next((place for place in places if at_fault(place[1])), places[0])
    if missing:
        return Problem((*path, missing[1]), "")
    expected = re.match(r"Expected `([^`]+)`(?:, got| ([<>]=) (\S+))?", text)
    if not expected:
        return Problem(path, "a number" if "out of range" in text else "another value", inner)
    names = " or ".join(_NAMES.get(name, name) for name in expected[1].split(" | "))
    if length := re.search(r"of length (>= )?(\d+)", text):
        names += " that is not empty" if length[1] else f" of {length[2]}"
    if expected[2] and "e+100" not in expected[3]:
        names += f" {'at least' if expected[2] == '>=' else 'at most'} {expected[3]}"
    return Problem(path, names, inner)


def _places(steps: list[str], value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every place that a path of msgspec may mean, which writes `...` for any key of a mapping, with its value."""
    if not steps:
        yield (), value
        return
    head, *rest = steps
    keys = list(value) if head == "..." else [int(head) if isinstance(value, list) else head]
    for key in keys:
        item = value.get(key) if isinstance(value, dict) else value[key]
        for path, inner in _places(rest, item):
            yield (str(key), *path), inner


def _unknown_field(value: Any, built: Any) -> tuple[str, ...] | None:
    """The path of the first field that the declared type does not have."""
    if isinstance(value, dict):
        declared = getattr(built, "__dataclass_fields__", None) or getattr(built, "__struct_fields__", None)
        inner = {key: (built[key] if declared is None else getattr(built, key, None)) for key in value}
        unknown = [key for key in value if declared is not None and key not in declared]
        if unknown:
            return (unknown[0],)
    elif isinstance(value, list) and isinstance(built, (list, tuple)):
        inner = {str(index): item for index, item in enumerate(built)}
        value = {str(index): item for index, item in enumerate(value)}
    else:
        return None
    for key, item in value.items():
        path = _unknown_field(item, inner[key])
        if path:
            return (key, *path)
    return None
