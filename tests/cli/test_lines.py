"""How much each command prints: a few lines that a person reads, and the rest where it is asked for."""

from __future__ import annotations

import contextlib
import json
import shlex
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import example_profiles as profiles
import example_runs as examples
import example_traces as traces
import pytest
from msgspec import convert

from recperf.cli import COMMANDS, main
from recperf.jsonfile import sealed
from recperf.measure.profile import StepProfile
from recperf.runs.report.blocks import render
from recperf.runs.report.formats import of_ceiling, place, plus_minus, stands
from recperf.runs.report.profiles import report_of
from recperf.runs.result import Difference, Interval
from recperf.workloads import WORKLOADS

Call = Callable[..., tuple[int, str, str]]
SCRIPT = """
import torch
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(400):
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
"""
FIRST = ("micro-dlrm · movielens-like (synthetic)", "  quality   AUC", "  speed ", "  limit ")
OF_DATA = (
    "import x",
    "import x --clicks",
    "make yambda-like",
    "get yambda-50m",
    "list",
)


def lines(call: Call, text: str, *arguments: str) -> list[str]:
    code, out, err = call(*shlex.split(text), *arguments)
    assert code == 0, err
    return out.splitlines()


def test_a_run_ends_with_the_facts_that_matter(call: Call, quiet: None) -> None:
    text = "run micro-dlrm --data.source embedded --train.epochs 1 --target.beat none --no-peaks --run-dir"
    printed = lines(call, f"{text} short")
    begin, *end = printed
    assert begin.startswith("micro-dlrm: starting in short")
    assert len(end) <= 10, end
    assert all(any(line.startswith(first) for line in end) for first in FIRST), end
    assert end[-1].split() == ["page", "short/report.html"]
    assert len(lines(call, "run --resume short --verbose")) > 40, "the rest, from the same report"
    assert len(lines(call, "report short --out step.svg")) <= 10
    assert ElementTree.parse("step.svg").getroot().tag.endswith("svg"), "the picture of a step"


@pytest.mark.parametrize("kind", ["cpu", "eager", "graph", "ranks"])
def test_a_profile_is_short(kind: str) -> None:
    printed = render(report_of(convert(getattr(profiles, kind)(), StepProfile))).splitlines()
    assert len(printed) <= 13, "and two paths"
    assert printed[1].startswith("  limit ")


def test_a_script_and_a_trace_are_short(call: Call, tmp_path: Path) -> None:
    Path("train.py").write_text(SCRIPT)
    printed = lines(call, "profile --script train.py --no-peaks --no-try")
    assert len(printed) <= 15, printed
    assert any(line.startswith("  places    train.py:") for line in printed), printed
    trace = traces.write(tmp_path / "gpu.json.gz", [*traces.gpu_step(0, 0.0, 10), *traces.gpu_step(1, 1000.0, 20)])
    printed = lines(call, f"profile --trace {trace}")
    assert len(printed) <= 15
    assert any(line.startswith("  not seen ") for line in printed)


@pytest.mark.parametrize("options", ["dlrm", "micro-dlrm", "dlrm-v4 --price 4USD --mtbf-hours 50000"])
def test_a_plan_is_short(call: Call, options: str) -> None:
    assert len(lines(call, f"plan {options}")) <= 13
    assert len(lines(call, f"plan {options} --verbose")) > 30


def test_a_comparison_is_short_and_compares_quality_only_of_the_same_rows(call: Call, tmp_path: Path) -> None:
    config = {"seed": 7, "train": {f"field_{number}": number for number in range(20)}}
    examples.make_run(tmp_path / "one")
    examples.make_run(tmp_path / "two", auc=0.83, config=config)
    printed = lines(call, "compare one two")
    assert len(printed) <= 15
    assert printed[1].startswith("  quality   AUC 0.8212 → 0.8300")
    examples.change(tmp_path / "two", "result.json", "data.digest", "f0" * 32)
    printed = lines(call, "compare one two")
    assert printed[1] == "  quality   not comparable: different task, data or split"
    assert "AUC" not in "\n".join(printed)
    for name, profile in (("old", profiles.eager()), ("new", profiles.graph())):
        Path(f"{name}.json").write_text(json.dumps(sealed(profile)))
    assert len(lines(call, "compare old.json new.json")) <= 15


def test_help_is_short_and_help_all_has_every_field(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = [*COMMANDS, *(f"run {name}" for name in WORKLOADS), "profile --script x", "profile --trace x"]
    commands += [f"data {action}" for action in OF_DATA] + ["mlperf check"]

    def printed(text: str, columns: int) -> str:
        monkeypatch.setenv("COLUMNS", str(columns))
        with contextlib.suppress(SystemExit):
            main(text.split())
        return capsys.readouterr().out

    for command in [*commands, ""]:
        text = printed(f"{command} --help", 110).splitlines()
        assert 4 < len(text) <= 60, (command, len(text))
        assert max(map(len, text)) <= 120, command
        if command.startswith("run"):
            assert len(printed(f"{command} --help", 80).splitlines()) <= 60, command
    everything = " ".join(printed("run dlrm-v4 --help-all", 110).split())
    for field in ("--train.checkpoint-background", "--allow-change", "--model.hstu.layers", "--mlperf.log"):
        assert field in everything
    assert "Values: auto, majority, item_bias," in everything
    assert (
        "--train.checkpoint-steps INT Save a checkpoint every this many steps; 0 disables it. Default: 0." in everything
    )
    assert "Default: ib400." in printed("plan --help", 110), "in the short help too"


def test_a_difference_is_said_with_half_of_its_interval_or_why_it_is_not_known() -> None:
    facts = {"metric": "auc", "baseline": "it", "below_zero": 0.0, "seeds": 1, "units": 100}
    level = Difference(low=-0.0271, high=0.0101, difference=-0.0049, standing="level", **facts)
    assert stands(level) == "no clear difference from it (-0.005 ± 0.019)"
    level.needed = 1800
    assert stands(level) == "not enough users to tell from it (100; about 1,800 are needed)"
    assert place(level) == "not enough users to tell (100; about 1,800 are needed)"
    below = Difference(low=-0.0566, high=-0.0442, difference=-0.05, standing="below", **facts)
    assert (stands(below), place(below)) == ("0.0500 ± 0.0062 below it", "below")
    for half, text in ((0.0102, "0.785 ± 0.010"), (0.0096, "0.785 ± 0.010"), (0.0094, "0.7850 ± 0.0094"),
                       (0.00071, "0.78500 ± 0.00071"), (0.0, "0.785 ± 0.000")):  # fmt: skip
        assert plus_minus(0.785, Interval(low=0.5 - half, high=0.5 + half)) == text
    assert of_ceiling(7.49, "memory") == "in a cache"
    assert of_ceiling(1.08, "compute") == "100%"
