"""A model trained on a GPU: scored there and on a CPU, and exported, in every precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import recperf
from recperf.cli import main

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")

TRAIN = ("--train.max-steps", "30", "--ranking.users", "20", "--no-report", "--no-peaks", "--quiet")
EVENTS = ("dlrm-v4", "--data.events", "8000", "--data.windows.min-history", "8", "--train.batch-size", "64")
RUNS = {
    "micro-dlrm": ("micro-dlrm", "--data.source", "embedded"),
    "dlrm-v4": (*EVENTS, "--model.rates-hidden", "4"),
    "dlrm-v4 bfloat16": (*EVENTS, "--model.precision", "bfloat16"),
}


@pytest.mark.parametrize("name", list(RUNS))
def test_a_model_of_a_gpu_serves_on_both_devices(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RECPERF_HOME", str(tmp_path / "home"))
    run = tmp_path / "run"
    assert main(["run", *RUNS[name], "--run-dir", str(run), "--train.device", "cuda", *TRAIN]) in (0, 5)
    logits: dict[str, Any] = {}
    for device in ("cuda", "cpu"):
        output = tmp_path / f"{device}.parquet"
        assert main(["score", str(run), "--held-out", "--output", str(output), "--device", device, "--quiet"]) == 0
        logits[device] = pq.read_table(output)["logit"].to_numpy()
    close = 3e-2 if "bfloat16" in name else 1e-4
    np.testing.assert_allclose(logits["cuda"], logits["cpu"], atol=close, rtol=close)
    program = recperf.open(run, device="cuda").export(tmp_path / "export")["program"]
    assert program["largest_difference"] < program["expected_difference"]
    opened = recperf.open(run, device="cuda")
    user = opened.model.served.users.values[3].as_py()
    rows, elsewhere = opened.recommend([user], k=5), recperf.open(run, device="cpu").recommend([user], k=5)
    np.testing.assert_allclose(rows["logit"], elsewhere["logit"], atol=close, rtol=close)
