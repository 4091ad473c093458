"""Kernels stand alone: importing them loads neither the rest of recperf nor its libraries; docs/kernels.md is true."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import torch

IMPORTS = """
import importlib, pkgutil, sys
import torch
before = set(sys.modules)
import recperf.ops
for one in pkgutil.walk_packages(recperf.ops.__path__, "recperf.ops."):
    if "triton" not in one.name and "kernels" not in one.name:
        importlib.import_module(one.name)
loaded = set(sys.modules) - before
print(" ".join(sorted({name.split(".")[1] for name in loaded if name.startswith("recperf.")} - {"ops"})))
print(" ".join({name.split(".")[0] for name in loaded} & {"pyarrow", "rich", "tyro", "duckdb", "jinja2"}))
"""


def test_importing_all_ops_loads_few_small_modules_of_recperf_and_none_of_its_libraries() -> None:
    result = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stderr
    rooms, libraries = result.stdout.split("\n")[:2]
    small = "config errors files folders jsonfile machine places stop units version"
    assert set(rooms.split()) <= set(small.split())
    assert libraries == ""


def test_the_code_of_the_page_about_kernels_runs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text()
    names: dict[str, torch.Tensor] = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(block, names)
    for name in ("q", "k", "v", "x"):
        grad = names[name].grad
        assert grad is not None
        assert torch.isfinite(grad).all()
    used = names["state"].nonzero().flatten().tolist()
    assert used == [3, 7, 99, 100, 299]
    assert names["dto_uvqk"].shape == names["to_uvqk"].shape
