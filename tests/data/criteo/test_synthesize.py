from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from recperf.data.criteo import lines, synthesize
from recperf.errors import ConfigError, UsageError


def read(path: Path) -> list[lines.Line]:
    parsed = [lines.read(line) for line in path.read_bytes().splitlines()]
    assert all(isinstance(line, lines.Line) for line in parsed)
    return parsed  # type: ignore[return-value]


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        synthesize.write(tmp_path / name, lines=50, seed=seed)
    synthesize.write(tmp_path / "d", lines=50, seed=1, packed=True)
    synthesize.write(tmp_path / "e", lines=80, seed=1)
    synthesize.write(tmp_path / "f", lines=50, seed=1, day=1)
    a, b, c, d, e, f = ((tmp_path / name).read_bytes() for name in "abcdef")
    assert a == b == gzip.decompress(d)
    assert e.startswith(a)
    assert len({a, c, f}) == 3


def test_lines_are_good_have_gaps_and_carry_the_mark(tmp_path: Path) -> None:
    synthesize.write(tmp_path / "log", lines=4_000)
    made = read(tmp_path / "log")
    assert len(made) == 4_000
    first, second = (tmp_path / "log").read_bytes().splitlines()[:2]
    assert synthesize.is_synthetic(first)
    assert synthesize.is_synthetic(first + b"\r")
    assert not synthesize.is_synthetic(second)
    assert 0.2 < np.mean([line.label for line in made]) < 0.32
    gaps = np.mean([[value is None for value in line.integers] for line in made], axis=0)
    assert gaps[0] == pytest.approx(0.45, abs=0.03)
    assert gaps[11] == pytest.approx(0.77, abs=0.03)
    assert min(value for line in made[1:] if (value := line.integers[1]) is not None) == -3


def test_labels_can_be_learned(tmp_path: Path) -> None:
    """How often each category of one feature is clicked on one day tells who is clicked on another."""
    for day in range(2):
        synthesize.write(tmp_path / str(day), lines=4_000, day=day)
    first, second = read(tmp_path / "0"), read(tmp_path / "1")
    clicks: dict[int, list[int]] = {}
    for line in first:
        clicks.setdefault(line.categories[5] or 0, []).append(line.label)
    guess = np.array([np.mean(clicks.get(line.categories[5] or 0, [0.25])) for line in second])
    labels = np.array([line.label for line in second])
    assert guess[labels == 1].mean() - guess[labels == 0].mean() > 0.01


def test_what_exists_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("mine")
    with pytest.raises(UsageError, match="left alone"):
        synthesize.write(tmp_path / "log", lines=5)
    assert (tmp_path / "log").read_text() == "mine"
    with pytest.raises(ConfigError, match="lines is 0"):
        synthesize.write(tmp_path / "other", lines=0)
    assert [path.name for path in tmp_path.iterdir()] == ["log"]
