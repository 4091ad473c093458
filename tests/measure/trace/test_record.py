from __future__ import annotations

from pathlib import Path

import pytest
import torch
from example_traces import record

from recperf.measure import spans
from recperf.measure.spans import span
from recperf.measure.trace.analyse import analyse, steps_of
from recperf.measure.trace.read import read
from recperf.measure.trace_evidence import observed


def test_a_recorded_step_is_explained_part_by_part(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    weight = torch.rand(64, 16, requires_grad=True)

    def step() -> None:
        with span("data"):
            x = torch.rand(512, 64)
        with span("forward"):
            loss = (x @ weight).square().sum()
        with span("backward"):
            loss.backward()

    record(step, 4, tmp_path / "trace.json.gz")
    assert spans._listener is None
    assert capfd.readouterr().err == ""

    trace = read(tmp_path / "trace.json.gz")
    assert trace.header["torch_version"] == torch.__version__
    analysis = analyse(trace)
    assert analysis.window.steps == 4
    parts = {part.name: part.host_ms for part in analysis.parts}
    assert list(parts) == ["data", "forward", "backward", "other"]
    assert sum(parts.values()) == pytest.approx(analysis.window.host_ms)
    assert min(parts.values()) >= 0
    rows = observed(trace, *steps_of(trace), None).operators
    assert sum(row.flops for row in rows if row.part == "forward") == 2 * 512 * 64 * 16
    assert analysis.idle.missing == "no device in this trace"
