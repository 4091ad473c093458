"""Rules over the source of a program: what it computes by several operators, or row by row, where torch has one. An
activation is recognised by its values, not by its name. Torch-free."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

from .program_source import Edit, Source
from .source_findings import Finding

POINTS = (-3.1, -1.7, -0.6, -0.05, 0.3, 1.1, 2.4)
"""At which two activations are compared."""
EQUAL = 1e-9
OPERATORS: dict[type, Callable[[float, float], float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}  # fmt: skip
FUNCTIONS: dict[str, Callable[..., float]] = {
    "tanh": math.tanh, "erf": math.erf, "sqrt": math.sqrt, "pow": math.pow, "exp": math.exp, "square": lambda x: x * x,
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)), "softplus": lambda x: math.log1p(math.exp(x)),
}  # fmt: skip
"""Functions of torch, numpy and math, or methods of tensors, by their last names."""
MODULES = ("torch.", "math.", "numpy.", "torch.nn.functional.")
ACTIVATIONS: dict[str, Callable[[float], float]] = {
    'gelu({}, approximate="tanh")': lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "gelu({})": lambda x: 0.5 * x * (1 + math.erf(x / math.sqrt(2))),
    "silu({})": lambda x: x / (1 + math.exp(-x)),
    "mish({})": lambda x: x * math.tanh(math.log1p(math.exp(x))),
}
"""What torch.nn.functional computes by one operator."""


def written_activations(source: Source) -> Iterator[Finding]:
    """Activations that are written as a formula."""
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.BinOp) or isinstance(source.parents[node], ast.BinOp) or not source.in_loop(node):
            continue
        variable = _variable(source, node)
        if variable is None:
            continue
        for call, function in ACTIVATIONS.items():
            if all(_is_near(_value(source, node, variable, x), function(x)) for x in POINTS):
                text = f"torch.nn.functional.{call.format(variable)}"
                edits = [source.after_imports("import torch.nn.functional"), source.replaced(node, text)]
                yield Finding("activation", [node], "An activation is computed by several operators", text, edits)


def _variable(source: Source, node: ast.AST) -> str | None:
    """The only name in a formula that is neither a module nor a function."""
    names = {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and one.id not in source.names}
    calls = any(isinstance(one, ast.Call) for one in ast.walk(node))
    return names.pop() if len(names) == 1 and calls else None


def _is_near(value: float | None, other: float) -> bool:
    return value is not None and abs(value - other) <= EQUAL * max(1.0, abs(other))


def _value(source: Source, node: ast.AST, variable: str, x: float) -> float | None:
    """The value of a formula at a point; None where it is not known."""
    try:
        return _evaluated(source, node, variable, x)
    except (ArithmeticError, ValueError, LookupError, TypeError):
        return None


def _evaluated(source: Source, node: Any, variable: str, x: float) -> float:
    def at(one: Any) -> float:
        return _evaluated(source, one, variable, x)

    if isinstance(node, ast.Name) and node.id == variable:
        return x
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return float(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -at(node.operand)
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](at(node.left), at(node.right))
    name = source.dotted(node) or ""
    if name in ("math.pi", "numpy.pi", "torch.pi"):
        return math.pi
    called = node.func if isinstance(node, ast.Call) and not node.keywords else None
    function = FUNCTIONS[getattr(called, "attr", getattr(called, "id", ""))]
    if called is not None and any((source.dotted(called) or "").startswith(one) for one in MODULES):
        return function(*map(at, node.args))
    # A method of a tensor; math has none.
    return function(at(called.value), *map(at, node.args))  # type: ignore[union-attr]


def written_norms(source: Source) -> Iterator[Finding]:
    """A layer norm of four statements: mean, variance, their quotient, weight and bias."""
    for function in (node for node in ast.walk(source.tree) if isinstance(node, ast.FunctionDef)):
        for mean, variance, quotient, result in zip(*(function.body[at:] for at in range(4))):
            parts = [one.value for one in (mean, variance, quotient) if _name(one)]
            value = result.value if isinstance(result, ast.Assign | ast.Return) else None
            if len(parts) != 3 or not isinstance(value, ast.BinOp) or not isinstance(value.op, ast.Add):
                continue
            u, s, y = (_name(one) for one in (mean, variance, quotient))
            x = ast.unparse(parts[0]).removesuffix(".mean(-1, keepdim=True)")
            centred = f"({x} - {u})"
            variances = (f"{centred}.pow(2).mean(-1, keepdim=True)", f"({centred} ** 2).mean(-1, keepdim=True)",
                         f"{centred}.square().mean(-1, keepdim=True)")  # fmt: skip
            top = ast.unparse(parts[2])
            begin = f"{centred} / torch.sqrt({s} + "
            weight, bias = _factor(value.left, str(y)), source.text_of(value.right)
            fits = x.isidentifier() and ast.unparse(parts[1]) in variances and top.startswith(begin)
            if not (fits and weight and source.names.get("torch") == "torch" and y not in bias.split()):
                continue
            eps = top.removeprefix(begin).removesuffix(")")
            text = f"torch.nn.functional.layer_norm({x}, {x}.shape[-1:], {weight}, {bias}, {eps})"
            reads = [len(source.reads(str(name), function)) for name in (u, s)]
            if reads != [2, 1]:
                continue
            edits = [source.after_imports("import torch.nn.functional"), source.replaced(value, text),
                     Edit(source.path, source.span(mean)[0], source.span(result)[0], "")]  # fmt: skip
            yield Finding("layer norm", [mean, variance, quotient, result], "A layer norm is computed by several "
                          "operators", text, edits)  # fmt: skip


def _name(statement: ast.stmt) -> str | None:
    plain = isinstance(statement, ast.Assign) and len(statement.targets) == 1
    target = statement.targets[0] if plain else None  # type: ignore[attr-defined]
    return target.id if isinstance(target, ast.Name) else None


def _factor(node: ast.expr, name: str) -> str:
    """The other factor of a product with this name."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        left, right = ast.unparse(node.left), ast.unparse(node.right)
        return left if right == name else right if left == name else ""
    return ""


