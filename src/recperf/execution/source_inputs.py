"""Rules over the source of a program: how its batches are made. Torch-free."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from .program_source import Edit, Source
from .source_findings import Finding

HASHES = (
    "hashlib.",
    "zlib.crc32",
    "zlib.adler32",
    "binascii.crc32",
    "mmh3.",
    "xxhash.",
    "hash",
    "farmhash.",
    "cityhash.",
)
CACHED = 1 << 20
"""Hashes that are kept."""
DRAWS = (
    "random.randint",
    "random.randrange",
    "numpy.random.randint",
    "random.choice",
    "random.sample",
    "numpy.random.choice",
)
TENSORS = ("torch.tensor", "torch.LongTensor", "torch.as_tensor")
DRAWN = "random numbers: negatives are drawn by another generator"


def listed_ids(source: Source) -> Iterator[Finding]:
    """Ids that become a list of Python before they index."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            for part in node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]:
                call: ast.AST | None = part
                if isinstance(part, ast.Name):
                    function = source.function_of(node)
                    call = source.value_of(part, function)
                    reads = source.reads(part.id, function)
                    if not all(_is_index(source, read) for read in reads):
                        continue
                if edit := _without_list(source, call):
                    yield _listed(node, edit, source)
        elif (
            source.is_call(node, *TENSORS) and isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords
        ):
            inner = node.args[0]
            if edit := _without_list(source, inner):
                name = ast.unparse(node.func).rpartition(".")[0]
                function_edit = source.replaced(node.func, f"{name}.as_tensor" if name else "torch.as_tensor")
                yield _listed(node, edit, source, function_edit)


def _is_index(source: Source, read: ast.AST) -> bool:
    parent = source.parents[read]
    if isinstance(parent, ast.Tuple):
        read, parent = parent, source.parents[parent]
    return isinstance(parent, ast.Subscript) and parent.slice is read


def _without_list(source: Source, call: ast.AST | None) -> Edit | None:
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or call.args:
        return None
    if call.func.attr != "tolist":
        return None
    end = source.span(call)[1]
    return Edit(source.path, source.text.rindex(".", source.span(call.func.value)[1], end), end, "")


def _listed(node: ast.AST, edit: Edit, source: Source, *others: Edit) -> Finding:
    line = source.text_of(source.statement_of(node)).partition("\n")[0]
    return Finding(
        "lists", [node], "Ids become a list before they index", f"without .tolist(): {line}", [edit, *others]
    )


def hashed_strings(source: Source) -> Iterator[Finding]:
    """Strings that are hashed again and again."""
    known: dict[str, str] = {}
    for call in source.calls(*HASHES):
        whole = _pure_expression(source, call)
        if not source.in_loop(call) or any(
            isinstance(one, ast.FunctionDef) and one.decorator_list for one in source.above(call)
        ):
            continue
        names = _free_names(source, whole)
        if names is None or not names:
            continue
        text = source.text_of(whole).replace("self.", "")
        name = known.setdefault(text, f"_hashed{len(known) or ''}")
        imported = [] if source.names.get("functools") == "functools" else ["import functools"]
        parameters = [one.removeprefix("self.") for one in names]
        lines = [
            *imported,
            "",
            "",
            f"@functools.lru_cache(maxsize={CACHED})",
            f"def {name}({', '.join(parameters)}):",
            f"    return {text}",
            "",
        ]
        edits = [source.after_imports(*lines), source.replaced(whole, f"{name}({', '.join(names)})")]
        change = f"@functools.lru_cache on {source.text_of(whole)}, or hash every value once before training"
        yield Finding("hashing", [call], "The same strings are hashed again in every step", change, edits)


def _pure_expression(source: Source, call: ast.AST) -> ast.AST:
    """The largest expression around a hash that computes a value from nothing else but names."""
    node = call
    while True:
        parent = source.parents[node]
        plain = isinstance(parent, ast.BinOp | ast.Attribute)
        called = isinstance(parent, ast.Call) and (parent.func is node or source.is_call(parent, "int", "abs", "str"))
        part = isinstance(parent, ast.Subscript) and parent.value is node
        if not (plain or called or part):
            return node
        node = parent


def _free_names(source: Source, node: ast.AST) -> list[str] | None:
    """The names of a function that an expression uses, `self.x` as a whole; None where there is something else."""
    result: list[str] = []
    for one in ast.walk(node):
        if isinstance(one, ast.Name):
            places = source.bound.get(one.id, [])
            parent = source.parents[one]
            if (
                one.id == "self"
                and isinstance(parent, ast.Attribute)
                and not isinstance(source.parents[parent], ast.Call)
            ):
                result.append(f"self.{parent.attr}")
            elif one.id == "self" or isinstance(one.ctx, ast.Store):
                return None
            elif one.id not in source.names and not source.dotted(one):
                local = any(
                    source.function_of(place) is not source.tree or _of_comprehension(source, place) for place in places
                )
                result += [one.id] if local else []
    return list(dict.fromkeys(result))


