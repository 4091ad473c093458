"""recperf trace info FILE, recperf trace merge RUN"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from ..errors import DataError, UsageError, closest
from ..units import number, size
from .parse import parse
from .terminal import print_json, table

ACTIONS = {
    "info": "what a trace of torch.profiler says about a step",
    "merge": "the traces of several ranks as one file, a track a rank",
}

HELP = """usage: recperf trace info FILE [OPTIONS]
       recperf trace merge RUN|FILE... [OPTIONS]

{actions}

FILE is a .json or .json.gz that torch.profiler wrote, in recperf or in any other program; RUN is the folder of a
profile that several ranks took with --trace.
  recperf trace ACTION --help    options of an action"""

DESCRIPTION = """What a trace of torch.profiler says about a step: operators, kernels, idle time of the device by cause,
transfers, and who waited for the device."""

MERGE = """Join the traces of several ranks: one process track a rank, on one clock, for ui.perfetto.dev. Ranks of one
host share its clock; between hosts the ends of barriers that all ranks marked are taken for the same moment."""

NAME_WIDTH = 60
RANKS = "trace.rank*.json.gz"
JOINED = "trace.merged.json.gz"


@dataclass(frozen=True, kw_only=True)
class Options:
    file: tyro.conf.Positional[Path]
    """A trace: .json or .json.gz."""
    top: int = 10
    """Rows of each table."""
    json: bool = False
    """Print one JSON object, with all rows."""


@dataclass(frozen=True, kw_only=True)
class MergeOptions:
    traces: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN|FILE...")] = ()
    """The folder of a profile that several ranks took, or their traces."""
    output: Path | None = None
    """The file to write, packed if it ends in .gz; default trace.merged.json.gz in the folder."""
    json: bool = False
    """Print one JSON object."""


def command(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(HELP.format(actions="\n".join(f"  {name:<6} {text}" for name, text in ACTIONS.items())))
        return 0
    action = words[0]
    if action not in ACTIONS:
        guess = closest(action, ACTIONS)
        raise UsageError(
            f"unknown action {action!r}" + (f"; did you mean {guess!r}?" if guess else ""),
            fix="recperf trace info FILE",
        )
    if action == "merge":
        return merge_command(words[1:])
    options: Options = parse(Options, words[1:], prog=f"recperf trace {action}", description=DESCRIPTION)
    if options.top < 1:
        raise UsageError(f"--top is {options.top}; it must be at least 1", fix="--top 10")
    found = info(options.file)
    if options.json:
        print_json(found)
    else:
        print(as_text(found, options.top))
    return 0


def merge_command(words: list[str]) -> int:
    from ..measure.trace.merge import merge

    options = parse(MergeOptions, words, prog="recperf trace merge", description=MERGE, default=MergeOptions())
    if not options.traces:
        raise UsageError("merge needs a run's folder, or the traces of its ranks", fix="recperf trace merge RUN")
    folder = options.traces[0] if len(options.traces) == 1 and options.traces[0].is_dir() else None
    paths = sorted(folder.glob(RANKS)) if folder else list(options.traces)
    if not paths:
        raise DataError(
            "the folder holds no trace of a rank",
            where={"folder": folder},
            fix="recperf profile WORKLOAD --ranks N --trace writes them",
        )
    output = options.output or (folder / JOINED if folder else None)
    if output is None:
        raise UsageError("--output is missing: where should the merged trace go?", fix=f"--output {JOINED}")
    found = merge(paths, output)
    if options.json:
        print_json(found)
    else:
        print(merged_text(found))
    return 0


def merged_text(found: dict[str, Any]) -> str:
    rows = [["rank", "events", "shifted by us", "file"]]
    rows += [[str(r["rank"]), f"{r['events']:,}", f"{r['shift_us']:.1f}", r["file"]] for r in found["ranks"]]
    several = len(found["ranks"])
    lacking = f"; {found['of'] - several} of its {found['of']} ranks are not among them" if found["of"] else ""
    lines = [
        f"{found['file']}  {size(found['bytes'])}, {found['events']:,} events of {several} ranks"
        + (lacking if found["of"] and found["of"] > several else ""),
        f"clock    {found['clock']}",
    ]
    if found["apart_us"] is not None:
        lines.append(f"check    the same barrier ends up to {found['apart_us']:.0f} us apart on different ranks")
    return "\n".join([*lines, "", table(rows), "", "open it at https://ui.perfetto.dev"])


def info(path: Path) -> dict[str, Any]:
    from ..measure.trace.analyse import analyse
    from ..measure.trace.merge import MERGED
    from ..measure.trace.read import ABOUT, read

    trace = read(path)
    if isinstance(trace.header.get(ABOUT), dict) and MERGED in trace.header[ABOUT]:
        raise DataError(
            "a merged trace holds the steps of several ranks",
            where={"file": path},
            fix="give the trace of one of them",
        )
    found = analyse(trace)
    return {
        "file": str(path),
        "bytes": path.stat().st_size,
        "events": trace.events,
        "ignored": trace.ignored,
        "torch": trace.header.get("torch_version"),
        "cuda": _version(trace.header.get("cuda_runtime_version")),
        "devices": _devices(trace.header.get("deviceProperties")),
        "ranks": _ranks(trace.header.get("distributedInfo")),
        **found,
    }


def _version(number: Any) -> str | None:
    """12080 as 12.8."""
    return f"{number // 1000}.{number % 1000 // 10}" if isinstance(number, int) else None


def _devices(properties: Any) -> list[str]:
    listed = properties if isinstance(properties, list) else []
    return [str(item["name"]) for item in listed if isinstance(item, dict) and "name" in item]


def _ranks(distributed: Any) -> dict[str, Any] | None:
    if not isinstance(distributed, dict) or "rank" not in distributed:
        return None
    return {name: distributed.get(name) for name in ("rank", "world_size", "backend")}


def as_text(found: dict[str, Any], top: int) -> str:
    lines = [*_head(found), ""]
    parts = [part for part in found["parts"] if part["name"] != "other"]
    if parts:
        lines += ["parts of a step", table(_parts(found["parts"])), ""]
    operators, kernels = found["operator_table"], found["kernels"]
    lines += ["operators, per step", _or_missing(operators, lambda: _operators(operators["rows"], top)), ""]
    lines += ["kernels, per step", _or_missing(kernels, lambda: _kernels(kernels, top)), ""]
    lines += ["time of the device, per step", _or_missing(found["idle"], lambda: _idle(found["idle"])), ""]
    lines += ["transfers, per step", _or_missing(found["transfers"], lambda: _transfers(found["transfers"]))]
    if found["idle"].get("syncs"):
        lines += ["", "waits for the device, per step", _syncs(found["idle"]["syncs"], top)]
    return "\n".join(lines)


def _head(found: dict[str, Any]) -> list[str]:
    window = found["window"]
    steps = f"{window['steps']:,}" if window["named"] else "none named; the whole trace is taken as one"
    made = [f"torch {found['torch']}" if found["torch"] else "", f"CUDA {found['cuda']}" if found["cuda"] else ""]
    odd = f", {found['ignored']:,} of them of kinds not read here" if found["ignored"] else ""
    lines = [
        f"{found['file']}  {size(found['bytes'])}, {found['events']:,} events" + odd,
        f"made by  {', '.join(word for word in made if word) or 'not said in the trace'}",
        f"device   {_device(found)}",
        f"steps    {steps}",
        f"wall     {_ms(window['wall_ms'])} ms a step",
    ]
    ranks = found["ranks"]
    return lines + ([f"rank     {ranks['rank']} of {ranks['world_size']}, {ranks['backend']}"] if ranks else [])


def _device(found: dict[str, Any]) -> str:
    used = found["window"]["device"]
    if used is None:
        return "none was used"
    names = found["devices"]
    name = names[used] if used < len(names) else "name not said in the trace"
    several = found["window"]["devices"]
    return f"{used}: {name}" + (f"; the busiest of {several}" if several > 1 else "")


def _or_missing(section: Any, draw: Any) -> str:
    if isinstance(section, dict) and "missing" in section:
        return f"  {section['missing']}"
    drawn: str = draw()
    return drawn


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
