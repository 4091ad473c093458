"""Waits and their reasons: a disk inside an operator, a late rank, a device that is idle with work queued."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

import pytest
from example_traces import around, call, kernel, op
from planted_cases import Built, Machine
from recommender_cases import late_peer, mapped_table

import recperf
from recperf.measure.peaks.other_work import DISTURBED
from recperf.measure.trace.analyse import steps_of
from recperf.measure.trace.idle import CollectiveCall, device_times, lateness
from recperf.measure.trace.read import collect

STEPS = 24


def profile(build: Callable[[Machine], Built], folder: Path) -> recperf.Report:
    machine = Machine(16 << 20, folder=str(folder))
    try:
        step, batches = build(machine)
        with recperf.Profiler(quiet=True, peaks=False) as profiler:
            for arguments in profiler.input([(next(iter(batches)),) if batches else () for _ in range(STEPS)]):
                step(*arguments)
                profiler.step()
        if (profiler.report.other_work or 0.0) > DISTURBED:
            pytest.skip("other work has the cores: such a step is not judged")
        return profiler.report
    finally:
        machine.close()


def test_pages_of_a_file_are_blocked_time_inside_an_operator(tmp_path: Path) -> None:
    before = getrusage(RUSAGE_SELF).ru_majflt
    report = profile(mapped_table(cold=True), tmp_path)
    if getrusage(RUSAGE_SELF).ru_majflt < before + STEPS:
        pytest.skip("the folder for temporary files is in memory")
    assert report.shares["blocked"] > report.shares["operator"]


@pytest.mark.slow
def test_a_late_rank_is_communication(tmp_path: Path) -> None:
    report = profile(late_peer, tmp_path)
    assert report.shares["communication"] > 0.4
    assert any("late ranks" in note for note in report.notes)


def test_calls_of_the_same_size_tell_late_ranks_from_bytes() -> None:
    calls = [(0.0, 1_000.0), (2_000.0, 21_000.0), (30_000.0, 40_000.0)]
    items = [CollectiveCall("all_reduce", start, end, 4 << 20) for start, end in calls]
    (sentence,) = lateness([*items, CollectiveCall("barrier", 50_000.0, 50_010.0, 0)])
    assert "all_reduce of 4 MiB takes 10.0 ms, the fastest of 3 calls 1.00 ms, so at least 90%" in sentence
    assert not lateness([])


def test_a_long_gap_before_queued_work_is_no_dispatch() -> None:
    events = [
        around("recperf.step#0", 0, 60_000),
        op("aten::mul", 10, 5),
        call("cudaLaunchKernel", 10, 5, 1),
        op("aten::add", 20, 5),
        call("cudaLaunchKernel", 20, 5, 2),
        kernel("mul", 30, 100, 1),
        kernel("add", 59_000, 1_000, 2),
    ]
    nesting, window = steps_of(collect(events, Path("trace.json")))
    waits = device_times(nesting, window).waits
    assert waits["dispatch"] == 20
    assert waits["blocked"] == 59_000 - 130 - 20
