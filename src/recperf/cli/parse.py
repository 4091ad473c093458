"""tyro with our own help and error messages. Help shows the options that people use, or with --help-all every field; a
misspelt flag suggests the right one, a bad value names its flag.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib
import inspect
import re
import sys
import textwrap
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from ..errors import UsageError, closest, did_you_mean
from ..terminal import print_text
from ..units import width

T = TypeVar("T")
SWITCHES = {"-h", "--help", "--help-all"}
USED = (
    "seed", "seeds", "train.epochs", "train.batch-size", "train.learning-rate", "train.max-steps", "train.device",
    "data.split", "data.path", "model.dim", "target.beat", "target.auc", "tables.placement", "mlperf.log",
)  # fmt: skip
"""Fields of a workload's config that --help shows; the others are for --help-all."""
RARE = (
    "allow-change", "restarts", "confirm", "confirm-seconds", "startup-seconds", "mtbf-hours", "served",
    "checkpoint-seconds", "restart-seconds", "global-batch", "rank-batch", "history", "quiet",
    "header", "delimiter", "memory-mib", "negatives-by", "skip-bad", "scale", "min-count", "holdout-by",
    "from-diagnosis",
)  # fmt: skip
"""Options of commands that only --help-all shows."""
COLUMN = 26
"""Where the texts of options begin."""


@dataclass(frozen=True, kw_only=True)
class JsonOption:
    json: bool = False
    """Print one JSON object; all else goes to stderr."""


@dataclass(frozen=True, kw_only=True)
class OutputOptions(JsonOption):
    quiet: bool = False
    """Print errors only."""


@dataclass(frozen=True, kw_only=True)
class ForceOption:
    force: bool = False
    """Replace the output file even if recperf did not write it."""


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
    import tyro

    def refuse(failure: Any) -> None:
        # With an unknown option before it, tyro complains about the positional argument.
        names = {re.sub(r"(^|\.)no-", r"\1", flag.name) for flag in flags(kind)}
        unknown = [one for one in arguments if one.startswith("--") and _name_of(one) not in names]
        if unknown:
            raise unknown_option(unknown, [f"--{flag.name}" for flag in flags(kind)], prog)
        raise UsageError(_message(failure), fix=f"{prog} --help")

    # The module is private to tyro. Where a release has none, tyro prints its own message.
    hooks = getattr(tyro, "_errors", None)
    defaults: dict[str, Any] = {} if default is None else {"default": default}
    with hooks.on_parse_error(refuse) if hooks else contextlib.nullcontext():
        options, unknown = tyro.cli(
            kind,
            prog=prog,
            description=description,
            args=arguments,
            return_unknown_args=True,
            config=(tyro.conf.CascadeSubcommandArgs,),
            **defaults,
        )
    if unknown:
        raise unknown_option(unknown, [f"--{flag.name}" for flag in flags(kind)], prog)
    return typing.cast(T, options)


def _name_of(argument: str) -> str:
    """The name of the field that `--group.no-name=value` sets."""
    return re.sub(r"(^|\.)no-", r"\1", argument.removeprefix("--").partition("=")[0].replace("_", "-"))


def unknown_option(arguments: list[str], known: list[str], prog: str) -> UsageError:
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


def _message(failure: Any) -> str:
    """The message of a parse error that tyro describes."""
    if hasattr(failure, "missing_arguments"):
        names = [one.arg.display_name() for one in failure.missing_arguments]
        return f"missing: {', '.join(name if name.startswith('-') else name.upper() for name in names)}"
    argument = getattr(failure, "argument", None)
    name = argument.display_name() if argument else ""
    if hasattr(failure, "choices"):
        return f"invalid choice {failure.value!r} for argument {name!r}. Expected one of {failure.choices}."
    if not hasattr(failure, "message"):
        return f"{name} needs a value" if name else "the command line cannot be parsed"
    message = failure.message.partition("\n")[0]
    message = re.sub(r"invalid literal for int\(\) with base 10: (.*)", r"\1 is not a whole number", message)
    message = re.sub(r"could not convert string to float: (.*)", r"\1 is not a number", message)
    return f"{name}: {message}" if name else message


@dataclass(frozen=True)
class Flag:
    """An option of a command, or an argument without a name."""

    name: str
    """Without dashes, with the groups that it is in: `train.batch-size`."""
    hint: Any
    default: Any
    text: str
    positional: bool = False
    metavar: str = ""
    of_config: bool = False

    @property
    def usage(self) -> str:
        """`--train.epochs INT`."""
        values = self.metavar or _values(self.hint)
        if self.positional:
            return values if self.metavar else self.name.upper()
        if self.hint is bool:
            group, _, name = self.name.rpartition(".")
            return f"--{group}{'.' if group else ''}{'[no-]' if self.default is True else ''}{name}"
        return f"--{self.name} {values}"

    @property
    def shown(self) -> bool:
        return self.name in USED if self.of_config else self.name not in RARE


