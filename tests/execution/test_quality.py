"""Scores of a resumed run: seeds and baselines stay comparable, whatever the config of a later process says."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from example_runs import details

from recperf.distributed.ranks import current
from recperf.errors import DataError
from recperf.execution import quality
from recperf.execution.own_keys import keys_of, paired
from recperf.execution.quality import Assessment, RankedRows
from recperf.execution.workload import Predictions, Prepared, RankingConfig, ScoredRows
from recperf.phases import Phases, phase, spent
from recperf.runs.record import Run
from recperf.train.baselines import Rules

ROWS, ITEMS = 60, 9


class Rows(Prepared):
    """Every user has four scored rows, two of them positive."""

    def __init__(self, ranking: RankingConfig, items: int = ITEMS) -> None:
        train = SimpleNamespace(epochs=1, max_steps=None, batch_size=8)
        self.config = SimpleNamespace(ranking=ranking, train=train, baseline_seconds=0.0)
        self.data = {"valid_rows": 5000, "train_rows": 1000}
        self.items = items
        place = torch.arange(ROWS)
        self.rows = ScoredRows((place % 2).float(), place // 4, place % ITEMS)

    def scored_rows(self) -> ScoredRows:
        return self.rows

    def baseline_logits(self) -> dict[str, torch.Tensor]:
        return {"rule": self.rows.labels_N + torch.arange(ROWS).sin()}

    def baseline_scorers(self) -> dict[str, Any]:
        return {"rule": lambda rows_P, items_P: items_P.float()}

    def catalogue(self) -> Any:
        none_N = torch.arange(ROWS)
        return SimpleNamespace(
            items_I=torch.arange(self.items), rows_I=torch.ones(self.items), user_rows_N=none_N,
            user_rows_are="training rows", item_rows_N=none_N, seen=lambda row: torch.zeros(0, dtype=torch.int64),
            repeats=0.0, meeting_is=None,
        )  # fmt: skip


def process(folder: Path, seed: int | None, prepared: Rows) -> dict[str, Any]:
    """What a process leaves that computes the baselines and maybe trains a seed."""
    run = Run(folder)
    assessment = Assessment(run, current(), prepared, lambda text: None)
    assessment.baselines()
    if seed is not None:
        rows = prepared.rows
        model = SimpleNamespace(train=lambda mode: None)
        trial: Any = SimpleNamespace(
            recipe=SimpleNamespace(model=model), candidate_logits=lambda rows_P, items_P: -items_P.float()
        )
        logits_N = rows.labels_N + seed * torch.arange(ROWS).cos()
        assessment.trained(seed, trial, Predictions(logits_N, rows.labels_N, rows.users_N, rows.items_N))
    run.close()
    scores: dict[str, Any] = json.loads((folder / "scores.json").read_text())
    return scores


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    Run.create("x", {}, folder=tmp_path / "run").close()
    return tmp_path / "run"


def test_a_later_process_ranks_what_the_first_seed_ranked(folder: Path) -> None:
    first = process(folder, 1, Rows(RankingConfig(users=5, negatives=3)))
    second = process(folder, 2, Rows(RankingConfig(users=12, negatives=0)))
    assert second["ranking"] == first["ranking"]
    assert second["seeds"]["1"] == first["seeds"]["1"]
    assert second["seeds"]["2"]["ranking"] == second["seeds"]["1"]["ranking"]


def test_before_the_first_seed_the_later_config_decides(folder: Path) -> None:
    assert process(folder, None, Rows(RankingConfig(users=0)))["not_ranked"]
    scores = process(folder, 1, Rows(RankingConfig(users=12)))
    assert scores["ranking"]["users"] == 12
    assert scores["seeds"]["1"]["ranking"]["metrics"]


@pytest.mark.parametrize(("share", "compete"), [(0.0, False), (0.5, True)])
def test_the_answer_does_not_decide_which_items_compete(share: float, compete: bool) -> None:
    """Rows whose item their user already has, and rows whose item is new."""
    prepared = Rows(RankingConfig(users=15, negatives=0))
    catalogue = prepared.catalogue()
    catalogue.repeats, catalogue.seen = share, lambda row: torch.tensor([0, 1, 2, 3, 4])
    keys = (prepared.rows.users_N, prepared.rows.items_N)
    ranked = RankedRows.choose(prepared.config.ranking, 1000, prepared.rows, keys, catalogue)
    assert isinstance(ranked, RankedRows)
    assert ranked.facts().repeats == compete
    expected = list(range(ITEMS)) if compete else list(range(5, ITEMS))
    assert [items.tolist() for items in ranked.candidates()] == [expected] * 15
    all_users = RankedRows.choose(RankingConfig(users=10_000), 10**6, prepared.rows, keys, catalogue)
    assert all_users.listed == len(ranked.rows_Q)  # type: ignore[union-attr]


def test_ranks_are_recorded_by_the_keys_of_users_and_ties_count_against(folder: Path) -> None:
    """Items are scored by half of their number: each shares its score with a neighbour."""

    class Tied(Rows):
        def own_ids(self, role: str) -> list[str]:
            return [f"{role} {number}" for number in range(20)]

        def baseline_scorers(self) -> dict[str, Any]:
            return {"popularity": lambda rows_P, items_P: (items_P // 2).float()}

    ranking = process(folder, None, Tied(RankingConfig(users=12, negatives=0)))["ranking"]
    Run.create("x", {}, folder=folder.with_name("y")).close()
    fewer = process(folder.with_name("y"), None, Tied(RankingConfig(users=5)))
    assert fewer["ranking"]["keys"] == ranking["keys"][:5]
    prepared, wanted = Tied(RankingConfig()), {}
    for user in range(15):
        row = next(row for row in range(4 * user, 4 * user + 4) if prepared.rows.labels_N[row])
        users_Q, items_Q = (keys_of(torch.tensor([one]), prepared.own_ids(role))
                            for one, role in ((user, "user"), (row % ITEMS, "item")))  # fmt: skip
        higher_or_same = sum(item // 2 >= row % ITEMS // 2 for item in range(ITEMS))
        wanted[int(users_Q)] = int(paired(users_Q, items_Q)), higher_or_same
    expected = [wanted[user] for user in sorted(wanted)][:12]
    found = list(zip(ranking["keys"], ranking["baselines"]["popularity"]["ranks"]))
    assert found == expected
    mean = sum(1 / rank for _, rank in expected) / 12
    assert ranking["baselines"]["popularity"]["metrics"]["mrr"] == pytest.approx(mean)


def test_one_recommendation_is_timed_without_its_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, called = [0.0], []

    def score(place: int) -> torch.Tensor:
        called.append(place)
        clock[0] += 9.0 if place == 0 else 0.001 * place
        return torch.arange(3.0)

    monkeypatch.setattr(quality, "perf_counter", lambda: clock[0])
    measured = quality.timed(score, 100)
    assert called == list(range(31))
    assert measured is not None
    assert (measured.p20, measured.p50, measured.p80) == pytest.approx((6.8, 15.5, 24.2))
    assert quality.timed(score, 5) is None
    monkeypatch.setattr(quality, "TIMED_S", -1.0)
    called.clear()
    assert quality.timed(score, 100) is not None
    assert len(called) == 6


class Met(Rows):
    """Users meet items with high numbers, and like those with low ones."""

    def baseline_scorers(self) -> dict[str, Any]:
        return dict.fromkeys(("popularity", "rule"), lambda rows_P, items_P: -items_P.float())

    def catalogue(self) -> Any:
        catalogue = super().catalogue()
        catalogue.meeting_is, catalogue.meeting = "by number", lambda rows_P, items_P: 5 * items_P.double()
        return catalogue


def test_predicted_labels_are_ranked_with_the_probability_of_meeting_and_counts_are_not(folder: Path) -> None:
    scores = process(folder, 1, Met(RankingConfig(users=12, negatives=0)))
    ranking, seed = scores["ranking"], scores["seeds"]["1"]["ranking"]["metrics"]
    assert ranking["meeting"] == "by number"
    assert seed == ranking["baselines"]["rule"]["metrics"] != ranking["baselines"]["popularity"]["metrics"]
    assert details(scores, 0.7)["ranking"]["meeting"] == "by number"


class Slow(Rows):
    """Four rules that each take a second, beside a training of half a second."""

    def __init__(self, seconds: float, clock: list[float]) -> None:
        super().__init__(RankingConfig(users=0))
        self.config.baseline_seconds, self.clock = seconds, clock

    def baseline_logits(self) -> Any:
        def fitted() -> torch.Tensor:
            self.clock[0] += 1.0
            return self.rows.labels_N

        return Rules(dict.fromkeys("abcd", fitted))


@pytest.mark.parametrize(("seconds", "fitted"), [(0.0, "abcd"), (0.2, "a"), (1.0, "ab"), (1.6, "abc"), (9.0, "abcd")])
def test_baselines_begin_until_the_time_of_the_training_and_more_is_over(
    folder: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, fitted: str
) -> None:
    clock = [0.0]
    monkeypatch.setattr("recperf.phases.monotonic", lambda: clock[0])
    monkeypatch.setattr(quality, "spent", spent)
    with Phases().current() as phases:
        with phase("training"):
            clock[0] += 0.5
            scores = process(folder, 1, Slow(seconds, clock))
        phases.mark()
    assert "".join(scores["baselines"]) == fitted
    assert "".join(scores.get("left_out", [])) == "abcd"[len(fitted) :]
    assert "".join(details(scores, 0.7).get("left_out", [])) == "abcd"[len(fitted) :]
    assert phases.seconds == {"other": 0.0, "training": 0.5, "baselines": len(fitted), "scoring": 0.0}


def test_changed_scores_are_not_continued(folder: Path) -> None:
    first = process(folder, 1, Rows(RankingConfig(users=12, negatives=0)))
    first["baselines"].popitem()
    (folder / "scores.json").write_text(json.dumps(first))
    with pytest.raises(DataError, match=r"scores\.json is damaged: it was changed after it was written"):
        process(folder, 2, Rows(RankingConfig(users=12, negatives=0)))


def test_finished_seeds_stay_when_baselines_are_computed_again(folder: Path) -> None:
    """As after a change of the training rows: rankings among other items are not comparable, all else is."""
    ranking = RankingConfig(users=5, negatives=0)
    first = process(folder, 1, Rows(ranking))["seeds"]["1"]
    (folder / "baselines.json").unlink()
    seeds = process(folder, 2, Rows(ranking, ITEMS - 1))["seeds"]
    assert seeds["1"] == {name: value for name, value in first.items() if name != "ranking"}
    detailed = details(json.loads((folder / "scores.json").read_text()), 0.7)
    assert detailed["differences"][0]["seeds"] == 2
    assert detailed["ranking"]["differences"][0]["seeds"] == 1
