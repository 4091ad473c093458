"""Finds the random rows that an operator accesses: those of a lookup's ids, of a sparse gradient's indices, or of the
bags of FBGEMM's operators over many tables.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .operators import CACHE_FILL, RESULT, ROW_ACCESS, TABLE_BATCHED, UPDATING, traffic_kind

MOST_IDS = 1 << 22
"""Ids of one call that are looked at; a longer list is counted by its first part."""
_WEIGHTS = ("weights", "host_weights", "dev_weights", "uvm_weights")
_STATES = ("_host", "_dev", "_uvm", "_cpu")
"""End the names of the tensors in which FBGEMM's optimizers keep the states of rows."""
_SCALE_BYTES = 4
"""Scale and offset of a quantized row."""
_BITS = {0: 32, 1: 16, 2: 8, 3: 4, 4: 2, 5: 16, 6: 8}
"""Bits of a weight by FBGEMM's number of its type."""


class RandomRows(NamedTuple):
    """Rows of a table that one call accesses."""

    address: int
    """Of the table; calls with the same address access the same rows."""
    ids: Tensor
    row_bytes: int
    table_rows: int
    accesses: int = 1
    """How often each id is accessed: a row that is updated is read and written."""
    tables: frozenset[int] = frozenset()
    """Addresses of the tensors of which nothing but these rows is accessed."""
    in_host_memory: bool = False
    """Whether a device reads them from the memory of the host."""


def random_rows(name: str, arguments: dict[str, Any], result: Any, written: set[int]) -> RandomRows | None:
    """The rows that an operator accesses; None where it accesses none or its arguments do not tell.

    `arguments` are named as in the operator's schema, `written` has the addresses of those it changes in place.
    """
    if TABLE_BATCHED.match(name):
        return _table_batched(name, arguments)
    if CACHE_FILL.match(name):
        return _filled(arguments)
    access = ROW_ACCESS.get(name)
    if access is None:
        return _sparse(arguments, result, written) if traffic_kind(name) == "pointwise" else None
    values = list(arguments.values())
    if len(values) <= access.ids:
        return None
    table, ids = result if access.table == RESULT else values[access.table], values[access.ids]
    if not _is_dense(table) or not table.dim():
        return None
    along = values[1] if access.ids == 2 and isinstance(values[1], int) else 0
    width, table_rows = table.numel() // max(1, table.shape[along]), table.shape[along]
    if access.unit == "element":
        width, table_rows = 1, table.numel()
    elif access.unit == "listed":
        ids, table_rows = _flat(table, ids)
        width = table.numel() // max(1, table_rows)
    if not isinstance(ids, Tensor) or ids.dtype.is_floating_point:
        return None
    # A new result is as large as the table: the rows are not all that is accessed.
    only_rows = access.table != RESULT and (not access.updates or address_of(table) in written)
    tables = frozenset({address_of(table)} if only_rows else ())
    return RandomRows(address_of(table), ids, width * table.element_size(), table_rows, 1 + access.updates, tables)


def rows_of_table(table: Tensor, ids: Tensor, *, updates: bool) -> RandomRows:
    """The rows of a table with the given ids."""
    row_bytes = table.numel() // max(1, table.shape[0]) * table.element_size()
    return RandomRows(address_of(table), ids, row_bytes, table.shape[0], 1 + updates, frozenset({address_of(table)}))


