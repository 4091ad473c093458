"""`recperf data make | check | convert | info criteo`; each returns plain values."""

from __future__ import annotations

from pathlib import Path
from time import monotonic
from typing import Any

from ...errors import DataError
from ...files import sha256
from ...jsonfile import read
from . import source, synthesize
from .config import CriteoConfig
from .convert import MANIFEST, MOST_SHOWN, ROW_BYTES, BadLine, Conversion, Progress, convert, explain, find
from .parse import Parser
from .source import BrokenGzip, Log, Source
from .store import CriteoStore, describe

LICENCE = "Criteo's terms; recperf neither downloads nor redistributes its logs"
SYNTHETIC_LICENCE = "synthetic, by recperf; no restrictions, no real people or clicks"


def make(*, path: Path, lines: int, seed: int, packed: bool) -> dict[str, Any]:
    """Write a synthetic log."""
    target = path.expanduser()
    synthesize.write(target, lines=lines, seed=seed, packed=packed)
    return {
        "name": "criteo-like",
        "file": str(target),
        "lines": lines,
        "bytes": target.stat().st_size,
        "gzip": packed,
        "seed": seed,
        "synthetic": True,
        "sha256": sha256(target),
    }


def check(config: CriteoConfig, *, progress: Progress) -> dict[str, Any]:
    """Read a whole log and count its malformed lines; nothing is written."""
    log = source.locate(config)
    parser = Parser(config.table_rows, config.hash_seed)
    tally = _Tally(log, progress)
    for one in log.sources:
        tally.read(one, parser)
    return {
        **_facts(log),
        "intact": not tally.bad,
        "lines": tally.lines,
        "good_lines": tally.good,
        "positive_share": tally.positives / tally.good if tally.good else None,
        "bad_lines": sum(tally.bad.values()),
        "bad_by_kind": tally.bad,
        "first_bad": tally.shown,
    }


class _Tally:
    def __init__(self, log: Log, progress: Progress) -> None:
        self.log, self.progress = log, progress
        self.lines = self.good = self.positives = self.done = 0
        self.bad: dict[str, int] = {}
        self.shown: list[dict[str, Any]] = []

    def read(self, one: Source, parser: Parser) -> None:
        here = 0
        try:
            for block in source.blocks(one):
                parsed = parser.parse(block.text)
                for number, text in parsed.bad:
                    self._count(one, explain(here + number + 1, text))
                here += parsed.lines
                self.good += len(parsed.labels_N)
                self.positives += int(parsed.labels_N.sum())
                self.progress(self.done + block.read, self.log.size, self.good)
        except BrokenGzip as error:
            self._count(one, {"line": here + 1, "kind": "gzip", "what": str(error)})
        self.lines += here
        self.done += one.size

    def _count(self, one: Source, bad: BadLine) -> None:
        self.bad[bad["kind"]] = self.bad.get(bad["kind"], 0) + 1
        if len(self.shown) < 2 * MOST_SHOWN:
            self.shown.append({"file": one.path.name, **bad})


def make_arrays(config: CriteoConfig, *, progress: Progress) -> dict[str, Any]:
    """Convert a log, or reuse its conversion."""
    before, began = find(config), monotonic()
    conversion = convert(config, progress=progress)
    seconds = monotonic() - began
    read = sum(part["lines"] for part in conversion.parts) - sum(part["lines"] for part in before.parts)
    return {
        **_facts(conversion.log),
        "folder": str(conversion.folder),
        "converted": not before.complete,
        "resumed_at_row": before.rows if before.rows and not before.complete else None,
        "rows": conversion.rows,
        "array_bytes": conversion.rows * ROW_BYTES,
        "digest": conversion.manifest["digest"],
        "seconds": round(seconds, 2),
        "lines_per_s": round(read / seconds) if read else None,
        "skipped": conversion.skipped,
        "first_bad": conversion.first_bad,
    }


def info(config: CriteoConfig) -> dict[str, Any]:
    """Facts about a log without reading it: its files and the state of its conversion."""
    conversion = find(config)
    answer = {**_facts(conversion.log), "missing_days": conversion.log.missing_days, "state": _state(conversion)}
    if conversion.rows:
        positives = sum(part["positives"] for part in conversion.parts)
        answer |= {
            "folder": str(conversion.folder),
            "rows": conversion.rows,
            "array_bytes": conversion.rows * ROW_BYTES,
            "positive_share": positives / conversion.rows,
            "skipped": conversion.skipped,
            "first_bad": conversion.first_bad,
        }
    if conversion.complete:
        described = describe(CriteoStore(conversion, config.holdout))
        answer |= {key: described[key] for key in ("digest", "train_rows", "valid_rows", "split")}
    return answer | _others(config, conversion)


def _facts(log: Log) -> dict[str, Any]:
    synthetic = any(synthesize.is_synthetic(source.first_line(one)) for one in log.sources)
    return {
        "name": "criteo-like" if synthetic else f"criteo-{log.layout}",
        "path": str(log.path),
        "layout": log.layout,
        "files": len(log.sources),
        "gzipped_files": sum(one.packed for one in log.sources),
        "bytes": log.size,
        "synthetic": synthetic,
        "licence": SYNTHETIC_LICENCE if synthetic else LICENCE,
    }


def _state(conversion: Conversion) -> str:
    if conversion.complete:
        return "converted"
    return "begun" if conversion.rows else "not converted"


def _others(config: CriteoConfig, conversion: Conversion) -> dict[str, Any]:
    """Conversions of files with these names under other settings or in an older state; they use space until removed."""
    names = [one.path.name for one in conversion.log.sources]
    folders, rows = [], 0
    for path in sorted(config.cache_folder.glob(f"*/{MANIFEST}")):
        try:
            parts = [(part["name"], int(part["rows"])) for part in read(path, linked=True)["parts"]]
        except (DataError, LookupError, TypeError, ValueError):
            continue
        if path.parent != conversion.folder and [name for name, _ in parts] == names:
            folders.append(str(path.parent))
            rows += sum(count for _, count in parts)
    return {"other_conversions": folders, "other_array_bytes": rows * ROW_BYTES} if folders else {}
