"""The report of a profile, as text and as a page: both are rendered from the same sections."""

from __future__ import annotations

import re
from typing import Any

import example_profiles as profiles
import example_runs as examples
import pytest
from msgspec import convert
from page_reader import Reader

from recperf.measure.peaks.records import Peaks
from recperf.measure.profile import StepProfile
from recperf.runs.report import formats as fmt
from recperf.runs.report import page
from recperf.runs.report.blocks import WIDEST, render
from recperf.runs.report.profiles import report_of
from recperf.runs.report.step_sections import ABSENT, TOP

EXAMPLES = {name: getattr(profiles, name) for name in ("cpu", "eager", "graph", "budget", "ranks")}
PEAKS = convert(examples.peaks(), Peaks)
OF_STEP = ["What to change", "Where the time goes", "What limits the step", "Operators", "Step budget"]
OF_TRACE = ["Kernels", "Roofline", "Device idle", "Transfers", "Embeddings"]
TITLES = {
    "cpu": [*OF_STEP, "Roofline", "Embeddings", "Trust"],
    "eager": [*OF_STEP, *OF_TRACE, "Trust"],
    "graph": [*OF_STEP, *OF_TRACE, "Trust"],
    "budget": [*OF_STEP, "Embeddings", "Trust"],
    "ranks": [*OF_STEP[1:], "Roofline", "Embeddings", "Communication", "Trust"],
}
"""The sections of each example: those that were measured."""


def text(profile: dict[str, Any], peaks: Peaks | None = None, machine: dict[str, Any] | None = None) -> str:
    return render(report_of(convert({**profile, "machine": machine or {}}, StepProfile), peaks), verbose=True)


def html(profile: dict[str, Any], peaks: Peaks | None = None, machine: dict[str, Any] | None = None) -> str:
    return page.html_of(report_of(convert({**profile, "machine": machine or {}}, StepProfile), peaks))


def read(profile: dict[str, Any], **more: Any) -> Reader:
    return Reader(html(profile, more.get("peaks"), more.get("machine")))


def sections(printed: str) -> dict[str, list[str]]:
    lines: dict[str, list[str]] = {}
    for line in printed.splitlines()[2:]:
        if line and not line.startswith(" "):
            lines[line] = []
        elif line and lines:
            lines[list(lines)[-1]].append(line)
    return lines


@pytest.fixture(scope="module")
def eager() -> str:
    return html(profiles.eager(), PEAKS, examples.MACHINE)


@pytest.mark.parametrize("name", EXAMPLES)
def test_text_has_every_section_within_the_width(name: str) -> None:
    printed = text(EXAMPLES[name]())
    assert list(sections(printed)) == TITLES[name]
    assert max(map(len, printed.splitlines())) <= WIDEST
    assert "None" not in printed
    assert "nan" not in printed


def test_text_and_page_hold_the_same_cells(eager: str) -> None:
    """Both renderers show every number; only figures are left out of the text."""
    page = Reader(eager).text
    printed = text(profiles.eager(), PEAKS, examples.MACHINE)
    numbers = re.findall(r"\d[\d.,]* (?:µs|ms|GB/s|TFLOP/s|MiB|x)\b", printed)
    assert len(numbers) > 100
    assert [number for number in numbers if number not in page] == []


def test_verdict_with_confidence_shares_experiments_and_operators() -> None:
    printed = text(profiles.eager())
    assert printed.splitlines()[1].startswith("  limit     launch (high confidence): The device waits for launches")
    shares, evidence = ("\n".join(sections(printed)[title]) for title in OF_STEP[1:3])
    assert re.search(r"launch +60% +2.94 ms +the device is idle", shares)
    assert re.search(r"half the batch +0.90 to 0.98 +0.95 times +agrees", evidence)
    assert any(re.search(r"aten::addmm +top +83", line) for line in sections(printed)["Operators"])
    assert text(profiles.budget()).splitlines()[1] == "  limit     unclear (high confidence): Unclear."


def test_times_by_limit_and_by_operator_are_of_the_same_time() -> None:
    """Half of the step its thread had no core: what is divided, and printed, is the other half."""
    own = profiles.base(profiles.CPU, "cpu")
    own |= {"preempted": 0.5, "waits": {"python": 1.0}, "operators": [{**own["operators"][0], "ms": 3.0}]}
    own["shares"] = dict.fromkeys(own["shares"], 0.0) | {"compute": 0.75, "python": 0.25}
    lines = " ".join(text(own).split())
    assert "compute 75% 3.00 ms" in lines
    assert "aten::addmm top 83 3.00 ms" in lines
    assert "the 50% in which other work held their core is left out" in lines


def test_long_tables_show_the_heaviest_rows_and_summarise_the_rest() -> None:
    lines = sections(text(profiles.eager()))
    kernels = lines["Kernels"]
    assert "152 kernels per step keep the device busy for 595 µs (12% of the 4.90 ms step)." in kernels[0]
    assert sum("reduce_kernel" in line for line in kernels) == TOP - 3
    assert "  5 more kernels take 44.0 µs." in kernels
    assert "<summary>5 more kernels take 44.0 µs.</summary>" in html(profiles.eager(), None, None)


