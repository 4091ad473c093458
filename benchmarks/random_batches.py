"""Making a batch of random data: ours against a faithful imitation of the public DLRM's generator, in one run.

The imitation draws as the public generator does: for every table and sample in turn it draws a length, draws as many
ids, drops repeats and appends to lists, which become tensors at the end; dense features and targets are one call each.
Its DataLoader, which would add to it, is left out. Ours includes labels drawn from a planted answer. Both run on one
thread of a CPU, in turn, with everything they allocate. Where torch sees a GPU, ours is timed there too: one batch by a
replay of a CUDA graph, and one batch by plain calls.

Run as `python benchmarks/random_batches.py [--only-gpu]`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
import torch

from _rows import record, row, show
from recperf.data.random_bags import RandomBags
from recperf.data.random_config import RandomBagsConfig

SAMPLES, DENSE = 2048, 512
PRESETS: dict[str, dict[str, Any]] = {
    "experiment": {"rows": (4, 3, 2), "ids_per_bag": 10, "distinct": True},
    "intended": {"rows": (1_000_000,) * 8, "ids_per_bag": 100},
}
ROUNDS = {"experiment": 15, "intended": 5}
MOST_MS = 5.0
"""What a batch of `experiment` may take on one core."""


def source(preset: str, device: str, **changes: Any) -> RandomBags:
    fields = PRESETS[preset] | changes
    rows = fields.pop("rows")
    keys = tuple(f"t{index}" for index in range(len(rows)))
    config = RandomBagsConfig(**fields)
    return RandomBags(
        keys=keys, rows=rows, dense=DENSE, batch_size=SAMPLES, seed=1, device=device, config=config
    )  # fmt: skip


def public_batch(draw: np.random.RandomState, rows: tuple[int, ...], most: int) -> list[Any]:
    """A batch made table by table and sample by sample in Python."""
    dense = torch.tensor(draw.rand(SAMPLES, DENSE).astype(np.float32))
    all_offsets, all_ids = [], []
    for table in rows:
        offsets, ids, offset = [], [], 0
        for _ in range(SAMPLES):
            length = int(np.round(np.maximum([1.0], draw.rand(1) * min(table, most)))[0])
            group = np.unique(np.round(draw.rand(length) * (table - 1)).astype(np.int64))
            offsets += [offset]
            ids += group.tolist()
            offset += group.size
        all_offsets.append(torch.tensor(offsets))
        all_ids.append(torch.tensor(ids))
    target = torch.tensor(draw.rand(SAMPLES, 1).astype(np.float32))
    return [dense, all_offsets, all_ids, target]


def timed(work: Callable[[], object]) -> float:
    began = perf_counter()
    work()
    return (perf_counter() - began) * 1e3


def on_cpu(preset: str) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    ours, draw = source(preset, "cpu"), np.random.RandomState(1)
    rows, most = PRESETS[preset]["rows"], PRESETS[preset]["ids_per_bag"]
    times: dict[str, list[float]] = {"ours": [], "peer": []}
    ids = {"ours": 0, "peer": 0}
    for number in range(ROUNDS[preset] + 1):
        kept: dict[str, Any] = {}
        ours_ms = timed(lambda: kept.update(ours=ours.batch(0, number)))  # noqa: B023
        peer_ms = timed(lambda: kept.update(peer=public_batch(draw, rows, most)))  # noqa: B023
        if number:
            times["ours"].append(ours_ms)
            times["peer"].append(peer_ms)
        ids = {"ours": kept["ours"].features.values_V.numel(), "peer": sum(part.numel() for part in kept["peer"][2])}
    conditions = {
        "preset": preset,
        "samples": SAMPLES,
        "dense": DENSE,
        "rows": list(rows),
        "ids_per_bag": most,
        "threads": 1,
        "draw": ours.why,
        "ids_per_sample": {who: count / SAMPLES for who, count in ids.items()},
    }
    ratios = [theirs / mine for theirs, mine in zip(times["peer"], times["ours"])]
    return [
        row("random_batches", f"recperf, {preset}", "batch", "ms", times["ours"], conditions),
        row("random_batches", f"public imitation, {preset}", "batch", "ms", times["peer"], conditions),
        row("random_batches", f"public / recperf, {preset}", "ratio", "x", ratios, conditions),
    ]


def on_gpu(preset: str, ids: str) -> list[dict[str, Any]]:
    ours = source(preset, "cuda", ids=ids)
    room, index = ours.buffers(), torch.zeros(1, dtype=torch.int64, device="cuda")
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        for _ in range(3):
            ours.draw(index, room)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours.draw(index, room)
        index += 1

    def per_call(work: Callable[[], object], calls: int) -> list[float]:
        def many() -> None:
            for _ in range(calls):
                work()
            torch.cuda.synchronize()

        many()
        return [timed(many) / calls * 1e3 for _ in range(10)]

    step = iter(range(1 << 30))
    conditions = {"preset": preset, "ids": ids, "samples": SAMPLES, "dense": DENSE, "draw": ours.why}
    return [
        row("random_batches", f"graph, {preset}, {ids}", "batch", "us", per_call(graph.replay, 200), conditions),
        row(
            "random_batches",
            f"plain calls, {preset}, {ids}",
            "batch",
            "us",
            per_call(lambda: ours.batch(0, next(step) % len(ours)), 50),
            conditions,
        ),
    ]


def main(words: list[str]) -> int:
    entries = []
    if "--only-gpu" not in words:
        entries += [entry for preset in PRESETS for entry in on_cpu(preset)]
    if torch.cuda.is_available():
        entries += [entry for preset in PRESETS for ids in ("uniform", "zipf") for entry in on_gpu(preset, ids)]
    for entry in entries:
        print(show(entry))
    if not entries:
        print("nothing to measure: torch sees no GPU here")
        return 4
    print(f"rows appended to {record(entries).name}")
    first = entries[0]
    return 5 if first["unit"] == "ms" and first["p50"] > MOST_MS else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
