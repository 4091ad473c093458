"""Tables on several ranks against the same tables in a single process."""

from __future__ import annotations

import functools
from itertools import cycle
from typing import Any

import torch
from rank_jobs import SEED, STEPS, alone, small, uses
from rank_pool import needs_torchrec, run_ranks

from recperf.models.dlrm_v4.tables import DLRMv4Tables

pytestmark = needs_torchrec


def names() -> list[str]:
    return [part for name in small().tables for part in (name, f"{name}_state")]


def whole(tables: DLRMv4Tables) -> dict[str, torch.Tensor]:
    return {name: tables.get_buffer(name) for name in names()}


@functools.cache
def trained() -> list[dict[str, Any]]:
    return run_ranks(2, "trained", sharding="uid=row,item_id=table,album_id=data-parallel")


def test_rows_and_updates_are_those_of_a_single_process() -> None:
    found = trained()
    expected, before = alone(2)
    first = whole(DLRMv4Tables(small(), seed=SEED))
    assert all(torch.equal(found[0]["first"][name], first[name]) for name in names())
    for rank, told in enumerate(found):
        for step in range(STEPS):
            rows, _ = uses(step, rank)
            for name, seen in told["seen"][step].items():
                torch.testing.assert_close(seen, before[step][name][rows[name]], rtol=1e-5, atol=1e-6)
    for name, tensor in whole(expected).items():
        torch.testing.assert_close(found[0]["last"][name], tensor, rtol=1e-5, atol=1e-6)
    assert found[1]["last"] == {}
    # The updates did something.
    assert not torch.allclose(found[0]["last"]["uid"], first["uid"], atol=1e-2)


def test_by_columns_each_shard_has_its_own_state() -> None:
    found = run_ranks(2, "trained", sharding="column")[0]
    parts = [part for part in found["parts"] if part.table == "uid"]
    assert [(part.rank, part.first_column, part.columns) for part in parts] == [(0, 0, 8), (1, 8, 8)]
    expected, first = halves("uid"), DLRMv4Tables(small(), seed=SEED)
    assert torch.equal(found["first"]["uid"], first.table("uid"))
    torch.testing.assert_close(found["last"]["uid"], expected["table"], rtol=1e-5, atol=1e-6)
    # The mean over the shards is what a single process has from the same gradients.
    torch.testing.assert_close(found["last"]["uid_state"], expected["state"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found["last"]["uid_state"], alone(2)[0].state("uid"), rtol=1e-5, atol=1e-6)


def halves(name: str) -> dict[str, torch.Tensor]:
    """Row-wise Adagrad of the left and of the right half of a table, apart from each other."""
    table = DLRMv4Tables(small(), seed=SEED).table(name).clone()
    states = [torch.zeros(len(table)), torch.zeros(len(table))]
    for step in range(STEPS):
        gradient = torch.zeros_like(table)
        for rank in range(2):
            if (step, rank) != (1, 1):
                rows, gradients = uses(step, rank)
                gradient.index_add_(0, rows[name], gradients[name])
        for state, half in zip(states, (slice(0, 8), slice(8, 16))):
            state += gradient[:, half].square().mean(1)
            table[:, half] -= (0.1 + step / 10) * gradient[:, half] / (state.sqrt() + 1e-8).unsqueeze(1)
    return {"table": table, "state": (states[0] + states[1]) / 2}


UNITS = {"fp16": 2.0**-11, "bf16": 2.0**-8}
"""How far a number is from the nearest one that is sent, relative to it."""
LEAST = 2.0**-25
"""The same of numbers so near 0 that fp16 has fewer digits for them."""


def test_rows_and_gradients_are_sent_in_the_requested_precision() -> None:
    sharding = ",".join(f"{name}={kind}" for name, kind in zip(small().tables, cycle(("row", "table", "column"))))
    for rank, found in enumerate(run_ranks(2, "pipeline_jobs.precisions", sharding=sharding)):
        exact = found["fp32"]
        assert exact["types"] == {torch.float32}
        for precision, unit in UNITS.items():
            sent = found[precision]
            assert sent["types"] == {torch.float16 if precision == "fp16" else torch.bfloat16}
            # The first rows are those of the same tables, rounded once.
            for name, rows_UD in exact["seen"][0].items():
                torch.testing.assert_close(sent["seen"][0][name], rows_UD, rtol=unit, atol=LEAST)
            rounded = torch.cat([(sent["seen"][0][n] - rows).view(-1) for n, rows in exact["seen"][0].items()])
            assert float(rounded.abs().max()) > 0
            if rank == 0:
                # A row moves by its rates, 0.1 to 0.3, times a gradient over its root mean square so far, which for
                # rows of 16 is 4 at most; both are wrong by a unit of each of the two ranks' gradients.
                most = (0.1 + 0.2 + 0.3) * 4 * 4 * unit
                for name in small().tables:
                    torch.testing.assert_close(sent["last"][name], exact["last"][name], rtol=0, atol=most)
                    assert not torch.equal(sent["last"][name], exact["last"][name])
