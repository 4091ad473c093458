from __future__ import annotations

import json
from pathlib import Path

import pytest

from recperf.errors import DataError, MachineError, UsageError
from recperf.files import write_atomic, write_json
from recperf.runs.record import Run, read_config


def events(run: Run) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run.folder / "events.jsonl").read_text().splitlines()]


def test_events_are_whole_lines_also_after_a_torn_one(tmp_path: Path) -> None:
    run = Run.create("w", {}, folder=tmp_path / "r")
    run.event("step", step=1, loss=0.5)
    run.close()
    with (tmp_path / "r" / "events.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')
    again = Run.open(tmp_path / "r")
    again.event("step", step=2, loss=0.4)
    assert [event["step"] for event in events(again)] == [1, 2]
    again.close()


def test_rewinding_drops_what_a_checkpoint_has_not_seen(tmp_path: Path) -> None:
    run = Run.create("w", {}, folder=tmp_path / "r")
    run.event("step", step=1)
    size = run.event_bytes
    run.event("step", step=2)
    run.rewind_events(size)
    assert [event["step"] for event in events(run)] == [1]
    with pytest.raises(DataError, match="shorter"):
        run.rewind_events(size + 1000)
    run.close()


def test_an_existing_run_is_never_overwritten(tmp_path: Path) -> None:
    Run.create("w", {}, folder=tmp_path / "r").close()
    with pytest.raises(UsageError, match="already holds a run"):
        Run.create("w", {}, folder=tmp_path / "r")


def test_one_process_at_a_time(tmp_path: Path) -> None:
    run = Run.create("w", {}, folder=tmp_path / "r")
    with pytest.raises(MachineError, match="another process"):
        Run.open(tmp_path / "r")
    run.close()
    Run.open(tmp_path / "r").close()


def test_default_names_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    one, two = Run.create("w", {}, folder=None), Run.create("w", {}, folder=None)
    assert one.folder != two.folder
    assert one.folder.name.startswith("w-")
    one.close()
    two.close()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "not a file that recperf wrote"),
        ('{"schema": 1}', "not a config"),
        ('{"schema": 99, "workload": "w", "config": {}}', "schema 99"),
        ('{"schema": 1, "workload": 3, "config": {}}', "workload should be a string, is 3"),
    ],
)
def test_a_config_that_is_none_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        read_config(path)


def test_an_atomic_write_leaves_the_old_file_when_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "result.json"
    (tmp_path / "not-a-result").touch()
    write_json(path, {"old": True})

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(MachineError, match=r"cannot write result\.json: the disk is full"):
        write_atomic(path, b"new")
    monkeypatch.undo()
    assert json.loads(path.read_text()) == {"old": True}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["not-a-result", "result.json"]


def test_nan_is_not_json(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "x.json", {"value": float("nan")})


def test_a_read_only_place_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MachineError, match="not a folder"):
        Run.create("w", {}, folder=tmp_path / "file" / "r")


def test_a_log_that_cannot_be_read_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run.create("micro-dlrm", {}, folder=tmp_path / "run")
    run.event("step", seed=1)
    size, digest = run.event_bytes, run.event_digest()

    def broken(*_: object) -> bytes:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", broken)
        with pytest.raises(DataError, match=r"cannot read events\.jsonl: Input/output error"):
            run.rewind_events(size, digest)
        with pytest.raises(DataError, match=r"cannot read events\.jsonl"):
            run.forget_events(1)
    run.close()
