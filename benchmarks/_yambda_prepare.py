"""What `yambda_prepare.py` runs in processes of their own, without torch, which would count as memory.

`make RAW EVENTS` writes synthetic raw files, `ours RAW OUT` prepares them into a store, `peer RAW OUT` imitates how the
MLPerf reference prepares them, with polars and everything in memory. The imitation takes the reference's steps, each as
a plain whole-table operation: read all, split in time, sort, sessions by gaps, lists of every session to parquet; then
the lists read back, exploded column by column and saved as int64 arrays. Each prints one JSON line.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from recperf.data.events.store import open_store
from recperf.data.known.yambda.raw import locate, prepare
from recperf.data.known.yambda.rows import EVENT_TYPES, LEAST_PLAYED, EventRows
from recperf.data.known.yambda.schema import ALBUMS_FILE, ARTISTS_FILE, COLUMNS, EVENTS_FILE, NULLABLE, split_of
from recperf.data.known.yambda.synthesize import Generator
from recperf.data.known.yambda.yambda_like import of_size, scattered
from recperf.data.tables import pyarrow

GROUP_ROWS = 1 << 20
SESSION_GAP_S = 1800
LISTS = {
    "item_id": "item_ids",
    "timestamp": "timestamps",
    "event_type": "event_types",
    "is_organic": "is_organic",
    "played_ratio_pct": "played_ratio_pct",
    "track_length_seconds": "track_length_seconds",
}


def peak_bytes() -> int:
    """The most memory this process has had resident."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) << 10


def ours(raw: Path, folder: Path) -> dict[str, Any]:
    files = locate(raw)
    began = perf_counter()
    prepare(files, folder, name="benchmark")
    seconds, peak = perf_counter() - began, peak_bytes()
    manifest = open_store(folder).manifest
    assert manifest.split is not None
    size = sum(column.bytes for column in manifest.columns.values())
    return {"events": manifest.split["raw_events"], "seconds": seconds, "peak": peak, "bytes": size}


def raw_table(block: EventRows, lengths_I: Any, schema: Any) -> Any:
    arrow = pyarrow()
    no_listen_E = block.types != 0
    arrays: dict[str, Any] = {
        "uid": block.uids,
        "timestamp": block.times,
        "item_id": block.items,
        "is_organic": block.organic,
        "played_ratio_pct": block.ratios,
        "track_length_seconds": lengths_I[block.items],
        "event_type": arrow.DictionaryArray.from_arrays(block.types.astype(np.int8), list(EVENT_TYPES)),
    }
    for name in NULLABLE:
        arrays[name] = arrow.array(arrays[name], mask=no_listen_E)
    return arrow.table([arrays[name] for name in schema.names], schema=schema)


def raw_files(raw: Path, events: int) -> dict[str, Any]:
    """Write synthetic events as raw files in the layout of the real data, and say how they are packed."""
    arrow, parquet = pyarrow(), pyarrow(".parquet")
    generator, file = Generator(of_size(events)), raw / "flat" / "like" / EVENTS_FILE
    file.parent.mkdir(parents=True)
    catalogue_I2 = generator.catalogue.columns()
    lengths_I = np.zeros(len(catalogue_I2), np.uint32)
    lengths_I[scattered(np.arange(generator.catalogue.items), generator.catalogue.items)] = (
        generator.catalogue.lengths_I
    )
    for at, (name, maps) in enumerate((("artist_id", ARTISTS_FILE), ("album_id", ALBUMS_FILE))):
        ids = np.arange(1, len(catalogue_I2), dtype=np.uint32)
        parquet.write_table(arrow.table({name: catalogue_I2[1:, at], "item_id": ids}), raw / maps, compression="zstd")
    types = [(name, getattr(arrow, kind)()) for name, kind in COLUMNS.items() if name != "event_type"]
    schema = arrow.schema([*types, ("event_type", arrow.dictionary(arrow.int8(), arrow.string()))])
    with parquet.ParquetWriter(file, schema, compression="zstd", compression_level=1) as writer:
        waiting: list[Any] = []
        for block, _ in generator.blocks():
            waiting.append(raw_table(block, lengths_I, schema))
            if sum(map(len, waiting)) >= GROUP_ROWS:
                writer.write_table(arrow.concat_tables(waiting), row_group_size=GROUP_ROWS)
                waiting = []
        if waiting:
            writer.write_table(arrow.concat_tables(waiting), row_group_size=GROUP_ROWS)
    facts = parquet.read_metadata(file)
    return {
        "events": facts.num_rows,
        "codec": facts.row_group(0).column(0).compression,
        "row_group_rows": facts.row_group(0).num_rows,
        "row_groups": facts.num_row_groups,
        "bytes": file.stat().st_size,
    }


