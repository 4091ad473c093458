"""Tables in tiers: increments of rows, linked from checkpoint to checkpoint, resumable into any placement."""

from __future__ import annotations

import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoint_states import flip, store
from test_checkpoint import Death, refuse
from test_checkpoint_damage import rewritten
from tiered_states import PATTERN, STACKED, UNIFORM, D, Leaf, R, Table, initial_table, same
from torch import Tensor

from recperf import points
from recperf.errors import MachineError
from recperf.execution import saving
from recperf.models.dlrm_v4.tables import fill_uniform_
from recperf.models.init import InitialRows
from recperf.train import checkpoint, checkpoint_file, checkpoint_folder, checkpoint_rows, checkpoint_state
from recperf.train.checkpoint import CheckpointStore
from recperf.train.checkpoint_rows import TieredTensor, initial_rows
from recperf.train.checkpoint_shards import Rectangle, Shard, Sharded
from recperf.train.checkpoint_state import shape_mismatch, tensor_bytes
from recperf.train.config import TrainConfig


def step_(table: Table, draw: torch.Generator, count: int = 6) -> None:
    """Train some rows, more often the first ones."""
    rows = (torch.rand(count, generator=draw) ** 2 * R).long().unique()
    table.write(rows, torch.randn(len(rows), D + 1, generator=draw))


def draws() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def state_of(table: Table, step: int = 0) -> dict[str, Any]:
    return {"trial": table.state(), "dense": torch.full((4,), float(step)), "step": step}


def resumed(folder: Path, **fields: Any) -> tuple[Table, CheckpointStore, dict[str, Any]]:
    """Another process that resumes: its table had other rows."""
    again, notices = store(folder, **fields)
    table = Table()
    step_(table, torch.Generator().manual_seed(99))
    state = again.load(into=state_of(table))
    assert state is not None
    assert not notices
    return table, again, state


def row_files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("rows*"))


def increments(folder: Path) -> list[int]:
    """Rows in each increment of the weights."""
    body = checkpoint_folder.read_manifest(folder)
    return [entry["count"] for entry in body["tensors"]["trial/tables.t"]["increments"]]


def test_the_leaf_of_the_tests_fits_the_protocol() -> None:
    leaf: TieredTensor = Table().state()["tables.t"]
    assert isinstance(leaf, TieredTensor)
    assert not isinstance(torch.zeros(2, 2), TieredTensor)


@pytest.mark.parametrize("background", [False, True])
def test_increments_equal_all_rows_at_every_save(tmp_path: Path, background: bool) -> None:
    checkpoints, _ = store(tmp_path, background=background, keep_last=2)
    table, draw, lengths = Table(), draws(), []
    for step in range(1, 17):
        step_(table, draw)
        expected = table.plain()
        checkpoints.save(step, state_of(table, step), best=False)
        step_(table, draw, 3)
        checkpoints.wait()
        folder = tmp_path / f"step-{step:08d}"
        loaded, _, state = resumed(folder.parent)
        assert same(loaded.plain(), expected)
        assert state["dense"].tolist() == [step] * 4
        counts = increments(folder)
        assert sum(counts) <= 2 * table.state()["tables.t"].written()
        lengths.append(len(counts))
    assert max(lengths) > 3
    assert lengths.count(1) > 1, "no compaction"
    # Earlier increments are the same files, as long as nothing started anew.
    last, before = (tmp_path / f"step-{step:08d}" for step in (16, 15))
    common = set(row_files(before)) & set(row_files(last)) if lengths[-1] > 1 else set()
    assert all((last / name).stat().st_ino == (before / name).stat().st_ino for name in common)


def test_a_resumed_process_continues_the_increments_and_another_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints, _ = store(tmp_path)
    table = Table()
    table.write(torch.arange(20), torch.randn(20, D + 1))
    checkpoints.save(1, state_of(table, 1), best=False)
    loaded, again, _ = resumed(tmp_path)
    loaded.write(torch.tensor([3, 40]), torch.randn(2, D + 1))
    # A read for another purpose does not change what is continued.
    again.load()
    again.save(2, state_of(loaded, 2), best=False)
    assert increments(tmp_path / "step-00000002") == [20, 2]
    assert same(resumed(tmp_path)[0].plain(), loaded.plain())
    with monkeypatch.context() as fewer:
        fewer.setattr(checkpoint_rows, "MOST_INCREMENTS", 2)
        again.save(20, state_of(loaded, 20), best=False)
    assert increments(tmp_path / "step-00000020") == [21]
    stranger, _ = store(tmp_path)
    stranger.save(30, state_of(loaded, 30), best=False)
    assert increments(tmp_path / "step-00000030") == [21]
    # Nothing new: nothing but the dense tensors is written.
    stranger.save(40, state_of(loaded, 40), best=False)
    assert row_files(tmp_path / "step-00000040") == ["rows0-00000.safetensors"]
    assert same(resumed(tmp_path)[0].plain(), loaded.plain())


