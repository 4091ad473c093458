"""After a profile everything that a step changes is what plain steps leave; batches are passed as the step asks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from harmless_cases import HOT, Case, cases, every_experiment, profiled_like_plain
from hypothesis import Phase, given, settings

import recperf
from recperf.measure import experiments, observing

DRAWN = (Phase.explicit, Phase.generate)
"""A smaller example of a failure would take minutes to find."""


@pytest.fixture(autouse=True, scope="module")
def short() -> Iterator[None]:
    """Few steps, every experiment in one turn, and no measuring of the machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(observing, "PLAIN_SECONDS", 0.01)
        patch.setattr(experiments, "TURNS", 1)
        patch.setattr("recperf.execution.step_profile.machine_peaks.require", lambda threads, say: None)
        patch.setattr("recperf.execution.step_profile.run_experiments", every_experiment)
        yield


def outcomes(report: recperf.Report) -> dict[str, str]:
    return {row.name: row.measured for row in report.experiments}


def require_experiments(report: recperf.Report) -> None:
    ran = outcomes(report)
    assert HOT in ran and "one batch from memory again and again" in ran, (ran, report.notes)
    assert not any(text.startswith("not possible") for text in ran.values()), ran


@settings(max_examples=8, phases=DRAWN)
@given(cases(6))
def test_a_profile_leaves_what_plain_steps_leave(case: Case) -> None:
    require_experiments(profiled_like_plain(case))


@pytest.mark.long
@settings(max_examples=150, phases=DRAWN)
@given(cases())
def test_a_profile_of_many_tables_leaves_what_plain_steps_leave(case: Case) -> None:
    require_experiments(profiled_like_plain(case))


@pytest.mark.parametrize("sparse", [False, True])
def test_26_tables_of_every_size(sparse: bool) -> None:
    """Two tables of different sizes with ids of one shape: those of one are no ids of the other."""
    kinds = itertools.cycle(("embedding", "bag", "index"))
    rows = [3, 100_000, 5, 64, 65, 1000] * 4 + [7, 40_000]
    require_experiments(profiled_like_plain(Case(list(zip(kinds, rows)), sparse, "adam", 0.3, True)))


def test_a_table_of_ten_million_rows() -> None:
    require_experiments(profiled_like_plain(Case([("bag", 10_000_000), ("embedding", 3)], True)))