def address_of(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return id(tensor)


def memory_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """The tensors with the data of this one: of a sparse one its indices and values."""
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    return (tensor,) if tensor.layout == torch.strided else ()


def _is_dense(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided


def _flat(table: Tensor, ids: Any) -> tuple[Tensor | None, int]:
    """One id for every row that a list of ids, one per dimension, selects; and the number of rows of the table."""
    places = [place for place, item in enumerate(ids) if isinstance(item, Tensor)]
    if not places or places != list(range(places[0], places[-1] + 1)):
        return None, 0
    present = [ids[place] for place in places]
    if present[0].dtype == torch.bool:
        return (present[0].reshape(-1).nonzero(), present[0].numel()) if len(present) == 1 else (None, 0)
    sizes = table.shape[places[0] : places[-1] + 1]
    together = torch.broadcast_tensors(*present)  # type: ignore[no-untyped-call]
    return _joined(together, sizes), prod(sizes)


def _joined(indices: Any, sizes: Any) -> Tensor:
    """The number of each row in the order of memory, from one index per dimension."""
    flat: Tensor = indices[0]
    for index, size in zip(indices[1:], sizes[1:]):
        flat = flat * size + index
    return flat


def _sparse(arguments: dict[str, Any], result: Any, written: set[int]) -> RandomRows | None:
    """The rows of a table that the indices of a sparse operand of the same size select."""
    tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
    sparse = next((tensor for tensor in tensors if tensor.layout == torch.sparse_coo), None)
    if sparse is None:
        return None
    table = next((tensor for tensor in tensors if _is_dense(tensor) and tensor.shape == sparse.shape), None)
    if table is None:
        return None
    dims, in_place = sparse.sparse_dim(), address_of(table) in written
    # A new dense result is a copy of the whole table.
    only_rows = in_place or not _is_dense(result)
    return RandomRows(
        address_of(table),
        _joined(sparse._indices(), sparse.shape),
        prod(table.shape[dims:]) * table.element_size(),
        prod(table.shape[:dims]),
        2 if _is_dense(result) else 1,
        frozenset({address_of(table)} if only_rows else ()),
    )


def _table_batched(name: str, arguments: dict[str, Any]) -> RandomRows | None:
    """The rows of many tables in a few tensors. The bags of a feature are a part of `offsets`, its rows begin at
    `hash_size_cumsum` among those of all tables, and its row width is in `D_offsets`."""
    tensors: dict[str, Tensor] = {key: value for key, value in arguments.items() if _is_dense(value) and value.numel()}
    weights = [tensors[key] for key in _WEIGHTS if key in tensors]
    if not weights or not {"indices", "offsets", "weights_offsets"} <= tensors.keys():
        return None
    indices, offsets, starts = (tensors[key] for key in ("indices", "offsets", "weights_offsets"))
    features = starts.numel()
    widths = tensors["D_offsets"].diff() if "D_offsets" in tensors else torch.full_like(starts, int(arguments["D"]))
    # With batches of several sizes, `B_offsets` tells where the bags of a feature begin.
    bags = tensors["B_offsets"].long() if "B_offsets" in tensors else slice(None, None, (len(offsets) - 1) // features)
    lengths = offsets[bags].diff()
    row_bytes = widths * weights[0].element_size()
    if "weights_tys" in tensors:
        types = [int(kind) for kind in tensors["weights_tys"].cpu()]
        bits = torch.tensor([_BITS.get(kind, 8) for kind in types], device=widths.device)
        scales = torch.tensor([_SCALE_BYTES * (kind in (2, 3, 4)) for kind in types], device=widths.device)
        alignment = int(arguments.get("row_alignment") or 1)
        row_bytes = ((widths * bits + 7) // 8 + scales + alignment - 1) // alignment * alignment
    mean_bytes = int((lengths * row_bytes).sum()) // max(1, int(lengths.sum()))
    table_rows = sum(table.nbytes for table in weights) // max(1, mean_bytes)
    starts = starts // row_bytes.max()
    if "hash_size_cumsum" in tensors:
        starts, table_rows = tensors["hash_size_cumsum"][:features], int(tensors["hash_size_cumsum"][-1])
    ids = torch.repeat_interleave(starts, lengths.to(starts.device)) + indices
    tables = frozenset(map(address_of, weights))
    # Managed memory stays on the host; with a cache on the device its rows are read from there.
    in_host_memory = indices.is_cuda and "uvm_weights" in tensors and "lxu_cache_weights" not in tensors
    if not UPDATING.search(name):
        return RandomRows(address_of(weights[0]), ids, mean_bytes, table_rows, 1, tables, in_host_memory)
    # Gradients of equal rows are summed first. The state of a row lies elsewhere: another random row.
    states = [state for key, state in tensors.items() if key.endswith(_STATES) and state.numel() >= table_rows]
    pieces = 1 + len(states)
    all_bytes = mean_bytes + sum(state.nbytes // max(1, table_rows) for state in states)
    ids = torch.cat([torch.unique(ids) + piece * table_rows for piece in range(pieces)])
    tables |= frozenset(map(address_of, states))
    return RandomRows(address_of(weights[0]), ids, all_bytes // pieces, pieces * table_rows, 2, tables, in_host_memory)


def _filled(arguments: dict[str, Any]) -> RandomRows | None:
    """The rows of a batch that a cache on the device needs; those that it holds already are among them."""
    host, ids, cache = (arguments.get(key) for key in ("weights", "linear_cache_indices", "lxu_cache_weights"))
    if not (isinstance(host, Tensor) and isinstance(ids, Tensor) and isinstance(cache, Tensor) and cache.dim() == 2):
        return None
    row_bytes = cache.shape[1] * cache.element_size()
    tables = frozenset((address_of(host), address_of(cache)))
    return RandomRows(address_of(host), torch.unique(ids), row_bytes, cache.shape[0], 1, tables, in_host_memory=True)
