"""recperf plan as a user types it."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import convert

from recperf import locations
from recperf.cli import run
from recperf.cli.options import choose, read_options
from recperf.data.known.yambda import synthesize
from recperf.data.known.yambda.yambda_like import of_size
from recperf.planning.report import report_of
from recperf.planning.summary import Plan
from recperf.runs.report.blocks import render

Call = Callable[..., tuple[int, str, str]]
MLPERF = ("dlrm-v4", "--preset", "mlperf", "--rank-batch", "1024")


@pytest.fixture
def call(call: Call) -> Call:
    return functools.partial(call, "plan")


def as_json(call: Call, *arguments: str) -> dict[str, Any]:
    code, out, _ = call(*arguments, "--json")
    assert code == 0
    value: dict[str, Any] = json.loads(out)
    return value


@pytest.mark.parametrize(
    "options",
    [
        "--gpu a100 --distributed.sharding table,item_id=column --distributed.overlap off --model.hstu.layers=2",
        "--preset gpu --tables.placement host --tables.device-bytes 8GiB",
    ],
)
def test_what_a_plan_suggests_is_a_command_that_run_understands(call: Call, options: str) -> None:
    plan = as_json(call, "dlrm-v4", *options.split())
    commands = re.findall(r"recperf run (dlrm-v4 .+)", render(report_of(convert(plan, Plan))))
    assert commands
    synthesize.write_store(of_size(3_000), locations.dataset_folder("yambda-5b") / "store")
    for command in [*commands, *(f"{commands[0]} {one['options']}" for one in plan["advice"]["changes"])]:
        assert command.count("--distributed.sharding") < 2
        assert ("--data yambda-5b" in command) == ("--preset gpu" not in options)
        choice = choose(command.split())
        read = read_options(run.Options, choice, verb="run", description="")
        if "--gpu a100" in options and command == commands[0]:
            distributed = read.values.distributed
            assert (distributed.overlap, distributed.sharding) == ("off", "auto"), "as asked for it would not fit"
            assert read.values.model.hstu.layers == 2


def test_the_first_lines_say_what_to_do(call: Call) -> None:
    """Without options: the published model and batch, the smallest number of devices that fits real ids."""
    code, out, _ = call("dlrm-v4", "--price", "4USD")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith("dlrm-v4 --preset mlperf · h200 · network ib400")
    assert lines[1] == "  devices   8 h200 are enough if ids repeat as published, 16 if they do not; 4 are too few."
    facts = {line[:12].strip(): line[12:] for line in lines[2:]}
    assert facts["run"] == "recperf run dlrm-v4 --preset mlperf --data yambda-5b --ranks 8 --train.batch-size 8192"
    assert re.search(r"[\d.]+ ms \([\d.]+ to [\d.]+\), [\d,]+ \([\d,]+ to [\d,]+\) samples/s", facts["step"])
    assert "of 133 GiB on the fullest rank" in facts["memory"]
    target = " ".join(out.split())
    assert re.search(r" and [\d.]+ USD for 69.3 M \(61.9 M to 80.3 M\) samples", target)
    assert facts["range"].startswith("time to the target not judged, wider than a factor of 2: a measured --startup")
    assert "compute: Arithmetic takes" in facts["limit"]
    assert "16 h200 take" in facts["change"]
    assert "1 h200 with its tables in 560 GiB of host memory" in facts["or"]
    assert facts["run it"].endswith("--tables.placement host")


def test_several_ranks_are_a_table_and_a_plot_on_a_page(call: Call, tmp_path: Path) -> None:
    arguments = (*MLPERF, "--ranks", "2,8,64", "--gpu", "b200")
    code, _, _ = call(*arguments, "--out", "plan.html")
    assert code == 0
    page = (tmp_path / "plan.html").read_text()
    assert page.index("8 b200 are enough") < page.index("<svg") < page.rindex("one step: 8 ranks")
    assert "extrapolated beyond the published batch sizes" in page


def test_a_plan_needs_no_torch(runs_without_torch: Callable[..., None]) -> None:
    runs_without_torch("plan", "dlrm-v4", "--quiet")
