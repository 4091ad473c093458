"""The embedding forward of micro-dlrm-dram's default preset against torch's EmbeddingBag, in one run.

The peer is `torch.nn.EmbeddingBag(mode="sum")` with the same rows, the same bags and the same number of threads, its
weight allocated as torch does it. Ours is what the default preset runs: rows asked for ahead, over huge pages. Both get
ids they have not seen, in turn; hashing is left out of both.
"""

from __future__ import annotations

import sys
from time import perf_counter

import torch

from _rows import record, row, show
from recperf.models.tables import HashedTable
from recperf.workloads.micro_dlrm_dram.build import PreparedDram
from recperf.workloads.micro_dlrm_dram.config import default

ROUNDS = 30


def main() -> int:
    config = default()
    prepared = PreparedDram(config)
    model = config.model
    table = HashedTable(model.features, prepared.rows, model.dim, bag=model.bag, huge_pages=model.huge_pages)
    table.reset(model.table_init_std, config.seed)
    peer = torch.nn.EmbeddingBag(
        prepared.rows, model.dim, mode="sum", include_last_offset=True, _weight=table.table_RD.clone()
    )
    bag_sum = table.bodies.sum.bag_sum
    ours_ms, peer_ms, ratios = [], [], []
    batches = prepared.order(config.seed).batches(0)
    with torch.no_grad():
        for number in range(ROUNDS + 3):
            features = next(batches).features
            rows, offsets = table.rows_of(features), features.offsets_FB1
            # Who goes first alternates: the second finds some of the ids' page tables warm.
            taken = {}
            for who in ("ours", "peer") if number % 2 else ("peer", "ours"):
                began = perf_counter()
                pooled = bag_sum(table.table_RD, rows, offsets) if who == "ours" else peer(rows, offsets)
                taken[who] = (perf_counter() - began) * 1e3
                if who == "ours":
                    expected = pooled
            torch.testing.assert_close(expected, peer(rows, offsets), rtol=1e-5, atol=1e-6)
            if number >= 3:
                ours_ms.append(taken["ours"])
                peer_ms.append(taken["peer"])
                ratios.append(taken["peer"] / taken["ours"])
    conditions = {
        "rows": prepared.rows,
        "dim": model.dim,
        "lookups": rows.numel(),
        "bags": offsets.numel() - 1,
        "threads": torch.get_num_threads(),
        "bag": table.why,
        "huge_pages": table.huge,
    }
    entries = [
        row("dram_lookup", "recperf", "forward", "ms", ours_ms, conditions),
        row("dram_lookup", "torch EmbeddingBag", "forward", "ms", peer_ms, conditions),
        row("dram_lookup", "EmbeddingBag / recperf", "ratio", "x", ratios, conditions),
    ]
    for entry in entries:
        print(show(entry))
    print(f"rows appended to {record(entries).name}")
    return 0 if entries[-1]["p50"] >= 1.3 else 5


if __name__ == "__main__":
    sys.exit(main())
