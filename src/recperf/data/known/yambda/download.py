"""Downloads Yambda from the Hugging Face hub: three files of one pinned revision, each verified by its SHA-256.

An interrupted transfer leaves a partial file that a later call resumes: the hub's own library discards it, and the
largest file has tens of gigabytes. No token is read or sent, and no telemetry.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from .... import locations, units
from ....errors import DataError, Interrupted, MachineError, Stopped, UsageError
from ....files import sha256, sync_folder, write_json, writing
from ....folders import alone
from ....jsonfile import Count, Struct, as_json, read, require
from ....stop import poll
from ....version import __version__
from ...datasets import compare_files
from .schema import ALBUMS_FILE, ARTISTS_FILE, EVENTS_FILE, LICENCE, REPOSITORY, REVISION, SIZES

Say = Callable[[str], None]

RECORD = "fetched.json"
PAGE = f"https://huggingface.co/datasets/{REPOSITORY}"
_DISK_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)
_HUB_PARTS = ("", ".constants", ".utils.tqdm", ".file_download")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class HubFile(Struct):
    """A file of the hub; its digest is known once it was downloaded."""

    bytes: Count
    sha256: str
    etag: str
    """The SHA-256 of a large file, as the hub states it."""


class Record(Struct):
    """What was downloaded."""

    repository: str
    revision: str
    files: dict[str, HubFile]


def folder_of(size: str) -> Path:
    return locations.dataset_folder(f"yambda-{size}") / "raw"


def files_of(size: str) -> tuple[str, ...]:
    """Files of a size, as named on the hub."""
    return (ARTISTS_FILE, ALBUMS_FILE, f"flat/{size}/{EVENTS_FILE}")


def get(size: str, *, say: Say, bars: bool = False, endpoint: str | None = None) -> dict[str, object]:
    """Download missing files and describe the result. `endpoint` is another hub; `bars` show the progress."""
    if size not in SIZES:
        raise UsageError(f"unknown size {size!r} of Yambda", fix=f"one of: {', '.join(SIZES)}")
    folder, there = folder_of(size), "already "
    if missing := [name for name in files_of(size) if not _complete(folder, name)]:
        say(f"yambda-{size}: {LICENCE}")
        with alone(folder, what=f"downloading yambda-{size}"):
            _fetch(_hub(bars), size, folder, missing, endpoint, say)
        there = ""
    say(f"yambda-{size} is {there}in {folder}")
    files = _recorded(folder)
    total = sum(file.bytes for file in files.values())
    return {"folder": str(folder), "revision": REVISION, "licence": LICENCE, "files": as_json(files), "bytes": total}


def verify(size: str, progress: Callable[[int, int], None] = lambda *_: None) -> list[str]:
    """Compare the downloaded files with their digests; a difference is an error. Returns the names of the files.

    `progress` receives the bytes read and the total.
    """
    folder = folder_of(size)
    recorded = _recorded(folder)
    sums = {name: recorded[name].sha256 if name in recorded else "" for name in files_of(size)}
    compared = compare_files(folder, sums, progress)
    if wrong := compared.missing + compared.differing:
        what = f"{wrong[0]} {'is missing' if compared.missing else 'differs from the published file by checksum'}"
        fix = f"remove that file, then: recperf data get yambda-{size}"
        raise DataError(what, where={"file": folder / wrong[0]}, fix=fix)
    return list(recorded)


def _fetch(hub: Any, size: str, folder: Path, names: list[str], endpoint: str | None, say: Say) -> None:
    urls = {
        name: hub.hf_hub_url(REPOSITORY, name, repo_type="dataset", revision=REVISION, endpoint=endpoint)
        for name in names
    }
    remotes = {name: _ask(hub, size, url) for name, url in urls.items()}
    for name, remote in remotes.items():
        if _size(folder / name) == remote.bytes and sha256(folder / name) == remote.etag:
            # Complete, but a kill came before the record.
            _record(folder, name, remote, remote.etag)
        elif name in _recorded(folder):
            say(f"{name} is not the published file and will be replaced")
        elif os.path.lexists(folder / name):
            raise DataError(f"{name} is not the published file", where={"file": folder / name}, fix="move it away")
    names = [name for name in names if not _complete(folder, name)]
    begun = {name: _size(_part(folder, name, remotes[name])) for name in names}
    needed, free = sum(remotes[name].bytes - begun[name] for name in names), shutil.disk_usage(folder).free
    if needed > free:
        raise MachineError(
            f"yambda-{size} needs {units.size(needed)} more; {units.size(free)} are free",
            where={"folder": folder},
            fix="free some space, or set RECPERF_HOME to a folder with more",
        )
    for name in names:
        resumed = f", resumed at {units.size(begun[name])}" if begun[name] else ""
        say(f"downloading {name}, {units.size(remotes[name].bytes)}{resumed}")
        _transfer(hub, size, folder, name, urls[name], remotes[name])


def _ask(hub: Any, size: str, url: str) -> HubFile:
    """Size and digest of a file, as the hub states them."""
    try:
        metadata = hub.get_hf_file_metadata(url, token=False)
    except Exception as error:  # The library raises the errors of its HTTP client, which differs between versions.
        raise _failed(size, url, error) from None
    if not metadata.etag or metadata.size is None:
        what = f"{urlsplit(url).netloc} did not send the size and digest of a file"
        raise MachineError(what, where={"url": url}, fix="check the network: a proxy may answer instead of the hub")
    return HubFile(bytes=int(metadata.size), sha256="", etag=str(metadata.etag))


def _transfer(hub: Any, size: str, folder: Path, name: str, url: str, remote: HubFile) -> None:
    """Download one file to a partial file, verify it, and then rename it."""
    part, path = _part(folder, name, remote), folder / name
    again = f"recperf data get yambda-{size} resumes the download"
    with writing(part, fix=again):
        part.parent.mkdir(parents=True, exist_ok=True)
        if _size(part) > remote.bytes:
            part.unlink()
        file = part.open("ab")
    headers = hub.utils.build_hf_headers(token=False, library_name="recperf", library_version=__version__)
    with file:
        try:
            hub.file_download.http_get(
                url,
                _PolledFile(file),
                resume_size=file.tell(),
                headers=headers,
                expected_size=remote.bytes,
                displayed_filename=name,
            )
            file.flush()
            os.fsync(file.fileno())
        except (Stopped, Interrupted):
            raise
        except Exception as error:  # As above.
            if isinstance(error, OSError) and error.errno in _DISK_FAULTS:
                with writing(part, fix=again):
                    raise
            raise _failed(size, url, error, done=file.tell()) from None
    digest = sha256(part)
    if _size(part) != remote.bytes or (_SHA256.fullmatch(remote.etag) and digest != remote.etag):
        part.unlink()
        raise DataError(
            f"the checksum of {name} is not that of the published file; the download was removed",
            where={"url": url},
            fix="try again; if it fails again, a proxy may change the file",
        )
    with writing(path, fix=again):
        os.replace(part, path)
        sync_folder(path.parent)
        for stale in path.parent.glob(f"{path.name}.*.incomplete"):
            if re.fullmatch(r"\.[0-9A-Za-z]{1,16}\.incomplete", stale.name.removeprefix(path.name)):
                stale.unlink()
    _record(folder, name, remote, digest)


class _PolledFile:
    """A file that a download is written to, polling for signals."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, block: bytes) -> int:
        poll()
        return self._file.write(block)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _complete(folder: Path, name: str) -> bool:
    entry = _recorded(folder).get(name)
    return entry is not None and (folder / name).is_file() and _size(folder / name) == entry.bytes


