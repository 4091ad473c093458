"""Signs of life between ranks: who is missing, who hangs, who only has ended."""

from __future__ import annotations

import contextlib
import json
from threading import Event, Thread
from typing import Any

import pytest
from torch import distributed

from recperf.distributed import exits, heartbeat
from recperf.distributed.heartbeat import ENDED, FAILED, FAILED_S, LEFT, SILENT_S, STEP_S, Heartbeat
from recperf.distributed.progress import Progress
from recperf.distributed.world import World

TIMEOUT_S = 60.0


class Store:
    """A store in this process that goes away, or in which a write takes until it is let go."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.gone = False
        self.reached, self.slow = Event(), Event()
        self.slow.set()

    def set(self, key: str, value: str) -> None:
        self.reached.set()
        self.slow.wait(5)
        self._require()
        self.values[key] = value

    def multi_get(self, keys: list[str]) -> list[str]:
        self._require()
        return [self.values[key] for key in keys]

    def _require(self) -> None:
        if self.gone:
            raise RuntimeError("connection reset by peer")


def state(store: Store, rank: int) -> str:
    return str(json.loads(store.values[f"alive/{rank}"])[1])


@pytest.fixture
def ranks() -> list[Heartbeat]:
    """Three ranks that have met; their threads are not started."""
    store = Store()

    def lost(*_: Any) -> None:
        raise AssertionError("called without threads")

    return [Heartbeat(store, rank, 3, TIMEOUT_S, lost) for rank in range(3)]


def pass_time(ranks: list[Heartbeat], seconds: float, alive: tuple[int, ...] = (0, 1, 2)) -> list[Any]:
    """What each living rank concludes after some seconds, in which only they write."""
    results: list[Any] = [None] * len(ranks)
    for _ in range(round(seconds)):
        for rank in alive * 2:
            with contextlib.suppress(RuntimeError):
                ranks[rank].talk()
        for rank in alive:
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
    for rank, collectives in enumerate((7, 6, 7)):
        ranks[rank].count = lambda number=collectives: number  # type: ignore[misc]
    assert pass_time(ranks, TIMEOUT_S) == [None] * 3, "as long as a collective may take"
    monkeypatch.setattr(heartbeat.progress, "current", lambda: Progress("step 3: update", "sparse_update"))
    first, hung, third = pass_time(ranks, FAILED_S + 2)
    assert first[0] == third[0] == {1: Progress("step 3: update", "sparse_update")}
    assert hung is None
    assert first[1] == "the other ranks have waited in a collective for 65 s"


@pytest.mark.parametrize(("activity", "longest", "allowed"), [
    ("step 3: update", 0.1, STEP_S), ("step 3: update", 40.0, 120.0), ("step 3: update", 0.0, 305.0),
    ("step 3: done", 0.1, 305.0), ("saving step 3", 0.1, 305.0), ("waiting for a batch", 0.1, 305.0),
])  # fmt: skip
def test_a_step_has_a_limit_of_its_own_but_not_the_first_nor_a_save(
    ranks: list[Heartbeat], monkeypatch: pytest.MonkeyPatch, activity: str, longest: float, allowed: float
) -> None:
    for rank, collectives in enumerate((7, 6, 7)):
        ranks[rank].count = lambda number=collectives: number  # type: ignore[misc]
        ranks[rank]._hang_s = 305.0
    monkeypatch.setattr(heartbeat.progress, "current", lambda: Progress(activity, ""))
    monkeypatch.setattr(heartbeat.progress, "longest_step_s", lambda: longest)
    assert pass_time(ranks, allowed - 1) == [None] * 3
    first, hung, third = pass_time(ranks, 2)
    assert (
        first == third == ({1: Progress(activity)}, f"the other ranks have waited in a collective for {allowed:.0f} s")
    )
    assert hung is None


def test_a_store_that_is_gone_says_nothing_about_living_ranks(
    ranks: list[Heartbeat], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each host's first rank names the ranks of the other hosts; here ranks 1 and 2 are on one host."""
    pass_time(ranks, 3)
    ranks[0]._store.gone = True
    _, *left = pass_time(ranks, SILENT_S, (1, 2))
    assert left == [(None, "the store in which the ranks met gave no answer for 20 s")] * 2
    named: list[Any] = []
    monkeypatch.setattr(exits, "_exit_now", lambda code: named.append(code))
    for local, rank in enumerate((1, 2)):
        world = World(rank=rank, size=3, local_rank=local, local_size=2, heartbeat=ranks[rank])
        exits._end_lost(world, lambda error: named.append((error.what, error.where.get("also missing"))), *left[local])
    assert named == [("rank 0 of 3 is gone or does not respond; all ranks stop", None), 4, 4]


def test_a_rank_0_that_ended_takes_the_store_along(ranks: list[Heartbeat]) -> None:
    ranks[0].period_s = 0.1
    ranks[1].stop(ENDED)
    ranks[0].stop(ENDED)
    pass_time(ranks, 1, (2,))
    ranks[0]._store.gone = True
    assert pass_time(ranks, 3 * SILENT_S, (2,)) == [None] * 3


def test_rank_0_waits_until_the_others_have_ended(ranks: list[Heartbeat]) -> None:
    ranks[1].stop(FAILED)
    ending = Thread(target=ranks[0].stop, args=(ENDED,))
    ending.start()
    ending.join(0.2)
    assert ending.is_alive()
    ranks[2].stop(ENDED)
    ending.join(1)
    assert not ending.is_alive()


def test_nothing_is_written_after_the_last_word(ranks: list[Heartbeat]) -> None:
    store = ranks[1]._store
    store.slow.clear()
    store.reached.clear()
    talking, ending = Thread(target=ranks[1].talk), Thread(target=ranks[1].stop, args=(ENDED,))
    talking.start()
    assert store.reached.wait(5)
    ending.start()
    ending.join(0.1)
    store.slow.set()
    for thread in (talking, ending):
        thread.join(5)
    assert state(store, 1) == ENDED
    ranks[1].talk()
    assert state(store, 1) == ENDED


def test_one_of_the_ranks_that_still_run_names_a_missing_one(ranks: list[Heartbeat]) -> None:
    missing = {2: Progress()}
    assert [ranks[rank].reports(missing) for rank in (0, 1)] == [True, False]
    for end, reports in ((ENDED, True), (LEFT, True), (FAILED, False)):
        ranks[1].signs[0].state = end
        assert ranks[1].reports(missing) == reports, f"rank 0 has {end}; one that failed has reported it"


def test_ranks_follow_one_that_failed_and_let_it_report(ranks: list[Heartbeat]) -> None:
    ranks[1].stop(FAILED)
    assert pass_time(ranks, FAILED_S - 1, (0, 2)) == [None] * 3
    assert pass_time(ranks, 2, (0, 2)) == [({}, "another rank has failed"), None, ({}, "another rank has failed")]


def test_many_ranks_read_each_other_less_often() -> None:
    periods = [Heartbeat(distributed.HashStore(), 0, size, TIMEOUT_S, print).period_s for size in (2, 64, 1024)]  # type: ignore[attr-defined]
    assert periods == [1.0, 1.0, 16.0]