def stacked_windows(source: Source) -> Iterator[Finding]:
    """Windows of one array that are cut out one by one and stacked: one index takes all of them."""
    for stack in source.calls("torch.stack"):
        rows = stack.args[0] if len(stack.args) == 1 and not stack.keywords else None
        if not isinstance(rows, ast.ListComp) or len(rows.generators) != 1 or not source.in_loop(stack):
            continue
        loop = rows.generators[0]
        name = loop.target.id if isinstance(loop.target, ast.Name) else ""
        uses = [one for one in ast.walk(rows.elt) if isinstance(one, ast.Name) and one.id == name]
        cuts = [
            one for one in ast.walk(rows.elt) if isinstance(one, ast.Subscript) and isinstance(one.slice, ast.Slice)
        ]
        if loop.ifs or len(cuts) != 1 or not isinstance(cuts[0].slice, ast.Slice) or cuts[0].slice.step:
            continue
        low, high = cuts[0].slice.lower, cuts[0].slice.upper
        if low is None or high is None or not all(_adds_to(one, name) for one in (low, high)) or len(uses) != 2:
            continue
        torch = ast.unparse(stack.func).rpartition(".")[0]
        ids = source.text_of(loop.iter)
        whole = ids if ids.isidentifier() else f"({ids})"
        window = f"{torch}.arange({_without(low, name)}, {_without(high, name)})"
        index = f"{torch}.as_tensor({whole})[:, None] + {window}"
        if any(source.is_call(one, "torch.from_numpy", "torch.tensor") for one in ast.walk(rows.elt)):
            index = f"({index}).numpy()"
        begin, end = source.span(cuts[0].slice)
        first = source.span(rows.elt)[0]
        text = source.text_of(rows.elt)
        text = text[: begin - first] + index + text[end - first :]
        seen = "Windows of one array are cut out one by one"
        yield Finding("windows", [stack], seen, text, [source.replaced(stack, text)])


def _adds_to(node: ast.expr, name: str) -> bool:
    """Whether an expression is a name, or sums to which it belongs."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return sum(_adds_to(one, name) for one in (node.left, node.right)) == 1
    return isinstance(node, ast.Name) and node.id == name


def _without(node: ast.expr, name: str) -> str:
    """A sum without this name."""

    class Zero(ast.NodeTransformer):
        def visit_Name(self, one: ast.Name) -> ast.AST:
            return ast.Constant(0) if one.id == name else one

        def visit_BinOp(self, one: ast.BinOp) -> ast.AST:
            self.generic_visit(one)
            sides = [side for side in (one.left, one.right) if not (isinstance(side, ast.Constant) and side.value == 0)]
            return one if len(sides) == 2 else sides[0] if sides else ast.Constant(0)

    return ast.unparse(Zero().visit(ast.parse(ast.unparse(node), mode="eval").body))


def unused_weights(source: Source) -> Iterator[Finding]:
    """Attention that also returns its weights, which nothing reads: they keep it from a fused kernel."""
    made = [node for node in ast.walk(source.tree) if source.is_call(node, "torch.nn.MultiheadAttention")]
    lists = {
        ast.unparse(call.func.value)
        for call in ast.walk(source.tree)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "append"
        and len(call.args) == 1 and (call.args[0] in made or source.value_of(call.args[0]) in made)
    }  # fmt: skip
    for assign in (node for node in ast.walk(source.tree) if isinstance(node, ast.Assign)):
        call, target = assign.value, assign.targets[0]
        if not isinstance(call, ast.Call) or not isinstance(target, ast.Tuple) or len(target.elts) != 2:
            continue
        of_list = isinstance(call.func, ast.Subscript) and ast.unparse(call.func.value) in lists
        second = target.elts[1]
        function = source.function_of(assign)
        if not (of_list or source.value_of(call.func) in made) or not isinstance(second, ast.Name) or not call.args:
            continue
        given = {one.arg for one in call.keywords}
        if source.reads(second.id, function) or "need_weights" in given or None in given:
            continue
        last = source.span(call)[1] - 1
        inside = source.text[source.span(call.func)[1] : last].rstrip()
        comma = "" if inside.endswith(",") else ", "
        at = source.span(call.func)[1] + len(inside)
        edit = Edit(source.path, at, at, f"{comma}need_weights=False")
        change = f"{ast.unparse(call.func)}(..., need_weights=False)"
        yield Finding("attention", [call], "Attention returns its weights, which nothing reads", change, [edit])


RULES = (written_activations, written_norms, stacked_windows, unused_weights)
