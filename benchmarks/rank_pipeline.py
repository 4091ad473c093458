"""Steps of dlrm-v4's laptop model on gloo ranks of this host: the next batch's ids sent early, and not.

One training takes both kinds of steps, in pairs of blocks, so that they share weights, batches and whatever else the
machine does; which kind goes first alternates. Ranks begin each block at the same moment, with a step that does not
count: what the other kind began is not there for it, and what waits meanwhile is nobody's gain. Between processes of
one host an exchange takes next to no time, so the same is measured once more with every all-to-all made to take a
while, as between hosts: its result is held back until then, nothing else waits.

A second pair asks for every distinct row once, as the model does, and for every id as often as it occurs: what travels,
and how long a lookup without gradient takes.

Run as `python benchmarks/rank_pipeline.py`; it starts the ranks itself. Needs TorchRec.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, distributed

from _ranks import Late, join, start
from _rows import record, row, show
from recperf.data.batch import HistoryBatch
from recperf.distributed.exchange import Exchange
from recperf.distributed.library import require_torchrec
from recperf.distributed.ranks import Ranks
from recperf.distributed.tables import TorchRecTables
from recperf.distributed.waits import SharedWindow
from recperf.errors import RecperfError
from recperf.execution.clocked_steps import endless
from recperf.models.dlrm_v4.config import FEATURE_TABLES, DLRMv4Config
from recperf.train.loop import take_step
from recperf.workloads import find
from recperf.workloads.dlrm_v4.config import laptop

NAME = "rank_pipeline"


@contextmanager
def exchanges(seconds: float = 0.0) -> Iterator[list[int]]:
    """The bytes of each all-to-all, which takes at least so long."""
    sent: list[int] = []
    before = distributed.all_to_all_single

    def watched(output: Tensor, input: Tensor, *arguments: Any, **named: Any) -> Any:
        sent.append(input.nbytes)
        work = before(output, input, *arguments, **named)
        return work if work is None else Late(work, perf_counter() + seconds)

    distributed.all_to_all_single = watched
    try:
        yield sent
    finally:
        distributed.all_to_all_single = before


class Timed:
    """Seconds spent in some methods: in a lookup, and within it waiting for ids, and looking rows up and waiting for
    those of other ranks."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        for name, kind, method in (
            ("lookup_ms", TorchRecTables, "lookup"),
            ("ids_ms", Exchange, "receive"),
            ("rows_ms", Exchange, "rows"),
        ):
            self._time(name, kind, method)

    def _time(self, name: str, kind: type, method: str) -> None:
        call = getattr(kind, method)
        self.seconds[name] = 0.0

        def timed(*arguments: Any, **named: Any) -> Any:
            began = perf_counter()
            result = call(*arguments, **named)
            self.seconds[name] += perf_counter() - began
            return result

        setattr(kind, method, timed)

    def clear(self) -> None:
        self.seconds = dict.fromkeys(self.seconds, 0.0)


def steps(trial: Any, window: SharedWindow, timed: Timed, blocks: int, each: int) -> dict[str, dict[str, list[float]]]:
    """ms a step, a lookup and its waits, of pairs of blocks."""
    ways = {"early": True, "in the step": False}
    recipe, world = trial.recipe, window.world
    batches = {name: endless(replace(recipe.order, ahead=on), 0) for name, on in ways.items()}
    figures: dict[str, dict[str, list[float]]] = {
        name: {"step_ms": [], **{n: [] for n in timed.seconds}} for name in ways
    }
    for block in range(blocks + 1):
        for name in sorted(ways, reverse=bool(block % 2)):
            window.meet()
            take_step(recipe, batches[name], recipe.steps - 1)
            timed.clear()
            began = perf_counter()
            for _ in range(each):
                take_step(recipe, batches[name], recipe.steps - 1)
            # Of the last rank to be done.
            taken = world.maximum(round((perf_counter() - began) * 1e9)) / 1e9
            if block:
                for metric, seconds in {"step_ms": taken, **timed.seconds}.items():
                    figures[name][metric].append(seconds / each * 1e3)
    return figures


