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


def require_claims(notebook: str, printed: str) -> None:
    """What the text of a notebook says of its figures, whatever the machine."""
    if notebook == "bottleneck-that-moves":
        # "All rungs", each beside the plain one; "the shares sum to 1", so that two of them are at most 100 %.
        assert len(re.findall(r"suggested [\d.]+ x, measured [\d.]+ x", printed)) == 4
        assert 0 < int(re.findall(r"together: (\d+)% of the step", printed)[0]) <= 100
    elif notebook == "your-own-model":
        calls, after = map(int, re.findall(r"operator calls: (\d+) -> (\d+)", printed)[0])
        slow, fast = map(float, re.findall(r"step: ([\d.]+) ms -> ([\d.]+) ms", printed)[0])
        assert after < calls / 10, "the number of calls falls by the number of samples"
        assert fast < slow, "the step is faster"
    else:
        own, *baselines = map(float, re.findall(r"^\w[\w-]* +(0\.\d+)$", printed, re.M))
        assert own > baselines[0] == 0.5, "beside the majority class"
        assert int(re.findall(r"(\d+)% of the recommended films", printed)[0]) > 50, "by chance 25 %"


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
    require_claims(path.stem, printed)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_with_what_it_printed(path: Path) -> None:
    """By `make notebooks`: every cell ran, in order, without an error, and names no folder of a machine."""
    cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert outputs
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert not re.search(r"/(home|root|tmp|work|Users)/", json.dumps(outputs))
    require_claims(path.stem, "\n".join("".join(output.get("text", ())) for output in outputs))
