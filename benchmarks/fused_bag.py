"""Embedding bags on a GPU: the fused kernels against FBGEMM's table-batched embedding (TBE) and torch, float32 rows.

One table with 2,097,152 random ids, and 26 tables of a million rows with a batch of 8,192. Forward: the TBE,
`embedding_bag(mode="sum")` and ours; bytes are rows read and sums written. Backward with an update: the TBE's, which
has its optimizer inside; torch's sparse path (the backward pass of `embedding_bag(sparse=True)`, then coalesce and
row-wise Adagrad by torch's operators; for SGD torch's own addition of a sparse gradient); and ours from the gradient of
the bags on. All sort or group the ids inside the clock, and are charged the bytes such an update cannot avoid: each
used row read and written, each bag's gradient read once, and with Adagrad a float of state a used row read and
written. Without FBGEMM its rows are left out, and the script says why.

Readings of the ways alternate. Each lies between two events, after a write that leaves nothing in the L2 and keeps the
device busy while the host queues the work. A share is of a plain copy's bandwidth in the same run.

Shapes: V ids, B bags (feature-major where there are several tables), R rows of all tables, D width, U different rows
among the ids, F tables.

Run as `python benchmarks/fused_bag.py`. Does nothing without a GPU; exits with 5 where a goal is missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from _fbgemm_peer import FBGEMM, fbgemm_problem, fbgemm_version
from _rows import record, row, show
from recperf.ops.bag import choose
from recperf.ops.table_rules import RuleName

DEVICE = "cuda"
IDS = 1 << 21
MOST_ROWS, MOST_BYTES = 16 << 20, 8 << 30
"""Of a table: scores of times any L2."""
FLUSH_BYTES = 1 << 30
MANY_TABLES, MANY_ROWS, MANY_DIM, MANY_BATCH, MANY_BAGS = 26, 1_000_000, 128, 8192, (1, 10)
"""The case of many tables: their number and rows, the width, the samples of a batch, and ids a bag."""
READINGS, WARM_UP = 15, 3
RATE, EPS = 0.01, 1e-8
GOAL_FORWARD = {64: 3000, 128: 3500, 512: 4000}
"""GB/s on one NVIDIA H200, by width."""
GOAL_DIM, GOAL_BAG, GOAL_RATIO, GOAL_UPDATE = 128, 32, 4.0, 2800
"""Of the backward pass with row-wise Adagrad: times torch's, and GB/s on one NVIDIA H200."""

