"""Figures of docs/distributed.md that no test shows, measured on two gloo ranks of this host.

* losses: how far those of two ranks are from one process's, step by step, with dlrm, micro-dlrm and dlrm-v4; and of
  micro-dlrm the AUC of both after more steps, in which rounding has grown;
* checkpoint: a table of 2,000,000 rows of 64 with its row-wise Adagrad state, saved (digests and reading back
  included), loaded as it was, and loaded into other columns: seconds of the last rank, and what the fullest rank needs
  beside its part of the table;
* span: what a span costs when nobody listens, and where a rank keeps the last one for others to read;
* window: what two ranks say of a window in which the second sleeps in its data, and what the window itself costs.

Run as `python benchmarks/rank_figures.py`, or with --only for a part; it starts the ranks itself. Needs TorchRec.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

from _ranks import join, start
from _rows import record, row, show
from recperf.distributed.config import DistributedConfig
from recperf.distributed.demand import Demand, Table
from recperf.distributed.library import require_torchrec
from recperf.distributed.ranks import Ranks, enter
from recperf.errors import RecperfError

NAME = "rank_figures"
ROWS, DIM = 2_000_000, 64
LOSSES = {"dlrm": 60, "micro-dlrm": 300, "dlrm-v4": 30}
"""Steps in which losses are compared."""
MIB = 1 << 20
Rows = list[dict[str, Any]]


def prepared_of(name: str) -> Any:
    """A workload by its default preset, on one thread of a CPU; dlrm in smaller batches, dlrm-v4 with fewer events."""
    if name == "dlrm":
        from recperf.workloads import find
        from recperf.workloads.dlrm.config import experiment

        made = experiment()
        return find("dlrm").prepare(replace(made, train=replace(made.train, batch_size=512, device="cpu", threads=1)))
    if name == "micro-dlrm":
        from recperf.data.config import MovieLensConfig
        from recperf.workloads import find
        from recperf.workloads.micro_dlrm.config import default

        tiny = default()
        train = replace(tiny.train, device="cpu", threads=1)
        return find("micro-dlrm").prepare(replace(tiny, data=MovieLensConfig(source="embedded"), train=train))
    from recperf.workloads import find
    from recperf.workloads.dlrm_v4.config import laptop

    small = laptop()
    return find("dlrm-v4").prepare(replace(small, data=replace(small.data, events=40_000)))


def trained(name: str, steps: int, more: int = 0) -> tuple[list[float], dict[str, float]]:
    """The losses of some steps, and scores after some `more`."""
    from recperf.train.device import applied
    from recperf.train.loop import take_step

    prepared, losses = prepared_of(name), []
    with applied(prepared.settings):
        trial = prepared.trial(0)
        trial.recipe.model.train()
        epochs = (batch for epoch in range(trial.recipe.epochs) for batch in trial.recipe.order.batches(epoch))
        for step in range(min(steps + more, trial.recipe.steps)):
            loss, _ = take_step(trial.recipe, epochs, step)
            losses.append(float(loss))
        scores = trial.score() if more else {}
    return losses[:steps], scores


def losses(world: Ranks, options: argparse.Namespace) -> Rows:
    rows = []
    for name, steps in LOSSES.items():
        more = options.more if name == "micro-dlrm" else 0
        began = perf_counter()
        both, scores = trained(name, steps, more)
        if not world.is_leader:
            world.barrier()
            continue
        enter(Ranks())
        alone, known = trained(name, steps, more)
        enter(world)
        world.barrier()
        print(f"{name}: {perf_counter() - began:.0f} s", file=sys.stderr)
        apart = max(abs(ours - theirs) / abs(theirs) for ours, theirs in zip(both, alone, strict=True))
        here = {"ranks": world.size, "steps": steps}
        rows.append(row(NAME, name, "largest_difference", "of a loss", [apart], here))
        for who, metrics in ((f"{world.size} ranks", scores), ("1 process", known)):
            if metrics:
                conditions = {"steps": steps + more}
                rows.append(row(NAME, f"{name}, {who}", "auc", "", [metrics["auc"]], conditions))
    return rows


class Peak:
    """The most memory this process has had since it was made, beyond what it had then."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        self.before = _status("VmRSS")

    def bytes(self) -> int:
        return max(0, _status("VmHWM") - self.before)


def _status(name: str) -> int:
    match = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match
    return int(match[1]) << 10


