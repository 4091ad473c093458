"""Opens tables in tiers: the store that was decided on, and a cache in front of it."""

from __future__ import annotations

import os
import shutil
import weakref
from collections.abc import Mapping
from itertools import count
from pathlib import Path

import torch

from ...files import writing
from ...places import home
from .cache import TieredRows
from .config import TablesConfig, Tiers
from .store import FileRows, HostRows, RowStore

_numbers = count(1)


def open_tiers(
    tables: Mapping[str, int],
    tiers: Tiers,
    config: TablesConfig,
    *,
    dim: int,
    state: int,
    device: torch.device,
) -> TieredRows:
    """Rows of `dim` weights and `state` numbers of an optimizer."""
    width = dim + state
    store: RowStore
    folder = None
    if tiers.placement == "host":
        store = HostRows(sum(tables.values()), width)
    else:
        folder = own_folder(config.folder)
        store = FileRows(folder, dict(tables), width)
    slots = max(1, tiers.cache_bytes // (4 * width))
    rows = TieredRows(tables, store, dim=dim, slots=slots, config=config, device=device)
    weakref.finalize(rows, _close, store, folder)
    return rows


def _close(store: RowStore, folder: Path | None) -> None:
    store.close()
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def own_folder(parent: Path | None) -> Path:
    """A new folder for the table files of this process; those that killed processes left are removed."""
    parent = parent or home() / "tables"
    with writing(parent):
        parent.mkdir(parents=True, exist_ok=True)
        for left in parent.glob("process-*-*"):
            number = left.name.split("-")[1]
            if number.isdigit() and not _alive(int(number)):
                shutil.rmtree(left, ignore_errors=True)
        folder = parent / f"process-{os.getpid()}-{next(_numbers)}"
        folder.mkdir()
    return folder


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
