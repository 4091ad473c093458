"""Counted work of the operators of recommender programs: rows, distinct rows and widths, never whole tables."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import example_traces as made
import pytest
import torch
from torch import nn

from recperf.measure.counting import Counter
from recperf.measure.operators import CallWork
from recperf.measure.records import Operator
from recperf.measure.rows import operator_rows, unknown_work
from recperf.measure.timeline import CountedInOrder, step_times
from recperf.measure.trace.analyse import steps_of
from recperf.measure.trace.read import collect, read
from recperf.measure.trace.work import work_of

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks", "ignore::DeprecationWarning")
ROWS, WIDTH, IDS = 100_000, 64, 4_000
ROW = 4 * WIDTH
KNEE = 1 << 20


def counted(step: Callable[[], object], steps: int = 2) -> list[CallWork]:
    counter = Counter(KNEE, KNEE)
    with counter:
        for _ in range(steps):
            counter.begin_step()
            step()
    return counter.result()


def with_rows(works: list[CallWork], name: str) -> list[CallWork]:
    return [work for work in works if name in work.name and work.rows]


def training(
    optimizer: type[torch.optim.Optimizer], ids: torch.Tensor, *, sparse: bool, bag: bool = True
) -> Callable[[], object]:
    table = nn.EmbeddingBag(ROWS, WIDTH, sparse=sparse, mode="sum") if bag else nn.Embedding(ROWS, WIDTH, sparse=sparse)
    update = optimizer(table.parameters(), lr=0.1)  # type: ignore[call-arg]
    offsets = torch.arange(0, IDS, 10)

    def step() -> None:
        update.zero_grad()
        (table(ids, offsets) if bag else table(ids)).sum().backward()
        update.step()

    return step


@pytest.mark.parametrize("bag", [True, False])
@pytest.mark.parametrize(
    ("optimizer", "updates", "reads"),
    [(torch.optim.SGD, 1, 0), (torch.optim.Adagrad, 2, 1), (torch.optim.SparseAdam, 3, 2)],
)
def test_sparse_gradients_touch_rows_only(
    optimizer: type[torch.optim.Optimizer], updates: int, reads: int, bag: bool
) -> None:
    ids = torch.randint(0, ROWS, (IDS,))
    works, distinct = counted(training(optimizer, ids, sparse=True, bag=bag)), ids.unique().numel()
    added, masked = with_rows(works, "aten::add_"), with_rows(works, "sparse_mask")
    assert (len(added), len(masked)) == (updates, reads)
    for work in [*added, *masked]:
        assert (work.distinct, work.row_bytes, work.table_rows) == (distinct, ROW, ROWS)
        # An optimizer that coalesces the gradient first updates each row once.
        assert work.rows in (distinct, 2 * distinct, 2 * IDS)
    assert all(work.bytes < 0.2 * ROWS * ROW for work in works)


def test_a_dense_gradient_writes_the_whole_table() -> None:
    works = counted(training(torch.optim.SGD, torch.randint(0, ROWS, (IDS,)), sparse=False))
    (backward,) = with_rows(works, "_embedding_bag_backward")
    assert backward.rows == 2 * IDS
    assert backward.bytes >= ROWS * ROW + backward.rows * ROW


def test_ids_of_several_dimensions() -> None:
    table = torch.zeros(50, 40, 8)
    ids = torch.randint(0, 40, (100,))
    pairs = counted(lambda: table[ids, ids])[-1]
    assert (pairs.rows, pairs.row_bytes, pairs.table_rows) == (100, 32, 2000)
    along = counted(lambda: table[:, ids])[-1]
    assert (along.rows, along.row_bytes, along.table_rows) == (100, 50 * 8 * 4, 40)
    mask = torch.rand(50, 40) < 0.25
    masked = counted(lambda: table[mask])[-1]
    assert (masked.rows, masked.row_bytes) == (int(mask.sum()), 32)


def test_a_product_counts_the_same_wherever_it_is_written() -> None:
    left, right, into = torch.ones(3, 5), torch.ones(5, 7), torch.ones(3, 7)
    batched = torch.ones(2, 3, 7)
    for step in (
        lambda: torch.mm(left, right, out=into),
        lambda: torch.addmm(into, left, right),
        lambda: into.addmm_(left, right, beta=0.5),
    ):
        assert sum(work.flops for work in counted(step)) == 2 * 3 * 5 * 7
    works = counted(lambda: batched.baddbmm_(left.expand(2, 3, 5), right.expand(2, 5, 7)))
    assert sum(work.flops for work in works) == 2 * 2 * 3 * 5 * 7


def test_what_is_not_understood_counts_nothing() -> None:
    with torch.library._scoped_library("recperf_test", "FRAGMENT") as library:
        library.define("pick(Tensor table, Tensor ids) -> Tensor")
        library.impl("pick", lambda table, ids: table[ids].clone(), "CPU")
        table, ids = torch.zeros(ROWS, WIDTH), torch.arange(10)
        (work,) = counted(lambda: torch.ops.recperf_test.pick(table, ids))
    assert (work.known, work.bytes, work.rows) == (False, 0, 0)
    # An operator of torch that is in no table: what its ids select of the larger tensor is not known.
    (work,) = counted(lambda: table.index_fill_(0, ids, 1.0))
    assert (work.known, work.bytes) == (False, 0)
    (work,) = counted(lambda: torch.logaddexp(table, table))
    assert (work.known, work.bytes) == (True, 3 * ROWS * ROW)


class Tbe:
    """FBGEMM's operators over two tables, of which the second serves two features."""

    def __init__(self, optimizer: str, *, bags: bool = True) -> None:
        training = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_training")
        common = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_common")
        self.widths = (64, 32, 32) if bags else (64, 64, 64)
        place = common.EmbeddingLocation.HOST, training.ComputeDevice.CPU
        self.module = training.SplitTableBatchedEmbeddingBagsCodegen(
            [(ROWS, self.widths[0], *place), (ROWS // 2, self.widths[1], *place)],
            feature_table_map=[0, 1, 1],
            optimizer=getattr(training.OptimType, optimizer),
            pooling_mode=common.PoolingMode.SUM if bags else common.PoolingMode.NONE,
        )
        sizes = (ROWS, ROWS // 2, ROWS // 2)
        self.parts = [torch.randint(0, size, (IDS,)) for size in sizes]
        self.distinct = self.parts[0].unique().numel() + torch.cat(self.parts[1:]).unique().numel()
        self.row_bytes = 4 * sum(self.widths) // 3

    def step(self) -> None:
        out = self.module(torch.cat(self.parts), torch.arange(0, 3 * IDS + 1, 10))
        out.backward(torch.ones_like(out))


@pytest.mark.parametrize("bags", [True, False])
@pytest.mark.parametrize(
    ("optimizer", "state_bytes"),
    [("EXACT_SGD", None), ("EXACT_ROWWISE_ADAGRAD", 4), ("EXACT_ADAGRAD", 0)],
)
def test_table_batched_embeddings(optimizer: str, state_bytes: int | None, bags: bool, tmp_path: Path) -> None:
    tbe = Tbe(optimizer, bags=bags)
    works = counted(tbe.step)
    (forward,), (backward,) = with_rows(works, "forward"), with_rows(works, "backward")
    table_rows = ROWS + ROWS // 2
    assert (forward.rows, forward.distinct, forward.table_rows) == (3 * IDS, tbe.distinct, table_rows)
    assert forward.row_bytes == tbe.row_bytes
    # Equal rows are updated once. A state is a second random row.
    pieces = 1 if state_bytes is None else 2
    assert (backward.rows, backward.distinct) == (2 * pieces * tbe.distinct, pieces * tbe.distinct)
    if state_bytes == 4:
        assert backward.row_bytes == (tbe.row_bytes + 4) // 2
    assert max(forward.bytes, backward.bytes) < 0.5 * table_rows * tbe.row_bytes
    assert all(work.known for work in works if work.name.startswith("fbgemm::"))

    traced = {work.name: work for work in of_trace(tbe.step, tmp_path / "trace.json")}
    assert traced[forward.name].rows == forward.rows
    assert traced[forward.name].row_bytes == pytest.approx(forward.row_bytes, rel=0.05)
    assert traced[backward.name].rows == 2 * pieces * 3 * IDS
    assert traced[backward.name].row_bytes == pytest.approx(backward.row_bytes, rel=0.3)


def of_trace(step: Callable[[], Any], path: Path) -> list[CallWork]:
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
        step()
    profiler.export_chrome_trace(str(path))
    works = (work_of(event.name, event.shapes) for event in read(path).host if event.kind == "op")
    return [work for work in works if work is not None]


def test_a_backward_pass_in_cpp_updates_the_rows_of_its_lookup() -> None:
    events = [
        made.around("recperf.step#0", 0, 100),
        made.op("fbgemm::dense_embedding_codegen_lookup_function", 1, 10),
        made.op("torch::autograd::CppNode<(anonymous namespace)::SplitLookupFunction_Dense_Op>", 20, 30),
        made.op("aten::zeros_like", 25, 10),
    ]
    trace = collect(events, Path("made"))
    nesting, window = steps_of(trace)
    lookup = CallWork(events[1]["name"], rows=100, distinct=80, row_bytes=64, memory_rows=70, table_rows=1000)
    works = CountedInOrder(nesting, [lookup, CallWork("aten::zeros_like", bytes=4000)])
    times = step_times(trace, nesting, window, works, lambda index: None)
    rows = {call.name.split("::")[0]: call.work and call.work.rows for call in times.calls}
    assert rows == {"fbgemm": 100, "torch": 160, "aten": 0}
    assert sum(row.ms for row in operator_rows(times, [], window) if row.name.startswith("torch")) == 0.02


def test_operators_with_unknown_work_are_listed() -> None:
    rows = [
        Operator("mylib::pick", None, "elementwise", 1, 1, 3.0, counted=False),
        Operator("c10d::allreduce_", None, "elementwise", 1, 1, 3.0, counted=False, communication=True),
        Operator("autograd::engine", None, "node", 1, 1, 3.0, counted=False),
        Operator("aten::mm", None, "product", 1, 1, 30.0),
        Operator("mylib::small", None, "elementwise", 1, 1, 0.1, counted=False),
    ]
    assert unknown_work(rows) == ["the work of one operator is not known: mylib::pick (3.00 ms)"]
    assert not unknown_work(rows[1:])


def test_the_largest_tensor_that_an_operator_reads() -> None:
    hidden, weight = torch.rand(5, 3), torch.rand(3, 7000)
    shapes = {work.name: work.largest for work in counted(lambda: torch.log_softmax(hidden @ weight, 1))}
    assert shapes == {"aten::mm": (3, 7000), "aten::_log_softmax": (5, 7000)}
