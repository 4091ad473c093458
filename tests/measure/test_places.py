"""Places in the user's program: each planted cause is found at its line, which a comment marks in the source."""

from __future__ import annotations

import multiprocessing
import sys
import threading
from collections import Counter
from itertools import combinations
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch

import recperf
from recperf.execution.script import Program, profile_program
from recperf.measure import trace_evidence
from recperf.measure.intervals import of_samples, of_steps, wilson
from recperf.measure.peaks.other_work import DISTURBED
from recperf.measure.place_shares import Timed, by_step, folded, shares_of
from recperf.measure.places import LIBRARY, USER, Frame, place_in, place_text, surrounding
from recperf.measure.records import Place
from recperf.runs.report.blocks import render
from recperf.runs.report.profiles import report_of

SCRIPT = """
import math
import time
import numpy as np
import torch
from torch import nn

class Twice(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x * 2  # CUSTOM FORWARD

    @staticmethod
    def backward(context, gradient):
        return torch.sinh(gradient)  # CUSTOM BACKWARD

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20000, 32)
        self.top = nn.Linear(32, 64)

    def forward(self, ids):
        rows = self.table(ids)  # LOOKUP
        return Twice.apply(self.top(rows))  # TOP

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 70 * 3
    def __getitem__(self, index):
        total = 0
        for number in range(100000):
            total += number  # ITEM
        return torch.tensor(total % 20000)

def python_loop():
    total = 0
    for number in range(150000):
        total += number * number  # LOOP
    return total

def pause():
    time.sleep(0.04)  # SLEEP

def product(a, b):
    for _ in range(products):
        c = a @ b  # MATMUL
    return c

torch.set_num_threads(1)
model = Model()
optimizer = torch.optim.Adam(model.parameters())
# Whole numbers: numpy has no threads for them.
a = np.ones((200, 200), dtype=int)
products = 1
# As long as the pause on any machine.
seconds = []
for _ in range(5):
    began = time.perf_counter()
    product(a, a)
    seconds.append(time.perf_counter() - began)
products = math.ceil(0.04 / min(seconds))
for ids in torch.utils.data.DataLoader(Rows(), 3):
    loss = model(ids).square().mean()  # LOSS
    optimizer.zero_grad()
    loss.backward()  # RUN BACKWARD
    python_loop()
    pause()
    product(a, a)
    optimizer.step()  # UPDATE
"""
LIBRARY_LOOP = """
import math

def metric():
    return sum(math.sqrt(number) for number in range(100000))  # METRIC

def fit(model, optimizer, batches):
    for batch in batches:
        model(batch).mean().backward()  # FIT
        optimizer.step()
        metric()
"""


def line_of(source: str, marker: str) -> int:
    (line,) = (number for number, text in enumerate(source.splitlines(), 1) if text.endswith(f"# {marker}"))
    return line


def profiled(script: Path, source: str) -> dict[str, Any]:
    script.write_text(source)
    threads = torch.get_num_threads()
    report = profile_program(Program(script), quiet=True, peaks=False).report
    torch.set_num_threads(threads)
    assert report is not None
    saved = report.save(script.with_name("profile.json"))
    assert recperf.load(saved).places == report.places
    return report


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return profiled(tmp_path_factory.mktemp("program") / "train.py", SCRIPT)


@pytest.mark.parametrize(
    ("limit", "function", "marker"),
    [
        ("python", "python_loop", "LOOP"),
        ("python", "product", "MATMUL"),
        ("blocked", "pause", "SLEEP"),
        ("input", "__getitem__", "ITEM"),
    ],
)
def test_the_line_outside_of_operators(profile: dict[str, Any], limit: str, function: str, marker: str) -> None:
    places = [place for place in profile.places if place.limit == limit]
    assert function in {place.function for place in places}
    place = next(place for place in places if place.function == function)
    assert (place.file, place.line) == ("train.py", line_of(SCRIPT, marker))
    assert sum(place.share for place in places) <= profile.shares[limit] + 1e-9


