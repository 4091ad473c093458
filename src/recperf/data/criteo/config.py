"""Config of Criteo click logs. Torch-free, for a fast `--help` and `show`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ... import places
from ...config import require, within

DENSE = 13
SPARSE = 26
KEYS = tuple(f"c{number}" for number in range(1, SPARSE + 1))
MOST_ROWS = (1 << 31) - 1
"""Ids are stored as int32."""


@dataclass(frozen=True, kw_only=True)
class CriteoConfig:
    path: Path | None = None
    """The click log: a file, a folder with train.txt (Kaggle), or a folder with day_0, day_1, ... (Terabyte), plain or
    gzipped. Nothing is downloaded."""
    layout: Literal["auto", "kaggle", "terabyte"] = "auto"
    """Layout of the files; auto decides by their names."""
    rows: tuple[int, ...] = (100_000,)
    """Rows of the 26 tables, or one number for all. Categories are hashed to 1 .. rows - 1; row 0 is for missing
    ones."""
    hash_seed: int = 0
    """Seed of the hashes; every feature has its own stream."""
    on_error: Literal["stop", "skip"] = "stop"
    """What to do with a malformed line: stop with an error, or skip and count it."""
    holdout: float = 1 / 7
    """Share of the last rows used for validation. With several days the last day is used instead."""
    cache: Path | None = None
    """Folder of the converted arrays; default: the user's cache folder."""

    def __post_init__(self) -> None:
        require(len(self.rows) in (1, SPARSE), "criteo.rows", self.rows, f"one number, or {SPARSE}")
        for rows in self.rows:
            within(2, rows, MOST_ROWS, "criteo.rows")
        within(0, self.hash_seed, 1 << 53, "criteo.hash_seed")
        require(0.0 < self.holdout < 1.0, "criteo.holdout", self.holdout, "above 0 and below 1")

    @property
    def table_rows(self) -> tuple[int, ...]:
        """Rows of each of the 26 tables."""
        return self.rows if len(self.rows) == SPARSE else self.rows * SPARSE

    @property
    def cache_folder(self) -> Path:
        return self.cache if self.cache is not None else places.home() / "criteo"