def bags(world: Ranks, kind: str, seed: int) -> Any:
    from recperf.distributed.bags import BagTables

    options = DistributedConfig(sharding=f"t={kind}")
    table = Table(name="t", rows=ROWS, dim=DIM, ids=1.0, vectors=1.0, distinct=float, pooled=True)
    tables = BagTables(
        Demand(tables=(table,), batch=64 // world.size), options, world, optimizer="rowwise-adagrad", eps=1e-8
    )
    tables.reset(0.1, seed)
    return tables


def checkpoint(world: Ranks, options: argparse.Namespace) -> Rows:
    from recperf.distributed.checkpoint import RankStore

    folder = Path(world.on_leader(lambda: tempfile.mkdtemp(dir=options.folder)))
    here = {"ranks": world.size, "rows": ROWS, "dim": DIM}
    rows = []

    def timed(what: str, work: Any) -> None:
        world.barrier()
        peak, began = Peak(), perf_counter()
        work()
        seconds = world.maximum(round((perf_counter() - began) * 1e9)) / 1e9
        most = world.maximum(peak.bytes())
        rows.append(row(NAME, what, "time", "s", [seconds], here))
        rows.append(row(NAME, what, "beside_the_tables", "MiB", [most / MIB], here))

    def store() -> RankStore:
        return RankStore(folder=folder, notice=print, world=world)

    try:
        saved = bags(world, "row", 1)
        timed("save, by rows", partial(_save, store(), saved))
        for kind, what in (("row", "load, by rows"), ("column", "load, by columns")):
            timed(what, partial(_load, store(), bags(world, kind, 2)))
    finally:
        world.barrier()
        if world.is_leader:
            shutil.rmtree(folder)
    return rows


def _state(tables: Any) -> dict[str, Any]:
    from recperf.distributed.checkpoint import sharded_state

    return {"trial": {"model": dict(sharded_state(tables))}}


def _save(store: Any, tables: Any) -> None:
    store.save(1, _state(tables), best=False)


def _load(store: Any, tables: Any) -> None:
    store.load(into=_state(tables))


def span_cost(world: Ranks, options: argparse.Namespace) -> Rows:
    from recperf.distributed import progress
    from recperf.measure.spans import follow, span

    def each(count: int = 20_000) -> float:
        began = perf_counter()
        for _ in range(count):
            with span("forward"):
                pass
        return (perf_counter() - began) / count * 1e6

    off = [each() for _ in range(9)]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHELASTIC_ERROR_FILE"] = str(Path(folder) / "error.json")
        progress.begin()
        kept = [each() for _ in range(9)]
        follow(None)
    variants = (("nobody listens", off), ("kept for others to read", kept))
    return [row(NAME, f"span, {who}", "time", "us", values, {"ranks": world.size}) for who, values in variants]


@dataclass(frozen=True)
class Slow:
    """Batches that take long to come."""

    order: Any
    seconds: float

    def __len__(self) -> int:
        return len(self.order)

    def batches(self, epoch: int, start: int = 0) -> Iterator[Any]:
        for batch in self.order.batches(epoch, start):
            sleep(self.seconds)
            yield batch


def window(world: Ranks, options: argparse.Namespace) -> Rows:
    from recperf.execution.measuring import measure_window

    prepared = prepared_of("dlrm-v4")
    trial = prepared.trial(0)
    trial.recipe.model.train()
    rows = []
    for slept in (0.0, 0.15):
        recipe = trial.recipe
        if slept and world.rank == 1:
            recipe = replace(recipe, order=Slow(recipe.order, slept))
        profile = measure_window(prepared, trial, recipe, None, steps=16)
        here = {"ranks": world.size, "steps": profile["steps"], "rank_1_sleeps_ms": 1e3 * slept}
        for each in profile["communication"]["each"]:
            for metric in ("own_ms", "exposed_ms", "late_ms", "moving_ms"):
                rows.append(row(NAME, f"window, rank {each['rank']}", metric, "ms", [each[metric]], here))
        rows.append(row(NAME, "window", "overhead", "of a step", [profile["overhead"]["share"]], here))
    return rows


PARTS = {"losses": losses, "checkpoint": checkpoint, "span": span_cost, "window": window}


def rank(options: argparse.Namespace) -> None:
    """What each rank does; the first keeps the rows."""
    world = join(options.meeting)
    rows: Rows = []
    for part in [options.only] if options.only else PARTS:
        began = perf_counter()
        rows += PARTS[part](world, options)
        if world.is_leader:
            print(f"{part}: {perf_counter() - began:.0f} s", file=sys.stderr)
    if world.is_leader:
        for entry in rows:
            entry["conditions"]["note"] = options.note
            print(f"{entry['conditions'].get('rank_1_sleeps_ms', ''):>5} {show(entry)}")
        if not options.dry:
            print(f"rows appended to {record(rows).name}", file=sys.stderr)
    world.barrier()
    world.leave()


def main() -> int:
    parser = argparse.ArgumentParser(description="figures of two gloo ranks of this host")
    parser.add_argument("--only", choices=tuple(PARTS))
    parser.add_argument("--more", type=int, default=2_830, help="steps of micro-dlrm behind those that are compared")
    parser.add_argument("--folder", type=Path, default=None, help="where the checkpoint is written")
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
        return start(2)
    rank(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
