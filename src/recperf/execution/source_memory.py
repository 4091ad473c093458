"""Rules over the source of a program: what it holds in memory, which are scores of all classes of a softmax, and
activations that a backward pass could compute again. Torch-free."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from .program_source import Edit, Source
from .source_findings import Finding

CHUNKS = 8
"""Parts of a batch whose scores are made one after another."""
SAMPLED = 512
"""Items beside the targets in a sampled softmax. A convention."""
CHECKPOINT = "torch.utils.checkpoint"
DRAWS_TWICE = ("BatchNorm", "SyncBatch")
"""Layers that count the batches which they see, so that a second forward pass changes them."""


class Scores(NamedTuple):
    """A cross entropy of `hidden @ weight.T + bias`, as texts."""

    call: ast.Call
    made: ast.expr
    """The product."""
    hidden: str
    weight: str
    """Empty where rows of it cannot be told from its expression."""
    bias: str
    product: str
    """The expression of the scores, with HIDDEN in place of the hidden values."""
    target: str
    loss: str
    """The function without its reduction, before its arguments."""
    edits: list[Edit]
    """What takes the place of the statement that made the scores, if there was one."""


def losses_of_products(source: Source) -> Iterator[Scores]:
    """Cross entropies, of class indices, whose scores are a product that nothing else reads."""
    for call in (node for node in ast.walk(source.tree) if isinstance(node, ast.Call)):
        made = source.value_of(call.func)
        is_module = source.is_call(made, "torch.nn.CrossEntropyLoss") and not _arguments(made)
        function = "torch.nn.functional.cross_entropy"
        if len(call.args) != 2 or call.keywords or not (is_module or source.is_call(call, function)):
            continue
        given, target = call.args
        edits: list[Edit] = []
        inside, name = source.function_of(call), ""
        product: ast.expr | None = given
        if isinstance(given, ast.Name):
            product = source.value_of(given, inside)
            statement = source.parents.get(product) if product is not None else None
            if not isinstance(statement, ast.Assign) or len(source.reads(given.id, inside)) != 1:
                continue
            if source.function_of(statement) is not inside or not source.alone(statement):
                continue
            name = "_hidden"
        parts = _product(source, product)
        if parts is None or product is None:
            continue
        hidden, weight, bias, text = parts
        if name:
            edits.append(source.replaced(source.statement_of(product), f"{name} = {hidden}"))
        loss = "torch.nn.functional.cross_entropy" if is_module else source.text_of(call.func)
        yield Scores(call, product, name or hidden, weight, bias, text, source.text_of(target), loss, edits)


def _arguments(made: ast.AST | None) -> bool:
    return isinstance(made, ast.Call) and bool(made.args or made.keywords)


def _product(source: Source, node: ast.expr | None) -> tuple[str, str, str, str] | None:
    """The hidden values of a product, its weight and bias, and its text with HIDDEN in place of them."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        return source.text_of(node.left), _transposed(source, node.right), "", f"HIDDEN @ {source.text_of(node.right)}"
    if not isinstance(node, ast.Call) or node.keywords:
        return None
    texts = [source.text_of(one) for one in node.args]
    if source.is_call(node, "torch.matmul", "torch.mm") and len(texts) == 2:
        return texts[0], _transposed(source, node.args[1]), "", f"HIDDEN @ {texts[1]}"
    if source.is_call(node, "torch.nn.functional.linear") and len(texts) in (2, 3):
        rest = ", ".join(texts[1:])
        return texts[0], texts[1], (*texts, "")[2], f"{source.text_of(node.func)}(HIDDEN, {rest})"
    layer = source.value_of(node.func)
    if isinstance(layer, ast.Call) and source.is_call(layer, "torch.nn.Linear") and len(texts) == 1:
        name = source.text_of(node.func)
        biases = [one.value for one in layer.keywords if one.arg == "bias"] + layer.args[2:]
        plain = not biases or (isinstance(biases[0], ast.Constant) and biases[0].value is True)
        none = bool(biases) and isinstance(biases[0], ast.Constant) and biases[0].value is False
        weight = f"{name}.weight" if plain or none else ""
        return texts[0], weight, f"{name}.bias" if plain else "", f"{name}(HIDDEN)"
    return None


def _transposed(source: Source, node: ast.expr) -> str:
    """The matrix whose transpose this is; empty where it is no transpose."""
    if isinstance(node, ast.Attribute) and node.attr in ("T", "mT"):
        return source.text_of(node.value)
    method = node.func if isinstance(node, ast.Call) else None
    if isinstance(node, ast.Call) and isinstance(method, ast.Attribute):
        arguments = [ast.unparse(one) for one in node.args]
        if (method.attr, arguments) in (("t", []), ("transpose", ["0", "1"]), ("transpose", ["1", "0"])):
            return source.text_of(method.value)
    return ""


