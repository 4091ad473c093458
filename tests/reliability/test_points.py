"""dlrm-v4 killed at every named moment of a save, a prune, a window's change and an evaluation."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from killable import KILLED
from tiny_v4 import begin, finish, outcome, resume, straight

from recperf import points

LATER = {"save": 6, "prune": 5, "window": 3, "evaluation": 4}
"""By the first word of a name: which passing of it, beside the first, ends a process too."""
MOMENTS = [(name, nth) for name in points.NAMES for nth in (1, LATER[name.split(":")[0]])]
"""Every name there is: one that no run passes fails its test."""
ASIDE = "save: damaged one set aside"


@pytest.mark.parametrize(("name", "nth"), [moment for moment in MOMENTS if moment[0] != ASIDE])
def test_a_kill_at_every_named_moment(name: str, nth: int, tmp_path: Path) -> None:
    folder, mark = tmp_path / "run", tmp_path / "mark"
    process = begin(folder, ("kill_at", {"point": name, "nth": nth, "mark": str(mark)}))
    assert process.wait() == KILLED, f"no run passes {name!r} {nth} times\n{process.output}"
    assert mark.read_text() == name
    finish(folder)
    assert outcome(folder) == straight().outcome


@pytest.mark.parametrize("damaged", [1, 2])
def test_a_kill_while_a_damaged_checkpoint_makes_room(damaged: int, tmp_path: Path) -> None:
    """It passes only where the step of a damaged checkpoint is reached again; the next save takes away the others."""
    folder, mark = tmp_path / "run", tmp_path / "mark"
    first = begin(folder, ("kill_at", {"point": "save: indexed", "nth": 8, "mark": str(mark)}))
    assert first.wait() == KILLED, first.output
    newest = sorted((folder / "checkpoints" / "seed-42").glob("step-*"))[-damaged:]
    for path in newest:
        (path / "rank0-00000.safetensors").write_bytes(b"{}")
    process = resume(folder, ("kill_at", {"point": ASIDE, "nth": 1, "mark": str(mark)}))
    assert process.wait() == KILLED, process.output
    assert mark.read_text() == ASIDE
    for path in newest:
        assert f"checkpoint {path.name} is damaged (rank0-00000.safetensors has 2 bytes" in process.output
    assert "the newest intact one" in process.output
    finish(folder)
    assert outcome(folder) == straight().outcome


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
@pytest.mark.parametrize("nth", [1, 3])
def test_signals_in_the_middle_of_a_window_save_and_say_how_to_go_on(
    number: int, code: int, nth: int, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    process = begin(folder, ("signal_at", {"point": "window: entered", "nth": nth, "number": number}))
    assert process.wait() == code, process.output
    # The window's first batch is trained on, and no more.
    step = {1: 4, 3: 11}[nth]
    assert f"at step {step} of 20; the state is saved" in process.output
    assert f"recperf run --resume {folder}" in process.output
    assert "Traceback" not in process.output
    assert (folder / "checkpoints" / "seed-42" / f"step-{step:08d}").is_dir()
    finish(folder)
    assert outcome(folder) == straight().outcome
