"""Signals in the first seconds of a process: each ends it with its documented code and one line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from recperf.cli import main
from recperf.execution import measuring
from recperf.stop import StopFlag


def test_the_flag_is_set_and_nothing_is_raised() -> None:
    flag = StopFlag()
    with flag.listening(), flag.deferred():
        for number in (signal.SIGHUP, signal.SIGTERM):
            signal.raise_signal(number)
            flag.poll()
        assert flag.received == signal.SIGHUP, "the first one counts"
        assert flag.error("; saved").exit_code == 75
    assert flag.received is None


def test_a_second_interrupt_ends_at_once_and_ignored_signals_stay_ignored(tmp_path: Path) -> None:
    code = (
        "import signal, time; from recperf.stop import FLAG; FLAG.listen(); print(1, flush=True)\n"
        "while FLAG.received is None: time.sleep(0.01)\n"
        "print(FLAG.received, flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "1\n"
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "2\n", "SIGHUP is ignored, as nohup asked"
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == "error: interrupted\n"
        assert process.wait(300) == 130


CHILDREN = {
    "a compiler": "from recperf.ops.compile import _call_compiler\n"
    "_call_compiler(['sh', '-c', 'echo $$ >$0; exec sleep 600', sys.argv[1] + '/child'])",
    "the tracer of an export": "from torch import nn; from recperf.execution import exporting\n"
    "exporting.TRACE = 'import os, sys, time; open(sys.argv[2], \"w\").write(str(os.getpid())); time.sleep(600)'\n"
    "exporting._trace(nn.Linear(1, 1), {}, {}, pathlib.Path(sys.argv[1], 'child'), None)",
}


@pytest.mark.parametrize(
    ("work", "number"), [("a compiler", signal.SIGTERM), ("the tracer of an export", signal.SIGKILL)]
)
def test_a_signal_that_ends_at_once_leaves_no_child_and_where_it_can_be_caught_no_draft(
    tmp_path: Path, work: str, number: int
) -> None:
    code = (
        "import pathlib, sys; from recperf.stop import FLAG\n"
        "from recperf.files import atomic_file; from recperf.folders import new_folder\n"
        "FLAG.listen(); FLAG.ends_at_once = True; place = pathlib.Path(sys.argv[1])\n"
        "with atomic_file(place / 'report.html'), new_folder(place / 'new') as folder:\n"
        f"    (folder / 'half').write_text('x'); exec({CHILDREN[work]!r})"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stderr=subprocess.PIPE, text=True) as process:
        child = tmp_path / "child"
        until = time.monotonic() + 300
        while not (child.exists() and child.read_text()) and time.monotonic() < until:
            time.sleep(0.02)
        assert len(list(tmp_path.iterdir())) == 3
        process.send_signal(number)
        assert process.wait(300) == (75 if number == signal.SIGTERM else -number)
    assert number == signal.SIGKILL or list(tmp_path.iterdir()) == [child]
    with pytest.raises(ProcessLookupError):
        while time.monotonic() < until:
            os.kill(int(child.read_text()), 0)
            time.sleep(0.02)


def test_a_signal_after_the_training_stops_cleanly_and_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, real = tmp_path / "run", measuring.measure_run
    command = ["run", "micro-dlrm", "--data.source", "embedded", "--train.epochs", "1", "--target.beat", "none"]

    def measure(*arguments: Any) -> None:
        signal.raise_signal(signal.SIGHUP)
        real(*arguments)

    def page(*_: object) -> Path:
        signal.raise_signal(signal.SIGUSR1)
        return run / "report.html"

    monkeypatch.setattr(measuring, "measure_run", measure)
    assert main([*command, "--run-dir", str(run), "--no-peaks"]) == 75
    assert (run / "trial-42.json").exists()
    assert not (run / "result.json").exists()
    monkeypatch.setattr(measuring, "measure_run", real)
    monkeypatch.setattr("recperf.runs.report.page.save", page)
    assert main(["run", "--resume", str(run), "--no-peaks"]) == 0, "only the last line was left to print"
    assert (run / "seal.json").exists()
