"""A change that moves the first losses of a workload must be meant, and must write them anew."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from recperf.workloads import WORKLOADS

_spec = importlib.util.spec_from_file_location("golden_losses", Path(__file__).with_name("losses.py"))
assert _spec is not None
assert _spec.loader is not None
golden_losses = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(golden_losses)


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_first_losses(name: str) -> None:
    saved = json.loads((golden_losses.FOLDER / f"{name}.json").read_text())
    expected = [float.fromhex(text) for text in saved["losses"]]
    found = golden_losses.losses(name)
    assert len(found) == len(expected) == golden_losses.COUNT
    if saved["platform"] == golden_losses.here():
        assert [loss.hex() for loss in found] == saved["losses"]
    else:
        # Another processor or torch adds in another order; 50 steps apart that shows in the fourth digit at most.
        assert found == pytest.approx(expected, rel=2e-3)
