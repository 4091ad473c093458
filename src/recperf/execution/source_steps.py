"""Rules over the source of a program: what it does in every step beside training. Torch-free."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from .program_source import CHANGING, Edit, Source
from .source_findings import Finding

EVERY = 100
"""Steps between two reports after the change."""
REPORTING = (
    "print", "gc.collect", "torch.save", "torch.cuda.empty_cache", "torch.cuda.synchronize", "os.fsync", "os.sync",
    "logging.", "wandb.log", "mlflow.", "sklearn.metrics.", "torchmetrics.", "torcheval.", "matplotlib.", "psutil.",
    "json.dump", "pickle.dump", "numpy.save", "numpy.savez", "safetensors.torch.save_file",
)  # fmt: skip
"""Functions that report, write or clean up; none of them trains."""
WRITERS = (
    "open", "logging.getLogger", "torch.utils.tensorboard.", "tensorboardX.", "torchmetrics.", "torcheval.", "csv.",
    "tqdm.", "wandb.init", "pathlib.Path", "mlflow.", "tempfile.",
)  # fmt: skip
"""Functions that make objects of which all methods do the same."""
HARMLESS = (
    "abs", "bool", "dict", "enumerate", "float", "int", "isinstance", "len", "list", "max", "min", "range", "round",
    "set", "sorted", "str", "sum", "tuple", "zip", "math.", "time.", "os.path.", "numpy.", "copy.", "statistics.",
    *(f"torch.{name}" for name in (
        "no_grad", "inference_mode", "sigmoid", "softmax", "argsort", "topk", "sum", "mean", "cat", "stack", "sort",
        "cumsum", "isnan", "norm", "arange", "zeros", "ones", "where", "isin", "log2", "max", "argmax", "tensor",
    )),
)  # fmt: skip
"""Functions that only compute a value."""
RANDOM = ("numpy.random.",)
METHODS = {
    "detach", "cpu", "numpy", "tolist", "item", "view", "reshape", "flatten", "float", "double", "long", "int", "bool",
    "sigmoid", "argmax", "softmax", "sum", "mean", "std", "squeeze", "unsqueeze", "sort", "argsort", "topk", "eq",
    "max", "min", "numel", "size", "astype", "copy", "clone", "norm", "abs", "any", "all", "cumsum", "log", "log2",
    "exp", "sqrt", "join", "format", "items", "keys", "values", "get", "split", "strip", "nonzero", "gather",
    "state_dict", "parameters", "named_parameters", "to", "t", "dim", "round", "dot", "isnan",
}  # fmt: skip
"""Methods that only compute a value, whatever their object is."""
# Sums over steps would lose most of their terms.
SIMPLE = ast.Expr | ast.Assign | ast.AnnAssign | ast.With | ast.For | ast.If | ast.Pass


def anomaly_mode(source: Source) -> Iterator[Finding]:
    """Autograd's search for NaN, left on."""
    for call in source.calls("torch.autograd.set_detect_anomaly", "torch.autograd.detect_anomaly"):
        mode = call.args[0] if call.args else next((one.value for one in call.keywords if one.arg == "mode"), None)
        whole = isinstance(call.func, ast.Attribute) and call.func.attr == "detect_anomaly"
        if isinstance(call.func, ast.Attribute) and whole:
            edit = source.replaced(call, f"{ast.unparse(call.func.value)}.set_detect_anomaly(False)")
        elif isinstance(mode, ast.Constant) and mode.value is True:
            edit = source.replaced(mode, "False")
        else:
            continue
        yield _anomaly(call, edit)
    for call in source.calls("lightning.", "pytorch_lightning."):
        for one in call.keywords:
            if one.arg == "detect_anomaly" and isinstance(one.value, ast.Constant) and one.value.value is True:
                yield _anomaly(one.value, source.replaced(one.value, "False"))


def _anomaly(node: ast.AST, edit: Edit) -> Finding:
    seen = "Anomaly mode records a Python stack for every operator and looks for NaN in every gradient"
    return Finding("anomaly mode", [node], seen, "torch.autograd.set_detect_anomaly(False)", [edit], always=True)


def reports(source: Source) -> Iterator[Finding]:
    """Metrics, logging, checkpoints and garbage collection in every step."""
    report = _Reports(source)
    number = 0
    for group in report.groups():
        counter = _loop_counter(source, group[0])
        edits: list[Edit] = []
        if counter is None:
            counter = f"next(_turns{number or ''})"
            imported = [] if source.names.get("itertools") == "itertools" else ["import itertools"]
            edits.append(source.after_imports(*imported, f"_turns{number or ''} = itertools.count()"))
            number += 1
        begin, end = source.span(group[0])[0], source.span(group[-1])[1]
        body = source.text[begin:end].replace("\n", "\n    ")
        condition = f"if {counter} % {EVERY} == 0:"
        edits.append(Edit(source.path, begin, end, f"{condition}\n{source.indent(group[0])}    {body}"))
        first = source.text_of(group[0]).partition("\n")[0]
        change = f"{condition} {first}" + (" ..." if len(group) > 1 else "")
        kept = f"the reports, which come from every {EVERY}th step; losses stay"
        yield Finding("reports", list(group), "Every step computes or writes reports", change, edits, changes=kept)


