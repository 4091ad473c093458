"""The time of an operator by limit, in round numbers: at the ceilings below, a unit of work takes a round time."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recperf.files import json_bytes
from recperf.measure.attribution import attribute, classify, divided_ms
from recperf.measure.ceilings import Ceilings
from recperf.measure.limit_kinds import LIMITS
from recperf.measure.records import Observed, Operator, Percentiles

EXACT = Ceilings(
    device="cpu", threads=1, flops={"float32": 1000.0, "float64": 500.0}, special=1000.0, stream=1000.0, cached=4000.0,
    first_touch=500.0, link=1000.0, cache_bytes=1024, stream_cache_bytes=1024, largest_cache=1024,
    rows_memory=((64, 1e6),), rows_cache=((64, 0.25e6),), calls={"elementwise": 1e6, "product": 2e6}, kernel_ns=1e6,
)  # fmt: skip
"""1 ms: a FLOP, a function such as exp, a streamed byte, 4 cached bytes, a row from memory, 4 cached rows, a call, a
kernel. 2 ms: a byte of new memory, a FLOP in float64, a call of a product."""
HALF_LATENCY = replace(EXACT, rows_memory=((64, 1e6), (192, 2e6)))
"""Of rows of 64 bytes half of the time follows the bytes."""
SLOW_CACHE = replace(EXACT, cached=1250.0)
WIDE_STREAM = replace(EXACT, stream=1.28e5)


def op(ms: float, name: str = "aten::op", calls: float = 0, **work: Any) -> Operator:
    """Without calls nothing of the time is that of calling it."""
    return Operator(name, None, **{"kind": "elementwise", "calls": calls, "python_calls": calls, "ms": ms, **work})


def rows(count: float, memory_rows: float = 0, row_bytes: int | None = 64, **more: Any) -> dict[str, Any]:
    return {"rows": count, "memory_rows": memory_rows, "row_bytes": row_bytes, **more}


@pytest.mark.parametrize(
    ("operator", "limits"),
    [
        # A roof that explains 30 % of the time gets all of it.
        (op(10.0, flops=3), {"compute": 10.0}),
        (op(10.0, flops=2.5), {"compute": 2.5, "operator": 7.5}),
        (op(10.0, flops=1.25, precision="float64"), {"compute": 2.5, "operator": 7.5}),
        (op(10.0, flops=1, special=1), {"compute": 2.0, "operator": 8.0}),
        (op(1000.0), {"operator": 1000.0}),
        (op(100.0, bytes=3, memory_bytes=3, new_bytes=1), {"bandwidth": 4.0, "operator": 96.0}),
        (op(100.0, bytes=1, memory_bytes=1, new_bytes=5), {"bandwidth": 2.0, "operator": 98.0}),
        (op(100.0, bytes=7, memory_bytes=3), {"bandwidth": 3.0, "cache": 1.0, "operator": 96.0}),
        (op(100.0, bytes=4, memory_bytes=9), {"bandwidth": 4.0, "operator": 96.0}),
        (op(100.0, host_bytes=10), {"transfer": 10.0, "operator": 90.0}),
        (op(100.0, **rows(10, 4)), {"latency": 4.0, "cache": 1.5, "operator": 94.5}),
        # The bytes of rows are not streamed as well; without their width nothing is taken off.
        (op(100.0, bytes=644, **rows(10)), {"cache": 3.5, "operator": 96.5}),
        (op(1000.0, bytes=100, **rows(5, row_bytes=None)), {"cache": 26.25, "operator": 973.75}),
        # Arithmetic wins where memory takes as long, and loses where it takes longer.
        (op(10.0, flops=5, bytes=20), {"compute": 10.0}),
        (op(10.0, flops=5, bytes=21), {"cache": 10.0}),
        (op(10.0, bytes=24, memory_bytes=4), {"bandwidth": 10 * 4 / 9, "cache": 10 * 5 / 9}),
        # What would take 1.5 times as long at the ceiling is believed, more is not.
        (op(10.0, flops=15), {"compute": 10.0}),
        (op(10.0, flops=20), {"operator": 10.0}),
        (op(4.0, bytes=42, memory_bytes=2), {"bandwidth": 4 / 3, "cache": 8 / 3}),
        (op(0.5, bytes=5.25, memory_bytes=0.25), {"bandwidth": 1 / 6, "cache": 1 / 3}),
        (op(1.0, bytes=6.5, memory_bytes=0.5), {"bandwidth": 0.25, "cache": 0.75}),
        # Nearer to the cache than to memory, or nearer to memory: 10 is the geometric mean of 20 and 5.
        (op(10.0, bytes=20, memory_bytes=20), {"cache": 10.0}),
        (op(10.5, bytes=20, memory_bytes=20), {"bandwidth": 10.5}),
        (op(10.0, **rows(20, 20)), {"cache": 10.0}),
        (op(10.5, **rows(20, 20)), {"latency": 10.5}),
        (op(10.0, bytes=20, memory_bytes=20, fused=True), {"bandwidth": 10.0}),
        (op(10.0, bytes=2, memory_bytes=2, fused=True), {"bandwidth": 2.0, "operator": 8.0}),
        # Bytes beyond 8 times the largest cache in each call are never cached.
        (op(100.0, bytes=7680, memory_bytes=7680), {"cache": 100.0}),
        (op(100.0, bytes=8192, memory_bytes=8192), {"cache": 100.0}),
        (op(100.0, bytes=8193, memory_bytes=8193), {"bandwidth": 100.0}),
        (op(101.0, calls=2, bytes=16384, memory_bytes=16384), {"dispatch": 1.0, "cache": 100.0}),
        (op(101.0, calls=2, bytes=16385, memory_bytes=16385), {"dispatch": 1.0, "bandwidth": 100.0}),
        # Of a table that no cache holds, as many rows come from memory as explain the time: 8 = 0.2 x 20 + 0.8 x 5.
        (op(8.0, **rows(20, 20, table_rows=17)), {"cache": 4.0, "latency": 4.0}),
        (op(8.0, **rows(20, 20, table_rows=16)), {"cache": 8.0}),
        (op(10.0, **rows(1, 1, row_bytes=2048)), {"cache": 10.0}),
        (op(8.0, bytes=20, memory_bytes=20, **rows(0, table_rows=17)), {"cache": 8.0}),
        # Rows counted as cached, of a table beyond the knee: from memory where the time is nearer to that.
        (op(5.0, **rows(10, table_rows=17)), {"cache": 5.0}),
        (op(5.0625, **rows(10, table_rows=17)), {"latency": 5.0625}),
        (op(5.0625, **rows(10, table_rows=16)), {"cache": 5.0625}),
        (op(6.3, **rows(10, 2, table_rows=17)), {"latency": 3.15, "cache": 3.15}),
        (op(6.4, **rows(10, 2, table_rows=17)), {"latency": 6.4}),
        (op(2.6, parallel=2.0, **rows(10, table_rows=17)), {"latency": 2.6}),
        (op(2.5, parallel=2.0, **rows(10, table_rows=17)), {"cache": 2.5}),
        (op(6.0, flops=2.25, **rows(10, table_rows=17)), {"latency": 6.0}),
        (op(6.0, flops=2.5, **rows(10, table_rows=17)), {"compute": 6.0}),
        (op(8.0, **rows(10, row_bytes=None, table_rows=10**6)), {"cache": 8.0}),
        (op(20.0, **rows(1, row_bytes=2048)), {"cache": 20.0}),
        # Calls: half of their cost is inside. Work below a quarter of it is only a call, up to 4 times its cost.
        (op(4.0, calls=4, flops=1), {"dispatch": 2.0, "compute": 2.0}),
        (op(4.0, calls=4, flops=0.9), {"dispatch": 4.0}),
        (op(4.0, calls=1), {"dispatch": 4.0}),
        (op(4.25, calls=1), {"dispatch": 0.5, "operator": 3.75}),
        (op(3.0, calls=2, flops=3.5), {"dispatch": 3.0}),
        (op(3.0, calls=2, flops=3), {"dispatch": 1.0, "compute": 2.0}),
        (op(1.0, calls=2, bytes=4), {"dispatch": 1.0}),
        (op(8.5, calls=1, kind="product"), {"dispatch": 1.0, "operator": 7.5}),
        (op(4.5, calls=1, kind="unknown"), {"dispatch": 0.5, "operator": 4.0}),
        (op(3.0, calls=2, kind="function"), {"dispatch": 1.0, "python": 2.0}),
        (op(8.0, kernels=1), {"dispatch": 1.0, "operator": 7.0}),
        (op(4.0, kernels=1), {"dispatch": 4.0}),
        (op(8.0, kernels=1, by_name="latency"), {"dispatch": 1.0, "latency": 7.0}),
        (op(8.0, kernels=1, by_name="latency", flops=3), {"dispatch": 1.0, "compute": 7.0}),
        (op(8.0, communication=True, flops=8), {"communication": 8.0}),
        # Two at the same time: each took twice its share of the step.
        (op(5.0, parallel=2.0, flops=3), {"compute": 5.0}),
        (op(5.0, parallel=2.0, flops=2.5), {"compute": 1.25, "operator": 3.75}),
    ],
)  # fmt: skip
def test_the_time_of_an_operator_by_limit(operator: Operator, limits: dict[str, float]) -> None:
    divided = classify(operator, EXACT, 0.5)
    assert divided.limits == pytest.approx(limits)
    assert divided.random_ms == pytest.approx(limits.get("latency", 0.0) if not operator.by_name else 0.0)
    assert sum(divided.limits.values()) == pytest.approx(operator.ms)


@pytest.mark.parametrize(
    ("operator", "ceilings", "limits"),
    [
        (op(4.0, **rows(4, 4)), HALF_LATENCY, {"latency": 2.0, "bandwidth": 2.0}),
        # An implementation can hide latency, but it moves all bytes.
        (op(3.0, **rows(4, 4)), HALF_LATENCY, {"latency": 1.0, "bandwidth": 2.0}),
        (op(8.0, **rows(4, 4)), HALF_LATENCY, {"latency": 4.0, "bandwidth": 4.0}),
        (op(2.0, parallel=2.0, **rows(4, 4)), HALF_LATENCY, {"latency": 1.0, "bandwidth": 1.0}),
        (op(8.0, **rows(4, 4, row_bytes=192)), HALF_LATENCY, {"latency": 2.0, "bandwidth": 6.0}),
        (op(6.0, bytes=258, memory_bytes=2, **rows(4, 4)), HALF_LATENCY, {"latency": 2.0, "bandwidth": 4.0}),
        (op(2.5, "recperf::bag", **rows(5, 5)), replace(HALF_LATENCY, stream=1.28e5), {"bandwidth": 2.5}),
        # Exactly 1.5 times is believed, even if the time is that of a cache.
        (op(10.0, bytes=15, memory_bytes=15), SLOW_CACHE, {"bandwidth": 10.0}),
        (op(10.0, bytes=15.5, memory_bytes=15.5), SLOW_CACHE, {"cache": 10.0}),
        # C code that prefetches is believed up to the rate of a stream: 20 rows of 64 bytes take 10 ms.
        (op(10.0, "recperf::bag", **rows(20, 20)), WIDE_STREAM, {"latency": 10.0}),
        (op(9.5, "recperf::bag", **rows(20, 20)), WIDE_STREAM, {"cache": 9.5}),
        (op(10.0, **rows(20, 20)), WIDE_STREAM, {"cache": 10.0}),
        (op(10.0, "recperf::bag", **rows(20, 20)), replace(WIDE_STREAM, device="H200"), {"cache": 10.0}),
        # What was not measured explains nothing.
        (op(10.0, special=5), replace(EXACT, special=0.0), {"operator": 10.0}),
        (op(10.0, flops=2), replace(EXACT, special=0.0), {"compute": 2.0, "operator": 8.0}),
        (op(10.0, host_bytes=5), replace(EXACT, link=0.0), {"operator": 10.0}),
        (op(10.0, flops=5, calls=1, kernels=2), None, {"operator": 10.0}),
        (op(10.0, communication=True), None, {"communication": 10.0}),
    ],
)
def test_limits_that_depend_on_the_ceilings(operator: Operator, ceilings: Ceilings | None, limits: Any) -> None:
    assert classify(operator, ceilings, 0.5).limits == pytest.approx(limits)


NO, LOW = "the ceiling does not apply", "the ceiling is too low"
GRAPH = "kernels of a CUDA graph have no counted work: their names stand for it"


@pytest.mark.parametrize(
    ("operator", "note"),
    [
        (op(10.0, flops=15), ""),
        (op(10.0, flops=20), f"{NO}: its arithmetic would take 2.0 times as long as measured"),
        (op(10.0, bytes=20, memory_bytes=20), f"{NO}: its bytes would take 2.0 times as long from memory"),
        (op(10.0, bytes=20, memory_bytes=20, fused=True), ""),
        (op(10.0, **rows(20, 20)), f"{NO}: its rows would take 2.0 times as long from memory"),
        (op(8.0, **rows(20, 20, table_rows=17)), ""),
        (op(5.0, **rows(20, 20, table_rows=17)), f"{NO}: its rows would take 4.0 times as long from memory"),
        (op(4096.5, bytes=8193, memory_bytes=8193), f"{LOW}: the fastest measured stream takes 2.0 times as long"),
        (op(8.0, kernels=1, by_name="latency"), GRAPH),
        (op(8.0, kernels=1, by_name="latency", flops=3), ""),
        # No time is left beside the call: a nanosecond of a ms stands for it.
        (op(1.0, calls=2, flops=1e-9), f"{NO}: its arithmetic would take 1.0 times as long as measured"),
        (op(1.0, calls=2, bytes=1.5e-9, memory_bytes=1.5e-9), ""),
        (op(1.0, calls=2, bytes=2e-9, memory_bytes=2e-9), f"{NO}: its bytes would take 2.0 times as long from memory"),
    ],
)  # fmt: skip
def test_a_note_says_where_a_ceiling_does_not_apply(operator: Operator, note: str) -> None:
    assert classify(operator, EXACT, 0.5).note == note


def shares(ceilings: Ceilings | None, *operators: Operator, inside: float | None = None, **waits: float) -> Any:
    seen = Observed("cpu", 1, Percentiles(1.0, 1.0, 1.0), waits, list(operators), inside=inside)
    result = attribute(seen, ceilings)
    return {limit: share for limit, share in result.shares.items() if share}, result


def test_what_calls_cost_outside_of_operators_comes_from_python() -> None:
    # Where it was not measured, 65 % of a call's cost are inside of the operator.
    by_default, _ = shares(EXACT, op(0.65, calls=1), python=10.0)
    assert by_default == pytest.approx({"dispatch": 1.0 / 10.65, "python": 9.65 / 10.65})
    measured, _ = shares(EXACT, op(0.5, calls=1), op(4.0, flops=4), python=5.5, inside=0.5)
    assert measured == pytest.approx({"dispatch": 0.1, "python": 0.5, "compute": 0.4})
    # No more than there is.
    assert shares(EXACT, op(8.0, calls=8), python=2.0, inside=0.5)[0] == pytest.approx({"dispatch": 1.0})
    # Neither kernels of a device nor functions written in Python take anything from it.
    for operator, divided in (
        (op(3.0, calls=2, kind="function"), {"dispatch": 0.1, "python": 0.9}),
        (op(3.0, calls=2, kernels=3), {"dispatch": 0.3, "python": 0.7}),
    ):
        assert shares(EXACT, operator, python=7.0, inside=0.5)[0] == pytest.approx(divided)
    without, _ = shares(None, op(4.0, calls=1), op(4.0, calls=1), python=2.0)
    assert without == pytest.approx({"operator": 0.8, "python": 0.2})


def test_the_share_of_random_rows_and_of_nothing() -> None:
    divided, result = shares(EXACT, op(0.25, **rows(0.25, 0.25)), input=0.25)
    assert (divided, result.random) == (pytest.approx({"latency": 0.5, "input": 0.5}), pytest.approx(0.5))
    assert shares(EXACT, unknown=2.0)[0] == {"operator": 1.0}
    nothing = shares(EXACT)[1]
    assert (set(nothing.shares), set(nothing.shares.values()), nothing.random) == (set(LIMITS), {0.0}, 0.0)


amounts = st.floats(0, 1e4)


@given(
    st.lists(
        st.builds(
            op, st.floats(1e-3, 1e3), calls=st.integers(0, 20), flops=amounts, special=amounts, bytes=amounts,
            memory_bytes=amounts, new_bytes=amounts, rows=amounts, memory_rows=st.just(0.0) | amounts,
            row_bytes=st.sampled_from([None, 8, 64, 512]),
            table_rows=st.sampled_from([None, 1, 100]), kernels=st.integers(0, 3), parallel=st.sampled_from([1.0, 3.0]),
            fused=st.booleans(), communication=st.booleans(), by_name=st.sampled_from([None, "compute"]),
            kind=st.sampled_from(["elementwise", "product", "function"]),
        ),
        max_size=3,
    ),
    st.dictionaries(st.sampled_from(list(LIMITS)), st.floats(0, 1e3)),
    st.sampled_from([EXACT, HALF_LATENCY, WIDE_STREAM, None]),
)  # fmt: skip
def test_every_nanosecond_goes_to_one_limit(operators: list[Operator], waits: dict[str, float], ceilings: Any) -> None:
    divided, result = shares(ceilings, *operators, **waits)
    assert all(share >= 0 for share in divided.values())
    assert not divided or sum(divided.values()) == pytest.approx(1.0)
    assert divided_ms(waits, operators) == pytest.approx(sum(waits.values()) + sum(row.ms for row in operators))
    for row in result.operators:
        assert sum(row.limits.values()) == pytest.approx(row.ms)
        assert 0 <= row.random_ms <= row.ms * (1 + 1e-9)


def test_profiles_in_files_keep_the_names_of_counted_work() -> None:
    written = json.loads(json_bytes(op(1.0, bytes=4, memory_bytes=3, new_bytes=2, host_bytes=5, **rows(9, 7))))
    assert [written[key] for key in ("beyond", "fresh", "missed", "linked")] == [3, 2, 7, 5]
