"""recperf run [WORKLOAD]"""

from __future__ import annotations

from typing import Any

from ..distributed.ranks import Ranks, enter
from ..stop import FLAG
from .options import RunOptions as Options
from .options import choose, read_options
from .terminal import print_error

DESCRIPTION = """Train a workload (default: micro-dlrm), compare it with simple baselines and write a run folder.
WORKLOAD comes first; each option below overrides one field of its config."""


def command(arguments: list[str]) -> int:
    world = enter(Ranks.from_environment())
    if world.size == 1:
        return run_here(arguments, world)
    from ..distributed.exits import run_as_rank

    return run_as_rank(
        world, lambda: run_here(arguments, world), lambda error: print_error(error, as_json="--json" in arguments)
    )


def run_here(arguments: list[str], world: Ranks) -> int:
    """Run the command in this process: alone, as one of several ranks, or as their launcher."""
    FLAG.poll()
    choice = choose(arguments)
    options: Options[Any] = read_options(Options, choice, verb="run", description=DESCRIPTION)
    from .training import start

    return start(arguments, choice, options, world)