class _Reports:
    """Statements that nothing but other such statements uses."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._pure: dict[ast.AST, bool] = {}
        nodes = (node for node in ast.walk(source.tree) if isinstance(node, SIMPLE) and source.in_loop(node))
        self.statements = {node for node in nodes if self._only_reports(node)}
        while used := {node for node in self.statements if self._is_used(node)}:
            self.statements -= used

    def groups(self) -> Iterator[list[ast.stmt]]:
        """Runs of such statements, the outermost ones; what computes nothing is in none alone."""
        for node in ast.walk(self.source.tree):
            for field in ("body", "orelse", "finalbody"):
                block = getattr(node, field, None)
                if isinstance(block, list) and node not in self.statements and not isinstance(node, ast.ClassDef):
                    yield from self._runs(block)

    def _runs(self, block: list[ast.stmt]) -> Iterator[list[ast.stmt]]:
        run: list[ast.stmt] = []
        for one in [*block, None]:
            if one in self.statements and self._can_move(one):
                run.append(one)
                continue
            if any(self._reports(node) for each in run for node in ast.walk(each)):
                yield run
            run = []

    def _reports(self, node: ast.AST) -> bool:
        """Whether a call is one of a report, not only a computation."""
        if not isinstance(node, ast.Call):
            return False
        method = isinstance(node.func, ast.Attribute) and (node.func.attr in CHANGING or self._writes(node.func))
        return method or self.source.is_call(node, *REPORTING) or self.source.function(node.func) is not None

    def _can_move(self, one: ast.stmt | None) -> bool:
        """Whether further white space before its lines changes nothing else."""
        if one is None or not self.source.alone(one) or self.source.text_of(one).startswith("elif"):
            return False
        texts = (node for node in ast.walk(one) if isinstance(node, ast.Constant | ast.JoinedStr))
        return all(node.lineno == node.end_lineno for node in texts)

    def _only_reports(self, node: ast.stmt) -> bool:
        """Whether a statement calls nothing that trains, and changes only names of its function."""
        if any(isinstance(one, ast.Break | ast.Continue | ast.Return | ast.Yield | ast.Await | ast.NamedExpr)
               for one in ast.walk(node)):  # fmt: skip
            return False
        inner = [one for one in ast.walk(node) if isinstance(one, ast.stmt)]
        if not all(isinstance(one, SIMPLE) for one in inner):
            return False
        stores = (one for one in ast.walk(node) if isinstance(getattr(one, "ctx", None), ast.Store | ast.Del))
        if not all(isinstance(one, ast.Name | ast.Tuple | ast.List) for one in stores):
            return False
        calls = [one for one in ast.walk(node) if isinstance(one, ast.Call)]
        plain = isinstance(node, ast.Expr) and not calls
        return not plain and all(self._is_harmless(call) for call in calls)

    def _is_harmless(self, call: ast.Call) -> bool:
        source = self.source
        if source.is_call(call, *RANDOM):
            return False
        if source.is_call(call, *REPORTING, *WRITERS, *HARMLESS):
            return True
        if isinstance(call.func, ast.Attribute):
            if call.func.attr in METHODS or self._writes(call.func):
                return True
            return call.func.attr in CHANGING and self._is_own(call.func.value)
        function = source.function(call.func)
        return function is not None and self._is_pure(function)

    def _is_own(self, container: ast.AST) -> bool:
        """Whether a name means a list, a set or a dict that this file has made, and nothing else."""
        made = self.source.value_of(container, self.source.function_of(container))
        own = isinstance(made, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp)
        return own or self.source.is_call(made, "list", "dict", "set", "collections.")

    def _writes(self, method: ast.Attribute) -> bool:
        """Whether a method is that of a file, a logger or a metric."""
        receiver: ast.AST | None = method.value
        if not isinstance(receiver, ast.Call):
            receiver = self.source.value_of(method.value)
        return self.source.is_call(receiver, *WRITERS)

    def _is_pure(self, function: ast.FunctionDef) -> bool:
        """Whether a function computes its result from its parameters and changes nothing else."""
        if function not in self._pure:
            self._pure[function] = False
            parameters = {one.arg for one in ast.walk(function.args) if isinstance(one, ast.arg)}
            nodes = [node for one in function.body for node in ast.walk(one)]
            stored = [node for node in nodes if isinstance(getattr(node, "ctx", None), ast.Store | ast.Del)]
            outside = any(
                isinstance(node, ast.Attribute) or _base(node) in parameters
                for node in stored if not isinstance(node, ast.Name | ast.Tuple | ast.List)
            )  # fmt: skip
            blocks = any(isinstance(node, ast.Global | ast.Nonlocal | ast.Yield | ast.Await) for node in nodes)
            calls = [node for node in nodes if isinstance(node, ast.Call)]
            touches = any(isinstance(call.func, ast.Attribute) and call.func.attr in CHANGING
                          and _base(call.func.value) in parameters for call in calls)  # fmt: skip
            clean = not (outside or blocks or touches)
            self._pure[function] = clean and all(self._is_harmless(call) for call in calls)
        return self._pure[function]

    def _is_used(self, node: ast.stmt) -> bool:
        """Whether something else reads what a statement computes or changes."""
        source, function = self.source, self.source.function_of(node)
        names = {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
        for call in (one for one in ast.walk(node) if isinstance(one, ast.Call)):
            if isinstance(call.func, ast.Attribute) and call.func.attr in CHANGING and not self._writes(call.func):
                names.add(_base(call.func.value) or "")
            # What is written to memory may be sent somewhere.
            names |= {one.id for one in call.args if isinstance(one, ast.Name)
                      and source.is_call(source.value_of(one, function), "io.")}  # fmt: skip
        if not names:
            return not any(isinstance(one, ast.Call) for one in ast.walk(node)) or self._value_only(node)
        shared = any(isinstance(one, ast.Global | ast.Nonlocal) for one in ast.walk(function))
        parameters = {one.arg for one in ast.walk(function) if isinstance(one, ast.arg)}
        if shared or names & parameters:
            return True
        scope = source.tree if function is source.tree or names - self._local(function) else function
        reads = (read for name in names for read in source.reads(name, scope))
        return any(not ({read, *source.above(read)} & self.statements) for read in reads)

    def _local(self, function: ast.AST) -> set[str]:
        return {name for name, places in self.source.bound.items()
                if any(self.source.function_of(one) is function for one in places)}  # fmt: skip

    def _value_only(self, node: ast.stmt) -> bool:
        """Whether a statement that binds nothing also reports nothing."""
        calls = [one for one in ast.walk(node) if isinstance(one, ast.Call)]
        methods = (call.func for call in calls if isinstance(call.func, ast.Attribute))
        return not (any(self.source.is_call(call, *REPORTING) for call in calls) or any(map(self._writes, methods)))


def _base(node: ast.AST) -> str | None:
    """The name at the beginning of an attribute or an element."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Starred):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _loop_counter(source: Source, node: ast.stmt) -> str | None:
    """The variable that counts the loop whose body a statement is directly in."""
    loop = source.parents[node]
    if not isinstance(loop, ast.For) or not isinstance(loop.iter, ast.Call):
        return None
    target = loop.target
    if source.is_call(loop.iter, "range") and isinstance(target, ast.Name):
        return target.id
    if (
        source.is_call(loop.iter, "enumerate")
        and isinstance(target, ast.Tuple)
        and isinstance(target.elts[0], ast.Name)
    ):
        return target.elts[0].id
    return None


