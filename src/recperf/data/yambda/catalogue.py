"""What `recperf data get | prepare | check | info | make | import` do with events; each answers with plain values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np

from ... import places
from ...errors import DataError, UsageError
from . import raw
from .config import HistoryConfig, WindowConfig
from .schema import LICENCE
from .store import EVENT_BYTES, MANIFEST, EventStore, open_store
from .synthesize.config import YambdaLike, default

if TYPE_CHECKING:
    from .imports.options import ImportOptions

Say = Callable[[str], None]
Progress = Callable[[int, int], None]
MADE_UP = "yambda-like"


def size_of(name: str) -> str:
    """The size in a real dataset's name."""
    return name.removeprefix("yambda-")


def raw_folder(name: str) -> Path:
    return places.dataset_folder(name) / "raw"


def store_folder(name: str) -> Path:
    return places.dataset_folder(name) / "store"


def get(name: str, *, offline: bool, bars: bool, say: Say) -> dict[str, Any]:
    if name == MADE_UP:
        what = f"{MADE_UP} is built in: there is nothing to fetch"
        raise UsageError(what, fix=f"recperf data make {MADE_UP} --path FOLDER, to see it as files")
    from . import download

    return {"name": name, **download.get(size_of(name), say=say, offline=offline, bars=bars)}


def prepare(
    name: str,
    *,
    path: Path | None,
    store: Path | None,
    memory: int,
    reference_layout: Path | None,
    history_length: int,
    min_history: int | None,
    progress: Callable[[str], Progress],
    say: Say,
) -> dict[str, Any]:
    """Raw files to a store, and on request to the reference's layout."""
    from .prepare import prepare as build

    if name == MADE_UP and path is None:
        raise UsageError(f"{MADE_UP} is made as a store", fix=f"recperf data make {MADE_UP} --path FOLDER")
    files = raw.locate(path or _downloaded(name), None if name == MADE_UP else size_of(name))
    folder, began = (store or store_folder(name)).expanduser(), monotonic()
    there = (folder / MANIFEST).is_file()
    build(files, folder, name=name, memory=memory, progress=progress("preparing"), say=say)
    taken = monotonic() - began
    made = open_store(folder)
    answer = {
        "name": name,
        "folder": str(folder),
        "prepared": not there,
        "events": made.events,
        "users": made.users,
        "items": made.items,
        "split": made.manifest.get("split"),
        "store_bytes": sum(column["bytes"] for column in made.manifest["columns"].values()),
        "bytes_an_event": EVENT_BYTES,
        "digest": made.digest,
        "licence": made.manifest["licence"],
        "seconds": round(taken, 2),
    }
    if reference_layout is not None:
        from .reference.layout import write_layout

        write_layout(
            files,
            made,
            reference_layout.expanduser(),
            history_length=history_length,
            min_history=min_history,
            memory=memory,
            progress=progress("writing the reference's layout"),
        )
        answer["reference_layout"] = str(reference_layout.expanduser() / f"processed_{files.size}")
    return answer


def check(name: str, *, path: Path | None, progress: Callable[[str], Progress]) -> dict[str, Any]:
    """Read a whole dataset, raw files and store; damage is an error."""
    from . import check as reading
    from . import download

    answer: dict[str, Any] = {"name": name, "intact": True}
    found = False
    for kind, place in _places(name, path):
        found = True
        if kind == "raw":
            files = raw.locate(place, None if name == MADE_UP else size_of(name))
            if path is None:
                download.verify(size_of(name))
            answer["raw"] = reading.check_raw(files, progress("checking raw files"))
        else:
            answer["store"] = reading.check_store(_opened(place), progress("checking the store"))
    if not found:
        raise _missing(name, path)
    return answer


