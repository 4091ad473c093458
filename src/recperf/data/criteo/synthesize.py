"""A synthetic click log in Criteo's format, with labels that can be learned and missing values as in the real logs.

The categories of the first line are a mark that identifies the data as synthetic, whatever the file is called.

Shapes: N lines, F = 26 categories, D = 13 numbers.
"""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from ...config import require
from ...errors import UsageError
from ...files import atomic_file, writing
from ...ops.hashing import hash_numpy
from .config import DENSE, SPARSE

MARK = b"\t".join(
    hashlib.sha256(b"recperf: made up, not Criteo's, %d" % feature).hexdigest()[:8].encode()
    for feature in range(SPARSE)
)
"""The categories of the first line."""

_PIECE = 8192
_MISSING_NUMBERS = (0.45, 0.0, 0.21, 0.22, 0.03, 0.22, 0.04, 0.0, 0.04, 0.45, 0.04, 0.77, 0.22)
_SCALES = (2.0, 60.0, 12.0, 6.0, 9000.0, 80.0, 9.0, 10.0, 70.0, 0.5, 2.0, 0.3, 6.0)
_CATEGORIES = (
    1_400, 550, 90_000, 60_000, 300, 20, 12_000, 600, 3, 50_000, 5_000, 80_000, 3_000, 26, 11_000, 75_000, 10, 4_500,
    2_000, 4, 80_000, 17, 15, 40_000, 90, 25_000,
)  # fmt: skip
_MISSING_CATEGORIES = {2: 0.034, 3: 0.034, 5: 0.12, 11: 0.034, 15: 0.034, 18: 0.44, 19: 0.44, 20: 0.034, 21: 0.76,
                       23: 0.034, 24: 0.44, 25: 0.44}  # fmt: skip
_INFORMATIVE = (0, 1, 5, 8, 13, 16, 19, 21, 22)
"""Features whose categories influence the label: those with few, so that a short log is enough to learn them."""
_POSITIVE_LOG_ODDS = -0.9


def write(path: Path, *, lines: int, seed: int = 7, day: int = 0, packed: bool = False) -> None:
    """Write a log; the same arguments give the same bytes. All days follow the same distribution."""
    require(1 <= lines <= 1 << 40, "lines", lines, f"1 to {1 << 40:,}")
    require(seed >= 0, "seed", seed, "0 or more")
    if path.exists():
        raise UsageError(f"{path} exists and is left alone", fix="choose another --path")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        if packed:
            with gzip.GzipFile(filename="", fileobj=file, mode="wb", mtime=0, compresslevel=6) as stream:
                _write_lines(stream, lines, seed, day)
        else:
            _write_lines(file, lines, seed, day)


def is_synthetic(first_line: bytes) -> bool:
    return first_line.rstrip(b"\r\n").endswith(b"\t" + MARK)


def _write_lines(file: BinaryIO | gzip.GzipFile, lines: int, seed: int, day: int) -> None:
    file.write(b"0\t" + b"\t" * DENSE + MARK + b"\n")
    for piece, begin in enumerate(range(1, lines, _PIECE)):
        rng = np.random.Generator(np.random.PCG64([seed, day, piece]))
        # Whole pieces are drawn, so that a longer log begins with the lines of a shorter one.
        file.write(_text(*_draw(rng, seed), min(_PIECE, lines - begin)))


def _draw(
    rng: np.random.Generator, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint32], NDArray[np.bool_], NDArray[np.bool_]]:
    spread_ND = np.exp(rng.standard_normal((_PIECE, DENSE)) * 1.1)
    numbers_ND = np.floor(np.array(_SCALES) * spread_ND).astype(np.int64)
    numbers_ND[:, 1] -= 3
    # The power concentrates the draws on few categories, as in a real log.
    share_NF = rng.random((_PIECE, SPARSE)) ** 4
    ranks_NF = np.floor(share_NF * np.array(_CATEGORIES)).astype(np.int64)
    names_NF = np.stack([hash_numpy(ranks_NF[:, feature], seed * 64 + feature) for feature in range(SPARSE)], axis=1)
    missing_ND = rng.random((_PIECE, DENSE)) < np.array(_MISSING_NUMBERS)
    chances_F = np.array([_MISSING_CATEGORIES.get(feature, 0.0) for feature in range(SPARSE)])
    missing_NF = rng.random((_PIECE, SPARSE)) < chances_F
    informative = list(_INFORMATIVE)
    # The low 16 bits of a name decide what its category adds: uniform with variance 1.
    adds_NF = ((names_NF & np.uint64(0xFFFF)).astype(np.float64) / 65535 - 0.5) * np.sqrt(12.0)
    odds_N = (0.45 * np.where(missing_NF, 0.0, adds_NF)[:, informative]).sum(axis=1) + _POSITIVE_LOG_ODDS
    logs_ND = np.log1p(np.maximum(numbers_ND, 0)) - np.log1p(np.array(_SCALES))
    odds_N += 0.35 * np.where(missing_ND, 0.0, logs_ND)[:, [0, 4, 6, 10]].sum(axis=1)
    labels_N = (rng.random(_PIECE) < 1 / (1 + np.exp(-odds_N))).astype(np.int64)
    return labels_N, numbers_ND, (names_NF >> np.uint64(16)).astype(np.uint32), missing_ND, missing_NF


def _text(
    labels_N: NDArray[np.int64],
    numbers_ND: NDArray[np.int64],
    names_NF: NDArray[np.uint32],
    missing_ND: NDArray[np.bool_],
    missing_NF: NDArray[np.bool_],
    count: int,
) -> bytes:
    """The text of the lines: fields in columns of fixed width, padded with zero bytes, which are removed at the end."""
    width = 10
    digits = numbers_ND.astype(f"S{width}").view(np.uint8).reshape(-1, DENSE, width)
    digits[missing_ND] = 0
    shifts = np.arange(28, -1, -4, dtype=np.uint32)
    nibbles = (names_NF[:, :, None] >> shifts) & np.uint32(15)
    hexes = np.frombuffer(b"0123456789abcdef", dtype=np.uint8)[nibbles]
    hexes[missing_NF] = 0
    lines = len(labels_N)
    tab = np.full((lines, 1), ord("\t"), dtype=np.uint8)
    parts = [(labels_N[:, None] + ord("0")).astype(np.uint8)]
    for feature in range(DENSE):
        parts += [tab, digits[:, feature]]
    for feature in range(SPARSE):
        parts += [tab, hexes[:, feature]]
    parts.append(np.full((lines, 1), ord("\n"), dtype=np.uint8))
    wide = np.concatenate(parts, axis=1)[:count]
    text: NDArray[np.uint8] = wide[wide != 0]
    return text.tobytes()
