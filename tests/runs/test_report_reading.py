"""Reading the files of a run for its page; damaged and foreign files are refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import example_runs as examples
import pytest

from recperf.errors import DataError
from recperf.runs.evidence import Evidence
from recperf.runs.report import run_report


def read(folder: Path) -> Evidence:
    """Reads every file that a page needs."""
    run = Evidence(folder)
    run_report.report(run, "r1")
    return run


@pytest.mark.parametrize(
    ("file", "field", "value", "message"),
    [
        ("result.json", "schema", 1, "result.json has schema 1; this recperf reads 4"),
        ("result.json", "quality", [], "result.json does not fit its description"),
        ("result.json", "workload", "other", "result.json is of workload 'other', config.json of 'micro-dlrm'"),
        ("profile.json", "schema", 9, "profile.json has schema 9"),
        ("profile.json", "workload.components.0.share", 0.9, "the shares of workload.components do not sum to 1"),
        ("profile.json", "workload.components.0.ms", {}, "profile.json does not fit its description"),
        ("profile.json", "verdict.because", None, "profile.json does not fit its description"),
        ("pair.json", "cold.components.0.share", -1, "the shares of cold.components do not sum to 1"),
        ("pair.json", "verdict", 3, "pair.json does not fit its description"),
        ("peaks.json", "copy", None, "peaks.json is damaged: copy should be an object, is null"),
        ("peaks.json", "schema", 3, "peaks.json has schema 3"),
        ("peaks.json", "machine.fingerprint", "another", "belong to another machine"),
        ("machine.json", "fingerprint", 1, "fingerprint should be a string, is 1"),
        ("machine.json", "caches", {"L1": "big"}, "caches.L1 should be an integer, is 'big'"),
    ],
)
def test_broken_and_foreign_files_are_refused(
    tmp_path: Path, file: str, field: str, value: object, message: str
) -> None:
    run = examples.make_run(tmp_path / "run")
    examples.change(run, file, field, value)
    with pytest.raises(DataError) as refused:
        read(run)
    assert message in refused.value.what
    assert refused.value.exit_code == 3
    assert Path(refused.value.where["file"]).name == file


FILES = ("result.json", "profile.json", "peaks.json", "pair.json", "machine.json", "config.json")


@pytest.mark.parametrize("file", ["result.json", "events.jsonl"])
def test_fifos_and_links_are_not_read(tmp_path: Path, file: str) -> None:
    run = examples.make_run(tmp_path / "run")
    (run / file).rename(tmp_path / "moved")
    (run / file).symlink_to(tmp_path / "moved")
    with pytest.raises(DataError, match=f"cannot read {file}: it is a link"):
        read(run)
    (run / file).unlink()
    os.mkfifo(run / file)
    with pytest.raises(DataError, match=f"cannot read {file}: it is not a regular file"):
        read(run)
    (run / file).unlink()


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("content", [b"[]", b"\xff\xfe"])
def test_damaged_files_are_reported(tmp_path: Path, file: str, content: bytes) -> None:
    run = examples.make_run(tmp_path / "run")
    (run / file).write_bytes(content)
    with pytest.raises(DataError) as refused:
        read(run)
    assert file in str(refused.value.where["file"])


def test_events_torn_at_the_end_are_read_and_broken_ones_refused(tmp_path: Path) -> None:
    run = examples.make_run(tmp_path / "run")
    whole = read(run).log
    with (run / "events.jsonl").open("a") as log:
        log.write('{"kind": "step", "se')
    assert read(run).log == whole
    with (run / "events.jsonl").open("a") as log:
        log.write("\n")
    with pytest.raises(DataError, match="not an event") as refused:
        read(run)
    assert refused.value.where["line"] == str(len(examples.events(1, examples.STEPS).splitlines()) + 1)


def test_reading_and_refusing_need_no_template_engine(tmp_path: Path) -> None:
    run = examples.make_run(tmp_path / "run")
    code = (
        "import sys; sys.modules['jinja2'] = None\n"
        "from pathlib import Path; from recperf.cli.report import report_of; from recperf.runs.report import page\n"
        "from recperf.errors import MachineError\n"
        f"run = Path({str(run)!r})\n"
        "try: page.save(report_of(run, 'run', None), run / 'page.html')\n"
        "except MachineError as error: print(error.exit_code, error.fix)\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "4 pip install jinja2\n"
    assert not (run / "page.html").exists()
