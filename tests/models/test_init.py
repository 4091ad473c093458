from __future__ import annotations

import pytest
import torch
from torch import Tensor

from recperf.models import init
from recperf.models.init import InitialRows
from recperf.models.tables import HashedTable, SparseTables


def distinct_rows(table_RD: Tensor) -> int:
    """Count by a 64-bit checksum per row, whose collisions are too unlikely to matter."""
    draw = torch.Generator().manual_seed(1)
    factors_D = torch.randint(-(1 << 62), 1 << 62, (table_RD.shape[1],), generator=draw) * 2 + 1
    checksums_R = torch.zeros(table_RD.shape[0], dtype=torch.int64)
    for bits_R, factor in zip(table_RD.view(torch.int32).unbind(1), factors_D):
        checksums_R += bits_R.to(torch.int64) * factor
    return checksums_R.unique().numel()


def filled(rows: int, dim: int, std: float | None, seed: int = 1) -> Tensor:
    table_RD = torch.full((rows, dim), torch.nan)
    InitialRows(rows, dim, std=std, seed=seed, name="table").fill_(table_RD)
    return table_RD


def test_the_rows_of_a_large_table_all_differ() -> None:
    """As many rows as micro-dlrm-dram has, in narrower rows: more of them fit into a block."""
    table = HashedTable(("a",), 2_000_000, 8)
    table.reset(0.01, seed=1)
    assert distinct_rows(table.table_RD) == 2_000_000
    tables = SparseTables(("a", "b"), (300_000, 500_000), 8)
    tables.reset(0.0, seed=1)
    assert distinct_rows(tables.table_RD) == 800_000


@pytest.mark.parametrize("std", [0.1, None])
def test_a_part_of_a_table_has_the_rows_of_the_whole(std: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init, "PATTERN", 64)
    whole_RD, rows = filled(101, 5, std), InitialRows(101, 5, std=std, seed=1, name="table")
    for first, last in ((0, 101), (3, 4), (5, 77), (12, 24), (100, 101)):
        part_RD = torch.full((last - first, 5), torch.nan)
        rows.fill_(part_RD, first)
        assert torch.equal(part_RD, whole_RD[first:last])
    assert not torch.equal(filled(101, 5, std, seed=2), whole_RD)
