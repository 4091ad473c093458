"""Logging of losses and timing of steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from recperf.errors import GateFailed
from recperf.measure.device_clock import StepMarks
from recperf.runs.speed import speed_of
from recperf.train import timing
from recperf.train.loop import Position, Recipe
from recperf.train.timing import StepTimer
from recperf.train.watch import LossLog


class Emitted:
    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def __call__(self, kind: str, **fields: Any) -> None:
        self.events.append({"kind": kind, **fields})


def test_losses_are_logged_in_groups_and_none_is_lost() -> None:
    emitted = Emitted()
    log = LossLog(emit=emitted, seed=1, group=4)
    for step in range(1, 8):
        log.after_step(Position(step=step), torch.tensor(float(step)))
    assert [event["step"] for event in emitted.events] == [1, 2, 3, 4]
    log.flush()
    assert [event["loss"] for event in emitted.events] == [1, 2, 3, 4, 5, 6, 7]


def test_the_norm_of_the_first_and_of_every_nth_step_is_logged_with_its_loss() -> None:
    emitted = Emitted()
    log = LossLog(emit=emitted, seed=1, norm_every=2, rate=lambda step: step / 2)
    for step in range(1, 7):
        if record := log.before_step(step):
            record(torch.tensor(math.inf if step == 4 else step / 2))
        log.after_step(Position(step=step), torch.tensor(1.0))
    log.flush()
    norms = {event["step"]: event["gradient_norm"] for event in emitted.events if "gradient_norm" in event}
    assert norms == {1: 0.5, 2: 1.0, 4: None, 6: 3.0}
    rates = {event["step"]: event["learning_rate"] for event in emitted.events if "learning_rate" in event}
    assert rates == {1: 0.0, 2: 0.5, 4: 1.5, 6: 2.5}
    recipe = Recipe(
        model=None,
        optimizer=None,
        order=range(5),
        learning_rate=float,
        epochs=10**6,
        max_steps=0,  # type: ignore[arg-type]
    )
    every = [LossLog.for_training(replace(recipe, max_steps=n), emit=emitted, seed=1) for n in (5, 2_000, 10**6)]
    assert [log.norm_every for log in every] == [10, 20, 50]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_nan_loss_names_its_step(bad: float) -> None:
    log = LossLog(emit=Emitted(), seed=1)
    log.after_step(Position(step=6), torch.tensor(0.5))
    log.after_step(Position(step=7), torch.tensor(bad))
    with pytest.raises(GateFailed, match="at step 7"):
        log.flush()


class Device:
    """A device that works asynchronously, in a time that only moves when something takes time: a launch takes 10 us of
    the host, synchronising waits for everything queued, and an event happens when what was queued before it is done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = self.busy_until_ns = self.events = 0
        monkeypatch.setattr(timing, "perf_counter_ns", lambda: self.now_ns + 1)

    def launch(self, ns: int) -> None:
        self.now_ns += 10_000
        self.busy_until_ns = max(self.busy_until_ns, self.now_ns) + ns

    def sync(self) -> None:
        self.now_ns = max(self.now_ns, self.busy_until_ns)

    def event(self) -> DeviceEvent:
        self.events += 1
        return DeviceEvent(self)


@dataclass
class DeviceEvent:
    device: Device
    at_ns: int = 0

    def record(self) -> None:
        self.at_ns = max(self.device.now_ns, self.device.busy_until_ns)

    def synchronize(self) -> None:
        assert self.device.now_ns >= self.at_ns, "no step waits for the device"

    def elapsed_time(self, end: DeviceEvent) -> float:
        return (end.at_ns - self.at_ns) / 1e6


def train(device: Device, timer: StepTimer, *, first: int = 0, steps: int = 700, slow: int = 1) -> None:
    """An epoch of steps of 2 ms; every tenth takes `slow` times as long."""
    timer.before_epoch()
    device.now_ns += 50_000_000  # Shuffling.
    for step in range(first + 1, first + steps + 1):
        timer.before_step()
        device.launch(2_000_000 * (1 if step % 10 else slow))
        timer.after_step(Position(step=step), 100)
        if step % 50 == 0:
            device.sync()  # Losses are logged.
    with timer.aside("evaluation", Position(step=first + steps)):
        device.launch(300_000_000)
        device.sync()
    with timer.aside("save", Position(step=first + steps)):
        device.now_ns += 200_000_000


def on(device: Device, emitted: Emitted, warmup: int = 20) -> StepTimer:
    return StepTimer(emit=emitted, seed=1, sync=device.sync, warmup=warmup, marks=StepMarks(device.event), alone=False)


def test_the_speed_of_an_asynchronous_device_is_that_of_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    emitted, device = Emitted(), Device(monkeypatch)
    timer = on(device, emitted)
    train(device, timer)
    train(device, timer, first=700)
    speed = speed_of(emitted.events)
    steady, overall = speed["steady"], speed["overall"]
    assert steady.steps == 1380
    # 1,380 steps of 2 ms; the second epoch is shuffled; the host is 10 us late after each of the waits.
    assert steady.seconds == pytest.approx(1380 * 0.002 + 0.05, rel=1e-3)
    assert steady.samples_per_s == pytest.approx(138_000 / steady.seconds)
    assert speed["step_ms"].p50 == pytest.approx(2.0, rel=1e-3)
    assert speed["steps_timed"] == 1380
    assert device.events < 600, "events are used again"
    assert speed["difference"] is None
    assert overall.seconds == pytest.approx(device.now_ns / 1e9, rel=1e-6)
    assert overall.evaluation_s == pytest.approx(0.6, rel=1e-3)
    assert (overall.save_s, overall.shuffle_s) == (pytest.approx(0.4), pytest.approx(0.1))
    assert overall.warmup_s == pytest.approx(20 * 0.002 + 0.05, rel=1e-2)
    assert overall.samples == 140_000


def test_a_steady_throughput_far_from_the_median_step_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    emitted, device = Emitted(), Device(monkeypatch)
    train(device, on(device, emitted), slow=6)
    stated = speed_of(emitted.events)["difference"]
    assert stated is not None
    assert stated.startswith("33% below 100 samples per median step: the mean step takes 1.50 times the median")
    assert "other work" not in stated
    busy = [{**event, "other_work": 0.4} for event in emitted.events]
    assert speed_of(busy)["difference"] == f"{stated}; other work took 40% of the cores"
    emitted.events.clear()
    train(device, on(device, emitted, warmup=0), steps=100)
    assert "shuffling takes 20% of the time" in (speed_of(emitted.events)["difference"] or "")


def test_warm_up_is_no_steady_time_even_where_it_is_interrupted() -> None:
    emitted = Emitted()
    timer = StepTimer.for_training(50, emit=emitted, seed=1, sync=None)
    timer.before_epoch()
    for step in range(1, 31):
        timer.before_step()
        timer.after_step(Position(step=step), 7)
        if step in (4, 30):
            with timer.aside("save", Position(step=step)):
                pass
    assert [(event["part"], event.get("steps")) for event in emitted.events] == [
        ("warmup", 4), ("save", None), ("warmup", 6), ("steady", 20), ("save", None)
    ]  # fmt: skip
    assert [len(event.get("step_ms", ())) for event in emitted.events] == [0, 0, 0, 20, 0]
    assert speed_of([])["steady"] is None
    assert speed_of(emitted.events[:3])["step_ms"] is None
