"""Imports a file of a user as a dataset, replaces and removes it, for `recperf data` and `recperf.dataset`."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import locations
from ..errors import ConfigError, DataError, UsageError
from ..files import writing
from ..folders import alone
from . import datasets
from .config import SplitOptions
from .datasets import Dataset
from .events.options import ImportOptions
from .rows.options import ClickOptions

if TYPE_CHECKING:
    from .split.record import Split

_ASIDE = ".replaced"
"""How the name of a store ends while another takes its folder."""
Progress = Callable[..., Callable[..., None]]
"""Returns what is called with how much of some work is done, and with all of it, for the work's name and its unit."""


def import_file(
    options: ImportOptions | ClickOptions,
    *,
    split: SplitOptions,
    store: Path | None = None,
    replace: bool = False,
    progress: Progress,
) -> dict[str, Any]:
    """Import the file that the options name, into `store` or under the dataset's name, and describe the dataset. A
    finished import of the same file and options is left as it is, but for a split that is asked for. With `replace` the
    import takes the folder of the dataset of this name, which stays if the import fails."""
    kind = "clicks" if isinstance(options, ClickOptions) else "events"
    if store is not None:
        if replace:
            raise UsageError("a dataset is replaced by its name", fix="--name NAME in place of --store")
        return _described(options, split, store, progress)
    folder = locations.dataset_folder(options.name)
    if not replace:
        datasets.refuse_other_kind(options.name, kind)
    existed = folder.exists()
    try:
        with alone(folder, what=f"importing {options.name}"), _set_aside(options.name, wished=replace):
            # An import of the other kind may have ended just before.
            datasets.refuse_other_kind(options.name, kind)
            return _described(options, split, folder / Path(datasets.KINDS[kind].manifest).parent, progress)
    finally:
        if not existed:
            # Of an import that failed nothing is left.
            with suppress(OSError):
                folder.rmdir()


def _described(options: Any, split: SplitOptions, folder: Path, progress: Progress) -> dict[str, Any]:
    """Import into a folder, divide what is there, and describe it."""
    if isinstance(options, ClickOptions):
        from .rows.imports import make

        facts = make(options, folder, reading=progress("reading", "bytes"), rows=progress("writing", "rows"))
    else:
        from .events.imports import import_dataset

        facts = import_dataset(options, folder, progress=progress)
    try:
        divided = divide(datasets.at(Path(facts["folder"])), split, write=facts["imported"] or split.given)
    except (ConfigError, DataError):
        if facts["imported"]:
            shutil.rmtree(folder.expanduser())
        raise
    return {**facts, "split": divided}


def divide(dataset: Dataset, options: SplitOptions, *, write: bool = True) -> Split:
    """The split of an imported dataset, changed as far as options say, and written beside its data."""
    from .known.event_files import open_events
    from .rows.encode import read_manifest
    from .rows.imported import of_rows
    from .split import record as splits
    from .split.events import of_events

    folder = dataset.folder
    assert folder is not None
    events = open_events(folder) if dataset.kind == "events" else None
    if write and options.split is not None:
        try:
            splits.read(folder, read_manifest(folder).digest if events is None else events.digest)
        except DataError:
            # A damaged one is replaced.
            (folder / splits.FILE).unlink()
    split: Split = (of_rows(folder, options) if events is None else of_events(events, options)).record
    if write:
        with writing(folder):
            splits.write(folder, split)
    return split


@contextmanager
def _set_aside(name: str, *, wished: bool) -> Iterator[None]:
    """If wished, put the dataset of a name aside for a block, and back if the block fails; else it is removed then. One
    that a killed process had put aside comes back first."""
    folder = locations.dataset_folder(name)
    for left in folder.glob(f"*{_ASIDE}"):
        if not left.with_suffix("").exists():
            left.rename(left.with_suffix(""))
    existing = datasets.imported_as(name) if wished else None
    if existing is None or existing.folder is None:
        yield
        return
    aside = existing.folder.with_name(existing.folder.name + _ASIDE)
    existing.folder.rename(aside)
    try:
        yield
    except BaseException:
        aside.rename(existing.folder)
        raise
    shutil.rmtree(aside)


def remove_dataset(name: str, *, needed_by: list[str], force: bool) -> dict[str, Any]:
    """Remove a dataset that a user imported. Without `force` one that runs need stays."""
    existing = datasets.imported_as(name)
    if name in datasets.BUILT_IN:
        what = f"{name} is no dataset that you imported"
        raise UsageError(what, fix=f"remove its folder by hand: {locations.dataset_folder(name)}")
    if existing is None or existing.folder is None:
        raise datasets.unknown(name)
    if needed_by and not force:
        what = f"runs need {name} to be resumed, scored or started from: {', '.join(needed_by)}"
        raise DataError(what, where={"folder": existing.folder}, fix="--force removes it all the same")
    rows, size = None, existing.bytes
    # One of an earlier version can be removed as well.
    with suppress(DataError):
        rows = existing.rows
    folder = locations.dataset_folder(name)
    with alone(folder, what=f"importing or removing {name}"):
        shutil.rmtree(existing.folder)
    # Files of others stay, and the folder with them.
    with suppress(OSError):
        folder.rmdir()
    return {"name": name, "folder": str(existing.folder), "rows": rows, "bytes": size, "needed_by": needed_by}
