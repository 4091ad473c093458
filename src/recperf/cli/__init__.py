"""The commands: parse, call, print. One module per command, imported only when it is used."""

from __future__ import annotations

import errno
import importlib
import sys
import traceback

from ..errors import MachineError, RecperfError, UsageError, closest
from ..machine import memory_error, out_of_memory
from ..stop import FLAG
from ..terminal import outputs, print_error, print_text
from ..version import __version__

COMMANDS = {
    "show": "list the workloads, or show config, parameters, FLOPs, bytes and memory of one without running it",
    "run": "train a workload and write its result",
    "bench": "train all models that fit a dataset, and put them and the baselines into one table",
    "score": "score rows of a file with the model of a run",
    "recommend": "list the items that users most likely see and like, by the model of a run",
    "export": "write the model of a run as files that need no recperf: tables, weights and a program",
    "check": "test the claims and the checkpoints of runs; prune checkpoints",
    "compare": "compare runs, profiles or traces; --gate exits with 5 if the second is slower",
    "report": "write the HTML page of a run, a profile or a trace, or of two runs compared",
    "ui": "show all runs in a browser: quality, speed and limits, curves of running ones, comparisons",
    "profile": "measure what limits a workload, a program of yours or a trace, and predict and try fixes",
    "sweep": "measure a workload at several values of any config field",
    "diagnose": "say what limits the quality of a run, by experiments with its config",
    "pair": "measure one model with cached and with uncached rows, to see whether memory limits it",
    "peaks": "measure the ceilings of this machine: FLOP/s, bandwidths, cache sizes",
    "data": "download, check, prepare, import, generate or describe a dataset",
    "mlperf": "check MLPerf logs with the official checker",
    "plan": "predict memory, time and cost on devices you do not have",
    "doctor": "test what works on this machine, and say how to fix what does not",
}
FORMER = {"list": "show", "diff": "compare", "trace": "profile", "checkpoint": "check"}
"""Commands of earlier versions, and those that do their work now."""

REQUIRED = ("msgspec", "numpy", "rich", "torch", "tyro")
"""Packages without which most commands do not start; `doctor` does."""
STOP_CLEANLY = ("run", "bench", "score", "profile", "sweep", "data", "diagnose")
"""Commands that poll for signals themselves, to save or to remove what is incomplete. A signal ends others at once."""

HELP = """usage: recperf COMMAND [OPTIONS]

recperf trains recommendation models, measures them and explains what limits them.

commands:
{commands}

  recperf COMMAND --help    options of a command; --help-all: every field
  recperf --version
  recperf --tyro-print-completion bash|zsh|fish
                            a script for the shell's Tab key

Start with: recperf run"""


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    with outputs() as stdout:
        code = _run(arguments)
        stdout.flush()
        lost = stdout.lost(code)
        if lost is not None:
            print_error(lost, as_json=False)
            code = code or lost.exit_code
    return code


def _run(arguments: list[str]) -> int:
    """Run a command; every error becomes a message and an exit code."""
    # What follows -- is for a program of the user.
    as_json = "--json" in (arguments[: arguments.index("--")] if "--" in arguments else arguments)
    try:
        with FLAG.listening():
            return dispatch(arguments)
    except RecperfError as error:
        print_error(error, as_json=as_json)
        return error.exit_code
    except KeyboardInterrupt:
        print_text("\ninterrupted", stderr=True)
        return 130
    except Exception as error:
        if out_of_memory(error):
            print_error(memory_error(error), as_json=as_json)
            return MachineError.exit_code
        if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in REQUIRED:
            absent = MachineError(f"{error.name} is not installed", fix="recperf doctor says what is missing")
            print_error(absent, as_json=as_json)
            return MachineError.exit_code
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            place: dict[str, object] = {"path": str(error.filename)}
            print_error(MachineError("the path is too long", where=place, fix="choose a shorter one"), as_json=as_json)
            return MachineError.exit_code
        print_text(traceback.format_exc(), end="", stderr=True)
        what = f"internal error: {type(error).__name__}: {error}"
        print_error(RecperfError(what, fix="please report it with the traceback above"), as_json=as_json)
        return 1


def dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print_text(HELP.format(commands="\n".join(f"  {name:<10} {text}" for name, text in COMMANDS.items())))
        return 0
    if arguments[0] in ("-V", "--version", "version"):
        print_text(f"recperf {__version__}")
        return 0
    name, rest = arguments[0], arguments[1:]
    if name.startswith("--tyro-"):
        from .parse import print_completion

        return print_completion(arguments)
    if name not in COMMANDS:
        guess = FORMER.get(name) or closest(name, COMMANDS)
        kind = "option" if name.startswith("-") else "command"
        raise UsageError(
            f"unknown {kind} {name!r}" + (f"; did you mean {guess!r}?" if guess else ""),
            fix=f"recperf {guess} --help" if guess else "recperf --help",
        )
    module = importlib.import_module(f".{name}", __name__)
    if name not in STOP_CLEANLY:
        FLAG.ends_at_once = True
        FLAG.poll()
    code: int = module.command(rest)
    return code
