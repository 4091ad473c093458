"""Tables in tiers: a checkpoint holds the rows that were ever trained, and is resumed into any placement."""

from __future__ import annotations

import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_states import store
from test_checkpoint_damage import rewritten
from tiered_states import PATTERN, STACKED, UNIFORM, D, R, Table, draws
from torch import Tensor

from recperf.errors import MachineError
from recperf.execution import saving
from recperf.models.tiers.columns import TableColumns
from recperf.models.tiers.store import HostRows
from recperf.train import checkpoint, checkpoint_tensors
from recperf.train.checkpoint_state import shape_mismatch, tensor_bytes
from recperf.train.checkpoint_tensors import Rectangle, Shard, Sharded
from recperf.train.config import TrainConfig


def trained(count: int = 20, initial: dict[str, Any] = UNIFORM) -> Table:
    table = Table(initial)
    table.train(torch.arange(0, 2 * count, 2), draws())
    return table


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether two plain states are equal to the bit."""
    return one.keys() == other.keys() and all(
        torch.equal(one[name].view(torch.int32), other[name].view(torch.int32)) for name in one
    )


def resumed(folder: Path) -> Table:
    """Another process that resumes: its table had other rows."""
    again, notices = store(folder)
    table = Table()
    table.train(torch.tensor([1, 48]), draws(99))
    assert again.load(into={"trial": table.state}) is not None
    assert not notices
    return table


@pytest.mark.parametrize("background", [False, True])
def test_every_save_holds_all_rows_ever_trained(tmp_path: Path, background: bool) -> None:
    checkpoints, _ = store(tmp_path, background=background, keep_last=2)
    table, draw = Table(), draws()
    for step in range(1, 5):
        rows = (torch.rand(9, generator=draw) ** 2 * R).long().unique()
        table.train(rows, draw)
        expected = table.plain()
        checkpoints.save(step, {"trial": table.state}, best=False)
        table.train(rows, draw)
        checkpoints.wait()
        loaded = resumed(tmp_path)
        assert same(loaded.plain(), expected)
        assert np.array_equal(loaded.tiers.trained_R, table.tiers.trained_R)


@pytest.mark.parametrize("initial", [UNIFORM, STACKED])
def test_rows_are_read_into_any_placement(
    tmp_path: Path, initial: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_tensors, "CHUNK", 4 * D * 7)
    checkpoints, _ = store(tmp_path)
    table = trained(initial=initial)
    checkpoints.save(1, {"trial": table.state}, best=False)
    expected = table.plain()
    created = checkpoints.load()
    assert created is not None
    assert same(created["trial"], expected)
    wide = torch.full((R, D + 2), 9.0)
    into: dict[str, Any] = {"tables.t": wide[:, 1 : D + 1], "tables.t_state": torch.nn.Parameter(torch.ones(R))}
    loaded = checkpoints.load(into={"trial": into})
    assert loaded is not None
    assert same({name: part.contiguous() for name, part in loaded["trial"].items()}, expected)
    assert loaded["trial"]["tables.t"].data_ptr() == into["tables.t"].data_ptr()
    assert wide[:, [0, -1]].unique().tolist() == [9.0]
    # Ranks that hold rectangles.
    places = [Rectangle(0, 30, 0, D), Rectangle(30, 20, 0, 1), Rectangle(30, 20, 1, 2)]
    weights = [Shard(place, torch.full((place.rows, place.columns), 9.0)) for place in places]
    states = [Shard(place, torch.full((place.rows,), 9.0)) for place in places]
    sharded = {
        "tables.t": Sharded(shape=(R, D), width=D, shards=weights),
        "tables.t_state": Sharded(shape=(R,), width=D, shards=states),
    }
    checkpoints.load(into={"trial": sharded})
    top, left, right = (shard.tensor for shard in weights)
    assert torch.equal(torch.cat([top, torch.cat([left, right], dim=1)]), expected["tables.t"])
    assert torch.equal(torch.cat([shard.tensor for shard in states[:2]]), expected["tables.t_state"])
    # From plain tensors into tiers: only rows that differ from their initial values are held.
    plain, _ = store(tmp_path / "plain")
    plain.save(1, {"trial": expected}, best=False)
    other = Table(initial)
    other.train(torch.tensor([R - 1]), draws())
    plain.load(into={"trial": other.state})
    assert same(other.plain(), expected)
    assert np.array_equal(other.tiers.trained_R, table.tiers.trained_R)


def test_a_table_of_another_shape_or_beginning_is_refused(tmp_path: Path) -> None:
    checkpoints, notices = store(tmp_path)
    checkpoints.save(1, {"trial": trained().state}, best=False)
    into = {"trial": {"tables.t": torch.zeros(R, D + 1)}}
    loaded = checkpoints.load(into=into)
    assert loaded is not None
    assert shape_mismatch(into, loaded) == f"trial/tables.t is ({R}, {D + 1}), the checkpoint's ({R}, {D})"
    with pytest.raises(Exception, match="none of the 1 checkpoints is intact"):
        checkpoints.load(into={"trial": Table({**UNIFORM, "seed": 8}).state})
    assert "its rows begin as {'kind': 'uniform', 'bound': 0.25, 'seed': 7}, those of this model as" in notices[0]


def numbers(count: Any, both: bool = True) -> Callable[[dict[str, Any]], None]:
    def forge(about: dict[str, Any]) -> None:
        for shard in about["shards"][: 1 + both]:
            shard["place"][1] = count

    return forge


FORGERIES: list[tuple[str, Callable[[dict[str, Any]], Any], str]] = [
    ("count", numbers(1 << 40), "not torch.int64 [1099511627776]"),
    ("fewer", numbers(3), "not torch.int64 [3]"),
    ("empty", numbers(0), "a table has no valid number of rows"),
    ("text", numbers("x"), "a table has no valid number of rows"),
    ("unequal", numbers(3, both=False), "a table has no valid number of rows"),
    ("one", lambda about: about["shards"].pop(), "a table has no valid number of rows"),
    ("below", lambda about: about.update(shape=[2, D]), "are not ascending numbers below 2"),
    ("shape", lambda about: about.update(shape=[0, D]), "a table cannot have the shape"),
    ("width", lambda about: about.update(shape=[R, D + 1]), "not torch.float32"),
    ("key", lambda about: about["shards"][1].update(key="dense"), "KeyError"),
    ("file", lambda about: about["shards"][0].update(file="../x"), "'../x' is not a file of this checkpoint"),
    ("kind", lambda about: about["initial"].update(kind="other"), "KeyError"),
    ("more", lambda about: about["initial"].update(more=1), "TypeError"),
    ("pattern", lambda about: about.update(initial=PATTERN), "are not those of a tensor of shape"),
]


def test_forged_rows_are_refused_in_one_line(tmp_path: Path) -> None:
    checkpoints, _ = store(tmp_path)
    checkpoints.save(1, {"trial": trained().state}, best=False)
    folder = tmp_path / "step-00000001"
    manifest = (folder / "manifest.json").read_bytes()
    for name, forge, reason in FORGERIES:
        (folder / "manifest.json").write_bytes(manifest)
        rewritten(folder, lambda body, forge=forge: forge(body["tensors"]["trial/tables.t"]))  # type: ignore[misc]
        again, notices = store(tmp_path)
        with pytest.raises(Exception, match="none of the 1 checkpoints is intact"):
            again.load()
        assert reason in notices[0], name
        assert "\n" not in notices[0]


def test_sizes_count_the_rows_that_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tensor_bytes(Table().state) == 0
    table = trained(10)
    state = {"trial": table.state}
    assert tensor_bytes(state) == 10 * (4 * D + 8) + 10 * (4 + 8)
    checkpoints, _ = store(tmp_path, background=True)
    # Without room for copies of the rows the save waits, and nothing is copied whole.
    chunks: list[int] = []
    values = TableColumns.values

    def counted(columns: TableColumns, rows_N: Tensor) -> Tensor:
        chunks.append(len(rows_N))
        return values(columns, rows_N)

    with monkeypatch.context() as small:
        small.setattr(checkpoint, "available_bytes", lambda: 0)
        small.setattr(checkpoint_tensors, "CHUNK", 4 * D * 3)
        small.setattr(checkpoint.Content, "copied", lambda *_: pytest.fail("it is copied"))
        small.setattr(TableColumns, "values", counted)
        checkpoints.save(1, state, best=False)
    assert max(chunks) < 10
    assert same(resumed(tmp_path).plain(), table.plain())
    # Nor are rows in files copied unless that is asked for.
    for kind, asked in (("host", "auto"), ("file", "auto"), ("file", "on")):
        monkeypatch.setattr(HostRows, "kind", kind)
        config = TrainConfig(checkpoint_background=asked)  # type: ignore[arg-type]
        assert saving.in_background(config, state) == (kind == "host" or asked == "on")
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda path: namedtuple("usage", "free")(100))
        with pytest.raises(MachineError, match=r"the checkpoint takes .* of disk; 100 B are free"):
            store(tmp_path)[0].save(3, state, best=False)
    assert not list(tmp_path.glob(".step-*"))
    with monkeypatch.context() as lacking:
        lacking.setattr("recperf.train.checkpoint_state.available_bytes", lambda: 10)
        with pytest.raises(MemoryError, match=r"trial/tables.t of .* does not fit into memory"):
            store(tmp_path)[0].load()
