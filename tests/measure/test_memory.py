"""The memory of a step divided into its parts, by planted tensors whose sizes are known, and what grows, by line."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from recperf.execution.script import Program, ScriptOutcome, profile_program
from recperf.measure import observing
from recperf.measure.limits import memory_sentence
from recperf.measure.records import StepMemory

ROWS, WIDTH, BATCH = 20_000, 32, 128
TABLE = 4 * ROWS * WIDTH
PROGRAM = """
import torch
import numpy
from torch import nn
torch.set_num_threads(1)
table = nn.Embedding(ROWS, WIDTH)
model = nn.ModuleList([table, nn.Linear(WIDTH, WIDTH)])
optimizer = torch.optim.OPTIMIZER
kept = []
for ids in torch.utils.data.DataLoader(torch.randint(0, ROWS, (40 * BATCH,)), BATCH):
    rows = model[1](table(ids))
    loss = LOSS
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    KEEP
"""
SQUARE, SOFTMAX = "rows.square().mean()", "torch.log_softmax(rows @ table.weight.T, 1)[:, 0].mean()  # SOFTMAX"
ADAM, SGD = "Adam(model.parameters(), foreach=False)", "SGD(model.parameters(), lr=0.1)"


def profiled(folder: Path, loss: str = SQUARE, optimizer: str = SGD, keep: str = "pass") -> tuple[ScriptOutcome, str]:
    source = PROGRAM.replace("LOSS", loss).replace("OPTIMIZER", optimizer).replace("KEEP", keep)
    for name, value in {"ROWS": ROWS, "WIDTH": WIDTH, "BATCH": BATCH}.items():
        source = source.replace(name, str(value))
    script = folder / "train.py"
    script.write_text(source)
    # Models of other tests are weights too while they are in memory.
    gc.collect()
    threads = torch.get_num_threads()
    outcome = profile_program(Program(script), quiet=True, peaks=False)
    torch.set_num_threads(threads)
    return outcome, source


def memory_of(outcome: ScriptOutcome) -> StepMemory:
    assert outcome.report is not None
    memory = outcome.report.memory[0]
    assert memory.device == "host"
    assert sum(memory.parts.values()) == memory.peak_bytes
    return memory


def line_of(source: str, text: str) -> int:
    return next(at for at, line in enumerate(source.splitlines(), 1) if text in line)


def test_dense_gradients_and_the_state_of_an_optimizer(tmp_path: Path) -> None:
    outcome, source = profiled(tmp_path, optimizer=ADAM)
    parts = memory_of(outcome).parts
    others = 4 * (WIDTH * WIDTH + WIDTH)
    assert parts["weights"] == pytest.approx(TABLE + others, rel=0.03)
    assert parts["gradients"] == pytest.approx(TABLE + others, rel=0.03)
    assert parts["optimizer state"] == pytest.approx(2 * (TABLE + others), rel=0.03)
    # The update makes the square root of a state, and divides by it.
    assert parts["temporary tensors"] == pytest.approx(2 * TABLE, rel=0.6)
    (largest, *_) = [row for row in memory_of(outcome).lines if row.part == "temporary tensors"]
    assert largest.line == line_of(source, "optimizer.step()")
    assert memory_of(outcome).growth == []


def test_a_softmax_over_the_catalogue(tmp_path: Path) -> None:
    outcome, source = profiled(tmp_path, loss=SOFTMAX)
    memory = memory_of(outcome)
    (largest, *_) = [row for row in memory.lines if row.part == "activations"]
    assert (largest.line, largest.bytes) == (line_of(source, "# SOFTMAX"), pytest.approx(4 * BATCH * ROWS, rel=0.03))
    assert memory.parts["activations"] == pytest.approx(4 * BATCH * ROWS, rel=0.03)
    assert memory.batch == BATCH
    # Its output, the gradient of it, and that of its input: as much for every row of a batch.
    free = memory.capacity_bytes - memory.parts["outside torch"]
    assert memory.largest_batch is not None
    assert 0.8 < memory.largest_batch / (free / (3 * 4 * ROWS)) <= 1.2


@pytest.mark.parametrize("kept", ["torch.zeros(100_000)", "numpy.ones(300_000)"])
def test_a_list_that_grows(kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The process of earlier tests has memory to spare, and does not grow.
    monkeypatch.setattr(observing, "GROWS", -(1 << 40))
    outcome, source = profiled(tmp_path, keep=f"kept.append({kept})")
    memory = memory_of(outcome)
    (row,) = memory.growth
    size = 400_000 if "torch" in kept else 2_400_000
    assert (row.line, row.bytes) == (line_of(source, "kept.append"), pytest.approx(size, rel=0.03))
    assert f"a step: train.py:{row.line}" in memory_sentence(memory)
    if "torch" in kept:
        assert memory.parts["other tensors of earlier steps"] == pytest.approx(2 * size, rel=0.03)


def test_a_program_that_runs_out_of_memory(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    outcome, source = profiled(tmp_path, keep="torch.empty(1 << 46)  # TOO MUCH")
    assert (outcome.code, outcome.report) == (1, None)
    assert "you tried to allocate" in capfd.readouterr().err
    assert outcome.missing is not None
    line = line_of(source, "TOO MUCH")
    assert outcome.missing.what.startswith(f"Out of memory of the host: train.py:{line} in <module> asked for 256 TiB")
    memory = outcome.out_of_memory
    assert memory is not None
    assert sum(memory.parts.values()) == memory.peak_bytes
    # Models of other tests may be in memory too.
    assert memory.parts["weights"] >= TABLE
    assert memory.parts["gradients"] >= TABLE
