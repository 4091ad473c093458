"""Made-up logs: reproducible, and of the shapes that they promise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from recperf.cli import main
from recperf.data import own_like


def test_ratings_are_few_per_user_and_depend_on_genres() -> None:
    rows = list(own_like.ratings(np.random.default_rng(1), users=400, items=200))
    assert rows == list(own_like.ratings(np.random.default_rng(1), users=400, items=200))
    assert 5 < len(rows) / 400 < 8
    assert {row[2] for row in rows} == {1, 2, 3, 4, 5}
    assert len({(row[0], row[1]) for row in rows}) == len(rows)
    assert [row[3] for row in rows] == sorted(row[3] for row in rows)
    assert all(1 <= len(row[4].split("|")) <= 3 for row in rows)


def test_the_popularity_of_clicked_items_fades() -> None:
    rows = list(own_like.sessions(np.random.default_rng(1), users=300, items=400))
    days = np.array([(time // 1000 - own_like.START) // own_like.DAY_S for _, _, time in rows])
    items = np.array([item for _, item, _ in rows])
    early, late = (set(items[(days >= low) & (days < low + 5)].tolist()) for low in (5, 50))
    assert len(early & late) < 0.4 * len(late)


@pytest.mark.parametrize("name", own_like.MADE)
def test_a_log_is_written_once(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log.csv"
    assert main(["data", "make", name, "--path", str(path)]) == 0
    assert "recperf data import" in capsys.readouterr().out
    assert main(["data", "make", name, "--path", str(path)]) == 3
    assert main(["data", "info", name]) == 2
    assert "is a log to make and to import" in capsys.readouterr().err