def _of_comprehension(source: Source, place: ast.AST) -> bool:
    return any(isinstance(one, ast.comprehension) for one in source.above(place))


def drawn_negatives(source: Source) -> Iterator[Finding]:
    """Random ids that Python or numpy draws one by one."""
    for call in source.calls(*DRAWS):
        if not source.in_loop(call):
            continue
        seen = "Random ids are drawn one by one"
        if edited := _as_tensor(source, call) or _as_generator(source, call):
            node, text = edited
            yield Finding("negatives", [node], seen, text, [source.replaced(node, text)], changes=DRAWN)
        elif any(isinstance(one, ast.While | ast.For | ast.ListComp | ast.GeneratorExp) for one in source.above(call)):
            change = "torch.randint(items, (batch, negatives)) for a whole batch; draw again only what torch.isin finds"
            loop = next(
                one
                for one in source.above(call)
                if isinstance(one, ast.While | ast.For | ast.ListComp | ast.GeneratorExp)
            )
            yield Finding(
                "negatives",
                [loop if isinstance(loop, ast.While) else call],
                seen,
                change,
                reason="drawing depends on what was drawn before",
            )


def _as_tensor(source: Source, call: ast.Call) -> tuple[ast.AST, str] | None:
    """`torch.tensor([random.randint(...) for ...])` as one draw of torch."""
    bounds = [source.text_of(one) for one in call.args]
    if not source.is_call(call, "random.randint", "random.randrange", "numpy.random.randint") or call.keywords:
        return None
    if not 1 <= len(bounds) <= 2 or (len(bounds) == 1 and source.is_call(call, "random.randint")):
        return None
    low, high = bounds if len(bounds) == 2 else ("0", bounds[0])
    if source.is_call(call, "random.randint"):
        high = high.removesuffix("- 1").strip() if high.endswith("- 1") else f"{high} + 1"
    sizes: list[str] = []
    node: ast.AST = call
    while isinstance(parent := source.parents[node], ast.ListComp) and parent.elt is node:
        loop, *more = parent.generators
        used = {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)}
        if more or loop.ifs or used & {one.id for one in ast.walk(loop.target) if isinstance(one, ast.Name)}:
            return None
        over = loop.iter
        if source.is_call(over, "range") and isinstance(over, ast.Call) and len(over.args) == 1:
            sizes.insert(0, source.text_of(over.args[0]))
        else:
            sizes.insert(0, f"len({source.text_of(over)})")
        node = parent
    torch = next((name for name, full in source.names.items() if full == "torch"), None)
    if not sizes or not torch:
        return None
    shape = f"({', '.join(sizes)}{',' * (len(sizes) == 1)})"
    drawn = f"{torch}.randint({low}, {high}, {shape}"
    outer = source.parents[node]
    if source.is_call(outer, *TENSORS) and isinstance(outer, ast.Call) and outer.args == [node]:
        given = {one.arg: source.text_of(one.value) for one in outer.keywords}
        if given.get("dtype", f"{torch}.long") in (f"{torch}.long", f"{torch}.int64") and given.keys() <= {
            "dtype",
            "device",
        }:
            return outer, drawn + (f", device={given['device']}" if "device" in given else "") + ")"
    return node, f"{drawn}).tolist()"


def _as_generator(source: Source, call: ast.Call) -> tuple[ast.AST, str] | None:
    """A draw without replacement, for which numpy's old generator orders all ids."""
    if not source.is_call(call, "numpy.random.choice"):
        return None
    replaces = next(
        (one.value for one in call.keywords if one.arg == "replace"), call.args[2] if len(call.args) > 2 else None
    )
    weighted = len(call.args) > 3 or any(one.arg == "p" for one in call.keywords)
    if weighted or not isinstance(replaces, ast.Constant) or replaces.value is not False:
        return None
    numpy = ast.unparse(call.func).removesuffix(".choice")
    arguments = ", ".join([*map(source.text_of, call.args), *(ast.unparse(one) for one in call.keywords)])
    return call, f"{numpy}.Generator({numpy}.PCG64({numpy}.randint(1 << 31))).choice({arguments})"


def rows_of_frames(source: Source) -> Iterator[Finding]:
    """Rows that pandas looks up one by one."""
    for node in ast.walk(source.tree):
        lookup = (
            isinstance(node, ast.Subscript)
            and isinstance(node.value, ast.Attribute)
            and node.value.attr in ("iloc", "loc")
        )
        walk = (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("iterrows", "itertuples")
        )
        if not (lookup or walk or source.is_call(node, "pandas.DataFrame")) or not source.in_loop(node):
            continue
        seen = "pandas looks up rows"
        if isinstance(node, ast.Subscript) and (edits := _as_records(source, node)):
            change = f'{ast.unparse(node.value.value)}.to_dict("records") once'  # type: ignore[attr-defined]
            assign = source.parents[node]
            name = assign.targets[0] if isinstance(assign, ast.Assign) else None
            # An element of a row of pandas costs more than that of a dict, too.
            reads = source.reads(name.id, source.function_of(node)) if isinstance(name, ast.Name) else []
            nodes = [source.statement_of(one) for one in (node, *reads)]
            yield Finding("rows of frames", nodes, seen, change, edits)
        elif any(name.partition(".")[0] == "pandas" for name in source.names.values()):
            change = "frame[column].to_numpy() once, and its elements in the step"
            yield Finding("rows of frames", [node], seen, change, reason="only its author knows what the columns hold")


