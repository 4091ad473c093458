"""A step of two ranks and its memory, worked out by hand: every term of every part.

Two samples of each rank's four need table a (ids 2 a sample, 2 + n / 2 different ones of n samples), in blocks of rows,
and table b (1 a sample, 1 + n / 2 different ones), whole on rank 0. A number has 4 bytes and an id 8; each rank is sent
an equal part of the numbers.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from toy_plan import PLAIN, WIRES, table, work, workload

from recperf.distributed import balance
from recperf.distributed.config import DistributedConfig
from recperf.errors import UsageError
from recperf.measure.cost import Cost
from recperf.planning.devices import Attention, Device, KnownRates, Network
from recperf.planning.memory import rank_demand
from recperf.planning.predict import PARTS, Band, Prediction, error_band, exposed, limit_shares, part_seconds, predict
from recperf.planning.sharding import Parallelism, largest_share, later
from recperf.planning.work import Work

A = table("a", rows=800, dim=4, distinct=lambda samples: 2 + samples / 2)
B = table("b", rows=100, dim=8, ids=1.0, vectors=1.0, distinct=lambda samples: 1 + samples / 2)
ROWS = Parallelism(sharding="row,b=table", overlap="off", pipeline=False)


def predicted(
    parallelism: Parallelism = ROWS, device: Device = PLAIN, network: Network = WIRES, ranks: int = 2, **fields: Any
) -> Prediction:
    return predict(workload(4 * ranks, work(tables=(A, B), **fields)), ranks, device, network, parallelism)


def test_the_parts_of_a_step() -> None:
    plan = predicted(device=replace(PLAIN, call_s=1e-3, host_bytes_per_s=1e9), prepare_s=1e-3, calls=14)
    assert (plan.rank_batch, plan.global_batch) == (4, 8)
    expected = {
        "input": 4e-3,
        "transfer": 4e-3,
        # 10 ids come to rank 0, and two messages of a few bytes before them.
        "ids all-to-all": 3e-4 + 80 / 2 / 1e10,
        # Rank 0 reads 4 rows of 4 numbers and 6 of 8 with their ids, and writes the 64 numbers that it sends.
        "lookup": (4 * 24 + 6 * 40 + 256) / 1e12,
        "rows all-to-all": 1e-4 + 256 / 2 / 1e10,
        "dense forward": 8e-3,
        "dense backward": 16e-3,
        "late ranks": 0.0,
        "all-reduce": 4e6 / 1e10 + 2e-4,
        "gradients all-to-all": 1e-4 + 256 / 2 / 1e10,
        # Of 4 and 6 requested rows 3 and 5 are different ones: each is read and written with a number of state.
        "table update": (3 * 2 * 4 * 5 + 8 * 4 + 5 * 2 * 4 * 9 + 8 * 6 + 256) / 1e12,
        "dense update": 5e-3,
        "calls": (14 + 106) * 1e-3,
        "launches": 0.0,
    }
    assert plan.step.parts == pytest.approx(expected, rel=1e-12)
    assert list(plan.step.parts) == list(PARTS)
    # The host calls operators while the device computes; nothing else overlaps.
    computed = 29e-3 + expected["lookup"] + expected["table update"]
    left = expected | {"calls": 120e-3 - computed}
    assert plan.step.exposed == pytest.approx(left, rel=1e-12)
    seconds = sum(left.values())
    assert plan.step.value == pytest.approx(seconds, rel=1e-12)
    assert plan.step.samples_per_s == pytest.approx(8 / seconds, rel=1e-12)
    # Calls take longer than everything that is computed, so the host decides their whole time, and that of the input.
    host = 124e-3 / seconds
    assert plan.step.factors == pytest.approx(
        ((1 - host) * 0.77 / 1.05 + host * 0.55, (1 - host) * 1.25 * 1.05 + host * 1.30), rel=1e-12
    )
    messages = sum(left[name] for name in left if name.startswith(("all-reduce", "ids", "rows", "gradients")))
    assert plan.step.shares == pytest.approx(
        dict.fromkeys(plan.step.shares, 0.0)
        | {
            "input": 4e-3 / seconds,
            "transfer": 4e-3 / seconds,
            "dispatch": left["calls"] / seconds,
            "communication": messages / seconds,
            "compute": 12e-3 / seconds,
            "bandwidth": (17e-3 + left["lookup"] + left["table update"]) / seconds,
        },
        rel=1e-9,
    )
    assert plan.step.limit == "dispatch"
    assert predicted().step.limit == "bandwidth"


def test_requests_without_dedup_and_numbers_of_two_bytes() -> None:
    """Without dedup rank 0 gets 8 ids of each table; updates touch the same 3 and 5 rows as before."""
    parts = predicted(replace(ROWS, dedup=False, all_to_all="fp16")).step.parts
    assert parts["ids all-to-all"] == pytest.approx(3e-4 + 128 / 2 / 1e10, rel=1e-12)
    # 8 x 4 and 8 x 8 numbers.
    assert parts["rows all-to-all"] == pytest.approx(1e-4 + 2 * 96 / 2 / 1e10, rel=1e-12)
    assert parts["gradients all-to-all"] == pytest.approx(1e-4 + 2 * 96 / 2 / 1e10, rel=1e-12)
    assert parts["lookup"] == pytest.approx((8 * 24 + 8 * 40 + 4 * 96) / 1e12, rel=1e-12)
    assert parts["table update"] == pytest.approx((120 + 8 * 8 + 360 + 8 * 8 + 4 * 96) / 1e12, rel=1e-12)


def test_bags_are_sent_as_sums_and_copies_not_at_all() -> None:
    """Every rank sends its part of the sums of 2 bags of all 8 samples; every rank changes all rows of a copy."""
    bags = predict(workload(8, work(tables=(replace(A, pooled=True),))), 2, PLAIN, WIRES, replace(ROWS, sharding="row"))
    assert bags.step.parts["rows all-to-all"] == pytest.approx(1e-4 + 4 * (2 * 8 * 4) / 2 / 1e10, rel=1e-12)
    assert bags.step.parts["lookup"] == pytest.approx((4 * 24 + 4 * 2 * 8 * 4) / 1e12, rel=1e-12)
    copied = replace(B, copied="it must")
    both = predict(workload(8, work(tables=(A, copied))), 2, PLAIN, WIRES, replace(ROWS, sharding="auto"))
    parts = both.step.parts
    assert parts["ids all-to-all"] == pytest.approx(3e-4 + 32 / 2 / 1e10, rel=1e-12)
    assert parts["rows all-to-all"] == pytest.approx(1e-4 + 64 / 2 / 1e10, rel=1e-12)
    # Of 6 requests of both ranks 3 are a rank's own.
    assert parts["lookup"] == pytest.approx((4 * 24 + 3 * 40 + 64) / 1e12, rel=1e-12)
    assert parts["table update"] == pytest.approx((120 + 32 + 100 * 2 * 4 * 9 + 8 * 3 + 64) / 1e12, rel=1e-12)
    assert parts["all-reduce"] == pytest.approx(4 * (1_000_000 + 800) / 1e10 + 2e-4, rel=1e-12)
    assert both.memory.parts["dense"] == [12e6 + 2 * 4 * 800] * 2
    alone = predict(workload(8, work(tables=(copied,))), 2, PLAIN, WIRES, replace(ROWS, sharding="auto")).step.parts
    assert [alone[f"{name} all-to-all"] for name in ("ids", "rows", "gradients")] == [0.0, 0.0, 0.0]


def test_one_rank_sends_nothing_and_may_replay_a_graph() -> None:
    device = replace(PLAIN, call_s=1e-3, kernel_s=1e-4, threads=5)
    graph = predicted(device=device, ranks=1, calls=14, kernels=lambda samples, threads: 10 * samples + threads)
    assert (graph.step.parts["calls"], graph.step.parts["launches"]) == (0.0, pytest.approx(45e-4))
    assert graph.step.shares["dispatch"] == pytest.approx(45e-4 / graph.step.value)
    host = 45e-4 / graph.step.value
    assert graph.step.factors == pytest.approx((0.77 - host * (0.77 - 0.55), 1.25 + host * (1.30 - 1.25)))
    eager = predicted(device=device, ranks=1, calls=14).step
    assert (eager.parts["calls"], eager.parts["launches"], eager.parts["all-reduce"]) == (14e-3, 0.0, 0.0)
    assert eager.exposed["calls"] == 0.0, "29 ms are computed meanwhile"
    # Calls that nobody waits for are not of the host.
    assert eager.factors == pytest.approx((0.77, 1.25))
    assert predicted(device=device, calls=14, kernels=lambda samples, threads: 7).step.parts["launches"] == 0.0


@pytest.mark.parametrize(
    ("calibrated", "ranks", "by_host", "nodes", "low", "high"),
    [
        (True, 1, 0.0, 1, 0.93, 1.08),
        (False, 1, 0.0, 1, 0.77, 1.25),
        (False, 2, 0.0, 1, 0.77 / 1.05, 1.25 * 1.05),
        (False, 8, 0.0, 4, 0.77 / 1.05**3, 1.25 * 1.05**3),
        (True, 1, 1.0, 1, 0.55, 1.30),
        (True, 1, 0.25, 1, 0.75 * 0.93 + 0.25 * 0.55, 0.75 * 1.08 + 0.25 * 1.30),
    ],
)
def test_the_documented_error_bands(
    calibrated: bool, ranks: int, by_host: float, nodes: int, low: float, high: float
) -> None:
    device = replace(PLAIN, calibrated=calibrated)
    assert error_band(device, ranks, by_host, nodes=nodes) == pytest.approx((low, high), rel=1e-12)
    if not by_host and nodes == 1:
        assert error_band(device, ranks) == pytest.approx((low, high), rel=1e-12)


def test_a_band_scales_as_a_whole() -> None:
    band = Band(4.0, 2.0, 5.0)
    assert band.times(3.0) == Band(12.0, 6.0, 15.0)
    assert band.factors == (0.5, 1.25)
    nodes = predicted(network=replace(WIRES, ranks_per_node=1)).step
    assert nodes.factors == pytest.approx((0.77 / 1.05**2, 1.25 * 1.05**2)), "two nodes"


ALONE = dict.fromkeys(PARTS, 0.0) | {
    "input": 3.0, "transfer": 2.0, "ids all-to-all": 1.0, "lookup": 1.0, "rows all-to-all": 1.0, "dense forward": 2.0,
    "dense backward": 4.0, "all-reduce": 5.0, "gradients all-to-all": 1.0, "table update": 1.0, "dense update": 1.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("parts", "overlap", "pipeline", "ahead", "changed"),
    [
        ({}, "off", False, True, {}),
        # The backward pass hides 4 of 5 seconds of the all-reduce, and calls half of themselves where these are longer.
        ({}, "auto", False, True, {"all-reduce": 1.0}),
        ({"calls": 8.5}, "on", False, True, {"all-reduce": 0.75, "calls": 0.0}),
        ({"calls": 14.0}, "off", False, True, {"calls": 5.0}),
        ({"all-reduce": 3.0}, "on", False, True, {"all-reduce": 0.0}),
        # 16 seconds of everything else hide the next batch's 6, and of 20 seconds of input 7 are left.
        ({}, "off", True, True, {"input": 0.0, "transfer": 0.0, "ids all-to-all": 0.0}),
        ({}, "off", True, False, {}),
        ({"input": 20.0}, "off", True, True, {"input": 7.0, "transfer": 0.0, "ids all-to-all": 0.0}),
        ({"transfer": 20.0}, "off", True, True, {"input": 3.0, "transfer": 5.0, "ids all-to-all": 0.0}),
        ({"ids all-to-all": 20.0}, "off", True, True, {"input": 3.0, "transfer": 2.0, "ids all-to-all": 4.0}),
        ({"input": 20.0}, "on", True, True, {"input": 11.0, "transfer": 0.0, "ids all-to-all": 0.0, "all-reduce": 1.0}),
    ],
)  # fmt: skip
def test_what_overlaps(
    parts: dict[str, float], overlap: Any, pipeline: bool, ahead: bool, changed: dict[str, float]
) -> None:
    alone = ALONE | parts
    left = exposed(alone, Parallelism(overlap=overlap, pipeline=pipeline), ahead=ahead)
    assert left == pytest.approx(alone | changed)


def test_a_batch_that_the_calling_thread_prepares_hides_nothing() -> None:
    pipelined = replace(ROWS, pipeline=True)
    ahead, later_one = (
        predicted(pipelined, prepare_s=1e-3, prepared_ahead=one).step.exposed["input"] for one in (True, False)
    )
    assert (ahead, later_one) == (0.0, 4e-3)


def test_attention_has_its_own_rates_by_pass() -> None:
    rates = Attention(lengths=(1, 100), forward=(1e9, 3e9), backward=(1e8, 3e8), precision="float32")
    device = replace(PLAIN, attention=rates, copy_bytes_per_s=1e9, gemm=KnownRates(float32=1e10))
    one = work(lengths=(10.0,), parts=lambda samples: {"attention": Cost(4 * 10**9, 10**9)})
    assert part_seconds("attention", one.parts(1)["attention"], one, device) == pytest.approx(2.0 + 1.0)
    assert part_seconds("attention_backward", Cost(4 * 10**9, 0), one, device) == pytest.approx(20.0)
    assert part_seconds("forward", Cost(4 * 10**9, 10**9), one, device) == pytest.approx(0.4 + 1.0)
    shares = limit_shares(one, device, 1, {"dense forward": 3.0, "late ranks": 2.0, "lookup": 5.0})
    named = {name: share for name, share in shares.items() if share}
    assert named == pytest.approx({"compute": 0.2, "bandwidth": 0.6, "communication": 0.2})
    assert sum(limit_shares(work(parts=lambda samples: {}), PLAIN, 1, {}).values()) == 0.0
    origin = predict(workload(8, one), 1, device, WIRES).origins["attention"]
    assert [float(text.split()[0]) for text in (origin, origin.split("forward, ")[1])] == [0.002, 0.0002]
    assert work(lengths=(4.0, 8.0)).attention_length == pytest.approx((64 + 512) / (16 + 64))
    assert work().attention_length == 0.0
    assert "attention" not in predicted().origins


def test_ranks_wait_for_the_longest_samples_and_for_uneven_times() -> None:
    """The largest of as many batches as ranks, over their mean: drawn once, here again, sample by sample."""

    def sample_work(tokens_B: Any) -> Any:
        return tokens_B**2

    lengths, ranks, batch = (1.0, 2.0, 9.0), 4, 8
    one = work(lengths=lengths, sample_work=sample_work)
    tokens_B = np.random.default_rng(0).choice(np.asarray(lengths), size=ranks * batch)
    loads = [(tokens_B[rank::ranks] ** 2).sum() for rank in range(ranks)]
    tokens = [tokens_B[rank::ranks].sum() for rank in range(ranks)]
    share = largest_share(one, batch, ranks, balanced=False)
    assert share == pytest.approx((max(loads) / np.mean(loads), max(tokens) / np.mean(tokens)))
    dealt = [(tokens_B[part] ** 2).sum() for part in balance.deal(tokens_B**2, ranks)]
    assert largest_share(one, batch, ranks, balanced=True).work == pytest.approx(max(dealt) / np.mean(dealt))
    for alike in (work(sample_work=sample_work, lengths=(3.0, 3.0)), work(lengths=lengths)):
        assert largest_share(alike, batch, ranks, balanced=False) == (1.0, 1.0)
    assert largest_share(one, batch, 1, balanced=False) == (1.0, 1.0)
    # Of 65,536 samples of a rank one batch is drawn, which is even; three of 20,000 say what five ranks differ by.
    assert largest_share(one, 1 << 16, 5, balanced=False).work == pytest.approx(1.0)
    drawn_B = np.random.default_rng(0).choice(np.asarray(lengths), size=3 * 20_000) ** 2
    three = [drawn_B[rank::3].sum() for rank in range(3)]
    further = math.sqrt(math.log(6) / math.log(4))
    assert largest_share(one, 20_000, 5, balanced=False).work == pytest.approx(
        1 + further * (max(three) / np.mean(three) - 1), rel=1e-12
    )
    assert (later(1, 2), later(2, 2), later(7, 1)) == (0.0, 1.0, pytest.approx(math.sqrt(3)))

    # Forward and backward take 48 ms for 8 samples of each rank; the update of 5 ms is the same for all.
    plan = predict(workload(32, one), 4, replace(PLAIN, late=0.1), WIRES, replace(ROWS, sharding="row", balance=False))
    own = 53e-3 + plan.step.parts["lookup"] + plan.step.parts["table update"]
    waited = (share.work - 1) * 48e-3 + 0.1 * math.sqrt(math.log(5) / math.log(3)) * own
    assert plan.step.parts["late ranks"] == pytest.approx(waited, rel=1e-9)
    # Calls last longer than the work of any rank: only what is drawn to be late is waited for.
    slow = replace(PLAIN, late=0.1, call_s=10e-3)
    called = predict(workload(32, one), 4, slow, WIRES, replace(ROWS, sharding="row", balance=False)).step.parts
    assert called["late ranks"] == pytest.approx(0.1 * math.sqrt(math.log(5) / math.log(3)) * 1.06, rel=1e-9)
    memory = plan.memory.parts
    assert memory["activations"] == pytest.approx([share.tokens * 8000] * 4)
    assert memory["input"] == pytest.approx([share.tokens * 8e6] * 4)


def test_the_memory_of_both_ranks() -> None:
    plan = predicted(replace(ROWS, pipeline=True))
    memory = plan.memory
    assert memory.parts == {
        "tables": [4 * (400 * 4 + 100 * 8), 4 * 400 * 4],
        "optimizer": [8e6 + 4 * (400 + 100), 8e6 + 4 * 400],
        "dense": [12e6, 12e6],
        "input": [8e6, 8e6],
        "activations": [4000.0, 4000.0],
        # 40 numbers received by each, and 10 and 4 ids.
        "all-to-all": [160 + 80, 160 + 32],
    }
    constant = 4 * 2400 + 8e6 + 2000 + 12e6 + 8e6
    # Rank 0 sends 64 numbers: with gradients of what it received beside it, 4 x 64 + 2 x 4 x 40 bytes and 10 ids.
    messages = 4 * 64 + 2 * 4 * 40 + 80
    assert (memory.phase, memory.fullest_rank) == ("layers", 0)
    assert memory.bytes == constant + 4240
    assert memory.without_reuse_bytes == constant + 4000 + messages
    assert memory.largest_tables == ["a", "b"]
    assert (memory.device_bytes, memory.limit_bytes) == (1 << 36, pytest.approx(0.95 * (1 << 36)))
    assert (memory.fits, memory.missing_bytes) == (True, 0.0)
    assert predicted().memory.parts["input"] == [4e6, 4e6], "without a pipeline one batch"
    little = predicted(activations=lambda samples: 100, parallelism=replace(ROWS, all_to_all="fp16")).memory
    assert (little.phase, little.parts["activations"]) == ("gradients", [0.0, 0.0])
    # Encoded once more at both ends: 2 x (64 + 40) and 2 x (16 + 40) bytes.
    assert little.parts["all-to-all"] == [messages + 208, 4 * 16 + 2 * 4 * 40 + 32 + 112]


def test_what_fits_is_decided_to_the_byte() -> None:
    one = predicted().memory
    verdicts = {}
    for what, bytes_ in (("reuse", one.bytes), ("none", one.without_reuse_bytes)):
        # The limit is a share of whole bytes: the smallest memory whose limit reaches the total, and the next smaller.
        memory = next(size for size in range(int(bytes_ / 0.95) - 3, 1 << 40) if 0.95 * size >= bytes_)
        verdicts[what] = [predicted(device=replace(PLAIN, memory_bytes=size)).memory for size in (memory - 1, memory)]
    assert [one.verdict for one in verdicts["reuse"]] == ["does not fit", "tight"]
    assert [one.verdict for one in verdicts["none"]] == ["tight", "fits"]
    short = verdicts["none"][0]
    assert short.missing_bytes == pytest.approx(one.without_reuse_bytes - short.limit_bytes)
    assert 0 < short.missing_bytes < 1


def test_a_rank_of_a_run_asks_for_what_lies_beside_its_tables() -> None:
    copied = replace(B, copied="it must")
    one = workload(7, work(tables=(A, copied)))
    # 4 of 7 samples: input of 4 MB twice, parameters, gradients, buckets and state of a million numbers, and copies'.
    beside = 8e6 + 12e6 + 2 * 4 * 800 + 8e6 + 4000
    demand = rank_demand(one, 2, DistributedConfig())
    assert (demand.batch, demand.other_bytes) == (4, round(beside))
    on_cpu = rank_demand(one, 2, DistributedConfig(pipeline=False), on_cpu=True)
    assert on_cpu.other_bytes == round(beside - 4e6 + 4 * 100 * (8 + 1))


def test_more_samples_are_all_counted_and_histories_must_exist() -> None:
    """The largest rank has a sample more than seven can be divided into; requested ones of a rank are all there."""
    odd = predict(workload(7), 2, PLAIN, WIRES)
    assert (odd.rank_batch, odd.global_batch) == (4, 7)
    assert odd.step.samples_per_s == pytest.approx(7 / odd.step.value)
    stated = predict(workload(7), 2, PLAIN, WIRES, Parallelism(rank_batch=5))
    assert (stated.rank_batch, stated.global_batch) == (5, 10)
    counted: list[float | None] = []

    def count(history: float | None, distinct: Any) -> Work:
        counted.append(history)
        return work()

    predict(replace(workload(8), count=count, histories=True), 1, PLAIN, history=3.0)
    assert counted == [3.0]
    with pytest.raises(UsageError):
        predict(workload(), 1, PLAIN, history=3.0)
