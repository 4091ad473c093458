"""Synthetic events: statistics of Yambda, drifting preferences, the same bytes every time, atomic files."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

from recperf.data.yambda import schema, synthesize
from recperf.data.yambda.prepare import prepare
from recperf.data.yambda.raw import RawEvents, locate
from recperf.data.yambda.schema import DAY_S, EVENT_TYPES, LEAST_PLAYED, TICK_S
from recperf.data.yambda.store import open_store
from recperf.data.yambda.synthesize import YambdaLike, default, of_size, write_raw, write_store
from recperf.data.yambda.synthesize.events import Block, Generator
from recperf.errors import ConfigError, DataError

DEFAULT_DIGEST = "35550b60e1b56d40932ef66bb959372a5dc7e404758a32a6b26c12f52b9b08a8"
"""Of the default store. A change of the stream must be meant: set it anew and count `synthesize.STREAM` up."""
SMALL = YambdaLike(users=40, events_per_user=60, items=300)
LISTEN, LIKE, DISLIKE, UNLIKE, UNDISLIKE = range(len(EVENT_TYPES))


def made(config: YambdaLike, **how: Any) -> Block:
    blocks = [block for block, _ in Generator(config).blocks(**how)]
    return Block(**{part.name: np.concatenate([getattr(one, part.name) for one in blocks]) for part in fields(Block)})


@pytest.fixture(scope="module")
def events() -> Block:
    return made(default())


@pytest.fixture(scope="module")
def catalogue_I2() -> NDArray[np.uint32]:
    return Generator(default()).catalogue.columns()


def test_the_default_is_the_dataset_that_was_published_with_the_code(tmp_path: Path) -> None:
    store = open_store(write_store(default(), tmp_path / "store"))
    assert store.digest == DEFAULT_DIGEST
    assert (store.name, store.synthetic, store.users) == ("yambda-like", True, default().users)
    assert "synthetic" in store.manifest["licence"]
    assert int(store.times_E[:].max()) < store.manifest["split"]["train_end"]


@pytest.mark.parametrize("listens", [1, 500, 1 << 20])
def test_events_do_not_depend_on_the_blocks_they_are_made_in(listens: int) -> None:
    whole, cut = made(SMALL), made(SMALL, listens=listens)
    assert all(np.array_equal(getattr(whole, part.name), getattr(cut, part.name)) for part in fields(Block))


def test_shares_of_events_are_the_real_ones(events: Block) -> None:
    by_type = np.bincount(events.types_E, minlength=5) / len(events)
    plus = ((events.types_E == LISTEN) & (events.ratios_E >= LEAST_PLAYED)).mean()
    assert abs(plus - 0.613) < 0.01
    assert abs(by_type[LISTEN] - plus - 0.359) < 0.01
    assert abs(by_type[LIKE] - 0.019) < 0.002
    assert abs(by_type[DISLIKE:].sum() - 0.010) < 0.002
    assert 0.5 < events.organic_E.mean() < 0.8


def test_users_and_items_have_long_tails_like_the_real_ones(events: Block) -> None:
    per_user = np.bincount(events.uids_E)[1:]
    assert per_user.min() >= 1
    assert len(per_user) == default().users
    assert abs(len(events) / default().events - 1) < 0.02
    assert abs(np.median(per_user) / per_user.mean() - 0.566) < 0.02
    assert abs(per_user.max() / per_user.mean() - 5.82) < 0.3
    per_item = np.sort(np.bincount(events.items_E, minlength=default().items + 1))[::-1]
    assert per_item[: len(per_item) // 100].sum() > 0.15 * len(events)
    assert 2 * np.median(per_item) < per_item.mean()


def test_time_runs_in_ticks_to_the_known_end_in_sessions(events: Block) -> None:
    times, same = events.times_E.astype(np.int64), np.diff(events.uids_E) == 0
    gaps = np.diff(times)[same]
    assert not (times % TICK_S).any()
    assert times.max() == default().split["test_end"] == 26_008_200
    assert gaps.min() == 0, "ordered by user, then time, with ties"
    assert 0.01 < (gaps == 0).mean() < 0.2
    assert 0.8 < (gaps <= 600).mean() < 0.98, "most events follow another within a few songs"
    assert np.quantile(gaps, 0.97) > DAY_S, "and pauses last days"


def rate_before(
    keys: NDArray[np.int64], times: NDArray[np.int64], labels: NDArray[np.bool_], half_life_days: float
) -> NDArray[np.float64]:
    """Share of ones among earlier rows of the same key, recent ones counting more, drawn to the mean where few."""
    order = np.argsort(keys, kind="stable")
    here, begins = np.arange(len(keys)), np.searchsorted(keys[order], keys[order])
    weights = 2.0 ** (times[order] / (half_life_days * DAY_S))
    seen, ones = (np.append(0.0, np.cumsum(weights * values)) for values in (np.ones(len(keys)), labels[order]))
    rates = np.empty(len(keys))
    rates[order] = (ones[here] - ones[begins] + labels.mean() * weights) / (seen[here] - seen[begins] + weights)
    return rates


@pytest.fixture(scope="module")
def listens(events: Block, catalogue_I2: NDArray[np.uint32]) -> dict[str, NDArray[Any]]:
    """Columns of the listens in the data's order, and scores that use only what came before each of them."""
    is_listen = events.types_E == LISTEN
    columns = {part.name[:-2]: getattr(events, part.name)[is_listen].astype(np.int64) for part in fields(Block)}
    plus = columns["ratios"] >= LEAST_PLAYED
    artists = catalogue_I2[columns["items"], 0].astype(np.int64)
    pair = columns["uids"] * (1 << 32) + artists
    scores = {
        name: rate_before(keys, columns["times"], plus, days)
        for name, keys, days in (("lately", pair, 10), ("ever", pair, 10_000), ("mood", columns["uids"], 1))
    }
    return {**columns, "plus": plus, **scores}


