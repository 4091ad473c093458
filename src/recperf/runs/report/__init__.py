"""The page of one run or several: one HTML file that needs nothing else.

    write([Path("runs/a")], Path("runs/a/report.html"))

Importing this needs neither matplotlib nor jinja2; writing a page does (`pip install 'recperf[report]'`).
"""

from __future__ import annotations

from pathlib import Path

from ...errors import MachineError
from ...files import write_atomic, writing


def write(folders: list[Path], out: Path) -> Path:
    """Read the runs, draw their page and put it in place whole."""
    from .builder import page
    from .reading import read

    text = page([read(folder) for folder in folders])
    try:
        with writing(out):
            out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(out, text.encode())
    except MachineError as error:
        # The page is no run: its place is chosen by another option than a run's.
        fix = error.fix.replace("--run-dir", "--out") if error.fix else None
        raise MachineError(error.what, where={"file": out}, fix=fix) from error
    return out
