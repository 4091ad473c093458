"""The command line as a user types it, in this process and in an empty folder."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recperf.cli import main

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    """Run `recperf ARGUMENTS`; returns the exit code, stdout and stderr. Only an internal error shows a traceback."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object) -> tuple[int, str, str]:
        code = main([str(argument) for argument in arguments])
        printed = capfd.readouterr()
        assert code == 1 or "Traceback" not in printed.err, printed.err
        return code, printed.out, printed.err

    return call


@pytest.fixture(scope="session")
def ceilings() -> Any:
    """Ceilings of this machine, measured for a moment."""
    from recperf.measure.peaks import measure_with
    from recperf.measure.peaks.sampling import TINY

    return measure_with(TINY, quick=True, say=lambda text: None)


@pytest.fixture
def stored_ceilings(ceilings: Any) -> None:
    from recperf.measure import peaks

    peaks.save(ceilings)


@pytest.fixture(scope="session")
def runs_without_torch() -> Callable[..., None]:
    """Run a command in a new process, which fails if torch was imported."""
    program = (
        "import sys; from recperf.cli import main\n"
        "try: code = main(sys.argv[1:])\nexcept SystemExit as left: code = left.code\n"
        "sys.exit(code or ('torch' in sys.modules) * 99)"
    )

    def check(*arguments: object) -> None:
        subprocess.run([sys.executable, "-c", program, *map(str, arguments)], check=True, stdout=subprocess.DEVNULL)

    return check
