"""recperf run [WORKLOAD]"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from ..config import to_json
from ..distributed.ranks import Ranks, enter
from ..errors import GateFailed, UsageError
from ..jsonfile import as_json
from ..stop import FLAG
from ..terminal import Terminal, conclude, page_optional, print_error, print_json
from .options import FROM_DIAGNOSIS, SOURCES, START, choose, read_options
from .options import RunOptions as Options

if TYPE_CHECKING:
    from ..execution.run import TrainingRun
    from ..runs.result import Result

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
    began = monotonic()
    FLAG.poll()
    choice = choose(arguments, known=(*SOURCES, START, FROM_DIAGNOSIS))
    options: Options[Any] = read_options(Options, choice, verb="run", description=DESCRIPTION)
    from ..execution.run import TrainingRun

    config = options.values
    if config.start.run is not None and not choice.resume:
        from ..execution.starting import continued

        if options.ranks > 1 or world.size > 1:
            raise UsageError("a single process starts from another run", fix="leave out --ranks; a resume may have it")
        config = continued(choice.workload, config)
    terminal = Terminal(as_json=options.json, quiet=options.quiet or not world.is_leader, verbose=options.verbose)
    run = TrainingRun(
        workload=choice.workload,
        config=config,
        report=terminal,
        resume=choice.resume,
        saved=choice.config if choice.resume else None,
        folder=options.run_dir,
        allow_change=options.allow_change,
        loggers=options.log,
        peaks=options.peaks,
        began=began,
    )
    if options.ranks or world.size > 1:
        from ..distributed.launch import require_ranks

        require_ranks(world, options.ranks, choice.workload.name, hasattr(config, "distributed"))
    if options.ranks > 1 and world.size == 1 and not options.dry_run:
        return start_ranks(arguments, options, terminal)
    if options.restarts:
        raise UsageError("--restarts needs --ranks", fix="torchrun --max-restarts")
    with FLAG.before_exit(terminal.close), closing(terminal):
        if options.dry_run:
            return dry_run(run, options, terminal) if world.is_leader else 0
        result = run.train()
        return 0 if result is None else show(run.record.folder, result, options, terminal)


def start_ranks(arguments: list[str], options: Options[Any], terminal: Terminal) -> int:
    """Launch several ranks and wait for them."""
    if options.restarts < 0:
        raise UsageError(f"--restarts is {options.restarts}; allowed: 0 or more")
    from ..distributed.launch import launch, rank_arguments

    try:
        return launch(
            rank_arguments(arguments),
            options.ranks,
            lambda error: print_error(error, as_json=options.json),
            restarts=options.restarts,
            notice=terminal.notice,
        )
    finally:
        terminal.close()


def dry_run(run: TrainingRun, options: Options[Any], terminal: Terminal) -> int:
    """Check everything that can be checked without training, and say what would be trained."""
    data, place = run.check()
    name, estimate = run.workload.name, run.workload.estimate(options.values)
    terminal.say(f"would train {name} on {data}")
    terminal.say(f"  {sum(estimate.parameters.values()):,} parameters, {estimate.total.flops:,} FLOPs a step")
    terminal.say(f"  into {place}")
    terminal.say("nothing was run")
    if options.json:
        print_json({"dry_run": True, "workload": name, "data": data, "config": to_json(options.values)})
    return 0


def show(folder: Path, result: Result, options: Options[Any], terminal: Terminal) -> int:
    """Print the result, write the page, and return the exit code."""
    from ..runs.evidence import Evidence
    from ..runs.report import page, run_report

    report = run_report.report(Evidence(folder), "r1")
    terminal.show(report)
    if not options.report or options.verbose:
        terminal.facts(("run", str(folder)))
    if options.report:
        with FLAG.explained("; the run is complete, only its page is missing", f"recperf report {folder}"):
            FLAG.poll()
            with page_optional(terminal):
                terminal.facts(("page", str(page.save(report, folder / "report.html"))))
    if options.json:
        print_json(as_json(result))
    if not result.quality.met:
        from ..runs.report.quality_sections import standing_text, target_text

        # stdout holds the result as its one JSON object, so the error goes to stderr only.
        text = "; ".join(filter(None, [f"the target was missed: {target_text(result)}", standing_text(result)]))
        return conclude(GateFailed(text))
    return 0
