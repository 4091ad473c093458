"""Converts a click log to memory-mapped arrays once, in bounded memory; a conversion can resume after any interruption.

Every source file becomes three plain little-endian files (dense, ids, labels) that only grow. After every PIECE rows
they are synced, and the manifest, replaced atomically, records the number of rows and the byte of the source at which
they end. A fourth file has the digests of every such piece, by which pieces are verified when they are first read. The
next start truncates the files to that length, so that an interrupted conversion gives the same bytes as an
uninterrupted one.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from ...errors import DataError, MachineError
from ...files import write_json
from ...folders import alone
from ...jsonfile import Count, read_sealed, sealed
from ...stop import poll
from ...units import size
from ..click_store.columns import PIECE, ColumnWriter, Layout, StoredPart, require_arrays
from . import lines, source, synthesize
from .config import DENSE, SPARSE, CriteoConfig
from .parse import Parser
from .source import Block, BrokenGzip, Log, Source

FORMAT, VERSION = "recperf criteo", 2
LAYOUT = Layout({"dense": ("<f4", DENSE), "ids": ("<i4", SPARSE), "labels": ("u1", 0)})
ROW_BYTES = LAYOUT.row_bytes
MANIFEST = "manifest.json"
MOST_SHOWN = 5
_OURS = rf"{re.escape(MANIFEST)}|part-\d+\.\w+"
_AGAIN = "run the same command again; it resumes"

Progress = Callable[[int, int, int], None]
"""Called with the bytes of the source files read, their total, and the rows written so far."""


class BadLine(TypedDict):
    """A malformed line, which was skipped."""

    line: Count
    kind: str
    what: str


class ConvertedFile(StoredPart):
    """How far a file of the log is converted."""

    name: str
    size: Count
    mtime_ns: int
    edges: str
    lines: Count
    offset: Count
    positives: Count
    skipped: dict[str, Count]
    first_bad: list[BadLine]
    complete: bool


class Manifest(TypedDict):
    """The state of a conversion."""

    format: str
    version: int
    key: str
    settings: dict[str, Any]
    layout: str
    synthetic: bool
    parts: list[ConvertedFile]
    complete: bool
    digest: NotRequired[str]


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """The arrays of a log and their manifest."""

    folder: Path
    log: Log
    manifest: dict[str, Any]

    @property
    def complete(self) -> bool:
        return bool(self.manifest["complete"])

    @property
    def parts(self) -> list[ConvertedFile]:
        return list(self.manifest["parts"])

    @property
    def rows(self) -> int:
        return sum(part["rows"] for part in self.parts)

    @property
    def skipped(self) -> dict[str, int]:
        """Number of skipped malformed lines by kind."""
        counts = {kind: sum(part["skipped"].get(kind, 0) for part in self.parts) for kind in lines.KINDS}
        return {kind: count for kind, count in counts.items() if count}

    @property
    def first_bad(self) -> list[dict[str, Any]]:
        return [{"file": part["name"], **bad} for part in self.parts for bad in part["first_bad"]]


def find(config: CriteoConfig) -> Conversion:
    """The conversion of a log in its current state; nothing is written."""
    log = source.locate(config)
    settings = {"format": VERSION, "rows": list(config.table_rows), "hash_seed": config.hash_seed}
    facts = [one.facts for one in log.sources]
    key = hashlib.sha256(json.dumps([settings, log.layout, facts], sort_keys=True).encode()).hexdigest()
    folder = config.cache_folder / key[:16]
    manifest = read_manifest(folder / MANIFEST)
    if manifest is None:
        parts = [{**one, **_empty_part()} for one in facts]
        synthetic = any(synthesize.is_synthetic(source.first_line(one)) for one in log.sources)
        manifest = {
            "format": FORMAT, "version": VERSION, "key": key, "settings": settings, "layout": log.layout,
            "synthetic": synthetic, "parts": parts, "complete": False,
        }  # fmt: skip
    elif manifest["key"] != key:
        raise DataError(
            "the manifest belongs to another conversion", where={"folder": folder}, fix="remove that folder"
        )
    return Conversion(folder=folder, log=log, manifest=manifest)


def convert(
    config: CriteoConfig, *, progress: Progress | None = None, piece: int = PIECE, block: int = source.BLOCK
) -> Conversion:
    """Convert a log, or resume or reuse its conversion."""
    conversion = find(config)
    if not conversion.complete:
        with alone(conversion.folder, what="converting this log", ours=_OURS, again=_AGAIN):
            conversion = find(config)
            _Converter(config, conversion, progress or (lambda *_: None), piece, block).run()
    for bad in conversion.first_bad if config.on_error == "stop" else ():
        raise refusal(conversion.log.path if conversion.log.path.is_file() else conversion.log.path / bad["file"], bad)
    require_arrays(conversion.folder, conversion.parts, LAYOUT)
    return conversion


def refusal(path: Path, bad: Mapping[str, Any]) -> DataError:
    return DataError(
        f"line {bad['line']:,} is malformed: {bad['what']}",
        where={"file": path, "line": bad["line"]},
        fix=f"recperf data check criteo --path {path}; --on-error skip (in a run: --data.on-error skip) skips it",
    )


class _Converter:
    """Converts the sources of a log that are not complete yet."""

    def __init__(
        self, config: CriteoConfig, conversion: Conversion, progress: Progress, piece: int, block: int
    ) -> None:
        self.config, self.conversion, self.manifest = config, conversion, conversion.manifest
        self.progress, self.piece, self.block = progress, piece, block
        self.parser = Parser(config.table_rows, config.hash_seed)
        self.done = 0
        self.space_checked = False

    def run(self) -> None:
        for index, (one, part) in enumerate(zip(self.conversion.log.sources, self.manifest["parts"])):
            if not part["complete"]:
                self._part(one, part, index)
            self.done += one.size
            self.progress(self.done, self.conversion.log.size, self.conversion.rows)
        self.manifest["digest"] = _digest(self.manifest)
        self.manifest["complete"] = True
        self._save()

    def _part(self, one: Source, part: ConvertedFile, index: int) -> None:
        if not part["rows"]:
            part["piece"] = self.piece
        with ColumnWriter(self.conversion.folder, index, part, LAYOUT, again=_AGAIN) as columns:
            waiting = source.blocks(one, start=part["offset"], size=self.block)
            pushed: list[Block] = []
            while (block := self._next(waiting, pushed, one, part)) is not None:
                parsed = self.parser.parse(block.text)
                space = self.piece - part["rows"] % self.piece
                if len(parsed.labels_N) > space:
                    # Pieces end at fixed rows, not at blocks: the rest of the block is parsed again.
                    cut = int(parsed.ends_N[space - 1])
                    pushed.append(Block(block.text[cut:], block.span - cut, block.read))
                    block = Block(block.text[:cut], cut, block.read)
                    parsed = self.parser.parse(block.text)
                for number, text in parsed.bad:
                    self._bad(explain(part["lines"] + number + 1, text), one, part)
                columns.append({"dense": parsed.dense_ND, "ids": parsed.ids_NF, "labels": parsed.labels_N})
                part["lines"] += parsed.lines
                part["offset"] += block.span
                part["rows"] += len(parsed.labels_N)
                part["positives"] += int(parsed.labels_N.sum())
                if len(parsed.labels_N) and part["rows"] % self.piece == 0:
                    part["chain"] = columns.commit(part["chain"])
                    self._save()
                poll()
                self.progress(self.done + block.read, self.conversion.log.size, self.conversion.rows)
                self._check_space(block)
            _require_unchanged(one)
            part["chain"] = columns.commit(part["chain"])
        part["complete"] = True
        self._save()

    def _next(self, waiting: Iterator[Block], pushed: list[Block], one: Source, part: ConvertedFile) -> Block | None:
        if pushed:
            return pushed.pop()
        try:
            return next(waiting, None)
        except BrokenGzip as error:
            self._bad({"line": part["lines"] + 1, "kind": "gzip", "what": str(error)}, one, part)
            return None

    def _bad(self, bad: BadLine, one: Source, part: ConvertedFile) -> None:
        if self.config.on_error == "stop":
            raise refusal(one.path, bad)
        part["skipped"][bad["kind"]] = part["skipped"].get(bad["kind"], 0) + 1
        if len(part["first_bad"]) < MOST_SHOWN:
            part["first_bad"].append(bad)

    def _check_space(self, block: Block) -> None:
        """Refuse a disk that is too small before hours of work: the first block tells how much space the rest needs."""
        if self.space_checked or not self.conversion.rows:
            return
        self.space_checked = True
        read = self.done + block.read
        needed = ROW_BYTES * self.conversion.rows * (self.conversion.log.size / read - 1)
        free = shutil.disk_usage(self.conversion.folder).free
        if needed * 0.8 > free:
            raise MachineError(
                f"the arrays need about {size(needed)} more; {size(free)} are free",
                where={"folder": self.conversion.folder},
                fix="free some space, or choose another disk with --cache",
            )

    def _save(self) -> None:
        write_json(self.conversion.folder / MANIFEST, sealed(self.manifest), fix=_AGAIN)


def explain(line: int, text: bytes) -> BadLine:
    """Number, kind and fault of a malformed line."""
    fault = lines.read(text)
    assert isinstance(fault, lines.Fault), f"line {line} was refused but is valid: {text!r}"
    return {"line": line, "kind": fault.kind, "what": fault.what}


def _empty_part() -> dict[str, Any]:
    return {
        "rows": 0, "piece": PIECE, "lines": 0, "offset": 0, "positives": 0, "chain": "", "skipped": {}, "first_bad": [],
        "complete": False,
    }  # fmt: skip


def _digest(manifest: dict[str, Any]) -> str:
    """SHA-256 of the content of all arrays; it does not depend on the path of the log."""
    content = [[part["rows"], part["chain"]] for part in manifest["parts"]]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def read_manifest(path: Path) -> dict[str, Any] | None:
    if not os.path.lexists(path):
        return None
    return read_sealed(path, (FORMAT, VERSION), Manifest, fix=f"remove {path.parent} and convert again")


def _require_unchanged(one: Source) -> None:
    if source.examine(one.path) != one:
        raise DataError(
            f"{one.path.name} changed while it was read", where={"file": one.path}, fix="convert it when it is complete"
        )
