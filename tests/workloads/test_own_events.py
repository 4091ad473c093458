"""dlrm-v4 on own events: defaults follow the data, rates and baselines know only the past, and it learns what a log
teaches, and nothing where there is nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from recperf.cli import main
from recperf.data.blocks import Column
from recperf.data.datasets import Dataset
from recperf.data.events.imports import import_events
from recperf.data.events.kinds import LABELLED, POSITIVE
from recperf.data.events.options import ImportOptions
from recperf.data.events.store import EventStore, open_store
from recperf.data.streaming.config import HistoryConfig
from recperf.data.streaming.features import RATES
from recperf.data.streaming.history import Histories
from recperf.data.streaming.rates import PRECISION, PRIOR, RECENT, RunningRates
from recperf.models.dlrm_v4.inputs import prepare
from recperf.train.baselines import blend
from recperf.train.metrics import auc
from recperf.workloads.click_candidates import imported_logits, scored_rows
from recperf.workloads.dlrm_v4 import config as dlrm_v4
from recperf.workloads.dlrm_v4.build import PreparedHistories
from recperf.workloads.dlrm_v4.own_data import with_groups
from recperf.workloads.micro_dlrm import config as micro_dlrm
from recperf.workloads.micro_dlrm.config import imported

Effect = Literal["last item", "none"]
DAYS = 90
STRENGTH = 2.0
"""Standard deviation of the log odds of the groups."""


@dataclass(frozen=True, eq=False)
class PlantedLog:
    """Events of users in the order of time, and the true probability of each positive label."""

    users_N: NDArray[np.int64]
    items_N: NDArray[np.int64]
    times_N: NDArray[np.int64]
    labels_N: NDArray[np.bool_]
    probabilities_N: NDArray[np.float64]

    def possible_auc(self, held_out: float = 0.2) -> float:
        """The expected AUC of the true probabilities on the latest events."""
        latest = self.times_N >= np.quantile(self.times_N, 1 - held_out)
        values, place = np.unique(self.probabilities_N[latest], return_inverse=True)
        count = np.bincount(place)
        positive, negative = values * count, (1 - values) * count
        below = np.cumsum(negative) - negative
        return float((positive * (below + negative / 2)).sum() / (positive.sum() * negative.sum()))

    def imported(self, folder: Path) -> Path:
        """The folder of an event store of the log."""
        rows = zip(self.users_N, self.items_N, self.times_N, self.labels_N.astype(int))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "log.csv").write_text(
            "\n".join(["user,item,time,label", *(f"{u},{i},{t},{y}" for u, i, t, y in rows)])
        )
        return import_events(ImportOptions(events=folder / "log.csv", label="label", name="planted"), folder / "store")


def planted(effect: Effect, *, events: int, users: int, items: int, groups: int, seed: int = 1) -> PlantedLog:
    """A log whose labels depend on the hidden groups of the item and of the one before it; without an effect, on the
    item and the user alone."""
    draw = np.random.default_rng(seed)
    users_N, items_N = np.sort(draw.integers(0, users, events)), draw.integers(0, items, events)
    times_N = draw.integers(0, DAYS * 86_400, events)
    times_N = times_N[np.lexsort((times_N, users_N))]
    group_N = draw.integers(0, groups, items)[items_N]
    before_N = np.full(events, groups)
    same_N = users_N[1:] == users_N[:-1]
    before_N[1:][same_N] = group_N[:-1][same_N]
    if effect == "last item":
        logits_N = draw.normal(0, STRENGTH, (groups, groups + 1))[group_N, before_N]
    else:
        logits_N = draw.normal(0, 0.8, items)[items_N] + draw.normal(0, 0.8, users)[users_N]
    probabilities_N = 1 / (1 + np.exp(-logits_N))
    return PlantedLog(users_N, items_N, times_N, draw.random(events) < probabilities_N, probabilities_N)


USERS, ITEMS, EVENTS = 30, 20, 900


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> EventStore:
    """Ratings of few users; several events have the same second, some items are rated again."""
    folder = tmp_path_factory.mktemp("own")
    draw = np.random.default_rng(5)
    user, item = draw.integers(1, USERS + 1, EVENTS), draw.integers(1, ITEMS + 1, EVENTS)
    rating = 1 + (draw.random(EVENTS) * 3 + (item % 3)).astype(int)
    rows = zip(user, item, rating, draw.integers(1_000_000, 1_001_000, EVENTS), item % 4)
    text = "user,item,rating,time,brand\n" + "\n".join(",".join(map(str, row)) for row in rows)
    (folder / "events.csv").write_text(text)
    options = ImportOptions(events=folder / "events.csv", rating="rating", name="own")
    return with_groups(open_store(import_events(options, folder / "store")))


def test_defaults_follow_the_data(store: EventStore) -> None:
    config = dlrm_v4.following(store.folder)
    assert config.data.history.strategy == "last-n"
    assert config.model.table_rows["item_id"] == store.items
    # Few events a user: rows of users and crosses would memorise them.
    assert {config.model.table_rows[name] for name in config.model.context} == {1}
    assert config.model.max_history == config.data.history.longest
    prepared = PreparedHistories(config)
    assert prepared.data["rows"] == EVENTS
    assert prepared.data["valid_rows"] == pytest.approx(EVENTS / 5, rel=0.2)
    assert prepared.validation is not None
    trained, chosen, scored = (
        store.times_E[np.concatenate([prepared.index.anchors(window, part.users) for window in part.windows])]
        for part in (prepared.fitted, prepared.validation, prepared.holdout)
    )
    assert trained.max() < chosen.min() <= chosen.max() < scored.min()


def test_rates_know_only_the_past(store: EventStore) -> None:
    """Every column against a loop over all events."""
    rates, positions = RunningRates(store, 1_000_800), np.arange(store.events)
    queries = Histories(store, dlrm_v4.laptop().data.history).events(positions, store.kinds(positions))
    features = dict(zip(RATES, rates.of(queries).T))
    users, items = store.users_of(np.arange(store.events)), store.items_at(slice(0, store.events))
    times, artists = store.times_E[:].astype(int), store.groups_IG[items, 0]
    positive = (store.kinds(slice(0, store.events)) & POSITIVE) > 0
    overall = rates.overall(times)
    expected = {
        name: 1 / (1 + np.exp(-features["overall"] - features[other]))
        for name, other in (("user", "item"), ("item", "user_effect"))
    }
    for anchor in range(0, store.events, 7):
        own = (users == users[anchor]) & (np.arange(store.events) < anchor)
        earlier = times < times[anchor]
        groups = {
            "user": own,
            "item": earlier & (items == items[anchor]),
            "user_item": own & (items == items[anchor]),
            "artist": earlier & (artists == artists[anchor]),
            "user_artist": own & (artists == artists[anchor]),
        }
        for name, p in expected.items():
            which = groups[name]
            effect = (positive - p)[which].sum() / ((p * (1 - p))[which].sum() + PRECISION)
            assert features[f"{name}_effect"][anchor] == pytest.approx(effect, abs=1e-5)
        for name, which in groups.items():
            assert features[f"{name}_listens"][anchor] == pytest.approx(np.log1p(which.sum()) / 4)
            assert features[name][anchor] == pytest.approx(log_odds(positive[which], overall[anchor]), abs=1e-5)
        last = positive[own][-RECENT:]
        assert features["user_recent"][anchor] == pytest.approx(log_odds(last, overall[anchor]), abs=1e-5)


def test_later_outcomes_change_nothing(store: EventStore) -> None:
    """Also not through the similarities of items; those of the training windows are as of each anchor."""
    now = 1_000_500
    times, kinds = store.times_E[:], store.kinds(slice(0, store.events))
    changed = replace(store, kind_columns=(Column(np.where(times < now, kinds, kinds ^ np.uint8(LABELLED))),))
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


def test_a_candidate_scores_as_if_it_were_the_row(store: EventStore) -> None:
    """Against stores in which the anchor's item is the candidate: its own rates and neighbours, at the same moment."""
    config = dlrm_v4.following(store.folder)
    prepared = PreparedHistories(config)
    trial, cut = prepared.trial(1), int(store.times_E[prepared.events.positions_N].min())
    with torch.no_grad():
        for parameter in trial.model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    own_N = prepared.scored_rows().items_N
    assert own_N is not None
    for row in (0, 50, 100, 150):
        position, item = prepared.events.positions_N[row], 1 + (int(own_N[row]) + 7) % ITEMS
        items_E = store.items_E[:].copy()
        items_E[position] = item
        changed = replace(store, items_E=Column(items_E))
        rates = RunningRates(changed, cut)
        batch = Histories(changed, config.data.history, rates=rates).batch(np.array([position]))
        assert batch.rates_BF is not None
        assert batch.rates_BF[0, [RATES.index(name) for name in ("item_listens", "neighbours")]].all()
        with torch.no_grad():
            expected = trial.model.eval()(prepare(batch, config.model))
        logits = trial.candidate_logits(torch.tensor([row]), torch.tensor([item]))
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def test_clicks_without_a_signal_are_not_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was drawn is no outcome, and must not be learned from."""
    monkeypatch.setattr("recperf.workloads.dlrm_v4.data.gradient_boosting", lambda *_: None)
    users, items, clicks, draw = 200, 150, 15, np.random.default_rng(3)
    rows = (
        f"{user},{item},{time}"
        for user in range(users)
        for item, time in zip(draw.permutation(items)[:clicks], np.sort(draw.integers(0, 10**6, clicks)))
    )
    (tmp_path / "clicks.csv").write_text("\n".join(["user,item,time", *rows]))
    folder = import_events(ImportOptions(events=tmp_path / "clicks.csv", name="clicks"), tmp_path / "store")
    prepared = PreparedHistories(dlrm_v4.following(folder))
    logits, labels_N = prepared.baseline_logits(), prepared.scored_rows().labels_N
    for name in ("item_knn", "rates_regression"):
        assert auc(logits[name], labels_N) == pytest.approx(0.5, abs=0.025)
    seen = prepared.catalogue().seen(0)
    assert len(seen) < clicks


def test_gradient_boosting_of_clicks_reads_the_item_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the last item decides the label: a target without it would be met by chance."""
    monkeypatch.setenv("RECPERF_HOME", str(tmp_path / "home"))
    folder = planted("last item", events=5000, users=100, items=30, groups=3).imported(tmp_path)
    events = Dataset(name="planted", kind="events", folder=folder)
    clicks = imported(micro_dlrm.on_events(micro_dlrm.default(), events).data)
    logits, labels_N = imported_logits(clicks), scored_rows(clicks).labels_N
    assert auc(logits["gradient_boosting"], labels_N) > auc(logits["logistic"], labels_N) + 0.1


