"""One split for all workloads: what each trains on, chooses its epoch by and scores, against a computation in plain
Python from the rows of a made-up log."""

from __future__ import annotations

import csv
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from recperf.data import datasets
from recperf.data.config import SplitOptions
from recperf.data.datasets import Dataset
from recperf.data.events.kinds import ANCHORS, DRAWN
from recperf.data.events.options import ImportOptions
from recperf.data.events.store import EventStore, open_store, own_ids
from recperf.data.importing import import_file
from recperf.data.next_item_batches import EventsOnDevice, SequenceOrder
from recperf.data.rows.imported import ImportedClicks
from recperf.data.split.record import Split
from recperf.jsonfile import require
from recperf.tasks import NEXT_ITEM
from recperf.workloads import dlrm, dlrm_v4, micro_dlrm, next_item
from recperf.workloads.dlrm.build import PreparedDLRM
from recperf.workloads.dlrm_v4.build import PreparedHistories
from recperf.workloads.micro_dlrm.build import PreparedClicks
from recperf.workloads.next_item.data import SequenceSource
from recperf.workloads.torch_module import KINDS
from recperf.workloads.torch_module.clicks import clicks_of

Event = tuple[str, int]
"""A user, and the number of one of its events, counted from 0 in their order."""


class Row(NamedTuple):
    user: str
    item: str
    time: int
    stars: int


def log() -> list[Row]:
    """Many events have the time of another one, also at the boundaries; some users and items come late."""
    draw, rows = random.Random(4), []
    for user in range(50):
        begin = draw.choice([0, 0, 0, 60, 85, 95])
        for _ in range(draw.randrange(1, 14)):
            time = draw.randrange(begin, 101)
            item = draw.randrange(20) + (20 if time > 90 and draw.random() < 0.3 else 0)
            rows.append(Row(f"u{user}", f"i{item}", 1_700_000_000 + 3600 * time, draw.randrange(1, 6)))
    draw.shuffle(rows)
    return rows


@dataclass(frozen=True)
class Form:
    """How a log is written and imported, and what that means for its events."""

    columns: tuple[str, ...]
    options: dict[str, Any]
    timed: bool = True
    taken: Callable[[Row], bool] = lambda row: True
    positive: Callable[[Row], bool] = lambda row: True


FORMS = {
    "ratings": Form(("user", "item", "time", "stars"), {}, positive=lambda row: row.stars >= 4),
    "labels": Form(
        ("user", "item", "time", "label"),
        {},
        taken=lambda row: row.stars >= 4,
        positive=lambda row: row.stars >= 4,
    ),
    "purchases": Form(("user", "item", "time"), {}),
    "order of rows": Form(("user", "item", "stars"), {"order": "rows"}, timed=False),
    "sequences": Form((), {"sequences": True}, timed=False),
}


def write(path: Path, form: Form, rows: list[Row]) -> None:
    if not form.columns:
        lines = defaultdict(list)
        for row in rows:
            lines[row.user].append(row.item)
        path.write_text("".join(f"{user} {' '.join(items)}\n" for user, items in lines.items()))
        return
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(form.columns)
        for row in rows:
            values = {**row._asdict(), "label": int(row.stars >= 4)}
            writer.writerow([values[name] for name in form.columns])


@dataclass
class Expected:
    """The parts of a log: events that are trained on, that choose the epoch, and that are held out."""

    parts: dict[str, set[Event]]
    targets: dict[str, set[Event]]
    taken: set[Event]
    unseen: tuple[int, int]
    """Held-out users and items that no other event has."""


def expected(form: Form, rows: list[Row], split: str) -> Expected:
    histories: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        histories[row.user].append(row)
    if form.timed:
        histories = {user: sorted(own, key=lambda row: row.time) for user, own in histories.items()}
    times = sorted(row.time for row in rows)
    begin = times[len(times) - round(0.2 * len(times))]
    before = [time for time in times if time < begin]
    validation = before[len(before) - round(0.1 * len(before))]
    parts: dict[str, set[Event]] = {"fit": set(), "choose": set(), "valid": set()}
    targets: dict[str, set[Event]] = {"choose": set(), "valid": set()}
    taken = set()
    for user, own in histories.items():
        took = [number for number, row in enumerate(own) if form.taken(row)]
        taken |= {(user, number) for number in took}
        cuts = (len(own), len(own))
        if split == "time":
            cuts = (sum(row.time < validation for row in own), sum(row.time < begin for row in own))
        elif len(took) >= 3:
            cuts = (took[-2], took[-1])
        for number in range(len(own)):
            part = "fit" if number < cuts[0] else "choose" if number < cuts[1] else "valid"
            parts[part].add((user, number))
        for part, first, end in (("choose", *cuts), ("valid", cuts[1], len(own))):
            ranked = [number for number in range(first, end) if split == "leave-one-out" or form.positive(own[number])]
            if ranked and min(took, default=len(own)) < ranked[0]:
                targets[part].add((user, ranked[0]))
    held, known = (
        {(user, histories[user][number].item) for user, number in some}
        for some in (parts["valid"], parts["fit"] | parts["choose"])
    )
    unseen = tuple(len({pair[at] for pair in held} - {pair[at] for pair in known}) for at in (0, 1))
    return Expected(parts, targets, taken, unseen)  # type: ignore[arg-type]


