"""Imports a file of a user as a dataset, for `recperf data import` and `recperf.dataset`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from .. import places
from ..folders import alone
from . import datasets
from .click_store.options import ClickOptions
from .yambda.import_options import ImportOptions

Progress = Callable[..., Callable[..., None]]
"""Returns what is called with how much of some work is done, and with all of it, for the work's name and its unit."""


def import_file(
    options: ImportOptions | ClickOptions, *, store: Path | None = None, progress: Progress
) -> dict[str, Any]:
    """Import the file that the options name, into `store` or under the dataset's name, and describe the dataset. A
    finished import of the same file and options is left as it is."""
    kind = "clicks" if isinstance(options, ClickOptions) else "events"
    if store is not None:
        return _described(options, store, progress)
    place = places.dataset_folder(options.name)
    datasets.refuse_other_kind(options.name, kind)
    existed = place.exists()
    try:
        with alone(place, what=f"importing {options.name}"):
            # An import of the other kind may have ended just before.
            datasets.refuse_other_kind(options.name, kind)
            return _described(options, place / Path(datasets.KINDS[kind].manifest).parent, progress)
    finally:
        if not existed:
            # Of an import that failed nothing is left.
            with suppress(OSError):
                place.rmdir()


def _described(options: Any, folder: Path, progress: Progress) -> dict[str, Any]:
    """Import into a folder, and say what is there."""
    if isinstance(options, ClickOptions):
        from .click_store.imports import make

        return make(options, folder, reading=progress("reading", "bytes"), rows=progress("writing", "rows"))
    from .yambda.imports import import_dataset

    return import_dataset(options, folder, progress=progress)
