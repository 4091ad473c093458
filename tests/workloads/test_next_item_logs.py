"""On logs of every kind a next-item model with its counts is not below the best rule that counts, by more than the
interval over users: drawn logs in which order decides, or does not, or only popularity does, and small ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from recperf.data.next_item import NextItemData
from recperf.train.device import applied
from recperf.train.loop import take_step
from recperf.train.ranking import gains
from recperf.workloads.next_item.build import PreparedSequences
from recperf.workloads.next_item.config import SequencesConfig, default
from recperf.workloads.next_item.data import SequenceSource

Draw = np.random.Generator
Lines = list[list[int]]
INTERVAL = 1.96


def zipf(draw: Draw, items: int, count: int, power: float = 1.0) -> list[int]:
    shares = 1 / np.arange(1.0, items + 1) ** power
    picked: list[int] = (draw.choice(items, count, p=shares / shares.sum()) + 1).tolist()
    return picked


def ring(draw: Draw, items: int, count: int, noise: float, step: int = 1) -> list[int]:
    """Each item is followed by the next of a ring, but for some noise."""
    line = [int(draw.integers(items))]
    while len(line) < count:
        line.append(int(draw.integers(items)) if draw.random() < noise else (line[-1] + step) % items)
    return [item + 1 for item in line]


def second_order(draw: Draw, items: int, count: int) -> list[int]:
    """What follows depends on the last two items."""
    line = draw.integers(items, size=2).tolist()
    while len(line) < count:
        line.append((3 * line[-1] + 5 * line[-2]) % items if draw.random() < 0.8 else int(draw.integers(items)))
    return [item + 1 for item in line]


def groups(draw: Draw, items: int, count: int, size: int = 10) -> list[int]:
    """A user takes different items of one group, in any order."""
    group = int(draw.integers(items // size))
    return [int(item) + 1 for item in group * size + draw.permutation(size)[: min(count, size)]]


def repeats(draw: Draw, items: int, count: int) -> list[int]:
    """A user has a few items and takes them again."""
    own = draw.choice(items, 4, replace=False) + 1
    return [int(draw.choice(own)) if draw.random() < 0.8 else int(draw.integers(items)) + 1 for _ in range(count)]


def dominated(draw: Draw, items: int, count: int) -> list[int]:
    return [1 if draw.random() < 0.7 else item for item in zipf(draw, items, count)]


def drift(draw: Draw, users: int, items: int, count: int) -> tuple[Lines, list[list[int]]]:
    """Popular items change with time; users come at any time."""
    lines, times = [], []
    for _ in range(users):
        start = draw.integers(1000)
        at = np.sort(start + draw.integers(0, 200, count))
        lines.append([int((moment // 30 * 7 + draw.geometric(0.3)) % items) + 1 for moment in at])
        times.append((at * 3600).tolist())
    return lines, times


def each(users: int, line: Callable[[Draw], list[int]]) -> Callable[[Draw], tuple[Lines, list[list[int]] | None]]:
    return lambda draw: ([line(draw) for _ in range(users)], None)


def length(draw: Draw, least: int = 4, most: int = 14) -> int:
    return int(draw.integers(least, most))


LOGS: dict[str, Callable[[Draw], tuple[Lines, list[list[int]] | None]]] = {
    "order": each(200, lambda draw: ring(draw, 60, length(draw), 0.2)),
    "noisy order": each(200, lambda draw: ring(draw, 60, length(draw), 0.7)),
    "order of two": each(250, lambda draw: second_order(draw, 30, length(draw, 8, 20))),
    "every second item": each(200, lambda draw: ring(draw, 61, length(draw), 0.3, 2)),
    "groups without order": each(200, lambda draw: groups(draw, 100, length(draw, 4, 9))),
    "large groups": each(200, lambda draw: groups(draw, 200, length(draw, 4, 12), 25)),
    "popularity only": each(250, lambda draw: zipf(draw, 80, length(draw))),
    "steep popularity": each(250, lambda draw: zipf(draw, 80, length(draw), 2.0)),
    "flat popularity": each(200, lambda draw: zipf(draw, 40, length(draw), 0.2)),
    "no structure": each(200, lambda draw: (draw.integers(100, size=length(draw)) + 1).tolist()),
    "repeats": each(150, lambda draw: repeats(draw, 60, length(draw, 8, 20))),
    "50 users": each(50, lambda draw: ring(draw, 40, length(draw), 0.4)),
    "50 users without order": each(50, lambda draw: groups(draw, 60, length(draw, 4, 9))),
    "5 items": each(150, lambda draw: ring(draw, 5, length(draw), 0.5)),
    "one item dominates": each(200, lambda draw: dominated(draw, 60, length(draw))),
    "many items": each(150, lambda draw: ring(draw, 900, length(draw), 0.1)),
    "long histories": each(60, lambda draw: ring(draw, 50, length(draw, 40, 80), 0.5)),
    "short histories": each(400, lambda draw: ring(draw, 50, 3, 0.3)),
    "drift": lambda draw: drift(draw, 200, 80, 8),
    "drift of few items": lambda draw: drift(draw, 150, 12, 6),
}


def data_of(name: str) -> NextItemData:
    lines, times = LOGS[name](np.random.default_rng(sum(name.encode())))
    return NextItemData(
        name=name, items=max(map(max, lines)), users=len(lines),
        offsets_U1=np.concatenate([[0], np.cumsum([len(line) for line in lines])]),
        items_E=np.concatenate(lines).astype(np.int32),
        times_E=None if times is None else np.concatenate(times),
    )  # fmt: skip


def margins(name: str, epochs: int) -> dict[str, tuple[float, float]]:
    """By how much NDCG@10 of the test is above that of each rule, and half of the interval."""
    data, config = data_of(name), default()
    model = replace(config.model, items=data.items, dim=16, blocks=1, heads=1, max_length=20)
    train = replace(config.train, batch_size=32, device="cpu", threads=1)
    prepared = PreparedSequences(replace(config, model=model, train=train), data)
    torch.manual_seed(1)
    trial = prepared.trial(1)
    with applied(prepared.settings), torch.no_grad():
        for epoch in range(epochs):
            trial.recipe.model.train()
            batches = trial.recipe.order.batches(epoch)
            for step in range(len(trial.recipe.order)):
                with torch.enable_grad():
                    take_step(trial.recipe, batches, step)
        trial.recipe.model.train(False)
        ranks_N = trial.predictions().ranks_N
        assert ranks_N is not None
        own_N = gains(ranks_N - 1, ranks_N * 0)["ndcg_10"]
        found = {}
        for rule, make in prepared.baselines.items():
            theirs_N = prepared.ranks(prepared.sequences.test, make()).ranks_N
            more_N = own_N - gains(theirs_N - 1, theirs_N * 0)["ndcg_10"]
            found[rule] = float(more_N.mean()), INTERVAL * float(more_N.std()) / len(more_N) ** 0.5
    return found


@pytest.mark.parametrize("name", LOGS)
def test_a_model_is_not_below_counting(name: str) -> None:
    for rule, (more, half) in margins(name, 2).items():
        assert more + half >= 0, (rule, more, half)


@pytest.mark.long
@pytest.mark.parametrize("name", LOGS)
def test_a_longer_training_is_not_below_counting(name: str) -> None:
    for rule, (more, half) in margins(name, 20).items():
        assert more + half >= 0, (rule, more, half)


def test_of_many_users_some_are_drawn_whose_test_items_are_ranked() -> None:
    few, again = (SequenceSource(SequencesConfig(users=300, test_users=50)) for _ in range(2))
    every = SequenceSource(SequencesConfig(users=300, test_users=0))
    assert (len(every.test), few.facts()["valid_rows"], few.facts()["rows"]) == (300, 50, every.facts()["rows"])
    assert few.test.users_N.tolist() == again.test.users_N.tolist()
    assert set(few.test.positions_N.tolist()) < set(every.test.positions_N.tolist())
    assert few.train.users_S.tolist() == every.train.users_S.tolist()