def flags(kind: Any, default: Any = None, prefix: str = "", of_config: bool = False) -> Iterator[Flag]:
    """Every flag of a dataclass, nested ones with their prefix."""
    origin = typing.get_origin(kind) or kind
    hints = typing.get_type_hints(origin, include_extras=True)
    bound = dict(zip(getattr(origin, "__parameters__", ()), typing.get_args(kind)))
    texts = field_texts(origin)
    for item in dataclasses.fields(origin):
        hint, marks = hints[item.name], []
        if typing.get_origin(hint) is typing.Annotated:
            hint, *marks = typing.get_args(hint)
        generic, hint = hint in bound, bound.get(hint, hint)
        value = getattr(default, item.name, None if item.default is dataclasses.MISSING else item.default)
        if dataclasses.is_dataclass(hint):
            inside = prefix if marks else f"{prefix}{item.name.replace('_', '-')}."
            yield from flags(hint, value, inside, of_config or generic)
            continue
        named = {key: getattr(mark, key, None) for mark in marks for key in ("name", "metavar")}
        yield Flag(
            name=f"{prefix}{named.get('name') or item.name}".replace("_", "-"),
            hint=hint,
            default=value,
            text=texts.get(item.name, ""),
            positional=any("positional" in repr(mark).lower() for mark in marks),
            metavar=named.get("metavar") or "",
            of_config=of_config,
        )


@cache
def field_texts(kind: type) -> dict[str, str]:
    """The docstrings below the fields of a dataclass and of those that it extends."""
    texts: dict[str, str] = {}
    for one in filter(dataclasses.is_dataclass, reversed(kind.__mro__)):
        tree = _parsed(one.__module__)
        body = next((n.body for n in tree.body if isinstance(n, ast.ClassDef) and n.name == one.__name__), [])
        for field, after in zip(body, body[1:]):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(after, ast.Expr):
                texts[field.target.id] = " ".join(str(ast.literal_eval(after.value)).split())
    return texts


@cache
def _parsed(module: str) -> ast.Module:
    return ast.parse(inspect.getsource(sys.modules[module]))


def help_text(kind: Any, prog: str, description: str, default: Any, *, everything: bool) -> str:
    """The options of a command in groups, each with a sentence; with `everything` all of them with all that is said."""
    known = list(flags(kind, default))
    positional = " ".join(flag.usage for flag in known if flag.positional)
    lines = [f"usage: {prog} {positional} [OPTIONS]".replace("  ", " "), ""]
    for paragraph in description.split("\n\n"):
        lines += [*textwrap.wrap(paragraph, width()), ""]
    groups: dict[str, list[Flag]] = {}
    for flag in known:
        if everything or flag.shown:
            group = "arguments" if flag.positional else "config" if flag.of_config else "options"
            if everything and flag.of_config:
                group = flag.name.rpartition(".")[0] or group
            groups.setdefault(group, []).append(flag)
    for group, listed in groups.items():
        lines += [f"{group}:", *(line for flag in listed for line in _lines(flag, everything)), ""]
    hidden = sum(not flag.shown for flag in known)
    return "\n".join([*lines, f"{prog} --help-all lists {hidden} more." if hidden and not everything else ""]).rstrip()


def _lines(flag: Flag, everything: bool) -> list[str]:
    text = flag.text
    if not everything:
        # The first sentence, with the one that tells the default.
        first, *others = re.split(r"(?<=\.) ", text)
        default = next((sentence for sentence in others if sentence.startswith("Default")), "")
        text = f"{first} {default}" if default else first.removesuffix(".")
    if everything and (values := _names(flag.hint)) and not flag.metavar and any(value not in text for value in values):
        text += f"{'.' * (not text.endswith('.'))} Values: {', '.join(values)}."
    shown = flag.default or (flag.default == 0 and flag.default is not False)
    if shown and flag.default is not True and "efault" not in text:
        text += f" (default {_shown(flag.default)})" if not text.endswith(".") else f" Default: {_shown(flag.default)}."
    before = f"  {flag.usage}"
    if len(before) > COLUMN - 2:
        return [before, *textwrap.wrap(text, width(), initial_indent=" " * COLUMN, subsequent_indent=" " * COLUMN)]
    wrapped = textwrap.wrap(text, width(), initial_indent=f"{before:<{COLUMN}}", subsequent_indent=" " * COLUMN)
    return wrapped or [before]


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


def _values(hint: Any) -> str:
    """What follows a flag: a type, or the values that are allowed."""
    kinds = [kind for kind in typing.get_args(hint) if kind is not types.NoneType]
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return "|".join(dict.fromkeys(_values(kind) for kind in kinds))
    if typing.get_origin(hint) is typing.Literal:
        return "NAME" if _names(hint) else "|".join(map(str, typing.get_args(hint)))
    if typing.get_origin(hint) in (tuple, list):
        return f"{_values(kinds[0])} ..."
    if hint in (int, float, Path):
        return {int: "INT", float: "NUMBER", Path: "PATH"}[hint]
    return "TEXT"


def _names(hint: Any) -> list[str]:
    """The allowed values that are too long to follow a flag."""
    if typing.get_origin(hint) is not typing.Literal:
        return [name for kind in typing.get_args(hint) for name in _names(kind)]
    values = [str(value) for value in typing.get_args(hint)]
    return values if len("|".join(values)) > 24 else []


def print_completion(arguments: list[str]) -> int:
    """Let tyro write a script for a shell, from one parser of all commands that exists only for this."""
    import tyro

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
    import tyro

    marked = [typing.Annotated[kind, tyro.conf.subcommand(name=name)] for name, kind in kinds.items()]
    return typing.Union[tuple(marked)]  # noqa: UP007
