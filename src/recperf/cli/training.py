"""What recperf run does once its options are read: train here, start ranks, or only check."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from ..config import to_json, with_absolute_paths
from ..distributed.job import job, launched, remember_run, remembered_run, restarted, same_job
from ..distributed.ranks import Ranks, current
from ..distributed.shared_run import require_same_config, share_run
from ..errors import ConfigError, DataError, GateFailed, MachineError, UsageError
from ..files import read_regular, require_writable, write_atomic
from ..folders import refuse_foreign
from ..jsonfile import as_json
from ..runs.evidence import Evidence, differences
from ..runs.record import JOB, Busy, Run, profile_of, read_config
from ..runs.result import SCHEMA, Change, Result
from ..runs.resume import (
    allowed_fields,
    changed_before,
    changes,
    fixed_fields,
    free_changes,
    record_changes,
    require_allowed,
)
from ..runs.schemas import Progress, read_file
from ..stop import FLAG
from .terminal import Terminal, conclude, page_optional, print_error, print_json

if TYPE_CHECKING:
    from .options import Choice
    from .options import RunOptions as Options

LEASE_S = 120.0
"""Seconds in which a file server frees the locks of a host that is gone; Linux's leases last 90 (NFS 4)."""
RETRY_S = 10
"""Seconds between two attempts to lock a run."""


def start(arguments: list[str], choice: Choice, options: Options[Any], world: Ranks) -> int:
    """Run what the options ask for."""
    if options.values.start.run is not None and not choice.resume:
        from ..execution.starting import continued

        if options.ranks > 1 or world.size > 1:
            raise UsageError("a single process starts from another run", fix="leave out --ranks; a resume may have it")
        options = replace(options, values=continued(choice.workload, options.values))
    if choice.resume and options.run_dir:
        raise UsageError("--run-dir cannot be combined with --resume, which names the folder")
    if options.allow_change and not choice.resume:
        raise UsageError("--allow-change needs --resume: a new run may have any config")
    if choice.resume:
        allowed_changes(choice, options)
    if options.ranks or world.size > 1:
        from ..distributed.launch import require_ranks

        require_ranks(world, options.ranks, choice.workload.name, hasattr(options.values, "distributed"))
    if options.ranks > 1 and world.size == 1 and not options.dry_run:
        return start_ranks(arguments, options)
    if options.restarts:
        raise UsageError("--restarts needs --ranks", fix="torchrun --max-restarts")
    terminal = Terminal(as_json=options.json, quiet=options.quiet or not world.is_leader, verbose=options.verbose)
    remembered = remembered_run()
    with FLAG.before_exit(terminal.close), closing(terminal):
        if options.dry_run and not world.is_leader:
            return 0
        if options.dry_run:
            return dry_run(choice, options, terminal)
        if world.size > 1:
            FLAG.poll()
            world.join(options.values.train.device, options.values.distributed.timeout_s)
            require_same_config(world, choice.workload.name, with_absolute_paths(options.values))
            world.report_ranks(terminal.say)
            # Rank 0 may be on a host that has just come.
            remembered = next(filter(None, world.all_gather(remembered)), None)
        return run(choice, options, terminal, remembered) if world.is_leader else follow(choice, options, terminal)


def start_ranks(arguments: list[str], options: Options[Any]) -> int:
    """Launch several ranks and wait for them."""
    if options.restarts < 0:
        raise UsageError(f"--restarts is {options.restarts}; allowed: 0 or more")
    from ..distributed.launch import launch, rank_arguments

    terminal = Terminal(as_json=options.json, quiet=options.quiet)
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


def allowed_changes(choice: Choice, options: Options[Any]) -> list[Change]:
    """The changed fields of a resumed run that affect its numbers; each of them must be allowed."""
    allow = allowed_fields(options.allow_change, choice.config)
    changed = changes(fixed_fields(choice.config), fixed_fields(with_absolute_paths(options.values)))
    require_allowed(changed, allow, {"run": choice.resume})
    return changed


