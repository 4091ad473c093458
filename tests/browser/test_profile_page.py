"""The page of a profile in a real browser: a phone and a screen, light and dark."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from recperf.runs.report.profile_report import write_page


def _neighbour(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


chromium, folders, profiles = _neighbour("chromium"), _neighbour("folders"), _neighbour("profiles")

pytestmark = pytest.mark.skipif(chromium.BINARY is None, reason="no Chromium here: apt-get install chromium")

FIGURES = {"cpu": 4, "eager": 6, "graph": 4, "budget": 2, "ranks": 4}


@pytest.mark.parametrize("name", FIGURES)
@pytest.mark.parametrize(("width", "dark"), [(375, True), pytest.param(1440, False, marks=pytest.mark.long)])
def test_nothing_is_cut_off_or_written_over(tmp_path: Path, name: str, width: int, dark: bool) -> None:
    made = write_page(getattr(profiles, name)(), folders.peaks(), folders.MACHINE, tmp_path / "profile.html")
    found = chromium.measure(made, tmp_path, width=width, dark=dark)
    assert found["inner"] == width
    assert found["dark"] is dark
    assert found["scroll"] <= width, "the page is wider than the screen"
    for fault in ("outside", "empty", "small", "clipped", "wide", "overlaps", "errors", "resources"):
        assert found[fault] == [], fault
    for count in ("links", "broken", "unnamed"):
        assert found[count] == 0, count
    assert found["svgs"] == FIGURES[name]
