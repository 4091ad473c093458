"""Switches: what is on where, why, and what is refused; and the feeds of a captured step, as far as a CPU goes."""

from __future__ import annotations

import importlib.util
from dataclasses import asdict, fields, replace
from typing import Any

import pytest
import torch

from recperf.data.batch import ClickBatch, JaggedFeatures
from recperf.data.random_bags import RandomBags
from recperf.data.random_config import RandomBagsConfig
from recperf.errors import MachineError
from recperf.train.config import PLAIN, FastConfig
from recperf.train.fast import Switches, resolve
from recperf.train.graph import CopiedFeed, DrawnBatch, DrawnFeed, DrawnOrder

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
WAYS = ("embedding", "interaction", "mlp", "optimizer")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU with bfloat16 and Triton, as far as a decision looks."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "triton" else found(name))


def switched(
    device: torch.device, fast: FastConfig | None = None, *, drawn: bool = True, slices: int = 1,
    tables: str = "sgd", **change: Any,
) -> Switches:  # fmt: skip
    return resolve(replace(fast or FastConfig(), **change), device, drawn=drawn, slices=slices, optimizer=tables)


def test_a_cpu_takes_what_pays_there_and_says_why() -> None:
    found = switched(CPU)
    assert asdict(found) == {
        "input": "device", "graph": False, "precision": "float32", "embedding": True, "interaction": True,
        "mlp": True, "optimizer": True, "scatter": False,
        "reasons": {
            "input": "device: synthetic batches are drawn where they are used",
            "graph": "off: no GPU",
            "precision": "float32: a CPU",
            "embedding": "fused: on cpu",
            "interaction": "fused: on cpu",
            "mlp": "fused: on cpu",
            "optimizer": "fused: on cpu",
            "deterministic": "yes: requested",
        },
    }  # fmt: skip
    assert found.low == torch.float32


@pytest.mark.usefixtures("gpu")
def test_a_gpu_takes_everything_and_says_why() -> None:
    found = switched(CUDA)
    assert all(getattr(found, name) for name in ("graph", *WAYS))
    assert (found.input, found.precision, found.low) == ("device", "bfloat16", torch.bfloat16)
    assert found.reasons["graph"] == "on: a GPU, and shapes that do not change"
    assert found.reasons["precision"].startswith("bfloat16: a GPU that supports it")
    assert {found.reasons[name] for name in WAYS} == {"fused: on cuda"}


@pytest.mark.usefixtures("gpu")
def test_an_older_gpu_keeps_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 0))
    assert switched(CUDA).reasons["precision"] == "float32: a GPU without bfloat16"


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_every_switch_has_a_reason(device: torch.device) -> None:
    assert switched(device).reasons.keys() == {field.name for field in fields(FastConfig)}


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_the_plain_positions_are_plain_and_asked_for(device: torch.device) -> None:
    found = switched(device, PLAIN)
    assert not any(getattr(found, name) for name in ("graph", "scatter", *WAYS))
    assert (found.input, found.precision) == ("pageable", "float32")
    asked = {name: reason for name, reason in found.reasons.items() if name != "deterministic"}
    assert all(reason.endswith(": requested") for reason in asked.values())


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("input", "device"), ("input", "pinned"), ("input", "pageable"), ("graph", "off"), ("graph", "on"),
        ("precision", "float32"), ("precision", "tf32"), ("precision", "bfloat16"),
        *((way, value) for way in WAYS for value in ("fused", "plain")),
    ],
)  # fmt: skip
def test_what_is_asked_for_is_taken(name: str, value: str) -> None:
    found = switched(CUDA, **{name: value})
    assert found.reasons[name] == f"{value}: requested"
    assert getattr(found, name) == {"on": True, "off": False, "fused": True, "plain": False}.get(value, value)