class Numbers:
    """The events of a store by user and number; a drawn negative has that of the event it was drawn for."""

    def __init__(self, store: EventStore, taken: set[Event]) -> None:
        kinds_E, users_E = store.kinds(slice(None)), store.users_of(np.arange(store.events))
        happened_E1 = np.concatenate([[0], np.cumsum((kinds_E & DRAWN) == 0)])
        names, first_E = own_ids(store, "user"), happened_E1[store.user_first_U1[users_E]]
        self.of = [(str(names[user]), int(at)) for user, at in zip(users_E, happened_E1[:-1] - first_E)]
        assert ((kinds_E & ANCHORS) > 0).all()
        self.taken = [one for one, kind in zip(self.of, kinds_E) if one in taken and not kind & DRAWN]
        """Those of next-item models."""

    def __call__(self, positions: Any) -> set[Event]:
        return {self.of[position] for position in positions}


CASES = [(name, split) for name in FORMS for split in ("time", "leave-one-out") if FORMS[name].timed or split != "time"]


@pytest.fixture(params=CASES, ids=" ".join)
def case(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Dataset, Expected, Numbers]:
    name, split = request.param
    form, rows = FORMS[name], log()
    monkeypatch.setenv("RECPERF_HOME", str(tmp_path / "home"))
    write(tmp_path / "log.csv", form, rows)
    options = ImportOptions(events=tmp_path / "log.csv", name="made-up", **form.options)
    asked = SplitOptions() if split == "time" or not form.timed else SplitOptions(split="leave-one-out")
    import_file(options, split=asked, progress=lambda *_: lambda *_: None)
    dataset, wanted = datasets.find("made-up"), expected(form, rows, split)
    assert dataset.folder is not None
    return dataset, wanted, Numbers(open_store(dataset.folder), wanted.taken)


def test_all_workloads_hold_out_the_same_events(
    case: tuple[Dataset, Expected, Numbers], monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset, wanted, numbers = case
    records = [held_out_of(source.facts()) for source in next_items(dataset, wanted, numbers)]
    records += [held_out_of(data) for data in clicks(dataset, wanted, numbers, monkeypatch)]
    records.append(held_out_of(histories(dataset, wanted, numbers)))
    assert all(record == records[0] for record in records)
    assert all(wanted.parts.values())
    assert all(wanted.targets.values())
    record = records[0]
    if record.kind == "time":
        assert min(wanted.unseen) > 0
    held = wanted.parts["valid"]
    assert (record.held_out.rows, record.held_out.users) == (len(held), len({user for user, _ in held}))
    assert (record.unseen.users, record.unseen.items) == wanted.unseen
    assert record.rows == sum(map(len, wanted.parts.values()))
    assert record.digest == records[-1].digest


def held_out_of(facts: dict[str, Any]) -> Split:
    return require(facts["held_out"], Split, Path("data.json"), what="is damaged")


def next_items(dataset: Dataset, wanted: Expected, numbers: Numbers) -> Iterator[SequenceSource]:
    """hstu, and a torch module that ranks items."""
    module = KINDS[NEXT_ITEM.name]
    configs = [next_item.hstu.on_events(next_item.hstu.default(), dataset).data]
    configs.append(module.resolve(module.datasets["events"](module.config(), dataset)).data)
    for config in configs:
        source = SequenceSource(config)
        data = replace(source.data, items_E=np.arange(len(source.data.items_E), dtype=np.int32))
        events = EventsOnDevice(data, "cpu")  # type: ignore[arg-type]
        order = SequenceOrder.of(data, events, length=5, batch_size=7, seed=1, all_windows=True)
        trained = {numbers.taken[event] for batch in order.batches(0) for event in (*batch.items_T, *batch.targets_T)}
        fits = wanted.parts["fit"] & wanted.taken
        several = {user for user, _ in fits if sum(other == user for other, _ in fits) > 1}
        assert trained == {event for event in fits if event[0] in several}, "one event alone predicts nothing"
        for part, targets in (("choose", source.validation), ("valid", source.test)):
            assert {numbers.taken[position] for position in targets.positions_N} == wanted.targets[part]
        yield source


def clicks(
    dataset: Dataset, wanted: Expected, numbers: Numbers, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, Any]]:
    """dlrm, micro-dlrm and a torch module on labels."""
    read: list[int] = []
    rows_at = ImportedClicks._at

    def recorded(self: ImportedClicks, index: Any) -> Any:
        read.extend(index.tolist())
        return rows_at(self, index)

    monkeypatch.setattr(ImportedClicks, "_at", recorded)
    prepared: Any = PreparedDLRM(dlrm.config.resolve(dlrm.config.on_events(dlrm.config.experiment(), dataset)))
    read.clear()
    assert sum(len(batch) for batch in prepared.order(1).batches(0)) == len(set(read))
    for number in (0, 1):
        if number:
            read.clear()
            prepared = PreparedClicks(
                micro_dlrm.config.resolve(micro_dlrm.config.on_events(micro_dlrm.config.default(), dataset))
            )
        assert numbers(read) == wanted.parts["fit"]
        rows: ImportedClicks = prepared.source.clicks
        for part in ("choose", "valid"):
            assert numbers(rows.index[part]) == wanted.parts[part]
        scored = prepared.scored_rows()
        ranked = rows.index["valid"][scored.targets_N.numpy()]
        assert numbers(ranked) == wanted.targets["valid"]
        assert len(ranked) == len(wanted.targets["valid"]), "no drawn negative is ranked"
        yield prepared.data
    module = KINDS["click-labels"]
    own = clicks_of(module.resolve(module.datasets["events"](module.config(), dataset)))
    assert numbers(own.index["fit"]) == wanted.parts["fit"]
    yield own.describe()


