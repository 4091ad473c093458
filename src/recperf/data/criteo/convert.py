"""A click log to memory-mapped arrays, once, in bounded memory, resumable at any moment.

Every source file becomes three plain little-endian files (dense, ids, labels) that only grow. After each piece of a
fixed number of rows they are synced and the manifest, replaced atomically, says how many rows count and at which byte
of the source they end. Whatever lies beyond is cut off on the next start, so that a conversion which was killed gives
the same bytes as one which was not.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from numpy.typing import NDArray

from ...errors import DataError, MachineError
from ...files import alone, write_json, writing
from ...units import size
from . import lines, source, synthesize
from .config import DENSE, SPARSE, CriteoConfig
from .parse import Parsed, Parser
from .source import Block, BrokenGzip, Log, Source

FORMAT = 1
PIECE = 1 << 18
"""Rows between two entries in the manifest."""
WIDTHS = {"dense": 4 * DENSE, "ids": 4 * SPARSE, "labels": 1}
"""Bytes of a row in each file."""
ROW_BYTES = sum(WIDTHS.values())
MANIFEST = "manifest.json"
MOST_SHOWN = 5
_AGAIN = "the same command goes on where it stopped"

Progress = Callable[[int, int, int], None]
"""Called with bytes of the files on disk done, in all, and rows written so far."""


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """Where the arrays of a log are, and what the manifest says of them."""

    folder: Path
    log: Log
    manifest: dict[str, Any]

    @property
    def complete(self) -> bool:
        return bool(self.manifest["complete"])

    @property
    def parts(self) -> list[dict[str, Any]]:
        return list(self.manifest["parts"])

    @property
    def rows(self) -> int:
        return sum(part["rows"] for part in self.parts)

    @property
    def skipped(self) -> dict[str, int]:
        """Malformed lines left out, by kind."""
        found = {kind: sum(part["skipped"].get(kind, 0) for part in self.parts) for kind in lines.KINDS}
        return {kind: count for kind, count in found.items() if count}

    @property
    def first_bad(self) -> list[dict[str, Any]]:
        return [{"file": part["name"], **bad} for part in self.parts for bad in part["first_bad"]]


def find(config: CriteoConfig) -> Conversion:
    """The conversion of a log as far as it got; nothing is written."""
    log = source.locate(config)
    settings = {"format": FORMAT, "rows": list(config.table_rows), "hash_seed": config.hash_seed}
    facts = [one.facts for one in log.sources]
    key = hashlib.sha256(json.dumps([settings, log.layout, facts], sort_keys=True).encode()).hexdigest()
    folder = config.cache_folder / key[:16]
    manifest = read_manifest(folder / MANIFEST)
    if manifest is None:
        parts = [{**one, **_nothing_done()} for one in facts]
        made_up = any(synthesize.is_made_up(source.first_line(one)) for one in log.sources)
        manifest = {
            "key": key, "settings": settings, "layout": log.layout, "synthetic": made_up, "parts": parts,
            "complete": False,
        }  # fmt: skip
    elif manifest["key"] != key:
        raise DataError(
            "the manifest belongs to another conversion", where={"folder": folder}, fix="remove that folder"
        )
    return Conversion(folder=folder, log=log, manifest=manifest)


def convert(
    config: CriteoConfig, *, progress: Progress | None = None, piece: int = PIECE, block: int = source.BLOCK
) -> Conversion:
    """The whole log as arrays; what is there already is used, and a conversion that was stopped goes on."""
    found = find(config)
    if not found.complete:
        with alone(found.folder, what="converting this log", again=_AGAIN):
            found = find(config)
            _Converting(config, found, progress or _silent, piece, block).run()
    for bad in found.first_bad if config.on_error == "stop" else ():
        raise refusal(found.log.path if found.log.path.is_file() else found.log.path / bad["file"], bad)
    _require_arrays(found)
    return found


def refusal(path: Path, bad: dict[str, Any]) -> DataError:
    return DataError(
        f"line {bad['line']:,} cannot be used: {bad['what']}",
        where={"file": path, "line": bad["line"]},
        fix=f"recperf data check criteo --path {path}; --on-error skip (of a run: --data.on-error skip) leaves such "
        "lines out",
    )


class _Converting:
    def __init__(self, config: CriteoConfig, found: Conversion, progress: Progress, piece: int, block: int) -> None:
        self.config, self.found, self.manifest = config, found, found.manifest
        self.progress, self.piece, self.block = progress, piece, block
        self.parser = Parser(config.table_rows, config.hash_seed)
        self.done = 0
        self.room_checked = False

    def run(self) -> None:
        for index, (one, part) in enumerate(zip(self.found.log.sources, self.manifest["parts"])):
            if not part["complete"]:
                self._part(one, part, index)
            self.done += one.size
            self.progress(self.done, self.found.log.size, self.found.rows)
        self.manifest["digest"] = _digest(self.manifest)
        self.manifest["complete"] = True
        self._save()

    def _part(self, one: Source, part: dict[str, Any], index: int) -> None:
        with _Columns(self.found.folder, index, part["rows"]) as columns:
            waiting = source.blocks(one, start=part["offset"], size=self.block)
            pushed: list[Block] = []
            while (block := self._next(waiting, pushed, one, part)) is not None:
                parsed = self.parser.parse(block.text)
                room = self.piece - part["rows"] % self.piece
                if len(parsed.labels_N) > room:
                    # Pieces end at fixed rows, wherever blocks end: the rest of the block is read once more.
                    cut = int(parsed.ends_N[room - 1])
                    pushed.append(Block(block.text[cut:], block.span - cut, block.read))
                    block = Block(block.text[:cut], cut, block.read)
                    parsed = self.parser.parse(block.text)
                self._count_bad(parsed, one, part)
                columns.append(parsed)
                part["lines"] += parsed.lines
                part["offset"] += block.span
                part["rows"] += len(parsed.labels_N)
                part["positives"] += int(parsed.labels_N.sum())
                if len(parsed.labels_N) and part["rows"] % self.piece == 0:
                    part["chain"] = columns.commit(part["chain"])
                    self._save()
                self.progress(self.done + block.read, self.found.log.size, self.found.rows)
                self._check_room(block)
            _require_unchanged(one)
            part["chain"] = columns.commit(part["chain"])
        part["complete"] = True
        self._save()

    def _next(self, waiting: Iterator[Block], pushed: list[Block], one: Source, part: dict[str, Any]) -> Block | None:
        if pushed:
            return pushed.pop()
        try:
            return next(waiting, None)
        except BrokenGzip as error:
            self._bad({"line": part["lines"] + 1, "kind": "gzip", "what": str(error)}, one, part)
            return None

    def _count_bad(self, parsed: Parsed, one: Source, part: dict[str, Any]) -> None:
        for number, text in parsed.bad:
            self._bad(explain(part["lines"] + number + 1, text), one, part)

    def _bad(self, bad: dict[str, Any], one: Source, part: dict[str, Any]) -> None:
        if self.config.on_error == "stop":
            raise refusal(one.path, bad)
        part["skipped"][bad["kind"]] = part["skipped"].get(bad["kind"], 0) + 1
        if len(part["first_bad"]) < MOST_SHOWN:
            part["first_bad"].append(bad)

    def _check_room(self, block: Block) -> None:
        """Hours of work that cannot be kept should not begin: the first block tells how much room the rest takes."""
        if self.room_checked or not self.found.rows:
            return
        self.room_checked = True
        needed = ROW_BYTES * self.found.rows / (self.done + block.read) * (self.found.log.size - self.done - block.read)
        free = shutil.disk_usage(self.found.folder).free
        if needed * 0.8 > free:
            raise MachineError(
                f"the arrays need about {size(needed)} more; {size(free)} are free",
                where={"folder": self.found.folder},
                fix="free some space, or choose another disk with --cache",
            )

    def _save(self) -> None:
        try:
            write_json(self.found.folder / MANIFEST, self.manifest)
        except MachineError as error:
            raise MachineError(error.what, where=dict(error.where), fix=f"free some space; {_AGAIN}") from error


class _Columns:
    """The three growing files of one source."""

    def __init__(self, folder: Path, index: int, rows: int) -> None:
        self.paths = {name: folder / column_name(index, name) for name in WIDTHS}
        self.rows = rows
        self.files: dict[str, IO[bytes]] = {}
        self.digests = {name: hashlib.sha256() for name in WIDTHS}

    def __enter__(self) -> _Columns:
        for name, path in self.paths.items():
            with writing(path, fix=_AGAIN):
                self.files[name] = path.open("ab")
                kept = self.rows * WIDTHS[name]
                if self.files[name].tell() < kept:
                    raise DataError(
                        f"{path.name} is shorter than its manifest says",
                        where={"file": path},
                        fix=f"remove {path.parent} and convert again",
                    )
                self.files[name].truncate(kept)
        return self

    def __exit__(self, *_: object) -> None:
        for file in self.files.values():
            try:
                file.close()
            except OSError:
                # What could not be written lies beyond what the manifest counts; the reason was raised already.
                continue

    def append(self, parsed: Parsed) -> None:
        arrays: dict[str, NDArray[Any]] = {"dense": parsed.dense_ND, "ids": parsed.ids_NF, "labels": parsed.labels_N}
        for name, array in arrays.items():
            content = array.tobytes()
            self.digests[name].update(content)
            with writing(self.paths[name], fix=_AGAIN):
                self.files[name].write(content)

    def commit(self, chain: str) -> str:
        """Make what was written last, and fold its digests into those of the pieces before."""
        for name, file in self.files.items():
            with writing(self.paths[name], fix=_AGAIN):
                file.flush()
                os.fsync(file.fileno())
        folded = hashlib.sha256(chain.encode())
        for name in WIDTHS:
            folded.update(self.digests[name].digest())
            self.digests[name] = hashlib.sha256()
        return folded.hexdigest()


def explain(line: int, text: bytes) -> dict[str, Any]:
    """What a refused line is called in messages and manifests."""
    found = lines.read(text)
    assert isinstance(found, lines.Fault), f"line {line} was refused and is good: {text!r}"
    return {"line": line, "kind": found.kind, "what": found.what}


def column_name(index: int, name: str) -> str:
    return f"part-{index:03d}.{name}"


def _nothing_done() -> dict[str, Any]:
    return {
        "rows": 0, "lines": 0, "offset": 0, "positives": 0, "chain": "", "skipped": {}, "first_bad": [],
        "complete": False,
    }  # fmt: skip


def _digest(manifest: dict[str, Any]) -> str:
    """SHA-256 of the content of all arrays: the same for the same rows, wherever the log lay."""
    content = [[part["rows"], part["chain"]] for part in manifest["parts"]]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def read_manifest(path: Path) -> dict[str, Any] | None:
    try:
        manifest = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(
            f"the manifest cannot be read: {error}", where={"file": path}, fix=f"remove {path.parent} and convert again"
        ) from None
    if not isinstance(manifest, dict) or not {"key", "parts", "complete", "synthetic", "layout"} <= manifest.keys():
        raise DataError("the manifest is damaged", where={"file": path}, fix=f"remove {path.parent} and convert again")
    return manifest


def _require_arrays(found: Conversion) -> None:
    for index, part in enumerate(found.parts):
        for name, width in WIDTHS.items():
            path = found.folder / column_name(index, name)
            if not path.is_file() or path.stat().st_size != part["rows"] * width:
                raise DataError(
                    f"{path.name} is missing or not as long as its manifest says",
                    where={"file": path},
                    fix=f"remove {found.folder} and convert again",
                )


def _require_unchanged(one: Source) -> None:
    if source.examine(one.path) != one:
        raise DataError(
            f"{one.path.name} changed while it was read", where={"file": one.path}, fix="convert it when it is whole"
        )


def _silent(done: int, total: int, rows: int) -> None:
    pass
