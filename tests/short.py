"""What makes a run of a test short, in this process and in those that tests start: steps are measured for a moment, the
embedded ratings are few, and baselines are weak. Tests are not about how fast this machine is, nor about how strong the
baselines of a run are; tests/train has those as they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from recperf import stop
from recperf.data.known.movielens_like import generate
from warm import python

MOMENTS = {
    # Whether a process of many tests grows is chance, and a trace of its memory makes Python many times slower.
    "recperf.measure.observing.GROWS": 1 << 60,
    # However slow a busy machine is, as many steps are counted as on a quiet one.
    "recperf.measure.schedule.PATIENCE_S": math.inf,
    "recperf.execution.measuring.SECONDS": 0.0,
    "recperf.execution.measuring.REPEAT_SECONDS": 0.0,
    "recperf.execution.measuring.OBSERVED_SECONDS": 0.1,
    "recperf.execution.measuring.ROUNDS": 2,
    "recperf.execution.measuring.TRACED": 2,
    "recperf.execution.clocked_steps.FEWEST": 2,
    "recperf.execution.trials.LEAST_S": 0.0,
    "recperf.execution.trials.PART": 0.0,
}


def first(data: Any, options: Iterable[Any]) -> Any:
    """The settings of a baseline without comparing them."""
    return next(iter(options))


WEAK = {
    "recperf.train.baselines._MOST_TREES": 20,
    "recperf.train.baselines.FEWEST_TREES": 20,
    "recperf.train.factor_items.DIM": 8,
    "recperf.train.factor_items.SWEEPS": 1,
    "recperf.train.factor_items.best": first,
    "recperf.train.linear_items.best": first,
    "recperf.train.item_rules.best": first,
}


def ranks_are_short(command: list[str]) -> list[str]:
    """The ranks that a command starts are as short as those of a test."""
    return stop.child(python(PROGRAM, *command[3:]))


FEW = {"recperf.data.known.movielens_like.generate": partial(generate, users=300, items=500, ratings=20_000)}
SHORT = {**MOMENTS, **WEAK, **FEW, "recperf.distributed.launch.child": ranks_are_short}
PROGRAM = f"""
import sys
from recperf.stop import FLAG
FLAG.listen()
sys.path.append({str(Path(__file__).parent)!r})
import short
short.shorten()
from recperf.__main__ import main
raise SystemExit(main())
"""
"""What `python -c` runs as a short `python -m recperf`."""


def shorten(change: Callable[[Any, str, Any], None] = setattr, settings: Mapping[str, Any] = SHORT) -> dict[str, Any]:
    """Change the settings; returns what they were."""
    before = {}
    for place, value in settings.items():
        module, _, name = place.rpartition(".")
        before[place] = getattr(import_module(module), name)
        change(import_module(module), name, value)
    return before
