"""The script of the GitHub Action: it sees a slower commit, and raises no alarm about an equal one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import yaml

from recperf.measure import peaks
from recperf.measure.peaks import sampling

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".github" / "actions" / "measure"
PROGRAM = """import time

import torch

model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(10_000):
    optimizer.zero_grad()
    model(torch.ones(256, 64)).mean().backward()
    # Waiting takes as long beside other work, so that a busy machine does not decide the test.
    time.sleep(0.01 * REPEATS)
    optimizer.step()
"""


@pytest.fixture(scope="module")
def measure() -> ModuleType:
    spec = importlib.util.spec_from_file_location("recperf_measure", FOLDER / "measure.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def rounds(random: np.random.Generator, *, slower: float = 1.0, drift: float = 0.0, other_work: float = 0.0) -> Any:
    """Six rounds in turns on a machine whose speed varies between calls, and drifts or jumps meanwhile."""
    jump, at = (1 + drift * random.random(), random.integers(12)) if drift else (1.0, 0)
    pairs = []
    for number in range(6):
        order = (0, 1) if number % 2 == 0 else (1, 0)
        sides: list[Any] = [None, None]
        for place, side in enumerate(order):
            when = 2 * number + place
            speed = (slower if side else 1.0) * (1 + drift * when / 11) * (jump if when >= at else 1.0)
            parts = {}
            for name, ms in (("step", 10.0), ("embedding", 4.0), ("top", 3.0), ("loss", 0.6)):
                middle = ms * speed * random.lognormal(0, 0.05)
                width = middle * random.uniform(0.02, 0.1)
                parts[name] = {"p20": middle - width, "p50": middle, "p80": middle + width}
            components = [{"name": n, "ms": ms, "share": ms["p50"] / 10} for n, ms in parts.items() if n != "step"]
            sides[side] = {"workload": {"step_ms": parts["step"], "components": components}, "other_work": other_work}
        pairs.append(tuple(sides))
    return pairs


@pytest.mark.parametrize("drift", [0.0, 0.3, 1.0])
def test_equal_commits_raise_no_alarm(measure: ModuleType, drift: float) -> None:
    random = np.random.default_rng(1)
    states = [measure.judge(rounds(random, drift=drift), 0.05).state for _ in range(300)]
    assert states.count("slower") == 0
    assert states.count("same") > 295


def test_a_slower_commit_is_seen_through_noise(measure: ModuleType) -> None:
    random = np.random.default_rng(2)
    states = [measure.judge(rounds(random, slower=1.4), 0.05).state for _ in range(100)]
    assert states.count("slower") > 95
    states = [measure.judge(rounds(random, slower=1 / 1.4), 0.05).state for _ in range(100)]
    assert states.count("faster") > 90
    assert states.count("slower") == 0


def test_the_comment_is_a_table_and_harmless(measure: ModuleType) -> None:
    judgement = measure.judge(rounds(np.random.default_rng(4), slower=2), 0.05)
    text = measure.comment(judgement, ["--script", "a`b.py"], ("base", "head"))
    assert text.startswith(measure.MARK)
    assert "**recperf: slower: step +" in text
    assert len([line for line in text.splitlines() if line.startswith("| ")]) == 5
    assert text.count("`") == 2


def commit(repository: Path, repeats: int) -> None:
    (repository / "train.py").write_text(PROGRAM.replace("REPEATS", str(repeats)))
    git(repository, "add", "train.py")
    git(repository, "commit", "--allow-empty", "--quiet", "--message", f"{repeats} repeats")


def git(folder: Path, *arguments: str) -> str:
    names = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main")
    called = subprocess.run(["git", *names, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return called.stdout.strip()


@pytest.fixture
def checkouts(tmp_path: Path) -> tuple[Path, Path]:
    """Base and head of a small repository; `commit(head, N)` makes its last commit. Ceilings are those of a moment."""
    peaks.save(peaks.measure_with(sampling.TINY, quick=True, say=lambda text: None))
    repository = tmp_path / "repository"
    repository.mkdir()
    git(repository, "init", "--quiet")
    commit(repository, 1)
    git(repository, "worktree", "add", "--quiet", "--detach", str(tmp_path / "base"))
    return tmp_path / "base", repository


@pytest.mark.long
def test_two_commits(
    measure: ModuleType, checkouts: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One round of each, on however busy a machine: a step of the head waits eight times as long."""
    base, head = checkouts
    commit(head, 8)
    monkeypatch.setattr(measure, "FEWEST_ROUNDS", 1)
    monkeypatch.setattr(measure, "DISTURBED", 1.0)
    arguments = ["--base", base, "--head", head, "--arguments", "--script train.py", "--rounds", "1"]
    assert measure.main([str(word) for word in [*arguments, "--output", tmp_path / "out", "--gate", "5%"]]) == 5
    assert "recperf: slower: step +" in (tmp_path / "out" / "report.md").read_text()
    (base / "train.py").write_text("raise SystemExit(3)")
    assert measure.main([str(word) for word in [*arguments, "--output", tmp_path / "other"]]) == 0
    assert "not judged: a commit could not be profiled" in (tmp_path / "other" / "report.md").read_text()