def test_rows_of_files_come_through_memory_that_suits_the_device(gpu: None) -> None:
    assert switched(CPU, drawn=False).reasons["input"] == "pageable: rows are read from files"
    assert switched(CUDA, drawn=False).reasons["input"] == "pinned: rows are read from files"


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("device", "more", "message", "fix"),
    [
        (CPU, {"graph": "on"}, "a step cannot be a CUDA graph: no GPU", "--fast.graph off"),
        (CUDA, {"graph": "on", "slices": 2}, "a step cannot be a CUDA graph: a batch is split", "--fast.graph off"),
        (CUDA, {"graph": "on", "embedding": "plain"}, "a step cannot be a CUDA graph: plain emb", "--fast.graph off"),
        (CPU, {"precision": "tf32"}, "a CPU has no tf32", "--fast.precision float32"),
        (CPU, {"input": "device", "drawn": False}, "rows of a file cannot be drawn", "--fast.input pinned"),
        (CUDA, {"input": "device", "drawn": False}, "rows of a file cannot be drawn", "--fast.input pinned"),
    ],
)
def test_what_cannot_be_is_refused(device: torch.device, more: dict[str, Any], message: str, fix: str) -> None:
    with pytest.raises(MachineError, match=message) as caught:
        switched(device, **more)
    assert caught.value.fix == fix


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"slices": 2}, "off: a batch is split into micro-batches"),
        ({"embedding": "plain"}, "off: plain embeddings have shapes that depend on a batch's distinct rows"),
    ],
)
def test_a_graph_is_left_out_where_it_cannot_be(more: dict[str, Any], why: str) -> None:
    found = switched(CUDA, **more)
    assert not found.graph
    assert found.reasons["graph"] == why


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("way", WAYS)
def test_without_triton_the_plain_way_serves(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert switched(CUDA).reasons[way] == "plain: triton is not installed"
    with pytest.raises(MachineError, match=f"the fused {way} cannot be used: triton is not installed"):
        switched(CUDA, **{way: "fused"})


@pytest.mark.usefixtures("gpu")
def test_atomics_are_for_sgd_on_a_gpu_with_the_fused_embedding() -> None:
    assert switched(CUDA, deterministic=False).scatter
    assert switched(CUDA, deterministic=False).reasons["deterministic"].startswith("no: requested")
    for kept in (
        switched(CUDA),
        switched(CUDA, deterministic=False, tables="rowwise-adagrad"),
        switched(CPU, deterministic=False),
    ):
        assert not kept.scatter
        assert kept.reasons["deterministic"].startswith("yes: ")
    for torchs in (switched(CUDA, embedding="plain"), switched(CUDA, tables="adamw")):
        assert not torchs.scatter
        assert "atomics" in torchs.reasons["deterministic"]
        assert torchs.reasons["deterministic"].startswith("no: ")


@pytest.mark.usefixtures("gpu")
def test_a_dense_gradient_of_the_tables_keeps_a_step_out_of_a_graph() -> None:
    assert not switched(CUDA, tables="adamw").graph
    with pytest.raises(MachineError, match="adamw"):
        switched(CUDA, tables="adamw", graph="on")


@pytest.mark.usefixtures("gpu")
def test_adagrad_sorts_in_any_case() -> None:
    adagrad = switched(CUDA, deterministic=False, tables="rowwise-adagrad").reasons["deterministic"]
    assert adagrad == "yes: Adagrad needs each row's whole gradient, so ids are sorted"


def bags() -> RandomBags:
    config = RandomBagsConfig(ids_per_bag=4, batches=6)
    return RandomBags(keys=("a", "b"), rows=(9, 3), dense=2, batch_size=5, seed=1, config=config)


def same(one: ClickBatch, other: ClickBatch) -> bool:
    used = int(other.features.offsets_FB1[-1])
    return (
        torch.equal(one.dense_BD, other.dense_BD)
        and torch.equal(one.labels_B, other.labels_B)
        and torch.equal(one.features.offsets_FB1, other.features.offsets_FB1)
        and torch.equal(one.features.values_V[:used], other.features.values_V[:used])
    )


def test_tickets_stand_for_the_batches_of_an_order() -> None:
    tickets = DrawnOrder(bags())
    assert len(tickets) == 6
    assert list(tickets.batches(2, 4)) == [DrawnBatch(16, 5), DrawnBatch(17, 5)]
    assert [len(ticket) for ticket in tickets.batches(0)] == [5] * 6


def test_a_drawn_feed_counts_its_windows_and_follows_jumps() -> None:
    source = bags()
    feed, tickets = DrawnFeed(source), DrawnOrder(source)
    for epoch, start in ((0, 0), (1, 3), (0, 2), (0, 3)):
        batches = tickets.batches(epoch, start)
        for step in (start, start + 1):
            feed.load(batches)
            feed.draw()
            assert same(feed.batch, source.batch(epoch, step))


def room(samples: int = 5) -> ClickBatch:
    features = JaggedFeatures(("a", "b"), torch.zeros(40, dtype=torch.int64), torch.arange(11), padded=True)
    return ClickBatch(torch.zeros(samples, 2), features, torch.zeros(samples))


def test_a_copied_feed_holds_the_batch_it_was_brought() -> None:
    source, feed = bags(), CopiedFeed(room(), pinned=False)
    batches = source.batches(0)
    place = feed.batch.dense_BD.data_ptr()
    for step in range(4):
        feed.load(batches)
        feed.draw()
        assert same(feed.batch, source.batch(0, step))
        assert same(ClickBatch(feed.batch.dense_BD, feed.batch.features.trimmed(), feed.batch.labels_B), feed.batch)
    assert feed.batch.dense_BD.data_ptr() == place
