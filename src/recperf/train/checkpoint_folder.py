"""Checkpoints as folders and files: names, manifests, digests, which is the best, what is removed. Torch-free.

checkpoints/seed-42/
  index.json            {"last": "step-00000626", "best": "step-00000313"} and a digest of that
  step-00000313/        rank0-00000.safetensors, manifest.json
  step-00000626/
  .step-00000939.7-….tmp  a draft of process 7; with `.aside` a checkpoint that is being removed

A checkpoint never changes once it has its name. Its manifest says whether it was the best when it was written; a
score that came later is in index.json. Losing index.json loses nothing else.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from ..errors import MachineError
from ..files import NOT_FILES, digest_of, draft_of, draft_owner, is_alive, open_regular, write_json
from ..jsonfile import Count, Problem, Struct, as_json, content_of, decode, fit, load, sealed, unsealed
from ..stop import reached

FORMAT = 6
MANIFEST = "manifest.json"
INDEX = "index.json"
CHUNK = 1 << 24
"""Bytes that are written, read or copied at a time."""
_NAME = re.compile(r"step-(\d{8,})")
_FILE = re.compile(r"rank\d+-\d+\.safetensors")


class StoredFile(Struct):
    """Size and digest of a file."""

    bytes: Count
    sha256: str


class StoredShard(Struct):
    """A rectangle of a tensor in a file."""

    file: str
    key: str
    place: tuple[int, int, int, int]
    """First row, rows, first column, columns."""


class StoredTensor(Struct, omit_defaults=True):
    shape: tuple[int, ...]
    dtype: str
    width: int
    """Columns of a row; of a tensor in tiers those of its values."""
    initial: dict[str, Any] | None = None
    """What rows begin as that were never trained; only of a tensor in tiers."""
    shards: tuple[StoredShard, ...] = ()


class CheckpointManifest(Struct, kw_only=True):
    """manifest.json."""

    format: int
    step: Count
    best: bool
    """Whether it was the best checkpoint when it was written."""
    when: str
    files: dict[str, StoredFile]
    tensors: dict[str, StoredTensor]
    """By their paths in the state."""
    state: Any
    """The tree of JSON values, with the paths of tensors in their places."""


def encoded(value: Any, take: Callable[[Any, str], bool], path: tuple[Any, ...] = ()) -> Any:
    """The JSON values of a state, in which a tensor that `take` takes is only named."""
    shown = "/".join(map(str, path)) or "the state"
    if take(value, shown):
        return {"$tensor": shown}
    if isinstance(value, dict):
        if not all(isinstance(key, str) and not key.startswith("$") for key in value):
            raise TypeError(f"a key in {shown} is not a string, or begins with $")
        return {key: encoded(inner, take, (*path, key)) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [encoded(inner, take, (*path, index)) for index, inner in enumerate(value)]
    if isinstance(value, float):
        # JSON has no NaN and no infinities.
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if value is None or isinstance(value, str | bool | int):
        return value
    raise TypeError(f"{shown} is a {type(value).__name__}, which a checkpoint cannot hold")


def decoded(value: Any, into: Any, read: Callable[[str, Any], Any]) -> Any:
    """The state of JSON values; `read` reads a tensor, if possible into the one in its place in `into`."""
    if isinstance(value, list):
        targets = into[: len(value)] if isinstance(into, list | tuple) else []
        return [decoded(inner, target, read) for inner, target in itertools.zip_longest(value, targets)]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        return read(value["$tensor"], into)
    if "$float" in value:
        return float(value["$float"])
    into = into if isinstance(into, dict) else {}
    return {key: decoded(inner, into.get(key), read) for key, inner in value.items()}


class Damaged(Exception):
    """Why a checkpoint cannot be used."""


class SyncedFile:
    """A new file that computes the digest of what is written to it and is on disk once it is closed."""

    def __init__(self, path: Path) -> None:
        self.handle = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        self.digest, self.size = hashlib.sha256(), 0

    def write(self, content: bytes | memoryview) -> None:
        left = memoryview(content)
        self.size += len(left)
        while len(left):
            # In chunks, so that the digest finds in the cache what was just copied to the disk's buffers.
            count = os.write(self.handle, left[:CHUNK])
            self.digest.update(left[:count])
            left = left[count:]

    def __enter__(self) -> SyncedFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                os.fsync(self.handle)
        finally:
            os.close(self.handle)

    @property
    def facts(self) -> StoredFile:
        return StoredFile(bytes=self.size, sha256=self.digest.hexdigest())


def is_damage(error: OSError) -> bool:
    """Whether an error is about a checkpoint's files; if not, they may be intact, and the machine is at fault."""
    return error.errno in NOT_FILES


