"""Checkpoints of ranks: any number of ranks and any sharding, complete or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pool import needs_torchrec, run_ranks

from recperf.train.checkpoint import CheckpointStore

pytestmark = needs_torchrec
MIXED = "item_id=row,uid=table,album_id=data-parallel,artist_id=column"


def same(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def nearly_same(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Tables are equal to the bit; a state that was averaged over columns is rounded once more."""
    tables, rows = ({name: state[name] for name in state if not name.endswith("_state")} for state in (ours, theirs))
    states = [name for name in theirs if name.endswith("_state")]
    return same(tables, rows) and all(torch.allclose(ours[name], theirs[name], rtol=1e-6, atol=0) for name in states)


def alone(folder: Path) -> CheckpointStore:
    """The checkpoints as a single process sees them."""
    return CheckpointStore(folder=folder, notice=pytest.fail)


def test_what_two_ranks_save_other_ranks_and_a_single_process_load(tmp_path: Path) -> None:
    wholes = run_ranks(2, "store_jobs.save", root=tmp_path, shardings=["row", MIXED])[0]
    # Saved by a single process.
    alone(tmp_path / "2").save(1, {"trial": {"model": wholes[0]}}, best=False)
    wholes.append(wholes[0])
    roots = [tmp_path / str(number) for number in range(len(wholes))]
    for root, whole in zip(roots, wholes):
        state = alone(root).load()
        assert state is not None
        assert same(state["trial"]["model"], whole), root
    loaded = run_ranks(3, "store_jobs.load", roots=roots, sharding=MIXED)
    for index, whole in enumerate(wholes):
        assert nearly_same(loaded[0][index], whole), index


def test_a_damaged_checkpoint_is_skipped_for_the_newest_intact_one(tmp_path: Path) -> None:
    run_ranks(2, "store_jobs.save_two", root=tmp_path)
    first, second = "step-00000001", "step-00000002"
    of_0, of_1 = f"{second}/rank0-00000.safetensors", f"{second}/rank1-00000.safetensors"
    ways = [
        [["flip", of_0, ""]],
        [["flip", of_1, ""]],
        [["cut", of_1, ""]],
        [["delete", of_1, ""]],
        [["swap", of_0, of_1]],
        [["flip", f"{second}/manifest.json", ""]],
        [["delete", of_0, ""], ["flip", f"{first}/rank1-00000.safetensors", ""]],
    ]
    led, followed = run_ranks(2, "store_jobs.damaged", root=tmp_path, damages=[[], *ways])
    assert led[0] == (2, [])
    for (step, message), (theirs, follower_notices) in zip(led[1:-1], followed[1:-1]):
        assert step == theirs == 1
        assert f"checkpoint {second} is damaged" in message[0]
        assert message[1] == f"continuing from checkpoint {first}, the newest intact one"
        assert follower_notices == []
    # Every rank raises the same error, and one prints it.
    assert led[-1] == followed[-1]
    assert led[-1][0] == "DataError"
    assert "none of the 2 checkpoints is intact" in led[-1][1]
    assert led[-1][2]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("full", "the disk is full"),
        ("elsewhere", "rank 1 does not see the files that rank 0 writes"),
    ],
)
def test_one_rank_that_cannot_write_is_an_error_on_all_ranks(tmp_path: Path, how: str, message: str) -> None:
    root = tmp_path / "run"
    root.mkdir()
    run_ranks(2, "store_jobs.save_two", root=root)
    for kind, what, rank, agreed in run_ranks(2, "store_jobs.save_fails", root=root, how=how):
        assert (kind, rank, agreed) == ("MachineError", "1", True)
        assert message in what
    assert [path.name for path in root.iterdir() if path.name.startswith(".")] == []
    state = alone(root).load()
    assert state is not None
    assert state["position"] == 2
