"""Embedding bags on a GPU: the fused kernels against torch, 2,097,152 random ids of float32 rows, in one run.

Forward: `embedding_bag(mode="sum")` and ours; bytes are rows read and sums written. Backward with an update: torch's
sparse path (the backward pass of `embedding_bag(sparse=True)`, then coalesce and row-wise Adagrad by torch's operators;
for SGD torch's own addition of a sparse gradient) and ours from the gradient of the bags on, grouping the ids included.
Both are charged the bytes such an update cannot avoid: each used row read and written, each bag's gradient read once,
and with Adagrad a float of state a used row read and written.

Readings of the two alternate. Each lies between two events, after a write that leaves nothing in the L2 and keeps the
device busy while the host queues the work. A share is of a plain copy's bandwidth in the same run.

Shapes: V ids, B bags, R table rows, D width, U different rows among the ids.

Run as `python benchmarks/fused_bag.py`. Does nothing without a GPU; exits with 5 where a goal is missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from _rows import record, row, show
from recperf.ops.bag import choose

DEVICE = "cuda"
IDS = 1 << 21
MOST_ROWS, MOST_BYTES = 16 << 20, 8 << 30
"""Of a table: scores of times any L2."""
FLUSH_BYTES = 1 << 30
READINGS, WARM_UP = 15, 3
RATE, EPS = 0.01, 1e-8
GOAL_FORWARD = {64: 3000, 128: 3500, 512: 4000}
"""GB/s on one NVIDIA H200, by width."""
GOAL_DIM, GOAL_BAG, GOAL_RATIO, GOAL_SHARE = 128, 32, 4.0, 0.5
"""Of the backward pass with row-wise Adagrad: times torch's, and share of a copy."""

Work = Callable[[], object]


def nothing() -> None: ...


@dataclass(frozen=True)
class Way:
    work: Work
    before: Work = nothing
    """What the work needs and is not timed with."""


class Clock:
    def __init__(self) -> None:
        self.flush = torch.ones(FLUSH_BYTES // 4, device=DEVICE)
        self.begin, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]

    def reading(self, way: Way) -> float:
        """Seconds."""
        way.before()
        self.flush.add_(1)
        self.begin.record()
        way.work()
        self.end.record()
        self.end.synchronize()
        return float(self.begin.elapsed_time(self.end)) * 1e-3

    def readings(self, ways: dict[str, Way]) -> dict[str, list[float]]:
        """In turn, so that whatever else happens hits all."""
        found: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(WARM_UP + READINGS):
            for name, way in ways.items():
                seconds = self.reading(way)
                if number >= WARM_UP:
                    found[name].append(seconds)
        return found


@dataclass(frozen=True)
class Case:
    """One table, one batch of ids and the gradient of its bags."""

    table_RD: Tensor
    state_R: Tensor
    ids_V: Tensor
    offsets_B1: Tensor
    gradient_BD: Tensor
    unique: int

    @property
    def bags(self) -> int:
        return self.offsets_B1.numel() - 1

    @property
    def dim(self) -> int:
        return self.table_RD.shape[1]

    def bytes_of(self, what: str) -> int:
        row_bytes = 4 * self.dim
        if what == "forward":
            return (self.ids_V.numel() + self.bags) * row_bytes
        state = 8 * self.unique if what == "row-wise Adagrad" else 0
        return (2 * self.unique + self.bags) * row_bytes + state


def make_case(table_RD: Tensor, bag: int, generator: torch.Generator) -> Case:
    rows, dim = table_RD.shape
    ids_V = torch.randint(0, rows, (IDS,), device=DEVICE, generator=generator)
    edges = torch.arange(0, IDS, bag, device=DEVICE)
    offsets_B1 = torch.cat([edges, edges.new_full((1,), IDS)])
    gradient_BD = torch.randn(offsets_B1.numel() - 1, dim, device=DEVICE, generator=generator)
    unique = int(torch.unique(ids_V).numel())
    return Case(table_RD, torch.zeros(rows, device=DEVICE), ids_V, offsets_B1, gradient_BD, unique)


