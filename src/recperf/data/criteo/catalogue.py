"""What `recperf data make | check | convert | info criteo` do; each answers with plain values."""

from __future__ import annotations

from pathlib import Path
from time import monotonic
from typing import Any

from ...errors import DataError
from ...files import sha256
from . import source, synthesize
from .config import CriteoConfig
from .convert import MANIFEST, MOST_SHOWN, ROW_BYTES, Conversion, Progress, convert, explain, find, read_manifest
from .parse import Parser
from .source import BrokenGzip, Log, Source
from .store import CriteoStore, describe

LICENCE = "Criteo's own terms; recperf neither downloads nor redistributes its logs"
MADE_UP_LICENCE = "made up by recperf; no restrictions, and no real people or clicks in it"


def make(*, path: Path, lines: int, seed: int, packed: bool) -> dict[str, Any]:
    """Write a made-up log."""
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
    """Read a whole log and count what is wrong with it; nothing is written."""
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

    def _count(self, one: Source, bad: dict[str, Any]) -> None:
        self.bad[bad["kind"]] = self.bad.get(bad["kind"], 0) + 1
        if len(self.shown) < 2 * MOST_SHOWN:
            self.shown.append({"file": one.path.name, **bad})


def make_arrays(config: CriteoConfig, *, progress: Progress) -> dict[str, Any]:
    """Convert a log, or find it converted."""
    before, began = find(config), monotonic()
    found = convert(config, progress=progress)
    taken = monotonic() - began
    read = sum(part["lines"] for part in found.parts) - sum(part["lines"] for part in before.parts)
    return {
        **_facts(found.log),
        "folder": str(found.folder),
        "converted": not before.complete,
        "resumed_at_row": before.rows if before.rows and not before.complete else None,
        "rows": found.rows,
        "array_bytes": found.rows * ROW_BYTES,
        "digest": found.manifest["digest"],
        "seconds": round(taken, 2),
        "lines_per_s": round(read / taken) if read else None,
        "skipped": found.skipped,
        "first_bad": found.first_bad,
    }


def info(config: CriteoConfig) -> dict[str, Any]:
    """What is known of a log without reading it: its files and what was converted of it."""
    found = find(config)
    answer = {**_facts(found.log), "missing_days": found.log.missing_days, "state": _state(found)}
    if found.rows:
        positives = sum(part["positives"] for part in found.parts)
        answer |= {
            "folder": str(found.folder),
            "rows": found.rows,
            "array_bytes": found.rows * ROW_BYTES,
            "positive_share": positives / found.rows,
            "skipped": found.skipped,
            "first_bad": found.first_bad,
        }
    if found.complete:
        described = describe(CriteoStore(found, config.holdout))
        answer |= {key: described[key] for key in ("digest", "train_rows", "valid_rows", "split")}
    return answer | _others(config, found)


def _facts(log: Log) -> dict[str, Any]:
    made_up = any(synthesize.is_made_up(source.first_line(one)) for one in log.sources)
    return {
        "name": "criteo-like" if made_up else f"criteo-{log.layout}",
        "path": str(log.path),
        "layout": log.layout,
        "files": len(log.sources),
        "gzipped_files": sum(one.packed for one in log.sources),
        "bytes": log.size,
        "synthetic": made_up,
        "licence": MADE_UP_LICENCE if made_up else LICENCE,
    }


def _state(found: Conversion) -> str:
    if found.complete:
        return "converted"
    return "begun" if found.rows else "not converted"


def _others(config: CriteoConfig, found: Conversion) -> dict[str, Any]:
    """Conversions of files with these names that other settings or an older state of the files led to: they take
    room until somebody removes them."""
    names = [one.path.name for one in found.log.sources]
    folders, rows = [], 0
    for path in sorted(config.cache_folder.glob(f"*/{MANIFEST}")):
        try:
            manifest = read_manifest(path)
        except DataError:
            continue
        if manifest and path.parent != found.folder and [part["name"] for part in manifest["parts"]] == names:
            folders.append(str(path.parent))
            rows += sum(part["rows"] for part in manifest["parts"])
    return {"other_conversions": folders, "other_array_bytes": rows * ROW_BYTES} if folders else {}
