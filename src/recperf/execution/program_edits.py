"""Writes changes of a program as edits of its source, found in its syntax tree. An edit that cannot be made surely is
left out; what results parses, and differs in nothing else. Torch-free."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .program_source import Source, with_edits

LOADER = ("torch.utils.data.DataLoader",)
OPTIMIZERS = tuple(f"torch.optim.{kind}" for kind in ("Adam", "AdamW", "SGD", "Adagrad"))
POSITIONS = {"batch_size": 1, "num_workers": 5, "pin_memory": 7}
"""Where an argument of DataLoader may also be given without its name."""
LINES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "threads": ("set_num_threads", str),
    "tf32": ("set_float32_matmul_precision", lambda _: '"high"'),
}
"""Functions of torch that a change calls once, and what they get."""
ARGUMENTS: dict[str, tuple[tuple[str, ...], Callable[[Any], dict[str, str]]]] = {
    "workers": (LOADER, lambda count: {"num_workers": str(count), "persistent_workers": str(count > 0)}),
    "batch_size": (LOADER, lambda size: {"batch_size": str(size)}),
    "pinned": (LOADER, lambda pinned: {"pin_memory": str(pinned)}),
    "optimizer": (OPTIMIZERS, lambda way: {way: "True"}),
}
"""Constructors whose arguments a change sets."""


def edited(source: str, settings: dict[str, Any]) -> tuple[str, set[str]]:
    """The source with as many of the changes as it has a place for, and the names of these."""
    made = set()
    for name, value in settings.items():
        try:
            changed = _Changed(source).change(name, value)
        except SyntaxError:
            continue
        if changed != source:
            source = changed
            made.add(name)
    return source, made


def diff(path: Path, before: str, after: str) -> str:
    """The edit of a file for `git apply`, from the working directory."""
    name = (path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path).as_posix()
    lines = difflib.unified_diff(_lines(before), _lines(after), f"a/{name}", f"b/{name}")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _lines(text: str) -> list[str]:
    """Lines with their ends; only a line feed ends one for git."""
    return [line for line in text.replace("\n", "\n\0").split("\0") if line]


class _Changed(Source):
    """A source that writes changes of settings."""

    def change(self, name: str, value: Any) -> str:
        """The text with a change; the same text where there is no place for it."""
        if name in ARGUMENTS:
            functions, arguments = ARGUMENTS[name]
            return self._with_arguments(functions, arguments(value))
        if name in LINES:
            function, argument = LINES[name]
            return self._with_call(function, argument(value))
        return self._with_compiled_model() if name == "compile" else self.text

    def _with_arguments(self, functions: Iterable[str], arguments: dict[str, str]) -> str:
        """The text with arguments of calls: in place of those that they have, or after their last one."""
        edits: list[tuple[tuple[int, int], str]] = []
        for call in self.calls(*functions):
            if any(isinstance(one, ast.Starred) for one in call.args) or any(not one.arg for one in call.keywords):
                continue
            ends = [self.span(one)[1] for one in (*call.args, *(one.value for one in call.keywords))]
            close, added = self.span(call)[1] - 1, []
            for name, value in arguments.items():
                node = ast.parse(value, mode="eval").body
                if has := next((one for one in call.keywords if one.arg == name), None):
                    edits.append((self.span(has.value), value))
                    has.value = node
                elif (place := POSITIONS.get(name, len(call.args))) < len(call.args):
                    edits.append((self.span(call.args[place]), value))
                    call.args[place] = node
                else:
                    added.append(f"{name}={value}")
                    call.keywords.append(ast.keyword(name, node))
            if added:
                at = max(ends, default=close)
                at += len(self.text[at:close]) - len(self.text[at:close].lstrip(" )"))
                edits.append(((at, at), ("" if not ends else ", ") + ", ".join(added)))
        text = self.text
        for (begin, end), value in sorted(edits, reverse=True):
            text = text[:begin] + value + text[end:]
        return text if _parsed(text) == ast.unparse(self.tree) else self.text

    def _with_call(self, function: str, argument: str) -> str:
        """The text with one call of a function of torch, after the imports; where it has one, with this argument."""
        if calls := self.calls(f"torch.{function}"):
            begin, end = self.span(calls[0].args[0]) if len(calls[0].args) == 1 else (0, 0)
            return self.text[:begin] + argument + self.text[end:] if end and len(calls) == 1 else self.text
        torch = next((name for name, full in self.names.items() if full == "torch"), None)
        imports = [node for node in self.tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        return self._after(imports[-1], f"{torch}.{function}({argument})") if torch else self.text

    def _with_compiled_model(self) -> str:
        """The text with a compiled model: the one whose parameters an optimizer gets."""
        for node in ast.walk(self.tree):
            call = node.value if isinstance(node, ast.Assign) else None
            if isinstance(call, ast.Call) and (self.dotted(call.func) or "").startswith("torch.optim.") and call.args:
                got = call.args[0]
                if isinstance(got, ast.Call) and isinstance(got.func, ast.Attribute) and got.func.attr == "parameters":
                    if any(self.class_of(one) for one in self.bound.get("compile", ())):
                        # A class has a method of this name that may do something else.
                        return self.text
                    return self._after(node, f"{ast.unparse(got.func.value)}.compile()")
        return self.text

    def _after(self, statement: ast.AST, line: str) -> str:
        """The text with a further statement after this one, on a line of its own."""
        text = with_edits(self.text, [self.after(statement, line)])
        indent = self.indent(statement)
        before, after = ast.unparse(self.tree).splitlines(), (_parsed(text) or "").splitlines()
        changed = [row for row in difflib.ndiff(before, after) if row[0] in "+-"]
        only = [f"+ {indent}{_parsed(line)}".split()]
        return text if [row.split() for row in changed] == only else self.text


def _parsed(text: str) -> str | None:
    """The text as its syntax tree alone tells it."""
    try:
        return ast.unparse(ast.parse(text))
    except SyntaxError:
        return None
