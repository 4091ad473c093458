"""The first losses of a workload change only on purpose, and then `python tests/golden/losses.py` writes them anew."""

from __future__ import annotations

import json

import losses as golden
import pytest

from recperf.workloads import WORKLOADS


@pytest.mark.usefixtures("all_ratings")
@pytest.mark.parametrize("name", list(WORKLOADS))
def test_first_losses(name: str) -> None:
    saved = json.loads((golden.FOLDER / f"{name}.json").read_text())
    expected = [float.fromhex(text) for text in saved["losses"]]
    losses = golden.losses(name)
    assert len(losses) == len(expected) == golden.COUNT
    if saved["platform"] == golden.platform_facts():
        assert [loss.hex() for loss in losses] == saved["losses"]
    else:
        # Another processor or torch sums in another order, which after 50 steps shows in the fourth digit at most.
        assert losses == pytest.approx(expected, rel=2e-3)
