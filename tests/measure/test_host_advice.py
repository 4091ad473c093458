"""The rules about the host in round numbers: a step of 100 ms, both sides of every threshold, and what gains follow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from example_steps import CPU, GPU, HOST, after, facts_of, row

from recperf.measure import advice as rules
from recperf.measure.program_records import LoaderFacts, ProgramFacts
from recperf.measure.records import Advice, DividedOperator, Place, PlaceShare


def test_the_time_of_limits() -> None:
    step = facts_of(
        row("mm", 30.0, {"compute": 20.0, "dispatch": 10.0}), row("add", 5.0, {"dispatch": 5.0}), python=7.0
    )
    assert (step.step_ms, step.ms("dispatch"), step.ms("dispatch", "python", "compute")) == (100.0, 15.0, 42.0)
    assert step.ms("input") == 0.0
    parts = {"optimizer Adam.step": 2.0, "optimizer Adam.zero_grad": 1.0, "optimizer AdamW.step": 4.0}
    step = facts_of(row("add", 5.0, part="optimizer AdamW.step"), seen={"optimizer_python": parts})
    assert (step.optimizer_python("Adam"), step.optimizer_python("AdamW")) == (3.0, 4.0)
    assert (len(step.optimizer_rows("AdamW")), step.optimizer_rows("Adam")) == (1, [])


def test_what_work_takes_at_the_ceilings() -> None:
    cpu, gpu, none = (facts_of(ceilings=one) for one in (CPU, GPU, None))
    assert (cpu.calls_ms(500), gpu.calls_ms(500), none.calls_ms(500)) == (1.0, 2.0, 0.0)
    assert facts_of(ceilings=replace(CPU, calls={"elementwise": 1000.0})).calls_ms(500) == 0.5
    # Up to the knee from the cache.
    assert cpu.stream_ms(1_000_000) == pytest.approx(0.02)
    assert cpu.stream_ms(2_000_000) == pytest.approx(0.1)
    assert cpu.stream_ms(2_000_000, adamw=True) == pytest.approx(0.1)
    measured = facts_of(ceilings=replace(CPU, adamw=10e9))
    assert (measured.stream_ms(2_000_000, adamw=True), measured.stream_ms(2_000_000)) == pytest.approx((0.2, 0.1))
    assert (cpu.rows_ms(1000, 64, 1000), cpu.rows_ms(1000, 64, 1001)) == pytest.approx((0.01, 0.1))
    assert (none.stream_ms(1e9), none.rows_ms(1e9, 64, 1e9)) == (0.0, 0.0)


@pytest.mark.parametrize(("others", "busy"), [(None, ""), (0.15, ""), (0.16, "other work used 16% of the cores")])
def test_other_work_slows_operators_of_a_processor(others: float | None, busy: str) -> None:
    assert facts_of(seen={"other_work": others}).busy == busy
    assert facts_of(seen={"other_work": others}, ceilings=GPU).busy == ""


def test_python_around_some_operators() -> None:
    rows = [row("add", 1.0, python_calls=30), row("mul", 1.0, python_calls=10)]
    assert facts_of(*rows, python=8.0).python_ms(rows[:1]) == 6.0
    assert facts_of(*rows, python=8.0, ceilings=GPU).python_ms(rows) == 0.0
    assert facts_of(row("add", 1.0, python_calls=0), python=8.0).python_ms(rows) == 0.0


def test_the_time_of_the_host_of_a_device() -> None:
    kernels = [row("mm", 20.0, kernels=30), row("add", 10.0, kernels=10)]
    for known, host in ((40.0, 40.0), (None, 25.0), (15.0, 20.0), (400.0, 100.0)):
        step = facts_of(
            *kernels, ceilings=HOST, seen={"host_ms": known}, launch=10.0, python=10.0, blocked=5.0, sync=9.0
        )
        # As measured, else its waits; at least what queueing 40 kernels costs, at most the step.
        assert step.host_ms == host
    assert (step.queue_ms(4), step.queue_ms(4, 10)) == (2.0, 3.0)
    assert facts_of(ceilings=replace(HOST, calls={"elementwise": 9.0})).queue_ms(4, 10) == 2.0
    step = facts_of(*kernels, ceilings=HOST, seen={"host_ms": 50.0, "long_python_ms": 10.0})
    assert step.calls_host_ms(kernels[:1]) == pytest.approx(30.0)
    assert facts_of(*kernels, ceilings=HOST, seen={"host_ms": 50.0}).calls_host_ms(kernels) == pytest.approx(50.0)
    long = facts_of(*kernels, ceilings=HOST, seen={"host_ms": 50.0, "long_python_ms": 60.0})
    assert long.calls_host_ms(kernels) == 0.0
    assert facts_of(ceilings=HOST, seen={"host_ms": 50.0}).calls_host_ms([row("x", 1.0, kernels=2)]) == 100.0
    for other in (CPU, GPU, None):
        step = facts_of(*kernels, ceilings=other, seen={"host_ms": 50.0})
        assert (step.counts_host, step.queue_ms(4, 10), step.calls_host_ms(kernels)) == (False, 0.0, 0.0)
    assert not facts_of(ceilings=replace(CPU, queue_ns=5.0)).counts_host


@pytest.mark.parametrize(
    ("goes", "needs", "gains"),
    [
        # With all of the saving, and the range: half of the saving; the changed way needs nothing.
        (50.0, 10.0, (100 / 60, 100 / 80, 2.0)),
        (5.0, 0.0, (100 / 95, 100 / 97.5, 100 / 95)),
        (4.9, 0.0, None),
        (60.0, 55.5, None),
        (100.0, 0.0, (50.0, 2.0, 50.0)),
        (0.0, 0.0, None),
    ],
)
def test_the_gain_of_an_advice(goes: float, needs: float, gains: tuple[float, float, float] | None) -> None:
    advice = facts_of().advice("name", "seen", "change", goes, needs, threads=3)
    if gains is None:
        assert advice is None
    else:
        assert advice is not None
        assert (advice.name, advice.seen, advice.change, advice.settings) == ("name", "seen", "change", {"threads": 3})
        assert (advice.predicted_gain, *(advice.predicted_range or ())) == pytest.approx(gains)
    unknown = facts_of(ceilings=None).advice("name", "seen", "change", goes, needs)
    assert (unknown is None) is (gains is None)
    assert unknown is None or (unknown.predicted_gain, unknown.predicted_range) == (None, None)
    assert facts_of(step=0.0).advice("name", "seen", "change", goes, needs) is None


@pytest.mark.parametrize(
    ("saved", "host", "left"),
    [
        # The host works for 40 of 100 ms; the device for 60.
        (20.0, 0.0, 80.0),
        (70.0, 0.0, 40.0),
        (0.0, -30.0, 70.0),
        (0.0, -50.0, 60.0),
        (30.0, -50.0, 30.0),
        (30.0, -20.0, 50.0),
        (60.0, -50.0, 0.5),
        (40.0, 10.0, 70.0),
    ],
)
def test_a_device_is_not_faster_than_its_host(saved: float, host: float, left: float) -> None:
    waits = {"launch": 10.0, "python": 10.0, "blocked": 5.0, "sync": 5.0, "input": 10.0}
    step = facts_of(row("mm", 60.0, kernels=1), ceilings=HOST, seen={"host_ms": 40.0}, **waits)
    advice = step.advice("name", "seen", "change", saved, 0.0, host)
    assert after(advice) == pytest.approx(left)
    assert step.gains(saved, 0.0, host)[0] == pytest.approx(step.gains(saved / 2, 0.0, host / 2)[1])


def test_the_best_of_several_and_their_names() -> None:
    one, two, unknown = (
        Advice(name, "", "", predicted_gain=gain) for name, gain in (("a", 1.5), ("b", 2.0), ("c", None))
    )
    assert rules.best([unknown, one, None, two]) is two
    assert rules.best([unknown]) is unknown
    assert rules.best([None]) is None
    rows = [row(name, 1.0) for name in ("mm", "add", "mm", "mul")]
    assert (rules.names(rows), rules.names([*rows, row("exp", 1.0)])) == ("mm, add, mul", "mm, add, mul, ...")


@pytest.mark.parametrize(
    ("threads", "cores", "left"),
    [(1, 4, 100 - 60 * 0.75), (2, 4, 70.0), (4, 4, None), (0, 4, None), (1, 0, None), (8, 4, 0.0)],
)
def test_threads(threads: int, cores: int, left: float | None) -> None:
    facts = ProgramFacts(threads=threads, cores=cores)
    rows = (row("mm", 50.0, {"compute": 40.0, "cache": 10.0}), row("embedding", 20.0, {"latency": 20.0}))
    advice = rules.threads(facts_of(*rows, facts=facts))
    if left:
        assert advice is not None
        assert advice.settings == {"threads": 4}
        assert after(advice) == pytest.approx(left)
    else:
        assert (advice is None) is (left is None)
    assert rules.threads(facts_of(*rows, facts=facts, ceilings=GPU)) is None


def loader(workers: int, *, cores: int, threads: int = 1, tensors: int = 0) -> ProgramFacts:
    return ProgramFacts(threads=threads, cores=cores, loader=LoaderFacts(workers, pinned=False, tensors=tensors))


OPERATOR = row("mm", 30.0, {"cache": 20.0, "dispatch": 10.0})


@pytest.mark.parametrize(
    ("facts", "input_ms", "cores_used", "rows", "workers", "threads", "left"),
    [
        # Two workers make a batch in 30 ms while the step computes for 40.
        (loader(0, cores=4), 60.0, 1.0, [], 2, None, 40.0),
        # They take two of four cores from operators, whose own 20 ms become 40.
        (loader(0, cores=4, threads=4), 60.0, 1.0, [OPERATOR], 2, 2, 60.0),
        (loader(0, cores=4, threads=4), 60.0, 0.25, [OPERATOR], 2, None, (60 * 0.25 + 40 * 4) / 4),
        # Four workers instead of two, which took all of the step for their batches.
        (loader(2, cores=8, threads=2), 50.0, 1.0, [], 4, None, 50.0),
        (loader(1, cores=4), 20.0, 1.0, [], 2, None, 80.0),
        (loader(3, cores=4), 60.0, 1.0, [], None, None, None),
        (loader(4, cores=4), 60.0, 1.0, [], None, None, None),
        # Batches that two threads make.
        (loader(0, cores=8), 60.0, 2.0, [], 4, None, 40.0),
        # A worker that sleeps most of the time needs no core of its own, but all of them have too little time.
        (loader(0, cores=2, threads=2), 50.0, 0.4, [], 1, None, 60.0),
        (loader(0, cores=1), 60.0, 1.0, [], None, None, None),
        (loader(0, cores=4), 100.0, 1.0, [], 3, None, 100 / 3),
        # Passing 50 tensors costs both processes 5 ms.
        (loader(0, cores=4, tensors=50), 60.0, 1.0, [], 2, None, 45.0),
        # Making a batch then takes 55 ms, for which two workers are needed beside a step of 55 ms.
        (loader(0, cores=4, tensors=50), 50.0, 1.0, [], 2, None, 55.0),
        (loader(0, cores=4), 4.0, 1.0, [], None, None, None),
        # Operators get no fewer threads than one, and no more than now.
        (loader(0, cores=2, threads=1), 50.0, 1.0, [OPERATOR], 1, None, 50.0),
        (loader(0, cores=3, threads=3), 80.0, 1.0, [row("mm", 10.0, {"cache": 10.0})], 2, 1, 40.0),
        # The whole time of an operator that is not divided into limits, and of several together.
        (loader(0, cores=3, threads=3), 70.0, 1.0, [row("mm", 10.0, {"cache": 10.0})], 2, 1, 50.0),
        (loader(0, cores=3, threads=3), 70.0, 1.0, [row("mm", 10.0, {}), OPERATOR], 2, 1, 90.0),
        (loader(0, cores=4, threads=3), 60.0, 2.0, [OPERATOR], 3, 1, 80.0),
        (loader(2, cores=4), 45.0, 1.0, [], 3, None, 200 / 3),
        # As many as now.
        (loader(1, cores=4), 50.0, 1.0, [], 2, None, 50.0),
        (loader(1, cores=2), 50.0, 1.0, [], None, None, None),
    ],
)
def test_workers(
    facts: ProgramFacts, input_ms: float, cores_used: float, rows: list[DividedOperator], workers: int | None,
    threads: int | None, left: float | None,
) -> None:  # fmt: skip
    advice = rules.loader(facts_of(*rows, facts=facts, input=input_ms, seen={"input_cores": cores_used}))
    if workers is None:
        assert advice is None
        return
    assert advice is not None
    settings = {"workers": workers, "threads": threads} if threads else {"workers": workers}
    assert advice.settings == settings
    assert f"num_workers={workers}, persistent_workers=True)" in advice.change
    assert after(advice) == pytest.approx(left)


def test_more_workers_than_cores_and_loaders_of_a_device() -> None:
    many = rules.loader(facts_of(facts=loader(5, cores=4), input=60.0))
    assert many is not None
    assert (many.settings, many.predicted_gain) == ({"workers": 4}, None)
    assert rules.loader(facts_of(facts=ProgramFacts(threads=1, cores=4), input=60.0)) is None
    assert rules.loader(facts_of(facts=loader(0, cores=0), input=60.0)) is None
    # The operators of a device need no thread of the host.
    gpu = rules.loader(facts_of(OPERATOR, facts=loader(0, cores=4, threads=4), input=60.0, ceilings=GPU))
    assert gpu is not None
    assert (gpu.settings, after(gpu)) == ({"workers": 2}, pytest.approx(40.0))
    unknown = rules.loader(facts_of(facts=loader(0, cores=4, tensors=50), input=60.0, ceilings=None))
    assert unknown is not None
    assert unknown.settings == {"workers": 2}


@pytest.mark.parametrize(
    ("pinned", "pageable", "settings"),
    [(False, 0, {"pinned": True}), (True, 0, {}), (True, 500_000_000, {"pinned": True}), (None, 500_000_000, {})],
)
def test_copies(pinned: bool | None, pageable: int, settings: dict[str, bool]) -> None:
    facts = ProgramFacts(loader=LoaderFacts(1, pinned=pinned)) if pinned is not None else ProgramFacts()
    rows = row("lookup", 10.0, {"transfer": 10.0}, host_bytes=1), row("add", 10.0)
    step = facts_of(*rows, facts=facts, ceilings=GPU, transfer=20.0, seen={"pageable_bytes": pageable})
    advice = rules.copies(step)
    assert advice is not None
    assert (advice.settings, "pin_memory" in advice.change) == (settings, pinned is not True or bool(pageable))
    # The bytes still take 10 ms at the rate of the link.
    assert after(advice) == pytest.approx(90.0 if pageable else 80.0)
    assert rules.copies(facts_of(facts=facts, transfer=20.0)) is None
    assert after(rules.copies(facts_of(ceilings=replace(GPU, link=0.0), transfer=20.0))) == pytest.approx(80.0)
    # Without a measured link nothing says how long the bytes take.
    unknown = facts_of(ceilings=None, transfer=20.0, seen={"pageable_bytes": 500_000_000})
    assert unknown.from_pinned_memory() == (20.0, 0.0)


def test_rows_in_host_memory_and_values_that_are_read() -> None:
    rows = [row("a", 30.0, {"transfer": 25.0}, host_bytes=10**8), row("b", 20.0, {"transfer": 15.0}, host_bytes=10**8)]
    rows.append(row("d", 1.0, host_bytes=1))
    host = rules.rows_on_the_host(facts_of(*rows, row("c", 9.0, {"transfer": 9.0}), ceilings=GPU))
    assert after(host) == pytest.approx(100 - 40 + 10)
    assert host is not None
    assert "200 MB of rows" in host.seen
    assert rules.rows_on_the_host(facts_of(row("c", 9.0, {"transfer": 9.0}), ceilings=GPU)) is None
    read = rules.waits_for_values(facts_of(row("item", 1.0), row("add", 1.0), ceilings=GPU, sync=20.0))
    assert after(read) == pytest.approx(80.0)
    assert read is not None
    assert ", by item: 20.0 ms, 20% of the step." in read.seen
    unknown = rules.waits_for_values(facts_of(ceilings=GPU, sync=20.0))
    assert unknown is not None
    assert "by .item() or .cpu():" in unknown.seen
    for source, change in (
        ("total += loss.item()", "if step % 100 == 0: total += loss.item()"),
        ("", "read the value in every 100th step only: train.py:3 in fit"),
        ("return loss.item()", "read the value in every 100th step only: train.py:3 in fit"),
    ):
        place = Place("fit", "train.py", 3)
        seen = {"places": [PlaceShare("sync", 1.0, place, source)]}
        known = rules.waits_for_values(facts_of(row("item", 1.0, place=place), ceilings=GPU, seen=seen, sync=20.0))
        assert known is not None
        assert known.change == change


@pytest.mark.parametrize(
    ("places", "waits", "seen", "left"),
    [
        # Lines 1 and 2 report; line 3 does not; line 1 also reads a value of the device.
        ([("python", 0.5, 2)], {"python": 40.0}, {}, 100 - 0.99 * 20),
        ([("python", 0.5, 2)], {"python": 40.0}, {"long_python_ms": 10.0}, 100 - 0.99 * 10),
        ([("python", 0.5, 2)], {"python": 40.0}, {"long_python_ms": 30.0}, 100 - 0.99 * 20),
        ([("blocked", 0.5, 2)], {"blocked": 40.0}, {"long_python_ms": 10.0}, 100 - 0.99 * 20),
        ([("python", 0.5, 2), ("blocked", 0.25, 2)], {"python": 40.0, "blocked": 20.0}, {}, 100 - 0.99 * 25),
        ([("python", 0.25, 2), ("python", 0.5, 1)], {"python": 40.0}, {}, 100 - 0.99 * 20),
        ([("python", 0.5, 1)], {"python": 40.0, "sync": 10.0}, {}, 100 - 0.99 * 30),
        ([("python", 0.5, 2)], {"python": 40.0, "sync": 10.0}, {}, 100 - 0.99 * 20),
        ([("python", 0.5, 3)], {"python": 40.0, "sync": 10.0}, {}, None),
        ([("launch", 0.5, 2)], {"launch": 40.0}, {}, None),
        ([("python", 0.1, 2)], {"python": 40.0}, {}, None),
    ],
)
def test_reports_of_every_step(
    places: list[tuple[str, float, int]], waits: dict[str, float], seen: dict[str, Any], left: float | None
) -> None:
    source = ["", "print(loss.item())", "logger.info(loss)", "loss.backward()"]
    shown = [PlaceShare(limit, share, Place("fit", "train.py", line), source[line]) for limit, share, line in places]
    advice = rules.reported_values(facts_of(seen={**seen, "places": shown}, **waits))
    assert after(advice) == (left if left is None else pytest.approx(left))
    if advice and len(places) == 1:
        assert advice.change == f"if step % 100 == 0: {source[places[0][2]]}"


def test_reports_of_the_host_of_a_device() -> None:
    """The host works for 50 of 100 ms, 20 of them for a report, which also waits for 30 ms of the device."""
    places = [PlaceShare("python", 1.0, Place("fit", "train.py", 1), "print(loss.item())")]
    step = facts_of(row("mm", 40.0), ceilings=HOST, seen={"places": places, "host_ms": 50.0}, python=20.0, sync=30.0)
    assert after(rules.reported_values(step)) == pytest.approx((50 - 0.99 * 20) + (50 - 0.99 * 30))


@pytest.mark.parametrize(
    ("source", "reports"),
    [
        ("torch.save(model.state_dict(), path)", True),
        ("auc = roc_auc_score(labels, scores)", True),
        ("total += loss.item()", True),
        ("self.log('loss', loss)", True),
        ("writer.add_scalar('loss', loss, step)", True),
        ("gc.collect()", True),
        ("return self.asymmetric_loss(x, y)", False),
        ("loss = self.asymmetric_loss(x, y)", False),
        ("return loss.item()", False),
        ("y = torch.log(x)", False),
        ("scores = metric_learning(x)", False),
        ("self.catalogue.refresh(x)", False),
        ("print(loss.item(),", False),
        ("", False),
    ],
)
def test_names_are_no_evidence_of_a_report(source: str, reports: bool) -> None:
    """A name that only contains a word, what a function returns, and what the step computes are none."""
    shown = [PlaceShare("python", 1.0, Place("metrics", "train.py", 1), source)]
    assert bool(rules.reported_values(facts_of(seen={"places": shown}, python=40.0))) == reports


SMALL = [
    row("add", 40.0, {"dispatch": 30.0, "cache": 10.0}, calls=100, python_calls=1000),
    row("mm", 10.0, {"dispatch": 10.0}, calls=50, python_calls=0, kind="product"),
    row("mul", 10.0, {"dispatch": 5.0, "cache": 5.0}, calls=50, python_calls=0, part="optimizer Adam.step"),
]


def test_small_operators_of_a_processor() -> None:
    # 45 ms of calls and 10 of passes go; 50 products, 20 of 200 calls and one of 100 passes remain.
    goes, needs = 55.0, 50 * 0.002 + 20 * 100 / 200 + 10 / 100
    for python, more in ((0.0, 0.0), (4.0, 4.0), (4.1, 0.0)):
        advice = rules.small_operators(facts_of(*SMALL, python=python))
        # Python that takes up to 4 times the cost of 1,000 calls only prepares them.
        assert after(advice) == pytest.approx(100 - goes - more + needs)
    assert advice is not None
    assert advice.seen.startswith("200 operator calls take 45.0 ms, 45% of the step")
    assert (advice.change, advice.settings) == ("model.compile()", {})
    model = rules.small_operators(facts_of(*SMALL, facts=ProgramFacts(has_model=True)))
    assert model is not None
    assert model.settings == {"compile": True}
    assert rules.small_operators(facts_of(*SMALL, facts=ProgramFacts(compiled=True))) is None
    assert rules.small_operators(facts_of(*SMALL, ceilings=None)) is not None
    # Without ceilings nothing tells that Python only calls operators: 5 ms of it stay.
    assert (
        rules.small_operators(facts_of(row("add", 4.0, {"dispatch": 4.0}, calls=10**6), ceilings=None, python=5.0))
        is None
    )
    # Only element-wise operators with both kinds of time are fused, and all of what goes may have to stay.
    assert rules.small_operators(facts_of(row("add", 40.0, {"cache": 40.0}, calls=100))) is None
    assert rules.small_operators(facts_of(row("add", 40.0, {"dispatch": 40.0}, calls=20))) is None
    sums = [row("sum", 30.0, {"dispatch": 10.0, "cache": 20.0}, kind="reduction", calls=1000)]
    assert after(rules.small_operators(facts_of(*sums))) == pytest.approx(100 - 10 + 20 * 100 / 1000)


def test_small_operators_of_a_device() -> None:
    kernels = [
        row("add", 20.0, {"dispatch": 8.0, "cache": 12.0}, kernels=40, calls=4),
        row("mm", 10.0, {"compute": 10.0}, kernels=10, calls=500, kind="product"),
        row("mul", 10.0, {"dispatch": 2.0, "cache": 8.0}, kernels=50, part="optimizer Adam.step"),
    ]
    waits = {"launch": 20.0, "python": 10.0}
    # Without the time of the host: launches, Python, empty kernels and 3 of 4 passes go; 500 products of 4 us stay.
    advice = rules.small_operators(facts_of(*kernels, ceilings=GPU, **waits))
    assert after(advice) == pytest.approx(100 - (20 + 10 + 10 + 12) + (500 * 0.004 + 12 / 4))
    assert advice is not None
    assert advice.seen.startswith("100 kernels, for which the device waits or which are empty take 40.0 ms, 40%")
    assert "reduce-overhead" in advice.change
    # The host works for 60 ms, half of them for the graph's kernels: one call, and 20 guards of 0.1 ms, remain.
    seen = {"host_ms": 60.0}
    advice = rules.small_operators(
        facts_of(*kernels, ceilings=HOST, seen=seen, facts=ProgramFacts(has_model=True), **waits)
    )
    saved = 10 + 12 - (500 * 0.004 + 12 / 4)
    assert after(advice) == pytest.approx(max(70 - saved, 60 + 0.5 + 2 - 30 + 40 - saved))
    assert advice is not None
    assert advice.settings == {"compile": True}


def test_a_larger_batch() -> None:
    facts = ProgramFacts(loader=LoaderFacts(0, pinned=False, batch_size=64))
    fixed = {"python": 10.0, "launch": 10.0}
    advice = rules.larger_batch(facts_of(row("add", 10.0, {"dispatch": 10.0}), facts=facts, **fixed))
    assert after(advice) == pytest.approx(85.0)
    assert advice is not None
    assert advice.change.startswith("DataLoader(..., batch_size=128)")
    assert advice.predicted_range == pytest.approx([100 / 92.5, 2.0])
    assert rules.larger_batch(facts_of(row("add", 9.9, {"dispatch": 9.9}), facts=facts, **fixed)) is None
    assert rules.larger_batch(facts_of(python=50.0)) is None
    assert rules.larger_batch(facts_of(python=50.0, facts=loader(0, cores=2))) is None
    gpu = facts_of(
        row("add", 40.0, {"dispatch": 40.0}), facts=facts, ceilings=HOST, seen={"host_ms": 60.0}, python=40.0
    )
    # Half of 40 ms of empty kernels, and half of the 60 ms of the host.
    assert after(rules.larger_batch(gpu)) == pytest.approx(30 + 20)