def test_recent_history_predicts_the_next_listen_far_better_than_popularity_and_bias(
    listens: dict[str, NDArray[Any]],
) -> None:
    late = listens["times"] >= np.quantile(listens["times"], 0.9)
    plus = listens["plus"]

    def rate(column: NDArray[np.int64]) -> NDArray[np.float64]:
        seen = np.bincount(column[~late], minlength=column.max() + 1)
        ones = np.bincount(column[~late], weights=plus[~late], minlength=column.max() + 1)
        return np.asarray((ones + 10 * plus[~late].mean()) / (seen + 10))

    items, users = listens["items"], listens["uids"]
    popularity = np.bincount(items[~late], minlength=items.max() + 1)
    scores = {
        "popularity": popularity[items],
        "item": rate(items)[items],
        "user and item": rate(items)[items] + rate(users)[users],
        "same artist ever": listens["ever"],
        "same artist lately": listens["lately"],
        "same artist and all lately": listens["lately"] + 0.5 * listens["mood"],
    }
    auc = {name: roc_auc_score(plus[late], score[late]) for name, score in scores.items()}
    assert auc["popularity"] < auc["item"] < auc["user and item"] < 0.6
    assert auc["same artist lately"] > auc["user and item"] + 0.1
    assert auc["same artist lately"] > auc["same artist ever"] + 0.02, "taste drifts: old events mislead"
    assert auc["same artist and all lately"] > auc["same artist lately"]


def test_what_prepare_makes_of_the_raw_files_is_the_store(tmp_path: Path) -> None:
    config = of_size(20_000)
    facts = write_raw(config, tmp_path / "raw")
    files = locate(tmp_path / "raw")
    prepared = open_store(prepare(files, tmp_path / "prepared", name="own"))
    direct = open_store(write_store(config, tmp_path / "direct"))
    assert prepared.digest == direct.digest
    boundaries = {name: prepared.manifest["split"][name] for name in direct.manifest["split"]}
    assert boundaries == direct.manifest["split"]
    assert facts["events"] == RawEvents(files.events).rows > direct.events
    assert not list((tmp_path / "raw").rglob("*.tmp"))


