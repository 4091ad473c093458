"""The figures of a step from what an observer saw, in round numbers: clocks, a trace and counted work made by hand."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import example_traces as made
import pytest
import torch

from recperf.measure import evidence
from recperf.measure.clocks import ClockReading, TimedStep
from recperf.measure.operators import CallWork
from recperf.measure.profile_records import Transfer
from recperf.measure.records import Observed, Operator, Percentiles
from recperf.measure.rows import part_rows
from recperf.measure.schedule import Schedule
from recperf.measure.stack_sampler import SampledTime
from recperf.measure.timeline import StepTimes
from recperf.measure.trace.analyse import steps_of
from recperf.measure.trace.idle import DeviceTimes
from recperf.measure.trace.read import collect

STEP_US = 10_000.0


def reading(wall: float, off: float = 0.0, waiting: float = 0.0, process: float = 0.0) -> ClockReading:
    """In ms; `off` is the time off a core that the thread did not wait for one."""
    return ClockReading(*(round(1e6 * ms) for ms in (wall, wall - off - waiting, waiting, process)))


NOTHING = reading(0.0)
PLAIN = TimedStep(reading(20.0, off=8.0), reading(5.0, off=3.0, process=10.0), reading(2.0, off=2.0))
"""20 ms, of which 5 wait for input and 2 for ranks; of the other 13 the thread was off its core for 3."""


def observer(events: list[dict[str, Any]] | None = None, steps: int = 2, **more: Any) -> Any:
    """An observer that traced the same events in each of some steps of 10 ms."""
    every = [made.around(f"recperf.step#{number}", 20_000.0 * number, STEP_US) for number in range(steps)]
    for number in range(steps):
        every += [{**event, "ts": event["ts"] + 20_000.0 * number} for event in events or ()]
    works, samples, off_ns = more.pop("works", []), more.pop("samples", 0), more.pop("off_ns", 0)
    times = [SampledTime("blocked", (), 0, off_ns)] if off_ns else []
    memory = SimpleNamespace(result=lambda around: [])
    sampler = SimpleNamespace(
        samples=[SimpleNamespace(wall=1_000_000, stack=(), step=0) for _ in range(samples)],
        times=lambda positions: (times, {}),
        stacks=SimpleNamespace(stack=lambda positions: ()),
        cost=0.01,
    )
    known = {
        "plain": [PLAIN] * 3, "traced": [reading(10.0)] * steps, "threads": 2, "workers": 0.0, "seen": 9,
        "others": 0.02,
        "notes": ["first"], "light": False, "clock": SimpleNamespace(tells_waiting=True), "sampler": sampler,
        "trace": None if events is None else collect(every, Path("made")), "end_stack": (),
        "blocks": SimpleNamespace(times=[]),
        "counter": SimpleNamespace(steps=[[], []], result=lambda: works, positions=(), memory=memory),
        "cache_sizes": None,
        "growth": [],
        "stacks": SimpleNamespace(stack=lambda positions: ()),
    }  # fmt: skip
    return SimpleNamespace(**{**known, **more})


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "timing_ns", lambda observer: 50_000.0)
    monkeypatch.setattr(evidence, "event_cost", lambda: (0.0, 0.5))
    monkeypatch.setattr(evidence, "usable_cores", lambda: 4)


def timed(
    wall: float, *, input_ms: float = 0.0, ranks: float = 0.0, off: float = 0.0, waiting: float = 0.0
) -> TimedStep:
    return TimedStep(reading(wall, off, waiting), reading(input_ms), reading(ranks))


@pytest.mark.usefixtures("exact")
def test_steps_that_were_only_timed() -> None:
    seen = evidence.observed(observer())
    assert seen.waits == pytest.approx({"input": 5.0, "communication": 2.0, "unknown": 13.0})
    assert (seen.device, seen.threads, seen.other_work, seen.preempted) == ("cpu", 2, 0.02, 0.0)
    assert (seen.steps.seen, seen.steps.plain, seen.steps.traced, seen.steps.counted) == (9, 3, 2, 2)
    assert (seen.overhead.ns, seen.overhead.share) == (50_000.0, pytest.approx(0.0025))
    assert seen.input_cores == pytest.approx(2.0)
    assert seen.notes == ["first", "no step was traced: operators are not known"]
    traced_nothing = observer([], traced=[], counter=None)
    assert evidence.observed(traced_nothing).waits["unknown"] == pytest.approx(13.0)
    assert evidence.observed(traced_nothing).steps.counted == 0


@pytest.mark.usefixtures("exact")
def test_waits_have_their_share_of_all_steps() -> None:
    """They come in some of the steps only: 18 of 60 ms are 6 of a median of 20."""
    steps = [timed(10.0), timed(20.0, input_ms=18.0), timed(30.0, ranks=3.0)]
    seen = evidence.observed(observer(plain=steps))
    assert seen.step_ms == Percentiles(14.0, 20.0, 26.0)
    assert seen.waits == pytest.approx({"input": 6.0, "communication": 1.0, "unknown": 13.0})
    # Time in which other work had the core does not count, for steps nor for waits.
    waiting = TimedStep(reading(25.0, waiting=5.0), reading(8.0, waiting=2.0), reading(3.0, waiting=1.0))
    seen = evidence.observed(observer(plain=[waiting] * 2))
    assert seen.waits == pytest.approx({"input": 6.0, "communication": 2.0, "unknown": 12.0})
    assert (seen.step_ms.p50, seen.preempted) == (20.0, pytest.approx(0.2))
    blind = observer(plain=[waiting], clock=SimpleNamespace(tells_waiting=False))
    assert evidence.observed(blind).preempted is None
    # The clocks of a short wait may seem to run backwards, and a wait to outlast its step.
    short = TimedStep(reading(20.0), ClockReading(0, 0, 1, 0), ClockReading(0, 0, 1, 0))
    assert evidence.observed(observer(plain=[short])).waits == pytest.approx(
        {"input": 0, "communication": 0, "unknown": 20}
    )
    long = TimedStep(reading(20.0), reading(30.0), NOTHING)
    assert evidence.observed(observer(plain=[long])).waits["unknown"] == 0.0
    nothing = evidence.observed(observer(plain=[]))
    assert (nothing.step_ms.p50, nothing.overhead.share, nothing.preempted, nothing.input_cores) == (0.0, 0.0, 0.0, 0.0)


ADD = made.op("aten::add", 0, 4000)
"""4 of 10 ms; the other 6 are outside of operators."""
ADAM = made.around("Optimizer.step#Adam.step", 3000, 3000)
"""2 of its 3 ms are outside of the operator."""
REDUCE = made.around("gloo:all_reduce", 5000, 2000, thread=7)
BESIDE = made.op("aten::mul", 5000, 2000, thread=made.BACKWARD)
INTERRUPTED = [
    made.op("aten::add", 0, 500),
    *(made.op("aten::add", at, 500) for at in (600, 1200)),
    made.op("aten::add", 2000, 5000),
]
"""Four equal calls, one of which took 3 ms more than 4 times the median; 3.5 ms are outside."""


@pytest.mark.parametrize(
    ("events", "more", "waits", "operators", "scale"),
    [
        # own 13 ms = 3 blocked + 10 of Python and operators, as in the trace 6 : 4.
        ([ADD], {}, {"blocked": 3.0, "python": 6.0}, [4.0], 1.0),
        ([ADD], {"steps": 1}, {"blocked": 3.0, "python": 6.0}, [4.0], 1.0),
        # Traced steps that were off their core for 2 ms have 2 ms of Python less.
        ([ADD], {"traced": [reading(10.0, off=2.0)] * 2}, {"blocked": 3.0, "python": 5.0}, [5.0], 1.25),
        # 1 ms off a core inside of the operator, as counted, or 3 as nothing else explains them.
        ([ADD], {"works": [CallWork("aten::add", off_ns=1_000_000)]}, {"blocked": 2.0, "python": 6.6}, [4.4], 1.1),
        (
            [ADD],
            {"works": [CallWork("aten::add", off_ns=1_000_000)], "traced": [reading(10.0, off=9.0)] * 2},
            {"blocked": 0.0, "python": 0.0},
            [13.0],
            3.25,
        ),
        # A quarter of the operator waits for a disk.
        (
            [ADD],
            {"works": [CallWork("aten::add", blocked=0.25)], "traced": [reading(10.0, off=3.0)] * 2},
            {"blocked": 3.0, "python": 40 / 7},
            [30 / 7],
            10 / 7,
        ),
        (
            [made.op("aten::add", 0, 8000)],
            {"works": [CallWork("aten::add", blocked=0.25)], "traced": [reading(10.0, off=5.0)] * 2},
            {"blocked": 2.0, "python": 0.0},
            [11.0],
            11 / 6,
        ),
        # Enough samples say how long the thread was off its core: a tenth of 13 ms, beside 0.5 ms outside of operators.
        (
            [made.op("aten::add", 0, 9500)],
            {"plain": [timed(13.0, off=8.0)], "samples": 10, "off_ns": 1_000_000},
            {"blocked": 1.8, "python": 0.56, "input": 0.0, "communication": 0.0},
            [10.64],
            1.12,
        ),
        (
            [made.op("aten::add", 0, 9500)],
            {"plain": [timed(13.0, off=8.0)], "samples": 9, "off_ns": 1_000_000},
            {"blocked": 8.0, "python": 0.25, "input": 0.0, "communication": 0.0},
            [4.75],
            0.5,
        ),
        (
            [ADD, REDUCE],
            {"traced": [reading(10.0, off=5.0)] * 2},
            {"blocked": 1.0, "python": 2.0, "communication": 4.0},
            [8.0],
            2.0,
        ),
        (
            [ADD, REDUCE],
            {"plain": [timed(1.0)]},
            {"blocked": 0.0, "python": 0.0, "input": 0.0, "communication": 1.0},
            [0.0],
            0.0,
        ),
        ([ADD, BESIDE], {"traced": [reading(10.0, off=2.0)] * 2}, {"blocked": 1.0, "python": 4.8}, [4.8, 2.4], 1.2),
        # Other work had the core for a fifth of the traced time: less than what was cut of an operator.
        (
            INTERRUPTED,
            {"traced": [reading(10.0, waiting=2.0)] * 2},
            {"blocked": 3.0, "python": 28 / 6.3},
            [35 / 6.3],
            10 / 6.3,
        ),
        # For three fifths: more than the 3 of 6.5 ms that were cut.
        (
            INTERRUPTED,
            {"traced": [reading(10.0, waiting=6.0)] * 2},
            {"blocked": 3.0, "python": 10 * (49 / 26) / (49 / 26 + 3.5)},
            [35 / (49 / 26 + 3.5)],
            10 / (49 / 26 + 3.5) / (1 - (0.6 - 6 / 13)),
        ),
        # A traced step that did nothing does not say what a plain one does outside of operators.
        ([], {"traced": [reading(10.0, off=10.0)] * 2}, {"blocked": 3.0, "python": 10.0}, [], 0.0),
        ([], {"traced": [reading(10.0)] * 2}, {"blocked": 3.0, "python": 10.0}, [], 1.0),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("exact")
def test_a_traced_step_of_a_processor(
    events: list[Any], more: dict[str, Any], waits: dict[str, float], operators: list[float], scale: float
) -> None:
    seen = evidence.observed(observer(events, **more))
    assert seen.waits == pytest.approx({"input": 5.0, "communication": 2.0, **waits})
    assert [row.ms for row in seen.operators] == pytest.approx(operators or [], abs=1e-9)
    assert (seen.scale, seen.inside) == (pytest.approx(scale), 0.5)
    assert sum(part.share_of_operators for part in seen.parts) == pytest.approx(1.0 if sum(operators) else 0.0)


@pytest.mark.usefixtures("exact")
def test_python_in_long_stretches_and_in_optimizers() -> None:
    # 6 ms in one stretch; with a trace of the double speed 7.5 of 12.5 ms would be more than that.
    for off, scale, long in ((0.0, 1.0, 6.0), (2.0, 1.25, 5.0)):
        seen = evidence.observed(observer([ADD, ADAM], traced=[reading(10.0, off=off)] * 2))
        assert seen.long_python_ms == pytest.approx(long)
        assert seen.optimizer_python == pytest.approx({"optimizer Adam.step": 2.0 * (6 - off) / 6 * scale})
    slow = evidence.observed(observer([ADD, ADAM], plain=[timed(20.0)]))
    assert (slow.waits["python"], slow.long_python_ms) == pytest.approx((12.0, 6.0))
    full = evidence.observed(observer([made.op("aten::add", 0, STEP_US), ADAM]))
    assert full.optimizer_python == {"optimizer Adam.step": 0.0}
    assert evidence.observed(observer([ADD], counter=None)).notes[0] == "first"


@pytest.mark.parametrize(
    ("threads", "workers", "crowded"), [(2, 0.75, 0.25), (4, 0.5, 0.5), (4, 0.0, 0.0), (1, 0.5, 0.0), (8, 0.25, 0.25)]
)
@pytest.mark.usefixtures("exact")
def test_cores_that_workers_take_from_operators(threads: int, workers: float, crowded: float) -> None:
    seen = evidence.observed(observer([ADD], threads=threads, workers=workers))
    assert seen.crowded == pytest.approx(crowded)


def on_device(
    monkeypatch: pytest.MonkeyPatch, waits: dict[str, float], *, busy: float = 12.0, blocks: Any = None,
    off_ms: float = 0.0, beside_us: float = 0.0, long_us: float = 0.0, copies: list[Transfer] | None = None,
) -> Observed:  # fmt: skip
    """Two traced steps of a device, times in ms per step."""
    device = DeviceTimes(busy_us=2e3 * busy)
    device.waits.update({name: 2e3 * ms for name, ms in waits.items()})
    monkeypatch.setattr(evidence, "device_times", lambda *_: device)
    monkeypatch.setattr(evidence, "transfers", lambda window: copies or [])
    monkeypatch.setattr(evidence, "_host_ms", lambda observer, nesting, window, most: most / 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H200")
    result = Observed("cpu", 2, Percentiles(40.0, 40.0, 40.0), {"input": 1.0}, [])
    seen = observer(blocks=SimpleNamespace(times=[(1, 99_000_000), (2, 40_000_000)] if blocks is None else blocks))
    times = StepTimes(2, beside_us=beside_us, long_us=long_us)
    nesting = SimpleNamespace(parent=[], events=[])
    evidence._on_device(result, seen, nesting, None, times, off_ms, {})  # type: ignore[arg-type]
    return result


IDLE = {"input": 2.0, "sync": 1.0, "launch": 1.0, "python": 2.0, "dispatch": 2.0}


def test_a_traced_step_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain steps take 20 ms, without the first block. The device is busy for 12: 8 ms are left, as in the trace."""
    seen = on_device(monkeypatch, {**IDLE, "transfer": 3.0, "communication": 4.0}, long_us=3000.0)
    assert (seen.device, seen.step_ms.p50, seen.host_ms, seen.long_python_ms) == ("H200", 20.0, 10.0, 1.5)
    assert seen.waits == pytest.approx({**IDLE, "blocked": 0.0, "transfer": 3.0, "communication": 4.0})
    # A trace that slows the host twice: all idle time is halved.
    twice = {name: 2 * ms for name, ms in IDLE.items()}
    rest = {"blocked": 0.0, "transfer": 0.0, "communication": 0.0}
    assert on_device(monkeypatch, twice).waits == pytest.approx({**IDLE, **rest})
    # Where plain steps are slower than traced ones, the gaps between queued kernels stay.
    half = {name: ms / 2 for name, ms in IDLE.items()}
    assert on_device(monkeypatch, half).waits == pytest.approx({**IDLE, "dispatch": 1.0, **rest})
    assert on_device(monkeypatch, IDLE, busy=25.0).waits == pytest.approx({**dict.fromkeys(IDLE, 0.0), **rest})
    assert on_device(monkeypatch, {}).waits == pytest.approx({**dict.fromkeys(IDLE, 0.0), **rest})
    assert on_device(monkeypatch, IDLE, blocks=[(4, 80_000_000)]).step_ms.p50 == 20.0
    assert on_device(monkeypatch, IDLE, blocks=[]).step_ms.p50 == 40.0


