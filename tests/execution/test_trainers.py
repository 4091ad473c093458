"""Programs that leave their loop to a library are profiled unchanged, where that library is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import recperf

pytestmark = pytest.mark.long
BEGIN = """
import sys, time
import torch
from torch.utils.data import DataLoader, Dataset

class Rows(Dataset):
    def __len__(self):
        return 2000
    def __getitem__(self, row):
        return {"x": torch.full((16,), row / 2000)}

class Model(BASE):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(16, 1)
    def forward(self, x):
        time.sleep(0.01)  # SLOW
        return {"loss": self.net(x).square().mean()}
"""
PROGRAMS = {
    "lightning": (
        "from lightning.pytorch import LightningModule, Trainer",
        "LightningModule",
        """
    def training_step(self, batch, _):
        if self.global_rank == 1:
            time.sleep(0.02)  # LATE
        return self(batch["x"])["loss"]
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

if __name__ == "__main__":
    ranks = int(sys.argv[1])
    Trainer(max_epochs=1, accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto", logger=False,
            enable_checkpointing=False, enable_progress_bar=False).fit(Model(), DataLoader(Rows(), 8))
""",
    ),
    "accelerate": (
        "from accelerate import Accelerator",
        "torch.nn.Module",
        """
accelerator, model = Accelerator(cpu=True), Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Rows(), 8))
for batch in loader:
    optimizer.zero_grad()
    accelerator.backward(model(**batch)["loss"])
    optimizer.step()
""",
    ),
    "transformers": (
        "from transformers import Trainer, TrainingArguments",
        "torch.nn.Module",
        """
arguments = TrainingArguments("out", use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True)
Trainer(Model(), arguments, train_dataset=Rows()).train()
""",
    ),
}


@pytest.mark.parametrize(("library", "ranks"), [(name, 1) for name in PROGRAMS] + [("lightning", 2)])
def test_the_slow_line_is_named(library: str, ranks: int, tmp_path: Path) -> None:
    if find_spec(library) is None:
        pytest.skip(f"needs {library}")
    imports, base, rest = PROGRAMS[library]
    source = imports + BEGIN.replace("BASE", base) + rest
    (tmp_path / "train.py").write_text(source)
    command = [
        sys.executable,
        "-m",
        "recperf",
        "profile",
        "--script",
        "train.py",
        "--no-peaks",
        "--no-report",
        "--no-try",
    ]
    command += ["--run-dir", "profile", "--", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    profile = recperf.load(tmp_path / "profile" / "profile.json")

    def line(mark: str) -> int:
        return next(at for at, text in enumerate(source.splitlines(), 1) if text.endswith(mark))

    if ranks == 1:
        assert (profile.places[0].file, profile.places[0].line) == ("train.py", line("# SLOW"))
    else:
        assert (profile.ranks.ranks, profile.ranks.slowest) == (2, 1)
        assert profile.ranks.why.startswith(f"train.py:{line('# LATE')} in training_step takes ")
