"""seal.json holds the size and digest of every evidence file of a run, so that a later change is noticed."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..errors import DataError
from ..files import digest_of, open_regular, write_json
from ..jsonfile import Problem, Struct, as_json, fit, load

SCHEMA = 1
NAME = "seal.json"

EVIDENCE = (
    "result.json", "events.jsonl", "config.json", "machine.json", "data.json", "baselines.json", "scores.json",
    "progress.json", "profile.json", "pair.json", "peaks.json",
)  # fmt: skip
"""The evidence files, together with every trial-<seed>.json."""


class SealedFile(Struct):
    bytes: int
    sha256: str


class Seal(Struct):
    """seal.json."""

    schema: int
    files: dict[str, SealedFile]


def seal(folder: Path) -> None:
    """Write seal.json over the evidence files in the folder; the last thing that a run does."""
    try:
        files = {name: _facts(folder / name, sync=True) for name in present(folder)}
    except OSError as error:
        where = {"file": error.filename or folder}
        raise DataError(f"cannot seal the run: {error.strerror or error}", where=where) from error
    write_json(folder / NAME, as_json(Seal(schema=SCHEMA, files=files)))


def _facts(path: Path, *, sync: bool = False) -> SealedFile:
    with open(open_regular(path), "rb") as file:
        if sync:
            # After a power cut there must be no seal of a log that is shorter than it says.
            os.fsync(file.fileno())
        return SealedFile(bytes=os.fstat(file.fileno()).st_size, sha256=digest_of(file))


def present(folder: Path) -> list[str]:
    """Names of the evidence files in a run's folder."""
    return [name for name in sorted(path.name for path in folder.iterdir()) if is_evidence(name)]


def is_evidence(name: str) -> bool:
    return name in EVIDENCE or re.fullmatch(r"trial-\d+\.json", name) is not None


def broken(folder: Path) -> list[str]:
    """Every difference between the evidence files and their seal; empty if there is none."""
    return list(differences(folder).values())


def differences(folder: Path) -> dict[str, str]:
    """The differences by the name of the file; one of seal.json means that no file could be compared."""
    try:
        value = load(folder / NAME)
        names = present(folder)
    except FileNotFoundError:
        return {NAME: f"{NAME} is missing"}
    except OSError as error:
        return {NAME: f"{NAME} cannot be read: {error.strerror or error}"}
    except ValueError as error:
        return {NAME: f"{NAME} is not JSON: {error}"}
    schema = value.get("schema") if isinstance(value, dict) else None
    if schema != SCHEMA or isinstance(schema, bool):
        return {NAME: f"{NAME} has schema {schema!r}; this recperf reads {SCHEMA}"}
    sealed = fit(value, Seal)
    if isinstance(sealed, Problem):
        return {NAME: f"{NAME} is damaged: {sealed}"}
    if not sealed.files:
        return {NAME: f"{NAME} lists no files"}
    texts = {name: _difference(folder, name, facts) for name, facts in sealed.files.items()}
    texts |= {name: f"{name} is not in {NAME}" for name in names if name not in sealed.files}
    return {name: text for name, text in texts.items() if text}


def _difference(folder: Path, name: str, sealed: SealedFile) -> str:
    # Names are checked before they are opened: a seal must not point to files outside the folder.
    if not is_evidence(name):
        return f"{NAME} lists {name!r}, which is not an evidence file"
    try:
        facts = _facts(folder / name)
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror or error}"
    if facts.bytes != sealed.bytes:
        return f"{name} has {facts.bytes:,} bytes, the seal says {sealed.bytes:,}"
    return "" if facts.sha256 == sealed.sha256 else f"{name} was changed: its digest differs from the seal"
