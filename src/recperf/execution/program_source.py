"""The source of a program: its syntax tree, what its names mean, and edits of its text. Torch-free."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any, NamedTuple

FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
STEPPING = ("backward", "step")
"""Methods whose calls an edit must leave where they are."""
CHANGING = ("append", "extend", "insert", "pop", "remove", "clear", "update", "setdefault", "sort", "fill", "put")
"""Methods that change their object, beside those of tensors, whose names end in an underscore."""


class Edit(NamedTuple):
    """New text for a part of a file."""

    file: str
    begin: int
    """In characters."""
    end: int
    text: str


def with_edits(text: str, edits: Iterable[Edit]) -> str:
    """The text of a file with edits of it, each once; where two overlap, the one that begins later is left out."""
    result, at = "", 0
    for edit in sorted(set(edits), key=lambda edit: (edit.begin, edit.end)):
        if edit.begin >= at:
            result += text[at : edit.begin] + edit.text
            at = edit.end
    return result + text[at:]


class Source:
    """The text of a file and its syntax tree. Raises SyntaxError where it is no Python."""

    def __init__(self, text: str, path: str = "") -> None:
        self.path, self.text = path, text
        self.tree = ast.parse(text)
        self.names = dict(_imports(self.tree))
        self._lines = text.split("\n")
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line) + 1)

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        return {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """What a node is inside of, innermost first."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def function_of(self, node: ast.AST) -> Any:
        """The function that a node is in, or the whole file."""
        return next((one for one in self.above(node) if isinstance(one, FUNCTIONS)), self.tree)

    def statement_of(self, node: ast.AST) -> ast.stmt:
        return next(one for one in (node, *self.above(node)) if isinstance(one, ast.stmt))

    def class_of(self, node: ast.AST) -> ast.ClassDef | None:
        return next((one for one in self.above(node) if isinstance(one, ast.ClassDef)), None)

    def in_loop(self, node: ast.AST) -> bool:
        """Whether a node may run in every step: it is in a function, or in the body of a loop."""
        above = list(self.above(node))
        return any(isinstance(one, FUNCTIONS | ast.For | ast.While) for one in above)

    def calls(self, *functions: str) -> list[ast.Call]:
        """Calls of functions by their full names; a name that ends in a dot means all that is in it."""
        calls = (node for node in ast.walk(self.tree) if isinstance(node, ast.Call))
        return [call for call in calls if self.is_call(call, *functions)]

    def is_call(self, node: ast.AST | None, *functions: str) -> bool:
        name = self.dotted(node.func) if isinstance(node, ast.Call) else None
        return name is not None and any(name.startswith(one) if one[-1] == "." else name == one for one in functions)

    def dotted(self, node: ast.AST) -> str | None:
        """The full name of a function, as far as imports tell it; a built-in one has its own name."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id) or (node.id if self._is_builtin(node.id) else None)
        if isinstance(node, ast.Attribute) and (before := self.dotted(node.value)):
            return f"{before}.{node.attr}"
        return None

    def _is_builtin(self, name: str) -> bool:
        return hasattr(builtins, name) and name not in self.bound

    @cached_property
    def bound(self) -> dict[str, list[ast.AST]]:
        """Where names and attributes of `self` get values, by their text."""
        places: dict[str, list[ast.AST]] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                places.setdefault(ast.unparse(node), []).append(node)
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                places.setdefault(node.name, []).append(node)
            elif isinstance(node, ast.arg):
                places.setdefault(node.arg, []).append(node)
        return places

    def value_of(self, node: ast.AST, function: ast.AST | None = None) -> ast.expr | None:
        """The only value that a name or an attribute of `self` gets, in a function or in the file; None where there
        are several."""
        if not isinstance(node, ast.Name | ast.Attribute):
            return None
        places = self.bound.get(ast.unparse(node), [])
        if function is not None and isinstance(node, ast.Name):
            places = [one for one in places if self.function_of(one) is function] or places
        statement = self.parents.get(places[0]) if len(places) == 1 else None
        if isinstance(statement, ast.withitem):
            return statement.context_expr
        if isinstance(statement, ast.Tuple) and isinstance(assign := self.parents[statement], ast.Assign):
            values = assign.value.elts if isinstance(assign.value, ast.Tuple) else []
            return values[statement.elts.index(places[0])] if len(values) == len(statement.elts) else None  # type: ignore[arg-type]
        return statement.value if isinstance(statement, ast.Assign) and statement.targets == places else None

    def function(self, node: ast.AST) -> ast.FunctionDef | None:
        """The function of this file that a name means."""
        places = self.bound.get(node.id, []) if isinstance(node, ast.Name) else []
        return places[0] if len(places) == 1 and isinstance(places[0], ast.FunctionDef) else None

    def reads(self, name: str, function: ast.AST) -> list[ast.Name]:
        """Where a function reads a name."""
        names = (node for node in ast.walk(function) if isinstance(node, ast.Name))
        return [node for node in names if node.id == name and isinstance(node.ctx, ast.Load)]

    def changed_in_place(self, name: str, function: ast.AST) -> bool:
        """Whether a function may change the object that a name means."""
        for read in self.reads(name, function):
            parent = self.parents[read]
            whole: ast.AST = read
            while isinstance(parent, ast.Attribute | ast.Subscript) and parent.value is whole:
                if isinstance(parent.ctx, ast.Store | ast.Del):
                    return True
                if isinstance(parent, ast.Attribute) and (parent.attr in CHANGING or _in_place(parent.attr)):
                    return True
                whole, parent = parent, self.parents[parent]
        return any(isinstance(self.parents[one], ast.AugAssign) for one in self.bound.get(name, ()))

    def span(self, node: Any) -> tuple[int, int]:
        """Where a node begins and ends in the text, in characters; syntax trees count bytes of UTF-8."""

        def at(line: int, column: int) -> int:
            return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

        return at(node.lineno, node.col_offset), at(node.end_lineno, node.end_col_offset)

    def text_of(self, node: ast.AST) -> str:
        begin, end = self.span(node)
        return self.text[begin:end]

    def indent(self, statement: ast.AST) -> str:
        """The white space before a statement; all that is before it, where it shares its line with another."""
        return self.text[: self.span(statement)[0]].rpartition("\n")[2]

    def replaced(self, node: ast.AST, text: str) -> Edit:
        return Edit(self.path, *self.span(node), text)

    def before(self, statement: ast.AST, *lines: str) -> Edit:
        """Further statements before this one, which begins its line."""
        begin = self.span(statement)[0]
        return Edit(self.path, begin, begin, "".join(f"{line}\n{self.indent(statement)}" for line in lines))

    def after(self, statement: ast.AST, *lines: str) -> Edit:
        """Further statements after this one, on lines of their own."""
        at = self.span(statement)[1]
        end = at + len(self.text[at:].partition("\n")[0])
        return Edit(self.path, end, end, "".join(f"\n{self.indent(statement)}{line}" for line in lines))

    def after_imports(self, *lines: str) -> Edit:
        """Statements after the imports at the top of the file, or before its first statement but a docstring."""
        imports = [node for node in self.tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        if imports:
            return self.after(imports[-1], *lines)
        if not self.tree.body:
            return Edit(self.path, 0, 0, "".join(f"{line}\n" for line in lines))
        first = self.tree.body[0]
        is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        return self.after(first, *lines) if is_docstring else self.before(first, *lines)

    def alone(self, statement: ast.stmt) -> bool:
        """Whether a statement has its lines for itself."""
        begin, end = self.span(statement)
        after = self.text[end:].partition("\n")[0].strip()
        return not self.text[:begin].rpartition("\n")[2].strip() and (not after or after.startswith("#"))


def keeps(before: str, after: str) -> bool:
    """Whether an edited text parses and has every `return`, and every call that ends a step or begins a backward pass,
    inside the same loops and branches as before. Functions that are new do not count."""
    old, new = ast.parse(before), None
    try:
        new = ast.parse(after)
    except SyntaxError:
        return False
    names = {node.name for node in ast.walk(old) if isinstance(node, ast.FunctionDef)}
    new.body = [node for node in new.body if not isinstance(node, ast.FunctionDef) or node.name in names]
    return _structure(old) == _structure(new)


def _structure(tree: ast.AST, inside: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    result = []
    if isinstance(tree, ast.Return):
        result.append((*inside, "return"))
    elif isinstance(tree, ast.Call) and isinstance(tree.func, ast.Attribute) and tree.func.attr in STEPPING:
        result.append((*inside, ast.unparse(tree.func)))
    kinds = (ast.If, ast.For, ast.While, ast.Try, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    if isinstance(tree, kinds):
        header: Any = getattr(tree, "test", None) or getattr(tree, "target", None)
        inside = (*inside, f"{type(tree).__name__} {getattr(tree, 'name', '')}{ast.unparse(header) if header else ''}")
    for child in ast.iter_child_nodes(tree):
        result += _structure(child, inside)
    return result


def _in_place(name: str) -> bool:
    return name.endswith("_") and not name.startswith("_")


def _imports(tree: ast.AST) -> Iterable[tuple[str, str]]:
    """What names mean that are imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                yield (one.asname, one.name) if one.asname else (one.name.split(".")[0],) * 2
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for one in node.names:
                yield one.asname or one.name, f"{node.module}.{one.name}"
