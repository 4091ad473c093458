"""A seal shows every change to a run's evidence."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from recperf.errors import DataError
from recperf.runs.evidence import Evidence, differences, seal
from recperf.runs.schemas import Event


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    for name in ("events.jsonl", "config.json", "machine.json", "trial-42.json", "peaks.json"):
        (run / name).write_text(f'{{"file": "{name}"}}\n')
    seal(run)
    return run


def test_a_sealed_run_is_whole_and_lists_its_evidence_only(folder: Path) -> None:
    (folder / "notes.txt").write_text("not evidence")
    seal(folder)
    assert differences(folder) == {}
    sealed = json.loads((folder / "seal.json").read_text())
    assert sealed["schema"] == 1
    assert set(sealed["files"]) == {"events.jsonl", "config.json", "machine.json", "trial-42.json", "peaks.json"}
    assert sealed["files"]["config.json"]["bytes"] == (folder / "config.json").stat().st_size
    (folder / "notes.txt").write_text("changed later")
    (folder / "trial-x.json").write_text("{}")
    assert differences(folder) == {}


def test_every_difference_is_named(folder: Path) -> None:
    (folder / "config.json").write_text('{"file": "config.jsoN"}\n')
    (folder / "machine.json").write_text("{}")
    (folder / "events.jsonl").unlink()
    (folder / "trial-43.json").write_text("{}")
    found = "\n".join(differences(folder).values())
    assert "config.json does not match its digest" in found
    assert "machine.json has 2 bytes instead of 25" in found
    assert "events.jsonl is missing" in found
    assert "trial-43.json is not in seal.json" in found
    assert "peaks.json" not in found
    assert len(differences(folder)) == 4


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "seal.json is missing"),
        (b"", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "it has no schema"),
        (b'{"schema": 2, "files": {}}', "schema 2; this recperf reads 1"),
        (b'{"schema": 1}', "files is missing"),
        (b'{"schema": 1, "files": {}}', "lists no files"),
        (
            b'{"schema": 1, "files": {"config.json": 5}}',
            "seal.json is damaged: files.config.json should be an object, is 5",
        ),
        (
            b'{"schema": 1, "files": {"../config.json": {"bytes": 1, "sha256": ""}}}',
            "'../config.json', which is not an evidence file",
        ),
    ],
)
def test_a_damaged_seal_is_reported(folder: Path, content: bytes | None, message: str) -> None:
    (folder / "seal.json").unlink()
    if content is not None:
        (folder / "seal.json").write_bytes(content)
    assert any(message in text for text in differences(folder).values())


def test_a_folder_in_the_place_of_a_file(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    assert any("config.json" in text for text in differences(folder).values())
    with pytest.raises(DataError, match="cannot seal") as refused:
        seal(folder)
    assert refused.value.where == {"file": str(folder / "config.json")}
    with pytest.raises(DataError, match=r"cannot read config\.json"):
        _ = Evidence(folder).config


@pytest.mark.parametrize("line", ["", '{"kind": 1}', '{"kind": "step", "loss": "x"}', "[" * 100_000])
def test_a_line_that_is_not_an_event_is_named(folder: Path, line: str) -> None:
    (folder / "events.jsonl").write_text(f'{{"kind": "notice"}}\n{line}\n{{"kind": "notice"}}\n')
    with pytest.raises(DataError, match="line 2 is not an event"):
        Evidence(folder).events(Event)


@pytest.mark.parametrize("name", ["events.jsonl", "seal.json"])
def test_fifos_and_links_are_differences(folder: Path, tmp_path: Path, name: str) -> None:
    (folder / name).rename(tmp_path / "moved")
    (folder / name).symlink_to(tmp_path / "moved")
    (text,) = differences(folder).values()
    assert text in (f"{name} is not a file", f"cannot read {name}: it is a link, which is not followed")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    (text,) = differences(folder).values()
    assert text in (f"{name} is not a file", f"cannot read {name}: it is not a regular file")
    if name != "seal.json":
        with pytest.raises(DataError, match="cannot seal the run: it is not a regular file"):
            seal(folder)
