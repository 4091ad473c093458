"""recperf sweep WORKLOAD --field a,b,c"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..errors import RecperfError, UsageError
from ..files import write_atomic, write_json, writing
from ..measure.explain import part_ms
from .options import C, Choice, WorkloadOptions, choose, read_options
from .terminal import Terminal, print_json, table

DESCRIPTION = """Measure a window of steps at each of several values: --model.dim 64,128,256. Several fields give every
combination. Widths are written with dashes: --model.top 32-16-1,64-32-1."""


@dataclass(frozen=True, kw_only=True)
class Options(WorkloadOptions[C]):
    out: Path | None = None
    """Folder for sweep.json and sweep.svg; default runs/sweep-<workload>-<time>."""


def command(words: list[str]) -> int:
    choice = choose(words)
    swept, fixed = split(choice.rest)
    options = _parse(choice, fixed)
    if not swept:
        raise UsageError(
            "nothing to sweep: give a field several values", fix="recperf sweep micro-dlrm-dram --model.dim 64,128"
        )
    points = []
    for values in itertools.product(*swept.values()):
        settings = dict(zip(swept, values))
        single = [word for name, value in settings.items() for word in (f"--{name}", *widths(value))]
        points.append((settings, _parse(choice, fixed + single).values))
    terminal = Terminal(as_json=options.json, quiet=options.quiet)
    terminal.say(f"{choice.workload.name}: {len(points)} settings")
    from ..execution.sweep import sweep
    from ..measure import peaks

    found = sweep(choice.workload, points, peaks.load(), terminal.say)
    folder = options.out or Path("runs") / f"sweep-{choice.workload.name}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "sweep.json", found)
    terminal.say(as_text(found))
    _draw(found, folder / "sweep.svg", terminal)
    terminal.say(f"  kept in {folder}")
    if options.json:
        print_json(found)
    return 0


def _parse(choice: Choice, words: list[str]) -> Options[Any]:
    return read_options(Options, choice, words, verb="sweep", description=DESCRIPTION)


def split(words: list[str]) -> tuple[dict[str, list[str]], list[str]]:
    """The fields with several values, and the other words."""
    swept: dict[str, list[str]] = {}
    rest: list[str] = []
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        flag, equals, value = word.partition("=")
        takes = flag.startswith("--") and flag != "--out" and not equals
        if takes and waiting and "," in waiting[0] and not waiting[0].startswith("--"):
            value = waiting.pop(0)
        if flag.startswith("--") and flag != "--out" and "," in value:
            swept[flag[2:]] = [part for part in value.split(",") if part]
            if not swept[flag[2:]]:
                raise UsageError(f"{flag} has no values to sweep", fix=f"{flag} 64,128")
        else:
            rest.append(word)
    return swept, rest


def widths(value: str) -> list[str]:
    return value.split("-") if re.fullmatch(r"\d+(-\d+)+", value) else [value]


def as_text(found: dict[str, Any]) -> str:
    names = list(found["rows"][0]["settings"])
    rows = [[*names, "step ms", "p20 to p80", "embedding ms", "p20 to p80", "regime"]]
    for row in found["rows"]:
        step, embedding = part_ms(row["profile"], "step"), part_ms(row["profile"], "embedding")
        cells = [
            f"{m['p50']:.3f}" if i == 0 else f"{m['p20']:.3f} to {m['p80']:.3f}"
            for m in (step, embedding)
            for i in (0, 1)
        ]
        rows.append([*(row["settings"][name] for name in names), *cells, row["profile"]["regime"]["name"]])
    lines = ["", table(rows), ""]
    for fit in found["fits"]:
        lines.append(f"  {fit['part']} against {fit['field']}: {fit['slope_ms']:.3g} ms each, r2 {fit['r2']:.3f}")
    return "\n".join(lines)


def _draw(found: dict[str, Any], path: Path, terminal: Terminal) -> None:
    """The plot; without the report extra the table has to do."""
    try:
        from ..runs.report.sweep import plot

        write_atomic(path, plot(found).encode())
    except RecperfError as error:
        terminal.notice(f"no plot: {error.what}; {error.fix}")
