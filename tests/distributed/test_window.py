"""The window of several ranks: the slowest rank, waits, and clocks."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click_jobs import dlrm
from rank_pool import needs_torchrec, run_ranks

from recperf.distributed.waits import Clock, Wait
from recperf.distributed.window import APART, QUEUED, RankReadings, ceiling_shares, summarize
from recperf.measure.limits import ranks_sentence, verdict_of
from recperf.measure.profile import BLOCK, ClockedSteps, Reading

MS = 1_000_000


def rank(
    came: float, *, ahead: float = 0.0, host: str = "one", own: float | None = None, steps: int = 5
) -> RankReadings:
    """Steps of a rank that reaches one reduction `came` ms after the step began and has the sum at 30 ms; the step ends
    10 ms later. Its own clock is `ahead`."""
    collectives = []
    for step in range(steps):
        begin = 100 * step + ahead
        moments = [round((begin + ms) * MS) for ms in (came, came, 30.0)]
        collectives.append([Wait(step + 1, "all_reduce", "reduce", *moments, 4096)])
    waits = round((30.0 - came) * MS)
    reading = (40 * MS, {"data": 40 * MS - waits, "reduce_exchange": waits})
    return RankReadings([reading] * steps, [39 * MS] * steps, collectives, Clock(host, round(ahead * MS), 0))


def test_the_last_rank_to_arrive_is_the_slowest_and_waits_only_for_bytes() -> None:
    found = summarize([rank(5.0), rank(25.0), rank(10.0)])
    assert found["slowest"] == 1
    assert [row["own_ms"] for row in found["each"]] == pytest.approx([15.0, 35.0, 20.0])
    assert [row["late_ms"] for row in found["each"]] == pytest.approx([20.0, 0.0, 15.0])
    assert [row["moving_ms"] for row in found["each"]] == pytest.approx([5.0, 5.0, 5.0])
    # Two others waited for it, 20 and 15 ms.
    assert [row["awaited_ms"] for row in found["each"]] == pytest.approx([0.0, 17.5, 0.0])
    assert found["exposed_ms"] == pytest.approx((25 + 5 + 20) / 3)
    assert found["late_ms"] + found["moving_ms"] == pytest.approx(found["exposed_ms"])
    assert found["exposed_share"] == pytest.approx(50 / 3 / 40)
    (row,) = found["collectives"]
    assert (row["part"], row["what"], row["count"], row["bytes"]) == ("reduce", "all_reduce", 1.0, 4096.0)
    assert row["awaited_rank"] == 1
    assert row["exposed_ms"] == pytest.approx(found["exposed_ms"])


def test_a_clock_offset_changes_nothing() -> None:
    alike, ahead = summarize([rank(5.0), rank(25.0)]), summarize([rank(5.0), rank(25.0, ahead=1e6, host="two")])
    assert ahead["hosts"] == 2
    assert {**ahead, "hosts": 1} == alike


def test_one_slow_step_does_not_make_a_rank_the_slowest() -> None:
    """One step in five in which the faster rank was stopped."""
    ranks = [rank(5.0), rank(25.0)]
    ranks[0].clocked[2] = (5000 * MS, {"data": 5000 * MS})
    found = summarize(ranks)
    assert found["slowest"] == 1
    assert found["each"][0]["own_ms"] == pytest.approx(15.0)
    assert found["steps"] == 3


@pytest.mark.parametrize(("queued", "why"), [(True, QUEUED), (False, APART)])
def test_waits_that_cannot_be_separated_are_not(queued: bool, why: str) -> None:
    ranks = [rank(5.0), rank(25.0)]
    if not queued:
        ranks[1].waits[3].pop()
    found = summarize(ranks, queued=queued)
    assert found["not_told_apart"] == why
    assert found["slowest"] == 1
    assert found["exposed_ms"] == pytest.approx(15.0)
    assert found["late_ms"] is found["moving_ms"] is found["each"][0]["late_ms"] is None
    assert found["collectives"] == []


def profile(ranks: list[RankReadings], share: float) -> dict[str, Any]:
    parts = [("data", "data", 1 - share), ("reduce_exchange", "communication", share)]
    return {
        "device": "cpu",
        "components": [
            {"name": name, "phase": phase, "share": part, "ms": {"p50": 40 * part}, "flops": None, "bytes": None}
            for name, phase, part in parts
        ],
        "step_ms": {"p20": 39.0, "p50": 40.0, "p80": 41.0},
        "ids": {"lookups": 0, "row_bytes": 64, "touched_bytes": 0},
        "communication": summarize(ranks),
        "observed": {
            "step_ms": {"p20": 39.0, "p50": 40.0, "p80": 41.0},
            "waits": {"input": 40 * (1 - share), "communication": 40 * share},
            "operators": [],
            "other_work": 0.0,
        },
    }


def test_the_verdict_names_the_slowest_rank_and_the_exposed_communication() -> None:
    verdict = verdict_of(profile([rank(5.0), rank(25.0)], 0.125), None)["verdict"]
    assert verdict["limit"] == "input"
    sentence = verdict["because"][-1]
    assert "Rank 1 of 2 is the slowest: its own work takes 35.0 ms per step, that of the others 15.0 ms." in sentence
    assert "ranks wait in collectives for 38% of a step, 15.0 ms: 10.0 ms for a late rank" in sentence
    assert verdict_of(profile([rank(5.0), rank(5.0)], 0.6), None)["verdict"]["limit"] == "communication"
    assert "by less than 5%" in ranks_sentence(profile([rank(5.0), rank(5.1)], 0.6)["communication"])
    assert ranks_sentence({"missing": "one rank"}) == ""


@pytest.mark.parametrize(
    ("ranks", "threads", "cores", "parts"),
    [(2, 1, 2, 2), (4, 1, 2, 2), (2, 2, 2, 1), (2, 8, 64, 2), (16, 4, 32, 8), (2, 4, 2, 1)],
)
def test_a_rank_gets_the_share_of_its_threads(ranks: int, threads: int, cores: int, parts: int) -> None:
    """More ranks than cores take turns, so one of them still has a core for itself."""
    assert ceiling_shares(ranks, threads, cores) == parts


@needs_torchrec
def test_clock_offsets_between_hosts_are_measured() -> None:
    """A rank that claims another host, with a clock 3 s ahead; and two that share one."""
    first, second = run_ranks(2, "clocks", ahead_ns=3 * 10**9)
    assert first["apart"] == (0, 0)
    ahead, error = second["apart"]
    assert 0 < error < 10**9
    assert abs(ahead - 3 * 10**9) <= error
    assert first["shared"] == second["shared"] == (0, 0)


@needs_torchrec
def test_ranks_begin_a_step_at_the_same_moment_even_if_one_is_late() -> None:
    """The second rank is late, and learns 60 ms after the first that all have arrived, as it may in a barrier."""
    first, second = run_ranks(2, "starts", late=0.06, margin=0.1)
    for (came, left), (other_came, other_left) in zip(first, second):
        assert min(left, other_left) >= max(came, other_came)
    # The median, since a round may hit a busy core.
    assert statistics.median(abs(left - other) for (_, left), (_, other) in zip(first, second)) < 30 * MS


def test_plain_steps_are_not_watched_and_clocked_ones_follow_a_step_that_is() -> None:
    """A step may wait for what the one before it began."""
    inside, seen = [False], []

    @contextmanager
    def watch() -> Iterator[None]:
        inside[0] = True
        yield
        inside[0] = False

    def step(batches: Iterator[Any]) -> None:
        next(batches)
        seen.append(("step", inside[0]))

    def clocked(batches: Iterator[Any]) -> Reading:
        next(batches)
        seen.append(("clocked", inside[0]))
        return 1, {"data": 1}

    steps: Any = SimpleNamespace(
        order=Order(), first_epoch=0, row_bytes=1, table_bytes=1, sync=None, step=step, clocked=clocked,
        rows_of=lambda batch: torch.zeros(1, dtype=torch.long), cost_of=lambda batch, ids, unique: {},
        ranks=SimpleNamespace(watch=watch, meet=lambda: None),
    )  # fmt: skip
    window = ClockedSteps(steps)
    window.take(BLOCK + 1)
    block = lambda steps: [("step", False)] * steps + [("step", True)] + [("clocked", True)] * steps  # noqa: E731
    assert seen == block(BLOCK) + block(1)
    assert (len(window.plain), len(window.clocked), window.warmup) == (BLOCK + 1, BLOCK + 1, 2)


class Order:
    def __len__(self) -> int:
        return 100

    def batches(self, epoch: int, start: int = 0) -> Iterator[list[int]]:
        return iter([[0]] * 100)


@needs_torchrec
def test_a_window_of_dlrm_lists_its_collectives() -> None:
    config = dlrm("sgd", "t1=row,t2=table,t3=data-parallel")
    first, second = run_ranks(2, "click_jobs.window", config=config, steps=5)
    found = first["communication"]
    assert found == second["communication"]
    assert (found["ranks"], found["not_told_apart"], len(found["each"])) == (2, None, 2)
    counts = {(row["part"], row["what"]): row["count"] for row in found["collectives"]}
    assert counts["reduce", "all_reduce"] == 2, "gradients, and signals between hosts"
    assert counts["sparse_update", "all_reduce"] == 1, "the gradients of data-parallel tables"
    assert any(part == "embedding" and what.startswith("all_to_all") for part, what in counts)
    assert {part["name"] for part in first["components"]} >= {"embedding_exchange", "reduce_exchange"}
