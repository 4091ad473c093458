"""The recorder of evidence on a GPU, as its user starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from evidence_files import HERE, read_cases

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_a_planted_case_is_recorded(tmp_path: Path) -> None:
    paths = [str(HERE.parents[1] / "src"), os.environ.get("PYTHONPATH", "")]
    arguments = ["--device", "cuda", "--out", str(tmp_path / "gpu"), "--only", ".item() after", "--tries", "1"]
    ended = subprocess.run(
        [sys.executable, str(HERE / "record.py"), *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (case,) = read_cases(tmp_path)
    assert case.recorded.observed.device == torch.cuda.get_device_name()
    assert case.answered.answer.limit == "sync"
    assert case.answered.answer.advice[0][0] == "item"
