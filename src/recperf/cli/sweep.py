"""recperf sweep WORKLOAD --field a,b,c"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..files import write_json, writing
from ..measure.profile import swept_ms
from ..runs.report.formats import spread, time
from ..terminal import Terminal, print_json, table
from .options import C, Choice, WorkloadOptions, choose, read_options

DESCRIPTION = """Measure steps for several values of a field: --model.dim 64,128,256. Several fields give all
combinations. Lists of widths use dashes: --model.top 32-16-1,64-32-1."""


@dataclass(frozen=True, kw_only=True)
class Options(WorkloadOptions[C]):
    out: Path | None = None
    """Folder for sweep.json. Default: runs/sweep-<workload>-<time>."""


def command(arguments: list[str]) -> int:
    choice = choose(arguments)
    swept, fixed = split(choice.rest)
    options = _parse(choice, fixed)
    if not swept:
        raise UsageError(
            "nothing to sweep: give a field several values", fix="recperf sweep micro-dlrm-dram --model.dim 64,128"
        )
    points = []
    for values in itertools.product(*swept.values()):
        settings = dict(zip(swept, values))
        single = [argument for name, value in settings.items() for argument in (f"--{name}", *widths(value))]
        points.append((settings, _parse(choice, fixed + single).values))
    terminal = Terminal(as_json=options.json, quiet=options.quiet)
    terminal.say(f"{choice.workload.name}: {len(points)} settings")
    from ..execution.profiling import sweep
    from ..measure import peaks

    result = sweep(choice.workload, points, peaks.load(), terminal.say)
    folder = options.out or Path("runs") / f"sweep-{choice.workload.name}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "sweep.json", result)
    terminal.say(as_text(result))
    terminal.say(f"  written to {folder}")
    if options.json:
        print_json(result)
    return 0


def _parse(choice: Choice, arguments: list[str]) -> Options[Any]:
    return read_options(Options, choice, arguments, verb="sweep", description=DESCRIPTION)


def split(arguments: list[str]) -> tuple[dict[str, list[str]], list[str]]:
    """The fields with several values, and the other arguments."""
    swept: dict[str, list[str]] = {}
    rest: list[str] = []
    waiting = list(arguments)
    while waiting:
        argument = waiting.pop(0)
        flag, equals, value = argument.partition("=")
        takes = flag.startswith("--") and flag != "--out" and not equals
        if takes and waiting and "," in waiting[0] and not waiting[0].startswith("--"):
            value = waiting.pop(0)
        if flag.startswith("--") and flag != "--out" and "," in value:
            swept[flag[2:]] = [part for part in value.split(",") if part]
            if not swept[flag[2:]]:
                raise UsageError(f"{flag} has no values to sweep", fix=f"{flag} 64,128")
        else:
            rest.append(argument)
    return swept, rest


def widths(value: str) -> list[str]:
    return value.split("-") if re.fullmatch(r"\d+(-\d+)+", value) else [value]


def as_text(result: dict[str, Any]) -> str:
    names = list(result["rows"][0]["settings"])
    rows = [[*names, *(head for part in result["parts"] for head in (part, "p20 – p80")), "limit"]]
    for row in result["rows"]:
        times = [swept_ms(row["profile"], part) for part in result["parts"]]
        cells = [cell for m in times for cell in (time(m.p50), spread(m))]
        rows.append([*(row["settings"][name] for name in names), *cells, row["profile"].verdict.limit])
    lines = ["", table(rows), "  the step without timers, parts with them", ""]
    for fit in result["fits"]:
        lines.append(f"  {fit['part']} against {fit['field']}: {time(fit['slope_ms'])} per unit, r2 {fit['r2']:.3f}")
    return "\n".join(lines)