PEERS = ("FBGEMM", "torch")

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
    """One table or several of equal size, one batch of ids and the gradient of its bags."""

    table_RD: Tensor
    state_R: Tensor
    ids_V: Tensor
    offsets_B1: Tensor
    gradient_BD: Tensor
    unique: int
    tables: int = 1

    @property
    def table_rows(self) -> int:
        return self.table_RD.shape[0] // self.tables

    @property
    def starts_F(self) -> Tensor | None:
        """Where each table begins; none for a single one."""
        if self.tables == 1:
            return None
        return torch.arange(self.tables, device=self.ids_V.device) * self.table_rows

    @cached_property
    def rows_V(self) -> Tensor:
        """The ids as rows of all tables, which torch is given."""
        if self.tables == 1:
            return self.ids_V
        assert self.starts_F is not None
        per_table = self.offsets_B1[:: self.bags // self.tables].diff()
        return self.ids_V + self.starts_F.repeat_interleave(per_table)

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


def make_case(table_RD: Tensor, bag: int, generator: torch.Generator, *, ids: int = IDS, tables: int = 1) -> Case:
    rows, dim, device = table_RD.shape[0], table_RD.shape[1], table_RD.device
    ids_V = torch.randint(0, rows // tables, (ids,), device=device, generator=generator)
    edges = torch.arange(0, ids, bag, device=device)
    offsets_B1 = torch.cat([edges, edges.new_full((1,), ids)])
    gradient_BD = torch.randn(offsets_B1.numel() - 1, dim, device=device, generator=generator)
    case = Case(table_RD, torch.zeros(rows, device=device), ids_V, offsets_B1, gradient_BD, 0, tables)
    return replace(case, unique=int(torch.unique(case.rows_V).numel()))


class TorchUpdate:
    """The sparse path: a gradient of as many rows as ids, then an optimizer that looks only at those."""

    def __init__(self, case: Case, *, adagrad: bool) -> None:
        self.case, self.adagrad = case, adagrad
        self.weight = torch.nn.Parameter(case.table_RD)
        self.pooled_BD: Tensor | None = None

    def forward(self) -> None:
        self.weight.grad = None
        self.pooled_BD = F.embedding_bag(
            self.case.rows_V, self.weight, self.case.offsets_B1, mode="sum", sparse=True, include_last_offset=True
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


def fbgemm_of(case: Case) -> FBGEMM:
    return FBGEMM(case.table_RD, case.ids_V, case.offsets_B1, case.gradient_BD, tables=case.tables, rate=RATE, eps=EPS)


def ways_of(case: Case, fbgemm: bool) -> dict[str, dict[str, Way]]:
    """By what is done and who does it."""
    bag, _ = choose("triton", case.table_RD)
    table_RD, ids_V, offsets_B1, gradient_BD = case.table_RD, case.ids_V, case.offsets_B1, case.gradient_BD
    starts_F, rows_V = case.starts_F, case.rows_V

    def ours(state_R: Tensor | None) -> None:
        grouped = bag.Grouped(ids_V, offsets_B1, table_RD.shape[0], starts_F)
        rule: RuleName = "sgd" if state_R is None else "rowwise-adagrad"
        bag.update(table_RD, state_R, grouped, gradient_BD, rule=rule, rate=RATE, eps=EPS, decay=0.0, scale=1.0)

    ways = {
        "forward": {
            "torch": Way(lambda: F.embedding_bag(rows_V, table_RD, offsets_B1, mode="sum", include_last_offset=True)),
            "recperf": Way(lambda: bag.bag_sum(table_RD, ids_V, offsets_B1, starts_F)),
        },
        "row-wise Adagrad": {
            "torch": TorchUpdate(case, adagrad=True).way(),
            "recperf": Way(lambda: ours(case.state_R)),
        },
        "SGD": {
            "torch": TorchUpdate(case, adagrad=False).way(),
            "recperf": Way(lambda: ours(None)),
        },
    }
    if fbgemm:
        peer = fbgemm_of(case)
        ways["forward"]["FBGEMM"] = Way(peer.forward_only)
        ways["row-wise Adagrad"]["FBGEMM"] = Way(peer.backward, peer.forward)
    return ways


def require_agreement(case: Case, fbgemm: bool) -> None:
    """All ways to the same thing give the same numbers; looked at where the first ids point."""
    some, ways = case.rows_V[: 1 << 16], ways_of(case, False)
    expected, ours = (ways["forward"][who].work() for who in ("torch", "recperf"))
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    weights_RD, state_R = case.table_RD.clone(), case.state_R.clone()
    changes: dict[str, list[Tensor]] = {}
    for what in ("row-wise Adagrad", "SGD"):
        for way in ways[what].values():
            case.table_RD.copy_(weights_RD)
            case.state_R.copy_(state_R)
            way.before()
            way.work()
            changes.setdefault(what, []).append(case.table_RD[some] - weights_RD[some])
        case.table_RD.copy_(weights_RD)
        case.state_R.copy_(state_R)
    if fbgemm:
        peer = fbgemm_of(case)
        torch.testing.assert_close(peer.by_bag(peer.forward_only()), expected, rtol=1e-4, atol=1e-4)
        peer.forward()
        peer.backward()
        changes["row-wise Adagrad"].append(peer.table_RD()[some] - weights_RD[some])
    for first, *others in changes.values():
        for change in others:
            torch.testing.assert_close(change, first, rtol=1e-3, atol=1e-3 * float(first.abs().max()))


def copy_speed(clock: Clock) -> list[float]:
    source = torch.ones(1 << 29, device=DEVICE)
    target = torch.empty_like(source)
    seconds = clock.readings({"copy": Way(lambda: target.copy_(source))})["copy"]
    return [2 * source.nbytes / one / 1e9 for one in seconds]


def entries_of(
    case: Case, bag: int, copy: float, clock: Clock, shared: dict[str, Any], fbgemm: bool
) -> list[dict[str, Any]]:
    made = []
    for what, ways in ways_of(case, fbgemm).items():
        seconds, size = clock.readings(ways), case.bytes_of(what)
        conditions = shared | {
            "what": what,
            "ids": case.ids_V.numel(),
            "bags": case.bags,
            "bag": bag,
            "dim": case.dim,
            "tables": case.tables,
            "table_rows": case.table_rows,
            "unique_ratio": case.unique / case.ids_V.numel(),
            "bytes": size,
        }
        place = f"{what}, {f'{case.tables} tables, ' if case.tables > 1 else ''}dim {case.dim}, bags of {bag}"
        for who, taken in seconds.items():
            speeds = [size / one / 1e9 for one in taken]
            more = {
                "who": who,
                "ms": statistics.median(taken) * 1e3,
                "share_of_copy": statistics.median(speeds) / copy,
            }
            made.append(row("fused_bag", f"{who}, {place}", "bandwidth", "GB/s", speeds, conditions | more))
            for peer in PEERS if who not in PEERS else ():
                if peer in seconds:
                    ratios = [theirs / mine for theirs, mine in zip(seconds[peer], taken)]
                    more = {"who": who, "peer": peer}
                    title = f"{who} / {peer}, {place}"
                    made.append(row("fused_bag", title, "ratio", "x", ratios, conditions | more))
    return made


def goals_missed(entries: list[dict[str, Any]]) -> list[str]:
    missed = []
    for entry in entries:
        at, p50 = entry["conditions"], entry["p50"]
        if at.get("who") != "recperf" or at["bag"] != GOAL_BAG or at.get("peer", "torch") != "torch":
            continue
        speed = entry["metric"] == "bandwidth"
        least = 0.0
        if at["what"] == "forward" and speed:
            least = GOAL_FORWARD.get(at["dim"], 0)
        elif at["what"] == "row-wise Adagrad" and at["dim"] == GOAL_DIM:
            least = GOAL_UPDATE if speed else GOAL_RATIO
        if p50 < least:
            missed.append(f"{entry['variant']}: {p50:,.3g}, the goal is {least:,.3g}")
    return missed


def measure(dims: list[int], bags: list[int], *, many: bool, fbgemm: bool) -> list[dict[str, Any]]:
    clock, generator = Clock(), torch.Generator(DEVICE).manual_seed(1)
    shared: dict[str, Any] = {"device": torch.cuda.get_device_name(), "l2_flushed": True, "seed": 1}
    if fbgemm:
        shared["fbgemm"] = fbgemm_version()
    copies = copy_speed(clock)
    made = [row("fused_bag", "copy", "bandwidth", "GB/s", copies, shared | {"bytes": 1 << 32})]

    def add(table_RD: Tensor, bags: Sequence[int], **shape: Any) -> None:
        for bag in bags:
            ids = {"ids": bag * MANY_BATCH * MANY_TABLES} if shape else {}
            case = make_case(table_RD, bag, generator, **ids, **shape)
            if bag == bags[0]:
                require_agreement(case, fbgemm)
            made.extend(entries_of(case, bag, statistics.median(copies), clock, shared, fbgemm))

    for dim in dims:
        rows = min(MOST_ROWS, MOST_BYTES // (4 * dim))
        add(torch.randn(rows, dim, device=DEVICE, generator=generator), bags)
        torch.cuda.empty_cache()
    if many:
        table_RD = torch.randn(MANY_TABLES * MANY_ROWS, MANY_DIM, device=DEVICE, generator=generator)
        add(table_RD, MANY_BAGS, tables=MANY_TABLES)
    return made


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description="fused embedding bags against FBGEMM's and torch's")
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--bags", type=int, nargs="+", default=[32, 1, 10], help="ids a bag")
    parser.add_argument("--no-many", action="store_true", help="without the case of 26 tables")
    parser.add_argument("--no-record", action="store_true", help="print the rows and append them nowhere")
    chosen = parser.parse_args(words)
    if not torch.cuda.is_available():
        print("nothing to measure: torch sees no GPU here")
        return 0
    problem = fbgemm_problem()
    if problem:
        print(f"FBGEMM's TBE is not measured: {problem}")
    entries = measure(chosen.dims, chosen.bags, many=not chosen.no_many, fbgemm=not problem)
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
