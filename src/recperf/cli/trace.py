"""recperf trace info|page TRACE, recperf trace diff A B, recperf trace merge RUN"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from ..errors import DataError, UsageError
from ..units import size
from .parse import JsonOption, choose_action, parse
from .terminal import print_json, print_text, table

if TYPE_CHECKING:
    from ..runs.profile_diff import Change
    from ..runs.trace_diff import TraceDiff

ACTIONS = {
    "info": "what limits a step, from a trace of torch.profiler or a folder with one per rank",
    "page": "the same as an HTML page, with a button that opens the trace in Perfetto",
    "diff": "what got slower or faster from one trace to another",
    "merge": "combine the traces of several ranks into one file",
}

HELP = """usage: recperf trace info TRACE [OPTIONS]
       recperf trace page TRACE [OPTIONS]
       recperf trace diff TRACE TRACE [OPTIONS]
       recperf trace merge RUN|FILE... [OPTIONS]

{actions}

TRACE is a .json or .json.gz file that torch.profiler wrote, in recperf or in any other program; for info and page also
a folder with one trace per rank. RUN is the folder of a profile of several ranks with --trace.
  recperf trace ACTION --help    options of an action"""

INFO = """Name what limits the steps of a trace of torch.profiler, with measured ceilings and advice, and show regions,
modules, operators, kernels, idle time of the device by cause, copies and collectives. Of a folder with one trace per
rank: the slowest rank, and how long ranks wait in each collective."""

PAGE = """Write the analysis of a trace as one HTML file that works offline. A button opens the trace in Perfetto."""

DIFF = """Show what takes longer or shorter in a step from the first trace to the second, by region, operator and
kernel, and what is new or gone. A difference counts only if the ranges from p20 to p80 over the steps do not
overlap."""

MERGE = """Combine the traces of several ranks for ui.perfetto.dev: one process per rank, on one clock. Ranks on one
host share its clock; between hosts, clocks are aligned at the ends of common barriers."""

RANKS = "trace.rank*.json.gz"
MERGED = "trace.merged.json.gz"
PAGE_NAME = "trace.html"


@dataclass(frozen=True, kw_only=True)
class AnalysisOptions(JsonOption):
    trace: tyro.conf.Positional[Path]
    """The trace, .json or .json.gz, or a folder with one per rank."""
    peaks: Path | None = None
    """Ceilings of the machine that recorded the trace: a file that recperf peaks wrote there. Default: those of this
    machine."""


@dataclass(frozen=True, kw_only=True)
class InfoOptions(AnalysisOptions):
    top: int = 12
    """Maximum number of rows in a table; --json has all."""


@dataclass(frozen=True, kw_only=True)
class PageOptions(AnalysisOptions):
    output: Path | None = None
    """The page to write. Default: the name of the trace with .html, or trace.html in the folder."""


@dataclass(frozen=True, kw_only=True)
class DiffOptions(JsonOption):
    traces: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="TRACE TRACE")] = ()
    """Two traces, .json or .json.gz."""
    top: int = 12
    """Maximum number of rows in a table; --json has all."""


@dataclass(frozen=True, kw_only=True)
class MergeOptions(JsonOption):
    traces: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN|FILE...")] = ()
    """The folder of a profile of several ranks, or their traces."""
    output: Path | None = None
    """The file to write, gzipped if it ends in .gz. Default: trace.merged.json.gz in the folder."""


def command(arguments: list[str]) -> int:
    action = choose_action("trace", arguments, ACTIONS, HELP)
    if action is None:
        return 0
    commands = {"info": info_command, "page": page_command, "diff": diff_command, "merge": merge_command}
    return commands[action](arguments[1:])


def info_command(arguments: list[str]) -> int:
    options = parse(InfoOptions, arguments, prog="recperf trace info", description=INFO)
    _require_top(options.top)
    analysis = _analysis(options.trace, options.peaks)
    if options.json:
        print_json(analysis)
    else:
        from ..runs.report.trace_report import text

        print_text(text(analysis, top=options.top), end="")
    return 0


def page_command(arguments: list[str]) -> int:
    options = parse(PageOptions, arguments, prog="recperf trace page", description=PAGE)
    analysis = _analysis(options.trace, options.peaks)
    from ..runs.report.trace_report import write_page

    stem = options.trace.name.removesuffix(".gz").removesuffix(".json")
    default = options.trace / PAGE_NAME if options.trace.is_dir() else options.trace.with_name(f"{stem}.html")
    written = write_page(analysis, options.output or default)
    if options.json:
        print_json({"page": str(written), "bytes": written.stat().st_size})
    else:
        print_text(f"page     {written}")
    return 0


def _analysis(path: Path, peaks_file: Path | None) -> dict[str, Any]:
    """The analysis of a trace, or of the slowest rank in a folder with the comparison of all."""
    from ..measure.peaks.store import find, read_file
    from ..measure.trace_evidence import analyse_file

    chosen = peaks_file is not None
    peaks = read_file(peaks_file) if peaks_file is not None else find()
    if not path.is_dir():
        return analyse_file(path, peaks, chosen=chosen)
    from ..measure.trace.ranks import compare_ranks

    compared = compare_ranks(path)
    return {**analyse_file(Path(compared["file"]), peaks, chosen=chosen), "ranks_compared": compared}


def _require_top(top: int) -> None:
    if top < 1:
        raise UsageError(f"--top is {top}; it must be at least 1", fix="--top 12")


def diff_command(arguments: list[str]) -> int:
    options = parse(DiffOptions, arguments, prog="recperf trace diff", description=DIFF)
    _require_top(options.top)
    if len(options.traces) != 2:
        raise UsageError(f"diff needs two traces, got {len(options.traces)}", fix="recperf trace diff OLD NEW")
    from ..runs.trace_diff import diff

    difference = diff(*options.traces)
    if options.json:
        print_json(difference.as_json())
    else:
        print_text(diff_text(difference, options.top))
    return 0


def diff_text(difference: TraceDiff, top: int) -> str:
    from ..runs.report.text import columns

    lines = [f"{difference.files[0]} -> {difference.files[1]}"]
    lines += [f"WARNING: {text}" for text in difference.warnings]
    lines += [f"note: {text}" for text in difference.notes]
    head = ["per step", "before", "p20 – p80", "after", "p20 – p80", "difference", ""]
    lines += ["", *columns([head, _diff_row(difference.step)], left=(6,))]
    for kind, changes in difference.changes.items():
        clear = [change for change in changes if change.says not in ("within noise", "same")]
        noise = len(changes) - len(clear)
        title = "kernels and copies" if kind == "kernels" else kind
        lines += ["", f"{title}, the largest difference first"]
        if clear:
            lines += columns([head, *(_diff_row(change) for change in clear[:top])], left=(6,), shorten_first=True)
        lines += [f"  and {len(clear) - top} more; --top {len(clear)} shows all"] if len(clear) > top else []
        lines.append(f"  {noise} within noise" if changes else "  none in either trace")
    return "\n".join(lines)


def _diff_row(change: Change) -> list[str]:
    from ..runs.report.formats import NONE, short, spread, time
    from ..runs.trace_diff import difference

    row = [short(change.name, 60)]
    for ms in (change.old, change.new):
        row += [time(ms["p50"]), spread(ms) if ms["p80"] != float("inf") else NONE] if ms else [NONE, NONE]
    more = difference(change)
    return [*row, f"{'+' if more >= 0 else '-'}{time(abs(more))}", change.says]


def merge_command(arguments: list[str]) -> int:
    from ..measure.trace.merge import merge

    options = parse(MergeOptions, arguments, prog="recperf trace merge", description=MERGE)
    if not options.traces:
        raise UsageError(
            "merge needs the folder of a profile, or the traces of its ranks", fix="recperf trace merge RUN"
        )
    folder = options.traces[0] if len(options.traces) == 1 and options.traces[0].is_dir() else None
    paths = sorted(folder.glob(RANKS)) if folder else list(options.traces)
    if not paths:
        raise DataError(
            "the folder contains no traces of ranks",
            where={"folder": folder},
            fix="record them with recperf profile WORKLOAD --ranks N --trace",
        )
    output = options.output or (folder / MERGED if folder else None)
    if output is None:
        raise UsageError("--output is missing", fix=f"--output {MERGED}")
    merged = merge(paths, output)
    if options.json:
        print_json(merged)
    else:
        print_text(merged_text(merged))
    return 0


def merged_text(merged: dict[str, Any]) -> str:
    rows = [["rank", "events", "shift us", "file"]]
    rows += [[str(r["rank"]), f"{r['events']:,}", f"{r['shift_us']:.1f}", r["file"]] for r in merged["ranks"]]
    several = len(merged["ranks"])
    missing = f"; {merged['of'] - several} of {merged['of']} ranks are missing" if merged["of"] else ""
    lines = [
        f"{merged['file']}  {size(merged['bytes'])}, {merged['events']:,} events of {several} ranks"
        + (missing if merged["of"] and merged["of"] > several else ""),
        f"clock    {merged['clock']}",
    ]
    if merged["apart_us"] is not None:
        lines.append(f"check    ranks leave the same barrier at most {merged['apart_us']:.0f} us apart")
    return "\n".join([*lines, "", table(rows), "", "open it at https://ui.perfetto.dev"])