def test_raw_files_have_the_real_columns_and_say_that_they_are_synthetic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(synthesize, "GROUP_ROWS", 1000)
    monkeypatch.setattr(synthesize, "_groups", cut_groups)
    write_raw(SMALL, tmp_path)
    raw, whole = RawEvents(locate(tmp_path).events), made(SMALL)
    chunks = list(raw.chunks(rows=700))
    for column, expected in (("uids", whole.uids_E), ("times", whole.times_E), ("types", whole.types_E)):
        assert np.array_equal(np.concatenate([getattr(chunk, column) for chunk in chunks]), expected)
    for name in schema.NULLABLE:
        nulls = pq.read_table(locate(tmp_path).events, columns=[name]).column(0).is_null().to_numpy()
        assert np.array_equal(nulls, whole.types_E != LISTEN)
    assert raw._arrow_schema.metadata[schema.SYNTHETIC_KEY] == b"yambda-like"


def cut_groups(generator: Generator) -> Any:
    return (block for block, _ in generator.blocks(listens=300))


def test_raw_files_are_not_overwritten_and_never_half_there(tmp_path: Path) -> None:
    def stops(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_raw(SMALL, tmp_path, progress=stops)
    with pytest.raises(DataError, match=r"no multi_event\.parquet"):
        locate(tmp_path)
    assert not list(tmp_path.rglob("*.tmp"))
    write_raw(SMALL, tmp_path)
    with pytest.raises(DataError, match="already"):
        write_raw(SMALL, tmp_path)


@pytest.mark.parametrize("stop_at", [1, 3, 5])
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
    begun: list[int] = []
    usual = Generator.blocks

    def watched(self: Generator, first_user: int = 0, listens: int = 0) -> Any:
        begun.append(first_user)
        return usual(self, first_user, listens)

    monkeypatch.setattr(Generator, "blocks", watched)
    write_store(SMALL, tmp_path / "store", block_listens=300)
    assert open_store(tmp_path / "store").digest == expected
    assert (begun[0] > 0) == (stop_at > 2), "after a commit the users before it are not made again"
    assert write_store(SMALL, tmp_path / "store") == tmp_path / "store", "a finished store is found"
    with pytest.raises(DataError, match="another source"):
        write_store(replace(SMALL, seed=9), tmp_path / "store")


@pytest.mark.parametrize(
    "config",
    [
        YambdaLike(users=3, events_per_user=5, items=1, genres=64),
        YambdaLike(users=2, events_per_user=60, items=2, days=1, drift_days=1, favourites=1),
        YambdaLike(users=1, events_per_user=19_800, items=50),
    ],
)
def test_extremes_are_made_in_order_and_within_bounds(config: YambdaLike, tmp_path: Path) -> None:
    block = made(config)
    step = np.diff(block.times_E.astype(np.int64)) + (np.diff(block.uids_E) != 0) * (1 << 40)
    assert (step >= 0).all()
    assert block.times_E.max() == config.split["test_end"]
    assert 1 <= block.items_E.min() <= block.items_E.max() <= config.items
    assert open_store(write_store(config, tmp_path / "store")).users <= config.users


@pytest.mark.parametrize(
    ("field", "value"),
    [("users", 0), ("events_per_user", 30_000), ("items", 0), ("genres", 65), ("days", 301), ("drift_days", 0)],
)
def test_a_config_that_cannot_be_made_is_refused_by_name(field: str, value: int) -> None:
    with pytest.raises(ConfigError, match=field):
        YambdaLike(**{field: value})


def test_making_events_does_not_need_torch() -> None:
    code = "import sys, recperf.data.yambda.synthesize; sys.exit('torch' in sys.modules or 'pyarrow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
