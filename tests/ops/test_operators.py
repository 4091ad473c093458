"""Functions in C and Triton as operators: counted, recorded, and unchanged when nothing listens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from recperf.measure.counting import Counter
from recperf.measure.trace.work import CallWork
from recperf.ops.operators import NativeCall, hear_calls, operator

TABLE, IDS = torch.arange(4096.0).view(64, 64), torch.tensor([3, 7, 3, 9])


@operator("pick", rows=lambda table, ids: (table, ids), flops=lambda table, ids: 10 * ids.numel())
def pick(table: Tensor, ids: Tensor) -> Tensor:
    return table.index_select(0, ids) + 1


def counted(knee: int) -> list[CallWork]:
    counter = Counter(knee, knee)
    with counter:
        hear_calls(counter.native)
        try:
            for _ in range(2):
                counter.begin_step()
                pick(TABLE, IDS)
                torch.ones(8).add_(1)
        finally:
            hear_calls(None)
    return counter.result()


def test_a_call_is_one_operator_with_its_own_work() -> None:
    works = counted(knee=1 << 20)
    names = [work.name for work in works]
    assert names[0] == "recperf::pick"
    assert "aten::index_select" not in names, "operators inside belong to it"
    assert "aten::add_" in names
    work = works[0]
    assert (work.flops, work.precision) == (40, "float32")
    assert (work.rows, work.distinct, work.row_bytes, work.missed) == (4, 3, 256, 0)
    # The rows, the ids and the result.
    assert work.bytes == 4 * 256 + 4 * 8 + 4 * 256
    assert counted(knee=512)[0].missed == 3


def test_rows_that_are_updated_are_read_and_written() -> None:
    """Beyond the knee they come from memory and go back to it."""
    put = operator("put", updates=True, rows=lambda table, ids: (table, ids))(lambda table, ids: table[ids])
    for knee, missed in ((1 << 20, 0), (512, 2 * 128)):
        table, source, ids = torch.ones(128, 64), torch.ones(128, 64), torch.randperm(128)
        with Counter(knee, knee) as counter:
            hear_calls(counter.native)
            try:
                for _ in range(2):
                    counter.begin_step()
                    table.index_add_(0, ids, source)
                    put(table, ids)
            finally:
                hear_calls(None)
        for work in counter.result():
            assert (work.name, work.rows, work.distinct) in (("aten::index_add_", 256, 128), ("recperf::put", 256, 128))
            assert work.missed == pytest.approx(missed, abs=8)


def test_how_many_rows_come_from_memory_does_not_depend_on_the_number_of_steps() -> None:
    """The cache holds rows of earlier steps too, where few steps were looked at."""
    table, generator = torch.ones(4096, 64), torch.Generator().manual_seed(1)
    missed = {}
    for steps in (2, 200):
        with Counter(table.nbytes // 2, table.nbytes // 2) as counter:
            for _ in range(steps):
                counter.begin_step()
                torch.index_select(table, 0, torch.randint(0, 4096, (64,), generator=generator))
        missed[steps] = sum(work.missed for work in counter.result())
    assert missed[2] == pytest.approx(missed[200], abs=6)
    assert missed[200] < 60


def test_without_a_listener_nothing_is_described() -> None:
    def fails(*_: Any) -> int:
        raise AssertionError("described although nothing counts")

    plain = operator("plain", rows=fails, flops=fails)(lambda x: x + 1)
    assert plain(2) == 3
    heard: list[str] = []

    def listener(call: NativeCall) -> Any:
        heard.append(call.name)
        return call.run()

    hear_calls(listener)
    try:
        assert plain(2) == 3
    finally:
        hear_calls(None)
    assert heard == ["recperf::plain"]
