"""Signs of life between ranks: who is missing, who hangs, who only has ended."""

from __future__ import annotations

from typing import Any

import pytest
from torch import distributed

from recperf.distributed import heartbeat
from recperf.distributed.heartbeat import ENDED, FAILED, FAILED_S, SILENT_S, Heartbeat

TIMEOUT_S = 60.0


@pytest.fixture
def ranks() -> list[Heartbeat]:
    """Three ranks that have met; their threads are not started."""
    store = distributed.HashStore()  # type: ignore[attr-defined]

    def lost(*_: Any) -> None:
        raise AssertionError("called without threads")

    return [Heartbeat(store, rank, 3, TIMEOUT_S, lost) for rank in range(3)]


def pass_time(ranks: list[Heartbeat], seconds: float, alive: tuple[int, ...] = (0, 1, 2)) -> list[Any]:
    """What each living rank concludes after some seconds, in which only they write."""
    results: list[Any] = [None] * len(ranks)
    for _ in range(round(seconds)):
        for rank in alive:
            ranks[rank].write()
        for rank in alive:
            ranks[rank].read()
            results[rank] = results[rank] or ranks[rank].age(1.0)
    return results


def test_a_silent_rank_is_missing_and_one_that_has_ended_is_not(ranks: list[Heartbeat]) -> None:
    assert pass_time(ranks, 3 * SILENT_S) == [None] * 3
    ranks[2].stop(ENDED)
    assert pass_time(ranks, 3 * SILENT_S, (0, 1)) == [None] * 3
    # Rank 0 is killed: rank 1 is left to name it.
    missing, cause = pass_time(ranks, SILENT_S, (1,))[1]
    assert list(missing) == [0]
    assert cause == "no sign of life for 20 s"
    assert [ranks[rank].reports(missing) for rank in (1, 2)] == [True, False]


def test_a_rank_that_lives_but_does_not_reach_a_collective_hangs(
    ranks: list[Heartbeat], monkeypatch: pytest.MonkeyPatch
) -> None:
    from recperf.distributed.progress import Progress

    for rank, collectives in enumerate((7, 6, 7)):
        ranks[rank].count = lambda number=collectives: number  # type: ignore[misc]
    assert pass_time(ranks, TIMEOUT_S) == [None] * 3, "as long as a collective may take"
    monkeypatch.setattr(heartbeat.progress, "current", lambda: Progress("step 3: update", "sparse_update"))
    first, hung, third = pass_time(ranks, FAILED_S + 2)
    assert first[0] == third[0] == {1: Progress("step 3: update", "sparse_update")}
    assert hung is None
    assert first[1] == "the other ranks have waited in a collective for 65 s"


def test_ranks_follow_one_that_failed_and_let_it_report(ranks: list[Heartbeat]) -> None:
    ranks[1].stop(FAILED)
    assert pass_time(ranks, FAILED_S - 1, (0, 2)) == [None] * 3
    assert pass_time(ranks, 2, (0, 2)) == [({}, "another rank has failed"), None, ({}, "another rank has failed")]


def test_many_ranks_read_each_other_less_often() -> None:
    periods = [Heartbeat(distributed.HashStore(), 0, size, TIMEOUT_S, print).period_s for size in (2, 64, 1024)]  # type: ignore[attr-defined]
    assert periods == [1.0, 1.0, 16.0]
