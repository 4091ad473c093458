"""Synthetic events: the same bytes every time, whatever the blocks and after any stop."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recperf.data.events.store import open_store
from recperf.data.known.yambda import synthesize
from recperf.data.known.yambda.rows import EventRows
from recperf.data.known.yambda.synthesize import Generator, write_store
from recperf.data.known.yambda.yambda_like import YambdaLike
from recperf.errors import DataError

DEFAULT_DIGEST = "35550b60e1b56d40932ef66bb959372a5dc7e404758a32a6b26c12f52b9b08a8"
"""Of the default store. A change of the stream must be meant: set it anew and count `synthesize.STREAM` up."""
SMALL = YambdaLike(users=40, events_per_user=60, items=300)


def made(config: YambdaLike, **how: Any) -> EventRows:
    blocks = [block for block, _ in Generator(config).blocks(**how)]
    return EventRows(
        **{part.name: np.concatenate([getattr(one, part.name) for one in blocks]) for part in fields(EventRows)}
    )


def test_the_default_is_the_dataset_that_was_published_with_the_code(tmp_path: Path) -> None:
    store = open_store(write_store(YambdaLike(), tmp_path / "store"))
    assert store.digest == DEFAULT_DIGEST
    assert (store.name, store.synthetic, store.users) == ("yambda-like", True, YambdaLike().users)
    assert "synthetic" in store.manifest.licence
    assert int(store.times_E[:].max()) < store.manifest.split["train_end"]


@pytest.mark.parametrize("listens", [1, 500, 1 << 20])
def test_events_do_not_depend_on_the_blocks_they_are_made_in(listens: int) -> None:
    whole, cut = made(SMALL), made(SMALL, listens=listens)
    assert all(np.array_equal(getattr(whole, part.name), getattr(cut, part.name)) for part in fields(EventRows))


@pytest.mark.parametrize("stop_at", [1, 5])
def test_a_stopped_store_resumes_with_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int
) -> None:
    monkeypatch.setattr(synthesize, "COMMIT_EVENTS", 600)
    expected = open_store(write_store(SMALL, tmp_path / "whole")).digest
    calls: list[int] = []

    def stops(done: int, total: int) -> None:
        calls.append(done)
        assert 0 < done <= total
        if len(calls) == stop_at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_store(SMALL, tmp_path / "store", progress=stops, block_listens=400)
    with pytest.raises(DataError, match="not complete"):
        open_store(tmp_path / "store")
    begun, usual = list[int](), Generator.blocks
    monkeypatch.setattr(
        Generator, "blocks", lambda self, first, listens: begun.append(first) or usual(self, first, listens)
    )
    write_store(SMALL, tmp_path / "store", block_listens=300)
    assert open_store(tmp_path / "store").digest == expected
    assert (begun[0] > 0) == (stop_at > 2), "after a commit the users before it are not made again"
    assert write_store(SMALL, tmp_path / "store") == tmp_path / "store", "a finished store is found"
    with pytest.raises(DataError, match="another source"):
        write_store(replace(SMALL, seed=9), tmp_path / "store")
