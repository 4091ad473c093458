"""Commands that meet damaged stores, missing packages, full disks and each other: one line, and the right exit code."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from recperf import locations
from recperf.data import datasets
from recperf.errors import MachineError
from recperf.execution import exporting
from recperf.files import writing
from recperf.folders import alone

Call = Callable[..., tuple[int, str, str]]
BLOCKED = """import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in sys.stdlib_module_names | {"recperf", "sitecustomize"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
"""
LOG = "u,i,t\n" + "".join(f"{row % 7},{row % 11},{row}\n" for row in range(200))
CLICKS = "u,i,c\n" + "".join(f"{row % 7},{row % 11},{row % 2}\n" for row in range(200))
EVENTS = ("data", "import", "log.csv", "--user", "u", "--item", "i", "--time", "t", "--quiet")
ROWS = ("data", "import", "clicks.csv", "--clicks", "--label", "c", "--user", "u", "--item", "i", "--quiet")


@pytest.fixture
def files(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECPERF_HOME", str(Path("home").absolute()))
    Path("log.csv").write_text(LOG)
    Path("clicks.csv").write_text(CLICKS)


def replace(path: Path, how: str) -> None:
    path.unlink()
    if how == "folder":
        path.mkdir()
    elif how == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(path)


@pytest.mark.parametrize("how", ["folder", "fifo", "link to itself"])
def test_every_file_of_an_event_store_that_is_no_file_is_named(call: Call, files: None, how: str) -> None:
    assert call(*EVENTS, "--name", "shop")[0] == 0
    store = datasets.find("shop").folder
    assert store is not None
    for path in sorted(path for path in store.iterdir() if path.name != ".recperf"):
        content = path.read_bytes()
        replace(path, how)
        code, _, err = call("data", "check", "yambda-like", "--path", store)
        assert code == 3, (path.name, err)
        assert path.name in err
        assert err.count("error:") == 1
        path.rmdir() if how == "folder" else path.unlink()
        path.write_bytes(content)


@pytest.mark.parametrize("blocked", ["doctor", "run"])
def test_doctor_starts_with_the_standard_library_alone(tmp_path: Path, blocked: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(BLOCKED)
    paths = os.pathsep.join([str(tmp_path), str(Path(locations.__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, "-m", "recperf", blocked], cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 4, done.stderr
    assert "Traceback" not in done.stderr
    if blocked == "doctor":
        assert "not installed: msgspec, numpy, rich, torch, tyro" in done.stdout
        assert "huggingface_hub not installed; recperf data get needs it for events" in done.stdout
    else:
        assert done.stderr.count("error:") == 1
        assert "is not installed" in done.stderr


def test_doctor_refuses_unknown_options_in_our_words(call: Call) -> None:
    code, _, err = call("doctor", "--jsno")
    assert code == 2
    assert "unknown option '--jsno'; did you mean '--json'?" in err


@pytest.mark.parametrize(("first", "second"), [(EVENTS, ROWS), (ROWS, EVENTS)])
def test_of_two_imports_of_one_name_one_wins(call: Call, files: None, first: Any, second: Any) -> None:
    with alone(locations.dataset_folder("shop"), what="importing shop"):
        code, _, err = call(*first, "--name", "shop")
        assert code == 4
        assert "another process is importing shop" in err
    assert call(*first, "--name", "shop")[0] == 0
    code, _, err = call(*second, "--name", "shop")
    assert code == 3
    assert "there is a dataset 'shop' of" in err


def test_a_name_that_another_import_took_meanwhile_is_refused(
    call: Call, files: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other import ends after the first look at the name, before the lock."""
    original, done = alone, list[int]()

    @contextmanager
    def late(folder: Path, **options: Any) -> Any:
        if not done:
            done.append(0)
            done.append(call(*ROWS, "--name", "shop")[0])
        with original(folder, **options):
            yield

    monkeypatch.setattr("recperf.data.importing.alone", late)
    code, _, err = call(*EVENTS, "--name", "shop")
    assert done == [0, 0]
    assert code == 3
    assert "there is a dataset 'shop' of clicks already" in err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_an_export_on_a_full_disk_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch import nn, ones

    # What the process writes does not matter here, and tracing it takes seconds.
    content = "import io, sys\n_, given, path, logits, *_ = sys.argv\ncontent = outcome = io.BytesIO(b'program')\ntry:"
    monkeypatch.setattr(exporting, "TRACE", content + exporting.TRACE.partition("\ntry:")[2])
    inputs = {"input": ones(31, 3)}
    with pytest.raises(OSError, match="No space left") as refused:
        exporting._trace(nn.Linear(3, 1), inputs, inputs, Path("/dev/full"), None)
    assert refused.value.errno == errno.ENOSPC
    with pytest.raises(MachineError, match="the disk is full"), writing(tmp_path / "exported"):
        raise refused.value
