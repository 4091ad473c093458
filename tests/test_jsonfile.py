"""Damaged JSON: every file that describes data or a machine is refused with one line, and none is half believed."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recperf import locations
from recperf.cli import main
from recperf.data.config import SplitConfig
from recperf.data.datasets import at
from recperf.data.rows import encode
from recperf.data.rows.imported import ImportedClicks
from recperf.errors import RecperfError
from recperf.files import json_bytes
from recperf.measure import peaks
from recperf.measure.peaks.sampling import TINY

DEEP = 100_000
OTHERS: list[Any] = [None, -1, 1e300, "x", [], {}, True]


@dataclass(frozen=True)
class Described:
    """A file, and everything that opens it."""

    path: Path
    opens: tuple[Callable[[], object], ...]


def clicks_csv(path: Path) -> Path:
    draw = np.random.default_rng(5)
    rows = (f"{draw.integers(9)},{draw.integers(7)},{draw.normal():.3f},{draw.integers(2)}" for _ in range(300))
    path.write_text("\n".join(["who,what,price,clicked", *rows]) + "\n")
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Described]:
    place = tmp_path_factory.mktemp("described")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RECPERF_HOME", str(place / "home"))
        arguments = ["--user", "who", "--item", "what", "--numeric", "price", "--name", "shop", "--quiet"]
        path = clicks_csv(place / "shop.csv")
        assert main(["data", "import", str(path), "--clicks", "--label", "clicked", *arguments]) == 0
        measured = peaks.measure_with(TINY, quick=True, say=lambda _: None)
        ceilings = peaks.save(measured)
        folder = locations.dataset_folder("shop") / "clicks"

    def load() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RECPERF_HOME", str(place / "home"))
            peaks.load(measured.machine)

    return {
        "clicks": Described(
            folder / "clicks.json",
            (
                lambda: encode.check(folder),
                lambda: encode.info(folder),
                lambda: ImportedClicks(folder, SplitConfig()),
                lambda: at(folder).rows,
            ),
        ),
        "ceilings": Described(ceilings, (load,)),
    }


@pytest.fixture
def described(request: pytest.FixtureRequest, made: dict[str, Described]) -> Iterator[Described]:
    one = made[request.param]
    content = one.path.read_bytes()
    yield one
    if one.path.is_dir():
        one.path.rmdir()
    one.path.unlink(missing_ok=True)
    one.path.write_bytes(content)


every = pytest.mark.parametrize("described", ["clicks", "ceilings"], indirect=True)


def refused(one: Described) -> str:
    for opens in one.opens:
        with pytest.raises(RecperfError) as caught:
            opens()
        text = "\n".join(caught.value.lines())
        # Ceilings that cannot be read may be intact: they are not replaced.
        assert caught.value.exit_code == (4 if "ceilings cannot be read" in text else 3)
        assert "\n" not in caught.value.what
        assert one.path.name in text
        assert len(caught.value.what) < 400
    return text


def changed(value: Any) -> Iterator[tuple[str, Any]]:
    """Every value with one field of another type or value, without it, or under another name."""
    if not isinstance(value, (dict, list)):
        others = [*OTHERS, value + 1 if isinstance(value, (int, float)) else f"{value}x"]
        yield from (("", other) for other in others if other != value or type(other) is not type(value))
        return
    places = list(value) if isinstance(value, dict) else range(len(value))[:2]
    for place in places:
        for path, inner in changed(value[place]):
            copy = dict(value) if isinstance(value, dict) else list(value)
            copy[place] = inner  # type: ignore[index]
            yield f".{place}{path}", copy
    if isinstance(value, dict):
        for place in places:
            rest = {key: inner for key, inner in value.items() if key != place}
            yield f".{place} removed", rest
            yield f".{place} renamed", {**rest, f"{place}x": value[place]}
    elif value[::-1] != value:
        yield " reversed", value[::-1]


@every
def test_every_changed_field_is_refused(described: Described) -> None:
    value, count = json.loads(described.path.read_bytes()), 0
    variants = list(changed(value))
    # Of hundreds of figures, every one in some way.
    for name, variant in variants[:: max(1, len(variants) // 300)]:
        described.path.write_bytes(json_bytes(variant))
        count += 1
        try:
            refused(described)
        except BaseException:
            print(name)
            raise
    assert count > 100


@every
def test_damaged_bytes_are_refused(described: Described) -> None:
    content = described.path.read_bytes()
    step = max(1, len(content) // 300)
    flipped = [content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :] for at in range(0, len(content), step)]
    number = re.sub(rb'("(?:rows|threads)": )\d+', rb"\1NaN", content, count=1)
    others = [
        b"", b"\0" * 100, b"\xff\xfe", content[:-3], content[: len(content) // 2], content + b"{}", b"[]", b"1", number,
        content.replace(b'"rows": ', b'"rows": Infinity, "row_s": ', 1), content[:-2] + b', "seal": "x"}', b"null",
        b"[" * DEEP + b"]" * DEEP, b'{"a":' * DEEP + b"1" + b"}" * DEEP, b'{"parts": ' + b"[" * 300 + b"]" * 300 + b"}",
        content.replace(b"{", b'{"columns": ' + b"[" * 500 + b"]" * 500 + b",", 1), b'{"schema": ' + b"9" * 5000 + b"}",
    ]  # fmt: skip
    for damaged in (*flipped, *others):
        if damaged != content and json_or_none(damaged) != json_or_none(content):
            described.path.write_bytes(damaged)
            refused(described)


def json_or_none(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


@every
@pytest.mark.parametrize("kind", ["fifo", "folder", "device", "dangling", "huge"])
def test_what_is_not_a_regular_file_is_refused_at_once(described: Described, kind: str) -> None:
    described.path.unlink()
    if kind == "fifo":
        os.mkfifo(described.path)
    elif kind == "folder":
        described.path.mkdir()
    elif kind == "huge":
        described.path.touch()
        os.truncate(described.path, 1 << 40)
    else:
        described.path.symlink_to("/dev/zero" if kind == "device" else "nowhere")
    assert {"huge": "more than 256 MiB", "folder": "folder"}.get(kind, "cannot") in refused(described)
