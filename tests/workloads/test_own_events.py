"""dlrm-v4 on a user's own events: defaults follow the data, and rates and baselines know only the past."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from recperf.cli import main
from recperf.data.yambda.config import HistoryConfig
from recperf.data.yambda.history import Histories
from recperf.data.yambda.imports import ImportOptions, import_events
from recperf.data.yambda.rates import PRIOR, RECENT, RunningRates
from recperf.data.yambda.schema import LISTEN_PLUS, LISTENS, RATES
from recperf.data.yambda.store import EventStore, open_store
from recperf.models.dlrm_v4.inputs import prepare
from recperf.models.dlrm_v4.padded import PaddedDLRMv4, padded_inputs
from recperf.models.dlrm_v4.padding import Padding
from recperf.workloads.dlrm_v4 import config as dlrm_v4
from recperf.workloads.dlrm_v4.build import PreparedHistories

USERS, ITEMS, EVENTS = 30, 20, 900


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> EventStore:
    """Ratings of few users; several events have the same second, some items are rated again."""
    folder = tmp_path_factory.mktemp("own")
    draw = np.random.default_rng(5)
    user, item = draw.integers(1, USERS + 1, EVENTS), draw.integers(1, ITEMS + 1, EVENTS)
    rating = 1 + (draw.random(EVENTS) * 3 + (item % 3)).astype(int)
    rows = zip(user, item, rating, draw.integers(1_000_000, 1_001_000, EVENTS), item % 4)
    text = "user,item,rating,time,artist\n" + "\n".join(",".join(map(str, row)) for row in rows)
    (folder / "events.csv").write_text(text)
    options = ImportOptions(events=folder / "events.csv", rating="rating", artist="artist", name="own")
    return open_store(import_events(options, folder / "store"))


def test_defaults_follow_the_data(store: EventStore) -> None:
    config = dlrm_v4.following(store.folder)
    assert config.data.history.strategy == "last-n"
    assert config.model.table_rows["item_id"] == store.items
    assert config.model.table_rows["uid"] == USERS + 1
    assert config.model.max_history == config.data.history.longest
    prepared = PreparedHistories(config)
    assert prepared.data["rows"] == EVENTS
    assert prepared.data["valid_rows"] == pytest.approx(EVENTS / 5, rel=0.2)
    scored, trained = (
        store.times_E[np.concatenate([prepared.index.anchors(window) for window in windows])]
        for windows in (prepared.holdout, prepared.train_windows)
    )
    assert trained.max() < scored.min()


def test_rates_know_only_the_past(store: EventStore) -> None:
    """Every column against a loop over all events."""
    rates, positions = RunningRates(store, 1_000_800), np.arange(0, store.events, 7)
    queries = Histories(store, dlrm_v4.laptop().data.history).events(positions, store.kinds(positions))
    features = dict(zip(RATES, rates.of(queries).T))
    users, items = store.users_by_position(np.arange(store.events)), store.items_at(slice(0, store.events))
    times, artists = store.times_E[:].astype(int), store.catalogue_I2[items, 0]
    positive = (store.kinds(slice(0, store.events)) & LISTEN_PLUS) > 0
    overall = rates.overall(times[positions])
    for row, anchor in enumerate(positions):
        own = (users == users[anchor]) & (np.arange(store.events) < anchor)
        earlier = times < times[anchor]
        groups = {
            "user": own,
            "item": earlier & (items == items[anchor]),
            "user_item": own & (items == items[anchor]),
            "artist": earlier & (artists == artists[anchor]),
            "user_artist": own & (artists == artists[anchor]),
        }
        for name, which in groups.items():
            assert features[f"{name}_listens"][row] == pytest.approx(np.log1p(which.sum()) / 4)
            assert features[name][row] == pytest.approx(log_odds(positive[which], overall[row]), abs=1e-5)
        last = positive[own][-RECENT:]
        assert features["user_recent"][row] == pytest.approx(log_odds(last, overall[row]), abs=1e-5)


def test_later_outcomes_change_nothing(store: EventStore) -> None:
    """Also not through the similarities of items; those of the training windows are as of each anchor."""
    now = 1_000_500
    times, kinds = store.times_E[:], store.kinds(slice(0, store.events))
    changed = replace(store, packed_kinds_E=np.where(times < now, kinds, kinds ^ np.uint8(LISTENS)))
    positions = np.flatnonzero(times < now)
    for cut in (now, now + 300):
        before, after = (
            RunningRates(one, cut).of(Histories(one, HistoryConfig(length=12)).events(positions, kinds[positions]))
            for one in (store, changed)
        )
        assert before.tolist() == after.tolist()
        assert np.ptp(before, axis=0)[-3:].all()


def log_odds(outcomes: np.ndarray, overall: float) -> float:
    share = (outcomes.sum() + PRIOR * overall) / (len(outcomes) + PRIOR)
    return float(np.log(share / (1 - share)) - np.log(overall / (1 - overall)))


def test_a_padded_batch_has_the_same_rates(store: EventStore) -> None:
    config = dlrm_v4.following(store.folder)
    prepared = PreparedHistories(config)
    batch = prepared.histories.batch(prepared.train_order().batch(0))
    padding = Padding(config.model, len(batch))
    inputs = padding.layout.unpacked(padding.layout.pack(padding.inputs(batch), pinned=False))
    assert batch.rates_BF is not None
    assert inputs.rates_BF is not None
    assert inputs.rates_BF.tolist() == batch.rates_BF.tolist()
    model = prepared.trial(1).model.eval()
    with torch.no_grad():
        exported = PaddedDLRMv4(model)(**padded_inputs(model, batch))
        torch.testing.assert_close(exported, model(prepare(batch, config.model)), rtol=1e-5, atol=1e-5)


def test_a_run_on_own_events(
    store: EventStore, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recperf.execution.execute.measure_run", lambda *_: None)
    command = ["run", "dlrm-v4", "--data", str(store.folder), "--json", "--no-peaks", "--no-report"]
    assert main([*command, "--run-dir", str(tmp_path / "run"), "--data.holdout-windows", "30"]) in (0, 5)
    result = json.loads(capsys.readouterr().out)
    assert {"running_means", "item_knn", "gradient_boosting", "popularity"} <= result["quality"]["baselines"].keys()
    assert result["quality"]["target"]["beat"] == "best"
    saved = json.loads((tmp_path / "run" / "config.json").read_text())["config"]
    assert saved["data"]["holdout_windows"] == 30
    assert saved["data"]["history"]["strategy"] == "last-n"
