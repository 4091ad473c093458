"""The page as text: what it must say, and what it must never contain."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import example_profiles as profiles
import example_runs as examples
import pytest
from page_reader import Reader

from recperf.errors import DataError
from recperf.runs.evidence import Evidence
from recperf.runs.report import charts, page, run_report


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of a run that has everything."""
    return examples.page_of(examples.make_run(tmp_path_factory.mktemp("full") / "run", seeds=3))


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of a run that was only trained."""
    return examples.page_of(examples.make_run(tmp_path_factory.mktemp("bare") / "run", measured=()))


def test_sections_come_in_their_order(full: str) -> None:
    folded = "qualities limits operators budget roofline pair provenance config reproduce"
    assert re.findall(r'<section id="r1-(\w+)"', full) == ["advice", "timeline", "shares", "quality", "training"]
    assert re.findall(r'<details class="more" id="r1-(\w+)"', full) == folded.split()
    order = ['class="verdict"', 'aria-label="AUC: micro-dlrm 0.821 ± 0.010, user + item bias', '<dl class="facts">']
    places = [full.index(part) for part in [*order, '<section id="r1-timeline"']]
    assert places == sorted(places), "quality first, then what limits a step"


def test_the_picture_of_a_step_has_a_scale_and_says_that_the_step_was_traced(tmp_path: Path) -> None:
    run = examples.make_run(tmp_path / "run")
    drawn = ElementTree.parse(page.save(run_report.report(Evidence(run), "r1"), tmp_path / "step.svg")).getroot()
    texts = [(element.text or "", element.attrib) for element in drawn.iter() if element.tag.endswith("text")]
    marks = [
        (float(text.split()[0]), float(place["x"])) for text, place in texts if re.fullmatch(r"[\d.]+ (µs|ms)", text)
    ]
    assert 4 <= len(marks) <= 13
    (first, left), (second, right) = marks[:2]
    profile = Evidence(run).profile
    assert profile is not None
    us = profile.timeline.us
    unit = 1e3 if us >= 1e3 else 1.0
    assert first == 0
    assert (right - left) / (880 - left) == pytest.approx(second * unit / us, abs=1e-3)
    assert any(text.startswith("The median traced step; without tracing a step takes") for text, _ in texts)


def test_the_page_says_what_was_measured_and_how(full: str) -> None:
    said = Reader(full).text
    for expected in (
        "Operator overhead takes 60%",
        "(synthetic)",
        "target met",
        "user + item bias",
        "± 0.0020",
        "mean ± standard deviation over 3 seeds, 42 to 44",
        "from 40 bootstrap samples of 943 users",
        "the baseline is better in 0.0% of the bootstrap samples",
        "at most 36 training rows",
        "116 users, ranked among all 1,653 items",
        "Calibration: the scored rows in tenths",
        "3 seeds. Lines are smoothed means of at most 160 groups of steps",
        "Shares are of the sum of the parts’ medians",
        "(10.0 ms of the training was shuffling)",
        "embedding, backward",
        "Cold ids make the same lookups 4.1 times slower",
        "83 operator calls",
        "0123456789abcdef",
        "e0e0",
        "train.learning_rate",
        "recperf run --config",
        "4" * 40,
    ):
        assert expected in said, expected


def test_missing_measurements_name_their_command(bare: str) -> None:
    said = Reader(bare).text
    assert "what limits a step was not measured" in said
    for command in ("recperf run --config", "recperf peaks"):
        assert command in said


def test_the_page_is_self_contained(full: str) -> None:
    assert full.count("<script") == 1
    assert "@import" not in full
    assert "http://" not in full
    assert "https://" not in full
    assert re.findall(r'(?:src|href)="(?!#|data:)[^"]*"', full) == []
    assert len(full) < 400_000
    ids = re.findall(r' id="([^"]+)"', full)
    assert len(ids) == len(set(ids))
    used = set(re.findall(r'href="#([^"]+)"', full)) | set(re.findall(r"url\(#([^)]+)\)", full))
    assert used <= set(ids)


def test_every_figure_is_well_formed_named_and_coloured_by_the_page(full: str) -> None:
    figures = re.findall(r'<svg class="figure.*?</svg>', full, re.S)
    assert len(figures) == 10, "five for a screen and five for a phone"
    for figure in figures:
        root = ElementTree.fromstring(figure)
        assert root.get("role") == "img"
        assert len(root.get("aria-label") or "") > 20
        assert not re.findall(r"#[0-9a-f]{6}", figure), "a colour that does not follow the theme"
        assert "font-family" not in figure
        assert "<text" in figure


def test_text_of_a_run_cannot_become_markup(tmp_path: Path) -> None:
    run = examples.make_run(tmp_path / "<img src=x> & $run$", seeds=2)
    examples.change(run, "profile.json", "verdict.because", ["<script>alert(1)</script>"])
    examples.change(run, "profile.json", "workload.components.2.name", 'x"><b>y</b>')
    examples.change(run, "config.json", "config.data.source", "<i>here</i>")
    page = examples.page_of(run, run)
    assert page.count("<script") == 2, "those of the timelines"
    assert "<img" not in page
    assert "<b>y" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "$run$" in page
    for figure in re.findall(r'<svg class="figure.*?</svg>', page, re.S):
        ElementTree.fromstring(figure)


def test_several_runs_are_compared_on_top(tmp_path: Path) -> None:
    one = examples.make_run(tmp_path / "one")
    two = examples.make_run(tmp_path / "two", auc=0.75, config={"seed": 7}, measured=("profile",))
    page = examples.page_of(one, two)
    said = Reader(page).text
    assert page.index('id="all-config"') < page.index('<details class="more run" id="r1"') < page.index(' id="r2"')
    for expected in ("one and two compared", "1 config field differs", "AUC 0.8212 → 0.7500", "target missed"):
        assert expected in said
    assert len(re.findall(r' id="([^"]+)"', page)) == len(set(re.findall(r' id="([^"]+)"', page)))


def test_a_profile_that_disagrees_with_training_gives_a_warning(tmp_path: Path, full: str) -> None:
    assert "the shares may be wrong" not in full
    run = examples.make_run(tmp_path / "run")
    examples.change(run, "result.json", "performance.step_ms", {"p20": 3.0, "p50": 3.1, "p80": 3.2})
    assert "A step took 3.10 ms in training but 1.12 ms in the profile" in Reader(examples.page_of(run)).text


def test_long_curves_are_thinned_without_losing_their_extremes() -> None:
    series = [(step, 1.0 if step != 777 else 9.0) for step in range(1, 100_001)]
    groups = charts.grouped({1: series, 2: series[:50]})
    assert len(groups) <= charts.GROUPS
    assert max(group.high for group in groups) == 9.0
    assert [group.step for group in groups] == sorted(group.step for group in groups)
    assert charts.grouped({1: [(1, 0.5)], 2: [(1, 0.7)]}) == [(1, pytest.approx(0.6), 0.5, 0.7)]


def test_a_run_of_several_ranks_shows_the_slowest_and_the_waiting(tmp_path: Path) -> None:
    run = examples.make_run(tmp_path / "run")
    assert "Between the ranks" not in Reader(examples.page_of(run)).text
    known = profiles.ranks()["workload"]["communication"]
    examples.change(run, "profile.json", "workload.communication", known)
    said = Reader(examples.page_of(run)).text
    assert "Rank 1 of 2 is the slowest: its own work takes 478 ms per step, that of the others 300 ms." in said
    assert "most waited for" in said
    examples.change(run, "profile.json", "workload.communication", {**known, "each": [{"rank": 0}]})
    with pytest.raises(DataError, match="communication"):
        _ = Evidence(run).profile