def unreadable(path: Path, error: OSError) -> MachineError:
    return MachineError(
        f"checkpoint {path.name} cannot be read: {error.strerror or error}",
        where={"folder": path},
        fix="it may be intact: check the disk, and try again",
    )


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _final(path: Path) -> Path:
    """The checkpoint itself, of a draft or of one that is set aside."""
    return path.with_name(path.name.removeprefix(".").partition(".")[0])


def saved(folder: Path) -> list[Path]:
    """Everything with a checkpoint's name, newest first; a file of that name counts as a damaged one."""
    try:
        names = [name for name in os.listdir(folder) if _NAME.fullmatch(name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted((folder / name for name in names), key=step_of, reverse=True)


def ever_saved(folder: Path) -> bool:
    """Whether there once was a checkpoint, whatever is left of it."""
    return (folder / INDEX).exists() or bool(saved(folder)) or any(folder.glob(".step-*.aside"))


def manifest_bytes(manifest: Any) -> bytes:
    """The content of a manifest's file, with a digest of itself so that no byte of it can change unnoticed."""
    body = as_json(manifest)
    digest = hashlib.sha256(json.dumps(body).encode()).hexdigest()
    return (json.dumps({**body, "sha256": digest}, indent=1, allow_nan=False) + "\n").encode()


def read_manifest(path: Path) -> CheckpointManifest:
    """A checkpoint's manifest, once its digest holds."""
    try:
        if path.is_symlink():
            raise Damaged("it is a link, which is not followed")
        content = content_of(path / MANIFEST)
        body = decode(content)
    except FileNotFoundError:
        raise Damaged(f"{MANIFEST} is missing") from None
    except NotADirectoryError:
        raise Damaged("it is not a folder") from None
    except OSError as error:
        if not _lost(error):
            raise unreadable(path, error) from error
        raise Damaged(f"{MANIFEST} cannot be read: {error.strerror or error}") from None
    except ValueError:
        raise Damaged(f"{MANIFEST} is not JSON") from None
    if not isinstance(body, dict):
        raise Damaged(f"{MANIFEST} is not a JSON object")
    if body.get("format") != FORMAT:
        raise Damaged(f"it has format {body.get('format')!r}; this version reads format {FORMAT}")
    body.pop("sha256", None)
    if manifest_bytes(body) != content:
        raise Damaged(f"{MANIFEST} does not match its digest")
    manifest = fit(body, CheckpointManifest)
    if isinstance(manifest, Problem):
        raise Damaged(f"{MANIFEST} is not valid: {manifest}")
    if not manifest.when.isprintable():
        raise Damaged(f"{MANIFEST} has no valid when")
    if _final(path).name != name_of(manifest.step):
        raise Damaged(f"its manifest is of step {manifest.step}")
    for name in manifest.files:
        if not _FILE.fullmatch(name):
            raise Damaged(f"{MANIFEST} has an invalid file {name!r}")
    return manifest


def fault(path: Path, *, hashed: bool = True, share: tuple[int, int] = (0, 1)) -> str | None:
    """What is wrong with a checkpoint; none when it has exactly the files of its manifest, with size and digest.

    Without `hashed` only sizes are compared, which takes seconds instead of minutes for large tables. With a `share`
    (1, 4) every fourth file is read, beginning with the second: other ranks read the rest.
    """
    try:
        files = read_manifest(path).files
        extra = sorted(set(os.listdir(path)) - {*files, MANIFEST})
        if extra:
            return f"{extra[0]} does not belong to it"
        first, step = share
        for name, stated in list(files.items())[first::step]:
            reason = file_fault(path / name, stated, hashed)
            if reason:
                return f"{name} {reason}"
    except Damaged as damage:
        return str(damage)
    except OSError as error:
        if not _lost(error):
            raise unreadable(path, error) from error
        return f"it cannot be read: {error.strerror or error}"
    return None


def _lost(error: OSError) -> bool:
    """Whether files that cannot even be examined count as damaged: also where the disk lost their content."""
    return is_damage(error) or error.errno == errno.EIO


def file_fault(file: Path, stated: StoredFile, hashed: bool = True) -> str | None:
    """What is wrong with a file, whose size and maybe digest are compared with those stated."""
    try:
        opened = open(open_regular(file), "rb")
    except OSError as error:
        if not is_damage(error):
            raise
        return "is missing" if error.errno == errno.ENOENT else "is not a file"
    with opened:
        size = os.fstat(opened.fileno()).st_size
        if size != stated.bytes:
            return f"has {size:,} bytes instead of {stated.bytes:,}"
        return "does not match its digest" if hashed and digest_of(opened) != stated.sha256 else None


def drop_from_cache(path: Path) -> None:
    """Drop the files from the page cache, so that reading them back reads the disk."""
    if hasattr(os, "posix_fadvise"):
        for file in path.iterdir():
            handle = open_regular(file)
            try:
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(handle)


def read_index(folder: Path) -> dict[str, str]:
    """The checkpoints that index.json names; none where it is missing or damaged."""
    try:
        index = unsealed(load(folder / INDEX))
    except (OSError, ValueError):
        return {}
    return {key: value for key, value in index.items() if isinstance(value, str) and _NAME.fullmatch(value)}


def index_fault(folder: Path) -> str | None:
    """What is wrong with an index.json that is there. Without it, the best checkpoint is the last that was the best
    when it was saved."""
    try:
        unsealed(load(folder / INDEX))
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{INDEX} cannot be read: {error.strerror or error}"
    except ValueError as error:
        return f"{INDEX} is damaged: {error}"
    return None


def best_of(folder: Path, without: Collection[Path] = ()) -> Path | None:
    """The newest checkpoint that was the best when it was saved."""
    marked = read_index(folder).get("best")
    for path in saved(folder):
        if path in without:
            continue
        if path.name == marked:
            return path
        with contextlib.suppress(Damaged):
            if read_manifest(path).best:
                return path
    return None


def write_index(folder: Path, last: Path | None, best: Path | None) -> None:
    index = {key: path.name for key, path in (("last", last), ("best", best)) if path}
    if index != read_index(folder):
        write_json(folder / INDEX, sealed(index))


def set_aside(path: Path) -> Path:
    """Take a checkpoint's name away, so that half of one is never seen while it is being removed."""
    _refuse_foreign(path)
    aside = draft_of(path, "aside")
    remove(aside)
    os.replace(path, aside)
    return aside


def discard(path: Path) -> None:
    """Remove a checkpoint. A failure to remove it is no reason to stop."""
    with contextlib.suppress(OSError):
        aside = set_aside(path)
        reached("prune: set aside")
        remove(aside)
        reached("prune: removed")


def put_back(folder: Path) -> None:
    """Give checkpoints that were set aside their name again, if they are intact and nothing has taken it: a kill came
    between the two renames that replace one."""
    for path in _leftovers(folder):
        if path.suffix == ".aside" and not os.path.lexists(_final(path)) and fault(path) is None:
            with contextlib.suppress(OSError):
                os.replace(path, _final(path))


def sweep(folder: Path) -> None:
    """Remove drafts and half-removed checkpoints, unless another live process may be working on them."""
    for path in _leftovers(folder):
        remove(path)


def _leftovers(folder: Path) -> list[Path]:
    """Drafts and what was set aside by processes that are gone, or by this one."""
    owned = [(path, draft_owner(path.name)) for path in folder.glob(".*")]
    return [path for path, own in owned if own and (own[1] == os.getpid() or not is_alive(own[1]))]


def remove(path: Path) -> None:
    """Remove a checkpoint or a draft; what cannot be removed stays, and so does one with a file of others."""
    with contextlib.suppress(OSError):
        _refuse_foreign(path)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def _refuse_foreign(path: Path) -> None:
    others = os.listdir(path) if path.is_dir() and not path.is_symlink() else []
    for name in others:
        if name != MANIFEST and not _FILE.fullmatch(name):
            raise OSError(errno.ENOTEMPTY, f"recperf did not write {name} there")
