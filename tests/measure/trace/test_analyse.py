from __future__ import annotations

from pathlib import Path
from typing import Any

import example_traces as made
import pytest
from msgspec.structs import asdict

from recperf.errors import DataError
from recperf.jsonfile import as_json
from recperf.measure.trace.analyse import analyse, steps_of
from recperf.measure.trace.read import collect, read
from recperf.measure.trace.records import StepTables
from recperf.measure.trace_evidence import observed

NAMELESS = Path("made")


def analysed(events: list[dict[str, Any]]) -> StepTables:
    return analyse(collect(events, NAMELESS))


def operators(events: list[dict[str, Any]]) -> dict[str, Any]:
    trace = collect(events, NAMELESS)
    return by_name(observed(trace, *steps_of(trace), None).operators)


def of_two_steps() -> list[dict[str, Any]]:
    """Two equal steps, and around them work that belongs to none."""
    before = [made.call("cudaLaunchKernel", -60, 5, 1), made.kernel("early", -50, 30, 1)]
    after = [made.call("cudaLaunchKernel", 2010, 5, 2), made.kernel("late", 2020, 500, 2)]
    return [*before, *made.gpu_step(0, 0.0, 10), *made.gpu_step(1, 1000.0, 20), *after]


@pytest.fixture
def two_steps() -> StepTables:
    return analysed(of_two_steps())


def by_name(rows: Any) -> dict[str, Any]:
    return {row.name: row for row in rows}


def test_idle_time_goes_to_limits_that_sum_to_it(two_steps: StepTables) -> None:
    idle = two_steps.idle
    assert idle.wall_ms == pytest.approx(1.0)
    assert idle.busy_ms == pytest.approx(0.420)
    expected = {"input": 0.2, "sync": 0.017, "launch": 0.149, "python": 0.206, "dispatch": 0.008, "blocked": 0.0}
    assert idle.causes == pytest.approx(expected)
    assert sum(idle.causes.values()) == pytest.approx(idle.idle_ms)


def test_kernels_are_counted_per_step_and_part(two_steps: StepTables) -> None:
    kernels = two_steps.kernels
    rows = by_name(kernels.rows)
    parts = {"gemm<64>": "forward", "relu": "forward", "back": "backward", "update": "update"}
    assert {name: row.part for name, row in rows.items()} == parts
    assert kernels.count == 5
    assert rows["back"].count == 2
    assert rows["back"].mean_us == pytest.approx(100)
    assert rows["back"].share == pytest.approx(0.5)
    assert kernels.busy_ms == pytest.approx(0.4)
    # From the end of the call; of the two kernels of a graph only the first waited for its launch.
    delays = {name: row.launch_delay_us for name, row in rows.items() if name != "update"}
    assert delays == pytest.approx({"gemm<64>": 4, "relu": 89, "back": 30})
    assert asdict(kernels.small) == pytest.approx({"count": 1, "share_of_count": 0.2, "total_ms": 0.005})


def test_parts_sum_to_the_step(two_steps: StepTables) -> None:
    parts = by_name(two_steps.parts)
    times = {"data": 0.2, "forward": 0.17, "backward": 0.12, "loss": 0.21, "update": 0.06, "other": 0.24}
    assert {name: part.host_ms for name, part in parts.items()} == pytest.approx(times)
    assert parts["forward"].device_ms == pytest.approx(0.125)
    assert parts["backward"].device_ms == pytest.approx(0.2)
    assert parts["backward"].kernels == 2
    assert list(parts)[-1] == "other"


def test_operators_have_the_time_of_their_kernels_and_no_work_counts_twice() -> None:
    rows = operators(of_two_steps())
    assert "aten::linear" not in rows
    product = rows["aten::mm"]
    assert (product.part, product.calls, product.ms) == ("forward", 1, pytest.approx(0.1))
    assert (product.flops, product.bytes) == (2 * 64 * 32 * 16, 4 * (64 * 32 + 32 * 16 + 64 * 16))


def test_copies_overlap_kernels_and_block_without_pinned_memory() -> None:
    analysis = analysed(
        [
            made.around("recperf.step#0", 0, 200),
            made.call("cudaLaunchKernel", 0, 5, 1),
            made.kernel("k", 10, 100, 1),
            made.op("aten::copy_", 20, 100),
            made.call("cudaMemcpyAsync", 25, 90, 2),
            made.copy("Memcpy DtoH (Device -> Pageable)", 90, 20, 2, 4, stream=8),
            made.copy("Memset (Device)", 130, 2, 3, 64),
        ]
    )
    rows = {row.kind: row for row in analysis.transfers}
    assert rows["device to host"].pinned is False
    assert rows["device to host"].overlapped_share == pytest.approx(1.0)
    assert (rows["memset"].pinned, rows["memset"].bytes) == (None, 64)
    assert [row.caller for row in analysis.idle.syncs] == ["aten::copy_"]
    assert analysis.idle.causes["sync"] == pytest.approx(0.010)


