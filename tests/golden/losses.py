"""The first 50 losses of each workload's default preset on embedded data, as float hex.

python tests/golden/losses.py [WORKLOAD ...]      writes them anew, after a change that moves them on purpose
"""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch

from recperf.train.config import PLAIN
from recperf.train.device import applied
from recperf.train.loop import Position, train
from recperf.workloads import WORKLOADS, find

FOLDER = Path(__file__).parent / "losses"
COUNT = 50


class Collect:
    """Collects the losses of a training."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def before_epoch(self) -> None: ...

    def before_step(self, step: int) -> None: ...

    def after_step(self, position: Position, loss: torch.Tensor, samples: int) -> None:
        self.losses.append(float(loss))

    def after_epoch(self, position: Position) -> None: ...


def losses(name: str) -> list[float]:
    workload = find(name)
    config = next(iter(workload.presets.values()))()
    config = replace(config, train=replace(config.train, max_steps=COUNT, device="cpu"))
    if name == "dlrm":
        # The default's data and steps on a model small enough for a test; plain torch, whatever compiler there is.
        model = replace(config.model, dim=16, bottom=(64, 64, 16), top=(128, 64, 1))
        config = replace(config, train=replace(config.train, batch_size=256, threads=1))
        config = replace(config, model=model, fast=PLAIN)
    elif name in ("hstu", "next-item"):
        config = replace(config, data=replace(config.data, users=400))
        config = replace(config, train=replace(config.train, batch_size=16, threads=1))
    elif name == "dlrm-v4":
        # The default's model on few events and short histories.
        history = replace(config.data.history, length=20, scan=100)
        config = replace(config, data=replace(config.data, events=6_000, history=history))
        config = replace(config, train=replace(config.train, batch_size=16, threads=1))
    else:
        config = replace(config, data=replace(config.data, source="embedded"))
    if name == "micro-dlrm-dram":
        # The default's arithmetic on a table small enough for a test; plain torch, whatever compiler a machine has.
        config = replace(config, model=replace(config.model, rows=20_000, dim=32, bag="reference"))
        config = replace(config, train=replace(config.train, threads=1))
    prepared = workload.prepare(config)
    torch.manual_seed(config.seed)
    with applied(prepared.settings):
        watch = Collect()
        train(prepared.trial(config.seed).recipe, Position(), watch)
    return watch.losses


def platform_facts() -> dict[str, str]:
    """The facts that exact equality depends on."""
    return {
        "architecture": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__.split("+")[0],
        "compiler": compiler(),
    }


def compiler() -> str:
    """The version of the compiler of the C ops."""
    path = shutil.which("cc")
    if path is None:
        return "none"
    return subprocess.run([path, "-dumpfullversion"], capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    for name in sys.argv[1:] or WORKLOADS:
        value = {"platform": platform_facts(), "losses": [loss.hex() for loss in losses(name)]}
        (FOLDER / f"{name}.json").write_text(json.dumps(value, indent=1) + "\n")
        print(f"{name}: {losses(name)[0]:.6f} ... {losses(name)[-1]:.6f}")
