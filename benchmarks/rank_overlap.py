"""Steps of dlrm on ranks of this host: dense gradients summed during the backward pass, and as one message after it.

The model is the intended experiment's with smaller tables: 10 MB of dense gradients in buckets. One training
takes both kinds of steps, in pairs of blocks, so that they share weights, batches and whatever else the machine does;
which kind goes first alternates. Ranks begin each block at the same moment, with a step that does not count. Between
processes of one host a message costs computing time instead of waiting, so the same is measured once more as if over a
network: the result of each all-reduce is held back until a link of that rate would have carried it, one message after
the other. Only all-reduces are: the exchange of ids and rows stays as fast as it is.

Run as `python benchmarks/rank_overlap.py`; it starts the ranks itself. `--device cuda` takes NCCL ranks on one GPU,
whose speed says little about ranks with a GPU each. Needs TorchRec.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, distributed

from _ranks import Late, join, start
from _rows import record, row, show
from recperf.distributed.config import BUCKET_BYTES
from recperf.distributed.library import require_torchrec
from recperf.distributed.step import Reduction
from recperf.distributed.window import SharedWindow
from recperf.errors import RecperfError
from recperf.measure.profile import endless
from recperf.train.device import applied
from recperf.train.loop import take_step
from recperf.workloads import find
from recperf.workloads.dlrm.config import DLRMWorkloadConfig, intended

NAME = "rank_overlap"
LATENCY_S = 50e-6
"""Of a message over the network that is played."""


@contextmanager
def network(bytes_per_s: float) -> Iterator[None]:
    """Each asynchronous all-reduce takes at least as long as a link of that rate would; 0: as it is."""
    before, free = distributed.all_reduce, [0.0]

    def held_back(tensor: Tensor, *arguments: Any, **named: Any) -> Any:
        work = before(tensor, *arguments, **named)
        if work is None:
            return None
        # Ranks send and receive nearly all of it once in either direction.
        free[0] = max(free[0], perf_counter()) + LATENCY_S + tensor.nbytes / bytes_per_s
        return Late(work, free[0])

    if bytes_per_s:
        distributed.all_reduce = held_back
    try:
        yield
    finally:
        distributed.all_reduce = before


class TimedReduction(Reduction):
    """Adds up the time in which the backward pass is over and gradients are not."""

    seconds = 0.0

    def __call__(self) -> Tensor:
        began = perf_counter()
        loss = super().__call__()
        self.seconds += perf_counter() - began
        return loss


def steps(trial: Any, window: SharedWindow, blocks: int, each: int) -> dict[str, dict[str, list[float]]]:
    """ms a step, and of it in the sum of gradients, of pairs of blocks."""
    recipe, world = trial.recipe, window.world
    step, on_gpu = recipe.whole_step, world.device == "cuda"
    ways = {}
    for name, overlap in (("overlap", True), ("one message", False)):
        reduction = TimedReduction(step.reduction.named, world, overlap=overlap)
        whole = copy.copy(step)
        whole.reduction = reduction
        ways[name] = replace(recipe, whole_step=whole), reduction, endless(recipe.order, 0)
    figures: dict[str, dict[str, list[float]]] = {name: {"step_ms": [], "reduce_ms": []} for name in ways}
    for block in range(blocks + 1):
        for name in sorted(ways, reverse=bool(block % 2)):
            own, reduction, batches = ways[name]
            window.meet()
            take_step(own, batches, 0)
            if on_gpu:
                torch.cuda.synchronize()
            reduction.seconds, began = 0.0, perf_counter()
            for _ in range(each):
                take_step(own, batches, 0)
            if on_gpu:
                torch.cuda.synchronize()
            # Of the last rank to be done.
            taken = world.maximum(round((perf_counter() - began) * 1e9)) / 1e9
            if block:
                figures[name]["step_ms"].append(taken / each * 1e3)
                figures[name]["reduce_ms"].append(reduction.seconds / each * 1e3)
    if on_gpu:
        # The host does not wait there.
        for figure in figures.values():
            del figure["reduce_ms"]
    return figures


def config(options: argparse.Namespace) -> DLRMWorkloadConfig:
    base = intended()
    model = replace(base.model, rows=(10_000,) * 8)
    if options.tiny:
        model = replace(model, rows=(100,) * 8, dim=8, bottom=(16, 8), top=(64, 1))
    return replace(
        base,
        data=replace(base.data, ids_per_bag=4),
        model=model,
        train=replace(base.train, batch_size=options.batch, device=options.device, threads=1),
    )


def rank(options: argparse.Namespace) -> None:
    """What each rank does; the first stores the rows."""
    world = join(options.meeting, options.device)
    prepared = find("dlrm").prepare(config(options))
    rows = []
    with applied(prepared.settings):
        trial: Any = prepared.trial(0)
        trial.recipe.model.train()
        parameters = trial.recipe.whole_step.reduction.parameters
        conditions = {
            "ranks": world.size, "backend": world.backend, "batch": options.batch, "block": options.each,
            "dense_bytes": sum(parameter.nbytes for parameter in parameters), "bucket_bytes": BUCKET_BYTES,
            "note": options.note,
        }  # fmt: skip
        window = SharedWindow(world)
        for rate in options.links:
            with network(rate * 1e9):
                figures = steps(trial, window, options.blocks, options.each)
            here = {**conditions, "link_gb_s": rate or None}
            for way, metrics in figures.items():
                rows += [row(NAME, way, metric, "ms", values, here) for metric, values in metrics.items()]
            ratios = [
                slow / fast for slow, fast in zip(figures["one message"]["step_ms"], figures["overlap"]["step_ms"])
            ]
            rows.append(row(NAME, "one message over overlap", "ratio", "x", ratios, here))
    if world.is_leader:
        for entry in rows:
            print(f"{entry['conditions']['link_gb_s'] or 'as it is':>8} {show(entry)}")
        if not options.dry:
            print(f"rows appended to {record(rows)}", file=sys.stderr)
    world.barrier()
    world.leave()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--batch", type=int, default=256, help="of all ranks together")
    parser.add_argument("--blocks", type=int, default=20, help="pairs of them")
    parser.add_argument("--each", type=int, default=10, help="steps of a block")
    parser.add_argument("--links", type=float, nargs="+", default=None, help="GB/s of the network; 0: none is played")
    parser.add_argument("--note", default="", help="about the machine, stored with the rows")
    parser.add_argument("--dry", action="store_true", help="print, store no rows")
    parser.add_argument(
        "--tiny", action="store_true", help="a small model and few steps, to try the script; implies --dry"
    )
    parser.add_argument("--meeting", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.tiny:
        options.batch, options.blocks, options.each, options.dry = 32, 2, 2, True
    # A message between GPUs is waited for by a stream: its end cannot be held back by the host.
    options.links = options.links or ([0.0, 1.25] if options.device == "cpu" else [0.0])
    try:
        require_torchrec()
    except RecperfError as error:
        print(f"error: {error}", file=sys.stderr)
        return 4
    if not options.meeting:
        return start(options.ranks, options.device)
    rank(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
