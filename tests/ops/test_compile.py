"""Every C body is compiled, cached with its digest, and passes its own check; kernels stand alone."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from recperf.ops import compile
from recperf.ops.mlp import native as relu

pytestmark = pytest.mark.skipif(isinstance(relu.library(), str), reason=str(relu.library()))
SOURCE = "int answer(void) { return 42; }"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(compile, "home", lambda: tmp_path / "cache")
    file = tmp_path / "an_op" / "native.c"
    file.parent.mkdir()
    file.write_text(SOURCE)
    return file


def test_every_body_compiles() -> None:
    folders = Path(compile.__file__).parent.glob("*/native.c")
    assert compile.native_ops() == sorted(file.parent.name for file in folders)
    assert {name: compile.native_problem(name) for name in compile.native_ops()} == dict.fromkeys(compile.native_ops())


@pytest.fixture
def cached(source: Path) -> Path:
    """The library of the source in the cache, which another process loads anew."""
    assert compile.load(source, {"answer": []}, {"answer": ctypes.c_int}).answer() == 42
    (path,) = (source.parents[1] / "cache" / "native").glob("*.so")
    # This process has mapped the file and would crash at its end if that were cut: tests damage a copy.
    shutil.copy2(path, path.with_suffix(".copy"))
    return path.with_suffix(".copy").replace(path)


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


def linked(path: Path) -> None:
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (flipped, "is damaged"),
        (linked, "is a link"),
        (lambda path: path.chmod(0o777), "can be written by other users"),
    ],
)
def test_a_damaged_library_is_compiled_again(
    cached: Path, source: Path, capfd: pytest.CaptureFixture[str], damage: Callable[[Path], None], fault: str
) -> None:
    damage(cached)
    script = f"""
import ctypes
from pathlib import Path
from recperf.ops import compile
compile.home = lambda: Path({str(source.parents[1] / "cache")!r})
print(compile.load(Path({str(source)!r}), {{"answer": []}}, {{"answer": ctypes.c_int}}).answer())"""
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
    out, notes = capfd.readouterr()
    assert (out, notes) == ("42\n", f"note: the compiled library {cached} {fault}: it is compiled again\n")
    assert stat.S_ISREG(cached.lstat().st_mode)
    assert cached.stat().st_mode & 0o777 == 0o755
    assert {path.suffix for path in cached.parent.iterdir()} <= {".so", ".moved", ""}


def test_a_library_of_another_user_is_not_loaded(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: cached.stat().st_uid + 1)
    monkeypatch.setattr(compile, "user_home", lambda: cached.parent / "own")
    if cached.stat().st_uid:
        assert compile._verified(cached) == "belongs to another user"
    assert compile.folder() == cached.parent / "own" / "native"


def test_reasons_why_a_body_cannot_be_used(
    source: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("recperf.errors.quiet", True)
    source.write_text("int answer(void) { return 42 }")
    assert re.match(r"the C compiler \S+cc failed with exit code 1: .*native.c:1.* error: ", compile.load(source, {}))
    assert [path.name for path in (source.parents[1] / "cache" / "native").iterdir()] == ["lock"]
    source.unlink()
    assert "No such file" in str(compile.load(source, {}))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert compile.load(source, {}) == "no C compiler on this machine"
    with pytest.raises(compile.MachineError, match="the C body cannot be used: no C compiler"):
        compile.usable("no C compiler")
    assert capfd.readouterr().err == ""


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


@pytest.mark.long
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