def test_c_code_is_told_from_the_interpreter_and_sampling_costs_at_most_one_percent(profile: dict[str, Any]) -> None:
    assert profile.sampling.samples >= 10
    assert 0 < profile.sampling.share <= 0.01
    assert profile.native.modules == ["numpy"]
    places = {place.function: place.share for place in profile.places if place.limit == "python"}
    product = places["product"] / sum(places.values())
    assert 0.5 * product < profile.native.share < min(1.0, product + 0.1)


@pytest.mark.parametrize(
    ("operator", "marker", "backward"),
    [
        ("aten::embedding", "LOOKUP", False),
        ("aten::embedding_dense_backward", "LOOKUP", True),
        ("aten::addmm", "TOP", False),
        ("aten::mm", "TOP", True),
        ("aten::mean", "LOSS", False),
        ("aten::sinh", "CUSTOM BACKWARD", False),
        ("aten::addcdiv_", "UPDATE", False),
    ],
)
def test_the_line_of_an_operator(profile: dict[str, Any], operator: str, marker: str, backward: bool) -> None:
    places = [row.place for row in profile.operators if row.name == operator]
    assert {(place.line, place.backward) for place in places} == {(line_of(SCRIPT, marker), backward)}


def test_places_are_shown(profile: dict[str, Any]) -> None:
    text = render(report_of(profile), verbose=True)
    assert place_text(profile.places[0]) in text
    assert f"train.py:{line_of(SCRIPT, 'UPDATE')}" in text.partition("\nOperators\n")[2]


def test_stacks_are_folded_and_drawn(profile: dict[str, Any]) -> None:
    lines = folded(profile.stacks).splitlines()
    assert sum(int(line.rpartition(" ")[2]) for line in lines) == pytest.approx(1e6, abs=len(lines))
    assert any(f"train.py:{line_of(SCRIPT, 'SLEEP')} in pause;[blocked] " in line for line in lines)
    (section,) = (section for section in report_of(profile).sections if section.key == "stacks")
    (block,) = section.blocks
    first, *_, last = block.lanes
    assert sum(one.width for one in first.stretches) == pytest.approx(100, abs=0.1)
    assert any(
        one.name == "python_loop" or "in python_loop" in one.name for lane in block.lanes for one in lane.stretches
    )
    assert sum(one.width for one in last.stretches) <= 100


def test_a_library_that_runs_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site-packages" / "trainer"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(LIBRARY_LOOP)
    monkeypatch.syspath_prepend(str(package.parent))
    source = dedent("""
        import torch, trainer
        model = torch.nn.Linear(8, 1)
        trainer.fit(model, torch.optim.SGD(model.parameters(), lr=0.1), [torch.rand(4, 8) for _ in range(200)])
    """)
    content = profiled(tmp_path / "main.py", source)
    python = next(place for place in content.places if place.limit == "python")
    assert (python.file, python.line) == ("trainer/__init__.py", line_of(LIBRARY_LOOP, "METRIC"))
    (row,) = (row for row in content.operators if row.name == "aten::addmm")
    assert (row.place.file, row.place.line) == ("trainer/__init__.py", line_of(LIBRARY_LOOP, "FIT"))


REPEATED = """
import time
from statistics import median
import torch
from torch import nn

def metric():
    total = 0
    for number in range(60000):
        total += number * number  # METRIC
    return total

def log():
    time.sleep(0.003)  # LOG

torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1))
optimizer = torch.optim.Adagrad(model.parameters())
loader = torch.utils.data.DataLoader(torch.rand(6 * 64, 256), 64)
spent = {"metric": [], "log": [], "step": []}
before = time.perf_counter()
for epoch in range(14):
    for batch in loader:
        optimizer.zero_grad()
        model(batch).mean().backward()
        began = time.perf_counter()
        metric()
        measured = time.perf_counter()
        log()
        logged = time.perf_counter()
        optimizer.step()
        for name, seconds in zip(spent, (measured - began, logged - measured, time.perf_counter() - before)):
            spent[name].append(seconds)
        before = time.perf_counter()
seconds = {name: median(times) for name, times in spent.items()}
with open(FILE, "w") as file:
    file.write(f"{seconds['metric'] / seconds['step']} {seconds['log'] / seconds['step']}")
"""


