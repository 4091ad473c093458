"""A save and an import survive a power cut at every moment, whatever the disk kept of what was not synced."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from power_cut import Recorder, Tree

from recperf.data.events.imports import import_events
from recperf.data.events.options import ImportOptions
from recperf.data.events.store import MANIFEST, open_store, originals, verify
from recperf.errors import DataError
from recperf.runs.evidence import differences, seal
from recperf.runs.record import Run
from recperf.train.checkpoint import CheckpointStore

SEED = 42


@pytest.fixture
def disk() -> Iterator[Path]:
    """In memory where there is such a place: removing thousands of files takes seconds on some disks."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield Path(folder)


def cuts(recorder: Recorder, disk: Path, holds: Callable[[Path, tuple[str, ...]], None]) -> int:
    """Replays every state, and requires that `holds` of it does; the number of states."""
    assert recorder.live.content() == Tree.read(recorder.root).content(), "the recorder missed an operation"
    count = 0
    for done, name, tree in recorder.states():
        place = disk / str(count)
        place.mkdir()
        tree.write(place)
        try:
            with mock.patch.object(os, "fsync"):
                holds(place, recorder.passed(done))
        except BaseException as error:
            last = recorder.ops[done - 1] if done else None
            error.add_note(f"after {done} of {len(recorder.ops)} operations ({last}), kept: {name}")
            raise
        count += 1
    return count


def saving(run: Run) -> CheckpointStore:
    store = CheckpointStore(folder=run.folder / "checkpoints" / f"seed-{SEED}", notice=pytest.fail, keep_last=1)
    store.on_disk = lambda: run.note_saved(SEED)
    return store


def save(run: Run, store: CheckpointStore, step: int, *, best: bool) -> None:
    run.event("step", seed=SEED, step=step, loss=0.5)
    run.sync_events()
    state = {"weights": torch.full((4,), float(step)), "bytes": run.event_bytes, "digest": run.event_digest()}
    store.save(step, state, best=best)
    run.event("timing", seed=SEED, step=step, part="save", seconds=0.1)


def resumes(folder: Path, passed: tuple[str, ...]) -> None:
    """What was saved is there, the log fits it, a finished run is intact, and training can go on."""
    if not (folder / "run" / "config.json").exists():
        assert not passed
        return
    run = Run.open(folder / "run")
    store = saving(run)
    state = store.load()
    least = max((int(moment.split()[1]) for moment in passed if moment.startswith("saved")), default=0)
    step = int(state["weights"][0]) if state else 0
    assert step >= least, f"step {least} was saved, but {step} is what is left"
    assert "sealed" not in passed or run.finished
    if run.finished:
        assert not differences(run.folder)
        assert json.loads((run.folder / "result.json").read_text()) == {"auc": 0.75}
    elif state:
        assert run.log_fault(state["bytes"], state["digest"]) is None
        run.rewind_events(state["bytes"], step=step)
        assert [event.step for event in run.events() if event.kind == "step"] == list(range(1, step + 1))
        save(run, store, step + 1, best=True)
    run.close()


def recorded_saves(root: Path) -> Recorder:
    """Three saves, the end of the run, and the moments after which each must be there."""
    root.mkdir()
    recorder = Recorder(root)
    with recorder.recording():
        run = Run.create("micro-dlrm", {}, folder=root / "run")
        store = saving(run)
        for step, best in ((1, True), (2, False), (3, False)):
            save(run, store, step, best=best)
            recorder.mark(f"saved {step}")
        run.write("result.json", {"auc": 0.75})
        seal(run.folder)
        recorder.mark("sealed")
        run.close()
    return recorder


def test_a_save_survives_a_power_cut_at_every_moment(tmp_path: Path, disk: Path) -> None:
    assert cuts(recorded_saves(tmp_path / "disk"), disk, resumes) > 100


UNSYNCED = {
    "checkpoint.sync_folder": lambda folder: None,
    "checkpoint_folder.SyncedFile.__exit__": lambda file, *_: os.close(file.handle),
}


@pytest.mark.parametrize("forgotten", UNSYNCED)
def test_a_forgotten_sync_is_found(forgotten: str, tmp_path: Path, disk: Path) -> None:
    with mock.patch(f"recperf.train.{forgotten}", UNSYNCED[forgotten]):
        recorder = recorded_saves(tmp_path / "disk")
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        cuts(recorder, disk, resumes)


def test_an_import_survives_a_power_cut_at_every_moment(tmp_path: Path, disk: Path) -> None:
    """There is a whole store or none; where there is none, the same command writes it."""
    log, root = tmp_path / "log.csv", tmp_path / "disk"
    log.write_text("u,i,t,r\n" + "".join(f"u{n % 7},i{n % 5},{n},{n % 5}\n" for n in range(60)))
    root.mkdir()
    options = ImportOptions(events=log, user="u", item="i", time="t", rating="r", memory_mib=64)
    recorder = Recorder(root)
    with recorder.recording():
        import_events(options, root / "store")
        recorder.mark("imported")
    expected = open_store(root / "store").digest
    again = iter(range(1_000_000))

    def whole(folder: Path, passed: tuple[str, ...]) -> None:
        if not (folder / "store" / MANIFEST).exists():
            assert "imported" not in passed
            with pytest.raises(DataError):
                open_store(folder / "store")
            if next(again) % 25:
                return
            import_events(options, folder / "store")
        store = open_store(folder / "store")
        verify(store)
        assert store.digest == expected
        assert [len(originals(store.folder, role)) for role in ("users", "items")] == [7, 5]

    assert cuts(recorder, disk, whole) > 50