def _as_records(source: Source, node: ast.Subscript) -> list[Edit]:
    """`row = self.frame.iloc[i]`, of which only elements are read, as an element of a list of dicts."""
    assert isinstance(node.value, ast.Attribute)
    frame, assign, function = node.value.value, source.parents[node], source.function_of(node)
    made = source.value_of(frame)
    place = source.bound.get(ast.unparse(frame), [None])[0]
    if (
        node.value.attr != "iloc"
        or not isinstance(node.slice, ast.Name | ast.Constant)
        or made is None
        or place is None
    ):
        return []
    reads: list[ast.AST] = [node]
    if isinstance(assign, ast.Assign):
        target = assign.targets[0]
        if not isinstance(target, ast.Name) or len(source.bound.get(target.id, [])) != 1:
            return []
        reads = list(source.reads(target.id, function))
    edits = []
    for read in reads:
        parent = source.parents[read]
        if (
            isinstance(parent, ast.Subscript)
            and isinstance(parent.slice, ast.Constant)
            and isinstance(parent.slice.value, str)
        ):
            continue
        return []
    made_by = source.statement_of(place)
    if not isinstance(frame, ast.Name | ast.Attribute) or not source.alone(made_by):
        return []
    records = f"{ast.unparse(frame)}_records"
    edits.append(source.after(made_by, f'{records} = {ast.unparse(frame)}.to_dict("records")'))
    return [*edits, source.replaced(node, f"{records}[{source.text_of(node.slice)}]")]


def length_buckets(source: Source) -> Iterator[Finding]:
    """Rows of different lengths that are padded to the longest of a random batch."""
    for pad in source.calls("torch.nn.utils.rnn.pad_sequence"):
        collate = source.function_of(pad)
        rows = pad.args[0] if pad.args else None
        loaders = [call for call in source.calls("torch.utils.data.DataLoader") if _collates(source, call, collate)]
        seen = "Rows are padded to the longest one of a random batch"
        change = "batches of rows of about the same length, or packed rows with their offsets"
        edits: list[Edit] = []
        if isinstance(rows, ast.ListComp) and len(loaders) == 1 and isinstance(collate, ast.FunctionDef):
            edits = _sorted_batches(source, loaders[0], rows, collate)
        if loaders or source.in_loop(pad):
            kept = "the order of the batches: rows of about the same length are together"
            yield Finding("padding", [pad], seen, change, edits, changes=kept, always=bool(edits),
                          reason="" if edits else "its loader is not known")  # fmt: skip


def _collates(source: Source, call: ast.Call, collate: ast.AST) -> bool:
    return any(one.arg == "collate_fn" and source.function(one.value) is collate for one in call.keywords)


def _sorted_batches(source: Source, call: ast.Call, rows: ast.ListComp, collate: ast.FunctionDef) -> list[Edit]:
    """A loader whose shuffled batches hold rows of about the same length."""
    given = {one.arg: source.text_of(one.value) for one in call.keywords}
    (loop, *more) = rows.generators
    arguments = [source.text_of(one) for one in call.args]
    size = given.pop("batch_size", None) or (arguments[1] if len(arguments) == 2 else None)
    shuffled = given.pop("shuffle", None)
    known = given.keys() <= {"collate_fn", "num_workers", "persistent_workers", "pin_memory"}
    over_batch = [one.arg for one in collate.args.args] == [ast.unparse(loop.iter)]
    if (
        not size
        or shuffled != "True"
        or not known
        or more
        or loop.ifs
        or not over_batch
        or not 1 <= len(arguments) <= 2
    ):
        return []
    data, statement = arguments[0], source.statement_of(call)
    if not source.alone(statement) or not data.isidentifier():
        return []
    torch = next((name for name, full in source.names.items() if full == "torch"), None)
    length = f"[len({source.text_of(rows.elt)}) for {source.text_of(loop.target)} in [{data}[row]]][0]"
    lines = [
        f"_order = sorted(range(len({data})), key=lambda row: {length})",
        f"_batches = [_order[at : at + {size}] for at in range(0, len(_order), {size})]",
        f"_batches = [_batches[at] for at in {torch}.randperm(len(_batches)).tolist()]",
    ]
    options = "".join(f", {name}={value}" for name, value in given.items())
    text = f"{source.text_of(call.func)}({data}, batch_sampler=_batches{options})"
    return [source.before(statement, *lines), source.replaced(call, text)] if torch else []


RULES = (listed_ids, hashed_strings, drawn_negatives, rows_of_frames, length_buckets)
