"""Writing made-up listening events: into a store at once, or as the files the real data comes in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from ...config import to_json
from .schema import MADE_UP_LICENCE
from .store import kinds_of
from .synthesize_config import YambdaLike, default, of_size
from .synthesize_events import BLOCK_LISTENS, Generator
from .writer import StoreWriter

__all__ = ["NAME", "YambdaLike", "default", "of_size", "write_store"]

NAME = "yambda-like"
STREAM = 1
"""Another number means that the same config gives other events."""
_COMMIT_EVENTS = 1 << 23

Progress = Callable[[int, int], None]


def write_store(
    config: YambdaLike, folder: Path, *, progress: Progress | None = None, block_listens: int = BLOCK_LISTENS
) -> Path:
    """The events to train on as an event store: what `prepare` makes of the files `write_raw` writes.

    Stopped at any moment, the same call goes on. `progress` is told the events done and about how many there will be.
    """
    generator, train_end = Generator(config), np.uint32(config.split["train_end"])
    identity = {"made": NAME, "stream": STREAM, "config": to_json(config)}
    with StoreWriter(folder, identity=identity) as writer:
        committed = writer.events
        for block, next_user in generator.blocks(int(writer.bookmark or 0), block_listens):
            part = block.where(block.times_E < train_end)
            writer.append(
                uids=part.uids_E,
                items=part.items_E,
                times=part.times_E,
                kinds=kinds_of(part.types_E, part.ratios_E, part.organic_E),
                ratios=part.ratios_E,
            )
            if writer.events - committed >= _COMMIT_EVENTS:
                writer.commit(next_user)
                committed = writer.events
            if progress:
                progress(writer.events, max(writer.events, config.events))
        return writer.finish(
            generator.catalogue.columns(),
            {
                "name": NAME,
                "synthetic": True,
                "licence": MADE_UP_LICENCE,
                "split": config.split,
                "config": to_json(config),
            },
        )
