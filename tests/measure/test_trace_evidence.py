from __future__ import annotations

from pathlib import Path
from typing import Any

import example_runs as examples
import example_traces as made
import pytest
from msgspec import convert

from recperf.measure.advice_rules import explain
from recperf.measure.ceilings import Ceilings
from recperf.measure.peaks.records import Peaks
from recperf.measure.program_facts import facts_of_rows
from recperf.measure.records import Explanation
from recperf.measure.timeline import MOST, SLICES
from recperf.measure.trace.analyse import steps_of
from recperf.measure.trace.read import collect
from recperf.measure.trace_evidence import analyse_file, observed, qualified

CEILINGS = Ceilings(
    device="cpu", threads=2, flops={"float32": 1e11}, stream=23e9, first_touch=2e9, cached=60e9,
    cache_bytes=8_000_000, stream_cache_bytes=8_000_000, largest_cache=8_000_000,
    rows_memory=((64, 100.0), (1024, 200.0)), rows_cache=((64, 5.0), (1024, 20.0)),
    calls={"elementwise": 1000.0, "elementwise_grad": 2000.0},
)  # fmt: skip
ROWS, DIM = 200_000, 64


def sized(*dims: list[int], types: list[str] | None = None, inputs: list[str] | None = None) -> dict[str, Any]:
    named = {"Input Dims": list(dims), "Input type": types or ["float"] * len(dims)}
    return {**named, "Concrete Inputs": inputs} if inputs else named


def recommender(steps: int = 6) -> list[dict[str, Any]]:
    """Steps of 100 ms: 3,200 lookups, a small product, then dense Adam over the whole table at 7 GB/s."""
    table, ids = [ROWS, DIM], {"types": ["float", "long int"]}
    events = []
    for step in range(steps):
        at = 100_000.0 * step
        events += [
            made.around(f"ProfilerStep#{step}", at, 100_000),
            made.around("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", at, 2_000),
            made.op("aten::stack", at + 100, 1_500),
            made.around("encode", at + 2_000, 4_000),
            made.op("aten::embedding", at + 2_100, 500, **sized(table, [64, 50], **ids)),
            made.op("aten::mm", at + 3_000, 2_000, **sized([3200, 64], [64, 192])),
            made.around("backward", at + 6_000, 4_000),
            made.op(
                "aten::embedding_dense_backward", at + 6_000, 3_500,
                **sized([3200, DIM], [3200], inputs=["", "", str(ROWS), "-1", "False"], **ids),
            ),
            made.op("aten::zeros", at + 6_100, 2_500),
            made.op("aten::fill_", at + 6_200, 2_400, **sized(table, [])),
            made.around("optimize", at + 10_000, 89_000),
            made.around("Optimizer.step#Adam.step", at + 10_100, 88_000),
            made.op("aten::lerp_", at + 10_200, 20_000, **sized(table, table)),
            made.op("aten::addcmul_", at + 40_000, 28_000, **sized(table, table, table)),
            made.op("aten::addcdiv_", at + 70_000, 28_000, **sized(table, table, table)),
        ]  # fmt: skip
    return events


def limit(
    events: list[dict[str, Any]], ceilings: Ceilings | None = CEILINGS, others: float | None = None
) -> Explanation:
    trace = collect(events, Path("made"))
    trace.header["recperf"] = {"other_work": others}
    seen = observed(trace, *steps_of(trace), ceilings)
    result = explain(seen, ceilings, facts_of_rows(seen.operators))
    result.verdict = qualified(result.verdict, result.shares, seen, ceilings, ())
    return result


def test_a_dense_optimizer_over_a_table_of_which_few_rows_are_used() -> None:
    result = limit(recommender())
    verdict = result.verdict
    assert (verdict.limit, verdict.confidence) == ("bandwidth", "medium")
    assert verdict.doubts == ["a trace does not tell whether other work disturbed the steps"]
    for others, judged in ((0.02, ("bandwidth", "high")), (0.4, ("not judged", "low"))):
        beside = limit(recommender(), others=others).verdict
        assert (beside.limit, beside.confidence) == judged
    assert verdict.share > 0.75
    assert sum(result.shares.values()) == pytest.approx(1)
    table, passes = result.advice
    assert "uses 3,200 of the 200,000 rows (1.6%) of a table, but Adam" in table.seen
    assert "79.5 ms, 80% of the step" in table.seen
    assert table.change.startswith("nn.Embedding(200000, 64, sparse=True); rows = torch.optim.SparseAdam(")
    # Ten accesses of 3,200 rows and forty calls take 4 ms of the 79 that go.
    assert table.predicted_gain == pytest.approx(100 / (100 - 79.5 + 4), rel=0.05)
    assert passes.change == "torch.optim.Adam(..., fused=True)"
    assert 1 < passes.predicted_gain < table.predicted_gain


def test_single_slow_steps_do_not_decide() -> None:
    """Two of six steps wait for 900 ms somewhere outside of operators."""
    events = recommender()
    for event in events:
        event["ts"] += 900_000 * ((event["ts"] >= 200_000) + (event["ts"] >= 400_000))
        if event["name"] in ("ProfilerStep#1", "ProfilerStep#3"):
            event["dur"] += 900_000
    result = limit(events)
    assert result.verdict.limit == "bandwidth"
    assert any("3 of 6 steps nearest to the median of 100 ms" in note for note in result.notes)


