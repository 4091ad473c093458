"""What a user may choose about made-up bags of ids, and the files that say how often each id occurs. Torch-free."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..config import require, within
from ..errors import ConfigError, DataError
from ..files import write_atomic

Counts = Mapping[str, Mapping[int, int]]
"""How often each id of each feature occurs."""

MOST_IDS_A_BAG = 1 << 16
MOST_DISTINCT = 8
"""Ids a bag may have where repeats are dropped: each is compared with each before it, on every device."""
CSV_COLUMNS = ["feature", "id", "count"]
MOST_COUNT = 1 << 53
"""Counts above this are not exact in the JSON of other programs."""


@dataclass(frozen=True, kw_only=True)
class RandomBagsConfig:
    ids: Literal["uniform", "gaussian", "zipf", "replay"] = "uniform"
    """How ids are drawn: all alike, around the middle of a table, by a power law, or as often as a profile says."""
    ids_per_bag: int = 1
    """Most ids of a bag; a table with fewer rows has bags of at most as many ids as rows."""
    fixed: bool = False
    """Every bag has its most ids. Otherwise the length of a bag is round(max(1, u * most)), u uniform in [0, 1)."""
    ids_per_feature: tuple[int, ...] = ()
    """Most ids of a bag, feature by feature, in place of ids_per_bag."""
    distinct: bool = False
    """Drop repeated ids of a bag, which then may be shorter; only where no bag has more than 8 ids."""
    exponent: float = 1.05
    """With ids zipf: the k-th most popular id has a share proportional to k to the minus this."""
    mean: float = 0.5
    """With ids gaussian: the middle, as a share of the table."""
    deviation: float = 0.15
    """With ids gaussian: the standard deviation, as a share of the table; ids outside become the first or the last."""
    profile: Path | None = None
    """With ids replay: a JSON file {"features": {name: [[id, count], ...]}} or a CSV file feature,id,count."""
    batches: int = 100
    """Batches an epoch has."""
    held_out_batches: int = 8
    """Batches that are scored and never trained on."""

    def __post_init__(self) -> None:
        require(self.ids in ("uniform", "gaussian", "zipf", "replay"), "data.ids", self.ids, "uniform to replay")
        within(1, self.ids_per_bag, MOST_IDS_A_BAG, "data.ids_per_bag")
        for index, most in enumerate(self.ids_per_feature):
            within(1, most, MOST_IDS_A_BAG, f"data.ids_per_feature.{index}")
        within(0.01, self.exponent, 20.0, "data.exponent")
        within(-10.0, self.mean, 10.0, "data.mean")
        within(0.0, self.deviation, 1000.0, "data.deviation")
        require(
            (self.profile is not None) == (self.ids == "replay"),
            "data.profile",
            str(self.profile),
            "a file with data.ids replay, none otherwise",
        )
        within(1, self.batches, 1 << 30, "data.batches")
        within(1, self.held_out_batches, 1 << 20, "data.held_out_batches")

    def most_ids(self, rows: tuple[int, ...]) -> tuple[int, ...]:
        """The most ids a bag of each feature has, given the rows of the tables."""
        wanted = self.ids_per_feature or (self.ids_per_bag,) * len(rows)
        require(
            len(wanted) == len(rows), "data.ids_per_feature", self.ids_per_feature, f"none, or one for each of the "
            f"{len(rows)} features",
        )  # fmt: skip
        most = tuple(min(ids, table) for ids, table in zip(wanted, rows))
        if self.distinct and max(most) > MOST_DISTINCT:
            raise ConfigError(
                f"data.distinct is true, and a bag may have {max(most)} ids; at most {MOST_DISTINCT} can be compared",
                where={"field": "data.distinct"},
                fix=f"--data.no-distinct, or --data.ids-per-bag {MOST_DISTINCT}",
            )
        return most


def write_profile(path: Path, counts: Counts) -> None:
    """A profile for `ids replay`, as CSV or JSON by the name of the file."""
    if path.suffix == ".csv":
        lines = [",".join(CSV_COLUMNS)]
        lines += [f"{name},{index},{count}" for name, ids in counts.items() for index, count in ids.items()]
        write_atomic(path, ("\n".join(lines) + "\n").encode())
        return
    features = {name: [[index, count] for index, count in ids.items()] for name, ids in counts.items()}
    write_atomic(path, (json.dumps({"features": features}) + "\n").encode())


def read_profile(path: Path, rows: Mapping[str, int]) -> dict[str, dict[int, int]]:
    """How often each id of the given features occurs; ids of a feature with R rows are 0 to R - 1.

    Features the file has beyond the given ones are checked for their form and left out.
    """
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the profile of ids: {error}", where={"file": path}, fix="data.profile") from None
    found: dict[str, dict[int, int]] = {}
    entries = _csv_entries(path, content) if path.suffix == ".csv" else _json_entries(path, content)
    for where, name, index, count in entries:
        kept = found.setdefault(name, {})
        _check(index not in kept, f"id {index} of feature {name!r} is given twice", where)
        _check(0 <= count <= MOST_COUNT, f"count {count} of id {index} of feature {name!r} is outside 0 to 2^53", where)
        table = rows.get(name)
        _check(
            table is None or 0 <= index < table,
            f"id {index} of feature {name!r} is outside its table of {table} rows",
            where,
        )
        kept[index] = count
    for name in rows:
        _check(any(found.get(name, {}).values()), f"feature {name!r} has no id that occurs", {"file": path})
    return {name: found[name] for name in rows}


Entry = tuple[dict[str, object], str, int, int]


def _check(holds: bool, what: str, where: dict[str, object]) -> None:
    if not holds:
        raise DataError(
            what, where=where, fix="correct the file, or write it anew with data.random_config.write_profile"
        )


def _csv_entries(path: Path, content: str) -> Iterator[Entry]:
    lines: Iterable[list[str]] = csv.reader(content.splitlines())
    for number, words in enumerate(lines, 1):
        where: dict[str, object] = {"file": path, "line": number}
        if number == 1:
            _check(words == CSV_COLUMNS, f"the first line is {','.join(words)!r}, not 'feature,id,count'", where)
            continue
        _check(len(words) == 3, f"{len(words)} columns instead of 3", where)
        try:
            index, count = int(words[1]), int(words[2])
        except ValueError:
            _check(False, f"{','.join(words[1:])!r} are not two whole numbers", where)
        yield where, words[0], index, count


def _json_entries(path: Path, content: str) -> Iterator[Entry]:
    where: dict[str, object] = {"file": path}
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", None)
        _check(False, f"not JSON: {error}", where | ({"line": line} if line else {}))
    features: Any = value.get("features") if isinstance(value, dict) else None
    _check(isinstance(features, dict), 'no object "features" at the top', where)
    for name, pairs in features.items():
        _check(isinstance(pairs, list), "not a list of [id, count]", where | {"feature": name})
        for place, pair in enumerate(pairs):
            at = where | {"feature": name, "entry": place}
            whole = isinstance(pair, list) and len(pair) == 2 and all(type(part) is int for part in pair)
            _check(whole, f"{json.dumps(pair)[:80]} is not [id, count] in whole numbers", at)
            yield at, name, pair[0], pair[1]
