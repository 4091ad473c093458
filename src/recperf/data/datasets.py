"""Datasets by name: those that recperf knows and those that a user imported; and files held against SHA-256 sums.

A kind says how a dataset is stored; each workload lists the kinds it can train on (`Workload.datasets`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from .. import locations
from ..config import require
from ..errors import DataError, MachineError, UsageError, did_you_mean
from ..files import read_dataset_file, reading, sha256
from ..jsonfile import Struct, read_sealed


@dataclass(frozen=True)
class Kind:
    """How imported datasets of one kind are stored."""

    manifest: str
    """Path of its description inside the dataset's folder; the file is written last."""
    rows: str
    """Field of the description with the number of rows."""
    form: tuple[str, int]
    """Format and version of the description."""


KINDS = {
    "events": Kind("store/store.json", rows="events", form=("recperf-events", 3)),
    "clicks": Kind("clicks/clicks.json", rows="rows", form=("recperf clicks", 4)),
}
"""Kinds that an import writes; a dataset has the first of which the description exists."""
BUILT_IN = {
    "movielens-100k": ("movielens", ""),
    "movielens-like": ("movielens", None),
    "yambda-50m": ("events", "store"),
    "yambda-500m": ("events", "store"),
    "yambda-5b": ("events", "store"),
    "yambda-like": ("events", None),
}
"""Kind of each dataset that recperf knows, and its folder inside the cache; none for generated ones."""
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
_RESERVED = ("yambda-", "movielens-100k", "movielens-like")
"""How the names begin that a dataset of a user cannot have."""
_SUM = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")
"""A line as `sha256sum` writes it."""


@dataclass(frozen=True, kw_only=True)
class Dataset:
    name: str
    kind: str
    folder: Path | None
    """Folder or file of the data; none for data that is generated when it is used."""
    manifest: Path | None = None
    """Description of an imported dataset."""
    frames: str = ""
    """The library of the frame that `recperf.dataset` made it of."""

    @property
    def rows(self) -> int | None:
        """The number of rows of an imported dataset; None for another."""
        if self.manifest is None:
            return None
        kind, again = KINDS[self.kind], f"remove {self.folder} and import it again"
        rows: int | None = read_sealed(self.manifest, kind.form, dict, fix=again).get(kind.rows)
        return rows

    @property
    def bytes(self) -> int:
        """Bytes on disk."""
        if self.folder is None:
            return 0
        total = 0
        for root, _, files in os.walk(self.folder):
            for file in files:
                # Another process may remove a file between the two calls.
                with suppress(FileNotFoundError):
                    total += Path(root, file).lstat().st_size
        return total


def legal_name(text: str) -> str:
    """A name that a dataset may have, like a text."""
    name = re.sub("[^A-Za-z0-9._-]", "-", text).lstrip("._-")[:48] or "imported"
    return f"my-{name}" if name.startswith(_RESERVED) else name


def require_name(name: str) -> None:
    """Refuse a name that a dataset of a user cannot have."""
    is_free = re.fullmatch(_NAME, name) is not None and not name.startswith(_RESERVED)
    require(is_free, "name", name, "letters, digits, dots and dashes, and not the name of another dataset")


def names() -> list[str]:
    """Names that commands accept: built-in datasets, then imported ones."""
    return [*BUILT_IN, *(dataset.name for dataset in imported())]


def imported() -> Iterator[Dataset]:
    """The datasets that a user imported, by name."""
    try:
        folders = sorted(locations.dataset_folder(".").iterdir())
    except OSError:
        return
    for folder in folders:
        dataset = None if folder.name in BUILT_IN else _imported(folder)
        if dataset is not None:
            yield dataset


def present() -> Iterator[Dataset]:
    """Built-in datasets as far as they are on this machine, then imported ones."""
    for name in BUILT_IN:
        with suppress(DataError):
            yield find(name)
    yield from imported()


def imported_as(name: str) -> Dataset | None:
    """The dataset that a user imported under a name."""
    is_name = os.path.basename(name) == name and name not in ("", ".", "..") and name not in BUILT_IN
    return _imported(locations.dataset_folder(name)) if is_name else None


def _imported(folder: Path) -> Dataset | None:
    for kind, stored in KINDS.items():
        manifest = folder / stored.manifest
        if os.path.lexists(manifest):
            return Dataset(name=folder.name, kind=kind, folder=manifest.parent, manifest=manifest)
    return None


def refuse_other_kind(name: str, kind: str) -> None:
    """Refuse to import a dataset under the name of one of another kind, which would hide it."""
    existing = imported_as(name)
    if existing is not None and existing.kind != kind:
        raise DataError(
            f"there is a dataset {name!r} of {existing.kind} already",
            where={"folder": existing.folder},
            fix="--replace imports this file in its place; or another --name",
        )


