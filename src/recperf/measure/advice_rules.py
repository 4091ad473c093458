"""The rules of advice: each looks for one pattern in what was observed and says what to change. Torch-free.

Here are those about the work of operators, in advice those about the host. A rule says how much of a step's
time goes with the change and what the changed way needs at the ceilings.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from ..units import number
from .advice import NOTICEABLE, AdviceFacts, best, names
from .advice import RULES as RULES_OF_THE_HOST
from .attribution import attribute
from .ceilings import Ceilings
from .limits import decide
from .place_shares import place_rows
from .program_facts import KEEPING, SMALLEST_TABLE, optimizer_of
from .program_records import OptimizerFacts, ProgramFacts
from .records import Advice, Experiment, Explanation, Observed
from .trace.read import grouped, summed

USED = 0.1
"""A table of which a step uses fewer rows than this gains from updating only those."""
SPARSE = {"SGD": (2, 6), "Adagrad": (6, 45)}
SPARSE_ADAM = 10, 60
"""Accesses of a row by a sparse update of a table, counted in torch's source (SparseAdam: two to sum gradients, two
reads of its states, three updates), and operators whose calls cost as much as it does for few rows: a convention, from
timings on one machine, in calls as this machine measures them."""
FUSED_CALLS = 16, 1.3
"""Calls that cost the host as much as the Python of a fused optimizer: in all, and for each parameter. A convention,
from timings on one machine."""
PASSES = {"Adam": (7, 19), "AdamW": (7, 21), "SGD": (3, 3), "Adagrad": (5, 13)}
"""Passes over the parameters of a fused optimizer, and of one that is not: reads and writes of every operator."""
NARROW = 128
"""Bytes of a row from which half of it is still a cache line."""
FUSED_ATTENTION = 0.6
"""Part of the rate of products that a fused attention kernel is taken to reach. A convention: it was not measured."""
LOOKUPS = ("embedding", "_embedding_bag", "_embedding_bag_forward_only", "index_select", "index")
"""Operators that read random rows and write none."""
SAMPLED = 512
"""Items beside the targets in a sampled softmax. A convention."""
FAR = 0.3
"""A product below this share of its ceiling has a shape that suits no kernel."""


def explain(
    seen: Observed, ceilings: Ceilings | None, facts: ProgramFacts | None, experiments: list[Experiment] | None = None
) -> Explanation:
    """All that rules make of a step, from records alone: its division among limits, the verdict, places and advice.

    What was observed, counted and measured is complete before; nothing here reads a clock, a file or the program.
    Without `facts` there is no advice.
    """
    attribution = attribute(seen, ceilings)
    places = place_rows(attribution.operators, attribution.shares, seen)
    return Explanation(
        verdict=decide(attribution, seen, ceilings, experiments, places),
        shares=attribution.shares,
        operators=attribution.operators,
        places=places,
        stacks=seen.stacks,
        children=seen.children,
        memory=seen.memory,
        advice=advise(AdviceFacts(seen, attribution.operators, ceilings, facts)) if facts else [],
        step_ms=seen.step_ms,
        notes=seen.notes,
        timeline=seen.timeline,
    )


def advise(evidence: AdviceFacts) -> list[Advice]:
    """What the rules say about a step, the largest predicted gain first."""
    suggestions = [advice for rule in RULES if (advice := rule(evidence)) is not None]
    if evidence.busy:
        suggestions = [replace(advice, note=f"Predicted while {evidence.busy}") for advice in suggestions]
    return sorted(suggestions, key=lambda advice: -(advice.predicted_gain or 0.0))


def dense_table(evidence: AdviceFacts) -> Advice | None:
    """Dense gradients and a dense optimizer that pass over all rows of tables of which a step uses few."""
    used: defaultdict[tuple[int, int], defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for row in evidence.operators:
        if row.rows and row.table_rows and row.row_bytes:
            used[row.table_rows, row.row_bytes][row.name] += row.distinct or row.rows
    # The backward pass uses the same rows as the forward pass.
    most = {table: max(by_name.values()) for table, by_name in used.items()}
    return best(_sparse(evidence, one, most) for one in evidence.facts.optimizers if one.kind in PASSES)


def _sparse(evidence: AdviceFacts, optimizer: OptimizerFacts, used: dict[tuple[int, int], float]) -> Advice | None:
    """Advice to update only the rows that are used; `used` has their number by rows and bytes of a row of the table."""
    takes_sparse = optimizer.kind in ("SGD", "Adagrad")
    # SparseAdam has no weight decay, which AdamW has by default and Adam has not; a trace tells no more.
    loses = not optimizer.plain and (optimizer.elements or optimizer.kind == "AdamW")
    if loses or (takes_sparse and not (optimizer.plain and optimizer.elements)):
        return None
    # A trace does not tell which gradients are sparse, only that some are.
    all_names = [row.name for row in evidence.operators]
    if not optimizer.elements and any(re.search("_coalesce|_sparse|sparse_backward", name) for name in all_names):
        return None
    whole = sum(row.ms for row in evidence.optimizer_rows(optimizer.kind))
    whole += evidence.optimizer_python(optimizer.kind)
    goes = needs = rows_used = rows_all = 0.0
    shapes, same = [], []
    for (rows, row_bytes), count in used.items():
        shape = [rows, row_bytes // optimizer.element_bytes]
        tables = optimizer.tables.count(shape) if optimizer.elements else 1
        if count >= USED * rows * tables:
            continue
        passes = [row for row in evidence.operators if not row.rows and (row.largest or [])[:1] == [rows]]
        of_table = [row for row in evidence.operators if row.table_rows == rows]
        goes += sum(row.ms for row in of_table if "dense_backward" in row.name)
        if optimizer.elements:
            goes += whole * tables * rows * shape[1] / optimizer.elements
        else:
            goes += sum(row.ms for row in passes if len(row.largest or ()) > 1)
        accesses, calls = SPARSE.get(optimizer.kind, SPARSE_ADAM)
        needs += evidence.calls_ms(calls * tables)
        needs += evidence.rows_ms(accesses * count, row_bytes, rows * tables * row_bytes)
        rows_used, rows_all = rows_used + count, rows_all + rows * tables
        same += of_table
        shapes += [shape] * tables
    if not shapes:
        return None
    shapes.sort(reverse=True)
    modules = [one for one in evidence.facts.embeddings if [one.rows, one.width] in shapes]
    change = f"nn.{modules[0].kind if modules else 'Embedding'}({shapes[0][0]}, {shapes[0][1]}, sparse=True)"
    if not takes_sparse:
        weights = ", ".join(f"{one.name}.weight" for one in modules if one.name) or "embedding.weight"
        lr = f"{optimizer.lr:g}" if optimizer.lr is not None else "lr"
        change += f"; rows = torch.optim.SparseAdam([{weights}], lr={lr})  # {optimizer.kind} gets the other parameters"
    tables_text = f"{len(shapes)} tables" if len(shapes) > 1 else "a table"
    seen = (
        f"A step uses {rows_used:,.0f} of the {rows_all:,.0f} rows ({rows_used / rows_all:.1%}) of {tables_text}, but "
        f"{optimizer.kind} and the gradient pass over all of them: {evidence.cost(goes, same)}."
    )
    settings = {"sparse": [list(shape) for shape in {tuple(shape) for shape in shapes}]} if optimizer.elements else {}
    added = evidence.queue_ms(SPARSE.get(optimizer.kind, SPARSE_ADAM)[1] * len(shapes))
    return evidence.advice("sparse", seen, change, goes, needs, added, **settings)


def optimizer_passes(evidence: AdviceFacts) -> Advice | None:
    """An optimizer that passes over its parameters operator by operator."""
    suggestions = []
    for optimizer in evidence.facts.optimizers:
        rows = evidence.optimizer_rows(optimizer.kind)
        goes = sum(row.ms for row in rows) + evidence.optimizer_python(optimizer.kind)
        seen = (
            f"{optimizer.kind} ({optimizer.way}) runs {sum(row.calls for row in rows):,.0f} operators "
            f"({names(rows)}): {evidence.cost(goes)}."
        )
        if optimizer.way != "fused" and optimizer.fusable and optimizer.kind in PASSES:
            fused, separate = PASSES[optimizer.kind]
            moved: float = optimizer.elements * optimizer.element_bytes * fused
            moved = moved or sum(row.bytes for row in rows) * fused / separate
            needs = evidence.stream_ms(moved, adamw=optimizer.kind.startswith("Adam")) + evidence.calls_ms(1)
            change = f"torch.optim.{optimizer.kind}(..., fused=True)"
            fixed, each = FUSED_CALLS
            host = evidence.queue_ms(2, fixed + each * optimizer.parameters) - evidence.calls_host_ms(rows)
            # The Python of foreach costs the host about as much.
            host = host if optimizer.way == "for-loop" else 0.0
            suggestions.append(evidence.advice("optimizer", seen, change, goes, needs, host, optimizer="fused"))
        elif optimizer.way == "for-loop" and optimizer.parameters > 1 and not optimizer.sparse:
            overhead = sum(row.limits.get("dispatch", 0.0) for row in rows)
            change = f"torch.optim.{optimizer.kind}(..., foreach=True)"
            needs = overhead / optimizer.parameters
            suggestions.append(evidence.advice("optimizer", seen, change, overhead, needs, optimizer="foreach"))
    return best(suggestions)


def cleared_gradients(evidence: AdviceFacts) -> Advice | None:
    """Gradients that are overwritten with zeros instead of released."""
    rows = [row for row in evidence.operators if "zero_grad" in (row.part or "") and "zero_" in row.name]
    goes = sum(row.ms for row in rows)
    seen = f"zero_grad writes zeros over every gradient: {evidence.cost(goes, rows)}." if rows else ""
    return evidence.advice("zero_grad", seen, "optimizer.zero_grad(set_to_none=True)", goes, zero_grad=True)


def precision(evidence: AdviceFacts) -> Advice | None:
    """Products in a precision beside which a faster one was measured."""
    ceilings = evidence.ceilings
    products = [row for row in evidence.operators if row.flops]
    by_precision = summed((row.precision or "float32", row.limits.get("compute", 0.0)) for row in products)
    if ceilings is None or not by_precision:
        return None
    now = max(by_precision, key=lambda name: by_precision[name])
    faster = ceilings.faster(now)
    if now not in ceilings.flops or not faster:
        return None
    # TF32 needs one line and no conversions; float32 is what everybody else computes in.
    best = next((name for name in ("tf32", "float32") if name in faster and now in ("float32", "float64")), faster[0])
    goes, needs = evidence.in_precision((row for row in products if (row.precision or "float32") == now), best)
    rates = f"{number(ceilings.flops[now])}FLOP/s, {best} {number(ceilings.flops[best])}FLOP/s"
    seen = f"Products in {now} take {evidence.cost(goes)}; this machine reaches {rates}."
    lines = {"tf32": 'torch.set_float32_matmul_precision("high")', "float32": "model.float(), and batches in float32"}
    autocast = f'with torch.autocast("{"cpu" if evidence.on_cpu else "cuda"}", torch.{best}): ...'
    # float16 needs a scaled loss.
    settings: dict[str, Any] = {"tf32": True} if best == "tf32" else {}
    if best == "bfloat16" and evidence.facts.has_model:
        settings = {"autocast": best}
    return evidence.advice("precision", seen, lines.get(best, autocast), goes, needs, **settings)


def product_shape(evidence: AdviceFacts) -> Advice | None:
    """A product far below its ceiling."""
    ceilings = evidence.ceilings
    rows = [row for row in evidence.operators if row.flops and row.kind == "product" and row.ms]
    row = max(rows, key=lambda row: row.limits.get("operator", 0.0), default=None)
    if ceilings is None or row is None or not row.limits.get("operator") or evidence.busy:
        return None
    least = row.flops / ceilings.product(row.precision) * 1e3
    if least >= FAR * row.ms:
        return None
    seen = (
        f"{row.name.removeprefix('aten::')} computes {number(row.flops / row.ms * 1e3)}FLOP/s where this "
        f"machine reaches {number(ceilings.product(row.precision))}FLOP/s: {evidence.cost(row.ms, [row])}."
    )
    pads = row.largest is None or any(size % 16 for size in row.largest)
    change = f"{'pad its sizes to multiples of 16 and ' * pads}pass contiguous operands: x = x.contiguous()"
    if row.ms < NOTICEABLE * evidence.step_ms:
        return None
    if any((other.part or "").endswith("backward") or "Backward" in other.name for other in evidence.operators):
        # What is contiguous in one pass is transposed in the other.
        seen += " Time both passes: an operand that is contiguous forward is transposed backward."
        return Advice("shape", seen, change)
    return evidence.advice("shape", seen, change, row.ms, least / FAR)


def attention(evidence: AdviceFacts) -> Advice | None:
    """Softmax between two batched products, instead of a fused kernel."""
    softmax = [row for row in evidence.operators if row.name in ("aten::_softmax", "aten::_softmax_backward_data")]
    forward = sum(row.calls for row in softmax if row.name == "aten::_softmax")
    products = sum(row.calls for row in evidence.operators if row.name in ("aten::bmm", "aten::baddbmm"))
    if not forward or products < 2 * forward or any("scaled_dot" in row.name for row in evidence.operators):
        return None
    parts = {row.part for row in softmax}
    beside = ("aten::masked_fill", "aten::native_dropout", "aten::div", "aten::mul", "aten::add", "aten::where")
    rows = [row for row in evidence.operators if row in softmax or (row.part in parts and row.name in beside)]
    around = [row for row in evidence.operators if row.kind == "product" and row.part in parts and row.flops]
    goes = sum(row.ms for row in (*rows, *around))
    seen = f"Softmax between two products writes all scores to memory: {evidence.cost(goes, softmax)}."
    change = "torch.nn.functional.scaled_dot_product_attention(query, key, value)"
    least = sum(row.flops / evidence.ceilings.product(row.precision) * 1e3 for row in around if evidence.ceilings)
    return evidence.advice("attention", seen, change, goes, min(goes, least / FUSED_ATTENTION))


def catalogue_softmax(evidence: AdviceFacts) -> Advice | None:
    """A softmax over every item of a catalogue, with the products that make its scores."""
    softmax = [row for row in evidence.operators if row.name.startswith("aten::_log_softmax") and row.largest]
    items = max((row.largest[-1] for row in softmax if row.largest), default=0)
    if items < SMALLEST_TABLE:
        return None
    rows = [row for row in evidence.operators if items in (row.largest or ()) and not optimizer_of(row.part)]
    goes = sum(row.ms for row in rows)
    seen = (
        f"A softmax over {items:,} items: its scores, their products and gradients take {evidence.cost(goes, softmax)}."
    )
    change = (
        f"items = torch.cat([target, torch.randint({items}, ({SAMPLED},))]); "
        "F.cross_entropy(hidden @ weight[items].T, torch.arange(len(target)))"
    )
    advice = evidence.advice("catalogue softmax", seen, change, goes, goes * min(1.0, 2 * SAMPLED / items))
    note = "it is another loss: a softmax over the targets of the batch and sampled items"
    return advice and replace(advice, changes="the results: another loss", note=note)


def repeated_passes(evidence: AdviceFacts) -> Advice | None:
    """Element-wise operators that each pass over memory; the optimizer's have their own rule."""
    if evidence.facts.compiled:
        return None
    plain = (row for row in evidence.operators if row.memory_bytes and not (row.flops or row.rows or row.fused))
    # A compiler fuses operators of torch, not those of other libraries.
    own = (row for row in plain if row.name.startswith("aten::") and row.kind == "elementwise")
    regions = grouped((row for row in own if not optimizer_of(row.part)), lambda row: row.part)
    rows = max(regions.values(), key=lambda rows: sum(row.ms for row in rows), default=[])
    goes, calls = sum(row.ms for row in rows), sum(row.calls for row in rows)
    if calls < 2 or not goes:
        return None
    moved = sum(row.bytes for row in rows)
    part = rows[0].part
    place = f"of {part.rpartition('/')[2]}" if part else "outside of all modules and regions"
    seen = (
        f"{calls:,.0f} element-wise passes {place} ({names(rows)}) move {number(moved)}B at "
        f"{number(moved / goes * 1e3)}B/s: {evidence.cost(goes, rows)}."
    )
    settings = {"compile": True} if evidence.facts.has_model else {}
    return evidence.advice("passes", seen, "model.compile()", goes, goes / calls, **settings)