def sessions(events: Path, out: Path) -> int:
    """Raw events to the reference's processed files; answers with the number of raw events."""
    import polars as pl

    table = pl.read_parquet(events)
    codes = {name: code for code, name in enumerate(EVENT_TYPES)}
    table = table.with_columns(pl.col("event_type").cast(pl.String).replace_strict(codes, return_dtype=pl.UInt8))
    rows, time = table.height, pl.col("timestamp").cast(pl.Int64)
    split = split_of(int(table["timestamp"].to_numpy().max()))
    train = table.filter((time >= split.train_start) & (time < split.train_end))
    test = table.filter((time >= split.test_start) & (time < split.test_end))
    test.join(train.select("uid").unique(), on="uid", how="inner").write_parquet(out / "test_events.parquet")
    train = train.sort("uid", "timestamp").with_columns(
        session_id=((time - time.shift(1)).over("uid").fill_null(0) > SESSION_GAP_S)
        .cast(pl.UInt32)
        .cum_sum()
        .over("uid")
    )
    popularity = np.bincount(train["item_id"].to_numpy()).astype(np.int64)
    np.save(out / "item_popularity.npy", popularity)
    lists = [pl.col(name).alias(alias) for name, alias in LISTS.items()]
    grouped = train.group_by("uid", "session_id", maintain_order=True).agg(lists).sort("uid", "session_id")
    grouped.write_parquet(out / "train_sessions.parquet")
    index = grouped.select("uid", "session_id", lens=pl.col("item_ids").list.len()).group_by("uid", maintain_order=True)
    index.agg(
        session_ids=pl.col("session_id"), session_lens=pl.col("lens"), session_offsets=pl.col("lens").cum_sum()
    ).write_parquet(out / "session_index.parquet")
    return int(rows)


def flat_cache(out: Path) -> None:
    """Sessions to flat arrays, a column at a time."""
    import polars as pl

    def column(name: str) -> Any:
        return pl.read_parquet(out / "train_sessions.parquet", columns=[name])[name].explode()

    lengths = pl.read_parquet(out / "train_sessions.parquet", columns=["uid", "item_ids"])
    uids = np.repeat(lengths["uid"].to_numpy().astype(np.int64), lengths["item_ids"].list.len().to_numpy())
    np.save(out / "flat_uid.npy", uids)
    for name in ("item_ids", "timestamps"):
        np.save(out / f"flat_{name}.npy", column(name).to_numpy().astype(np.int64))
    types = column("event_types").to_numpy().astype(np.int64)
    np.save(out / "flat_event_types.npy", types)
    ratio = column("played_ratio_pct").cast(pl.Float32).fill_null(0).to_numpy()
    np.save(out / "flat_played_ratio.npy", ratio)
    np.save(out / "flat_is_organic.npy", column("is_organic").to_numpy().astype(np.int8))
    listen = types == 0
    np.save(out / "flat_is_listen_plus.npy", listen & (ratio >= LEAST_PLAYED))
    np.save(out / "flat_is_skip.npy", listen & (ratio < LEAST_PLAYED))
    np.save(out / "flat_is_like.npy", types == 1)
    users, first, counts = np.unique(uids, return_index=True, return_counts=True)
    for name, ends in (("start", first), ("end", first + counts)):
        by_id = np.full(int(users[-1]) + 1, -1, np.int64)
        by_id[users] = ends
        np.save(out / f"user_{name}.npy", by_id)
    np.save(out / "unique_uids.npy", users)


def peer(raw: Path, out: Path) -> dict[str, Any]:
    files = locate(raw)
    out.mkdir(parents=True)
    began = perf_counter()
    rows = sessions(files.events, out)
    between = perf_counter()
    flat_cache(out)
    ended = perf_counter()
    return {
        "events": rows,
        "seconds": ended - began,
        "sessions_s": between - began,
        "cache_s": ended - between,
        "peak": peak_bytes(),
        "bytes": sum(path.stat().st_size for path in out.iterdir()),
    }


def main(what: str, raw: Path, more: str) -> None:
    ways = {"ours": ours, "peer": peer}
    answer = raw_files(raw, int(more)) if what == "make" else ways[what](raw, Path(more))
    assert "torch" not in sys.modules
    print(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
