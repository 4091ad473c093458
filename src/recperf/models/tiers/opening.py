"""Opens tables in tiers: the store that was decided on, and a cache in front of it."""

from __future__ import annotations

import importlib
import threading
import weakref
from collections.abc import Mapping
from contextlib import ExitStack, closing

import torch

from ...files import writing
from ...folders import temporary_folder
from ...locations import home
from .cache import Memory, TieredRows
from .config import Tiers
from .store import FileRows, HostRows, RowStore


def open_tiers(
    tables: Mapping[str, int],
    tiers: Tiers,
    *,
    dim: int,
    state: int,
    device: torch.device,
    memory: Memory | None = None,
) -> TieredRows:
    """Rows of `dim` weights and `state` numbers of an optimizer."""
    width = dim + state
    store: RowStore
    with ExitStack() as stack:
        if tiers.placement == "host":
            store = HostRows(sum(tables.values()), width)
        else:
            parent = tiers.options.folder or home() / "tables"
            with writing(parent):
                parent.mkdir(parents=True, exist_ok=True)
                folder = stack.enter_context(temporary_folder("process-", beside=parent))
            store = FileRows(folder, dict(tables), width)
        stack.enter_context(closing(store))
        slots = max(1, tiers.cache_bytes // (4 * width))
        rows = TieredRows(tables, store, dim=dim, slots=slots, config=tiers.options, device=device, memory=memory)
        weakref.finalize(rows, stack.pop_all().close)
    _open.add(rows)
    return rows


_open: weakref.WeakSet[TieredRows] = weakref.WeakSet()


def _end_all() -> None:
    for tiers in list(_open):
        tiers.end()


# Before Python waits for the threads of executors, of which one may wait for room that nobody will make any more. There
# is no public hook for that moment; the last one that was registered is called first.
importlib.import_module("concurrent.futures.thread")
getattr(threading, "_register_atexit", lambda function: None)(_end_all)
