"""recperf profile --trace TRACE"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..errors import DataError, MachineError
from ..jsonfile import sealed
from ..measure.profile import StepProfile
from ..measure.trace.records import MergedTraces
from ..terminal import Terminal, print_json
from ..units import size
from .parse import OutputOptions, VerboseOption, parse

DESCRIPTION = """Name what limits the steps of a trace of torch.profiler, with ceilings and advice, and show regions,
modules, operators, kernels, idle time of the device by cause, copies and collectives. Of a folder with one trace per
rank: the slowest rank, how long ranks wait in each collective, and one file of all ranks for ui.perfetto.dev.
recperf report TRACE writes the page; recperf profile WORKLOAD --save-trace records a trace."""
MERGED = "trace.merged.json.gz"


@dataclass(frozen=True, kw_only=True)
class Options(OutputOptions, VerboseOption):
    trace: Path
    """The trace, .json or .json.gz, or a folder with one per rank."""
    peaks: Path | None = None
    """Ceilings of the machine that recorded the trace: a file that recperf peaks wrote there. Default: those of this
    machine."""


def command(arguments: list[str]) -> int:
    options = parse(Options, arguments, prog="recperf profile --trace", description=DESCRIPTION)
    terminal = Terminal(as_json=options.json, quiet=options.quiet, verbose=options.verbose)
    profile = profile_of(options.trace, options.peaks)
    from ..runs.report.profiles import report_of

    terminal.show(report_of(profile))
    if options.trace.is_dir() and profile.trace is not None:
        try:
            profile.trace.merged = one = merged(options.trace)
            ranks, all_ranks = len(one.ranks), one.of or 0
            missing = f"; {all_ranks - ranks} of {all_ranks} ranks are missing" if all_ranks > ranks else ""
            about = f"{size(one.bytes)}, {ranks} ranks{missing}; clock: {one.clock}"
            terminal.facts(("merged", f"{one.file} ({about}), for ui.perfetto.dev"))
        except (DataError, MachineError) as error:
            terminal.notice(f"the traces are not merged into one file: {error.what}")
    if options.json:
        print_json(sealed(profile))
    return 0


def profile_of(path: Path, peaks_file: Path | None) -> StepProfile:
    """The profile of a trace, or of the slowest rank in a folder with the comparison of all."""
    from ..measure.peaks import find, read_file
    from ..measure.trace_evidence import analyse_file

    chosen = peaks_file is not None
    peaks = read_file(peaks_file) if peaks_file is not None else find()
    if not path.is_dir():
        return analyse_file(path, peaks, chosen=chosen)
    from ..measure.trace.analyse import compare_ranks

    compared = compare_ranks(path)
    profile = analyse_file(Path(compared.file), peaks, chosen=chosen)
    if profile.trace is not None:
        profile.trace.ranks_compared = compared
    return profile


def merged(folder: Path) -> MergedTraces:
    """One file of all ranks; those of several hosts have the times of their own clocks."""
    from ..measure.trace.analyse import traces_in
    from ..measure.trace.file import looks_like_trace
    from ..measure.trace.merge import merge

    target = folder / MERGED
    if target.exists() and not looks_like_trace(target):
        raise DataError(f"{MERGED} is there, and is not a trace", where={"file": target})
    return merge(traces_in(folder), target)
