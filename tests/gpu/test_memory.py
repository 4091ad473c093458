"""The memory of a step on a GPU divided into its parts, by planted tensors whose sizes are known."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import recperf
from recperf.measure.records import StepMemory

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

ROWS, WIDTH, BATCH = 200_000, 64, 1024
TABLE = 4 * ROWS * WIDTH


def memory_of(loss: Callable[[Tensor, nn.Embedding], Tensor], after: Callable[[], object] = lambda: None) -> StepMemory:
    """Of the device, in steps of Adam over one table."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    table = nn.Embedding(ROWS, WIDTH, device="cuda")
    optimizer = torch.optim.Adam(table.parameters(), foreach=False)

    def step(ids: Tensor) -> None:
        optimizer.zero_grad()
        loss(table(ids), table).backward()
        optimizer.step()
        after()

    batches = [torch.randint(0, ROWS, (BATCH,), device="cuda") for _ in range(40)]
    report = recperf.profile(step, batches, table, confirm=False, quiet=True)
    (memory,) = (one for one in report.memory if one.device == torch.cuda.get_device_name())
    assert sum(memory.parts.values()) == memory.peak_bytes
    assert memory.parts["weights"] == pytest.approx(TABLE, rel=0.03)
    assert memory.parts["optimizer state"] == pytest.approx(2 * TABLE, rel=0.03)
    return memory


def test_the_parts_of_a_table_with_dense_gradients() -> None:
    memory = memory_of(lambda rows, table: rows.square().mean())
    assert memory.parts["gradients"] == pytest.approx(TABLE, rel=0.03)
    assert memory.peak_bytes == pytest.approx(torch.cuda.max_memory_reserved(), rel=0.03)


def test_a_softmax_over_the_catalogue() -> None:
    memory = memory_of(lambda rows, table: torch.log_softmax(rows @ table.weight.T, 1)[:, 0].mean())
    assert memory.parts["activations"] == pytest.approx(4 * BATCH * ROWS, rel=0.03)
    largest = next(row for row in memory.lines if row.part == "activations")
    assert largest.file.endswith("test_memory.py")
    assert largest.bytes == pytest.approx(4 * BATCH * ROWS, rel=0.03)


def test_a_list_that_grows() -> None:
    kept: list[Tensor] = []
    memory = memory_of(
        lambda rows, table: rows.square().mean(), lambda: kept.append(torch.zeros(1_000_000, device="cuda"))
    )
    assert memory.growth[0].bytes == pytest.approx(4_000_000, rel=0.03)


PROGRAM = """
import torch
from torch.nn import functional as F
table = torch.nn.Parameter(torch.rand(200_000, 8, device="cuda"))
optimizer = torch.optim.SGD([table], lr=0.1)
for step in range(400):
    ids, target = torch.randint(0, 200_000, (2, 1024), device="cuda")
    loss = F.cross_entropy(F.embedding(ids, table) @ table.T, target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_what_frees_memory_of_the_device_is_tried(tmp_path: Path) -> None:
    script, folder = tmp_path / "train.py", tmp_path / "profile"
    script.write_text(PROGRAM)
    command = [sys.executable, "-m", "recperf", "profile", "--script", str(script), "--run-dir", str(folder)]
    subprocess.run([*command, "--no-report", "--quiet", "--try-for", "200"], check=True, timeout=400)
    memory = recperf.load(folder / "profile.json").memory[-1]
    one = next(one for one in memory.advice if one.name == "fused loss")
    before, after = one.measured_peak or [0, 0]
    # The softmax and the gradient of the scores, at least.
    assert before > 2 * 4 * 1024 * 200_000
    assert before - after > 4 * 1024 * 200_000
