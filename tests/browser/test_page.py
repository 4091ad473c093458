"""The pages of runs and profiles in a real browser: phone and screen, light and dark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import chromium
import example_profiles as profiles
import example_runs as examples
import example_traces as traces
import pytest
from msgspec import convert

from recperf.measure.peaks.records import Peaks
from recperf.measure.profile_records import Profile
from recperf.measure.trace_evidence import analyse_file
from recperf.runs.report import run_report, trace_report
from recperf.runs.report.profile_report import write_page

pytestmark = pytest.mark.skipif(chromium.BINARY is None, reason="no Chromium here: apt-get install chromium")

FIGURES = {"eager": 4, "ranks": 4}
"""How many figures the page of each example profile has."""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("pages")
    full = examples.make_run(home / "micro-dlrm-20261115-031500-a1b2c3", seeds=3)
    bare = examples.make_run(home / "micro-dlrm-20261115-031500-d4e5f6", measured=(), steps=40)
    large = examples.make_run(home / "large", workload="micro-dlrm-dram")
    examples.change(large, "profile.json", "ids.touched_bytes", int(1.7e9))
    examples.change(large, "profile.json", "ids.working_set_bytes", int(2.05e9))
    return {
        "full": run_report.write([full], home / "full.html"),
        "bare": run_report.write([bare], home / "bare.html"),
        "large": run_report.write([large], home / "large.html"),
        "compared": run_report.write([full, bare, large], home / "compared.html"),
    }


def sound(measured: dict[str, Any], width: int) -> None:
    assert measured["inner"] == width
    assert measured["scroll"] <= width, "the page is wider than the screen"
    for fault in ("outside", "empty", "small", "clipped", "wide", "overlaps", "errors", "resources"):
        assert measured[fault] == [], fault
    for count in ("links", "broken", "unnamed"):
        assert measured[count] == 0, count


@pytest.mark.parametrize(("width", "dark"), [(375, False), (1440, True)])
def test_the_full_page(pages: dict[str, Path], tmp_path: Path, width: int, dark: bool) -> None:
    measured = chromium.measure(pages["full"], tmp_path, width=width, dark=dark)
    sound(measured, width)
    assert measured["dark"] is dark
    assert measured["svgs"] == 6
    assert measured["texts"] > 70


@pytest.mark.parametrize(("name", "width"), [("bare", 1440), ("large", 375), ("compared", 375)])
def test_other_pages(pages: dict[str, Path], tmp_path: Path, name: str, width: int) -> None:
    measured = chromium.measure(pages[name], tmp_path, width=width, dark=width == 375)
    sound(measured, width)
    assert measured["svgs"] >= 2


@pytest.mark.parametrize(("name", "width"), [("eager", 375), ("ranks", 1440)])
def test_profile_pages(tmp_path: Path, name: str, width: int) -> None:
    profile, peaks = convert(getattr(profiles, name)(), Profile), convert(examples.peaks(), Peaks)
    page = write_page(profile, peaks, examples.MACHINE, tmp_path / "profile.html")
    measured = chromium.measure(page, tmp_path, width=width, dark=width == 375)
    sound(measured, width)
    assert measured["svgs"] == FIGURES[name]


@pytest.mark.parametrize("dark", [False, True])
def test_colours_can_be_read(pages: dict[str, Path], tmp_path: Path, dark: bool) -> None:
    colours = chromium.measure(pages["bare"], tmp_path, width=1440, dark=dark)["colours"]
    for name in ("ink", "muted", "accent", "good", "bad", "warning", "embedding"):
        assert contrast(colours[name], colours["paper"]) >= 4.5, name
    for name in ("ink", "muted"):
        assert contrast(colours[name], colours["raised"]) >= 4.5, name
    for name in set(colours) - {"paper", "raised", "ink", "muted", "accent", "good", "bad", "warning", "on-fill"}:
        assert contrast(colours["on-fill"], colours[name]) >= 4.5, f"words on {name}"
        assert contrast(colours["paper"], colours[name]) >= 3, f"{name} on the page"


def contrast(one: str, other: str) -> float:
    """The ratio of WCAG 2."""
    bright, dim = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_the_probe_sees_faults(pages: dict[str, Path], tmp_path: Path) -> None:
    """A check that can only pass would prove nothing."""
    broken = pages["full"].read_text()
    broken = broken.replace("<main>", '<main><div style="width: 3000px">wide</div><img src="http://127.0.0.1:9/x">', 1)
    broken = broken.replace('text-anchor: end"', 'text-anchor: end" dx="900"').replace("<text ", '<text dx="-900" ', 40)
    broken = broken.replace("</main>", "<script>console.error('oh'); missing()</script></main>", 1)
    (tmp_path / "broken.html").write_text(broken)
    measured = chromium.measure(tmp_path / "broken.html", tmp_path, width=1440, dark=False)
    assert measured["scroll"] > 1440
    for fault in ("outside", "wide", "resources"):
        assert measured[fault], fault
    assert "oh" in measured["errors"]
    assert any("missing" in error for error in measured["errors"])


def test_the_page_of_a_trace(tmp_path: Path) -> None:
    events = [*traces.gpu_step(0, 0.0, 10), *traces.gpu_step(1, 1000.0, 20)]
    path = traces.write(tmp_path / "trace.json.gz", events)
    page = trace_report.write_page(analyse_file(path), tmp_path / "trace.html")
    measured = chromium.measure(page, tmp_path, width=390, dark=False)
    sound(measured, 390)
    assert measured["svgs"] == 2
