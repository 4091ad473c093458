"""The report of a profile in a terminal: every section, in units a reader thinks in, within the width of a terminal."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from recperf.runs.profile_text import SECTIONS, TOP, WIDTH, text
from recperf.runs.report import profile_words as say

_spec = importlib.util.spec_from_file_location("profiles", Path(__file__).parents[1] / "browser" / "profiles.py")
assert _spec
assert _spec.loader
profiles = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(profiles)

MADE = {name: getattr(profiles, name) for name in ("cpu", "eager", "graph", "budget", "ranks")}
TITLES = [title for title, _, _ in SECTIONS]


def sections(said: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in said.splitlines()[1:]:
        if line and not line.startswith(" "):
            found[line] = []
        elif line:
            found[list(found)[-1]].append(line)
    return found


@pytest.mark.parametrize("name", MADE)
def test_every_section_in_its_order_and_width(name: str) -> None:
    said = text(MADE[name]())
    assert list(sections(said)) == TITLES
    assert max(map(len, said.splitlines())) <= WIDTH
    assert "None" not in said
    assert "nan" not in said


def test_the_verdict_comes_with_confidence_evidence_and_what_comes_second() -> None:
    said = "\n".join(sections(text(profiles.eager()))["Verdict"])
    assert "launch-bound: The device waits for launches" in said
    assert "confidence: high, because three readings agree" in said
    assert "what comes second: making batches takes 18 % of the step" in said
    assert re.search(r"less than 10 µs +212 a step +at least 50 +launch-bound", said)
    assert re.search(r"other ranks +not measured +below 0.5", said)
    assert sections(text(profiles.budget()))["Verdict"][0] == "  Unclear."


def test_the_budget_is_seen_to_sum_to_the_wall() -> None:
    lines = sections(text(profiles.eager()))["Step budget"]
    parts = [line.split("  ") for line in lines[1:-2]]
    shares = [float(re.search(r"([\d.]+)%", line)[1]) for line in lines[1:-2]]
    assert len(parts) == len(profiles.EAGER)
    assert sum(shares) == pytest.approx(100, abs=0.5)
    assert lines[-2].split()[:3] == ["sum", "100.0%", "4.90"]
    assert lines[-1].split()[:3] == ["wall", "100.0%", "4.90"]


def test_a_budget_that_does_not_sum_is_not_to_be_trusted() -> None:
    broken = profiles.eager()
    broken["components"].pop(0)
    assert "WARNING: the parts sum to 81.6% of the step" in text(broken)
    assert "WARNING" not in text(profiles.eager())


def test_long_tables_show_the_heaviest_and_count_the_rest() -> None:
    found = sections(text(profiles.eager()))
    kernels = found["Kernels"]
    assert "152 kernels a step keep the device busy for 595 µs (12% of its 4.90 ms)." in kernels[0]
    assert "140 of them (92%) last less than 10" in kernels[0]
    assert sum("reduce_kernel" in line for line in kernels) == TOP - 3
    assert "  5 more names take 44.0 µs." in kernels
    assert any("long scoreboard 60%, barrier 10% (12,000 samples)" in line for line in kernels)
    assert found["Operators"][-1] == "  5 more take 250 µs of the host's time and 50.0 µs of the device's."


def test_what_was_not_measured_says_why_in_one_line() -> None:
    found = sections(text(profiles.cpu()))
    for title in ("Kernels", "Device idle", "Transfers"):
        assert found[title] == ["  not measured: no device in this trace"]
    assert found["Communication"] == ["  not measured: one rank"]
    assert sections(text(profiles.graph()))["Transfers"] == ["  none: nothing was copied or set"]


def test_a_runs_own_profile_is_read_as_far_as_it_goes() -> None:
    found = sections(text(profiles.base(profiles.CPU, "cpu")))
    assert found["Verdict"][0] == "  dispatch-bound: Calling operators sets the pace."
    for title in TITLES[2:-1]:
        assert found[title] == [f"  not measured: {say.ABSENT}"]
    assert any("+3.1%" in line for line in found["Trust"])


def test_idle_causes_and_who_synchronised() -> None:
    lines = sections(text(profiles.eager()))["Device idle"]
    assert lines[0] == "  Of a traced step of 4.90 ms the device works 1.02 ms and waits 3.88 ms (79%)."
    assert any(re.search(r"idle: host wait +2.40 ms +49.0%", line) for line in lines)
    assert any(re.search(r"^  sum +4.90 ms +100.0%", line) for line in lines)
    assert re.search(r"cudaStreamSynchronize +aten::item in loss +1 +400 µs", lines[-1])


def test_fixes_stand_in_their_order_with_what_was_measured() -> None:
    lines = sections(text(profiles.eager()))["Fixes ranked"]
    assert re.search(r"CUDA graph +1.30 ms +3.77 x +1.50 ms +3.27 x +yes \(3.0e-06\) +tried", lines[1])
    assert re.search(r"bf16 products .* no \(2.0e-02\) +rejected", lines[3])
    assert re.search(r"pinned input +4.70 ms +1.04 x +– +– +– +suggested", lines[4])
    assert lines[5].startswith("  all together")
    assert any("bf16 products [--fast.bf16 on]: " in line and "numbers differ" in line for line in lines)


def test_nothing_steers_the_terminal() -> None:
    hostile = profiles.eager()
    hostile["verdict"]["sentence"] = "wait\x1b[2J\nfor it"
    hostile["workload"] = "dl\x07rm"
    said = text(hostile)
    assert "\x1b" not in said
    assert "\x07" not in said
    assert list(sections(said)) == TITLES


@pytest.mark.parametrize(
    ("ms", "said"),
    [(0, "0"), (0.0000005, "0.500 ns"), (0.0042, "4.20 µs"), (0.4, "400 µs"), (0.9996, "1,000 µs"), (1, "1.00 ms"),
     (99.96, "100 ms"), (1234.0, "1.23 s"), (None, "–")],
)  # fmt: skip
def test_times_in_the_unit_of_their_size(ms: float | None, said: str) -> None:
    assert say.time(ms) == said


@pytest.mark.parametrize(
    ("value", "said"), [(5.2e12, "5.20 TFLOP/s"), (3e9, "3.00 GFLOP/s"), (999.9e9, "1,000 GFLOP/s"), (0, "–")]
)
def test_rates(value: float, said: str) -> None:
    assert say.flop_rate(value) == said
    assert say.byte_rate(4.25e12) == "4,250 GB/s"


def test_kernel_names_lose_what_repeats() -> None:
    assert say.short("void at::native::reduce_kernel<512>(int, float*)") == "reduce_kernel<512>"
    assert say.short("void (anonymous namespace)::softmax(float*)") == "softmax"
    assert len(say.short(profiles.ADD, 40)) == 40
    assert say.short(profiles.ADD, 80).startswith("vectorized_elementwise_kernel<4, CUDAFunctor_add<float>")
    assert say.short("(all of it)") == "(all of it)"


def test_reading_a_profile_needs_no_torch() -> None:
    code = "import sys, recperf.runs.profile_text; sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def _described() -> set[str]:
    """Every field that docs/profiling.md describes, by its path."""
    rows = re.findall(
        r"^\| (top|`[\w.*]+`) \| ([^|]+) \| [^|]*\|$",
        (Path(__file__).parents[2] / "docs" / "profiling.md").read_text(),
        re.M,
    )
    found = set()
    for where, fields in rows:
        head = "" if where == "top" else where.strip("`") + "."
        found |= {head + name for name in re.findall(r"`(\w+)`", fields)} or {f"{head}*"}
    return found


def _fields(value: Any, head: str = "") -> set[str]:
    """The fields of a profile that hold a value; keys that are names of things count as one."""
    if head in ("switches", "idle.causes", "trust.profiling", "trust.versions"):
        return {f"{head}.*"}
    if isinstance(value, dict) and "missing" not in value and not head.endswith(".reasons"):
        return set().union(*(_fields(item, f"{head}.{key}".lstrip(".")) for key, item in value.items()))
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return set().union(*(_fields(item, f"{head}.*") for item in value))
    return {head}


def test_the_documented_layout_is_the_one_that_is_read() -> None:
    described = _described()
    used: set[str] = set().union(*(_fields(make()) for make in MADE.values()))
    assert used - described == set()
    whole = {path for path in described if any(other.startswith(f"{path}.") for other in described)}
    assert described - used == whole - used
