"""Opens tables in tiers: the store that was decided on, and a cache in front of it."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
import weakref
from collections.abc import Mapping
from itertools import count
from pathlib import Path

import torch

from ...errors import RecperfError
from ...files import open_regular, writing
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
            if not _in_use(left):
                shutil.rmtree(left, ignore_errors=True)
        folder = parent / f"process-{os.getpid()}-{next(_numbers)}"
        folder.mkdir()
    return folder


def _in_use(folder: Path) -> bool:
    """Whether a process holds the lock of the folder, or has just created it and may be about to."""
    try:
        with open(open_regular(folder / "lock"), "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return time.time() - folder.stat().st_mtime < 60
    except (OSError, RecperfError):
        return True
    return False
