"""The counted parts of a score, their weights and the ranks by all parts, against a few lines of plain Python."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from next_item_logs import data_of

from recperf.data.next_item import NextItemData, Targets
from recperf.data.next_item_batches import EventsOnDevice, SequenceBatch, histories
from recperf.models.next_item.counting import SMALLEST, Counting
from recperf.train import counting as fitting
from recperf.train.counting import COUNTS, FACT_PULL, PULL, Candidates, counted, fit, take_over
from recperf.train.item_rules import ItemToItem, RecentPopularity, baselines
from recperf.train.next_item import Scorer, rank

CPU = torch.device("cpu")


def fitted(data: NextItemData) -> dict[str, Scorer]:
    return {name: make() for name, make in baselines(data).items()}


def drawn(users: int = 40, items: int = 30, seed: int = 1, *, times: bool = True) -> NextItemData:
    draw = np.random.default_rng(seed)
    shares = 1 / np.arange(1.0, items + 1)
    lines = [draw.choice(items, draw.integers(3, 18), p=shares / shares.sum()) + 1 for _ in range(users)]
    lines[0][0] = items
    return data_of([line.tolist() for line in lines], times=times)


def batch_of(data: NextItemData, targets: Targets) -> SequenceBatch:
    return next(histories(data, EventsOnDevice(data, CPU), targets, length=50, batch_size=1000))


def before(data: NextItemData, targets: Targets) -> list[list[int]]:
    """The items before each target, the newest first."""
    begins = data.offsets_U1[targets.users_N]
    return [data.items_E[begin:end][::-1].tolist() for begin, end in zip(begins, targets.positions_N)]


def test_counted_parts_are_logarithms_of_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each item the two items that followed it most are stored."""
    monkeypatch.setattr(fitting, "FEWEST", 2)
    monkeypatch.setattr(fitting, "ENTRIES", 0)
    monkeypatch.setattr(fitting, "BLOCK", 7)
    data = drawn()
    scorers, test = fitted(data), data.test()
    counting, batch = counted(data, scorers, "kept"), batch_of(data, test)
    assert counting.parts == ("model", "follows", "alike", "popularity", "recent", "own")
    history_BL, pasts = batch.newest(batch.longest), before(data, test)
    for part, name in (("follows", "item_to_item"), ("alike", "item_knn")):
        scorer: Any = scorers[name]
        assert isinstance(scorer, ItemToItem)
        rows = []
        for item in range(data.items):
            _, columns, values = scorer.entries(np.array([item], np.int32))
            highest = np.argsort(-values, kind="stable")[:2]
            rows.append(dict(zip(columns[highest].tolist(), values[highest].tolist())))
        ours = counting.counted(part, history_BL, batch)
        for past, scores_I in zip(pasts, ours.tolist()):
            sums: Counter[int] = Counter()
            for age, item in enumerate(past[:10]):
                for column, value in rows[item - 1].items():
                    sums[column] += scorer.decay**age * value
            total = sum(sums.values())
            expected = [math.log1p(sums[item] / total / SMALLEST) if total else 0.0 for item in range(data.items)]
            assert scores_I == pytest.approx(expected, rel=1e-4)
    trained = [line[:-2] for line in (data.items_E[a:b] for a, b in zip(data.offsets_U1, data.offsets_U1[1:]))]
    events = Counter(int(item) for line in trained for item in line)
    expected = [math.log1p(events[item]) for item in range(1, data.items + 1)]
    assert counting.counted("popularity", history_BL, batch)[3].tolist() == pytest.approx(expected)
    owns = counting.counted("own", history_BL, batch)
    for past, scores_I in zip(pasts, owns.tolist()):
        shares: Counter[int] = Counter()
        for age, item in enumerate(past):
            shares[item] += 1 / (1 + age)  # type: ignore[assignment]
        total = sum(shares.values())
        assert scores_I == pytest.approx([math.log1p(shares[i] / total / SMALLEST) for i in range(1, data.items + 1)])
    recent = scorers["recent_popularity"]
    assert isinstance(recent, RecentPopularity)
    torch.testing.assert_close(counting.counted("recent", history_BL, batch), recent(test).log1p().float())