class TorchUpdate:
    """The sparse path: a gradient of as many rows as ids, then an optimizer that looks only at those."""

    def __init__(self, case: Case, *, adagrad: bool) -> None:
        self.case, self.adagrad = case, adagrad
        self.weight = torch.nn.Parameter(case.table_RD)
        self.pooled_BD: Tensor | None = None

    def forward(self) -> None:
        self.weight.grad = None
        self.pooled_BD = F.embedding_bag(
            self.case.ids_V, self.weight, self.case.offsets_B1, mode="sum", sparse=True, include_last_offset=True
        )

    def backward(self) -> None:
        assert self.pooled_BD is not None
        self.pooled_BD.backward(self.case.gradient_BD)  # type: ignore[no-untyped-call]
        gradient = self.weight.grad
        assert gradient is not None
        with torch.no_grad():
            if not self.adagrad:
                self.weight.add_(gradient, alpha=-RATE)
                return
            merged = gradient.coalesce()
            rows_U, values_UD = merged.indices()[0], merged.values()
            state_R = self.case.state_R
            now_U = state_R.index_select(0, rows_U).add_(values_UD.square().mean(1))
            state_R.index_copy_(0, rows_U, now_U)
            step_UD = values_UD / now_U.sqrt().add_(EPS).unsqueeze(1)
            self.weight.index_add_(0, rows_U, step_UD, alpha=-RATE)

    def way(self) -> Way:
        return Way(self.backward, self.forward)


def ways_of(case: Case) -> dict[str, dict[str, Way]]:
    """By what is done and who does it."""
    bag, _ = choose("triton", case.table_RD)
    table_RD, ids_V, offsets_B1, gradient_BD = case.table_RD, case.ids_V, case.offsets_B1, case.gradient_BD

    def ours(state_R: Tensor | None) -> None:
        grouped = bag.Grouped(ids_V, offsets_B1, table_RD.shape[0])
        bag.update(table_RD, state_R, grouped, gradient_BD, rate=RATE, eps=EPS, decay=0.0, scale=1.0)

    return {
        "forward": {
            "torch": Way(lambda: F.embedding_bag(ids_V, table_RD, offsets_B1, mode="sum", include_last_offset=True)),
            "recperf": Way(lambda: bag.bag_sum(table_RD, ids_V, offsets_B1)),
        },
        "row-wise Adagrad": {
            "torch": TorchUpdate(case, adagrad=True).way(),
            "recperf": Way(lambda: ours(case.state_R)),
        },
        "SGD": {
            "torch": TorchUpdate(case, adagrad=False).way(),
            "recperf": Way(lambda: ours(None)),
            "recperf, atomics": Way(lambda: bag.scatter_sgd(table_RD, ids_V, offsets_B1, gradient_BD, rate=RATE)),
        },
    }


def require_agreement(case: Case, ways: dict[str, dict[str, Way]]) -> None:
    """All ways to the same thing give the same numbers; looked at where the first ids point."""
    some = case.ids_V[: 1 << 16]
    peer, ours = (ways["forward"][who].work() for who in ("torch", "recperf"))
    torch.testing.assert_close(ours, peer, rtol=1e-4, atol=1e-4)
    weights_RD, state_R = case.table_RD.clone(), case.state_R.clone()
    for what in ("row-wise Adagrad", "SGD"):
        changes = []
        for way in ways[what].values():
            case.table_RD.copy_(weights_RD)
            case.state_R.copy_(state_R)
            way.before()
            way.work()
            changes.append(case.table_RD[some] - weights_RD[some])
        case.table_RD.copy_(weights_RD)
        case.state_R.copy_(state_R)
        for change in changes[1:]:
            torch.testing.assert_close(change, changes[0], rtol=1e-3, atol=1e-3 * float(changes[0].abs().max()))