def dry_run(choice: Choice, options: Options[Any], terminal: Terminal) -> int:
    """Check everything that can be checked without training."""
    data = choice.workload.check(options.values)
    estimate = choice.workload.estimate(options.values)
    place = choice.resume or options.run_dir or Path("runs") / f"{choice.workload.name}-<time>-<id>"
    if not choice.resume and options.run_dir and (options.run_dir / "config.json").exists():
        raise UsageError("the run folder already holds a run", where={"folder": options.run_dir})
    if not choice.resume:
        refuse_foreign(place)
    require_writable(place)
    if options.values.train.device == "cuda":
        from ..train.device import choose as choose_device

        choose_device(options.values.train, largest_product_flops=0)
    terminal.say(f"would train {choice.workload.name} on {data}")
    terminal.say(f"  {sum(estimate.parameters.values()):,} parameters, {estimate.total.flops:,} FLOPs a step")
    terminal.say(f"  into {place}")
    terminal.say("nothing was run")
    if options.json:
        print_json({"dry_run": True, "workload": choice.workload.name, "data": data, "config": to_json(options.values)})
    return 0


def follow(choice: Choice, options: Options[Any], terminal: Terminal) -> int:
    """Train as a rank other than 0, which writes nothing."""
    from ..execution.execute import execute

    world = current()
    if world.broadcast(False):
        return 0
    allow = world.broadcast(())
    record = share_run(None, world)
    remember_run(record.folder)
    execute(choice.workload, with_absolute_paths(options.values), record, FLAG, terminal, allow=allow)
    return 0


def run(choice: Choice, options: Options[Any], terminal: Terminal, remembered: Path | None = None) -> int:
    """Train as rank 0 or alone. `remembered`: the run that restarted ranks were at."""
    config = with_absolute_paths(options.values)
    before = None if choice.resume else begun(choice, options, config, remembered)
    if before is not None:
        choice = replace(choice, resume=before, config=config)
    elif restarted() and not choice.resume:
        terminal.notice("the ranks were restarted, but no host has their run: starting a new one")
    FLAG.poll()
    if choice.resume:
        # The other ranks wait no longer than their timeout.
        timeout_s = config.distributed.timeout_s if current().size > 1 else LEASE_S + RETRY_S
        record = opened(choice.resume, terminal, min(LEASE_S, timeout_s - RETRY_S))
    else:
        record = Run.create(choice.workload.name, to_json(config), folder=options.run_dir, job=job())
    try:
        remember_run(record.folder)
        record.note_job(job())
        result = finished_result(record)
        current().broadcast(result is not None)
        if result is not None:
            report_finished(record, result, config, options, terminal)
        else:
            if before is not None:
                terminal.notice("the ranks were restarted and resume their run")
            terminal.say(f"{choice.workload.name}: starting in {record.folder}")
            again = f"recperf run --resume {record.folder}{current().resume_options()}"
            with (
                FLAG.explained("; what was saved remains" if record.began else "; nothing was trained yet", again),
                changed(choice, options, config, record, terminal),
            ):
                result = train(choice, config, options, record, terminal)
    except (ConfigError, DataError, MachineError):
        if not choice.resume and not record.began:
            record.discard()
        raise
    finally:
        terminal.close()
        record.close()
    return conclude_run(record, result, options, terminal)


def report_finished(record: Run, result: Result, config: Any, options: Options[Any], terminal: Terminal) -> None:
    """Say that a run needs no training, send its curves where --log asks for it, and name damaged checkpoints."""
    terminal.notice("this run is already finished")
    if options.log:
        from ..runs.loggers import Curves

        curves = Curves(options.log, record.folder, terminal.notice)
        curves.finish(record, result, profile_of(record), to_json(config), replay=True)
    from ..runs.checkpoints import listed

    for one in listed(record.folder, hashed=False):
        if one.fault:
            terminal.notice(f"checkpoint {one.name} of seed {one.seed} is damaged: {one.fault}")


def conclude_run(record: Run, result: Result, options: Options[Any], terminal: Terminal) -> int:
    """Print the result, write the page, and return the exit code."""
    from ..runs.report import page, run_report

    report = run_report.report(Evidence(record.folder), "r1")
    terminal.show(report)
    if not options.report or options.verbose:
        terminal.facts(("run", str(record.folder)))
    if options.report:
        with FLAG.explained("; the run is complete, only its page is missing", f"recperf report {record.folder}"):
            FLAG.poll()
            with page_optional(terminal):
                terminal.facts(("page", str(page.save(report, record.folder / "report.html"))))
    if options.json:
        print_json(as_json(result))
    if not result.quality.met:
        from ..runs.report.quality_sections import standing_text, target_text

        # stdout holds the result as its one JSON object, so the error goes to stderr only.
        text = "; ".join(filter(None, [f"the target was missed: {target_text(result)}", standing_text(result)]))
        return conclude(GateFailed(text))
    return 0


