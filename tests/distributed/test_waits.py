"""The window of several ranks: the slowest rank, and what the others wait for."""

from __future__ import annotations

import pytest
from rank_jobs import dlrm
from rank_pool import needs_torchrec, run_ranks

from recperf.distributed.waits import APART, QUEUED, SEVERAL_HOSTS, RankReadings, Wait, ceiling_shares, summarize

MS = 1_000_000


def rank(came: float, steps: int = 5) -> RankReadings:
    """Steps of a rank that reaches one reduction `came` ms after the step began and has the sum at 30 ms; the step ends
    10 ms later."""
    collectives = []
    for step in range(steps):
        moments = [round((100 * step + ms) * MS) for ms in (came, came, 30.0)]
        collectives.append([Wait(step + 1, "all_reduce", "reduce", *moments, 4096)])
    waits = round((30.0 - came) * MS)
    reading = (40 * MS, {"data": 40 * MS - waits, "reduce_exchange": waits})
    return RankReadings([reading] * steps, collectives)


def test_the_last_rank_to_arrive_is_the_slowest_and_waits_only_for_bytes() -> None:
    found = summarize([rank(5.0), rank(25.0), rank(10.0)])
    assert found.slowest == 1
    assert [row.own_ms for row in found.each] == pytest.approx([15.0, 35.0, 20.0])
    assert [row.late_ms for row in found.each] == pytest.approx([20.0, 0.0, 15.0])
    assert [row.moving_ms for row in found.each] == pytest.approx([5.0, 5.0, 5.0])
    # Two others waited for it, 20 and 15 ms.
    assert [row.awaited_ms for row in found.each] == pytest.approx([0.0, 17.5, 0.0])
    assert found.exposed_ms == pytest.approx((25 + 5 + 20) / 3)
    assert found.late_ms + found.moving_ms == pytest.approx(found.exposed_ms)
    assert found.exposed_share == pytest.approx(50 / 3 / 40)
    (row,) = found.collectives
    assert (row.part, row.what, row.count, row.bytes) == ("reduce", "all_reduce", 1.0, 4096.0)
    assert row.awaited_rank == 1
    assert row.exposed_ms == pytest.approx(found.exposed_ms)


def test_one_slow_step_does_not_make_a_rank_the_slowest() -> None:
    """One step in five in which the faster rank was stopped."""
    ranks = [rank(5.0), rank(25.0)]
    ranks[0].clocked[2] = (5000 * MS, {"data": 5000 * MS})
    found = summarize(ranks)
    assert found.slowest == 1
    assert found.each[0].own_ms == pytest.approx(15.0)
    assert found.steps == 3


@pytest.mark.parametrize("why", [QUEUED, SEVERAL_HOSTS, APART])
def test_waits_that_cannot_be_separated_are_not(why: str) -> None:
    ranks = [rank(5.0), rank(25.0)]
    if why == APART:
        ranks[1].waits[3].pop()
    found = summarize(ranks, hosts=1 + (why == SEVERAL_HOSTS), queued=why == QUEUED)
    assert found.not_told_apart == why
    assert found.slowest == 1
    assert found.exposed_ms == pytest.approx(15.0)
    assert found.late_ms is found.moving_ms is found.each[0].late_ms is None
    assert found.collectives == []


@pytest.mark.parametrize(
    ("ranks", "threads", "cores", "parts"),
    [(2, 1, 2, 2), (4, 1, 2, 2), (2, 2, 2, 1), (2, 8, 64, 2), (16, 4, 32, 8), (2, 4, 2, 1)],
)
def test_a_rank_gets_the_share_of_its_threads(ranks: int, threads: int, cores: int, parts: int) -> None:
    """More ranks than cores take turns, so one of them still has a core for itself."""
    assert ceiling_shares(ranks, threads, cores) == parts


@pytest.mark.long
@needs_torchrec
def test_a_window_of_dlrm_lists_its_collectives() -> None:
    config = dlrm("sgd", "t1=row,t2=table,t3=data-parallel")
    first, second = run_ranks(2, "window", config=config, steps=5)
    found = first.communication
    assert found == second.communication
    assert (found.ranks, found.not_told_apart, len(found.each)) == (2, None, 2)
    counts = {(row.part, row.what): row.count for row in found.collectives}
    assert counts["reduce", "all_reduce"] == 2, "gradients, and signals between hosts"
    assert counts["sparse_update", "all_reduce"] == 1, "the gradients of data-parallel tables"
    assert any(part == "embedding" and what.startswith("all_to_all") for part, what in counts)
    assert {part.name for part in first.components} >= {"embedding_exchange", "reduce_exchange"}