def test_a_host_that_runs_ahead_does_not_make_steps_look_short() -> None:
    """Both steps are queued within 20 us; the device takes 100 us for each, after 100 us of earlier work."""
    analysis = analysed(
        [
            made.call("cudaLaunchKernel", -10, 2, 1),
            made.kernel("k", -5, 100, 1),
            made.around("recperf.step#0", 0, 10),
            made.call("cudaLaunchKernel", 2, 2, 2),
            made.kernel("k", 95, 100, 2),
            made.around("recperf.step#1", 10, 10),
            made.call("cudaLaunchKernel", 12, 2, 3),
            made.kernel("k", 195, 100, 3),
        ]
    )
    assert analysis.idle.wall_ms == pytest.approx(0.1)
    assert analysis.idle.idle_ms == pytest.approx(0.0)
    assert analysis.kernels.count == 1


def test_steps_and_loader_of_torch_are_recognised() -> None:
    analysis = analysed(
        [
            made.around("ProfilerStep#7", 0, 100),
            made.around("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 80),
            made.call("cudaLaunchKernel", 84, 4, 1),
            made.kernel("k", 90, 10, 1),
        ]
    )
    assert analysis.window.steps == 1
    assert analysis.window.named
    assert analysis.idle.causes["input"] == pytest.approx(0.08)


def test_whole_microseconds_of_older_profilers_still_nest() -> None:
    """The inner operator seems to end 1 us after the outer one, because both were cut to whole microseconds."""
    rows = operators([made.op("aten::linear", 0, 10), made.op("aten::mm", 2, 9), made.op("aten::relu", 11, 1)])
    times = {"aten::mm": 0.009, "aten::linear": 0.001, "aten::relu": 0.001}
    assert {name: row.ms for name, row in rows.items()} == pytest.approx(times)


def test_regions_of_a_program_nest_and_its_optimizer_ends_the_steps() -> None:
    """No steps are named: two optimizer steps end two steps, and the region around everything is no part of them."""
    events = [made.around("epoch", 0, 300)]
    for at in (10.0, 110.0):
        events += [made.around("forward", at, 40), made.around("encode", at + 5, 20), made.op("aten::mm", at + 6, 10)]
        events += [made.around("update", at + 50, 35), made.around("Optimizer.step#Adam.step", at + 55, 25)]
    analysis = analysed(events)
    assert (analysis.window.steps, analysis.window.steps_from) == (2, "optimizer")
    parts = by_name(analysis.parts)
    assert list(parts) == ["forward", "forward/encode", "update", "update/Optimizer.step#Adam.step", "other"]
    assert parts["forward"].host_ms == pytest.approx(0.020)
    assert parts["forward"].total_ms == pytest.approx(0.040)
    assert operators(events)["aten::mm"].part == "forward/encode"


def test_modules_are_regions_and_the_backward_pass_belongs_to_the_one_that_waits() -> None:
    def frame(name: str, start: float, length: float) -> dict[str, Any]:
        return {**made.around(name, start, length), "cat": "python_function"}

    analysis = analysed(
        [
            made.around("ProfilerStep#0", 0, 200),
            frame("nn.Module: Net_0", 0, 50),
            frame("nn.Module: Linear_0", 10, 30),
            made.op("aten::addmm", 12, 20),
            made.around("backward", 60, 100),
            made.op("autograd::engine::evaluate_function: A", 70, 40, thread=made.BACKWARD),
            made.call("cudaLaunchKernel", 75, 5, 1, thread=made.BACKWARD),
            made.kernel("k", 90, 30, 1),
        ]
    )
    assert analysis.kernels.rows[0].part == "backward"
    parts = by_name(analysis.parts)
    times = {"Net_0": 0.020, "Net_0/Linear_0": 0.030, "backward": 0.100, "other": 0.050}
    assert {name: row.host_ms for name, row in parts.items()} == pytest.approx(times)
    assert parts["backward"].device_ms == pytest.approx(0.030)


def test_collectives_are_exposed_where_nothing_else_runs() -> None:
    nccl = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    analysis = analysed(
        [
            made.around("ProfilerStep#0", 0, 200),
            *(made.call("cudaLaunchKernel", 2 * n, 1, n) for n in (1, 2)),
            made.kernel("mm", 10, 50, 1),
            made.kernel(nccl, 40, 100, 2, stream=9),
        ]
    )
    assert as_json(analysis.communication.rows) == [
        {"what": "AllReduce", "count": 1, "bytes": 0, "ms": 0.1, "exposed_ms": pytest.approx(0.080)}
    ]
    host = [
        made.around("ProfilerStep#0", 0, 200),
        made.op("aten::mm", 10, 50),
        made.around("gloo:all_reduce", 40, 100, thread=7),
    ]
    assert analysed(host).communication.exposed_ms == pytest.approx(0.080)


def test_the_busiest_device_is_analysed() -> None:
    analysis = analysed(
        [
            made.around("recperf.step#0", 0, 100),
            made.call("cudaLaunchKernel", 0, 1, 1),
            made.call("cudaLaunchKernel", 2, 1, 2),
            made.kernel("small", 10, 10, 1, device=0),
            made.kernel("large", 10, 90, 2, device=3),
        ]
    )
    assert (analysis.window.device, analysis.window.devices) == (3, 2)
    assert analysis.idle.busy_ms == pytest.approx(0.09)


def test_a_trace_of_another_tool_is_refused(tmp_path: Path) -> None:
    path = made.write(tmp_path / "t.json", [{"ph": "B", "name": "x", "ts": 1}, {"ph": "X", "name": "y", "ts": 1}])
    with pytest.raises(DataError, match=r"no events of torch\.profiler") as raised:
        analyse(read(path))
    assert raised.value.where["file"] == str(path)
