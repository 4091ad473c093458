"""The workflows call what a developer calls: targets of the Makefile, each of which exists, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_calls_targets_that_exist(path: Path) -> None:
    workflow: dict[str, Any] = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        assert job["timeout-minutes"] <= 350, name
        runs = [step["run"] for step in job["steps"] if "run" in step]
        assert runs, name
        for run in runs:
            called = re.fullmatch(r"make ([a-z-]+)( [A-Z]+=\S+.*)?", run)
            assert run == ".ci/run" or (called and called[1] in TARGETS), run


def test_both_processors_and_all_versions_of_python_are_tried() -> None:
    (tests,) = (yaml.safe_load(path.read_text()) for path in WORKFLOWS if path.stem == "tests")
    matrix = tests["jobs"]["test"]["strategy"]["matrix"]
    assert matrix == {"machine": ["ubuntu-24.04", "ubuntu-24.04-arm"], "python": ["3.11", "3.12", "3.13"]}
