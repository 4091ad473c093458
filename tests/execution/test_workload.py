"""The names in a workload."""

from __future__ import annotations

import pytest

from recperf.errors import MachineError
from recperf.execution.workload import load


@pytest.mark.parametrize("place", ["nowhere_at_all:X", "recperf.nowhere:X", "recperf.tasks:NOTHING"])
def test_what_cannot_be_imported_is_named(place: str) -> None:
    with pytest.raises(MachineError, match=f"{place} cannot be imported"):
        load(place)


def test_a_function_is_itself() -> None:
    assert load(load) is load
