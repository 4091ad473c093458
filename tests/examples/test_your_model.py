"""The Python examples of docs/your-model.md run as they stand; tests/docs runs its commands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import recperf
from recperf.execution import step_profile
from recperf.measure import schedule

PAGE = (Path(__file__).parents[2] / "docs" / "your-model.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    every = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    return [text for kind, text in every if kind == language]


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(schedule, "PLAIN_SECONDS", 0.01)
    monkeypatch.setattr(step_profile.machine_peaks, "require", lambda threads, say: None)
    monkeypatch.setattr(step_profile, "run_experiments", lambda *arguments, **options: [])


def test_the_python_examples(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    for source in blocks("python"):
        exec(source, names)
    report = names["report"]
    assert sum(report.shares.values()) == pytest.approx(1)
    assert {part.name for part in report.parts} >= {"0", "2", "optimizer Adam.step"}
    assert names["same"] == report
    assert Path("profile.html").exists()
    assert report.verdict.limit in capsys.readouterr().out
    assert set(recperf.__all__) >= {"profile", "Profiler", "load"}
