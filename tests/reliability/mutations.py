"""Random damage to files: what disks, incomplete copies and manual edits do."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chaos_foreign import FOREIGN

from recperf.folders import LOCK, MARK

VALUES: list[Any] = [None, 0, -1, 7, 1e300, 0.5, "", "x", "step-00000012", [], {}, True, [[1]], {"a": 1}, 1 << 70]


def flip(content: bytes, draw: random.Random) -> bytes:
    """Flip one bit."""
    place = draw.randrange(len(content))
    return content[:place] + bytes([content[place] ^ 1 << draw.randrange(8)]) + content[place + 1 :]


def truncate(content: bytes, draw: random.Random) -> bytes:
    return content[: draw.choice([0, len(content) // 2, len(content) - 1, draw.randrange(len(content))])]


def extend(content: bytes, draw: random.Random) -> bytes:
    return content + draw.choice([b"\0", b"\n", b"{}\n", content, draw.randbytes(100)])


def zero(content: bytes, draw: random.Random) -> bytes:
    """Set everything after some byte to zero, as a power failure leaves blocks that were never written."""
    start = draw.choice([0, draw.randrange(len(content))])
    return content[:start] + bytes(len(content) - start)


def edit(content: bytes, draw: random.Random) -> bytes:
    """Change, rename or remove one value of JSON, or of one line of JSON lines."""
    lines = content.splitlines(keepends=True)
    by_line = len(lines) > 1 and lines[0].rstrip().endswith(b"}")
    place = draw.randrange(len(lines)) if by_line else 0
    text = lines[place] if by_line else content
    start = text.find(b"{")
    value = json.loads(text[start:])
    _change(value, draw)
    if not by_line:
        return json.dumps(value, indent=2).encode() + b"\n"
    lines[place] = text[:start] + json.dumps(value).encode() + b"\n"
    return b"".join(lines)


def _change(value: Any, draw: random.Random) -> None:
    """Change a value at a random depth."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = draw.choice(keys)
    if isinstance(value[key], (dict, list)) and value[key] and draw.random() < 0.8:
        _change(value[key], draw)
        return
    way = draw.randrange(4)
    if way == 0 or isinstance(value, list):
        value[key] = draw.choice(VALUES)
    elif way == 1:
        del value[key]
    elif way == 2:
        value[f"{key}x"] = value.pop(key)
    elif isinstance(value[key], (int, float)):
        value[key] = value[key] + draw.choice([1, -1, 0.25])
    else:
        value[key] = draw.choice(VALUES)


def flips(content: bytes, draw: random.Random) -> bytes:
    """Overwrite some bytes, far apart."""
    changed = bytearray(content)
    for _ in range(draw.randrange(2, 100)):
        changed[draw.randrange(len(changed))] = draw.randrange(256)
    return bytes(changed)


def empty(content: bytes, draw: random.Random) -> bytes:
    return b""


def nest(content: bytes, draw: random.Random) -> bytes:
    """JSON nested 100,000 deep, which a parser that calls itself for every level cannot read."""
    begin, end = draw.choice([(b"[", b"]"), (b'{"a":', b"}")])
    return begin * 100_000 + b"1" + end * draw.choice([100_000, 0])


RAW = {"flip": flip, "flips": flips, "truncate": truncate, "extend": extend, "zero": zero, "empty": empty}
WAYS: dict[str, Callable[[bytes, random.Random], bytes]] = {**RAW, "edit": edit, "nest": nest}


def files_in(folder: Path) -> list[Path]:
    """Every file in a folder, except locks, whose content means nothing, and a user's own files."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.is_file()
        and path.suffix != ".lock"
        and path.name not in (LOCK, MARK, "lock")
        and not any(path.match(name) for name in FOREIGN)
    )


def damage(files: list[Path], draw: random.Random, foreign: Path, *, devices: bool = True) -> str:
    """Damage one of the files, or exchange two; a link may lead to a foreign file. Returns a description."""
    path = draw.choice(files)
    name = f"{path.parent.name}/{path.name}"
    ways = [*RAW, "delete", "swap", "link", "folder", *["fifo"] * devices]
    ways += ["edit"] * 4 + ["nest"] if path.suffix in (".json", ".jsonl") else []
    way = draw.choice(ways)
    content = path.read_bytes()
    if way in WAYS and content:
        path.write_bytes(WAYS[way](content, draw))
        return f"{way} in {name}"
    if way == "swap" and len(files) > 1:
        other = draw.choice([one for one in files if one != path])
        others = other.read_bytes()
        other.write_bytes(content)
        path.write_bytes(others)
        return f"{name} and {other.parent.name}/{other.name} exchanged"
    path.unlink()
    if way == "fifo":
        os.mkfifo(path)
    elif way == "folder":
        path.mkdir()
    elif way == "link":
        path.symlink_to(draw.choice([foreign, path, path.with_name("nothing"), *[Path("/dev/zero")] * devices]))
        return f"{name} is a link to {path.readlink().name}"
    return f"{name} {'deleted' if way in ('delete', 'swap', *WAYS) else f'is a {way}'}"
