"""The help of a command: the options that people use, or with --help-all every field. Plain text, as wide as the
terminal; nothing is imported for it that the options themselves do not need."""

from __future__ import annotations

import ast
import dataclasses
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
from typing import Any

from ..units import width

SWITCHES = {"-h", "--help", "--help-all"}
USED = (
    "seed", "seeds", "train.epochs", "train.batch-size", "train.learning-rate", "train.max-steps", "train.device",
    "data.split", "data.path", "model.dim", "target.beat", "target.auc", "tables.placement", "mlperf.log",
)  # fmt: skip
"""Fields of a workload's config that --help shows; the others are for --help-all."""
RARE = (
    "allow-change", "restarts", "confirm", "confirm-seconds", "startup-seconds", "mtbf-hours", "served",
    "checkpoint-seconds", "restart-seconds", "ranks-per-node", "global-batch", "rank-batch", "history", "quiet",
    "header", "delimiter", "memory-mib", "negatives-by", "skip-bad", "scale", "min-count", "holdout-by",
)  # fmt: skip
"""Options of commands that only --help-all shows."""
COLUMN = 26
"""Where the texts of options begin."""


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
