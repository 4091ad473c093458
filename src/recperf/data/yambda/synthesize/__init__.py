"""Synthetic listening events, written as an event store or as parquet files in the layout of the real data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....config import to_json
from ....errors import DataError
from ....files import atomic_file, writing
from ....folders import alone
from ....stop import poll
from ...rows import pyarrow
from ..manifest import Manifest
from ..schema import (
    ALBUMS_FILE,
    ARTISTS_FILE,
    COLUMNS,
    EVENT_TYPES,
    EVENTS_FILE,
    NULLABLE,
    SYNTHETIC_KEY,
    SYNTHETIC_LICENCE,
)
from ..store import VERSION, kinds_of
from ..writer import StoreWriter, finished
from .config import YambdaLike, default, of_size
from .events import BLOCK_LISTENS, Block, Generator

__all__ = ["NAME", "YambdaLike", "default", "key", "of_size", "write_raw", "write_store"]

NAME = "yambda-like"
STREAM = 1
"""Version of the generator: another number means that the same config gives other events."""
COMMIT_EVENTS = 1 << 23
"""Events between two commits: the most work that a killed process loses."""
GROUP_ROWS = 1 << 20

Progress = Callable[[int, int], None]


def identity_of(config: YambdaLike) -> dict[str, object]:
    return {"made": NAME, "stream": STREAM, "config": to_json(config)}


def key(config: YambdaLike) -> str:
    """A short folder name for the dataset of a config, in the version of the store's format."""
    identity = {**identity_of(config), "version": VERSION}
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]


def write_store(
    config: YambdaLike, folder: Path, *, progress: Progress | None = None, block_listens: int = BLOCK_LISTENS
) -> Path:
    """Write the training events as an event store, the same that `prepare` makes of the files of `write_raw`.

    The same call resumes after an interruption. `progress` receives the events done and about how many there will be.
    """
    identity = identity_of(config)
    if finished(folder, identity):
        return folder.expanduser()
    generator, train_end = Generator(config), np.uint32(config.split.train_end)
    with StoreWriter(folder, identity=identity) as writer:
        committed = writer.events
        for block, next_user in generator.blocks(int(writer.bookmark or 0), block_listens):
            part = block.where(block.times_E < train_end)
            writer.append(
                uids=part.uids_E,
                items=part.items_E,
                times=part.times_E,
                kinds=kinds_of(part.types_E, part.ratios_E, part.organic_E),
            )
            if writer.events - committed >= COMMIT_EVENTS:
                writer.commit(next_user)
                committed = writer.events
            poll()
            if progress:
                progress(writer.events, max(writer.events, config.events))
        manifest = Manifest(
            name=NAME,
            synthetic=True,
            licence=SYNTHETIC_LICENCE,
            split=vars(config.split),
            config=to_json(config),
        )
        return writer.finish(generator.catalogue.columns(), manifest)


def write_raw(
    config: YambdaLike, folder: Path, *, size: str = "like", progress: Progress | None = None
) -> dict[str, object]:
    """Write all events, test day included, and the two maps of the catalogue as parquet files in the real layout.

    The event file gets its name last. Returns counts of what was written.
    """
    parquet = pyarrow(".parquet")
    folder = folder.expanduser()
    target = folder / "flat" / size / EVENTS_FILE
    if target.exists():
        raise DataError("there are events already", where={"file": target}, fix="choose another folder with --path")
    for file in (ARTISTS_FILE, ALBUMS_FILE):
        _refuse_real_map(parquet, folder / file)
    fix = "the same command begins again"
    with alone(folder, what="writing these files", again=fix):
        generator = Generator(config)
        catalogue_I2 = generator.catalogue.columns()
        events = users = 0
        with writing(target, fix=fix):
            target.parent.mkdir(parents=True, exist_ok=True)
        for column, (name, file) in enumerate((("artist_id", ARTISTS_FILE), ("album_id", ALBUMS_FILE))):
            with atomic_file(folder / file, fix=fix) as output:
                parquet.write_table(_map_table(name, catalogue_I2[1:, column]), output, compression="zstd")
        with (
            atomic_file(target, fix=fix) as output,
            parquet.ParquetWriter(output, _schema(), compression="zstd", compression_level=1) as writer,
        ):
            for group in _groups(generator):
                writer.write_table(_table(group), row_group_size=GROUP_ROWS)
                events += len(group)
                users = int(group.uids_E[-1])
                if progress:
                    progress(events, max(events, config.events))
    return {"events": events, "users": users, "items": len(catalogue_I2), "file": str(target)}


def _refuse_real_map(parquet: Any, path: Path) -> None:
    """Refuse to replace a map that is not synthetic: it belongs to other events."""
    if not path.exists():
        return
    try:
        synthetic = SYNTHETIC_KEY in (parquet.read_schema(path).metadata or {})
    except (OSError, ValueError):
        synthetic = False
    if not synthetic:
        raise DataError(
            "there is a map of other events here", where={"file": path}, fix="choose another folder with --path"
        )


def _groups(generator: Generator) -> Iterator[Block]:
    """Blocks joined to the size of a row group."""
    waiting: list[Block] = []
    for block, _ in generator.blocks():
        waiting.append(block)
        if sum(map(len, waiting)) >= GROUP_ROWS:
            yield _joined(waiting)
            waiting = []
    if waiting:
        yield _joined(waiting)


def _joined(blocks: list[Block]) -> Block:
    return Block(**{part.name: np.concatenate([getattr(one, part.name) for one in blocks]) for part in fields(Block)})


def _schema() -> Any:
    arrow = pyarrow()
    types: dict[str, Any] = {name: getattr(arrow, kind)() for name, kind in COLUMNS.items()}
    types["event_type"] = arrow.dictionary(arrow.int8(), arrow.string())
    return arrow.schema(list(types.items()), metadata={SYNTHETIC_KEY: NAME.encode()})


def _table(block: Block) -> Any:
    arrow = pyarrow()
    no_listen_E = block.types_E != 0
    arrays: dict[str, Any] = {
        "uid": block.uids_E,
        "timestamp": block.times_E,
        "item_id": block.items_E,
        "is_organic": block.organic_E,
        "played_ratio_pct": block.ratios_E,
        "track_length_seconds": block.lengths_E.astype(np.uint32),
        "event_type": arrow.DictionaryArray.from_arrays(block.types_E.astype(np.int8), list(EVENT_TYPES)),
    }
    for name in NULLABLE:
        arrays[name] = arrow.array(arrays[name], mask=no_listen_E)
    return arrow.table([arrays[name] for name in COLUMNS], schema=_schema())


def _map_table(name: str, values_I: NDArray[np.uint32]) -> Any:
    items_I = np.arange(1, len(values_I) + 1, dtype=np.uint32)
    table = pyarrow().table({name: values_I, "item_id": items_I})
    return table.replace_schema_metadata({SYNTHETIC_KEY: NAME.encode()})
