"""The commands: parse, call, print. One module a command, imported only when it is asked for."""

from __future__ import annotations

import importlib
import os
import sys
import traceback

from .. import __version__
from ..errors import RecperfError, UsageError, closest
from .terminal import print_error

COMMANDS = {
    "list": "the workloads and their presets",
    "show": "what a workload would do: config, parameters, FLOPs, bytes, memory",
    "run": "train a workload and write its result",
    "checkpoint": "list, verify or prune the checkpoints of a run",
    "report": "the page of a run, or of several compared",
    "profile": "what limits a workload, with evidence, and fixes ranked, predicted and tried",
    "diff": "what got slower between two profiles; --gate exits 5 on a regression",
    "trace": "what a trace of torch.profiler says, also another program's; ranks' traces merged",
    "compare": "what changed between runs",
    "check": "hold runs to what their workloads claim",
    "sweep": "measure a workload at several values of any field",
    "ladder": "ways to make a table faster: predicted, measured, checked",
    "pair": "one model with hot and with cold ids: does memory set the pace?",
    "peaks": "measure this machine's ceilings: FLOP/s, bandwidths, the knee of its caches",
    "data": "get, check, prepare, convert, import, make or describe a dataset",
    "mlperf": "check, plot and package MLPerf logs",
    "plan": "memory, time and cost on many devices, before renting them",
    "doctor": "what works on this machine, and how to fix what does not",
}

HELP = """usage: recperf COMMAND [OPTIONS]

recperf trains recommendation models, measures them and explains what limits them.

commands:
{commands}

  recperf COMMAND --help    options of a command
  recperf --version

Start with: recperf run"""


def main(words: list[str] | None = None) -> int:
    """Run a command and return its exit code."""
    words = sys.argv[1:] if words is None else words
    as_json = "--json" in words
    try:
        return dispatch(words)
    except RecperfError as error:
        print_error(error, as_json=as_json)
        return error.exit_code
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read our output went away; nothing is left to say to them.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except MemoryError:
        print_error(RecperfError("out of memory"), as_json=as_json)
        return 4
    except Exception as error:
        traceback.print_exc()
        what = f"a fault in recperf itself: {type(error).__name__}: {error}"
        print_error(RecperfError(what, fix="please report it with the lines above"), as_json=as_json)
        return 1


def dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(HELP.format(commands="\n".join(f"  {name:<10} {text}" for name, text in COMMANDS.items())))
        return 0
    if words[0] in ("-V", "--version", "version"):
        print(f"recperf {__version__}")
        return 0
    name, rest = words[0], words[1:]
    if name not in COMMANDS:
        guess = closest(name, COMMANDS)
        kind = "option" if name.startswith("-") else "command"
        raise UsageError(
            f"unknown {kind} {name!r}" + (f"; did you mean {guess!r}?" if guess else ""),
            fix=f"recperf {guess} --help" if guess else "recperf --help",
        )
    module = importlib.import_module(f".{name}", __name__)
    code: int = module.command(rest)
    return code
