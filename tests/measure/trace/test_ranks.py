from __future__ import annotations

import json
import shutil
from pathlib import Path

import example_traces as made
import pytest

from recperf.errors import DataError
from recperf.measure.trace.analyse import compare_ranks


def write_rank(path: Path, rank: int, works: float, steps: int = 2, **header: object) -> Path:
    """Steps of 100 us: the rank works, then takes part in an all-reduce that ends at 90 everywhere, and a barrier."""
    events = []
    for step in range(steps):
        at = 100.0 * step
        events += [made.around(f"ProfilerStep#{step}", at, 100), made.op("aten::mm", at, works)]
        events += [made.around("gloo:all_reduce", at + works, 90 - works, thread=7)]
        events += [made.around("gloo:barrier", at + 92, 2, thread=7)]
    return made.write(path, events, **header)


def test_the_slowest_rank_and_who_waits_for_it(tmp_path: Path) -> None:
    """Ranks are identified by torch's header, by recperf's, and by the name of the file; other JSON is left alone."""
    write_rank(tmp_path / "a.json", 0, 20.0, distributedInfo={"rank": 0, "world_size": 3})
    write_rank(tmp_path / "b.json.gz", 1, 80.0, recperf={"rank": 1, "ranks": 3})
    write_rank(tmp_path / "host_rank2.json", 2, 50.0)
    (tmp_path / "config.json").write_text(json.dumps({"lr": 0.1}))
    compared = compare_ranks(tmp_path)
    assert compared.slowest == 1
    assert compared.file.endswith("b.json.gz")
    each = {row.rank: row for row in compared.each}
    # Own work is the step without 10, 40 or 70 us in the all-reduce and 2 in the barrier.
    assert [round(1e3 * each[rank].own_ms) for rank in range(3)] == [28, 88, 58]
    assert [round(1e3 * each[rank].late_ms) for rank in range(3)] == [60, 0, 30]
    assert round(1e3 * each[1].awaited_ms) == 90
    reduce, barrier = compared.collectives
    assert (reduce.what, reduce.count, reduce.awaited_rank) == ("all_reduce", 1, 1)
    assert (reduce.ms, reduce.late_ms, reduce.moving_ms) == pytest.approx((0.040, 0.030, 0.010))
    assert (barrier.what, barrier.late_ms, barrier.awaited_rank) == ("barrier", 0, None)
    assert compared.notes == []


def test_unequal_ranks_are_said_and_wrong_folders_refused(tmp_path: Path) -> None:
    write_rank(tmp_path / "rank0.json", 0, 20.0, distributedInfo={"rank": 0, "world_size": 4})
    with pytest.raises(DataError, match="one trace"):
        compare_ranks(tmp_path)
    write_rank(tmp_path / "rank1.json", 1, 30.0, steps=3)
    notes = " ".join(compare_ranks(tmp_path).notes)
    assert "different numbers of all_reduce, barrier" in notes
    assert "2 of 4 ranks have no trace" in notes
    assert "different numbers of steps" in notes
    shutil.copy(tmp_path / "rank0.json", tmp_path / "copy.json")
    with pytest.raises(DataError, match="two traces belong to rank 0"):
        compare_ranks(tmp_path)
    (tmp_path / "copy.json").write_bytes(b"\x1f\x8b damaged")
    with pytest.raises(DataError, match="not intact gzip"):
        compare_ranks(tmp_path)
