"""Lookups and updates of micro-dlrm-dram's default table against torch's EmbeddingBag, in one run.

The peer is `torch.nn.EmbeddingBag(mode="sum", sparse=True)` with the same rows, bags and number of threads, its weight
allocated as torch does it, and `torch.optim.SGD`. Ours is what the default preset runs, C over huge pages; its update
is SGD too, which is what torch has for a sparse gradient without a state. Both get ids they have not seen, in turn;
hashing is left out of both. After all rounds both tables must be equal, up to the order of sums.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from _rows import record, row, show
from recperf.models.tables import HashedTable
from recperf.workloads.micro_dlrm_dram.build import PreparedDram
from recperf.workloads.micro_dlrm_dram.config import default

ROUNDS = 30
RATE = 1e-3
PART = 1 << 16
GOAL = 1.3
"""Times the peer's speed, of lookups and of updates."""


class Ours:
    def __init__(self, table: HashedTable) -> None:
        self.table, self.body = table, table.bag

    def forward(self, rows: Tensor, offsets: Tensor) -> Tensor:
        self.batch = rows, offsets
        pooled: Tensor = self.body.bag_sum(self.table.table_RD, rows, offsets)
        return pooled

    def update(self, gradient: Tensor) -> None:
        grouped = self.body.Grouped(*self.batch, self.table.table_RD.shape[0])
        self.body.update(
            self.table.table_RD, None, grouped, gradient, rule="sgd", rate=RATE, eps=0.0, decay=0.0, scale=1.0
        )


class Peer:
    def __init__(self, weight: Tensor) -> None:
        rows, dim = weight.shape
        self.bag = torch.nn.EmbeddingBag(rows, dim, mode="sum", include_last_offset=True, sparse=True, _weight=weight)
        self.optimizer = torch.optim.SGD(self.bag.parameters(), lr=RATE)

    def forward(self, rows: Tensor, offsets: Tensor) -> Tensor:
        self.pooled: Tensor = self.bag(rows, offsets)
        pooled: Tensor = self.pooled.detach()
        return pooled

    def update(self, gradient: Tensor) -> None:
        self.pooled.backward(gradient)  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.bag.weight.grad = None


def timed(work: Callable[..., Any], *arguments: Tensor) -> tuple[float, Any]:
    began = perf_counter()
    result = work(*arguments)
    return (perf_counter() - began) * 1e3, result


def main() -> int:
    config = default()
    prepared = PreparedDram(config)
    model = config.model
    table = HashedTable(model.features, prepared.rows, model.dim, bag=model.bag)
    table.reset(prepared.model.table_init_std, config.seed)
    peer = Peer(table.table_RD.clone())
    sides: dict[str, Ours | Peer] = {"recperf": Ours(table), "torch EmbeddingBag": peer}
    taken: dict[tuple[str, str], list[float]] = {}
    batches = prepared.order(config.seed).batches(0)
    for number in range(ROUNDS + 3):
        features = next(batches).features
        rows, offsets = table.rows_of(features), features.offsets_FB1
        gradient = torch.randn(offsets.numel() - 1, model.dim, generator=torch.Generator().manual_seed(number))
        # Who goes first alternates: the second finds some of the ids' page tables warm.
        order = list(sides.items())[:: 1 if number % 2 else -1]
        pooled = []
        for name, side in order:
            for metric, work, arguments in (
                ("forward", side.forward, (rows, offsets)),
                ("update", side.update, (gradient,)),
            ):
                ms, result = timed(work, *arguments)
                if metric == "forward":
                    pooled.append(result)
                if number >= 3:
                    taken.setdefault((name, metric), []).append(ms)
        torch.testing.assert_close(*pooled, rtol=1e-5, atol=1e-6)
    # Some rows at a time: a comparison takes several times the memory of what is compared.
    for mine_RD, theirs_RD in zip(torch.split(table.table_RD, PART), torch.split(peer.bag.weight.detach(), PART)):
        torch.testing.assert_close(mine_RD, theirs_RD, rtol=1e-5, atol=1e-6)
    conditions = {
        "rows": prepared.rows,
        "dim": model.dim,
        "lookups": rows.numel(),
        "bags": offsets.numel() - 1,
        "threads": torch.get_num_threads(),
        "bag": table.why,
        "huge_pages": table.huge,
    }
    entries, met = [], True
    for metric in ("forward", "update"):
        ours, torchs = (taken[name, metric] for name in sides)
        entries += [row("dram_lookup", name, metric, "ms", taken[name, metric], conditions) for name in sides]
        ratios = [theirs / mine for theirs, mine in zip(torchs, ours)]
        label = "ratio" if metric == "forward" else f"ratio, {metric}"
        entries.append(row("dram_lookup", "EmbeddingBag / recperf", label, "x", ratios, conditions))
        met &= entries[-1]["p50"] >= GOAL
    for entry in entries:
        print(show(entry))
    print(f"rows appended to {record(entries).name}")
    return 0 if met else 5


if __name__ == "__main__":
    sys.exit(main())
