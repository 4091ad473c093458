"""A run whose GPU has too little memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from recperf.cli import main

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")


def test_memory_of_the_gpu_that_runs_out_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def allocate(*_: object) -> None:
        torch.empty(1 << 50, device="cuda")

    monkeypatch.setattr("recperf.execution.training.train", allocate)
    arguments = [
        "run",
        "micro-dlrm",
        "--data.source",
        "embedded",
        "--train.device",
        "cuda",
        "--no-peaks",
        "--no-report",
    ]
    assert main([*arguments, "--run-dir", str(tmp_path / "run"), "--quiet", "--json"]) == 4
    out, err = capfd.readouterr()
    error = json.loads(out)["error"]
    assert (error["what"], error["exit_code"]) == ("out of memory", 4)
    assert "CUDA out of memory" in error["where"]["cause"]
    assert "Traceback" not in err
