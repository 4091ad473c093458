"""200,000 tiny steps take no more memory than 40,000 do: the slope's interval allows for none."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest


@pytest.mark.long
@pytest.mark.parametrize("name", ["micro-dlrm, 10 long epochs", "next-item, counted", "hstu, 400 short epochs"])
def test_memory_of_a_long_training_is_flat(name: str, script: Callable[[str], ModuleType]) -> None:
    flat = script("flat_memory")
    readings = flat.training([*flat.TRAININGS[name], "--train.device", "cpu"], flat.STEPS, 1.0)
    growth, half = flat.slope(readings, flat.STEPS)
    assert growth - half <= flat.GOAL, (growth, half, readings[:: len(readings) // 10])


def test_a_slope_is_that_of_the_readings_with_its_interval(script: Callable[[str], ModuleType]) -> None:
    flat, draw = script("flat_memory"), np.random.default_rng(1)
    steps = np.arange(1, 20_000, 20)
    readings = [(int(step), int(1e8 + 30 * step + draw.normal(0, 1000)), 1 << 20) for step in steps]
    growth, half = flat.slope(readings, 20_000)
    assert abs(growth - 30) < half < 0.1
    assert flat.slope(readings, 20_000, 2) == pytest.approx((0, 0), abs=1e-6)
