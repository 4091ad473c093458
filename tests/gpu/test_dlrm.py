"""The DLRM family on a GPU: the same numbers as on the CPU, and a run through the same loop."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from recperf.cli import main
from recperf.data.batch import ClickBatch, JaggedFeatures
from recperf.models.config import DLRMConfig
from recperf.models.dlrm import DLRM

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")

CONFIG = DLRMConfig(features=("a", "b"), rows=(50, 70), dim=8, bottom=(5, 16, 8), top=(24, 1), table_init_std=0.5)


@pytest.mark.parametrize("interaction", ["concat", "dot"])
def test_values_and_gradients_are_the_cpus(interaction: str) -> None:
    draw = torch.Generator().manual_seed(0)
    bags = [[[1, 2], [], [49], [3, 3, 3]], [[69], [5], [], [0]]]
    batch = ClickBatch(
        torch.randn(4, 5, generator=draw),
        JaggedFeatures.from_bags(("a", "b"), bags),
        torch.tensor([1.0, 0.0, 1.0, 0.0]),
    )
    actual = []
    for device in ("cpu", "cuda"):
        model = DLRM(replace(CONFIG, interaction=interaction), seed=1).to(device)
        loss = model.loss(batch.pin_memory().to(device, non_blocking=True))
        loss.backward()
        actual.append([loss.detach().cpu(), *(p.grad.cpu() for p in model.parameters())])
    for cpu, gpu in zip(*actual):
        torch.testing.assert_close(gpu, cpu, rtol=2e-4, atol=1e-6)


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