def test_a_section_that_was_not_measured_says_why() -> None:
    lines = sections(text(profiles.cpu()))["Trust"]
    assert any(
        re.search("not measured: kernels, device idle, transfers +no device in this trace", line) for line in lines
    )
    assert any(re.search("not measured: communication +one rank", line) for line in lines)
    assert sections(text(profiles.graph()))["Transfers"] == ["  Nothing was copied or set."]
    own = profiles.base(profiles.CPU, "cpu")
    assert ABSENT in read(own).text
    trust = " ".join(" ".join(sections(text(own))["Trust"]).split())
    assert "3.1% of a step, less than the spread of the steps: a step takes" in trust


def test_advice_with_predicted_and_measured_gain() -> None:
    lines = sections(text(profiles.eager()))["What to change"]
    shown = "\n".join(lines)
    assert "whole step as a CUDA graph. Gain: 3.27x (3.10x to 3.59x) measured" in " ".join(shown.split())
    assert "    --fast.graph on" in lines
    assert "it changes the losses" in shown
    gains = r"3.77x \(3.39x to 4.52x\) +1.50 ms +3.27x \(3.10x to 3.59x\)"
    assert re.search(rf"graph +{gains} +yes +tried", shown)
    assert re.search(r"bf16 .* no \(2.0e-02\) +changes the losses", shown)
    assert re.search(r"pin +1.04x \(0.94x to 1.25x\) +– +– +– +suggested", shown)
    # A terminal describes three; the page has all.
    assert "--fast.pin on" not in shown
    assert "--fast.pin on" in html(profiles.eager(), None, None)


def test_control_characters_and_markup_stay_text(eager: str) -> None:
    hostile = profiles.eager()
    hostile["verdict"]["because"] = ["wait\x1b[2J\nfor it"]
    hostile["workload"]["name"] = "dl\x07rm"
    printed = text(hostile)
    assert "\x1b" not in printed
    assert "\x07" not in printed
    assert list(sections(printed)) == TITLES["eager"]
    reader = Reader(eager)
    assert eager.count("<script") == 1
    assert any("<script>alert('kernel')</script>" in title for title in reader.titles)
    assert "\x1b" not in eager

    evil = "</svg><script>x</script>\ud800\x00\"'"

    def spoiled(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: spoiled(item) for key, item in value.items()}
        if isinstance(value, list):
            return [spoiled(item) for item in value]
        return evil if isinstance(value, str) else value

    spoiled_page = html(spoiled(profiles.eager()), None, {"cpu": evil})
    assert spoiled_page.count("<script") <= 1, "only that of the timeline, whose lanes are spoiled"


def test_empty_tables_and_zero_times_do_not_stop_the_report() -> None:
    bare = profiles.eager()
    bare["kernels"]["rows"], bare["workload"]["roofline"] = [], []
    bare["idle"] |= {"wall_ms": 0.0, "busy_ms": 0.0, "idle_ms": 0.0, "causes": {}}
    bare["workload"]["embeddings"]["tables"] = []
    bare["step_ms"] = bare["workload"]["step_ms"] = {"p20": 0.0, "p50": 0.0, "p80": 0.0}
    read(bare)
    text(bare)
    # Clocks of other programs have times below zero for work beside the step.
    early = profiles.eager()
    for part in early["workload"]["components"]:
        part["ms"] = {"p20": -0.5, "p50": 0.1, "p80": -0.1}
    early["workload"]["roofline"][0] |= {"flops_per_s": -1e9, "bytes_per_s": -1e6}
    read(early)


@pytest.mark.parametrize(
    ("show", "value", "shown"),
    [
        (fmt.time, None, "–"),
        (fmt.flop_rate, 999.9e9, "1.00 TFLOP/s"),
        (fmt.flop_rate, 0, "–"),
        (fmt.byte_rate, 4.25e12, "4.25 TB/s"),
        (fmt.percent, 0.0001, "<0.1%"),
        (fmt.percent, 0.052, "5.2%"),
        (fmt.percent, 0.52, "52%"),
        (fmt.component, "embedding_backward", "embedding, backward"),
        (fmt.component, "backward", "backward"),
        (fmt.setting, [944, None, True], "944 none yes"),
        (fmt.short, "void at::native::reduce_kernel<512>(int, float*)", "reduce_kernel"),
        (
            fmt.short,
            "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_13BinaryFunctorIfffNS0_10MulFunctorIfEEEEEviT0_T1_",
            "vectorized_elementwise_kernel (MulFunctor)",
        ),
        (
            fmt.short,
            "Cijk_Ailk_Bljk_BBS_BH_Bias_HAS_SAV_UserArgs_MT16x16x256_MI16x16x1_SN_LDSB1",
            "Cijk_Ailk_Bljk_BBS MT16x16x256",
        ),
        (fmt.short, "void (anonymous namespace)::softmax(float*)", "softmax"),
        (fmt.short, "(all of it)", "(all of it)"),
    ],
)
def test_formats(show: Any, value: Any, shown: str) -> None:
    assert show(value) == shown
