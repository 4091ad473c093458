"""tyro with our error messages: a misspelt flag suggests the right one, a bad value names its flag."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import re
import typing
from dataclasses import dataclass
from typing import Any, TypeVar

import tyro

from ..errors import UsageError, closest, did_you_mean
from .help import SWITCHES, flags, help_text
from .terminal import print_text

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class JsonOption:
    json: bool = False
    """Print one JSON object; all else goes to stderr."""


@dataclass(frozen=True, kw_only=True)
class OutputOptions(JsonOption):
    quiet: bool = False
    """Print errors only."""


@dataclass(frozen=True, kw_only=True)
class VerboseOption:
    verbose: bool = False
    """Print everything that the page shows."""


def choose_action(command: str, arguments: list[str], actions: dict[str, str], text: str) -> str | None:
    """The action that the first argument names; None if the help was printed instead."""
    if not arguments or arguments[0] in SWITCHES:
        print_text(text.format(actions="\n".join(f"  {name:<8} {summary}" for name, summary in actions.items())))
        return None
    if arguments[0] not in actions:
        message = f"unknown action {arguments[0]!r}{did_you_mean(arguments[0], actions)}"
        raise UsageError(message, fix=f"recperf {command} --help")
    return arguments[0]


def parse(kind: type[T], arguments: list[str], *, prog: str, description: str, default: T | None = None) -> T:
    """Parse arguments into an instance of a dataclass; `default` holds the values that are not on the command line."""
    if asked := SWITCHES & set(arguments):
        print_text(help_text(kind, prog, description, default, everything="--help-all" in asked))
        raise SystemExit(0)
    errors = io.StringIO()
    defaults: dict[str, Any] = {} if default is None else {"default": default}
    try:
        with contextlib.redirect_stderr(errors):
            options, unknown = tyro.cli(
                kind,
                prog=prog,
                description=description,
                args=arguments,
                return_unknown_args=True,
                config=(tyro.conf.CascadeSubcommandArgs,),
                **defaults,
            )
    except SystemExit as exit:
        if exit.code in (0, None):
            raise SystemExit(0) from None
        raise UsageError(_plain(errors.getvalue()), fix=f"{prog} --help") from None
    if unknown:
        raise _unknown(unknown, [f"--{flag.name}" for flag in flags(kind)], prog)
    return typing.cast(T, options)


def _unknown(arguments: list[str], known: list[str], prog: str) -> UsageError:
    flag = next((argument for argument in arguments if argument.startswith("-")), None)
    if flag is None:
        from ..workloads import WORKLOADS

        late = "; the workload comes before all options" if arguments[0] in WORKLOADS else ""
        return UsageError(f"unexpected argument {arguments[0]!r}{late}", fix=f"{prog} --help")
    name = flag.split("=")[0].replace("_", "-")
    guess = closest(name, known) or closest(name.rsplit(".", 1)[-1].lstrip("-"), [k.rsplit(".", 1)[-1] for k in known])
    guess = next((k for k in known if k == guess or k.endswith(f".{guess}")), guess)
    return UsageError(
        f"unknown option {flag.split('=')[0]!r}" + (f"; did you mean {guess!r}?" if guess else ""),
        fix=f"{prog} --help",
    )


def _plain(box: str) -> str:
    """The message inside tyro's frame, on one line."""
    inside: list[str] = []
    for line in re.sub(r"\x1b\[[0-9;]*m", "", box).splitlines():
        text = line.strip().strip("│╭╮╰╯|").strip()
        if set(text) <= set("─-=") or line.strip().startswith(("╭", "╰")):
            if inside:
                break
            continue
        inside.append(text)
    message = " ".join(inside).removeprefix("Error parsing ") or "the command line cannot be parsed"
    message = re.sub(r"invalid literal for int\(\) with base 10: (.*)", r"\1 is not a whole number", message)
    return re.sub(r"could not convert string to float: (.*)", r"\1 is not a number", message)


def print_completion(arguments: list[str]) -> int:
    """Let tyro write a script for a shell, from one parser of all commands that exists only for this."""
    from . import COMMANDS

    commands = _subcommands({name: _options(importlib.import_module(f".{name}", __package__)) for name in COMMANDS})
    try:
        tyro.cli(commands, prog="recperf", args=arguments, config=(tyro.conf.OmitSubcommandPrefixes,))
    except SystemExit as exit:
        return int(exit.code or 0)
    return 0


def _options(module: Any) -> Any:
    """The options of a command, by its actions or by workload where it has these."""
    from ..workloads import WORKLOADS, find

    if hasattr(module, "ACTIONS"):
        words = _subcommands({name: dataclasses.make_dataclass(name, []) for name in module.ACTIONS})
    elif getattr(module.Options, "__parameters__", ()):
        words = _subcommands({name: module.Options[find(name).config] for name in WORKLOADS})
    else:
        return module.Options
    return dataclasses.make_dataclass("Options", [("word", words)])


def _subcommands(kinds: dict[str, Any]) -> Any:
    marked = [typing.Annotated[kind, tyro.conf.subcommand(name=name)] for name, kind in kinds.items()]
    return typing.Union[tuple(marked)]  # noqa: UP007
