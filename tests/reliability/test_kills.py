"""dlrm-v4 killed at any moment and resumed, as often as it takes, ends bit for bit as a run that was left alone."""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path

import pytest
from killable import KILLED
from tiny_v4 import finish, go_on, outcome, straight

TESTS, KILLS = 20, 8
"""160 kills; test_points.py has the others."""


@pytest.mark.parametrize("seed", range(TESTS))
def test_kills_at_random_moments(seed: int, tmp_path: Path) -> None:
    """Each kill finds the run where the last one left it, so that the start, steps, saves, evaluations and the end have
    their share of moments drawn from half the time a whole run takes. Kills that come too late do not count."""
    draw, left, run = random.Random(seed), KILLS, 0
    alone = straight()
    while left:
        folder = tmp_path / f"run-{run}"
        while left:
            process = go_on(folder)
            time.sleep(draw.uniform(0.0, alone.seconds / 2))
            if process.kill() != KILLED:
                assert process.wait() == 0, process.output
                break
            left -= 1
        finish(folder)
        assert outcome(folder) == alone.outcome
        shutil.rmtree(folder)
        run += 1
        assert run < 10 * KILLS, "kills keep coming too late"