def test_a_run_on_own_events(
    store: EventStore, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recperf.execution.measuring.measure_run", lambda *_: None)
    command = ["run", "dlrm-v4", "--data", str(store.folder), "--json", "--no-peaks", "--no-report"]
    assert main([*command, "--run-dir", str(tmp_path / "run"), "--data.holdout", "0.3", "--train.epochs", "2"]) == 0
    result = json.loads(capsys.readouterr().out)
    quality = result["quality"]
    running = {"running_means", "item_knn", "gradient_boosting", "rates_regression"}
    assert {*running, "popularity"} <= quality["baselines"].keys()
    assert (quality["target"]["beat"], quality["met"]) == (None, True)
    best = quality["differences"][0]
    assert {row["metric"] for row in quality["probabilities"]} == {"log_loss", "calibration_error"}
    assert all(row["low"] <= row["difference"] <= row["high"] for row in quality["probabilities"])
    assert 0 < quality["ranking"]["lists"]["coverage"] <= 1
    assert (best["standing"] == "above") == (best["low"] > 0)
    kept = min(json.loads(line)["validation_log_loss"] for line in metric_lines(tmp_path / "run"))
    assert quality["metrics"]["validation_log_loss"] == kept
    saved = json.loads((tmp_path / "run" / "config.json").read_text())["config"]
    assert (saved["data"]["split"], saved["data"]["holdout"]) == ("time", 0.3)
    assert saved["data"]["history"]["strategy"] == "last-n"


def metric_lines(folder: Path) -> list[str]:
    return [line for line in (folder / "events.jsonl").read_text().splitlines() if '"metric"' in line]


@pytest.mark.long
@pytest.mark.parametrize(("effect", "epochs"), [("last item", 4), ("none", 2)])
def test_a_small_log(
    effect: Effect,
    epochs: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("recperf.execution.measuring.measure_run", lambda *_: None)
    log = planted(effect, events=8_000, users=160, items=30, groups=3)
    command = ["run", "dlrm-v4", "--data", str(log.imported(tmp_path)), "--json", "--no-peaks", "--no-report"]
    shorter = ["--data.history.length", "12", "--model.hstu.max-length", "21", "--ranking.users", "0"]
    options = [*shorter, "--train.epochs", str(epochs), "--train.no-checkpoint-epochs"]
    assert main([*command, *options, "--run-dir", str(tmp_path / "run")]) in (0, 5)
    quality = json.loads(capsys.readouterr().out)["quality"]
    rules = {name: metrics["auc"] for name, metrics in quality["baselines"].items()}
    if effect == "none":
        assert quality["differences"][0]["standing"] != "below"
    else:
        assert quality["metrics"]["auc"] > log.possible_auc() - 0.04
        # Those that do not know the last item cannot know the label.
        assert max(auc for name, auc in rules.items() if name != "gradient_boosting") < log.possible_auc() - 0.1


def test_a_blend_weighs_by_what_each_side_predicts() -> None:
    draw = np.random.default_rng(0)
    truth, noise = draw.normal(0, 1, (2, 20_000))
    labels = (draw.random(20_000) < 1 / (1 + np.exp(-truth))).astype(np.float32)
    good, bad, _ = blend(truth, noise, labels)
    assert good > 0.9
    assert abs(bad) < 0.1
    one, other, _ = blend(truth + 0.1 * noise, truth - 0.1 * noise, labels)
    assert (one, other) == (pytest.approx(0.5, abs=0.1), pytest.approx(0.5, abs=0.1))
    assert blend(truth, noise, np.ones(20_000, np.float32)) == (0.5, 0.5, 0.0)
