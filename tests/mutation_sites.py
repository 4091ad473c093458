"""The places in a file that tests/mutants.py can change, and how."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}


@dataclass(frozen=True, kw_only=True)
class Site:
    """An expression that can be changed."""

    file: str
    """Relative to the root of the checkout."""
    function: str
    """Qualified name; empty outside functions."""
    statement: tuple[int, int]
    """First and last line of the innermost statement, of a block only its head."""
    line: int
    text: str
    """The source line."""
    name: str
    """What a statement outside functions assigns; empty for others."""
    changes: tuple[tuple[str, Callable[[], str]], ...]
    """Each change as text, and what gives the whole source with it."""


class Sites(ast.NodeVisitor):
    """Collects the sites of one file."""

    def __init__(self, root: Path, file: str) -> None:
        self.file, source = file, (root / file).read_text()
        self.tree, self.lines = ast.parse(source), source.splitlines()
        self.found: list[Site] = []
        self.scopes: list[str] = []
        self.in_function, self.returned = False, ""
        self.statement, self.name = (1, 1), ""
        self.visit(self.tree)

    def generic_visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.stmt):
            self.statement = _head(node)
            if not self.in_function:
                self.name = next((name.id for name in ast.walk(node) if isinstance(name, ast.Name)), "")
        self._visit_fields(node, [name for name in node._fields if name not in ("annotation", "returns")])

    def _visit_fields(self, node: ast.AST, names: Iterable[str]) -> None:
        for name in names:
            value = getattr(node, name)
            for place, child in enumerate(value) if isinstance(value, list) else ((None, value),):
                if isinstance(child, ast.AST):
                    before = self.statement, self.name
                    self._add(node, name, place, child)
                    self.visit(child)
                    self.statement, self.name = before

    def _add(self, parent: ast.AST, name: str, place: int | None, node: ast.AST) -> None:
        changes = list(_changes(node))
        condition = (isinstance(parent, ast.If | ast.While | ast.IfExp) and name == "test") or name == "ifs"
        # A comparison and a negation have their opposite among their own changes.
        if condition and not isinstance(node, ast.Compare | ast.UnaryOp):
            changes.append(ast.UnaryOp(ast.Not(), node))
        if isinstance(parent, ast.Return):
            changes.append(_other_return(node, self.returned))
        if isinstance(node, ast.stmt):
            self.statement = _head(node)
        if not changes:
            return

        def put(new: ast.AST) -> None:
            if place is None:
                setattr(parent, name, new)
            else:
                getattr(parent, name)[place] = new

        def source(new: ast.AST) -> str:
            put(new)
            text = ast.unparse(ast.fix_missing_locations(self.tree))
            put(node)
            return text

        line = node.lineno  # type: ignore[attr-defined]
        self.found.append(
            Site(
                file=self.file,
                function=".".join(self.scopes) if self.in_function else "",
                statement=self.statement,
                line=line,
                text=self.lines[line - 1].strip(),
                name="" if self.in_function else self.name,
                changes=tuple((f"{ast.unparse(node)} → {ast.unparse(new)}", partial(source, new)) for new in changes),
            )
        )

    def _visit_scope(self, node: Any) -> None:
        function = not isinstance(node, ast.ClassDef)
        if function:
            # Defaults and decorators are evaluated where the function is defined.
            self.visit(node.args)
        outer = self.in_function, self.returned
        self.in_function |= function
        self.returned = ast.unparse(node.returns) if function and node.returns else ""
        self.scopes.append(node.name)
        self._visit_fields(node, ["body"])
        self.scopes.pop()
        self.in_function, self.returned = outer

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _visit_scope

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) != "TYPE_CHECKING":
            self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if ast.unparse(node.targets[0]) != "__all__":
            self.generic_visit(node)

    def _skip(self, node: ast.AST) -> None:
        """Text, and what only words a failure."""

    visit_JoinedStr = visit_Raise = visit_Assert = _skip


def _head(node: ast.stmt) -> tuple[int, int]:
    body = getattr(node, "body", None)
    return node.lineno, max(node.lineno, body[0].lineno - 1) if body else node.end_lineno or node.lineno


def _changes(node: ast.AST) -> Iterator[ast.AST]:
    """The node with one operator or number changed."""
    if isinstance(node, ast.Compare):
        for place, operator in enumerate(node.ops):
            for other in COMPARISONS[type(operator)]:
                new = copy.copy(node)
                new.ops = [*node.ops[:place], other(), *node.ops[place + 1 :]]
                yield new
    elif isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in ARITHMETIC:
        sides = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.value,)
        if not any(isinstance(side, ast.JoinedStr | ast.List) or _is_text(side) for side in sides):
            new = copy.copy(node)
            new.op = ARITHMETIC[type(node.op)]()
            yield new
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
        yield node.operand
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        value = node.value
        if not value:
            others: tuple[float, ...] = (value + 1,)
        elif isinstance(value, int):
            others = (value + 1, value - 1) if value <= 16 else (value * 2, value // 2)
        else:
            others = (value * 2, value / 2)
        yield from map(ast.Constant, others)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _other_return(node: ast.AST, annotation: str) -> ast.AST:
    """Another value of the annotated kind; None where that is not a number or a truth value."""
    if annotation == "bool":
        return ast.UnaryOp(ast.Not(), node)
    if annotation in ("int", "float"):
        return ast.BinOp(node, ast.Add(), ast.Constant(1))
    empty = isinstance(node, ast.Constant) and node.value is None
    return ast.Constant(0 if empty else None)
