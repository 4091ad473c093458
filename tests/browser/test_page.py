"""The pages of runs and profiles in a real browser: phone and screen, light and dark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chromium
import example_bench as benches
import example_profiles as profiles
import example_runs as examples
import example_traces as traces
import pytest
from msgspec import convert

from recperf.cli import main
from recperf.measure.peaks.records import Peaks
from recperf.measure.profile import StepProfile
from recperf.measure.trace_evidence import analyse_file
from recperf.runs import bench_report
from recperf.runs.report import page, trace_report
from recperf.runs.report.profiles import report_of
from recperf.runs.step_report import Report

pytestmark = pytest.mark.skipif(chromium.BINARY is None, reason="no Chromium here: apt-get install chromium")

FIGURES = {
    "full": 6, "bare": 2, "compared": 5, "eager": 5, "ranks": 5, "script": 2, "trace": 3, "plan": 1, "plans": 2,
    "bench": 2,
}  # fmt: skip
"""How many figures a page has, its timeline and those in folded parts included."""
SCREENS = 4 * 900


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page of every kind."""
    home = tmp_path_factory.mktemp("pages")
    full = examples.make_run(home / "micro-dlrm-20261115-031500-a1b2c3", seeds=3)
    bare = examples.make_run(home / "micro-dlrm-20261115-031500-d4e5f6", measured=(), steps=40)
    peaks = convert(examples.peaks(), Peaks)
    machine = {"machine": examples.MACHINE}
    profile = {name: convert(getattr(profiles, name)() | machine, StepProfile) for name in ("eager", "ranks")}
    trace = traces.write(home / "trace.json.gz", [*traces.gpu_step(0, 0.0, 10), *traces.gpu_step(1, 1000.0, 20)])
    plan = ("plan", "dlrm-v4", "--price", "3USD", "--quiet", "--out")
    assert main([*plan, str(home / "plan.html")]) == main([*plan, str(home / "plans.html"), "--gpu", "h200,b200"]) == 0
    return {
        "full": page.write(examples.page_of(full), home / "full.html"),
        "bare": page.write(examples.page_of(bare), home / "bare.html"),
        "compared": page.write(examples.page_of(full, bare), home / "compared.html"),
        **{name: page.save(report_of(one, peaks), home / f"{name}.html") for name, one in profile.items()},
        "script": of_program(profiles.eager()).page(home / "script.html"),
        "trace": page.save(report_of(analyse_file(trace), viewer=trace_report.viewer(trace)), home / "trace.html"),
        "bench": page.save(
            bench_report.report(benches.bench_of(home / "b"), bench_report.beside(home)), home / "bench.html"
        ),
        "plan": home / "plan.html",
        "plans": home / "plans.html",
    }


@pytest.fixture(scope="module")
def browser() -> Iterator[chromium.Browser]:
    with chromium.Browser() as running:
        yield running


def of_program(profile: dict[str, Any]) -> Report:
    """The profile of a program with the figures of a workload's."""
    return convert({**profile, "workload": None, "program": {"script": "train.py"}}, Report)


@pytest.mark.parametrize(("width", "dark"), [(390, False), (1280, True)])
def test_every_kind_of_page_fits(pages: dict[str, Path], browser: chromium.Browser, width: int, dark: bool) -> None:
    """Nothing is wider than its box, also in folded parts; what is not folded fits on four screens."""
    for name, file in pages.items():
        measured = browser.measure(file, width=width, dark=dark)
        assert measured["inner"] == width
        assert measured["dark"] is dark
        assert measured["scroll"] <= width, f"{name} is wider than the screen"
        for fault in ("outside", "empty", "small", "clipped", "wide", "overlaps", "errors", "resources"):
            assert measured[fault] == [], (name, fault)
        for count in ("links", "broken", "unnamed"):
            assert measured[count] == 0, (name, count)
        assert measured["svgs"] == FIGURES[name], name
        assert width < 1000 or measured["folded"] <= SCREENS, name


@pytest.mark.parametrize("dark", [False, True])
def test_colours_can_be_read(pages: dict[str, Path], browser: chromium.Browser, dark: bool) -> None:
    colours = browser.measure(pages["bare"], width=1280, dark=dark)["colours"]
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


def test_the_probe_sees_faults(pages: dict[str, Path], browser: chromium.Browser, tmp_path: Path) -> None:
    """A check that can only pass would prove nothing."""
    broken = pages["full"].read_text()
    broken = broken.replace("<main>", '<main><div style="width: 3000px">wide</div><img src="http://127.0.0.1:9/x">', 1)
    broken = broken.replace('text-anchor: end"', 'text-anchor: end" dx="900"').replace("<text ", '<text dx="-900" ', 40)
    broken = broken.replace("</main>", "<script>console.error('oh'); missing()</script></main>", 1)
    (tmp_path / "broken.html").write_text(broken)
    measured = browser.measure(tmp_path / "broken.html", width=1280, dark=False)
    assert measured["scroll"] > 1280
    for fault in ("outside", "wide", "resources"):
        assert measured[fault], fault
    assert "oh" in measured["errors"]
    assert any("missing" in error for error in measured["errors"])
