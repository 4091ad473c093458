"""After a profile on a GPU everything that a step changes is what plain steps leave. An id out of range would be an
assertion of the device, after which no call works."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

# Products with several workspaces may differ in the last bit; read when CUDA starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
from harmless_cases import HOT, Case, cases, every_experiment, profiled_like_plain
from hypothesis import Phase, given, settings

from recperf.measure import experiments, schedule

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True, scope="module")
def short() -> Iterator[None]:
    """Few steps, every experiment in one turn, no measuring of the machine, and sums in a fixed order."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "PLAIN_SECONDS", 0.01)
        patch.setattr(experiments, "TURNS", 1)
        patch.setattr("recperf.execution.step_profile.machine_peaks.require", lambda threads, say: None)
        patch.setattr("recperf.execution.step_profile.run_experiments", every_experiment)
        torch.use_deterministic_algorithms(True)
        yield
        torch.use_deterministic_algorithms(False)


def require_harmless(case: Case) -> None:
    report = profiled_like_plain(case, "cuda")
    ran = {row.name: row.measured for row in report.experiments}
    assert HOT in ran, (ran, report.notes)
    assert not ran[HOT].startswith("not possible"), ran
    torch.cuda.synchronize()


@settings(max_examples=25, phases=(Phase.explicit, Phase.generate), deadline=None)
@given(cases())
def test_a_profile_leaves_what_plain_steps_leave(case: Case) -> None:
    require_harmless(case)


def test_26_tables_of_every_size() -> None:
    kinds = itertools.cycle(("embedding", "bag", "index"))
    rows = [3, 100_000, 5, 64, 65, 1000] * 4 + [7, 40_000]
    require_harmless(Case(list(zip(kinds, rows)), True, "adam", 0.3, True))


def test_a_table_of_ten_million_rows() -> None:
    require_harmless(Case([("bag", 10_000_000), ("embedding", 3)], True, width=8))