def test_a_failed_or_skipped_save_loses_no_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints, _ = store(tmp_path)
    table = Table()
    table.write(torch.arange(30), torch.randn(30, D + 1))
    checkpoints.save(1, state_of(table, 1), best=False)
    table.write(torch.tensor([5]), torch.ones(1, D + 1))
    for function in ("write", "fsync", "replace"):
        with monkeypatch.context() as failing:
            refuse(failing, function, 28, 0)
            with pytest.raises(MachineError, match="the disk is full"):
                checkpoints.save(2, state_of(table, 2), best=False)
    # The checkpoint of this step exists: the save is skipped.
    checkpoints.save(1, state_of(table, 1), best=True)
    table.write(torch.tensor([6]), torch.ones(1, D + 1))
    checkpoints.save(3, state_of(table, 3), best=False)
    assert increments(tmp_path / "step-00000003") == [30, 2]
    assert same(resumed(tmp_path)[0].plain(), table.plain())
    # Without the checkpoint before, all rows are written.
    table.write(torch.tensor([7]), torch.ones(1, D + 1))
    shutil.rmtree(tmp_path / "step-00000003")
    checkpoints.save(4, state_of(table, 4), best=False)
    assert increments(tmp_path / "step-00000004") == [30]
    # A damaged one that is replaced is not continued either.
    flip(tmp_path / "step-00000004" / "rows0-00000.safetensors", -1)
    table.write(torch.tensor([8]), torch.ones(1, D + 1))
    checkpoints.save(4, state_of(table, 4), best=False)
    assert increments(tmp_path / "step-00000004") == [30]
    assert same(resumed(tmp_path)[0].plain(), table.plain())


@pytest.mark.parametrize("name", [name for name in points.NAMES if name.startswith(("save: ", "prune: "))])
def test_a_stop_at_any_point_leaves_rows_that_load(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints, _ = store(tmp_path, background=True, keep_last=2)
    table, draw, expected = Table(), draws(), {}

    def save(step: int) -> None:
        step_(table, draw)
        expected[step] = table.plain()
        checkpoints.save(step, state_of(table, step), best=step == 10)
        checkpoints.wait()

    for step in (10, 20):
        save(step)
    if name == "save: damaged one set aside":
        save(30)
        flip(tmp_path / "step-00000030" / "rank0-00000.safetensors", 3)

    def die(now: str) -> None:
        if now == name:
            raise Death

    monkeypatch.setattr(points, "listener", die)
    with pytest.raises(Death):
        for step in (30, 40):
            save(step)
    monkeypatch.setattr(points, "listener", None)
    loaded, again, state = resumed(tmp_path, keep_last=2)
    assert state["step"] >= 20
    assert same(loaded.plain(), expected[state["step"]])
    step_(loaded, draw)
    again.save(50, state_of(loaded, 50), best=False)
    assert same(resumed(tmp_path, keep_last=2)[0].plain(), loaded.plain())


def test_a_large_increment_is_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_state, "FILE_BYTES", 150)
    checkpoints, _ = store(tmp_path)
    table = Table()
    for step, count in ((1, 40), (2, 20)):
        table.write(torch.arange(count), torch.randn(count, D + 1))
        checkpoints.save(step, state_of(table, step), best=False)
    sizes = [(tmp_path / "step-00000002" / name).stat().st_size for name in row_files(tmp_path / "step-00000002")]
    assert len(sizes) > 12
    assert max(sizes) < 700
    assert same(resumed(tmp_path)[0].plain(), table.plain())


def test_files_are_copied_where_links_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints, _ = store(tmp_path, keep_last=2)
    table = Table()
    table.write(torch.arange(20), torch.randn(20, D + 1))
    checkpoints.save(1, state_of(table, 1), best=False)
    table.write(torch.tensor([5]), torch.ones(1, D + 1))
    with monkeypatch.context() as failing:
        refuse(failing, "link", 1, 0)
        checkpoints.save(2, state_of(table, 2), best=False)
    first, copy = (tmp_path / f"step-0000000{step}" / "rows0-00000.safetensors" for step in (1, 2))
    assert first.stat().st_ino != copy.stat().st_ino
    assert first.read_bytes() == copy.read_bytes()
    assert same(resumed(tmp_path)[0].plain(), table.plain())


