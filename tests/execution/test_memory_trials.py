"""Trials of memory as a command: what a change frees at the peak of a step, and the largest batch that fits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import recperf
from recperf.cli import main
from recperf.execution import memory_trials, source_rules
from recperf.execution.memory_advice import advise_on_memory
from recperf.execution.program_source import Source
from recperf.execution.source_memory import recomputed
from recperf.execution.source_rules import settings_of, sources_of
from recperf.measure import advice_rules, memory, schedule

ITEMS, BATCH = 40_000, 256
SCORES = 4 * ITEMS * BATCH
PROGRAM = """
import torch
from torch import nn
from torch.nn import functional as F
torch.set_num_threads(1)
table = nn.Parameter(torch.rand(ITEMS, 4))
optimizer = torch.optim.SGD([table], lr=0.1)
rows = torch.randint(0, ITEMS, (16 * BATCH, 2))
for batch in torch.utils.data.DataLoader(rows, batch_size=BATCH):
    scores = F.embedding(batch[:, 0], table) @ table.T
    loss = F.cross_entropy(scores, batch[:, 1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_what_frees_memory_and_the_largest_batch_are_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(schedule, "PLAIN_SECONDS", 0.01)
    monkeypatch.setattr(advice_rules, "RULES", ())
    monkeypatch.setattr(source_rules, "RULES", ())
    # A machine with little memory, of which less is left when the trials begin.
    monkeypatch.setattr(memory, "available_bytes", lambda: 8 * SCORES)
    monkeypatch.setattr(memory_trials, "available_bytes", lambda: 6 * SCORES)
    script = Path("train.py")
    script.write_text(PROGRAM.replace("ITEMS", str(ITEMS)).replace("BATCH", str(BATCH)))
    threads = torch.get_num_threads()
    options = ["--no-peaks", "--run-dir", "p", "--no-report", "--verbose", "--try-for", "100"]
    assert main(["profile", "--script", "train.py", *options]) == 0
    torch.set_num_threads(threads)
    (host,) = recperf.load("p/profile.json").memory
    (one,) = host.advice
    assert (one.name, one.same_losses) == ("fused loss", True)
    before, after = one.measured_peak or [0, 0]
    # Of the softmax, its gradient and that of the scores an eighth is there at a time; the heap keeps some of it.
    assert before - after > 0.75 * SCORES
    assert host.largest_batch is not None
    assert host.fitting_batch is not None
    assert BATCH < host.fitting_batch < 0.9 * host.largest_batch
    printed = " ".join(capfd.readouterr().out.split())
    assert f"A batch of {host.fitting_batch:,} fits, 256 now (tried; " in printed
    assert "Of what was tried this frees most, " in printed
    assert "becomes" in printed
    assert script.read_text().count("checkpoint") == 0


BLOCKS = """
import torch
from torch import nn
torch.manual_seed(0)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({"h": nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])})
        self.out = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)], nn.Linear(8, 1))

    def forward(self, x):
        for layer in self.layers.h:
            x = layer(x).relu()
        return self.out(x)

model = Model()
loss = model(torch.ones(4, 8)).square().mean()
loss.backward()
gradients = [one.grad for one in model.parameters()]
"""


def test_recomputed_activations_have_the_same_gradients(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(BLOCKS.replace(".layers.h", '.layers["h"]'))
    findings = list(recomputed(Source(script.read_text(), str(script))))
    assert len(findings) == 2
    settings = settings_of(findings)
    assert settings is not None
    (text,) = sources_of(settings).values()
    assert text.count("checkpoint(layer, x, use_reentrant=False)") == 1
    results = []
    for source in (script.read_text(), text):
        names: dict[str, list[torch.Tensor]] = {}
        exec(compile(source, "train.py", "exec"), names)
        results.append(names["gradients"])
    assert all(map(torch.equal, *results))


def test_a_program_whose_activations_are_small_is_not_told_about_memory(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    for part, names in (("weights", []), ("activations", ["fused loss"])):
        one = recperf.measure.records.StepMemory("host", 100, {part: 100}, [], [], 1000)  # type: ignore[attr-defined]
        report = type("R", (), {"memory": [one], "advice": [], "program_facts": None})()
        advise_on_memory(report, [script])
        assert [row.name for row in one.advice] == names