def deep_copies(source: Source) -> Iterator[Finding]:
    """A copy of all weights that is only read."""
    for call in source.calls("copy.deepcopy"):
        assign = source.parents[call]
        target = assign.targets[0] if isinstance(assign, ast.Assign) and len(assign.targets) == 1 else None
        if not call.args or not source.in_loop(call) or not isinstance(target, ast.Name):
            continue
        seen = "A step copies all weights"
        what = source.text_of(call.args[0])
        function = source.function_of(call)
        if source.value_of(target, function) is call and _only_read(source, target.id, function):
            yield Finding("deep copy", [call], seen, f"{target.id} = {what}", [source.replaced(call, what)])
        else:
            change = f"torch._foreach_lerp_(averages, list({what.partition('.')[0]}.parameters()), 1 - decay)"
            why = "the copy is changed or stays after the step"
            yield Finding("deep copy", [call], seen, change, reason=why)


def _only_read(source: Source, name: str, function: ast.AST) -> bool:
    """Whether values of a copy enter expressions only, and nothing holds or changes them."""
    if source.changed_in_place(name, function):
        return False
    return all(_enters_expression(source, read) for read in source.reads(name, function))


def _enters_expression(source: Source, read: ast.AST) -> bool:
    node, parent = read, source.parents[read]
    while isinstance(parent, ast.Attribute | ast.Subscript) and parent.value is node:
        node, parent = parent, source.parents[parent]
        if isinstance(parent, ast.Call) and parent.func is node:
            node, parent = parent, source.parents[parent]
    if isinstance(parent, ast.BinOp):
        return True
    if isinstance(parent, ast.Call) and source.is_call(parent, "zip", "enumerate", "len"):
        return _loop_reads(source, parent, parent.args.index(node) if node in parent.args else None)
    if isinstance(parent, ast.Call) and isinstance(parent.func, ast.Attribute):
        return parent.func.attr.endswith("_") and node in parent.args
    return isinstance(parent, ast.For) and _loop_reads(source, node, None)


