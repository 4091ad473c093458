"""Changes as edits of a program's source, and as a patch."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from recperf.execution.program_edits import diff, edited

IMPORTS = "import torch\nfrom torch.utils.data import DataLoader as Batches\nfrom torch import optim\n"


@pytest.mark.parametrize(
    ("settings", "line", "expected"),
    [
        ({"workers": 2}, "x = Batches(rows, 4)", "x = Batches(rows, 4, num_workers=2, persistent_workers=True)"),
        (
            {"workers": 0},
            "x = Batches(rows, num_workers=8)",
            "x = Batches(rows, num_workers=0, persistent_workers=False)",
        ),
        (
            {"workers": 2},
            "x = Batches((rows), 4, None, None, None, 0)",
            "x = Batches((rows), 4, None, None, None, 2, persistent_workers=True)",
        ),
        (
            {"workers": 2},
            "for x in Batches(\n    rows,  # é (\n):\n    pass",
            "for x in Batches(\n    rows, num_workers=2, persistent_workers=True,  # é (\n):\n    pass",
        ),
        ({"workers": 2}, "x = Batches((rows))", "x = Batches((rows), num_workers=2, persistent_workers=True)"),
        ({"batch_size": 8}, "x = Batches(rows, 4)", "x = Batches(rows, 8)"),
        ({"workers": 2}, "x = Batches()", "x = Batches(num_workers=2, persistent_workers=True)"),
        ({"workers": 2}, "x = Batches(rows, **options)", None),
        ({"workers": 2}, "x = DataLoader(rows)", None),
        (
            {"pinned": True},
            "x = torch.utils.data.DataLoader(rows)",
            "x = torch.utils.data.DataLoader(rows, pin_memory=True)",
        ),
        (
            {"optimizer": "fused"},
            "o = optim.Adam(m.parameters(), lr=1)",
            "o = optim.Adam(m.parameters(), lr=1, fused=True)",
        ),
        ({"optimizer": "fused"}, "o = Adam(m.parameters())", None),
        ({"threads": 1}, "torch.set_num_threads(8)", "torch.set_num_threads(1)"),
        ({"threads": 1}, "x = 1", "torch.set_num_threads(1)\nx = 1"),
        ({"tf32": True}, "x = 1", 'torch.set_float32_matmul_precision("high")\nx = 1'),
        (
            {"compile": True},
            "if x:\n    o = optim.SGD(self.model.parameters())  # y",
            "if x:\n    o = optim.SGD(self.model.parameters())  # y\n    self.model.compile()",
        ),
        (
            {"compile": True},
            "o = optim.SGD(m.parameters()); o.step()",
            "o = optim.SGD(m.parameters()); o.step()\nm.compile()",
        ),
        ({"compile": True}, "class M:\n    def compile(self): pass\no = optim.SGD(m.parameters())", None),
        ({"sparse": [[4, 4]]}, "x = torch.nn.Embedding(4, 4)", None),
    ],
)
def test_a_change_is_an_edit(settings: dict[str, Any], line: str, expected: str | None) -> None:
    text, made = edited(f"{IMPORTS}{line}\n", settings)
    assert text == f"{IMPORTS}{expected or line}\n"
    assert made == (set(settings) if expected else set())


def test_a_source_without_torch_or_that_does_not_parse_stays() -> None:
    for source in ("", "x = 1\n", "def f(:\n", "from torch import optim\n"):
        assert edited(source, {"threads": 1, "workers": 1, "compile": True}) == (source, set())


@pytest.mark.parametrize("end", ["\n", "", "\r\n"])
def test_git_applies_the_diff(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    monkeypatch.chdir(tmp_path)
    source = IMPORTS.replace("\n", "\r\n" if end == "\r\n" else "\n") + f"x = Batches(rows){end}"
    file = tmp_path / "sub" / "train.py"
    file.parent.mkdir()
    file.write_bytes(source.encode())
    after, made = edited(source, {"workers": 1, "threads": 1})
    assert made == {"workers", "threads"}
    Path("a.patch").write_bytes(diff(file, source, after).encode())
    subprocess.run(["git", "apply", "a.patch"], check=True, capture_output=True)
    assert file.read_bytes() == after.encode()
