from __future__ import annotations

from pathlib import Path

import pytest
import torch
from example_traces import record

from recperf.data.batch import ClickBatch, JaggedFeatures
from recperf.measure import spans
from recperf.measure.spans import span
from recperf.measure.trace.analyse import analyse, steps_of
from recperf.measure.trace.read import read
from recperf.measure.trace_evidence import observed
from recperf.models.config import DLRMConfig
from recperf.models.dlrm import DLRM

CONFIG = DLRMConfig(features=("a", "b"), rows=(50, 70), dim=16, bottom=(8, 64, 16), top=(64, 1))
BATCH = 512


def batch(seed: int) -> ClickBatch:
    random = torch.Generator().manual_seed(seed)
    offsets = torch.arange(2 * BATCH + 1)
    values = torch.cat([torch.randint(0, rows, (BATCH,), generator=random) for rows in CONFIG.rows])
    features = JaggedFeatures(keys=CONFIG.features, values_V=values, offsets_FB1=offsets)
    dense_BD = torch.randn(BATCH, CONFIG.dense, generator=random)
    return ClickBatch(dense_BD, features, (torch.rand(BATCH, generator=random) > 0.5).float())


def test_a_recorded_step_of_a_model_is_explained_part_by_part(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = DLRM(CONFIG)

    def step() -> None:
        with span("data"):
            given = batch(0)
        model.loss(given).backward()

    record(step, 4, tmp_path / "trace.json.gz")
    assert spans._listener is None
    assert capfd.readouterr().err == ""

    trace = read(tmp_path / "trace.json.gz")
    assert trace.header["torch_version"] == torch.__version__
    analysis = analyse(trace)
    assert analysis.window.steps == 4
    parts = {part.name: part.host_ms for part in analysis.parts}
    assert {"data", "bottom", "embedding", "interaction", "top", "loss", "top_backward"} < set(parts)
    assert sum(parts.values()) == pytest.approx(analysis.window.host_ms)
    assert parts["other"] < 0.5 * analysis.window.host_ms
    assert min(parts.values()) >= 0
    rows = observed(trace, *steps_of(trace), None).operators
    products = [row for row in rows if row.part == "bottom" and row.flops]
    assert sum(row.flops for row in products) == 2 * BATCH * (8 * 64 + 64 * 16)
    assert analysis.idle.missing == "no device in this trace"