def copy_speed(clock: Clock) -> list[float]:
    source = torch.ones(1 << 29, device=DEVICE)
    target = torch.empty_like(source)
    seconds = clock.readings({"copy": Way(lambda: target.copy_(source))})["copy"]
    return [2 * source.nbytes / one / 1e9 for one in seconds]


def entries_of(case: Case, bag: int, copy: float, clock: Clock, shared: dict[str, Any]) -> list[dict[str, Any]]:
    made = []
    for what, ways in ways_of(case).items():
        seconds, size = clock.readings(ways), case.bytes_of(what)
        conditions = shared | {
            "what": what,
            "ids": IDS,
            "bags": case.bags,
            "bag": bag,
            "dim": case.dim,
            "table_rows": case.table_RD.shape[0],
            "unique_ratio": case.unique / IDS,
            "bytes": size,
        }
        place = f"{what}, dim {case.dim}, bags of {bag}"
        for who, taken in seconds.items():
            speeds = [size / one / 1e9 for one in taken]
            more = {
                "who": who,
                "ms": statistics.median(taken) * 1e3,
                "share_of_copy": statistics.median(speeds) / copy,
            }
            made.append(row("fused_bag", f"{who}, {place}", "bandwidth", "GB/s", speeds, conditions | more))
            if who != "torch":
                ratios = [theirs / mine for theirs, mine in zip(seconds["torch"], taken)]
                made.append(
                    row("fused_bag", f"{who} / torch, {place}", "ratio", "x", ratios, conditions | {"who": who})
                )
    return made


def goals_missed(entries: list[dict[str, Any]]) -> list[str]:
    missed = []
    for entry in entries:
        at, p50 = entry["conditions"], entry["p50"]
        if at.get("who") != "recperf" or at["bag"] != GOAL_BAG:
            continue
        speed = entry["metric"] == "bandwidth"
        least = 0.0
        if at["what"] == "forward" and speed:
            least = GOAL_FORWARD.get(at["dim"], 0)
        elif at["what"] == "row-wise Adagrad" and at["dim"] == GOAL_DIM:
            p50, least = (at["share_of_copy"], GOAL_SHARE) if speed else (p50, GOAL_RATIO)
        if p50 < least:
            missed.append(f"{entry['variant']}: {p50:,.3g}, the goal is {least:,.3g}")
    return missed


def measure(dims: list[int], bags: list[int]) -> list[dict[str, Any]]:
    clock, generator = Clock(), torch.Generator(DEVICE).manual_seed(1)
    shared = {"device": torch.cuda.get_device_name(), "l2_flushed": True, "seed": 1}
    copies = copy_speed(clock)
    made = [row("fused_bag", "copy", "bandwidth", "GB/s", copies, shared | {"bytes": 1 << 32})]
    for dim in dims:
        rows = min(MOST_ROWS, MOST_BYTES // (4 * dim))
        table_RD = torch.randn(rows, dim, device=DEVICE, generator=generator)
        for bag in bags:
            case = make_case(table_RD, bag, generator)
            if bag == bags[0]:
                require_agreement(case, ways_of(case))
            made += entries_of(case, bag, statistics.median(copies), clock, shared)
        del table_RD, case
        torch.cuda.empty_cache()
    return made


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description="fused embedding bags against torch's, on a GPU")
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128, 512])
    parser.add_argument("--bags", type=int, nargs="+", default=[32, 1, 10], help="ids a bag")
    parser.add_argument("--no-record", action="store_true", help="print the rows and append them nowhere")
    chosen = parser.parse_args(words)
    if not torch.cuda.is_available():
        print("nothing to measure: torch sees no GPU here")
        return 0
    entries = measure(chosen.dims, chosen.bags)
    for entry in entries:
        share = entry["conditions"].get("share_of_copy")
        print(show(entry) + (f" = {share:.0%} of copy" if share else ""))
    if not chosen.no_record:
        print(f"rows appended to {record(entries).name}")
    missed = goals_missed(entries)
    for line in missed:
        print(f"goal missed: {line}")
    return 5 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