@pytest.mark.parametrize(
    ("off_ms", "beside_us", "blocked"), [(3.0, 4000.0, 1.0), (9.0, 0.0, 2.0), (1.0, 4000.0, 0.0), (0.0, 0.0, 0.0)]
)
def test_a_host_that_is_off_its_core_is_not_python(
    off_ms: float, beside_us: float, blocked: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = on_device(monkeypatch, IDLE, off_ms=off_ms, beside_us=beside_us)
    assert (seen.waits["blocked"], seen.waits["python"]) == pytest.approx((blocked, 2.0 - blocked))
    idle = {**IDLE, "blocked": 8.0}
    assert on_device(monkeypatch, idle, off_ms=0.5).waits["blocked"] == pytest.approx(4.0 + 0.5)


def test_bytes_from_memory_that_is_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = [
        Transfer("host to device", 1, size, 1.0, 1.0, pinned, 0.0)
        for size, pinned in ((5, False), (7, True), (9, None), (20, False))
    ]
    assert on_device(monkeypatch, IDLE, copies=copies).pageable_bytes == 25


def test_the_host_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third fastest of ten steps has 8 ms of its own; it waits 1.5 for a value and 0.5 for a copy that is not
    pinned."""
    events = [
        made.op("aten::item", 0, 1600),
        made.call("cudaStreamSynchronize", 0, 1500, 1),
        made.call("cudaMemcpyAsync", 2000, 500, 2),
        made.copy("Memcpy HtoD (Pageable -> Device)", 2200, 5000, 2, 100),
        made.call("cudaMemcpyAsync", 3000, 400, 3),
        made.copy("Memcpy HtoD (Pinned -> Device)", 7300, 100, 3, 100),
        made.call("cudaStreamSynchronize", 5000, 800, 4, thread=made.BACKWARD),
        made.kernel("gemm", 7500, 100, 9),
    ]
    flows = [
        flow for number, start, end in ((2, 2000, 2200), (3, 3000, 7300)) for flow in made.flow(number, start, end)
    ]
    step = [made.around("recperf.step#0", 0, STEP_US), made.call("cudaStreamSynchronize", 15_000, 900, 5)]
    nesting, window = steps_of(collect([*step, *events, *flows], Path("made")))
    plain = [timed(wall, input_ms=1.0, ranks=0.5) for wall in (30.0, 9.5, 7.5, 6.5, *[20.0] * 6)]
    seen = observer(plain=plain)
    assert evidence._host_ms(seen, nesting, window, 100.0) == pytest.approx(6.0)
    assert evidence._host_ms(seen, nesting, window, 3.0) == 3.0
    fast = observer(plain=[timed(1.0)])
    assert evidence._host_ms(fast, nesting, window, 3.0) == 0.0


def test_the_work_of_kernels() -> None:
    """An operator's work is divided among its kernels by their time; means are over all launches of a name."""
    events = [
        made.op("aten::mm", 0, 100),
        made.call("cudaLaunchKernel", 10, 5, 1),
        made.kernel("gemm", 200, 300, 1),
        made.call("cudaLaunchKernel", 20, 5, 2),
        made.kernel("split", 500, 100, 2),
        made.op("aten::add", 120, 50),
        made.call("cudaLaunchKernel", 130, 5, 3),
        made.kernel("gemm", 700, 100, 3),
        made.op("aten::other", 180, 10),
        made.call("cudaLaunchKernel", 182, 5, 4),
        made.kernel("gemm", 900, 100, 4),
        made.kernel("nobody", 1100, 100, 99),
    ]
    works = [
        CallWork("aten::mm", flops=4000, bytes=800, precision="float32", row_bytes=64, table_rows=5),
        CallWork("aten::add", flops=1000, bytes=90, precision="bfloat16", row_bytes=32, table_rows=9),
    ]
    seen = observer(events, steps=1, works=works)
    means = evidence.kernel_works(seen)
    assert set(means) == {"gemm", "split"}
    # Three quarters of 4,000, 1,000, and a launch without counted work.
    assert (means["gemm"].flops, means["gemm"].bytes) == (round(4000 / 3), 230)
    assert (means["split"].flops, means["split"].bytes, means["split"].precision) == (1000, 200, "float32")
    assert (means["gemm"].precision, means["gemm"].row_bytes, means["gemm"].table_rows) == ("float32", 64, 9)
    assert evidence.kernel_works(observer(events, counter=None)) == {}
    assert evidence.kernel_works(observer()) == {}
    without = evidence.kernel_works(observer(events, steps=1))
    assert (without["gemm"].flops, without["gemm"].row_bytes) == (0, 0)


def test_the_parts_of_events() -> None:
    forward, backward = {"Sequence number": 5}, "autograd::engine::evaluate_function: X"
    events = [
        made.around("recperf.step#0", 0, 1000),
        made.around("enumerate(DataLoader)#x", 10, 50),
        made.op("aten::stack", 20, 10, **{"Sequence number": 4}),
        made.around("recperf.module.net.top", 100, 100),
        made.op("aten::mm", 110, 10, **forward),
        made.op("aten::add", 300, 10),
        made.op(backward, 400, 100, thread=made.BACKWARD, **forward),
        made.op("aten::mm", 420, 10, thread=made.BACKWARD),
        made.op(backward, 510, 50, thread=made.BACKWARD, **{"Sequence number": 4}),
        made.op(backward, 600, 50, thread=made.BACKWARD),
        made.around("Optimizer.step#Adam.step", 700, 100),
        made.op("aten::mul_", 710, 10),
    ]
    nesting, _ = steps_of(collect(events, Path("made")))
    parts = evidence.Parts(nesting)
    by_start = {event.start: parts.of(index) for index, event in enumerate(nesting.events) if event.kind == "op"}
    assert by_start == {
        20: "enumerate(DataLoader)#x", 110: "net.top", 300: None, 400: "net.top, backward", 420: "net.top, backward",
        510: None, 600: None, 710: "optimizer Adam.step",
    }  # fmt: skip
    names = ("recperf.part.forward", "recperf.module.a.b", "Optimizer.zero_grad#SGD.zero_grad", "mine")
    assert [evidence.region_name(name) for name in names] == ["forward", "a.b", "optimizer SGD.zero_grad", "mine"]


def test_the_time_of_parts() -> None:
    rows = [
        Operator("a", part, "elementwise", 1, 1, ms) for part, ms in (("x", 1.0), (None, 5.0), ("x", 2.0), ("y", 2.0))
    ]
    parts = [(part.name, part.ms, part.share_of_operators) for part in part_rows(rows)]
    assert parts == [("(no part)", 5.0, 0.5), ("x", 3.0, 0.3), ("y", 2.0, 0.2)]
    nothing = part_rows([Operator("a", "x", "elementwise", 1, 1, 0.0)])
    assert [part.share_of_operators for part in nothing] == [0.0]


@pytest.mark.parametrize(("durations", "inside"), [([0.5, 1.0, 9.0], 0.5), ([5.0], 0.95), ([0.1], 0.3), ([], 0.65)])
def test_what_recording_an_operator_costs(
    durations: list[float], inside: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """400 calls in a row: plain ones take 2 us at best, recorded ones 5."""
    lengths = iter([1.0, 4.0, 3.0, 2.0, 3.0, 4.0, 2.0, 6.0, 5.0, 7.0])
    now, ends = [0], [False]

    def clock() -> int:
        if ends[0]:
            now[0] += round(next(lengths) * 400 * 1e3)
        ends[0] = not ends[0]
        return now[0]

    class Fake:
        def __init__(self, cuda: bool) -> None:
            assert not cuda

        def durations_us(self) -> list[float]:
            return durations

    monkeypatch.setattr(evidence, "perf_counter_ns", clock)
    monkeypatch.setattr(evidence, "Recording", Fake)
    assert evidence.event_cost.__wrapped__() == pytest.approx((3.0, inside))
    assert list(lengths) == []


@pytest.mark.parametrize(("light", "state"), [(True, "watching"), (False, "plain")])
def test_what_timing_a_step_costs(light: bool, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock advances by 7 ns in each wait and by 3 in each step; a probe of its own is timed."""
    now, probes = [0], []

    class Probe:
        def __init__(self, cache_sizes: Any) -> None:
            self.cuda, self.state, self.steps, self.closed = True, "", 0, False
            self.schedule = Schedule(most_plain=1)
            self.clock = SimpleNamespace(close=lambda: setattr(self, "closed", True))
            probes.append(self)

        def waiting_for_input(self) -> Any:
            now[0] += 7
            return nullcontext()

        def end_step(self) -> None:
            now[0] += 3
            self.steps += 1

    monkeypatch.setattr(evidence, "perf_counter_ns", lambda: now[0])
    monkeypatch.setattr(evidence, "Observer", Probe)
    assert evidence.timing_ns(observer(light=light)) == 10.0
    (probe,) = probes
    assert (probe.state, probe.cuda, probe.steps, probe.closed) == (state, False, 200, True)
    assert not probe.schedule.timed(10**6, 1e9, blocks=None, traced=False)
