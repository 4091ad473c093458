"""The Python API: profile, Profiler, load and the report, on small steps with the ceilings of no particular machine."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import recperf
from recperf.errors import DataError, UsageError
from recperf.measure import schedule
from recperf.measure.attribution import divided_ms
from recperf.measure.clocks import TRACED


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Few steps, and no measuring of the machine."""
    monkeypatch.setattr(schedule, "PLAIN_SECONDS", 0.02)
    monkeypatch.setattr("recperf.execution.step_profile.machine_peaks.require", lambda threads, say: None)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1000, 16)
        self.top = nn.Linear(16, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.top(self.table(ids).sum(1))


def training() -> tuple[Net, torch.optim.Optimizer]:
    model = Net()
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def batches(seconds: float = 0.0) -> Iterator[torch.Tensor]:
    while True:
        time.sleep(seconds)
        yield torch.randint(0, 1000, (32, 4))


def test_import_is_light() -> None:
    """A few modules, whatever the time that this machine takes for them."""
    code = "import sys; before = set(sys.modules); import recperf; print(len(set(sys.modules) - before))"
    assert int(subprocess.check_output([sys.executable, "-c", code])) < 10


def test_profile_of_a_function(tmp_path: Path, quiet: None) -> None:
    model, optimizer = training()

    def step(ids: torch.Tensor) -> None:
        with torch.profiler.record_function("my loss"):
            loss = model(ids).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    report = recperf.profile(step, batches(0.02), model, confirm=True)
    assert report.verdict.limit == "input"
    assert report.verdict.share == report.shares["input"] > 0.5
    assert sum(report.shares.values()) == pytest.approx(1.0)
    assert divided_ms(report.waits, report.operators) == pytest.approx(report.step_ms.p50, rel=0.01), "one step time"
    assert "batch" in report.verdict.because[0]
    names = {part.name for part in report.parts}
    assert {"table", "top", "top, backward", "my loss"} <= names
    assert any(name.startswith("optimizer SGD") for name in names)
    lookup = next(row for row in report.operators if row.name == "aten::embedding")
    assert (lookup.rows, lookup.row_bytes, lookup.table_rows) == (128, 64, 1000)
    replay = next(row for row in report.experiments if "memory" in row.name)
    assert replay.outcome != "not run", replay

    saved = recperf.load(report.save(tmp_path / "profile.json"))
    assert saved == report
    assert str(saved) == str(report)
    for text in ("input", "What limits the step", "aten::embedding", "expected"):
        assert text in report.text(verbose=True)
    page = report.page(tmp_path / "profile.html").read_text()
    assert page.startswith("<!doctype html>")
    assert report.operators[0].name in page.replace("<wbr>", "")
    assert "iframe" in report._repr_html_()
    assert "input" in repr(report)


def test_a_step_without_batches() -> None:
    x = torch.ones(8)
    report = recperf.profile(lambda: x + x, confirm=False)
    assert report.shares["input"] == 0
    assert report.experiments == []
    assert [row.name for row in report.operators] == ["aten::add"]


def test_a_loop_that_stays_as_it_is() -> None:
    model, optimizer = training()
    with recperf.Profiler(model) as profiler:
        for number, ids in enumerate(profiler.input(batches())):
            model(ids).sum().backward()
            optimizer.step()
            profiler.step()
            if number == 40:
                break
    assert profiler.report.steps.seen == 41
    # One where the loop mostly waited for its input, as it may beside other work.
    assert profiler.report.steps.traced in (schedule.FEW_TRACED, TRACED)
    with pytest.raises(UsageError):
        _ = recperf.Profiler().report


def test_of_batches_without_tensors_only_the_first_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = []
    note = lambda loader, batch: searched.append(batch)  # noqa: E731
    monkeypatch.setattr("recperf.execution.step_profile.note_batch", note)
    with recperf.Profiler() as profiler:
        for _ in profiler.input(DataLoader(["text"] * 40, 2)):  # type: ignore[arg-type]
            torch.ones(8).add_(1)
            profiler.step()
    assert searched == [["text", "text"]]


@pytest.mark.parametrize("count", [5, 30])
def test_an_iterator_of_few_batches_is_enough(count: int) -> None:
    """Steps are traced after ten; where the batches end before, they are used again from memory, and waits for input
    are those of the first pass."""
    passed = []

    def batches() -> Iterator[torch.Tensor]:
        for number in range(count):
            time.sleep(0.01)
            passed.append(number)
            yield torch.full((2, 2), number)

    report = recperf.profile(lambda batch: batch + 1, batches(), confirm=False)
    content = report
    assert content.steps.traced >= 1
    assert content.steps.counted >= 2
    assert content.waits["input"] > 5
    assert len(passed) <= count
    assert any("from memory" in note for note in content.notes) == (count == 5)


def test_a_list_of_batches_starts_again() -> None:
    report = recperf.profile(lambda batch: batch + 1, [torch.ones(2)] * 3, confirm=False)
    assert report.steps.counted == schedule.COUNTED


def test_an_error_in_the_step_is_passed_on() -> None:
    def step() -> None:
        raise ValueError("broken step")

    with pytest.raises(ValueError, match="broken step"):
        recperf.profile(step)
    assert torch.ones(1).add(1).item() == 2


def test_compiled_functions_stay_compiled() -> None:
    """Counting runs them eagerly; afterwards they are compiled again."""
    calls = []

    def backend(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        def run(*arguments: torch.Tensor) -> object:
            calls.append(1)
            return module.forward(*arguments)

        return run

    fast = torch.compile(lambda x: x * 2 + 1, backend=backend)
    x = torch.ones(16)
    report = recperf.profile(lambda: fast(x), confirm=False)
    assert any("mul" in row.name for row in report.operators)
    before = len(calls)
    fast(x)
    assert len(calls) == before + 1
    # Tests of other programs in this process have not compiled anything.
    torch._dynamo.utils.counters.clear()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "not a profile of a step"),
        ('{"kind": "step profile", "schema": 99}', "schema 99"),
        ('{"kind": "profile", "schema": 2, "observed": {}}', "schema 2; this recperf reads 3"),
        ("[", "JSON"),
        ('{"kind": "step profile", "schema": 3, "verdict": 3}', "verdict should be an object, is 3"),
    ],
)
def test_a_file_that_is_no_report_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(content)
    with pytest.raises(DataError, match=message):
        recperf.load(path)


def test_the_light_mode_traces_little_and_says_what_it_costs() -> None:
    x = torch.ones(8)
    with recperf.Profiler(light=True) as profiler:
        for _ in range(300):
            with profiler.waiting_for_input():
                pass
            x + x
            profiler.step()
        assert profiler.done
    assert profiler.report.steps.traced == schedule.FEW_TRACED
    assert "Timing costs" in profiler.report.text(verbose=True)
