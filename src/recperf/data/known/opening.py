"""Opens the events in a folder, whoever wrote them."""

from __future__ import annotations

from pathlib import Path

from ...errors import DataError
from ..events.store import MANIFEST, EventStore, is_store_folder, open_store
from .mlperf_cache import CACHE_META, READY, open_reference


def open_events(path: Path) -> EventStore:
    """Open an event store or a reference cache, whichever the folder contains."""
    path = path.expanduser()
    if is_store_folder(path):
        return open_store(path)
    if (path / READY).exists() or (path / CACHE_META).exists() or path.name.startswith("hstu_cache_L"):
        return open_reference(path)
    caches = sorted(folder for folder in path.glob("hstu_cache_L*") if folder.is_dir())
    if len(caches) == 1:
        return open_reference(caches[0])
    what = (
        f"there are no events here: no {MANIFEST} of an event store, and no {READY} of a reference cache, here or in a "
    )
    what += "folder hstu_cache_L*" + ("" if path.is_dir() else "; the folder does not exist")
    if caches:
        what = f"there are {len(caches)} caches here: {', '.join(folder.name for folder in caches)}"
    raise DataError(what, where={"folder": path}, fix="name one of them" if caches else "recperf data prepare --help")
