"""What a real device's trace must show; skipped where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from example_traces import record

from recperf.measure.spans import span
from recperf.measure.trace.analyse import analyse
from recperf.measure.trace.read import read
from recperf.measure.trace.records import StepTables

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps with a pageable copy, a graph of three products, an eager backward pass and an item()."""
    weight = torch.randn(512, 512, device="cuda")
    leaf = torch.randn(512, 512, device="cuda", requires_grad=True)
    features = torch.zeros(512, 512, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        (features @ weight).relu()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = features
        for _ in range(3):
            made = made @ weight

    def step() -> None:
        with span("data"):
            features.copy_(torch.randn(512, 512))
        with span("forward"):
            graph.replay()
        with span("backward"):
            loss = (leaf * features).sum()
            loss.backward()
        with span("loss"):
            loss.item()

    for _ in range(5):
        step()
    path = tmp_path_factory.mktemp("trace") / "trace.json.gz"
    record(step, 8, path)
    return path


@pytest.fixture(scope="module")
def analysis(trace: Path) -> StepTables:
    return analyse(read(trace))


def test_kernels_of_a_graph_belong_to_its_launch(analysis: StepTables) -> None:
    parts = {part.name: part for part in analysis.parts}
    assert parts["forward"].kernels >= 3
    assert parts["backward"].kernels >= 3
    assert parts["backward"].device_ms > 0
    assert parts["other"].kernels == 0
    assert all(row.part for row in analysis.kernels.rows)


def test_device_time_adds_up(analysis: StepTables) -> None:
    idle = analysis.idle
    assert idle.busy_ms + idle.idle_ms == pytest.approx(idle.wall_ms)
    assert sum(idle.causes.values()) == pytest.approx(idle.idle_ms)
    assert idle.causes["input"] > 0
    assert any("aten::item" in row.caller and "loss" in row.caller for row in idle.syncs)
    assert sum(part.device_ms for part in analysis.parts) == pytest.approx(idle.busy_ms, rel=0.2)


def test_the_copy_from_pageable_memory_is_seen(analysis: StepTables) -> None:
    rows = {row.kind: row for row in analysis.transfers}
    assert rows["host to device"].pinned is False
    assert rows["host to device"].bytes == 512 * 512 * 4
    assert rows["device to host"].bytes == 4
