"""The notebooks run from top to bottom, each in an empty folder, with the ceilings of a moment."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from recperf.measure import peaks
from recperf.measure.peaks import sampling

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted(ROOT.glob("examples/*.ipynb"))
RUN = """
import sys
import nbformat
from nbclient import NotebookClient

notebook = nbformat.read(sys.argv[1], 4)
NotebookClient(notebook, timeout=600).execute()
for cell in notebook.cells:
    for output in cell.get("outputs", ()):
        print(output.get("text", ""), end="")
"""


@pytest.mark.long
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("nbclient", reason="needs recperf[dev]")
    peaks.save(peaks.measure_with(sampling.TINY, quick=True, say=lambda text: None))
    command = tmp_path / "bin" / "recperf"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m recperf "$@"\n')
    command.chmod(0o755)
    paths = {"PATH": f"{command.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src"), "MPLBACKEND": "agg"}
    run = subprocess.run(
        [sys.executable, "-c", RUN, path], cwd=tmp_path, env={**os.environ, **paths}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    printed = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", run.stdout)
    assert "error:" not in printed.replace("error: the target was missed", ""), printed[-3000:]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_with_what_it_printed(path: Path) -> None:
    """By `make notebooks`: every cell ran, in order, without an error, and names no folder of a machine."""
    cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert outputs
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert not re.search(r"/(home|root|tmp|work|Users)/", json.dumps(outputs))