def test_without_ceilings_only_waits_are_named() -> None:
    result = limit(recommender(), None)
    assert result.verdict.limit == "unclear"
    assert "needs measured ceilings. Outside of them the nearest are" in result.verdict.because[0]
    assert "recperf peaks measures them" in result.verdict.because[0]
    assert [one.predicted_gain for one in result.advice] == [None, None]
    slow = [made.around("ProfilerStep#0", 0, 100), made.around("enumerate(DataLoader)#x", 0, 80), made.op("a", 85, 5)]
    assert limit(slow, None).verdict.limit == "input"


def test_time_outside_of_operators_is_waiting_or_python() -> None:
    """1000 us: 200 in an operator, 300 asleep, 200 for other ranks, 100 where only another thread works, 200 Python."""
    sleep = {**made.around("<built-in function sleep>", 300, 300), "cat": "python_function"}
    trace = collect(
        [
            made.around("ProfilerStep#0", 0, 1000),
            made.op("aten::relu", 0, 200),
            sleep,
            made.around("gloo:all_reduce", 600, 200, thread=7),
            made.op("autograd::engine::evaluate_function: X", 100, 200, thread=made.BACKWARD),
        ],
        Path("made"),
    )
    seen = observed(trace, *steps_of(trace), CEILINGS)
    waits = {name: round(ms, 6) for name, ms in seen.waits.items()}
    assert waits == {"input": 0, "communication": 0.2, "blocked": 0.3, "python": 0.2}
    assert {row.name[:8]: row.ms for row in seen.operators} == pytest.approx({"aten::re": 0.2, "autograd": 0.1})
    assert any("record_shapes=True" in note for note in seen.notes)


def test_times_that_are_not_valid_are_named_as_the_doubt(tmp_path: Path) -> None:
    events = [*recommender(), *(made.op("aten::mm", 1e308, 1e308) for _ in range(500))]
    doubts = analyse_file(made.write(tmp_path / "t.json", events)).verdict.doubts
    assert "the trace has many events without valid times, which are left out" in doubts
    assert not any("unknown kinds" in doubt for doubt in doubts)


def test_a_gpu_is_divided_by_its_device() -> None:
    result = limit([*made.gpu_step(0, 0.0, 10), *made.gpu_step(1, 1000.0, 20)], None)
    assert result.shares["input"] == pytest.approx(0.2, abs=0.03)
    assert result.shares["operator"] == pytest.approx(0.4, abs=0.03)
    tf32 = [
        made.around("ProfilerStep#0", 0, 1000),
        made.op("aten::mm", 0, 10, **sized([512, 512], [512, 512])),
        made.call("cudaLaunchKernel", 2, 5, 1),
        made.kernel("sm80_xmma_gemm_f32f32_tf32f32_f32", 10, 900, 1),
    ]
    assert limit(tf32).operators[0].precision == "tf32"


def test_a_device_of_amd_has_its_name(tmp_path: Path) -> None:
    """Its number counts the processors of the machine too, so that the first GPU may be number 2."""
    events = [
        made.around("ProfilerStep#0", 0, 1000),
        made.op("aten::mm", 0, 10),
        made.call("hipLaunchKernel", 2, 5, 1),
        made.kernel("gemm", 10, 900, 1, device=2),
    ]
    path = made.write(tmp_path / "t.json", events, deviceProperties=[{"id": 0, "name": "AMD Instinct MI300X"}])
    peaks = convert(examples.peaks(), Peaks)
    assert "those of AMD Instinct MI300X are not among" in analyse_file(path, peaks).trace.ceilings_of


def test_one_step_in_lanes(tmp_path: Path) -> None:
    """The device's kernels belong to the operators that launched them, copies and waits to their limits."""
    events = [event for number in range(3) for event in made.gpu_step(number, 1000.0 * number, 10 * number + 10)]
    limit = analyse_file(made.write(tmp_path / "gpu.json", events))
    step = limit.timeline
    assert step.us == pytest.approx(1000)
    named = [
        (call.lane, call.name or limit.operators[call.operator or 0].name, round(call.start_us), round(call.us))
        for call in step.calls
        if call.limit or call.lane == "device"
    ]
    assert ("input", "wait for input", 0, 200) in named
    assert {call.limit for call in step.calls if call.name.startswith("Memcpy HtoD")} == {"transfer"}
    assert {call.limit for call in step.calls if call.name == "cudaStreamSynchronize"} == {"sync"}
    gemm = next(call for call in step.calls if call.lane == "device" and round(call.start_us) == 260)
    assert limit.operators[gemm.operator].name == "aten::mm"


def test_a_step_of_many_calls_is_bounded_and_takes_the_same_time(tmp_path: Path) -> None:
    calls = 5000
    events = [made.around("ProfilerStep#0", 0, 10.0 * calls)]
    events += [made.op("aten::add", 10.0 * index, 5 + index % 5) for index in range(calls)]
    step = analyse_file(made.write(tmp_path / "many.json", events)).timeline
    assert MOST < len(step.calls) <= MOST + SLICES
    assert sum(call.us for call in step.calls) == pytest.approx(7 * calls)
    assert max(call.us for call in step.calls) < 10 * calls / SLICES
