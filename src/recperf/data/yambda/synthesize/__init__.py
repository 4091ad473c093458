"""Synthetic listening events, written as an event store."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ....config import to_json
from ....stop import poll
from ..manifest import Manifest
from ..schema import SYNTHETIC_LICENCE
from ..store import VERSION, kinds_of
from ..writer import StoreWriter, finished
from .config import YambdaLike, default, of_size
from .events import BLOCK_LISTENS, Generator

__all__ = ["NAME", "YambdaLike", "default", "key", "of_size", "write_store"]

NAME = "yambda-like"
STREAM = 1
"""Version of the generator: another number means that the same config gives other events."""
COMMIT_EVENTS = 1 << 23
"""Events between two commits: the most work that a killed process loses."""

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
    """Write the training events as an event store, as `prepare` does with the real ones.

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
