"""recperf checkpoint ACTION RUN"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from ..errors import DataError, UsageError
from ..runs.checkpoints import listed, prune
from ..runs.record import hold
from ..units import size
from .parse import OutputOptions, choose_action, parse
from .terminal import Terminal, conclude, print_json, table

ACTIONS = {
    "list": "show step, time and size of all checkpoints, and which are the last and the best",
    "verify": "read every byte and compare the digests; exits 3 if a checkpoint is damaged",
    "prune": "remove all but the newest intact checkpoints and the best intact one",
}
HELP = """usage: recperf checkpoint ACTION RUN [OPTIONS]

{actions}

  recperf checkpoint ACTION --help    options of an action"""


@dataclass(frozen=True, kw_only=True)
class Options(OutputOptions):
    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The folder of a run."""


@dataclass(frozen=True, kw_only=True)
class PruneOptions(Options):
    keep: int = 1
    """How many of the newest intact checkpoints of each seed to keep, in addition to the best one."""


def command(arguments: list[str]) -> int:
    action = choose_action("checkpoint", arguments, ACTIONS, HELP)
    if action is None:
        return 0
    kind: Any = PruneOptions if action == "prune" else Options
    options: Any = parse(
        kind, arguments[1:], prog=f"recperf checkpoint {action}", description=ACTIONS[action].capitalize() + "."
    )
    terminal = Terminal(as_json=options.json, quiet=options.quiet)
    if action == "prune":
        return remove_old(options, terminal)
    return show(options, terminal, hashed=action == "verify")


def show(options: Options, terminal: Terminal, *, hashed: bool) -> int:
    checkpoints = listed(options.run, hashed=hashed)
    terminal.say(as_table(checkpoints, hashed=hashed) if checkpoints else "no checkpoints yet")
    damaged = [entry for entry in checkpoints if entry["fault"]]
    lost = {entry["seed"] for entry in damaged} - {entry["seed"] for entry in checkpoints if not entry["fault"]}
    error = None
    if damaged and hashed:
        error = DataError(
            f"{len(damaged)} of {len(checkpoints)} checkpoints are damaged",
            where={f"seed {entry['seed']} {entry['name']}": entry["fault"] for entry in damaged},
            fix=f"no checkpoint of seed {min(lost)} is intact: restore one from a copy, or start a new run"
            if lost
            else "recperf run --resume continues from the newest intact one",
        )
    return conclude(error, {"checkpoints": checkpoints} if options.json else None)


def as_table(checkpoints: list[dict[str, Any]], *, hashed: bool) -> str:
    """One line for each checkpoint, then the damages."""
    rows = [["checkpoint", "saved", "size", "files", "role", "state"]]
    for entry in checkpoints:
        role = " and ".join(word for word in ("last", "best") if entry[word])
        fine = "intact" if hashed else "complete"
        rows.append(
            [
                f"seed {entry['seed']}  step {entry['step']:,}",
                entry["when"] or "",
                size(entry["bytes"]),
                str(entry["files"]),
                role,
                "damaged" if entry["fault"] else fine,
            ]
        )
    lines = [table(rows)]
    lines += [f"  seed {e['seed']} step {e['step']:,}: {e['fault']}" for e in checkpoints if e["fault"]]
    if not hashed and any(not entry["fault"] for entry in checkpoints):
        lines.append(
            "  complete: all files exist and have the right size; recperf checkpoint verify compares their digests"
        )
    return "\n".join(lines)


def remove_old(options: PruneOptions, terminal: Terminal) -> int:
    if options.keep < 1:
        raise UsageError(f"--keep is {options.keep}; it must be at least 1")
    listed(options.run, hashed=False)
    # A running training must not lose checkpoints it relies on.
    nothing = "nothing was removed"
    lock = hold(options.run, busy=f"wait until it is done; {nothing}", refused=nothing)
    try:
        removed = [
            {"folder": str(path), "step": int(path.name.removeprefix("step-")), "why": why}
            for path, why in prune(options.run, options.keep)
        ]
    finally:
        os.close(lock)
    for entry in removed:
        terminal.say(f"removed {entry['folder']} ({entry['why']})")
    remaining = listed(options.run, hashed=False)
    terminal.say(as_table(remaining, hashed=False) if remaining else "no checkpoints yet")
    if options.json:
        print_json({"removed": removed, "checkpoints": remaining})
    return 0
