"""recperf run [WORKLOAD]"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..distributed.ranks import Ranks, enter
from ..stop import FLAG
from .options import SOURCES, START, choose, read_options
from .options import RunOptions as Options
from .terminal import print_error

DESCRIPTION = """Train a workload (default: micro-dlrm), compare it with simple baselines and write a run folder.
WORKLOAD comes first; each option below overrides one field of its config."""


def command(arguments: list[str]) -> int:
    return as_rank(run_here, arguments)


def as_rank(work: Callable[[list[str], Ranks], int], arguments: list[str]) -> int:
    """Do the work of a command in this process: alone, or as one of several ranks."""
    world = enter(Ranks.from_environment())
    if world.size == 1:
        return work(arguments, world)
    from ..distributed.launch import run_as_rank

    return run_as_rank(
        world, lambda: work(arguments, world), lambda error: print_error(error, as_json="--json" in arguments)
    )


def run_here(arguments: list[str], world: Ranks) -> int:
    """Run the command in this process: alone, as one of several ranks, or as their launcher."""
    FLAG.poll()
    choice = choose(arguments, known=(*SOURCES, START))
    options: Options[Any] = read_options(Options, choice, verb="run", description=DESCRIPTION)
    from .training import start

    return start(arguments, choice, options, world)
