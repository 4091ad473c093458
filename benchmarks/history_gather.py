"""Anchors to batches of histories: ours against a faithful imitation of the per-sample way, in one run on one core.

The store is made up: 20M events of users with 5,000 to 27,000 each, 61 / 36 / 2 / 1 % listen-plus, skip, like and other
(each user with a skip share of their own), the items of a catalogue of 9,390,624 drawn by a power law with exponent
0.8, which is flatter than music is and hence harder on caches. It is written to disk and mapped, as any store.

The imitation works as the public pipeline does: for every sample in turn it masks the scan of int64 columns, finds the
last of each action, joins and sorts their positions, makes Python lists and a tensor a key, then joins the tensors of
a batch key by key. Where that could not be known it is given the cheaper way: its lists become tensors through numpy,
which takes a sixth of torch's own time, its crosses are Python's hash of a tuple, and it builds no objects around its
tensors. Both make batches of the same anchors, every fifth of ours also by the imitation and by our numpy body, which
gathers where there is no compiler; the first of each is not counted. All that both give is compared, labels included;
crosses, which the imitation hashes its own way, against xxh64 written out for one value at a time.

Anchors come user by user, as within a window, and at random across users. Run as
`python benchmarks/history_gather.py [--events N]`: N events instead, and no rows are kept.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from _rows import record, row, show
from recperf.data.batch import HistoryBatch
from recperf.data.events.kinds import LABELLED, LIKE, NEGATIVE, POSITIVE
from recperf.data.events.manifest import EventManifest
from recperf.data.events.store import EventStore, open_store
from recperf.data.events.writer import StoreWriter
from recperf.data.known.yambda.rows import kinds_of
from recperf.data.streaming.config import HistoryConfig
from recperf.data.streaming.features import CANDIDATE, CONTEXT, CROSSES, HISTORY
from recperf.data.streaming.history import Histories

EVENTS, ITEMS, ARTISTS, ALBUMS = 20_000_000, 9_390_624, 1_300_000, 3_400_000
FEWEST, MOST = 5_000, 27_000
EXPONENT = 0.8
BATCH, MIN_HISTORY = 256, 4086
ROUNDS, WARM_UP, EVERY = 40, 2, 5
"""Batches counted and not counted, and every how manieth of them the others make too."""
PRIMES = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)
"""Those of xxh64."""
GOAL = 10_000
"""Samples a second on one core, of either order of anchors."""


def made_up(folder: Path, events: int) -> EventStore:
    draw = np.random.default_rng(7)
    with StoreWriter(folder, identity={"benchmark": "history_gather"}) as writer:
        uid = 0
        while writer.events < events:
            uid += 1
            count = int(draw.integers(FEWEST, MOST))
            ranks = (ITEMS * draw.random(count) ** (1 / (1 - EXPONENT))).astype(np.int64)
            skip = 0.97 * draw.beta(1.6, 2.71)
            chance = np.cumsum([0.97 - skip, skip, 0.02])
            what = np.searchsorted(chance, draw.random(count))
            ratios = np.where(what == 0, 100, 0).astype(np.uint16)
            types = np.array([0, 0, 1, 2], np.uint8)[what]
            writer.append(
                uids=np.full(count, uid),
                items=ranks * 7_368_787 % ITEMS,
                times=np.sort(draw.integers(0, 5_200_000, count)) * 5,
                kinds=kinds_of(types, ratios, draw.random(count) < 0.5),
            )
        catalogue_I2 = np.stack([draw.integers(1, ARTISTS, ITEMS), draw.integers(1, ALBUMS, ITEMS)], 1)
        manifest = EventManifest(name="history_gather", synthetic=True, licence="made up")
        return open_store(writer.finish(catalogue_I2.astype(np.uint32), manifest))


def anchors(store: EventStore) -> dict[str, NDArray[np.int64]]:
    positions = np.arange(store.events)
    offsets = positions - store.user_first_U1[store.users_of(positions)]
    all_of_them = np.flatnonzero((offsets >= MIN_HISTORY) & ((store.kinds(slice(None)) & LABELLED) > 0))
    # A window of a day takes a run of neighbours from each of its users.
    runs = np.random.default_rng(3).permutation(len(all_of_them) // 16)
    by_user = all_of_them[(np.sort(runs[: (ROUNDS + WARM_UP) * BATCH // 16])[:, None] * 16 + np.arange(16)).ravel()]
    return {"user by user": by_user, "random": np.random.default_rng(5).permutation(all_of_them)}


class PerSample:
    """The per-sample way, over columns as the public cache has them."""

    def __init__(self, store: EventStore, config: HistoryConfig) -> None:
        kinds = store.kinds(slice(None))
        self.actions = [(kinds & action) > 0 for action in (POSITIVE, LIKE, NEGATIVE)]
        self.organic = ((kinds & 8) > 0).astype(np.int8)
        self.items, self.times = store.items_E[:].astype(np.int64), store.times_E[:].astype(np.int64)
        self.artists, self.albums = (store.groups_IG[:, column].astype(np.int64) for column in (0, 1))
        self.uids = np.repeat(store.user_ids_U, np.diff(store.user_first_U1))
        self.starts = dict(zip(store.user_ids_U.tolist(), store.user_first_U1.tolist()))
        self.config = config

    def target(self, position: int) -> dict[str, int]:
        item, time = int(self.items[position]), int(self.times[position])
        return {
            "uid": int(self.uids[position]), "item": item, "artist": int(self.artists[item]),
            "album": int(self.albums[item]), "hour": time // 3600 % 24, "organic": int(self.organic[position]),
        }  # fmt: skip

    def sample(self, position: int) -> dict[str, torch.Tensor]:
        target, config = self.target(position), self.config
        uid = target["uid"]
        begin = max(self.starts[uid], position - config.scan)
        if config.strategy == "interleaved":
            most = config.events_per_action
            found = [np.flatnonzero(flags[begin:position])[-most:] + begin for flags in self.actions]
            picked = np.sort(np.concatenate(found))
        else:
            plus, like, skip = (flags[begin:position] for flags in self.actions)
            picked = np.flatnonzero(plus | like | skip)[-config.length :] + begin
        picked = picked[-config.longest :]
        items = self.items[picked]
        weights = np.zeros(len(picked), np.int64)
        for flags, bit in zip(self.actions, (POSITIVE, LIKE, NEGATIVE)):
            weights[flags[picked]] |= bit
        times = self.times[picked].tolist()
        lists = {
            "uid": [uid],
            **{name: [hash(tuple(target[part] for part in of)) % rows] for name, (of, rows) in CROSSES.items()},
            "item_id": items.tolist(),
            "artist_id": self.artists[items].tolist(),
            "album_id": self.albums[items].tolist(),
            **dict(zip(CANDIDATE, ([target[part]] for part in ("item", "artist", "album")))),
            "action_weight": weights.tolist(),
            "action_timestamp": times,
            "dummy_watch_time": [0] * len(picked),
            "query_time": [times[-1] if times else int(self.times[position])],
            "label": [int(self.actions[0][position])],
        }
        return {name: torch.from_numpy(np.array(values)) for name, values in lists.items()}

    def batch(self, positions_B: NDArray[np.int64]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        samples = [self.sample(int(position)) for position in positions_B]
        return {
            name: (torch.cat([one[name] for one in samples]), torch.tensor([len(one[name]) for one in samples]))
            for name in samples[0]
        }


def xxh64(*words: int) -> int:
    """The hash of up to three words of 8 bytes, as its specification goes about a short input."""
    full, (p1, p2, p3, p4, p5) = (1 << 64) - 1, PRIMES

    def turned(value: int, by: int) -> int:
        return (value << by | (value & full) >> (64 - by)) & full

    state = p5 + 8 * len(words)
    for word in words:
        state ^= turned(word * p2 & full, 31) * p1 & full
        state = (turned(state, 27) * p1 + p4) & full
    state = (state ^ state >> 33) * p2 & full
    state = (state ^ state >> 29) * p3 & full
    return state ^ state >> 32


def crosses_agree(ours: HistoryBatch, peer: PerSample, positions_B: NDArray[np.int64]) -> None:
    targets = [peer.target(int(position)) for position in positions_B]
    for name, (of, rows) in CROSSES.items():
        expected = [xxh64(*(target[part] for part in of)) % rows for target in targets]
        assert ours.features[name][0].tolist() == expected, name


def agree(ours: HistoryBatch, peers: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
    for key in (*CONTEXT[:1], *HISTORY, *CANDIDATE):
        assert torch.equal(ours.features[key][0].long(), peers[key][0]), key
    assert torch.equal(ours.actions_T.long(), peers["action_weight"][0])
    assert torch.equal(ours.times_T, peers["action_timestamp"][0])
    assert torch.equal(ours.query_times_B, peers["query_time"][0])
    assert torch.equal(ours.labels_B.long(), peers["label"][0])
    assert torch.equal(ours.history_offsets_B1.diff(), peers["item_id"][1])


def rate(work: Callable[[], object], samples: int) -> float:
    began = perf_counter()
    work()
    return samples / (perf_counter() - began)


def measured(
    store: EventStore, config: HistoryConfig, order: str, positions: NDArray[np.int64]
) -> list[dict[str, Any]]:
    ours, peer = Histories(store, config), PerSample(store, config)
    plain = Histories(store, config, impl="reference")
    found: dict[str, list[float]] = {"ours": [], "plain": [], "peer": []}
    lengths, of_core = [], []
    for number in range(ROUNDS + WARM_UP):
        now = positions[number * BATCH : (number + 1) * BATCH]
        kept: dict[str, Any] = {}
        worked = thread_time()
        rates = {"ours": rate(lambda: kept.update(ours=ours.batch(now)), BATCH)}  # noqa: B023
        worked = thread_time() - worked
        if number % EVERY == WARM_UP - 1:
            rates["plain"] = rate(lambda: kept.update(plain=plain.batch(now)), BATCH)  # noqa: B023
            rates["peer"] = rate(lambda: kept.update(peer=peer.batch(now)), BATCH)  # noqa: B023
            for one in ("ours", "plain"):
                agree(kept[one], kept["peer"])
                crosses_agree(kept[one], peer, now)
        if number >= WARM_UP:
            for name, value in rates.items():
                found[name].append(value)
            of_core.append(BATCH / worked)
            lengths.append(len(kept["ours"].times_T) / BATCH)
    conditions = {
        "events": store.events,
        "items": store.items,
        "exponent": EXPONENT,
        "batch": BATCH,
        "length": config.length,
        "scan": config.scan,
        "strategy": config.strategy,
        "anchors": order,
        "mean_length": round(float(np.mean(lengths)), 1),
        "cores": 1,
        "load": os.getloadavg()[0],
        # What the rate would be were the core not shared: the clock of the thread stops when another has it.
        "samples_per_core_second": round(float(np.median(of_core))),
        "body": ours.why,
    }
    label = f"{config.strategy}, {order}"
    middle = float(np.median(found["peer"]))
    return [
        row("history_gather", f"recperf, {label}", "gather", "samples/s", found["ours"], conditions),
        row("history_gather", f"recperf by numpy, {label}", "gather", "samples/s", found["plain"], conditions),
        row("history_gather", f"per sample, {label}", "gather", "samples/s", found["peer"], conditions),
        row("history_gather", f"gain, {label}", "ratio", "x", [one / middle for one in found["ours"]], conditions),
    ]


def main(words: list[str]) -> int:
    events = int(words[1]) if words[:1] == ["--events"] else EVENTS
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory() as folder:
        store = made_up(Path(folder) / "store", events)
        orders = anchors(store)
        entries = []
        for config in (HistoryConfig(), HistoryConfig(strategy="last-n")):
            for order, positions in orders.items():
                entries += measured(store, config, order, positions)
    for entry in entries:
        print(show(entry), f"mean length {entry['conditions']['mean_length']:,}")
    if events == EVENTS:
        print(f"rows appended to {record(entries).name}")
    else:
        print(f"not the full size ({EVENTS:,} events): no rows kept")
    goals = [entry["p50"] for entry in entries if entry["variant"].startswith("recperf, interleaved")]
    return 0 if min(goals) >= GOAL else 5


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
