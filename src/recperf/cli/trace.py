"""recperf trace info FILE, recperf trace merge RUN"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from ..errors import DataError, UsageError
from ..units import number, size
from .parse import JsonOption, choose_action, parse
from .terminal import print_json, table

ACTIONS = {
    "info": "analyse a trace of torch.profiler step by step",
    "merge": "combine the traces of several ranks into one file",
}

HELP = """usage: recperf trace info FILE [OPTIONS]
       recperf trace merge RUN|FILE... [OPTIONS]

{actions}

FILE is a .json or .json.gz file that torch.profiler wrote, in recperf or in any other program. RUN is the folder of a
profile of several ranks with --trace.
  recperf trace ACTION --help    options of an action"""

DESCRIPTION = """Analyse a trace of torch.profiler per step: operators, kernels, idle time of the device by cause,
transfers, and calls that wait for the device."""

MERGE = """Combine the traces of several ranks for ui.perfetto.dev: one process per rank, on one clock. Ranks on one
host share its clock; between hosts, clocks are aligned at the ends of common barriers."""

NAME_WIDTH = 60
RANKS = "trace.rank*.json.gz"
MERGED = "trace.merged.json.gz"


@dataclass(frozen=True, kw_only=True)
class Options(JsonOption):
    file: tyro.conf.Positional[Path]
    """The trace, .json or .json.gz."""
    top: int = 10
    """Maximum number of rows in each table; --json has all."""


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
    return {"info": info_command, "merge": merge_command}[action](arguments[1:])


def info_command(arguments: list[str]) -> int:
    options = parse(Options, arguments, prog="recperf trace info", description=DESCRIPTION)
    if options.top < 1:
        raise UsageError(f"--top is {options.top}; it must be at least 1", fix="--top 10")
    from ..measure.trace.analyse import analyse_file

    analysis = analyse_file(options.file)
    if options.json:
        print_json(analysis)
    else:
        print(as_text(analysis, options.top))
    return 0


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
        print(merged_text(merged))
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


def as_text(analysis: dict[str, Any], top: int) -> str:
    lines = [*_head(analysis), ""]
    parts = [part for part in analysis["parts"] if part["name"] != "other"]
    if parts:
        lines += ["parts of a step", table(_parts(analysis["parts"])), ""]
    operators, kernels = analysis["operator_table"], analysis["kernels"]
    lines += ["operators, per step", _or_missing(operators, lambda: _operators(operators["rows"], top)), ""]
    lines += ["kernels, per step", _or_missing(kernels, lambda: _kernels(kernels, top)), ""]
    lines += ["time of the device, per step", _or_missing(analysis["idle"], lambda: _idle(analysis["idle"])), ""]
    lines += ["transfers, per step", _or_missing(analysis["transfers"], lambda: _transfers(analysis["transfers"]))]
    if analysis["idle"].get("syncs"):
        lines += ["", "waits for the device, per step", _syncs(analysis["idle"]["syncs"], top)]
    return "\n".join(lines)


def _head(analysis: dict[str, Any]) -> list[str]:
    window = analysis["window"]
    steps = f"{window['steps']:,}" if window["named"] else "no named steps; the whole trace counts as one"
    software = [
        f"torch {analysis['torch']}" if analysis["torch"] else "",
        f"CUDA {analysis['cuda']}" if analysis["cuda"] else "",
    ]
    unknown = f", {analysis['ignored']:,} of them of unknown kinds" if analysis["ignored"] else ""
    lines = [
        f"{analysis['file']}  {size(analysis['bytes'])}, {analysis['events']:,} events" + unknown,
        f"recorded by  {', '.join(name for name in software if name) or 'unknown'}",
        f"device   {_device(analysis)}",
        f"steps    {steps}",
        f"wall     {_ms(window['wall_ms'])} ms per step",
    ]
    ranks = analysis["ranks"]
    return lines + ([f"rank     {ranks['rank']} of {ranks['world_size']}, {ranks['backend']}"] if ranks else [])


def _device(analysis: dict[str, Any]) -> str:
    used = analysis["window"]["device"]
    if used is None:
        return "none"
    names = analysis["devices"]
    name = names[used] if used < len(names) else "unknown name"
    several = analysis["window"]["devices"]
    return f"{used}: {name}" + (f"; the busiest of {several}" if several > 1 else "")


def _or_missing(section: Any, draw: Callable[[], str]) -> str:
    if isinstance(section, dict) and "missing" in section:
        return f"  {section['missing']}"
    return draw()


def _parts(parts: list[dict[str, Any]]) -> list[list[str]]:
    rows = [["", "host ms", "device ms", "kernels", "launches"]]
    for part in parts:
        device = "-" if part["device_ms"] is None else _ms(part["device_ms"])
        rows.append([part["name"], _ms(part["host_ms"]), device, _count(part["kernels"]), _count(part["launches"])])
    return rows


def _operators(operators: list[dict[str, Any]], top: int) -> str:
    rows = [["", "calls", "CPU self ms", "device self ms", "FLOP", "bytes", "shapes"]]
    for row in operators[:top]:
        device = "-" if row["device_self_ms"] is None else _ms(row["device_self_ms"])
        work = ["-" if row[name] is None else number(row[name]) for name in ("flops", "bytes")]
        name = _short(row["name"])
        rows.append([name, _count(row["calls"]), _ms(row["cpu_self_ms"]), device, *work, _short(row["shapes"], 40)])
    return table(rows) + _more(operators, top)


def _kernels(kernels: dict[str, Any], top: int) -> str:
    rows = [["", "count", "total ms", "mean us", "share", "launch delay us", "part"]]
    for row in kernels["rows"][:top]:
        delay = "-" if row["launch_delay_us"] is None else f"{row['launch_delay_us']:.1f}"
        share, name = f"{100 * row['share']:.1f} %", _short(row["name"])
        middle = [_count(row["count"]), _ms(row["total_ms"]), f"{row['mean_us']:.1f}", share, delay]
        rows.append([name, *middle, row["part"] or "-"])
    small = kernels["small"]
    return (
        f"{table(rows)}{_more(kernels['rows'], top)}\n  {_count(kernels['count'])} kernels, of which "
        f"{_count(small['count'])} ({100 * small['share_of_count']:.0f} %) run for less than 10 us"
    )


def _idle(idle: dict[str, Any]) -> str:
    rows = [["", "ms", "of the wall"]]
    wall = idle["wall_ms"] or 1.0
    for name, time in [("busy", idle["busy_ms"]), *idle["causes"].items()]:
        rows.append([name, _ms(time), f"{100 * time / wall:.1f} %"])
    return table(rows)


def _transfers(transfers: list[dict[str, Any]]) -> str:
    if not transfers:
        return "  none"
    rows = [["", "count", "bytes", "ms", "GB/s", "pinned", "overlapped"]]
    for row in transfers:
        pinned = {True: "yes", False: "no", None: "-"}[row["pinned"]]
        middle = [_count(row["count"]), number(row["bytes"]), _ms(row["ms"]), f"{row['gb_per_s']:.1f}", pinned]
        rows.append([row["kind"], *middle, f"{100 * row['overlapped_share']:.0f} %"])
    return table(rows)


def _syncs(syncs: list[dict[str, Any]], top: int) -> str:
    rows = [["", "count", "ms", "caller"]]
    rows += [[row["what"], _count(row["count"]), _ms(row["ms"]), row["caller"]] for row in syncs[:top]]
    return table(rows) + _more(syncs, top)


def _more(rows: list[Any], top: int) -> str:
    return f"\n  and {len(rows) - top:,} more; --top {len(rows)} shows all" if len(rows) > top else ""


def _ms(value: float) -> str:
    return f"{value:.3f}"


def _count(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.1f}"


def _short(name: str, width: int = NAME_WIDTH) -> str:
    return name if len(name) <= width else name[: width - 3] + "..."