def test_fewer_moments_of_recent_popularity_come_before_the_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    data = drawn()
    scorers, test = fitted(data), data.test()
    monkeypatch.setattr(fitting, "MOMENTS", 4 * data.items)
    counting, batch = counted(data, scorers, "left-out"), batch_of(data, test)
    recent: Any = scorers["recent_popularity"]
    assert counting.moments_M is not None
    assert len(counting.moments_M) == 4
    at_N = [
        max(moment for moment in counting.moments_M.tolist() if moment <= time)
        for time in data.times_E[test.positions_N]
    ]  # type: ignore[index]
    expected = recent.shares.counts(torch.tensor(at_N), recent.seconds).log1p().float()
    torch.testing.assert_close(counting.counted("recent", batch.newest(50), batch), expected)
    assert int(counting.moments_M[-1]) == int(recent.shares.times_N.max()) + 1


def scored(data: NextItemData, targets: Targets, seed: int, skill: float) -> torch.Tensor:
    """Scores of a model that knows the targets a little."""
    scores_NI = torch.randn(len(targets), data.items, generator=torch.Generator().manual_seed(seed))
    scores_NI[torch.arange(len(targets)), torch.from_numpy(data.items_E[targets.positions_N].astype(np.int64) - 1)] += (
        skill
    )
    return scores_NI


