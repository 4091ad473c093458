"""Damaged and forged checkpoints are reported in one line and an older one is used; machine errors are not damage."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_states import FILE, state, store, value_of

from recperf.errors import MachineError
from recperf.files import sha256
from recperf.train import checkpoint_folder
from recperf.train.checkpoint import CheckpointStore


def mutations(folder: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    """Every way one file of a checkpoint can be wrong."""
    files = sorted(path for path in folder.iterdir())
    for file in files:
        content = file.read_bytes()
        length = len(content)
        for at in sorted({0, 1, length // 3, length // 2, length - 2, length - 1}):
            for bit in (1, 0x80):
                changed = content[:at] + bytes([content[at] ^ bit]) + content[at + 1 :]
                yield f"{file.name} flipped at {at}", lambda file=file, new=changed: file.write_bytes(new)
        for end in (0, length // 2, length - 1):
            yield f"{file.name} cut at {end}", lambda file=file, end=end: os.truncate(file, end)
        yield f"{file.name} longer", lambda file=file, content=content: file.write_bytes(content + b"\n")
        yield f"{file.name} deleted", file.unlink
        yield f"{file.name} renamed", lambda file=file: file.rename(file.with_name("other"))
        yield f"{file.name} a folder", lambda file=file: (file.unlink(), file.mkdir())
        yield f"{file.name} a link", lambda file=file: (file.unlink(), file.symlink_to("/dev/null"))
        for other in files:
            if other > file:
                swapped = (other.read_bytes(), content)
                yield (
                    f"{file.name} and {other.name} swapped",
                    lambda file=file, other=other, new=swapped: (file.write_bytes(new[0]), other.write_bytes(new[1])),
                )
    yield "one more", lambda: (folder / "more").write_bytes(b"")
    yield "one more folder", lambda: (folder / "more").mkdir()
    older = folder.with_name("step-00000010")
    for name in (path.name for path in files):
        yield f"{name} of an older one", lambda name=name: shutil.copy(older / name, folder / name)
    yield "all of an older one", lambda: (shutil.rmtree(folder), shutil.copytree(older, folder))


def test_every_change_of_every_file_is_detected_and_the_older_one_used(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "work"
    checkpoints, _ = store(first, keep_last=2)
    checkpoints.save(10, {**state(10), "longer": torch.zeros(50)}, best=True)
    checkpoints.save(20, state(20), best=False)
    count = len(list(mutations(first / "step-00000020")))
    assert count > 40
    for number in range(count):
        shutil.rmtree(second, ignore_errors=True)
        shutil.copytree(first, second)
        what, mutate = list(mutations(second / "step-00000020"))[number]
        mutate()
        again, notices = store(second)
        assert value_of(again) == 10, what
        assert notices[0].startswith("checkpoint step-00000020 is damaged ("), what
        assert "\n" not in notices[0]


def rewritten(folder: Path, change: Callable[[dict[str, Any]], Any] = lambda body: None) -> None:
    """Change the manifest and make its digests fit, as somebody who forges a checkpoint would."""
    body = json.loads((folder / "manifest.json").read_text())
    body.pop("sha256")
    for name, stated in body["files"].items():
        stated.update(bytes=(folder / name).stat().st_size, sha256=sha256(folder / name))
    change(body)
    (folder / "manifest.json").write_bytes(checkpoint_folder.manifest_bytes(body))


@pytest.fixture
def two(tmp_path: Path) -> Path:
    checkpoints, _ = store(tmp_path, keep_last=2)
    checkpoints.save(10, state(10), best=False)
    checkpoints.save(20, state(20), best=False)
    return tmp_path / "step-00000020"


def refused(folder: Path, reason: str) -> None:
    """The forged checkpoint is refused in one line, and the older one used."""
    again, notices = store(folder.parent, keep_last=2)
    again._prune = lambda newest: None  # type: ignore[method-assign]
    assert value_of(again) == 10
    assert notices[0].startswith(f"checkpoint {folder.name} is damaged (")
    assert reason in notices[0]
    assert "\n" not in notices[0]


def test_forged_files_are_refused(two: Path) -> None:
    """A header that is none or names other bytes, and a manifest that names other files, sizes or places."""
    file = two / FILE
    manifest, content = (two / "manifest.json").read_bytes(), file.read_bytes()
    moved = content.replace(b'"data_offsets": [0, ', b'"data_offsets": [8, ', 1)
    for changed, reason in [
        (b"nonsense" + content, "has a header of"),
        (content[:8] + content[8:].replace(b"F32", b"I32", 1), "is I32 [20000], not torch.float32"),
        (content[:-100], "cannot be at bytes"),
        (moved, "cannot be at bytes 8"),
    ]:
        file.write_bytes(changed)
        rewritten(two)
        refused(two, reason)
    file.write_bytes(content)
    secret = two.parent / "secret.safetensors"
    shutil.copy(file, secret)
    facts = {"bytes": secret.stat().st_size, "sha256": sha256(secret)}

    def shard(**changes: Any) -> Callable[[dict[str, Any]], None]:
        return lambda body: body["tensors"]["table"]["shards"][0].update(changes)

    changes: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
        (lambda body: body["files"].update({"../secret.safetensors": facts}), "invalid file '../secret.safetensors'"),
        (lambda body: body["files"].update({str(secret): facts}), "has an invalid file"),
        (shard(file="../secret.safetensors"), "'../secret.safetensors' is not a file of this checkpoint"),
        (shard(place=[0, 10_000, 0, 1]), "are incomplete or stored twice"),
        (lambda body: body["tensors"]["table"].update(shape=[1 << 60]), "is larger than the files of this checkpoint"),
        (lambda body: body.update(state=[]), "its state is not a JSON object"),
        (lambda body: body.update(step="20"), "step should be an integer, is '20'"),
        (lambda body: body.update(format=3), "it has format 3; this version reads format 6"),
    ]
    for change, reason in changes:
        (two / "manifest.json").write_bytes(manifest)
        rewritten(two, change)
        refused(two, reason)


@pytest.fixture
def saved(tmp_path: Path) -> CheckpointStore:
    store = CheckpointStore(folder=tmp_path, notice=pytest.fail, keep_last=2)
    for step in (1, 2):
        store.save(step, {"weights": torch.full((3,), float(step))}, best=False)
    return store


def loads_later(store: CheckpointStore) -> None:
    """The newest checkpoint still exists and loads without a notice."""
    state = store.load()
    assert state is not None
    assert state["weights"].tolist() == [2.0, 2.0, 2.0]
    assert len(store.saved()) == 2


@pytest.mark.parametrize("function", ["os.preadv", "recperf.train.checkpoint_folder.digest_of"])
def test_read_errors_are_not_damage(saved: CheckpointStore, monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ESTALE, "no")

    with monkeypatch.context() as failing:
        failing.setattr(function, refuse)
        with pytest.raises(MachineError, match="checkpoint step-00000002 cannot be read: no"):
            saved.load()
    loads_later(saved)