def histories(dataset: Dataset, wanted: Expected, numbers: Numbers) -> dict[str, Any]:
    """dlrm-v4."""
    config = dlrm_v4.config.resolve(dlrm_v4.config.on_events(dlrm_v4.config.laptop(), dataset))
    prepared = PreparedHistories(replace(config, train=replace(config.train, batch_size=16)))
    assert prepared.validation is not None
    orders = {
        "fit": prepared.train_order(),
        "choose": prepared.valid_order(prepared.validation),
        "valid": prepared.valid_order(prepared.part_at(None)),
    }
    for part, order in orders.items():
        positions = np.concatenate([order.batch(number) for number in range(len(order))])
        assert len(positions) == len(np.unique(positions)) == order.samples
        assert numbers(positions) == wanted.parts[part]
    rows = prepared.scored_rows()
    assert rows.targets_N is not None
    assert rows.times_N is not None
    assert numbers(rows.times_N[rows.targets_N].tolist()) == wanted.targets["valid"]
    if prepared.unknown_E is not None:
        assert numbers(np.flatnonzero(prepared.unknown_E)) == wanted.parts["valid"]
    return prepared.data


def test_held_out_labels_reach_nothing_that_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave-one-out holds out events before those of others: dlrm-v4 counts outcomes along the stream, and must leave
    them out. Two logs that differ in held-out ratings only give it the same training batches and baselines."""
    monkeypatch.setenv("RECPERF_HOME", str(tmp_path / "home"))
    rows = sorted(log(), key=lambda row: row.time)
    counts = Counter(row.user for row in rows)
    last = {row.user: number for number, row in enumerate(rows) if counts[row.user] >= 3}
    changed = [*rows]
    for number in last.values():
        changed[number] = rows[number]._replace(stars=6 - rows[number].stars)
    inputs = []
    for name, some in (("one", rows), ("other", changed)):
        write(tmp_path / f"{name}.csv", FORMS["ratings"], some)
        options = ImportOptions(events=tmp_path / f"{name}.csv", name=name, positive_from=4)
        import_file(options, split=SplitOptions(split="leave-one-out"), progress=lambda *_: lambda *_: None)
        config = dlrm_v4.config.on_events(dlrm_v4.config.laptop(), datasets.find(name))
        prepared = PreparedHistories(config)
        order = prepared.train_order()
        anchors = np.concatenate([order.batch(number) for number in range(len(order))])
        batch = prepared.gatherer().batch(anchors)
        events = prepared.plain.events(anchors, prepared.store.kinds(anchors))
        last_items = prepared._last_items.of(events)
        inputs.append([batch.features.values_V, batch.labels_B, batch.rates_BF, last_items, *prepared.rates_regression])
    for one, other in zip(*inputs):
        np.testing.assert_array_equal(one, other)
