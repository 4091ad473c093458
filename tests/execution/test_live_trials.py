"""Changes that are tried on a step whose objects live: what is measured, and that all of it is undone to the bit."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import recperf
from recperf.execution import live_trials
from recperf.execution.live_trials import LiveStep, LiveTrials
from recperf.execution.trial_search import NotTried
from recperf.measure import schedule
from recperf.measure.peaks.other_work import DISTURBED


class Training:
    """A step that sleeps eight times as long with two threads: longer than a busy machine keeps it from a core."""

    def __init__(self, kind: Any = torch.optim.Adam, seconds: float = 0.004) -> None:
        self.seconds = seconds
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 1))
        self.optimizer = kind(self.model.parameters(), lr=0.01)
        self.steps = 0

    def step(self, x: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.model(x).square().mean().backward()
        self.optimizer.step()
        self.steps += 1
        time.sleep(self.seconds * (8 if torch.get_num_threads() > 1 else 1))

    def state(self) -> list[Any]:
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        tensors = [one.clone() for one in (*self.model.parameters(), *states)]
        return [*tensors, self.steps, torch.get_rng_state()]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(schedule, "PLAIN_SECONDS", 0.02)
    monkeypatch.setattr(live_trials, "TURN_S", 0.01)
    monkeypatch.setattr(live_trials, "usable_cores", lambda: 2)
    monkeypatch.setattr("recperf.execution.trial_search.usable_cores", lambda: 2)
    monkeypatch.setattr("recperf.execution.trial_search.MOST", 5)
    monkeypatch.setattr("recperf.execution.step_profile.machine_peaks.require", lambda threads, say: None)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def same(some: list[Any], others: list[Any]) -> bool:
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(some, others, strict=True))


def test_what_gains_is_advised_and_everything_is_undone() -> None:
    rows = [torch.rand(4, 8) for _ in range(8)]
    training = Training()
    report = recperf.profile(training.step, rows, training.model, try_changes=True, confirm=False, quiet=True)
    threads = next((one for one in report.advice if one.name == "threads"), None)
    # Beside other work turns differ so much that a gain may not be sure.
    disturbed = (report.other_work or 0.0) > DISTURBED
    assert threads or disturbed
    if threads:
        assert (threads.status, threads.settings, threads.note) == ("tried", {"threads": 1}, "weights are equal")
        assert threads.measured_range is not None
        assert (1.0 if disturbed else 1.3) < threads.measured_range[0] < 9
    assert torch.get_num_threads() == 2
    assert training.steps == report.steps_trained
    assert [group["fused"] for group in training.optimizer.param_groups] == [None]
    # As if nothing but the counted steps had been taken.
    again = Training()
    for number in range(training.steps):
        again.step(rows[number % 8])
    assert same(training.state(), again.state())


def test_workers_are_tried_with_the_same_batches() -> None:
    training = Training(torch.optim.SGD, seconds=0.004)
    loader = DataLoader(Slow(), 4, shuffle=True)  # type: ignore[arg-type, var-annotated]
    live = LiveStep(training.step, loader, [torch.rand(4, 8)], [training.optimizer], [training, loader.batch_sampler])
    with LiveTrials(live, 0) as trials:
        result = trials.compare({"workers": 1}, time.monotonic() + 30, most=4)
        assert result.gain > 1.1
        assert (result.differs, trials.repeats) == (0, 0)
        with pytest.raises(NotTried, match="compile cannot be switched"):
            trials.compare({"compile": True}, time.monotonic() + 30)


class Slow(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, row: int) -> torch.Tensor:
        time.sleep(0.008)
        return torch.full((8,), row / 64)