def ends(row: Any) -> tuple[float, float]:
    """An interval that is twice as wide: one of 95 % misses in one of twenty, this one in one of ten thousand."""
    return row.low - (row.high - row.low) / 2, row.high + (row.high - row.low) / 2


def test_repeats_of_a_short_program_agree_within_their_intervals(tmp_path: Path) -> None:
    """Epochs of a few batches seem to end soon: after the first ones there is time for more traced steps."""
    right, profiles = Counter[str](), []
    for _ in range(3):
        profile = profiled(tmp_path / "train.py", REPEATED.replace("FILE", repr(str(tmp_path / "truth"))))
        if (profile.other_work or 0.0) > DISTURBED:
            pytest.skip("other work has the cores: such a step is not judged")
        assert profile.steps.traced >= 4
        truth = dict(zip(("metric", "log"), map(float, (tmp_path / "truth").read_text().split()), strict=True))
        rows = {row.function: row for row in reversed(profile.places) if row.function in truth}
        assert {name: (row.line, row.limit) for name, row in rows.items()} == {
            "metric": (line_of(REPEATED, "METRIC"), "python"),
            "log": (line_of(REPEATED, "LOG"), "blocked"),
        }
        assert all(row.samples >= 3 and 0 < row.high - row.low < 0.5 for row in rows.values())
        right.update(name for name, row in rows.items() if ends(row)[0] <= truth[name] <= ends(row)[1])
        if profile.verdict.confidence == "high":
            assert profile.places[0].function == max(truth, key=lambda name: truth[name])
        profiles.append({(row.file, row.line, row.backward, row.limit): row for row in profile.places})
    assert min(right["metric"], right["log"]) >= 2
    for one, other in combinations(profiles, 2):
        for place in (place for place in one.keys() & other.keys() if one[place].share >= 0.1):
            assert ends(one[place])[0] <= ends(other[place])[1]
            assert ends(other[place])[0] <= ends(one[place])[1]


WORKERS = """
import multiprocessing
import time
import torch

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 160

    def parse(self, index):
        total = 0
        for number in range(300000): total += number  # PARSE
        return total

    def __getitem__(self, index):
        time.sleep(0.004)  # READ
        return torch.rand(16) + self.parse(index) % 2

def serve(event):
    while not event.is_set():
        time.sleep(0.02)  # SERVE

if __name__ == "__main__":
    event = multiprocessing.Event()
    other = multiprocessing.Process(target=serve, args=(event,), daemon=True)
    other.start()
    model = torch.nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in torch.utils.data.DataLoader(Rows(), 4, num_workers=1):
        model(x).mean().backward()
        optimizer.step()
"""


def test_the_line_of_a_slow_worker(tmp_path: Path) -> None:
    profile = profiled(tmp_path / "train.py", WORKERS)
    largest = profile.places[0]
    assert (largest.limit, largest.function) == ("input", "parse")
    # A thread that gives the interpreter away at the end of a loop is one line further.
    assert line_of(WORKERS, "PARSE") <= largest.line <= line_of(WORKERS, "PARSE") + 1
    assert largest.low < largest.share < largest.high <= 1
    assert "parse: " in render(report_of(profile))
    for process in multiprocessing.active_children():
        process.terminate()
    if (profile.other_work or 0.0) > DISTURBED:
        pytest.skip("other work has the cores: a process that sleeps waits for one, and is hardly sampled meanwhile")
    workers, other = sorted(profile.children, key=lambda one: one.what)
    assert (workers.what, workers.processes, other.what) == ("DataLoader workers", 1, "serve")
    assert workers.busy > 0.5
    lines = {row.line: row for row in workers.lines}
    assert line_of(WORKERS, "READ") in lines
    assert other.lines[0].off > 0.5 > lines[line_of(WORKERS, "PARSE")].off
    assert sum(row.share for row in workers.lines) == pytest.approx(1)
    assert other.lines[0].line == line_of(WORKERS, "SERVE")


