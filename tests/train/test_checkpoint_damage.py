"""Whatever happens to a file of a checkpoint is found, said in a line, and the older checkpoint is used."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from recperf.errors import DataError
from recperf.train import checkpoint_folder
from recperf.train.checkpoint import CheckpointStore


def store(folder: Path, **fields: Any) -> tuple[CheckpointStore, list[str]]:
    said: list[str] = []
    return CheckpointStore(folder=folder, notice=said.append, **fields), said


def state(value: int) -> dict[str, Any]:
    return {"weights": torch.arange(100) * value, "table": torch.full((20_000,), float(value)), "value": value}


def value_of(checkpoints: CheckpointStore) -> int:
    found = checkpoints.load()
    assert found is not None
    assert torch.equal(found["weights"], torch.arange(100) * found["value"])
    assert found["table"].unique().tolist() == [found["value"]]
    return int(found["value"])


def flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


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


def test_every_mutation_of_every_file_is_found_and_the_older_one_used(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "work"
    checkpoints, _ = store(first, keep_last=2)
    checkpoints.save(10, {**state(10), "longer": torch.zeros(50)}, best=True)
    checkpoints.save(20, state(20), best=False)
    count = len(list(mutations(first / "step-00000020")))
    assert count > 80
    for number in range(count):
        shutil.rmtree(second, ignore_errors=True)
        shutil.copytree(first, second)
        what, mutate = list(mutations(second / "step-00000020"))[number]
        mutate()
        again, said = store(second)
        assert value_of(again) == 10, what
        assert said[0].startswith("checkpoint step-00000020 is damaged ("), what
        assert "\n" not in said[0]


def test_the_manifest_has_no_byte_that_may_change(tmp_path: Path) -> None:
    checkpoints, _ = store(tmp_path)
    checkpoints.save(10, state(10), best=True)
    file = tmp_path / "step-00000010" / "manifest.json"
    content = file.read_bytes()
    for at in range(len(content)):
        flip(file, at)
        assert checkpoint_folder.fault(file.parent, hashed=False) is not None, at
        file.write_bytes(content)
    assert CheckpointStore.fault(file.parent) is None


def resealed(folder: Path) -> None:
    """A manifest that fits whatever is there now."""
    body = json.loads((folder / "manifest.json").read_text())
    body.pop("sha256")
    for name, stated in body["files"].items():
        stated.update(bytes=(folder / name).stat().st_size, sha256=checkpoint_folder.sha256(folder / name))
    (folder / "manifest.json").write_bytes(checkpoint_folder.manifest_bytes(body))


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "state.json"])
def test_nonsense_whose_digests_hold_is_said_in_a_line(tmp_path: Path, name: str) -> None:
    checkpoints, said = store(tmp_path, keep_last=2)
    checkpoints.save(10, state(10), best=False)
    checkpoints.save(20, state(20), best=False)
    file = tmp_path / "step-00000020" / name
    content = file.read_bytes()
    for changed in (b"", b"nonsense", b"[]", b"{}", content[: len(content) // 2], content[:50] + content[60:]):
        file.write_bytes(changed)
        resealed(file.parent)
        said.clear()
        again = CheckpointStore(folder=tmp_path, notice=said.append, keep_last=2)
        again._prune = lambda newest: None  # type: ignore[method-assign]
        assert value_of(again) == 10
        assert said[0].startswith("checkpoint step-00000020 is damaged (it cannot be read: ")
        assert "\n" not in said[0]


def test_a_checkpoint_cannot_run_anything(tmp_path: Path) -> None:
    checkpoints, _ = store(tmp_path)
    checkpoints.save(10, state(10), best=False)

    class Evil:
        def __reduce__(self) -> Any:
            return (os.mkdir, (str(tmp_path / "harm"),))

    (tmp_path / "step-00000010" / ".metadata").write_bytes(pickle.dumps(Evil()))
    resealed(tmp_path / "step-00000010")
    with pytest.raises(DataError, match="mkdir has no place in a checkpoint"):
        checkpoints.load()
    assert not (tmp_path / "harm").exists()
