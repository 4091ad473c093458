"""Signals in the first seconds of a process: each ends it with its documented code and one line."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from early_signals import series, table

from recperf.stop import StopFlag


def test_a_signal_in_the_first_seconds_ends_with_its_code(tmp_path: Path) -> None:
    """A sample; the chaos suite sends hundreds."""
    ends = series(17, 5, tmp_path)
    faults = [f"{end.number} after {end.after_s:.2f} s: {end.fault}\n{end.output}" for end in ends if end.fault]
    assert not faults, table(ends) + "\n" + "\n".join(faults)


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
        assert process.wait(10) == 130
