"""hstu: next items with the HSTU encoder, in its published sizes or in sizes that follow the data."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ...errors import ConfigError
from ...models.next_item.config import NextItemConfig
from .config import NextItemRunConfig, NextItemTrainConfig, embedded, resolve, sized, workload
from .own_data import kind_of, read_length, training_for

if TYPE_CHECKING:
    from ...data.datasets import Dataset
    from ...data.events.store import EventStore


def default() -> NextItemRunConfig:
    """Embedded sequences and a small model: trains in less than a minute on two cores."""
    model = NextItemConfig(dim=32, blocks=2, heads=2, head_dim=16, max_length=32, dropout=0.1, counts="on")
    train = NextItemTrainConfig(epochs=15, batch_size=32, learning_rate=3e-3, patience=4)
    return embedded(NextItemRunConfig(model=model, train=train))


def published() -> NextItemRunConfig:
    """The published sizes for ML-1M: 8 blocks of width 50, 2 heads of 25, at most 200 items."""
    return embedded(NextItemRunConfig())


def dense() -> NextItemRunConfig:
    """The published blocks, 96 wide with 2 heads of 48, and more dropout: for users with many events."""
    config = published()
    return replace(config, model=replace(config.model, dim=96, head_dim=48, dropout=0.3))


def sparse() -> NextItemRunConfig:
    """4 blocks of width 64 that drop half: for users with few events, as in Amazon Beauty."""
    model = NextItemConfig(dim=64, blocks=4, heads=2, head_dim=32, max_length=50, dropout=0.5)
    return embedded(NextItemRunConfig(model=model))


def small() -> NextItemRunConfig:
    """The blocks of the default with more dropout, for few events of one's own: seconds on two cores."""
    model = replace(default().model, max_length=200, dropout=0.3)
    return NextItemRunConfig(model=model, train=NextItemTrainConfig(learning_rate=3e-3))


def on_events(config: NextItemRunConfig, dataset: Dataset) -> NextItemRunConfig:
    """The config for an event store. The default preset follows the data; another config gets its items only."""
    return sized(config, dataset, following if config == default() else None)


def following(store: EventStore) -> NextItemRunConfig:
    """A model for the events of a store, whose sizes follow the events of a user."""
    from ...data.next_item import NextItemData

    data = NextItemData.from_store(store)
    config = {"small": small, "dense": dense, "sparse": sparse}[kind_of(data)]()
    model = replace(config.model, max_length=read_length(data, config.model.max_length), counts="on")
    return replace(config, model=model, train=replace(config.train, **training_for(data)))


def with_blocks(config: NextItemRunConfig) -> NextItemRunConfig:
    """Refuses another encoder."""
    if config.model.encoder not in ("hstu", "auto"):
        what = f"the workload hstu has HSTU blocks, not those of a {config.model.encoder}"
        raise ConfigError(what, where={"field": "model.encoder"}, fix="recperf run next-item")
    return resolve(replace(config, model=replace(config.model, encoder="hstu")))


HSTU = workload(
    "hstu",
    "next items with the HSTU encoder, also in its published sizes",
    {"default": default, "published": published, "dense": dense, "sparse": sparse},
    on_events,
    with_blocks,
)