def _whole(text: str) -> str:
    """An expression before which nothing binds more strongly."""
    node = ast.parse(text, mode="eval").body
    return text if isinstance(node, ast.Name | ast.Attribute | ast.Subscript | ast.Call) else f"({text})"


def fused_loss(source: Source) -> Iterator[Finding]:
    """Scores of a whole batch that are in memory for a loss, and their gradients."""
    for one in losses_of_products(source):
        each = one.product.replace("HIDDEN", "x", 1)
        text = (
            f'torch.cat([{CHECKPOINT}.checkpoint(lambda x, y: {one.loss}({each}, y, reduction="none"), x, y, '
            f"use_reentrant=False) for x, y in zip({_whole(one.hidden)}.chunk({CHUNKS}), "
            f"{_whole(one.target)}.chunk({CHUNKS}))]).mean()"
        )
        edits = [*one.edits, source.after_imports(f"import {CHECKPOINT}"), source.replaced(one.call, text)]
        seen = "The scores of all rows of a batch are in memory together"
        change = f"a loss that makes the scores of 1/{CHUNKS} of the rows at a time, in both passes"
        yield Finding("fused loss", [one.call, one.made], seen, change, edits)


def sampled_softmax(source: Source) -> Iterator[Finding]:
    """A softmax over every item of a catalogue."""
    torch = next((name for name, full in source.names.items() if full == "torch"), None)
    for one in losses_of_products(source):
        statement = source.statement_of(one.call)
        if not torch or not one.weight or not source.alone(statement):
            continue
        y, weight = one.target, one.weight
        device = f"device={_whole(y)}.device"
        drawn = f"{torch}.randint(len({weight}), ({SAMPLED},), {device})"
        linear = f"{_whole(one.hidden)} @ {weight}[_items].t()" + (f" + {one.bias}[_items]" if one.bias else "")
        text = f"{one.loss}({linear}, {torch}.arange(len({y}), {device}))"
        begin = source.span(statement)[0]
        edits = [
            *one.edits,
            Edit(source.path, begin, begin, f"_items = {torch}.cat([{y}, {drawn}])\n{source.indent(statement)}"),
            source.replaced(one.call, text),
        ]
        kept = f"the results: another loss, a softmax over the targets of the batch and {SAMPLED} sampled items"
        seen = "A softmax over all items"
        yield Finding("catalogue softmax", [one.call, one.made], seen, text, edits, changes=kept, agrees=True)


def recomputed(source: Source) -> Iterator[Finding]:
    """Activations of repeated layers, which a backward pass could compute again."""
    if any(word in source.text for word in DRAWS_TWICE):
        return
    seen = "The activations of all layers are in memory until the backward pass"
    imported = source.after_imports(f"import {CHECKPOINT}")
    for loop in (node for node in ast.walk(source.tree) if isinstance(node, ast.For)):
        made, method = source.value_of(loop.iter), source.function_of(loop)
        forward = getattr(method, "name", "") == "forward" and ast.unparse(loop.iter).startswith("self.")
        for call in (node for node in ast.walk(loop) if isinstance(node, ast.Call)):
            name = loop.target.id if isinstance(loop.target, ast.Name) else None
            if not (forward or source.is_call(made, "torch.nn.ModuleList")) or ast.unparse(call.func) != name:
                continue
            if call.args and not call.keywords and not any(isinstance(one, ast.Starred) for one in call.args):
                whole = ", ".join(source.text_of(one) for one in call.args)
                text = f"{CHECKPOINT}.checkpoint({name}, {whole}, use_reentrant=False)"
                yield Finding("recomputation", [call], seen, text, [imported, source.replaced(call, text)])
    for call in (node for node in ast.walk(source.tree) if isinstance(node, ast.Call)):
        made = source.value_of(call.func)
        layers = made.args if isinstance(made, ast.Call) else []
        many = len(layers) > 3 or any(isinstance(one, ast.Starred) for one in layers)
        if source.is_call(made, "torch.nn.Sequential") and many and len(call.args) == 1 and not call.keywords:
            name = source.text_of(call.func)
            segments = f"max(2, round(len({name}) ** 0.5))"
            given = source.text_of(call.args[0])
            text = f"{CHECKPOINT}.checkpoint_sequential({name}, {segments}, {given}, use_reentrant=False)"
            yield Finding("recomputation", [call], seen, text, [imported, source.replaced(call, text)])


RULES = (fused_loss, recomputed)
"""Of memory alone; `sampled_softmax` is one of time, too."""