def asked(batch: HistoryBatch, model: DLRMv4Config) -> dict[str, Tensor]:
    """Every id of a batch, table by table, as often as it occurs."""
    return {
        table: torch.cat([batch.features[name][0].long() for name, place in FEATURE_TABLES.items() if place == table])
        % model.table_rows[table]
        for table in model.tables
    }


@torch.no_grad()
def repeats(trial: Any, world: Ranks, count: int) -> dict[str, dict[str, list[float]]]:
    """Bytes sent and ms a lookup, with each row once and with every id."""
    tables, order = trial.ranks.sharded, trial.recipe.order
    figures: dict[str, dict[str, list[float]]] = {}
    for number, batch in zip(range(count + 1), order.batches_of(0, 0)):
        every = asked(batch, trial.model.config)
        once = {name: torch.unique(ids) for name, ids in every.items()}
        for way, rows in (("each row once", once), ("every id", every)):
            world.barrier()
            with exchanges() as sent:
                began = perf_counter()
                tables.lookup(SimpleNamespace(rows=rows))
                taken = perf_counter() - began
            if number:
                values = figures.setdefault(way, {"sent_bytes": [], "lookup_ms": []})
                values["sent_bytes"].append(float(sum(sent)))
                values["lookup_ms"].append(taken * 1e3)
    return figures


def rank(options: argparse.Namespace) -> None:
    """What each rank does; the first stores the rows."""
    world = join(options.meeting)
    config = laptop()
    config = replace(
        config, data=replace(config.data, events=options.events), train=replace(config.train, batch_size=options.batch)
    )
    trial: Any = find("dlrm-v4").prepare(config).trial(0)
    conditions = {
        "ranks": world.size, "backend": world.backend, "batch": options.batch, "block": options.each,
        "table_dim": config.model.table_dim, "note": options.note,
    }  # fmt: skip
    rows, timed, window = [], Timed(), SharedWindow(world)
    for delay in options.delays:
        with exchanges(delay / 1e3):
            figures = steps(trial, window, timed, options.blocks, options.each)
        here = {**conditions, "least_exchange_ms": delay}
        rows += _rows(figures, here)
        ratios = [slow / fast for slow, fast in zip(figures["in the step"]["step_ms"], figures["early"]["step_ms"])]
        rows.append(row(NAME, "in the step over early", "ratio", "x", ratios, here))
    rows += _rows(repeats(trial, world, options.lookups), conditions)
    if world.is_leader:
        for entry in rows:
            print(f"{entry['conditions'].get('least_exchange_ms', ''):>4} {show(entry)}")
        if not options.dry:
            print(f"rows appended to {record(rows)}", file=sys.stderr)
    world.barrier()
    world.leave()


def _rows(figures: dict[str, dict[str, list[float]]], conditions: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        row(NAME, way, metric, metric.rpartition("_")[2], values, conditions)
        for way, metrics in figures.items()
        for metric, values in metrics.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--events", type=int, default=40_000)
    parser.add_argument("--batch", type=int, default=128, help="of all ranks together")
    parser.add_argument("--blocks", type=int, default=20, help="pairs of them")
    parser.add_argument("--each", type=int, default=10, help="steps of a block")
    parser.add_argument("--lookups", type=int, default=20)
    parser.add_argument(
        "--delays", type=float, nargs="+", default=[0.0, 5.0], help="ms that an all-to-all takes at least"
    )
    parser.add_argument("--note", default="", help="about the machine, stored with the rows")
    parser.add_argument("--dry", action="store_true", help="print, store no rows")
    parser.add_argument("--meeting", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    try:
        require_torchrec()
    except RecperfError as error:
        print(f"error: {error}", file=sys.stderr)
        return 4
    if not options.meeting:
        return start(options.ranks)
    rank(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
