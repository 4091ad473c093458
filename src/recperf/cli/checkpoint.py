"""recperf checkpoint ACTION RUN"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from ..errors import DataError, MachineError, UsageError, closest
from ..runs.checkpoints import listed, prune
from ..runs.record import Run
from ..units import size
from .parse import parse
from .terminal import Terminal, print_error, print_json, table

ACTIONS = {
    "list": "what there is: step, time, size, which is the last and which the best",
    "verify": "read every byte and compare it with its digest; exits 3 when a checkpoint is damaged",
    "prune": "remove all but the newest intact ones and the best",
}
HELP = """usage: recperf checkpoint ACTION RUN [OPTIONS]

{actions}

  recperf checkpoint ACTION --help    options of an action"""


@dataclass(frozen=True, kw_only=True)
class Options:
    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The folder of a run."""
    json: bool = False
    """Print one JSON object on stdout, everything else on stderr."""
    quiet: bool = False
    """Say nothing but errors."""


@dataclass(frozen=True, kw_only=True)
class PruneOptions(Options):
    keep: int = 1
    """How many of the newest intact checkpoints of each seed stay; the best one stays too."""


def command(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(HELP.format(actions="\n".join(f"  {name:<8} {text}" for name, text in ACTIONS.items())))
        return 0
    action = words[0]
    if action not in ACTIONS:
        guess = closest(action, ACTIONS)
        raise UsageError(
            f"unknown action {action!r}" + (f"; did you mean {guess!r}?" if guess else ""),
            fix="recperf checkpoint --help",
        )
    kind = PruneOptions if action == "prune" else Options
    options: Any = parse(
        kind, words[1:], prog=f"recperf checkpoint {action}", description=ACTIONS[action].capitalize() + "."
    )
    terminal = Terminal(as_json=options.json, quiet=options.quiet)
    if action == "prune":
        return tidy(options, terminal)
    return look(options, terminal, hashed=action == "verify")


def look(options: Options, terminal: Terminal, *, hashed: bool) -> int:
    found = listed(options.run, hashed=hashed)
    terminal.say(as_table(found, hashed=hashed) if found else "no checkpoints yet")
    damaged = [entry for entry in found if entry["fault"]]
    error = None
    if damaged and hashed:
        error = DataError(
            f"{len(damaged)} of {len(found)} checkpoints are damaged",
            where={f"seed {entry['seed']} {entry['name']}": entry["fault"] for entry in damaged},
            fix="recperf run --resume goes on from the newest intact one",
        )
    if options.json:
        # One object on stdout: the error goes into it instead of after it.
        print_json({"checkpoints": found, **(error.as_json() if error else {})})
    if error:
        print_error(error, as_json=False)
        return error.exit_code
    return 0


def as_table(found: list[dict[str, Any]], *, hashed: bool) -> str:
    """A line a checkpoint, and under them what is wrong with which."""
    rows = [["checkpoint", "saved", "size", "files", "kept as", "state"]]
    for entry in found:
        kept = " and ".join(word for word in ("last", "best") if entry[word])
        fine = "intact" if hashed else "complete"
        rows.append(
            [
                f"seed {entry['seed']}  step {entry['step']:,}",
                entry["when"] or "",
                size(entry["bytes"]),
                str(entry["files"]),
                kept,
                "damaged" if entry["fault"] else fine,
            ]
        )
    lines = [table(rows)]
    lines += [f"  seed {e['seed']} step {e['step']:,}: {e['fault']}" for e in found if e["fault"]]
    if not hashed:
        lines.append(
            "  complete: every file is there and as long as it should be; recperf checkpoint verify reads them"
        )
    return "\n".join(lines)


def tidy(options: PruneOptions, terminal: Terminal) -> int:
    if options.keep < 1:
        raise UsageError(f"--keep is {options.keep}; at least 1 stays")
    listed(options.run, hashed=False)
    # Opening the run takes its lock: a training that saves right now must not lose what it counts on.
    try:
        run = Run.open(options.run)
    except MachineError as error:
        raise MachineError(error.what, where=dict(error.where), fix="wait for it; nothing was removed") from None
    try:
        gone = [
            {"folder": str(path), "step": int(path.name.removeprefix("step-")), "why": why}
            for path, why in prune(options.run, options.keep)
        ]
    finally:
        run.close()
    for entry in gone:
        terminal.say(f"removed {entry['folder']} ({entry['why']})")
    left = listed(options.run, hashed=False)
    terminal.say(as_table(left, hashed=False) if left else "no checkpoints yet")
    if options.json:
        print_json({"removed": gone, "checkpoints": left})
    return 0
