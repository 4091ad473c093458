"""The DLRM family on a GPU: the same numbers as on the CPU, and a run through the same loop."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import pytest
import torch

from recperf.cli import main
from recperf.data.batch import ClickBatch, JaggedFeatures
from recperf.execution.execute import execute
from recperf.jsonfile import as_json
from recperf.models.config import DLRMConfig
from recperf.models.dlrm import DLRM
from recperf.stop import StopFlag
from recperf.workloads import find
from recperf.workloads.micro_dlrm.config import default

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")

CONFIG = DLRMConfig(features=("a", "b"), rows=(50, 70), dim=8, bottom=(5, 16, 8), top=(24, 1), table_init_std=0.5)


class Watch:
    """Reads the clock when training begins and after each evaluation, which waits for the device."""

    def __init__(self) -> None:
        self.began = self.scored = 0.0

    live = False

    def notice(self, text: str) -> None: ...

    def trial(self, seed: int, total_steps: int, done: int) -> None:
        self.began = perf_counter()

    def step(self, step: int, loss: float, samples: int) -> None: ...

    def metric(self, step: int, epoch: int, metrics: dict[str, float]) -> None:
        self.scored = perf_counter()


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


def test_micro_dlrm_trains_on_a_gpu(tmp_path: Path) -> None:
    from recperf.config import to_json
    from recperf.runs.record import Run

    config = default()
    config = replace(
        config, data=replace(config.data, source="embedded"), train=replace(config.train, epochs=3, device="cuda")
    )
    run, watch = Run.create("micro-dlrm", to_json(config), folder=tmp_path / "run"), Watch()
    result = execute(find("micro-dlrm"), config, run, StopFlag(), watch)
    timings = [event for event in run.events() if event["kind"] == "timing"]
    run.close()
    performance = as_json(result)["performance"]
    assert result.quality.met
    assert performance["device"] != "cpu"
    assert sum(performance["budget"].values()) == pytest.approx(1)
    last_save = [event["seconds"] for event in timings if event["part"] == "save"][-1]
    assert performance["overall"]["seconds"] - last_save == pytest.approx(watch.scored - watch.began, rel=0.1)
    assert performance["overall"]["steps"] == 3 * 313
    for event in timings:
        if event["part"] == "steady":
            # Every step has its own time on the device; together they are no more than the stretch.
            assert len(event["step_ms"]) == event["steps"]
            assert 0.5 * event["seconds"] < sum(event["step_ms"]) / 1e3 <= 1.02 * event["seconds"]


def test_micro_dlrm_dram_learns_the_same_on_a_gpu() -> None:
    """Uniform ids and dense features are the same bits on every device, so the losses follow each other."""
    from recperf.execution.measuring import measure_pair
    from recperf.train.device import applied
    from recperf.train.loop import take_step
    from recperf.workloads.micro_dlrm_dram.build import PreparedDram
    from recperf.workloads.micro_dlrm_dram.config import default as dram

    losses = {}
    for device in ("cpu", "cuda"):
        config = dram()
        config = replace(
            config,
            data=replace(config.data, ids_per_bag=4, batches=20),
            model=replace(config.model, rows=50_000, dim=32, bag="auto" if device == "cuda" else "reference"),
            train=replace(config.train, batch_size=256, device=device),
        )
        prepared = PreparedDram(config)
        with applied(prepared.settings):
            trial = prepared.trial(1)
            batches = trial.recipe.order.batches(0)
            losses[device] = [float(take_step(trial.recipe, batches, step)[0]) for step in range(15)]
            pair = measure_pair(prepared, trial, None)
        assert pair is not None
        assert pair["cold"]["step_ms"]["p50"] > 0
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=2e-2)


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