def test_the_action_calls_the_script_on_both_commits(tmp_path: Path, checkouts: tuple[Path, Path]) -> None:
    """The steps of action.yml in a clone, with a stand-in for Python that notes its arguments and finds a slowdown."""
    action = yaml.safe_load((FOLDER / "action.yml").read_text())
    (step,) = action["runs"]["steps"]
    assert {f"${{{{ inputs.{name} }}}}" for name in action["inputs"]} <= set(step["env"].values())
    assert "${{" not in step["run"]
    _, origin = checkouts
    base = git(origin, "rev-parse", "HEAD")
    commit(origin, 2)
    git(tmp_path, "clone", "--quiet", str(origin), "clone")
    stand_in = tmp_path / "bin" / "python"
    stand_in.parent.mkdir()
    stand_in.write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/arguments; cat "$3/train.py" > {tmp_path}/base.py; exit 5\n'
    )
    stand_in.chmod(0o755)
    inputs = {
        "ARGUMENTS": "dlrm --seed 'a b'",
        "BASE": base,
        "COMMENT": "true",
        "GATE": "5%",
        "HERE": "here",
        "ROUNDS": "6",
    }
    for fail, code in (("true", 5), ("false", 0)):
        environment = {**os.environ, **inputs, "FAIL": fail, "RUNNER_TEMP": str(tmp_path), "GITHUB_TOKEN": ""}
        environment["PATH"] = f"{stand_in.parent}:{os.environ['PATH']}"
        called = subprocess.run(["bash", "-c", step["run"]], cwd=tmp_path / "clone", env=environment, check=False)
        assert called.returncode == code
    arguments = (tmp_path / "arguments").read_text().splitlines()
    assert arguments[arguments.index("--arguments") + 1] == "dlrm --seed 'a b'"
    assert arguments[-1] == "--comment"
    assert "sleep(0.01 * 1)" in (tmp_path / "base.py").read_text()


def test_the_workflow_of_the_page_fits_the_action() -> None:
    action = yaml.safe_load((FOLDER / "action.yml").read_text())
    page = (ROOT / "docs" / "github-action.md").read_text(encoding="utf-8")
    workflow = yaml.safe_load(page.partition("```yaml\n")[2].partition("```")[0])
    (step,) = [step for step in workflow["jobs"]["measure"]["steps"] if "measure" in step.get("uses", "")]
    assert (ROOT / step["uses"] / "action.yml").is_file()
    assert {name for name, given in action["inputs"].items() if given.get("required")} <= step["with"].keys()
    assert step["with"].keys() <= action["inputs"].keys()
    assert all(f"`{name}`" in page for name in action["inputs"])