def test_intervals_by_hand() -> None:
    assert wilson(0.5, 96) == pytest.approx((0.402, 0.598), abs=1e-3)
    assert wilson(1.0, 30) == pytest.approx((0.886, 1.0), abs=1e-3)
    # Steps of 10 ms of which a line takes 2 and 4 ms in turns: the mean is 0.3, its error 0.1 / sqrt(n - 1).
    low, high = of_steps([2.0, 4.0, 2.0, 4.0], [10.0] * 4)
    assert (low, high) == pytest.approx((0.3 - 3.18 * 0.1 / 3**0.5, 0.3 + 3.18 * 0.1 / 3**0.5))
    assert of_steps([2.0], [10.0]) == (0.0, 1.0)
    every = [(step, 1.0) for step in range(50) for _ in range(4)]
    alone, alike = (of_samples(inside, every) for inside in (every[::4], every[:50]))
    assert alone == pytest.approx(wilson(0.25, 200), abs=0.01)
    # All samples of some steps, and none of others, are as few as the steps.
    assert alike == pytest.approx(wilson(0.25, 50), abs=0.01)
    # One long sample may be chance.
    assert of_samples([(0, 100.0)], [(0, 100.0), *((step, 1.0) for step in range(1, 101))])[0] < 0.01


def frame(kind: int, file: str, line: int) -> Frame:
    return Frame(kind, file.partition("/")[0], Place("f", file, line))


def test_frames_around_the_step_are_no_places() -> None:
    main, loop = frame(USER, "main.py", 9), frame(LIBRARY, "trainer/loop.py", 5)
    forward, metric = frame(USER, "model.py", 3), frame(LIBRARY, "sklearn/metrics.py", 7)
    weights = {(main, loop, forward): 50.0, (main, loop, metric): 47.0, (main,): 1.0, (frame(USER, "log.py", 1),): 2.0}
    around = surrounding(weights)
    assert around == (main, loop)
    assert surrounding(weights, end=(main,)) == (main,)
    assert place_in((main, loop, forward), around) == forward.place
    assert place_in((main, loop, metric), (main,)) == loop.place
    assert place_in((main,), around) == main.place
    assert place_in((), around) is None


def test_the_sampler_ends_with_the_profiler() -> None:
    interval = sys.getswitchinterval()
    for light, alive in ((False, True), (True, False)):
        with pytest.raises(ZeroDivisionError), recperf.Profiler(light=light, peaks=False) as profiler:
            for _ in range(6):
                torch.ones(4) + 1
                profiler.step()
            assert any(thread.name == "recperf sampler" for thread in threading.enumerate()) is alive
            raise ZeroDivisionError
        assert not any(thread.name == "recperf sampler" for thread in threading.enumerate())
        assert sys.getswitchinterval() == interval


def slow_python() -> int:
    total = 0
    for number in range(100000):
        total += number * number
    return total


def model_part(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x)


def test_stacks_of_a_trace(tmp_path: Path) -> None:
    weight = torch.rand(64, 64, requires_grad=True)
    with torch.profiler.profile(with_stack=True, record_shapes=True) as recorded:
        for _ in range(4):
            with torch.profiler.record_function("ProfilerStep#0"):
                model_part(weight).sum().backward()
                slow_python()
            recorded.step()
    recorded.export_chrome_trace(str(tmp_path / "trace.json"))
    limit = trace_evidence.analyse_file(tmp_path / "trace.json")
    largest = next(place for place in limit.places if place.limit == "python")
    assert (largest.function, Path(largest.file).name) == ("slow_python", "test_places.py")
    assert largest.line == slow_python.__code__.co_firstlineno
    places = {row.name: row.place for row in limit.operators}
    assert places["aten::tanh"].function == places["aten::tanh_backward"].function == "model_part"
    assert [places[name].backward for name in ("aten::tanh", "aten::tanh_backward")] == [False, True]


def test_a_place_is_observed_with_the_text_of_its_line(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("a = 1\n    loss.item()\n")
    lines = [Place("fit", str(file), 2), Place("fit", str(file), 9), Place("fit", "<stdin>", 1)]
    rows = shares_of([Timed("python", place, 0, time) for place, time in zip(lines, (6.0, 3.0, 1.0))], by_step)
    assert [(row.share, row.source) for row in rows] == [(0.6, "loss.item()"), (0.3, ""), (0.1, "")]
