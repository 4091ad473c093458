"""The work of an operator from the sizes of its inputs: FLOPs, bytes, random rows; None where it does not follow.

Shapes: M, K, N are rows, inner size and columns of a product; B its batch.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from functools import lru_cache
from math import prod
from typing import NamedTuple

from ..operators import RESULT, ROW_ACCESS, TABLE_BATCHED, UPDATING, CallWork, is_special, traffic_kind
from .nesting import NONE, Nesting
from .read import ELEMENT_BYTES, SPARSE, TracedShapes

LISTED_BYTES = 4
"""Bytes of an element in a list of tensors, whose types a trace does not name: parameters are float32 by default."""
CACHED = 1 << 14
"""Operators of equal names and sizes whose work is remembered: a trace repeats its steps."""
LARGEST = 10**18
"""More work than this in one call is damage."""
_PRODUCTS = {"aten::mm", "aten::addmm", "aten::_addmm_activation", "aten::_scaled_mm", "aten::_int_mm"}
_BATCHED = {"aten::bmm", "aten::baddbmm"}
_ADDING = {"aten::addmm", "aten::_addmm_activation", "aten::baddbmm"}
"""Products whose first input is added."""
_ATTENTION = re.compile(r"aten::_scaled_dot_product_\w*attention\w*?(_backward)?$")
_RECURRENT = re.compile(r"aten::(?:mkldnn_rnn_layer|_cudnn_rnn|miopen_rnn)(_backward)?$")
_CONVOLUTION = re.compile(r"aten::_?convolution$")
_CREATING = re.compile(r"aten::(?:new_)?(?:zeros|ones|full)(?:_like)?$")
_INTEGERS = {"long int", "long", "int"}
_PRECISION = {"float": "float32", "double": "float64", "c10::half": "float16", "c10::bfloat16": "bfloat16"}


class AccessedRows(NamedTuple):
    """Random rows of a table that an operator reads or writes."""

    number: int
    row_bytes: int
    table_rows: int


WRAPS = 0.5
"""An operator only passes on work if operators inside it move more than this share of its bytes."""


@lru_cache(maxsize=CACHED)
def work_of(name: str, shapes: TracedShapes | None) -> CallWork | None:
    """The work of a call from the sizes of its inputs; None where it does not follow. Equal calls share the object."""
    if shapes is not None and SPARSE in shapes.types:
        return None
    arithmetic, sizes, rows = flops(name, shapes), traffic(name, shapes), random_rows(name, shapes)
    if arithmetic is None and sizes is None and rows is None:
        return None
    work = CallWork(name, flops=arithmetic or 0, precision=precision(shapes) or "", largest=_largest(shapes))
    if sizes is not None and _sane(sum(sizes)):
        work.bytes, work.written = sum(sizes), sizes[1]
    if rows is not None:
        work.rows, work.row_bytes, work.table_rows = rows
    elif shapes is not None and is_special(name, integers=precision(shapes) is None):
        work.special = max((count for count, _ in _tensors(shapes)), default=0)
    return work


def flops(name: str, shapes: TracedShapes | None) -> int | None:
    """Multiplications and additions of matrix products, convolutions, attention and recurrent layers."""
    if shapes is None:
        return None
    sizes = _product(name, shapes)
    if sizes is not None:
        return _sane(2 * prod(sizes))
    for pattern, count in ((_ATTENTION, _attention), (_RECURRENT, _recurrent), (_CONVOLUTION, _convolution)):
        match = pattern.match(name)
        if match:
            return _sane(count(shapes, match.lastindex is not None))
    return None


def precision(shapes: TracedShapes | None) -> str | None:
    """The precision of an operator: the type of its first tensor."""
    types = (kind.lower() for kind, dim in zip(shapes.types, shapes.dims) if dim) if shapes else ()
    return next((_PRECISION[kind] for kind in types if kind in _PRECISION), None)


def traffic(name: str, shapes: TracedShapes | None) -> tuple[int, int] | None:
    """(bytes read, bytes written) if nothing is cached; of a table only the rows that are used."""
    if shapes is None:
        return None
    if TABLE_BATCHED.match(name):
        batched = _table_batched(name, shapes)
        return batched and (batched.number * batched.row_bytes, 0)
    op = name.removeprefix("aten::")
    if op.startswith(("_foreach_", "_fused_")) or op in ("cat", "stack", "_cat"):
        return _listed(op, shapes)
    tensors = _tensors(shapes)
    if not tensors:
        return None
    rows = random_rows(name, shapes)
    read = sum(count * size for count, size in tensors)
    width = tensors[0][1]
    if rows is not None:
        # Besides the rows of the table: what is gathered or spread, and the ids.
        other = read - _table_bytes(name, shapes)
        bags = prod(shapes.dims[2]) if "_embedding_bag" in op and len(shapes.dims) > 2 else rows.number
        return rows.number * rows.row_bytes + other, bags * rows.row_bytes
    sizes = _product(name, shapes)
    if sizes is not None:
        batch, row_count, _, columns = sizes
        return read, batch * row_count * columns * width
    largest = max(count for count, _ in tensors)
    if _ATTENTION.match(name):
        return read, tensors[0][0] * width
    kind = traffic_kind(name)
    if kind == "writing":
        return 0, tensors[0][0] * width
    if kind == "copying":
        return sum(count * size for count, size in tensors[1:]), tensors[0][0] * width
    if kind == "sorting":
        return read, largest * (width + 8)
    if kind == "pointwise":
        return read, largest * width
    return (read, 0) if kind == "reducing" else None


def random_rows(name: str, shapes: TracedShapes | None) -> AccessedRows | None:
    """The rows of a table that an operator reads or writes in any order."""
    if shapes is not None and TABLE_BATCHED.match(name):
        return _table_batched(name, shapes)
    access = ROW_ACCESS.get(name)
    if access is None or shapes is None or len(shapes.dims) <= access.ids or not shapes.types or not shapes.dims[0]:
        return None
    place = max(0, access.table)
    table, ids, numbers = shapes.dims[place], shapes.dims[access.ids], shapes.numbers
    width = ELEMENT_BYTES.get(shapes.types[place].lower(), 0)
    if not width:
        return None
    if access.table == RESULT:
        # The first input is the gradient; the number of rows is the first number among the inputs.
        table_rows = next((values[0] for values in numbers if values), 0)
        return AccessedRows(prod(ids), table[-1] * width, table_rows) if table_rows else None
    if access.unit == "element":
        return AccessedRows(prod(ids), width, prod(table)) if ids else None
    if access.unit == "listed":
        if not shapes.lists:
            return None
        indexed = max(1, min(len(shapes.lists[0]), len(table)))
        return AccessedRows(
            max(prod(dim) for dim in shapes.lists[0]), prod(table[indexed:]) * width, prod(table[:indexed])
        )
    along = numbers[1][0] if access.ids == 2 and len(numbers) > 1 and numbers[1] else 0
    table_rows = table[along] if -len(table) <= along < len(table) else 0
    return AccessedRows(prod(ids), prod(table) // table_rows * width, table_rows) if table_rows else None


def _table_batched(name: str, shapes: TracedShapes) -> AccessedRows | None:
    """The rows of FBGEMM's operators over many tables, whose arguments a trace has in order but without names: tables,
    vectors that describe them, a number of columns, where rows begin, ids, offsets, and the states of an optimizer."""
    kinds = [kind.lower() if len(dim) == 1 else "" for dim, kind in zip(shapes.dims, shapes.types)]
    vectors = [place for place, kind in enumerate(kinds) if kind in _INTEGERS]
    floats = [place for place, kind in enumerate(kinds) if kind in _PRECISION and shapes.dims[place][0]]
    number = next(
        (place for place, values in enumerate(shapes.numbers) if values and place > min(vectors, default=0)), len(kinds)
    )
    after = [vector for vector in vectors if vector > number]
    if len(after) < 3 or not floats or floats[0] > vectors[0]:
        return None
    updates, columns, features = UPDATING.search(name), shapes.numbers[number][0], shapes.dims[vectors[0]][0]
    if "nobag" not in name:
        # The mean of all features. The backward pass names the widest row, its gradient has the columns of all.
        columns = (shapes.dims[0][-1] if updates else columns) // max(1, features)
    table_rows = max(1, sum(shapes.dims[table][0] for table in floats if table < vectors[0]) // max(1, columns))
    row_bytes, ids = columns * ELEMENT_BYTES[kinds[floats[0]]], shapes.dims[after[1]][0]
    if not updates:
        return AccessedRows(ids, row_bytes, table_rows)
    # The state of a row lies elsewhere: another random row.
    states = [shapes.dims[state][0] / table_rows for state in floats if state > after[2]]
    states = [columns for columns in states if columns > 0.5]
    pieces = 1 + len(states)
    return AccessedRows(2 * pieces * ids, round((row_bytes + LISTED_BYTES * sum(states)) / pieces), pieces * table_rows)


def creates(name: str) -> bool:
    """Whether an operator allocates a tensor that an operator inside it then fills."""
    return _CREATING.match(name) is not None


def _largest(shapes: TracedShapes | None) -> tuple[int, ...]:
    """The sizes of the largest tensor among the inputs, those in lists too."""
    listed = [dim for tensors in shapes.lists for dim in tensors] if shapes else []
    return max([*(shapes.dims if shapes else ()), *listed], key=prod, default=())


def _table_bytes(name: str, shapes: TracedShapes) -> int:
    if name.endswith(("_dense_backward", "_sparse_backward")):
        return 0
    return prod(shapes.dims[0]) * ELEMENT_BYTES.get(shapes.types[0].lower(), 0)


def _listed(op: str, shapes: TracedShapes) -> tuple[int, int] | None:
    """Operators on lists of tensors. An optimizer writes all of them but the gradients, others write the first."""
    sizes = [sum(prod(dim) for dim in tensors) * LISTED_BYTES for tensors in shapes.lists]
    if not sizes:
        return None
    if op.startswith("_fused_"):
        return sum(sizes), sum(sizes) - (sizes[1] if len(sizes) > 1 else 0)
    return sum(sizes), sizes[0]


def _tensors(shapes: TracedShapes) -> list[tuple[int, int]]:
    """(elements, bytes per element) of every input tensor of a known type."""
    known = ((dim, ELEMENT_BYTES.get(kind.lower())) for dim, kind in zip(shapes.dims, shapes.types))
    return [(prod(dim), size) for dim, size in known if size]


def _sane(work: int | None) -> int | None:
    return work if work is not None and 0 <= work <= LARGEST else None


def _product(name: str, shapes: TracedShapes) -> tuple[int, int, int, int] | None:
    """(B, M, K, N) of a matrix product."""
    dims = shapes.dims[1:] if name in _ADDING else shapes.dims
    if len(dims) < 2:
        return None
    left, right = dims[0], dims[1]
    if name in _PRODUCTS and len(left) == len(right) == 2:
        return 1, left[0], left[1], right[1]
    if name in _BATCHED and len(left) == len(right) == 3:
        return left[0], left[1], left[2], right[2]
    if name == "aten::linear" and left and len(right) == 2:
        return 1, prod(left[:-1]), left[-1], right[0]
    return None


def _attention(shapes: TracedShapes, backward: bool) -> int | None:
    """Both products of attention; the backward pass has five where the forward pass has two."""
    dims = shapes.dims[1:] if backward else shapes.dims
    if len(dims) < 3 or any(len(dim) != 4 for dim in dims[:3]):
        return None
    (batch, heads, queries, dim), (_, _, keys, _), (_, _, _, values) = dims[:3]
    forward = 2 * batch * heads * queries * keys * (dim + values)
    return forward * 5 // 2 if backward else forward


def _recurrent(shapes: TracedShapes, backward: bool) -> int | None:
    """A product with every weight matrix at every step of the sequence."""
    if not shapes.dims or len(shapes.dims[0]) != 3:
        return None
    weights = [dim for tensors in shapes.lists for dim in tensors] or list(shapes.dims[1:3])
    forward = 2 * prod(shapes.dims[0][:2]) * sum(prod(dim) for dim in weights if len(dim) == 2)
    return 2 * forward if backward else forward


def _convolution(shapes: TracedShapes, backward: bool) -> int | None:
    """convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)."""
    if len(shapes.dims) < 2 or len(shapes.dims[0]) < 3 or len(shapes.dims[1]) != len(shapes.dims[0]):
        return None
    (batch, _, *sizes), (channels, *kernel) = shapes.dims[0], shapes.dims[1]
    numbers = [*shapes.numbers, *[()] * 6]
    out = []
    for axis, size in enumerate(sizes):
        stride, padding, dilation = (
            values[min(axis, len(values) - 1)] if values else default
            for values, default in zip(numbers[3:6], (1, 0, 1))
        )
        out.append(max(0, (size + 2 * padding - dilation * (kernel[axis + 1] - 1) - 1) // max(1, stride) + 1))
    return 2 * batch * channels * prod(out) * prod(kernel)


def counted(nesting: Nesting, inside: Iterable[int]) -> dict[int, CallWork | None]:
    """The work of every operator, with no work counted twice; None where it is not known or counts for an operator
    inside it.

    An operator often calls another that does the work: a linear layer calls addmm, which copies its bias. Work counts
    for the innermost product, otherwise for the innermost lookup of rows and for the innermost operator whose bytes are
    known.
    """
    works = {i: work_of(nesting.events[i].name, nesting.events[i].shapes) for i in inside}
    own = {i: work for i, work in works.items() if work is not None}
    products = {i for i, work in own.items() if work.flops}
    products -= _above_any(nesting, products)
    within: set[int] = set()
    for i in works:
        above = nesting.above(nesting.parent[i], "op")
        if above in products or above in within:
            within.add(i)
    lookups = {i for i, work in own.items() if work.rows} - within
    lookups -= _above_any(nesting, lookups)
    streams = set(own) - within - lookups - _above_any(nesting, products | lookups)
    inner: defaultdict[int, int] = defaultdict(int)
    for i in reversed(works):
        # Operators come after those around them. One that copies a scalar still does its own work.
        size = own[i].bytes if i in streams else 0
        if i in streams and inner[i] > WRAPS * size:
            streams.discard(i)
        inner[nesting.above(nesting.parent[i], "op")] += max(inner[i], size)
    working = products | lookups | streams
    return {i: own[i] if i in working else None for i in works}


def _above_any(nesting: Nesting, indices: Iterable[int]) -> set[int]:
    ancestors: set[int] = set()
    for i in indices:
        above = nesting.parent[i]
        while above != NONE and above not in ancestors:
            ancestors.add(above)
            above = nesting.parent[above]
    return ancestors