def find(name: str) -> Dataset:
    """The dataset of a name, or else of a path. An unknown name is an error that lists the nearest one."""
    if name in BUILT_IN:
        kind, inside = BUILT_IN[name]
        folder = None if inside is None else locations.dataset_folder(name) / inside
        if folder is not None and not folder.is_dir():
            raise missing(name)
        return Dataset(name=name, kind=kind, folder=folder)
    dataset = imported_as(name)
    if dataset is not None:
        return dataset
    path = Path(name).expanduser()
    if os.path.lexists(path):
        return at(path)
    raise unknown(name)


def unknown(name: str) -> UsageError:
    return UsageError(
        f"there is no dataset and no file {name!r}{did_you_mean(name, names())}",
        where={"known": ", ".join(names())},
        fix="recperf data list, or recperf data import --help",
    )


def missing(name: str) -> DataError:
    """The error for a dataset that recperf knows and that is not on this machine, or not prepared."""
    folder = locations.dataset_folder(name)
    if any(folder.glob("raw/flat/*/*.parquet")):
        what, fix = f"{name} is downloaded but not prepared", f"recperf data prepare {name}"
    else:
        what, fix = f"{name} is not on this machine", f"recperf data get {name}"
    return DataError(what, where={"folder": folder}, fix=fix)


def at(path: Path) -> Dataset:
    """The dataset in a folder or file, by what it contains."""
    name, path = str(path), path.absolute()
    for kind, stored in KINDS.items():
        for manifest in (path / Path(stored.manifest).name, path / stored.manifest):
            if os.path.lexists(manifest):
                return Dataset(name=name, kind=kind, folder=manifest.parent, manifest=manifest)
    if (path / "u.data").exists() or (path / "ml-100k" / "u.data").exists():
        return Dataset(name=name, kind="movielens", folder=path)
    is_cache = path.name.startswith("hstu_cache_L") or (path / "store_meta.json").exists()
    if is_cache or any(path.glob("hstu_cache_L*")):
        return Dataset(name=name, kind="events", folder=path)
    if path.is_file():
        what = "a file of your own is imported first"
        fix = f"recperf data import {path} --name NAME; with --clicks if its rows have a label"
    else:
        what, fix = "this folder has no dataset that recperf knows", "recperf data import --help, or recperf data list"
    raise DataError(what, where={"path": path}, fix=fix)


class ComparedFiles(Struct, kw_only=True):
    folder: str
    intact: bool
    compared: int
    bytes: int
    missing: list[str]
    differing: list[str]
    extra: list[str]
    """Files that the list does not have."""


def check_sums(folder: Path, sums: Path, progress: Callable[[int, int], None]) -> ComparedFiles:
    """Compares the files of a folder with a list of their sums."""
    folder, sums = folder.expanduser(), sums.expanduser()
    if not folder.is_dir():
        raise DataError("there is no such folder", where={"folder": folder}, fix="name the folder of the listed files")
    return compare_files(folder, read_sums(sums), progress, sums)


def compare_files(
    folder: Path, expected: Mapping[str, str], progress: Callable[[int, int], None], sums: Path | None = None
) -> ComparedFiles:
    """Compares the files of a folder with their sums. `progress` receives the bytes read and the total."""
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    present = [name for name in expected if name in files]
    total, done = sum(files[name].stat().st_size for name in present), 0

    def tick(count: int) -> None:
        nonlocal done
        done += count
        progress(done, total)

    differing = []
    for name in sorted(present):
        try:
            if sha256(files[name], tick) != expected[name]:
                differing.append(name)
        except OSError as error:
            what = f"{name} cannot be read: {error.strerror}"
            raise MachineError(what, where={"file": files[name]}, fix="check its permissions and the disk") from error
    missing = sorted(expected.keys() - files.keys())
    others = files.keys() - expected.keys()
    extra = sorted(name for name in others if sums is None or not files[name].samefile(sums))
    return ComparedFiles(
        folder=str(folder),
        intact=not (missing or differing or extra),
        compared=len(present),
        bytes=total,
        missing=missing,
        differing=differing,
        extra=extra,
    )


def read_sums(path: Path) -> dict[str, str]:
    """The sum of each file by its path below the folder, from lines of a sum, two spaces and a path."""
    try:
        with reading(path):
            lines = read_dataset_file(path).decode().splitlines()
    except UnicodeDecodeError:
        raise DataError("the list of sums is not text", where={"file": path}, fix="check --sums") from None
    except OSError as error:
        what = f"the list of sums cannot be read: {error.strerror}"
        raise MachineError(what, where={"file": path}, fix="check --sums and its permissions") from error
    sums: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        match = _SUM.fullmatch(line)
        name = PurePosixPath(match[2]) if match else PurePosixPath("..")
        if match is None or name.is_absolute() or ".." in name.parts:
            raise DataError(
                f"line {number}: {line[:80]!r} is not a SHA-256 sum, two spaces and a path below the folder",
                where={"file": path, "line": number},
                fix="a list as sha256sum writes it",
            )
        sums[name.as_posix()] = match[1].lower()
    if not sums:
        raise DataError("the list of sums is empty", where={"file": path}, fix="check --sums")
    return sums