def _loop_reads(source: Source, iterated: ast.AST, index: int | None) -> bool:
    """Whether the variables of a loop over something are only read in expressions."""
    loop = source.parents[iterated]
    if not isinstance(loop, ast.For):
        return False
    target = loop.target
    if isinstance(target, ast.Tuple) and index is not None and index < len(target.elts):
        target = target.elts[index]
    names = [one.id for one in ast.walk(target) if isinstance(one, ast.Name)]
    reads = [read for name in names for read in source.reads(name, loop)]
    changed = any(source.changed_in_place(name, loop) for name in names)
    return not changed and not any(isinstance(source.parents[read], ast.Assign | ast.Return) for read in reads)


def clipped_one_by_one(source: Source) -> Iterator[Finding]:
    """Gradients that are clipped parameter by parameter."""
    for loop in (node for node in ast.walk(source.tree) if isinstance(node, ast.For)):
        every = loop.iter
        of_all = (
            isinstance(every, ast.Call) and isinstance(every.func, ast.Attribute) and every.func.attr == "parameters"
        )
        body = loop.body
        if len(body) == 1 and isinstance(body[0], ast.If) and not body[0].orelse:
            body = body[0].body
        call = body[0].value if len(body) == 1 and isinstance(body[0], ast.Expr) else None
        if not of_all or not isinstance(call, ast.Call) or not isinstance(loop.target, ast.Name) or loop.orelse:
            continue
        name, parameters = loop.target.id, source.text_of(every)
        kept, text = "", ""
        if source.is_call(call, "torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad_value_"):
            if call.args and ast.unparse(call.args[0]) in (name, f"[{name}]"):
                rest = [source.text_of(one) for one in call.args[1:]] + [ast.unparse(one) for one in call.keywords]
                text = f"{source.text_of(call.func)}({', '.join([parameters, *rest])})"
                if source.is_call(call, "torch.nn.utils.clip_grad_norm_"):
                    kept = "the results: all gradients together have one norm"
        elif ast.unparse(call.func) in (f"{name}.grad.clamp_", f"{name}.grad.data.clamp_") and len(call.args) == 2:
            low, high = call.args
            torch = next((one for one, full in source.names.items() if full == "torch"), None)
            if torch and ast.unparse(low) == f"-{ast.unparse(high)}":
                text = f"{torch}.nn.utils.clip_grad_value_({parameters}, {source.text_of(high)})"
        if text:
            seen = "Gradients are clipped one by one"
            yield Finding("clipping", [loop], seen, text, [source.replaced(loop, text)], changes=kept)


def needless_copies(source: Source) -> Iterator[Finding]:
    """Copies of tensors that nothing changes."""
    for call in (node for node in ast.walk(source.tree) if isinstance(node, ast.Call)):
        method = call.func
        if (
            not isinstance(method, ast.Attribute)
            or method.attr not in ("clone", "contiguous")
            or call.args
            or call.keywords
        ):
            continue
        function = source.function_of(call)
        inside = {node.attr for node in ast.walk(method.value) if isinstance(node, ast.Attribute)}
        kept = inside & {"data", "grad", "detach", "parameters", "state_dict", "weight", "bias"}
        target = source.parents[call]
        names = {node.id for node in ast.walk(method.value) if isinstance(node, ast.Name)}
        if isinstance(target, ast.Assign):
            names |= {node.id for one in target.targets for node in ast.walk(one) if isinstance(node, ast.Name)}
        stays = isinstance(target, ast.Assign) and any(not isinstance(one, ast.Name) for one in target.targets)
        chained = isinstance(target, ast.Attribute) and target.attr.endswith("_")
        if kept or stays or chained or isinstance(function, ast.Module) or not source.in_loop(call):
            continue
        if any(source.changed_in_place(name, function) for name in names):
            continue
        end = source.span(call)[1]
        begin = source.text.rindex(".", source.span(method.value)[1], end)
        edits = [Edit(source.path, begin, end, "")]
        if source.text[end : end + 6] == ".view(":
            edits.append(Edit(source.path, end, end + 5, ".reshape"))
        yield Finding("copies", [call], "Tensors are copied that nothing changes", f"without .{method.attr}()", edits)


RULES = (anomaly_mode, reports, deep_copies, clipped_one_by_one, needless_copies)
