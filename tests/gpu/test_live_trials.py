"""Changes that are tried on a live step of a GPU: a CUDA graph and a fused optimizer, and that both are undone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import recperf
from recperf.execution import live_trials
from recperf.measure import schedule

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def trained(steps: int | None) -> tuple[list[torch.Tensor], recperf.Report | None]:
    """Weights after some steps, or after a profile with its report."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(20))).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)
    x = torch.rand(64, 32, device="cuda")

    def step(batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    if steps is None:
        report = recperf.profile(step, [x], model, try_changes=True, confirm=False, quiet=True)
        return [one.detach().clone() for one in model.parameters()], report
    for _ in range(steps):
        step(x)
    return [one.detach().clone() for one in model.parameters()], None


def test_a_graph_is_tried_and_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "PLAIN_SECONDS", 0.05)
    monkeypatch.setattr(live_trials, "TURN_S", 0.02)
    monkeypatch.setattr("recperf.execution.step_profile.machine_peaks.require", lambda threads, say: None)
    weights, report = trained(None)
    assert report is not None
    graph = next(one for one in report.advice if one.settings.get("graph"))
    assert (graph.status, graph.measured_gain is not None and graph.measured_gain > 1.2) == ("tried", True)
    again, _ = trained(report.steps_trained)
    assert all(torch.equal(one, other) for one, other in zip(weights, again, strict=True))