def wide_rows(evidence: AdviceFacts) -> Advice | None:
    """Random rows from memory, which half the bytes would make faster."""
    row = max(evidence.operators, key=lambda row: row.random_ms, default=None)
    if evidence.ceilings is None or row is None or not row.row_bytes or row.row_bytes < NARROW:
        return None
    size, table = row.row_bytes, row.table_rows or 0
    same = [one for one in evidence.operators if one.row_bytes == size and one.random_ms]
    goes = sum(one.random_ms for one in same)
    ns = evidence.ceilings.row_ns(size)
    seen = (
        f"{sum(one.memory_rows for one in same):,.0f} random rows of {size} bytes come from memory, "
        f"at {ns:.3g} ns each: {evidence.cost(goes, same)}."
    )
    change = f"nn.Embedding({table}, {size // 4}, dtype=torch.float16)  # half the bytes of a row; or half its width"
    return evidence.advice("rows", seen, change, goes, goes * evidence.ceilings.row_ns(size // 2) / ns)


def repeated_rows(evidence: AdviceFacts) -> Advice | None:
    """Ids that a step looks up several times, so far apart that the row has left the cache."""
    read = (row for row in evidence.operators if row.name.removeprefix("aten::") in LOOKUPS)
    rows = [row for row in read if row.random_ms and 0 < row.distinct < row.memory_rows]
    row = max(rows, key=lambda row: row.random_ms * (1 - row.distinct / row.memory_rows), default=None)
    if row is None:
        return None
    goes = row.random_ms
    seen = (
        f"{row.name.removeprefix('aten::')} reads {row.memory_rows:,.0f} rows from memory, of which "
        f"{row.distinct:,.0f} are different: {evidence.cost(goes, [row])}."
    )
    change = "ids, back = ids.unique(return_inverse=True); rows = embedding(ids)[back]"
    return evidence.advice("duplicates", seen, change, goes, goes * row.distinct / row.memory_rows)


def padding(evidence: AdviceFacts) -> Advice | None:
    """Zeros that fill rows of ids to one length."""
    share = evidence.facts.loader.padding if evidence.facts.loader else None
    work = sum(row.ms for row in evidence.operators if not optimizer_of(row.part))
    if share is None or share * work < NOTICEABLE * evidence.step_ms:
        return None
    seen = f"{share:.0%} of the ids of a batch are zeros that fill rows; operators take {evidence.cost(work)}."
    change = "batches of rows of about the same length, cut to their longest; or packed rows with their offsets"
    return Advice("padding", seen, change)


def huge_pages(evidence: AdviceFacts) -> Advice | None:
    """Random rows in pages of 4 KiB."""
    goes = evidence.ms("latency")
    if not evidence.on_cpu or evidence.facts.huge_pages not in ("madvise", "never") or goes < 0.2 * evidence.step_ms:
        return None
    seen = (
        f"Random rows from memory take {evidence.cost(goes)}, and each may also miss the TLB: transparent huge pages "
        f"are on {evidence.facts.huge_pages}."
    )
    return Advice("huge pages", seen, "echo always | sudo tee /sys/kernel/mm/transparent_hugepage/enabled")


def page_faults(evidence: AdviceFacts) -> Advice | None:
    """Large tensors that are new memory in every step."""
    rows = [row for row in evidence.operators if row.new_bytes]
    moved = sum(row.new_bytes for row in rows)
    if evidence.ceilings is None or not evidence.on_cpu or not moved:
        return None
    goes = min(sum(row.ms for row in rows), moved / evidence.ceilings.first_touch * 1e3)
    rows.sort(key=lambda row: -row.new_bytes)
    seen = f"{number(moved)}B of new memory per step ({names(rows)}) cost page faults: {evidence.cost(goes, rows)}."
    variables = KEEPING.get(evidence.facts.allocator, {})
    start = " ".join(f"{name}={value}" for name, value in variables.items())
    change = f"{start} python ...  # or reuse the tensor: out=..." if start else "reuse the tensor: out=..."
    settings: dict[str, Any] = {"keep_memory": variables} if variables else {}
    return evidence.advice("page faults", seen, change, goes, moved / evidence.ceilings.stream * 1e3, **settings)


RULES: tuple[Callable[[AdviceFacts], Advice | None], ...] = (
    dense_table, optimizer_passes, cleared_gradients, precision, product_shape, attention, catalogue_softmax,
    *RULES_OF_THE_HOST, repeated_passes, wide_rows, repeated_rows, padding, huge_pages, page_faults,
)  # fmt: skip
