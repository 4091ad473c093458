"""The page of a profile as text: what it must say, and what it must never contain."""

from __future__ import annotations

import copy
import importlib.util
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from recperf.errors import MachineError
from recperf.runs.report import profile_plots, profile_sections
from recperf.runs.report.profile_page import SECTIONS, page, write_profile


def _loaded(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / "browser" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


profiles, folders = _loaded("profiles"), _loaded("folders")


class Reader(HTMLParser):
    """The words of a page and its titles; fails on a tag that is closed out of turn or never."""

    void = frozenset({"meta", "link", "wbr"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.titles: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.seen.add(tag)
        self.titles += [value for name, value in attrs if name == "title"]
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)


def read(profile: dict[str, Any], **more: Any) -> tuple[str, Reader]:
    drawn = page(profile, more.get("peaks"), more.get("machine"))
    reader = Reader()
    reader.feed(drawn)
    assert reader.open == []
    return "".join(reader.words), reader


@pytest.fixture(scope="module")
def eager() -> str:
    return page(profiles.eager(), folders.peaks(), folders.MACHINE)


def test_every_section_is_there_for_every_kind_of_profile(eager: str) -> None:
    for drawn in (eager, page(profiles.budget(), None, None), page(profiles.base(profiles.CPU, "cpu"), None, None)):
        for key, title, _, _ in SECTIONS:
            assert f'<section id="profile-{key}">\n<h2>{title}</h2>' in drawn


def test_the_page_needs_nothing_else(eager: str) -> None:
    assert eager.startswith("<!doctype html>")
    assert not re.search(r"""(?:src|href)=["'](?!#|data:)""", eager)
    assert "<script" not in eager
    assert "@import" not in eager
    assert "prefers-color-scheme: dark" in eager
    assert "@media print" in eager


def test_a_hostile_name_stays_text(eager: str) -> None:
    reader = Reader()
    reader.feed(eager)
    assert "script" not in reader.seen
    assert any("<script>alert('kernel')</script>" in title for title in reader.titles)
    assert "<script>alert('kernel')" in "".join(reader.words)
    assert "\x1b" not in eager


def test_hostile_words_everywhere() -> None:
    evil = "</svg><script>x</script>\ud800\x00\"'"

    def spoiled(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: spoiled(item) for key, item in value.items()}
        if isinstance(value, list):
            return [spoiled(item) for item in value]
        return evil if isinstance(value, str) else value

    _, reader = read(spoiled(profiles.eager()), machine={"cpu": evil})
    assert "script" not in reader.seen


def test_long_names_are_short_with_the_whole_in_a_title() -> None:
    words, reader = read(profiles.graph())
    assert profiles.ADD not in words
    assert profiles.ADD in reader.titles
    assert "_bag_update" in words
    assert "_bag_update" not in reader.titles


def test_what_the_figures_show_is_also_said(eager: str) -> None:
    labels = " ".join(re.findall(r'aria-label="([^"]*)"', eager))
    assert "Share of each part in a step of 4.90 ms: data 18.4%" in labels
    assert "The device in a step: busy 1.02 ms, input wait 820 µs, host wait 2.40 ms" in labels
    assert "whole step as a CUDA graph: predicted 3.77 x, measured 3.27 x" in labels
    assert "top 21.0 TFLOP/s at 210 FLOP/B" in labels
    assert "embedding 14.3 GB/s" in labels
    assert eager.count('class="figure"') == 2 * 6


def test_sums_verdict_fixes_and_trust_are_shown() -> None:
    words, _ = read(profiles.eager(), peaks=folders.peaks(), machine=folders.MACHINE)
    flat = " ".join(words.split())
    for said in (
        "The device waits for launches: it works 21 % of the step.",
        "Confidence is high: three readings agree",
        "What comes second: making batches",
        "sum of the parts 100.0% 4.90 ms",
        "sum 4.90 ms 100.0%",
        "bf16 products 4.50 ms 4.60 ms 1.02 x no (2.0e-02) rejected",
        "numbers differ beyond 1e-3.",
        "long scoreboard 60%, barrier 10%",
        "best fix tried4.90 xall together",
        "+60.0%: a step takes 4.90 ms without, 7.84 ms with it",
        "taken 2026-11-15 03:48:05 (UTC), in quick mode",
        "machine: cpu Neoverse-N1",
    ):
        assert said in flat, said


def test_what_was_not_measured_says_why() -> None:
    words, _ = read(profiles.cpu())
    assert words.count("Not measured: no device in this trace.") == 3
    assert "Not measured: one rank." in words
    words, _ = read(profiles.base(profiles.CPU, "cpu"))
    assert words.count("Not measured: this profile has no such section") == 8
    no_ceilings = profiles.eager()
    for row in no_ceilings["roofline"]:
        row |= {"ceiling_flops_per_s": None, "ceiling_bytes_per_s": None, "share_of_roof": None}
    assert page(no_ceilings, None, None).count('class="figure"') == 2 * 4


def test_a_budget_that_does_not_sum_is_said() -> None:
    broken = profiles.cpu()
    broken["components"].pop(1)
    assert "this budget is not to be trusted" in read(broken)[0]
    assert "this budget is not to be trusted" not in read(profiles.cpu())[0]


def test_empty_tables_and_zero_times_do_not_stop_the_page() -> None:
    bare = profiles.eager()
    bare["operator_table"]["rows"], bare["kernels"]["rows"], bare["roofline"] = [], [], []
    bare["idle"] |= {"wall_ms": 0.0, "busy_ms": 0.0, "idle_ms": 0.0, "causes": {}}
    bare["embeddings"]["tables"] = []
    bare["step_ms"] = {"p20": 0.0, "p50": 0.0, "p80": 0.0}
    read(bare)


def test_the_profile_itself_is_not_changed() -> None:
    given = profiles.eager()
    before = copy.deepcopy(given)
    page(given, None, None)
    assert given == before


def test_the_same_profile_gives_the_same_bytes(tmp_path: Path) -> None:
    written = write_profile(profiles.graph(), None, None, tmp_path / "new" / "profile.html")
    assert written.read_text() == page(profiles.graph(), None, None)
    assert [path.name for path in written.parent.iterdir()] == ["profile.html"]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MachineError, match="cannot write") as caught:
        write_profile(profiles.graph(), None, None, tmp_path / "file" / "profile.html")
    assert "--run-dir" not in (caught.value.fix or "")


def test_powers_of_an_axis() -> None:
    assert [profile_plots._power(e) for e in (2, 3, 9, 14, 15)] == ["100", "1k", "1G", "100T", "1P"]


def test_a_broken_name_is_escaped_piece_by_piece() -> None:
    assert profile_sections.titled("a_<b>", 20) == "a_&lt;<wbr>b&gt;"


def test_importing_needs_neither_matplotlib_nor_torch() -> None:
    heavy = {"torch", "matplotlib", "jinja2"}
    code = f"import sys, recperf.runs.report.profile_page\nsys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
