"""Tables in tiers: a checkpoint holds the rows that were ever trained, and is resumed into any placement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_states import store
from tiered_states import STACKED, UNIFORM, D, R, Table, draws
from torch import Tensor

from recperf.models.tiers.columns import Rectangle, Shard, Sharded
from recperf.train import checkpoint_state
from recperf.train.checkpoint import manifest_of, shape_mismatch
from recperf.train.checkpoint_state import Content, StateReader


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
    monkeypatch.setattr(checkpoint_state, "CHUNK", 4 * D * 7)
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


def test_rows_of_two_ranks_are_read_by_ranks_and_by_one_process(tmp_path: Path) -> None:
    """One of them has trained no row."""
    halves = [Table(first=first, rows=R // 2) for first in (0, R // 2)]
    halves[0].train(torch.tensor([3, 7, 20]), draws())
    contents = [Content.of({"trial": half.state}) for half in halves]
    written = [content.write(tmp_path, rank=rank) for rank, content in enumerate(contents)]
    manifest = manifest_of(contents[0], written, step=1, best=False, when="now")

    def read(table: Table) -> dict[str, Tensor]:
        table.train(torch.tensor([1]), draws(9))
        StateReader(tmp_path, manifest.files, manifest.tensors).read(manifest.state, {"trial": table.state})
        return table.plain()

    whole = read(Table())
    for half, first in zip(halves, (0, R // 2)):
        part = {name: tensor[first : first + R // 2] for name, tensor in whole.items()}
        assert same(part, half.plain())
        assert same(part, read(Table(first=first, rows=R // 2)))