def test_weights_are_those_of_the_likeliest_targets_and_rank_all_items() -> None:
    data = drawn(users=80, times=False)
    validation = data.validation()
    counting, logits_NI = counted(data, fitted(data), "left-out"), scored(data, validation, 2, 1.0)
    batch = batch_of(data, validation)
    found: list[Candidates] = []

    def candidates() -> Candidates:
        found.append(Candidates.of(counting, data, [(validation, logits_NI, batch)], "left-out"))
        return found[-1]

    known = fit(counting, candidates)
    assert known["both"] >= max(known["model"], known[COUNTS])
    # The catalogue is as large as a list of candidates: every item that the user has not met is one.
    pasts, targets = before(data, validation), data.items_E[validation.positions_N]
    fresh = [target not in past for past, target in zip(pasts, targets)]
    assert found[0].own_NJ.any(1).tolist() == fresh
    raw_NC = found[0].facts_NC
    assert raw_NC[5, 0] == 1
    assert float(raw_NC[5, 1]) == pytest.approx(math.log1p(len(pasts[5])))
    events = [math.log1p(float(counting.events_I[item - 1])) for item in pasts[5][:10]]
    assert float(raw_NC[5, 2]) == pytest.approx(sum(events) / len(events))
    ordered = sorted(logits_NI[5].tolist(), reverse=True)
    assert raw_NC[5, 3:].tolist() == pytest.approx([ordered[0], ordered[0] - ordered[9]])
    facts_NC = ((raw_NC - raw_NC.mean(0)) / raw_NC.std(0, correction=0).clamp(min=1e-9)).clone()
    facts_NC[:, 0] = 1
    history_BL = batch.newest(batch.longest)
    parts = [logits_NI, *(counting.counted(name, history_BL, batch) for name in counting.parts[1:])]
    usual_P = torch.tensor([fitting.USUAL[name] for name in counting.parts], dtype=torch.float64)
    weights_CP = torch.zeros(5, 4, dtype=torch.float64)
    weights_CP[0] = usual_P
    weights_CP.requires_grad_()
    optimizer = torch.optim.LBFGS([weights_CP], max_iter=500, tolerance_grad=1e-9, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = PULL * (weights_CP[0] - usual_P).square().sum() + FACT_PULL * weights_CP[1:].square().sum()
        for row, (past, target) in enumerate(zip(pasts, targets)):
            if fresh[row]:
                left = [item - 1 for item in range(1, data.items + 1) if item not in past]
                scores = sum(
                    (facts_NC[row] @ weights_CP)[number] * part[row, left].double() for number, part in enumerate(parts)
                )
                value = value - scores.log_softmax(0)[left.index(target - 1)]
        value.backward()
        return value

    optimizer.step(loss)
    scaled = Candidates(facts_NC, found[0].scores_NJP, found[0].there_NJ, found[0].own_NJ)
    torch.testing.assert_close(scaled.fitted(usual_P), weights_CP.detach(), rtol=1e-4, atol=1e-5)

    # Of the weights that count, whatever they are: the rank of each target by brute force.
    ours = rank(data, validation, lambda part: counting(logits_NI, batch), seen="left-out").ranks_N
    weights_NP = ((raw_NC - counting.means_C) / counting.scales_C) @ counting.weights_CP
    gained = 0.0
    for row, (past, target) in enumerate(zip(pasts, targets)):
        sums = [
            sum(float(weights_NP[row, number]) * float(part[row, item]) for number, part in enumerate(parts))
            for item in range(data.items)
        ]
        left = [item for item in range(1, data.items + 1) if item not in past]
        better = sum(sums[item - 1] >= sums[target - 1] - 1e-9 for item in left)
        assert int(ours[row]) == (better if fresh[row] else data.items)
        gained += 1 / math.log2(1 + better) if fresh[row] and better <= 10 else 0.0
    assert known["both"] == pytest.approx(gained / len(targets))


@pytest.mark.parametrize(("skill", "best"), [(9.0, "model"), (-9.0, COUNTS)])
def test_what_surely_ranks_validation_targets_better_counts(skill: float, best: str) -> None:
    data = drawn(users=60)
    validation = data.validation()
    counting, logits_NI = counted(data, fitted(data), "kept"), scored(data, validation, 3, skill)
    known = fit(
        counting, lambda: Candidates.of(counting, data, [(validation, logits_NI, batch_of(data, validation))], "kept")
    )
    assert known["both"] >= known[best] > known[{"model": COUNTS, COUNTS: "model"}[best]]
    for name, scorer in fitted(data).items():
        assert known[COUNTS] >= rank(data, validation, scorer, seen="kept").metrics()["ndcg_10"] - 1e-9, name


def test_the_tables_of_a_checkpoint_have_any_size() -> None:
    data = drawn()
    counting, other = counted(data, fitted(data), "kept"), Counting(recent=True, own=True, started=False)
    other.load_state_dict(counting.state_dict())
    batch = batch_of(data, data.test())
    logits_NI = scored(data, data.test(), 4, 1.0)
    counting.weights_CP.fill_(0.3)
    other.weights_CP.fill_(0.3)
    assert torch.equal(other(logits_NI, batch), counting(logits_NI, batch))


def test_counts_of_an_earlier_run_go_on_by_the_numbers_of_items() -> None:
    """Items 1, 2 and 3 of the earlier data are 4, 1 and none of the new; what that run took over itself counts too."""
    data = drawn(items=5)
    counting = counted(data, fitted(data), "left-out", started=True)
    assert counting.counted("earlier", torch.tensor([[4, 1]]), batch_of(data, data.test())).tolist() == [[0.0] * 5]
    saved = {
        "counting.follows.offsets_I1": torch.tensor([0, 2, 3, 3]),
        "counting.follows.columns_W": torch.tensor([1, 2, 0], dtype=torch.int32),
        "counting.follows.values_W": torch.tensor([2.0, 5.0, 3.0]),
        "counting.earlier.offsets_I1": torch.tensor([0, 1, 1, 2]),
        "counting.earlier.columns_W": torch.tensor([1, 0], dtype=torch.int32),
        "counting.earlier.values_W": torch.tensor([0.5, 7.0]),
    }
    take_over(counting, saved, (torch.tensor([0, 1, 2]), torch.tensor([0, 4, 1])))
    decay = float(counting.follows.decay_1)
    # After 4 (1 there) came 1 (2 there) 2.5 times, after 1 came 4 three times.
    total = 2.5 + 3 * decay
    expected = [math.log1p(2.5 / total / SMALLEST), 0, 0, math.log1p(3 * decay / total / SMALLEST), 0]
    scores = counting.counted("earlier", torch.tensor([[4, 1]]), batch_of(data, data.test()))
    assert scores.tolist() == [pytest.approx(expected, rel=1e-5)]
