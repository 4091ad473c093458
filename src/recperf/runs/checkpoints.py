"""The checkpoints of a run, seen from outside: what there is, whether it is intact, what may go. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import DataError
from ..train import checkpoint_folder as folders
from .record import read_config


def trainings(run: Path) -> list[Path]:
    """The folders of a run's checkpoints, one for each seed that has saved any."""
    if not run.is_dir():
        raise DataError("no run there", where={"folder": run}, fix="recperf checkpoint list runs/<name of the run>")
    read_config(run)
    found = [path for path in (run / "checkpoints").glob("seed-*") if path.name.removeprefix("seed-").isdigit()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("seed-")))


def listed(run: Path, *, hashed: bool) -> list[dict[str, Any]]:
    """Every checkpoint of a run, each seed's newest first; `hashed` reads all of their bytes."""
    for folder in trainings(run):
        if hashed and folders.ever_saved(folder) and not folders.saved(folder):
            raise DataError("there were checkpoints, but none is left", where={"folder": folder})
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
    """Remove all but each seed's newest intact ones and its best, giving each that goes and why; whoever calls holds
    the run. Nothing goes where a seed has no intact one."""
    plans = [_plan(folder, keep) for folder in trainings(run) if folders.saved(folder)]
    for kept, best, gone in plans:
        for path, why in gone.items():
            folders.discard(path)
            if not path.exists():
                yield path, why
        folders.sweep(kept.parent)
        folders.write_index(kept.parent, kept, best)


def _plan(folder: Path, keep: int) -> tuple[Path, Path | None, dict[Path, str]]:
    """The newest intact one, the best one, and what may go."""
    kept: list[Path] = []
    gone: dict[Path, str] = {}
    for path in folders.saved(folder):
        fault = folders.fault(path) if len(kept) < keep else "older"
        if fault is None:
            kept.append(path)
        else:
            gone[path] = fault
    if not kept:
        raise DataError(
            f"no checkpoint of {folder.name} is intact, so nothing was removed ({next(iter(gone.values()))})",
            where={"folder": folder},
        )
    best = folders.best_of(folder, without=[path for path, why in gone.items() if why != "older"])
    return kept[0], best, {path: why for path, why in gone.items() if path != best}
