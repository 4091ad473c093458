"""Rules over the source of a program: how its model computes. Torch-free."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from .program_source import Edit, Source
from .source_findings import Finding

ONE_HOT = "torch.nn.functional.one_hot"
CONVERSIONS = {"float", "double", "half", "bfloat16", "to", "type", "type_as"}
CELLS = {"torch.nn.GRUCell": "GRU", "torch.nn.LSTMCell": "LSTM", "torch.nn.RNNCell": "RNN"}
DOUBLE = {"torch.float64", "torch.double", "numpy.float64", "numpy.double"}
FLOATS = ("numpy.random.rand", "numpy.random.randn", "numpy.random.random", "numpy.random.normal",
          "numpy.random.uniform", "numpy.zeros", "numpy.ones", "numpy.linspace", "numpy.full")  # fmt: skip
"""Functions of numpy that return float64 where nothing else is asked for."""


def one_hot_products(source: Source) -> Iterator[Finding]:
    """Rows of a matrix that a product with a one-hot vector selects."""
    for call in source.calls(ONE_HOT):
        if not call.args or not isinstance(call.func, ast.Attribute):
            continue
        ids, embedding = source.text_of(call.args[0]), f"{source.text_of(call.func.value)}.embedding"
        whole = _converted(source, call)
        assign = source.parents[whole]
        edits: list[Edit] = []
        uses: list[ast.AST] = [whole]
        if isinstance(assign, ast.Assign) and isinstance(assign.targets[0], ast.Name):
            name = assign.targets[0].id
            function = source.function_of(call)
            uses = [_converted(source, read) for read in source.reads(name, function)]
            edits.append(source.replaced(whole, ids))
            ids = name if source.value_of(assign.targets[0], function) is whole else ""
        selected = [_selected(source, use, ids, embedding) for use in uses]
        nodes: list[ast.AST] = [call, *(node for node, _ in filter(None, selected))]
        seen = "A product with one-hot vectors selects rows"
        change = f"{embedding}({ids or 'ids'}, weight)"
        if ids and selected and all(selected):
            edits += [source.replaced(*one) for one in selected if one]
            yield Finding("one-hot", nodes, seen, change, edits)
        else:
            yield Finding("one-hot", nodes, seen, change, reason="its product was not recognised")


def _converted(source: Source, node: ast.AST) -> ast.AST:
    """A value with the conversions of its type."""
    while isinstance(method := source.parents[node], ast.Attribute) and method.attr in CONVERSIONS:
        node = source.parents[method]
    return node


def _selected(source: Source, use: ast.AST, ids: str, embedding: str) -> tuple[ast.AST, str] | None:
    """The product that a one-hot value enters, and the rows that take its place."""
    parent = source.parents[use]
    if isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.MatMult) and parent.left is use:
        return parent, f"{embedding}({ids}, {source.text_of(parent.right)})"
    if not isinstance(parent, ast.Call) or use not in parent.args or parent.args[0] is not use:
        return None
    if source.is_call(parent, "torch.matmul", "torch.mm") and len(parent.args) == 2:
        return parent, f"{embedding}({ids}, {source.text_of(parent.args[1])})"
    layer = source.value_of(parent.func)
    if isinstance(layer, ast.Call) and source.is_call(layer, "torch.nn.Linear") and len(parent.args) == 1:
        name = source.text_of(parent.func)
        biases = [one.value for one in layer.keywords if one.arg == "bias"] + layer.args[2:]
        plain = all(isinstance(one, ast.Constant) for one in biases)
        with_bias = not biases or (isinstance(biases[0], ast.Constant) and biases[0].value is True)
        text = f"{embedding}({ids}, {name}.weight.t())"
        return (parent, f"({text} + {name}.bias)" if with_bias else text) if plain else None
    return None


def cells_in_loops(source: Source) -> Iterator[Finding]:
    """A recurrent cell that a loop of Python calls for every time step."""
    for loop in (node for node in ast.walk(source.tree) if isinstance(node, ast.For)):
        calls = [one for one in ast.walk(loop) if isinstance(one, ast.Call)]
        cells = [(call, made) for call in calls if source.is_call(made := source.value_of(call.func), *CELLS)]
        if len(cells) != 1:
            continue
        call, made = cells[0]
        assert isinstance(made, ast.Call)
        kind = CELLS[source.dotted(made.func) or ""]
        seen = f"A loop of Python calls nn.{kind}Cell for every time step"
        change = f"nn.{kind}(..., batch_first=True) over all time steps"
        edits = _whole_sequence(source, loop, call, made, kind)
        kept = f"names of parameters in checkpoints: those of nn.{kind} end in _l0"
        reason = "" if edits else "the loop does more than that"
        yield Finding("time steps", [loop], seen, change, edits, changes=kept if edits else "", reason=reason)


def _whole_sequence(source: Source, loop: ast.For, call: ast.Call, made: ast.Call, kind: str) -> list[Edit]:
    """`for t in ...: h = cell(x[:, t], h); outputs.append(h)` as one call."""
    body, step = loop.body, source.parents[call]
    if loop.orelse or not isinstance(loop.target, ast.Name) or len(call.args) != 2 or not isinstance(step, ast.Assign):
        return []
    state, x = step.targets[0], call.args[0]
    if body[0] is not step or ast.unparse(state) != ast.unparse(call.args[1]) or len(body) > 2:
        return []
    if any(one.arg is None for one in made.keywords) or not isinstance(made.func, ast.Attribute | ast.Name):
        return []
    first = ast.unparse(x.slice).strip("()") if isinstance(x, ast.Subscript) else ""
    t = loop.target.id
    if not isinstance(x, ast.Subscript) or first not in (t, f":, {t}", f":, {t}, :", f"{t}, :"):
        return []
    states = [ast.unparse(one) for one in state.elts] if isinstance(state, ast.Tuple) else [ast.unparse(state)]
    if len(states) != (2 if kind == "LSTM" else 1):
        return []
    kept = body[1].value if len(body) == 2 and isinstance(body[1], ast.Expr) else None
    keeps = isinstance(kept, ast.Call) and ast.unparse(kept).endswith(f".append({states[0]})")
    if len(body) == 2 and not keeps:
        return []
    data, axis = source.text_of(x.value), 1 if first.startswith(":") else 0
    before = ", ".join(f"{one}.unsqueeze(0)" for one in states)
    lines = [f"_outputs, {'(' * (len(states) > 1)}{', '.join(states)}{')' * (len(states) > 1)} = "
             f"{source.text_of(call.func)}({data}, {f'({before})' if len(states) > 1 else before})",
             f"{', '.join(states)} = {', '.join(f'{one}.squeeze(0)' for one in states)}"]  # fmt: skip
    if isinstance(kept, ast.Call) and isinstance(kept.func, ast.Attribute):
        lines.append(f"{source.text_of(kept.func.value)}.extend(_outputs.unbind({axis}))")
    indent = source.indent(loop)
    name = source.text_of(made.func).removesuffix("Cell")
    if not name.endswith(kind):
        return []
    end = source.span(made)[1] - 1
    options = [Edit(source.path, end, end, ", batch_first=True")] if axis else []
    return [source.replaced(loop, f"\n{indent}".join(lines)), source.replaced(made.func, name), *options]


def row_by_row(source: Source) -> Iterator[Finding]:
    """A loop over the rows of a batch, whose results are stacked."""
    for stack in source.calls("torch.stack"):
        function = source.function_of(stack)
        rows = stack.args[0] if len(stack.args) == 1 and not stack.keywords else None
        loop: ast.AST | None = rows
        edits: list[Edit] = []
        if isinstance(rows, ast.ListComp) and any(isinstance(one, ast.Slice) for one in ast.walk(rows.elt)):
            # Windows of one array.
            continue
        seen, change = "A loop computes row by row", "the same operators over all rows at once, or torch.vmap"
        torch = ast.unparse(stack.func).rpartition(".")[0]
        if isinstance(rows, ast.ListComp) and len(rows.generators) == 1 and not rows.generators[0].ifs:
            one = rows.generators[0]
            if text := _vmapped(source, rows.elt, one.target, one.iter, torch):
                edits = [source.replaced(stack, text)]
        elif isinstance(rows, ast.Name):
            loop = next((one for one in ast.walk(function) if isinstance(one, ast.For) and _fills(one, rows.id)), None)
            if isinstance(loop, ast.For) and len(loop.body) == 1 and isinstance(loop.body[0], ast.Expr):
                call = loop.body[0].value
                assert isinstance(call, ast.Call)
                text = _vmapped(source, call.args[0], loop.target, loop.iter, torch)
                if text and len(source.reads(rows.id, function)) == 2:
                    edits = [source.replaced(loop, f"{rows.id} = {text}"), source.replaced(stack, rows.id)]
        if loop is None or not isinstance(loop, ast.ListComp | ast.For) or not source.in_loop(stack):
            continue
        reason = "" if edits else "its rows depend on each other or are not those of tensors"
        yield Finding("rows", [loop, stack], seen, change, edits, reason=reason)


def _fills(loop: ast.For, name: str) -> bool:
    last = loop.body[-1]
    return isinstance(last, ast.Expr) and ast.unparse(last.value).startswith(f"{name}.append(")


def _vmapped(source: Source, element: ast.expr, target: ast.expr, over: ast.expr, torch: str) -> str:
    """An expression over the rows of tensors as torch.vmap over all of them; empty where that is not possible."""
    if not torch:
        return ""
    if (
        isinstance(over, ast.Call)
        and source.is_call(over, "range")
        and len(over.args) == 1
        and isinstance(target, ast.Name)
    ):
        rows: dict[str, str] = {}

        class Rows(ast.NodeTransformer):
            def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
                value = ast.unparse(node.value)
                if ast.unparse(node.slice) == target.id and isinstance(node.value, ast.Name | ast.Attribute):  # type: ignore[attr-defined]
                    return ast.Name(rows.setdefault(value, f"row_{len(rows)}"), ast.Load())
                return self.generic_visit(node)

        body = ast.unparse(Rows().visit(ast.parse(ast.unparse(element), mode="eval").body))
        left = {one.id for one in ast.walk(ast.parse(body)) if isinstance(one, ast.Name)}
        if not rows or target.id in left:
            return ""
        return f"{torch}.vmap(lambda {', '.join(rows.values())}: {body})({', '.join(rows)})"
    zipped = isinstance(over, ast.Call) and source.is_call(over, "zip") and isinstance(target, ast.Tuple)
    values = over.args if zipped and isinstance(over, ast.Call) else [over]
    if isinstance(over, ast.Call) and not zipped:
        return ""
    names = source.text_of(target).strip("()")
    return f"{torch}.vmap(lambda {names}: {source.text_of(element)})({', '.join(map(source.text_of, values))})"


def unique_ids(source: Source) -> Iterator[Finding]:
    """Ids that are sorted to look every row up once."""
    for call in source.calls("torch.unique"):
        assign, function = source.parents[call], source.function_of(call)
        inverse = [one for one in call.keywords if one.arg == "return_inverse"]
        target = assign.targets[0] if isinstance(assign, ast.Assign) else None
        edits: list[Edit] = []
        if inverse and len(call.keywords) == 1 and isinstance(target, ast.Tuple) and len(target.elts) == 2:
            edits = _looked_up(source, call, target, function)
            if edits and isinstance(assign, ast.Assign):
                edits.append(source.replaced(assign, f"{ast.unparse(target.elts[0])} = {source.text_of(call.args[0])}"))
        seen = "torch.unique sorts the ids of a step"
        change = f"without torch.unique: embedding({source.text_of(call.args[0]) if call.args else 'ids'})"
        if source.in_loop(call):
            reason = "" if edits else "its result is used in another way"
            yield Finding("unique", [call], seen, change, edits, reason=reason)


def _looked_up(source: Source, call: ast.Call, target: ast.Tuple, function: ast.AST) -> list[Edit]:
    """`table(unique)[inverse]` as `table(ids)`, where nothing else reads both."""
    unique, inverse = (one.id if isinstance(one, ast.Name) else "" for one in target.elts)
    edits, seen = [], 0
    for read in source.reads(inverse, function):
        rows = source.parents[read]
        lookup = rows.value if isinstance(rows, ast.Subscript) and rows.slice is read else None
        if not isinstance(lookup, ast.Call) or [ast.unparse(one) for one in lookup.args] != [unique]:
            return []
        edits.append(source.replaced(rows, source.text_of(lookup)))
        seen += 1
    return edits if seen and len(source.reads(unique, function)) == seen else []


def separate_tables(source: Source) -> Iterator[Finding]:
    """Tables of one width, each of which has a call of its own."""
    for made in source.calls("torch.nn.ModuleList"):
        rows = made.args[0] if made.args else None
        assign = source.parents[made]
        if not isinstance(rows, ast.ListComp | ast.GeneratorExp) or not isinstance(assign, ast.Assign):
            continue
        table = rows.elt
        if not isinstance(table, ast.Call) or not source.is_call(table, "torch.nn.Embedding"):
            continue
        name = ast.unparse(assign.targets[0])
        uses = [node for node in ast.walk(source.tree) if isinstance(node, ast.ListComp)
                and ast.unparse(node.generators[0].iter) == f"enumerate({name})"]  # fmt: skip
        seen = "Every table has a call of its own"
        change = "one nn.Embedding of all rows, whose ids begin where those of the table before end"
        edits = _one_table(source, assign, rows, table, name, uses)
        kept = "random numbers of the first weights, and names of parameters in checkpoints" if edits else ""
        reason = "" if edits else "their widths or calls differ"
        yield Finding("tables", [*uses, made], seen, change, edits, changes=kept, reason=reason, works="embedding")


def _one_table(
    source: Source,
    assign: ast.Assign,
    rows: ast.ListComp | ast.GeneratorExp,
    table: ast.Call,
    name: str,
    uses: list[ast.ListComp],
) -> list[Edit]:
    loop = rows.generators[0]
    simple = isinstance(loop.target, ast.Name) and len(table.args) == 2 and not table.keywords and not loop.ifs
    if len(uses) != 1 or not simple or ast.unparse(table.args[0]) != ast.unparse(loop.target):
        return []
    if any(isinstance(one, ast.Name) and one.id == ast.unparse(loop.target) for one in ast.walk(table.args[1])):
        return []
    (use,) = uses
    one, element = use.generators[0], use.elt
    if one.ifs or not isinstance(one.target, ast.Tuple) or not isinstance(element, ast.Call) or len(element.args) != 1:
        return []
    number, each = (ast.unparse(part) for part in one.target.elts)
    ids = element.args[0]
    taken = ast.unparse(ids.slice).strip("()") if isinstance(ids, ast.Subscript) else ""
    if ast.unparse(element.func) != each or taken != f":, {number}" or not isinstance(ids, ast.Subscript):
        return []
    torch = next((key for key, full in source.names.items() if full == "torch"), None)
    if not torch or not source.alone(assign) or not name.startswith("self."):
        return []
    sizes, width = source.text_of(loop.iter), source.text_of(table.args[1])
    buffer = f"{name}_begins"
    begins = f"{torch}.tensor([0, *_sizes[:-1]]).cumsum(0)"
    lines = [
        f"_sizes = list({sizes})",
        f"{name} = {source.text_of(table.func)}(sum(_sizes), {width})",
        f"self.register_buffer({buffer.removeprefix('self.')!r}, {begins}, persistent=False)",
    ]
    text = f"list({name}({source.text_of(ids.value)} + {buffer}).unbind(1))"
    return [source.replaced(assign, f"\n{source.indent(assign)}".join(lines)), source.replaced(use, text)]


def double_precision(source: Source) -> Iterator[Finding]:
    """float64 where float32 is what others train in."""
    edits: list[Edit] = []
    unknown: list[Edit] = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute | ast.Name) and source.dotted(node) in DOUBLE:
            name = ast.unparse(node)
            edits.append(source.replaced(node, f"{name.removesuffix('float64').removesuffix('double')}float32"))
        elif isinstance(node, ast.Constant) and node.value == "float64":
            edits.append(source.replaced(node, '"float32"'))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            begin, end = source.span(node)
            if node.func.attr == "double" and not node.args:
                edits.append(Edit(source.path, source.text.rindex("double", begin, end), end, "float()"))
            elif source.is_call(node, "torch.from_numpy") and len(node.args) == 1:
                made = source.value_of(node.args[0]) or node.args[0]
                if source.is_call(made, *FLOATS) and not getattr(made, "keywords", []):
                    edits.append(Edit(source.path, end, end, ".float()"))
                else:
                    unknown.append(
                        Edit(source.path, begin, begin, "(lambda x: x.float() if x.is_floating_point() else x)(")
                    )
                    unknown.append(Edit(source.path, end, end, ")"))
    if edits:
        edits += unknown
        seen = "Operators compute in float64"
        kept = "the results: numbers have 24 bits of mantissa instead of 53"
        yield Finding("float64", [], seen, "float32 instead of float64", edits, changes=kept, works="float64")


RULES = (one_hot_products, cells_in_loops, row_by_row, unique_ids, separate_tables, double_precision)
