"""Both implementations of the history against plain Python, and against each other on odd shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from numpy.typing import NDArray

from recperf.ops.history import Crosses, Events, HistoryArrays, Picked, Rule, native, reference
from recperf.ops.history.reference import ACTION_BITS

BODIES = [
    pytest.param(reference, id="reference"),
    pytest.param(native, id="native"),
]
LISTEN_PLUS, LIKE, SKIP = 1, 2, 4
INTERLEAVED, ANY = (LISTEN_PLUS, LIKE, SKIP), (ACTION_BITS,)
ITEMS = 1000


def store_of(kinds: NDArray[np.uint8], layout: str = "packed", **changes: Any) -> Events:
    draw, events = np.random.default_rng(len(kinds)), len(kinds)
    word = np.uint32 if layout == "packed" else np.int64
    columns: dict[str, Any] = {
        "items_E": draw.integers(0, ITEMS, events).astype(word),
        "times_E": np.sort(draw.integers(0, 1 << 32, events)).astype(word),
        "catalogue_I2": draw.integers(0, 1 << 31, (ITEMS, 2)).astype(np.uint32),
    }
    if layout == "packed":
        columns["kinds_E"] = kinds
    else:
        actions = [(kinds & bit) > 0 for bit in INTERLEAVED]
        columns["flags"] = tuple(actions)
    return Events(**columns | changes)


def kinds_with(events: int, shares: tuple[float, ...], seed: int = 0) -> NDArray[np.uint8]:
    """Kinds by the shares of listen-plus, like, skip and none, with an organic bit and a type that must not matter."""
    draw = np.random.default_rng(seed)
    actions = np.array([LISTEN_PLUS, LIKE, SKIP, 0], np.uint8)[draw.choice(4, events, p=shares)]
    return np.asarray(actions | draw.integers(0, 32, events).astype(np.uint8) << 3, np.uint8)


def filled(body: Any, store: Events, begin_B: NDArray[np.int64], picked: Picked) -> HistoryArrays:
    """Into rooms full of what no event holds, so that a place left out shows."""
    total = len(picked.places_T)
    room = HistoryArrays(
        items_T=np.full(total, -7, np.int32),
        artists_T=np.full(total, -7, np.int32),
        albums_T=np.full(total, -7, np.int32),
        times_T=np.full(total, -7, np.int64),
    )
    body.fill(store, begin_B, picked, room)
    return room


def expected(kinds: NDArray[np.uint8], begin: int, position: int, rule: Rule) -> list[int]:
    chosen: set[int] = set()
    for action in rule.actions:
        chosen |= set([place for place in range(begin, position) if kinds[place] & action][-rule.cap :])
    return sorted(chosen)[-rule.most :]


SHARES = {
    "as in life": (0.61, 0.02, 0.36, 0.01),
    "few": (0.004, 0.002, 0.004, 0.99),
    "one action": (0.0, 0.0, 1.0, 0.0),
    "none": (0.0, 0.0, 0.0, 1.0),
    "likes": (0.1, 0.8, 0.1, 0.0),
}
RULES = {
    "cut": Rule(actions=INTERLEAVED, cap=40, most=50),
    "long": Rule(actions=INTERLEAVED, cap=1000, most=4000),
    "one each": Rule(actions=INTERLEAVED, cap=1, most=3),
    "newest": Rule(actions=INTERLEAVED, cap=7, most=1),
    "last": Rule(actions=ANY, cap=100, most=1000),
    "last cut": Rule(actions=ANY, cap=129, most=128),
    "last one": Rule(actions=ANY, cap=1, most=1),
}


CASES = [
    ("as in life", "cut"), ("as in life", "long"), ("few", "one each"), ("likes", "newest"), ("one action", "last cut"),
    ("as in life", "last"), ("none", "last one"),
]  # fmt: skip


@pytest.mark.parametrize(("shares", "rule_name"), CASES)
@pytest.mark.parametrize("layout", ["packed", "reference"])
@pytest.mark.parametrize("body", BODIES)
def test_picks_and_fills_as_plain_python_does(body: Any, layout: str, shares: str, rule_name: str) -> None:
    kinds, rule = kinds_with(1300, SHARES[shares]), RULES[rule_name]
    store = store_of(kinds, layout)
    # Scans of every length around the blocks and words the fast one works in, at odd and even places.
    counts = np.array([0, 1, 7, 8, 9, 127, 128, 129, 255, 256, 257, 391, 640, 1000, 1299])
    positions_B = np.concatenate([counts, np.full(len(counts), 1299)])
    begin_B = positions_B - np.concatenate([counts, counts])
    picked = body.pick(store, begin_B, positions_B, rule)
    room = filled(body, store, begin_B, picked)
    assert picked.offsets_B1[0] == 0
    assert picked.offsets_B1[-1] == len(picked.places_T) == len(picked.actions_T)
    assert np.array_equal(body.lengths(store, begin_B, positions_B, rule), np.diff(picked.offsets_B1))
    for sample, (begin, position) in enumerate(zip(begin_B.tolist(), positions_B.tolist())):
        part = slice(*picked.offsets_B1[sample : sample + 2].tolist())
        actual = begin + picked.places_T[part].astype(np.int64)
        assert actual.tolist() == expected(kinds, begin, position, rule)
        items = store.items_E[actual].astype(np.int64)
        assert picked.actions_T[part].tolist() == (kinds[actual] & ACTION_BITS).tolist()
        assert room.items_T[part].tolist() == items.tolist()
        assert room.artists_T[part].tolist() == store.catalogue_I2[items, 0].tolist()
        assert room.albums_T[part].tolist() == store.catalogue_I2[items, 1].tolist()
        assert room.times_T[part].tolist() == store.times_E[actual].tolist()


@pytest.mark.parametrize("body", BODIES)
def test_positions_beyond_32_bits(body: Any, tmp_path: Path) -> None:
    """Files with holes stand for columns of four billion events; only their ends take place on the disk."""
    events, known = (1 << 32) + 700, 600
    tails = {"kinds": kinds_with(known, SHARES["as in life"]), "items": np.arange(known, dtype=np.uint32) + 1}
    tails["times"] = tails["items"] * 5
    columns = {}
    for name, tail in tails.items():
        path = tmp_path / name
        with path.open("wb") as file:
            file.seek((events - known) * tail.itemsize)
            file.write(tail.tobytes())
        columns[name] = np.memmap(path, tail.dtype, "r")
    names = {"kinds_E": columns["kinds"], "items_E": columns["items"], "times_E": columns["times"]}
    store = store_of(tails["kinds"], **names)
    begin_B = np.array([events - known, events - 300])
    picked = body.pick(store, begin_B, np.array([events - 1, events - 200]), RULES["cut"])
    room = filled(body, store, begin_B, picked)
    places = expected(tails["kinds"], 0, known - 1, RULES["cut"])
    places += expected(tails["kinds"], known - 300, known - 200, RULES["cut"])
    assert room.items_T.tolist() == [place + 1 for place in places]
    assert room.times_T.tolist() == [place * 5 + 5 for place in places]


@pytest.mark.parametrize("body", BODIES)
def test_crosses_are_hashes_of_their_columns(body: Any) -> None:
    columns_KB = np.array([[0, 1, -1, 1 << 62], [7, 1 << 40, -5, 3], [9, 9, 9, 9]])
    crosses = [((0, 1), 40_000_000), ((2, 0, 1), (1 << 31) - 1), ((1,), 1)]
    out_CB = np.full((3, 4), -1, np.int32)
    body.crosses(columns_KB, Crosses.of(crosses), out_CB)
    for hashed, (columns, rows) in zip(out_CB, crosses):
        keys = [columns_KB[list(columns), sample].astype("<i8").tobytes() for sample in range(4)]
        assert hashed.tolist() == [xxhash.xxh64_intdigest(key) % rows for key in keys]
