"""Every C body is compiled, cached for all users of the cache folder, and checked by `recperf doctor`."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from recperf import doctor
from recperf.ops import compile, native_bodies
from recperf.ops.relu import native as relu

pytestmark = pytest.mark.skipif(isinstance(relu.library(), str), reason=str(relu.library()))
SOURCE = "int answer(void) { return 42; }"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(compile, "home", lambda: tmp_path / "cache")
    file = tmp_path / "an_op" / "native.c"
    file.parent.mkdir()
    file.write_text(SOURCE)
    return file


def test_every_body_passes_its_own_check() -> None:
    folders = Path(native_bodies.__file__).parent.glob("*/native.c")
    assert native_bodies.names() == sorted(file.parent.name for file in folders)
    assert {name: native_bodies.problem(name) for name in native_bodies.names()} == dict.fromkeys(native_bodies.names())


def test_other_users_can_read_a_library_compiled_under_a_private_umask(source: Path, tmp_path: Path) -> None:
    previous = os.umask(0o077)
    try:
        library = compile.load(source, {"answer": []})
    finally:
        os.umask(previous)
    assert not isinstance(library, str)
    folder = tmp_path / "cache" / "native"
    assert [oct(path.stat().st_mode & 0o777) for path in (folder, *folder.iterdir())] == ["0o755", "0o755"]


def test_reasons_why_a_body_cannot_be_used(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source.write_text("int answer(void) { return 42 }")
    assert "failed: " in str(compile.load(source, {}))
    source.unlink()
    assert "No such file" in str(compile.load(source, {}))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert compile.load(source, {}) == "no C compiler on this machine"
    with pytest.raises(compile.MachineError, match="the C body cannot be used: no C compiler"):
        compile.usable("no C compiler")


def test_doctor_names_the_body_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.c_code().state == doctor.OK

    def wrong() -> None:
        raise AssertionError("Tensor-likes are not close!")

    monkeypatch.setattr(relu, "self_check", wrong)
    finding = doctor.c_code()
    assert (finding.state, finding.found) == (doctor.MISSING, "relu: wrong result: Tensor-likes are not close!")
    monkeypatch.setattr(relu, "library", lambda: "cc failed: no such file")
    assert doctor.c_code().found == "relu: cc failed: no such file"