def opened(folder: Path, terminal: Terminal, wait_s: float) -> Run:
    """The run to resume. Under torchrun the lock may be that of a rank on a host that is gone."""
    end = monotonic() + (wait_s if job() and not launched() else 0.0)
    while True:
        try:
            return Run.open(folder)
        except Busy:
            if monotonic() >= end:
                raise
        terminal.notice(f"another process has locked the run; waiting up to {end - monotonic():.0f} s for it")
        for _ in range(RETRY_S):
            FLAG.poll()
            sleep(1.0)


def finished_result(record: Run) -> Result | None:
    """The result of a finished run, once its files match their seal; None if the run, or its result, is to be made."""
    if not record.finished:
        return None
    wrong = differences(record.folder)
    fix = "restore the file from a backup, or start a new run"
    if wrong.keys() <= {"result.json"}:
        if not os.path.lexists(record.folder / "result.json"):
            # A kill from here on leaves an unfinished run, not files that differ from their seal.
            record.remove("seal.json")
            return None
        if not wrong:
            return read_file(record.folder / "result.json", Result, SCHEMA)
        fix = "remove result.json and resume the run: it is computed again from the other files"
    raise DataError(f"this run is finished, but {next(iter(wrong.values()))}", where={"run": record.folder}, fix=fix)


def begun(choice: Choice, options: Options[Any], config: Any, remembered: Path | None) -> Path | None:
    """The run that these ranks had begun, with this very config, when one of them failed and all were started again.

    Each host remembers its folder; where all hosts are new, --run-dir names a run of the same torchrun job.
    """
    folder = remembered
    if folder is None and options.run_dir is not None:
        # The job may have finished the run when a host failed.
        with suppress(OSError, ValueError):
            folder = options.run_dir if same_job(read_regular(options.run_dir / JOB).decode()) else None
    if folder is None or not (folder / "config.json").exists():
        return None
    same = read_config(folder) == (choice.workload.name, to_json(config))
    return folder if same else None


@contextmanager
def changed(choice: Choice, options: Options[Any], config: Any, record: Run, terminal: Terminal) -> Iterator[None]:
    """Save the changed config of a resumed run, and put the old one back if the checkpoint does not fit it."""
    if not choice.resume or config == choice.config:
        yield
        return
    edits = [*allowed_changes(choice, options), *free_changes(choice.config, config)]
    for change in edits:
        terminal.notice(f"{change.field} changes from {change.was!r} to {change.now!r}")
    before = record_changes(record.folder, config, edits)
    if any(change.field.startswith("data.") for change in edits):
        # The baselines were computed from other rows.
        (record.folder / "baselines.json").unlink(missing_ok=True)
    try:
        yield
    except ConfigError:
        write_atomic(record.folder / "config.json", before)
        raise


def train(choice: Choice, config: Any, options: Options[Any], record: Run, terminal: Terminal) -> Result:
    # Importing torch takes seconds, so everything that can fail earlier has been checked before.
    import torch  # noqa: F401

    FLAG.poll()
    from ..execution.execute import execute
    from ..measure.peaks import require as require_peaks

    peaks = (lambda: require_peaks(None, terminal.notice)) if options.peaks else None
    # A field that config.json already has with its new value was edited there by hand.
    allow = (*changed_before(record.folder), *allowed_fields(options.allow_change, config)) if choice.resume else ()
    progress: Progress | None = record.read("progress.json", Progress)
    names = options.log or (progress.log if progress else ())
    curves = None
    if names:
        from ..runs.loggers import Curves

        curves = Curves(names, record.folder, terminal.notice)
    world = current()
    world.broadcast(allow)
    try:
        shared = share_run(record, world)
        return execute(choice.workload, config, shared, FLAG, terminal, peaks, allow=allow, curves=curves)
    finally:
        if curves:
            curves.close()
