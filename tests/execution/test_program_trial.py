"""Changes of a program from outside: what each does to torch's constructors, and a program that runs with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import recperf
from recperf.cli import main
from recperf.execution import fixes, program_trial, step_profile
from recperf.execution.program_trial import changed
from recperf.execution.script import Program
from recperf.measure import advice_rules
from recperf.measure.ceilings import Ceilings
from recperf.measure.program_facts import optimizer_facts
from recperf.measure.records import Advice, Percentiles

CEILINGS = Ceilings(
    device="cpu", threads=2, flops={"float32": 1e11}, stream=20e9, first_touch=2e9, cached=60e9,
    cache_bytes=8_000_000, stream_cache_bytes=8_000_000, largest_cache=8_000_000,
    rows_memory=((64, 100.0), (1024, 300.0)), rows_cache=((64, 5.0), (1024, 20.0)),
    calls={"elementwise": 1000.0, "index": 2000.0},
)  # fmt: skip
FACTORS = """
import torch
from torch import nn
torch.manual_seed(0)

class Factors(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.item = nn.Embedding(100_000, 32), nn.Embedding(100_000, 32)

    def forward(self, users, items):
        return (self.user(users) * self.item(items)).sum(1)

model = Factors()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for step in range(400):
    users, items = torch.randint(100_000, (2, 64))
    loss = (model(users, items) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def train(model: nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss = model(ids).square().mean()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def test_a_table_gets_sparse_gradients_and_sparse_adam() -> None:
    ids = torch.arange(8)

    def losses() -> tuple[list[float], list[Any]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(1000, 4), nn.Linear(4, 2))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        values = [train(model, optimizer, ids) for _ in range(5)]
        return values, [model[0].weight.grad.is_sparse, [tuple(p.shape) for p in optimizer.param_groups[0]["params"]]]

    plain, before = losses()
    with changed({"sparse": [[1000, 4]]}):
        sparse, after = losses()
    assert before == [False, [(1000, 4), (2, 4), (2,)]]
    assert after == [True, [(2, 4), (2,)]]
    # The same rows are used in every step, so that both optimizers do the same to them.
    assert sparse == pytest.approx(plain, rel=1e-4)
    assert not nn.Embedding(1000, 4).sparse


def test_a_model_of_nothing_but_tables_keeps_an_optimizer() -> None:
    with changed({"sparse": [[1000, 4]]}):
        model = nn.Embedding(1000, 4)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        first, *_, last = (train(model, optimizer, torch.arange(8)) for _ in range(5))
    assert last < first


def test_optimizers_run_another_way() -> None:
    weight = nn.Parameter(torch.ones(4))
    weight.grad = torch.ones(4)
    for way in ("fused", "foreach"):
        with changed({"optimizer": way}):
            optimizer = torch.optim.Adam([weight])
            optimizer.step()
        assert optimizer_facts(optimizer).way == way
    assert optimizer_facts(torch.optim.Adam([weight])).way == "for-loop"
    with changed({"optimizer": "fused"}):
        assert optimizer_facts(torch.optim.RMSprop([weight])).way == "for-loop", "it has no such option"


def test_loaders_gradients_and_threads() -> None:
    rows = list(range(8))
    with changed({"workers": 1, "zero_grad": True}):
        loader = DataLoader(rows, 2, False)
        assert (loader.num_workers, loader.batch_size, loader.persistent_workers) == (1, 2, True)
        weight = nn.Parameter(torch.ones(4))
        weight.grad = torch.ones(4)
        torch.optim.SGD([weight]).zero_grad(set_to_none=False)
        assert weight.grad is None
    assert DataLoader(rows, 2).num_workers == 0
    threads = torch.get_num_threads()
    try:
        with changed({"threads": 1}):
            torch.set_num_threads(2)
            assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)


@pytest.fixture
def program(tmp_path: Path) -> Program:
    script = tmp_path / "train.py"
    script.write_text(FACTORS)
    return Program(script)


@pytest.mark.long
def test_a_program_with_a_dense_optimizer_over_its_tables_is_told_so_and_gains(
    program: Program, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Only how much it gains depends on the machine, which is not judged beside other work."""
    monkeypatch.setattr(step_profile.machine_peaks, "require", lambda *_: None)
    monkeypatch.setattr(step_profile, "ceilings_of", lambda *_, **__: CEILINGS)
    monkeypatch.setattr(advice_rules, "RULES", (advice_rules.dense_table,))
    for doubt in ("too_busy", "drifted"):
        monkeypatch.setattr(fixes.predictions, doubt, lambda *_: None)
    folder = program.script.parent / "profile"
    assert main(["profile", "--script", str(program.script), "--try-fixes", "--verbose", "--run-dir", str(folder)]) == 0
    (advice,) = recperf.load(folder / "profile.json").advice
    assert "of 2 tables, but Adam" in advice.seen
    assert "rows = torch.optim.SparseAdam([user.weight, item.weight], lr=0.01)" in advice.change
    assert (advice.predicted_gain or 0) > 1
    assert (advice.measured_gain or 0) > 1
    assert advice.same_losses is not None
    printed = capfd.readouterr().out
    assert "What to change" in printed
    assert "sparse=True" in printed


def test_a_change_that_does_not_run_is_not_applicable(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(_: Program, settings: dict[str, Any]) -> fixes.Measured:
        if settings:
            raise program_trial.MachineError("RuntimeError: sparse gradients are not supported")
        step = Percentiles(1.0, 1.0, 1.0)
        return fixes.Measured(step=step, losses=[1.0], others=0.0)

    monkeypatch.setattr(program_trial, "measured", measured)
    row = Advice("sparse", "", "sparse=True", settings={"sparse": [[1, 1]]})
    program_trial.try_changes(program, [row, Advice("none", "", "")], lambda text: None)
    assert row.status == "not applicable"
    assert "sparse gradients are not supported" in str(row.note)


@pytest.mark.long
def test_a_program_that_fails_says_why(program: Program) -> None:
    program.script.write_text("raise SystemExit('no data here')")
    with pytest.raises(program_trial.MachineError, match="exit code 1 after 0 steps"):
        program_trial.measured(program, {})
