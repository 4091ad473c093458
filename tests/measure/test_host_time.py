"""The equations of a step on a processor: whatever was measured, the parts add up to the step."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recperf.measure.evidence import HostClocks, divided

MS = st.floats(0, 1e4, allow_subnormal=False).map(lambda ms: round(ms, 6))
SHARE = st.floats(0, 1)
CLOCKS = st.builds(
    HostClocks, own=MS, off=MS, sampled_off=st.none() | MS, outside=MS, collectives=MS, beside=MS, inside=MS, stuck=MS,
    cut=MS, traced_off=MS, waited_off=MS, preempted=SHARE,
)  # fmt: skip
STEP = HostClocks(
    own=13.0, off=3.0, sampled_off=None, outside=6.0, collectives=0.0, beside=0.0, inside=4.0, stuck=0.0, cut=0.0,
    traced_off=0.0, waited_off=0.0, preempted=0.0,
)  # fmt: skip
"""A thread that is off its core for 3 of 13 ms; of the other 10 operators take what they take in a traced step."""


@given(CLOCKS)
def test_the_parts_add_up_to_the_step(step: HostClocks) -> None:
    parts = divided(step)
    times = (parts.communication, parts.blocked, parts.python, parts.operators)
    assert sum(times) == pytest.approx(step.own, abs=1e-6)
    assert min(times) >= 0
    assert parts.scale >= 0


@given(CLOCKS)
def test_no_part_exceeds_what_was_measured_of_it(step: HostClocks) -> None:
    parts = divided(step)
    assert parts.blocked <= step.off
    assert parts.communication <= step.collectives
    if step.outside == 0 and step.inside > 0:
        assert parts.python == 0
    if step.inside == 0:
        assert parts.operators == 0


@given(CLOCKS, st.floats(0.01, 100))
def test_a_step_of_another_length_has_the_same_shares(step: HostClocks, times: float) -> None:
    figures = {name: ms and times * ms for name, ms in asdict(step).items() if name != "preempted"}
    parts, longer = divided(step), divided(replace(step, **figures))
    for name in ("communication", "blocked", "python", "operators"):
        assert getattr(longer, name) == pytest.approx(times * getattr(parts, name), rel=1e-3, abs=1e-3)


def test_the_step_of_the_drawing() -> None:
    parts = divided(STEP)
    assert (parts.communication, parts.blocked, parts.python, parts.operators) == pytest.approx((0.0, 3.0, 6.0, 4.0))
    # A profiler that makes Python twice as slow does not change what its share is taken from.
    slower = divided(replace(STEP, outside=12.0, inside=8.0))
    assert (slower.python, slower.operators, slower.scale) == pytest.approx((6.0, 4.0, 0.5))
