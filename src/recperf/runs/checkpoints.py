"""Lists, verifies and prunes the checkpoints of a run. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ..errors import DataError, MachineError
from ..folders import require_own_folders
from ..jsonfile import Struct
from ..train import checkpoint_folder as folders
from .record import read_config

OLDER = "older"
"""Why an intact checkpoint is removed."""


def trainings(run: Path) -> list[Path]:
    """The checkpoint folders of a run, one for each seed that has saved."""
    if not run.is_dir():
        raise DataError("there is no such run", where={"folder": run}, fix="recperf check runs/<name of the run>")
    read_config(run)
    folders_of_seeds = require_own_folders(run, "checkpoints").glob("seed-*")
    numbered = [path for path in folders_of_seeds if path.name.removeprefix("seed-").isdigit()]
    for path in numbered:
        require_own_folders(run, "checkpoints", path.name)
    return sorted(numbered, key=lambda path: int(path.name.removeprefix("seed-")))


class Checkpoint(Struct, kw_only=True):
    """A checkpoint as `recperf check` lists it."""

    seed: int
    name: str
    folder: str
    step: int
    when: str | None
    """None: its manifest is damaged."""
    files: int
    bytes: int
    last: bool
    best: bool
    fault: str | None
    """None: it is intact, as far as it was read."""


def listed(run: Path, *, hashed: bool) -> list[Checkpoint]:
    """Every checkpoint of a run, each seed's newest first; `hashed` reads all of their bytes."""
    for folder in trainings(run):
        if hashed and folders.ever_saved(folder) and not folders.saved(folder):
            raise DataError("all checkpoints of this seed are missing", where={"folder": folder})
        if hashed and (fault := folders.index_fault(folder)):
            raise DataError(f"{folder.name}: {fault}; --prune writes it again", where={"folder": folder})
    return [_facts(path, hashed=hashed) for folder in trainings(run) for path in folders.saved(folder)]


def _facts(path: Path, *, hashed: bool) -> Checkpoint:
    fault, manifest = folders.fault(path, hashed=hashed), None
    with suppress(folders.Damaged):
        manifest = folders.read_manifest(path)
    files = manifest.files if manifest else {}
    return Checkpoint(
        seed=int(path.parent.name.removeprefix("seed-")),
        name=path.name,
        folder=str(path),
        step=folders.step_of(path),
        when=manifest.when if manifest else None,
        files=len(files),
        bytes=sum(stated.bytes for stated in files.values()),
        last=path == folders.saved(path.parent)[0],
        best=path == folders.best_of(path.parent),
        fault=fault,
    )


def prune(run: Path, keep: int) -> Iterator[tuple[Path, str]]:
    """Remove all but each seed's newest intact checkpoints and its best intact one; yields each removed one, and why.

    The caller holds the run's lock. Nothing is removed if a seed has no intact checkpoint.
    """
    plans = [_plan(folder, keep) for folder in trainings(run) if folders.saved(folder)]
    for newest, best, removals in plans:
        for path, why in removals.items():
            try:
                folders.remove(folders.set_aside(path))
            except OSError as error:
                raise MachineError(
                    f"cannot remove {path.name}: {error.strerror or error}",
                    where={"folder": path},
                    fix="make the disk and the folder writable, and prune again",
                ) from None
            yield path, why
        folders.sweep(newest.parent)
        folders.write_index(newest.parent, newest, best)


def _plan(folder: Path, keep: int) -> tuple[Path, Path | None, dict[Path, str]]:
    """The newest intact checkpoint, the best one, and those to remove with the reason."""
    intact: list[Path] = []
    removals: dict[Path, str] = {}
    for path in folders.saved(folder):
        fault = folders.fault(path) if len(intact) < keep else OLDER
        if fault is None:
            intact.append(path)
        else:
            removals[path] = fault
    if not intact:
        raise DataError(
            f"no checkpoint of {folder.name} is intact, so nothing was removed ({next(iter(removals.values()))})",
            where={"folder": folder},
        )
    damaged = [path for path, why in removals.items() if why != OLDER]
    best = folders.best_of(folder, without=damaged)
    while best is not None and best not in intact and (fault := folders.fault(best)):
        removals[best] = f"the best, but damaged: {fault}"
        damaged.append(best)
        best = folders.best_of(folder, without=damaged)
    return intact[0], best, {path: why for path, why in removals.items() if path != best}