@pytest.mark.parametrize("initial", [UNIFORM, STACKED])
def test_rows_are_read_into_any_placement(
    tmp_path: Path, initial: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_rows, "CHUNK", 4 * D * 7)
    checkpoints, _ = store(tmp_path)
    table, draw = Table(initial), draws()
    for step in (1, 2, 3):
        step_(table, draw, 20 // step)
        checkpoints.save(step, {"trial": table.state()}, best=False)
    expected = table.plain()
    assert len(increments(tmp_path / "step-00000003")) > 1
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
    assert checkpoint_folder.read_manifest(tmp_path / "plain" / "step-00000001")["format"] == 4
    other = Table(initial)
    other.write(torch.tensor([R - 1]), torch.ones(1, D + 1))
    plain.load(into={"trial": other.state()})
    assert same(other.plain(), expected)
    assert other.records.keys() == table.records.keys()
    # What follows plain tensors starts with all rows.
    plain.save(2, {"trial": other.state()}, best=False)
    assert increments(tmp_path / "plain" / "step-00000002") == [len(table.records)]


def test_a_table_of_another_shape_or_beginning_is_refused(tmp_path: Path) -> None:
    checkpoints, notices = store(tmp_path)
    table = Table()
    step_(table, draws())
    checkpoints.save(1, {"trial": table.state()}, best=False)
    into = {"trial": {"tables.t": torch.zeros(R, D + 1)}}
    loaded = checkpoints.load(into=into)
    assert loaded is not None
    assert shape_mismatch(into, loaded) == f"trial/tables.t is ({R}, {D + 1}), the checkpoint's ({R}, {D})"
    with pytest.raises(Exception, match="none of the 1 checkpoints is intact"):
        checkpoints.load(into={"trial": Table({**UNIFORM, "seed": 8}).state()})
    assert "its rows begin as {'kind': 'uniform', 'bound': 0.25, 'seed': 7}, those of this model as" in notices[0]


def test_initial_rows_are_those_of_the_models() -> None:
    rows_RD = torch.empty(R, D)
    fill_uniform_(rows_RD, 0.25, 7)
    assert torch.equal(initial_table(UNIFORM), rows_RD)
    stacked = initial_table(STACKED)
    assert torch.equal(stacked[:20], rows_RD[:20])
    InitialRows(30, D, std=0.5, seed=1, name="table.b").fill_(rows_RD[20:])
    assert torch.equal(stacked[20:], rows_RD[20:])
    part = torch.empty(12, D)
    initial_rows(STACKED, (R, D))(part, 15)
    assert torch.equal(part, stacked[15:27])


FORGERIES: list[tuple[str, Callable[[dict[str, Any]], Any], str]] = [
    ("count", lambda about: about["increments"][0].update(count=1 << 40), "not torch.int64 [1099511627776]"),
    ("fewer", lambda about: about["increments"][0].update(count=3), "not torch.int64 [3]"),
    ("empty", lambda about: about["increments"][0].update(count=0), "an increment has no valid number of rows"),
    ("text", lambda about: about["increments"][0].update(count="x"), "an increment has no valid number of rows"),
    ("below", lambda about: about.update(shape=[2, D]), "are not ascending numbers below 2"),
    ("shape", lambda about: about.update(shape=[0, D]), "a table cannot have the shape"),
    ("width", lambda about: about.update(shape=[R, D + 1]), "not torch.float32"),
    ("key", lambda about: about["increments"][0].update(values="dense"), "KeyError"),
    ("file", lambda about: about["increments"][0].update(file="../x"), "'../x' is not a file of this checkpoint"),
    ("twice", lambda about: about["increments"].append(about["increments"][0]), "an increment is listed twice"),
    ("kind", lambda about: about["initial"].update(kind="other"), "KeyError"),
    ("more", lambda about: about["initial"].update(more=1), "TypeError"),
    ("pattern", lambda about: about.update(initial=PATTERN), "are not those of a tensor of shape"),
    ("none", lambda about: about.pop("initial"), "KeyError"),
]


@pytest.mark.parametrize(("forge", "reason"), [each[1:] for each in FORGERIES], ids=[each[0] for each in FORGERIES])
def test_forged_increments_are_refused_in_one_line(
    tmp_path: Path, forge: Callable[[dict[str, Any]], Any], reason: str
) -> None:
    checkpoints, _ = store(tmp_path, keep_last=2)
    table = Table()
    for step in (1, 2):
        table.write(torch.arange(8), torch.randn(8, D + 1))
        checkpoints.save(step, state_of(table, step), best=False)
    rewritten(tmp_path / "step-00000002", lambda body: forge(body["tensors"]["trial/tables.t"]))
    again, notices = store(tmp_path, keep_last=2)
    again._prune = lambda newest: None  # type: ignore[method-assign]
    loaded = again.load()
    assert loaded is not None
    assert loaded["step"] == 1
    assert notices[0].startswith("checkpoint step-00000002 is damaged (")
    assert reason in notices[0]
    assert "\n" not in notices[0]


def test_rows_out_of_order_are_refused(tmp_path: Path) -> None:
    checkpoints, _ = store(tmp_path)
    table = Table()
    table.write(torch.arange(8), torch.randn(8, D + 1))
    checkpoints.save(1, state_of(table, 1), best=False)
    file = tmp_path / "step-00000001" / "rows0-00000.safetensors"
    content = file.read_bytes()
    for change in ({6: 7}, {0: -1}, {7: R}, {3: 4, 4: 3}):
        right, wrong = torch.arange(8), torch.arange(8)
        for place, row in change.items():
            wrong[place] = row
        file.write_bytes(content.replace(right.numpy().tobytes(), wrong.numpy().tobytes()))
        rewritten(file.parent)
        with pytest.raises(Exception, match=rf"rows in {file.name} are not ascending numbers below {R}"):
            store(tmp_path)[0].load(into=state_of(Table()))


def test_damage_of_a_linked_file_is_found_and_repaired(tmp_path: Path) -> None:
    checkpoints, notices = store(tmp_path)
    table = Table()
    for step in (1, 2):
        table.write(torch.arange(20 // step), torch.randn(20 // step, D + 1))
        checkpoints.save(step, state_of(table, step), best=False)
    flip(tmp_path / "step-00000002" / "rows0-00000.safetensors", -2)
    with pytest.raises(Exception, match=r"rows0-00000.safetensors does not match its digest"):
        store(tmp_path)[0].load(into=state_of(Table()))
    # A training that goes on reads it again in turn, and then writes all rows.
    table.write(torch.arange(10), torch.randn(10, D + 1))
    checkpoints.save(3, state_of(table, 3), best=False)
    assert notices == [
        "rows0-00000.safetensors of checkpoint step-00000003 does not match its digest: the next one has all rows again"
    ]
    table.write(torch.tensor([9]), torch.randn(1, D + 1))
    checkpoints.save(4, state_of(table, 4), best=False)
    assert increments(tmp_path / "step-00000004") == [20]
    assert same(resumed(tmp_path)[0].plain(), table.plain())


def test_sizes_count_the_rows_that_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table()
    assert tensor_bytes(table.state()) == 0
    huge = SimpleNamespace(state=lambda: {"table": Leaf(table, slice(0, D), (1 << 40, D), UNIFORM)})
    saving.require_room(tmp_path, huge, TrainConfig(), pytest.fail)  # type: ignore[arg-type]
    table.write(torch.arange(10), torch.randn(10, D + 1))
    assert tensor_bytes(table.state()) == 10 * (4 * D + 8) + 10 * (4 + 8)
    checkpoints, _ = store(tmp_path, background=True)
    # Without room for copies of the rows the save waits, and nothing is copied whole.
    chunks: list[int] = []
    values = Leaf.values

    def counted(leaf: Leaf, rows_N: Tensor) -> Tensor:
        chunks.append(len(rows_N))
        return values(leaf, rows_N)

    with monkeypatch.context() as small:
        small.setattr(checkpoint, "available_bytes", lambda: 0)
        small.setattr(checkpoint_file, "CHUNK", 4 * D * 3)
        small.setattr(checkpoint.Content, "copied", lambda *_: pytest.fail("it is copied"))
        small.setattr(Leaf, "values", counted)
        checkpoints.save(1, state_of(table, 1), best=False)
        assert checkpoints.saved()
    # Nor are rows in files copied unless that is asked for.
    for in_files, asked in ((False, "auto"), (True, "auto"), (True, "on")):
        monkeypatch.setattr(Leaf, "in_files", in_files)
        config = TrainConfig(checkpoint_background=asked)  # type: ignore[arg-type]
        assert saving.in_background(config, table.state()) == (not in_files or asked == "on")
    assert max(chunks) < 10
    assert same(resumed(tmp_path)[0].plain(), table.plain())
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda path: namedtuple("usage", "free")(100))
        table.write(torch.arange(10), torch.randn(10, D + 1))
        with pytest.raises(MachineError, match=r"the checkpoint takes .* of disk; 100 B are free"):
            store(tmp_path)[0].save(3, state_of(table, 3), best=False)
    assert not list(tmp_path.glob(".step-*"))
    with monkeypatch.context() as lacking:
        lacking.setattr("recperf.train.checkpoint_state.available_bytes", lambda: 10)
        with pytest.raises(MemoryError, match=r"trial/tables.t of .* does not fit into memory"):
            store(tmp_path)[0].load()