def find(name: str, *, path: Path | None, say: Say) -> EventStore:
    """A prepared dataset; yambda-like is made first if it is not there."""
    if name == MADE_UP and path is None:
        return embedded(say=say)
    there = dict(_places(name, path))
    if "store" in there:
        return _opened(there["store"])
    if "raw" in there:
        where = f" --path {path}" if path else ""
        raise DataError(
            f"{name} is here but not prepared",
            where={"folder": there["raw"]},
            fix=f"recperf data prepare {name}{where}",
        )
    raise _missing(name, path)


def usual_length(store: EventStore) -> int:
    """A history length that fits a store: the benchmark's, or 100 where hardly any user has so many events."""
    full = HistoryConfig().length
    enough = int((np.diff(store.user_first_U1) > full).sum())
    return full if enough * 10 >= store.users else 100


def info(
    store: EventStore, *, windows: WindowConfig, history: HistoryConfig, plot: Path | None = None
) -> dict[str, Any]:
    """Describe a store, and draw it on request."""
    from .describe import describe

    found = describe(store, windows, history)
    if plot is not None:
        from .plot import draw

        draw(found, plot)
        found["plot_file"] = str(plot)
    del found["plot"]
    return found


def embedded(*, say: Say, config: YambdaLike | None = None) -> EventStore:
    """The embedded dataset as a store in the cache folder, made when it is not there."""
    from . import synthesize

    config = config or default()
    folder = places.dataset_folder(MADE_UP) / synthesize.key(config)
    if not (folder / MANIFEST).is_file():
        say(f"making {MADE_UP}, once, in {folder}")
        synthesize.write_store(config, folder)
    return open_store(folder)


def make(config: YambdaLike, *, path: Path, form: str, progress: Progress) -> dict[str, Any]:
    """Write the embedded dataset, as a store or as raw files in the real ones' layout."""
    from . import synthesize

    folder, began = path.expanduser(), monotonic()
    if form == "store":
        synthesize.write_store(config, folder, progress=progress)
        store = open_store(folder)
        facts = {"events": store.events, "users": store.users, "items": store.items, "digest": store.digest}
    else:
        facts = synthesize.write_raw(config, folder, progress=progress)
    taken = monotonic() - began
    return {
        "name": MADE_UP,
        "folder": str(folder),
        "form": form,
        "synthetic": True,
        "seed": config.seed,
        **facts,
        "seconds": round(taken, 2),
    }


def import_events(options: ImportOptions, *, store: Path | None, progress: Progress) -> dict[str, Any]:
    """Events of a user's own file as a store."""
    from .imports import import_events as build

    folder, began = (store or store_folder(options.name)).expanduser(), monotonic()
    build(options, folder, progress=progress)
    made = open_store(folder)
    taken = monotonic() - began
    hidden = ("format", "version", "columns", "seal", "identity", "digest", "name")
    return {
        "name": options.name,
        "folder": str(folder),
        **{key: value for key, value in made.manifest.items() if key not in hidden},
        "digest": made.digest,
        "seconds": round(taken, 2),
    }


def _opened(place: Path) -> EventStore:
    from .reference.cache import open_events

    return open_events(place)


def _places(name: str, path: Path | None) -> list[tuple[str, Path]]:
    """What there is to look at: raw files and stores."""
    if path is None:
        pairs = [("raw", raw_folder(name)), ("store", store_folder(name))]
        return [(kind, place) for kind, place in pairs if place.is_dir()]
    path = path.expanduser()
    if not path.exists():
        raise DataError("there is nothing here", where={"path": path}, fix="check --path")
    store = (path / MANIFEST).exists() or (path / "_READY").exists() or path.name.startswith("processed_")
    return [("store" if store else "raw", path)]


def _downloaded(name: str) -> Path:
    folder = raw_folder(name)
    if not folder.is_dir():
        raise _missing(name, None)
    return folder


def _missing(name: str, path: Path | None) -> DataError:
    return DataError(
        f"{name} is not on this machine",
        where={"folder": path or places.dataset_folder(name)},
        fix=f"recperf data get {name} ({LICENCE}), or name a folder with --path",
    )
