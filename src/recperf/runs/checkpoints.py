"""Lists, verifies and prunes the checkpoints of a run. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import DataError, MachineError
from ..folders import require_own_folders
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


def listed(run: Path, *, hashed: bool) -> list[dict[str, Any]]:
    """Every checkpoint of a run, each seed's newest first; `hashed` reads all of their bytes."""
    for folder in trainings(run):
        if hashed and folders.ever_saved(folder) and not folders.saved(folder):
            raise DataError("all checkpoints of this seed are missing", where={"folder": folder})
    return [_facts(path, hashed=hashed) for folder in trainings(run) for path in folders.saved(folder)]


def _facts(path: Path, *, hashed: bool) -> dict[str, Any]:
    fault = folders.fault(path, hashed=hashed)
    try:
        manifest = folders.read_manifest(path)
    except folders.Damaged:
        manifest = {"when": None, "files": {}}
    newest, best = folders.saved(path.parent)[0], folders.best_of(path.parent)
    return {
        "seed": int(path.parent.name.removeprefix("seed-")),
        "name": path.name,
        "folder": str(path),
        "step": folders.step_of(path),
        "when": manifest["when"],
        "files": len(manifest["files"]),
        "bytes": sum(stated["bytes"] for stated in manifest["files"].values()),
        "last": path == newest,
        "best": path == best,
        "fault": fault,
    }


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