def _recorded(folder: Path) -> dict[str, HubFile]:
    """Recorded downloads of the pinned revision."""
    try:
        record = require(read(folder / RECORD, follow_links=True), Record, folder / RECORD, what="is damaged")
    except DataError:
        return {}
    return record.files if (record.repository, record.revision) == (REPOSITORY, REVISION) else {}


def _record(folder: Path, name: str, remote: HubFile, digest: str) -> None:
    files = _recorded(folder) | {name: HubFile(bytes=remote.bytes, sha256=digest, etag=remote.etag)}
    write_json(folder / RECORD, Record(repository=REPOSITORY, revision=REVISION, files=files))


def _part(folder: Path, name: str, remote: HubFile) -> Path:
    """The partial file; its name has the digest, so that a part of another version is never resumed."""
    path = folder / name
    return path.with_name(f"{path.name}.{re.sub('[^0-9A-Za-z]', '', remote.etag)[:16]}.incomplete")


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _failed(size: str, url: str, error: Exception, done: int = 0) -> MachineError:
    status = getattr(getattr(error, "response", None), "status_code", None)
    reason = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".: ")
    if status is not None:
        reason = f"{urlsplit(url).netloc} answered {status}"
    names = ", ".join(files_of(size))
    retry = f"recperf data get yambda-{size} resumes at {units.size(done)}" if done else "try again"
    return MachineError(
        f"the download failed: {reason}",
        where={"url": url},
        fix=f"{retry}; or download {names} from {PAGE} by other means and name their folder with --path",
    )


def _hub(bars: bool) -> Any:
    """Import the hub's library, without log messages, telemetry and, unless `bars`, progress bars."""
    try:
        parts: list[Any] = [import_module(f"huggingface_hub{part}") for part in _HUB_PARTS]
    except ImportError:
        what = "downloading Yambda needs the package huggingface_hub"
        raise MachineError(what, fix="pip install 'recperf[data]'") from None
    hub, constants, bar, _ = parts
    constants.HF_HUB_DISABLE_TELEMETRY = True
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    if not bars:
        bar.disable_progress_bars()
    return hub
