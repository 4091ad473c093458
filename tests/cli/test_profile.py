"""recperf profile as a user types it, on sizes of a moment."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_profile_report as layout

from recperf.execution import fixes as fixes_module
from recperf.execution import measuring, profiling
from recperf.measure.profile import KIND, StepProfile

TINY = ["--model.bottom", "8", "16", "4", "--model.dim", "4", "--model.top", "8", "1", "--train.batch-size", "64"]
TINY += ["--data.batches", "6", "--data.held-out-batches", "2", "--train.device", "cpu", "--train.threads", "1"]
OPTIONS = {"dlrm": TINY, "micro-dlrm": ["--train.device", "cpu"]}
FILES = {".recperf", "config.json", "events.jsonl", "machine.json", "peaks.json", "profile.html", "profile.json"}
FILES |= {".lock", ".profile", "stacks.folded"}
TABLES = ("kernels", "idle", "transfers")
Call = Callable[..., tuple[int, str, str]]


pytestmark = pytest.mark.usefixtures("stored_ceilings")


def read(name: str = "profile.json", folder: str = "r") -> Any:
    return json.loads(Path(folder, name).read_text())


def report(out: str) -> str:
    """The printed report without the notes before it and the paths after it."""
    lines = [line for line in out.split("\n  profile  ")[0].splitlines() if not line.startswith("note: ")]
    return "\n".join(lines)


@pytest.mark.parametrize("workload", OPTIONS)
def test_a_profile_of_any_workload(call: Call, workload: str) -> None:
    # Switched back by hand, so that there is a fix to describe.
    options = (*OPTIONS[workload], "--train.threads", "1", "--train.onednn", "off")
    code, out, err = call("profile", workload, *options, "--run-dir", "r", "--steps", "16", "--verbose")
    assert code == 0, err
    assert {path.name for path in Path("r").iterdir()} == FILES
    profile = read()
    figures = profile["workload"]
    assert (profile["kind"], figures["name"]) == (KIND, workload)
    assert set(profile) == {*StepProfile.__struct_fields__, "seal"}
    assert read("config.json")["workload"] == workload
    assert read("machine.json")["torch"]
    titles = list(layout.sections(report(out)))
    titles.remove("Memory")
    assert titles == layout.TITLES["cpu"]
    assert "profile   r/profile.json" in out
    assert "page      r/profile.html" in out
    page = Path("r", "profile.html").read_text()
    assert profile["verdict"]["limit"] in page
    assert "<script src" not in page

    assert sum(part["share"] for part in figures["components"]) == pytest.approx(1)
    overhead = figures["overhead"]
    assert overhead["share"] == pytest.approx(overhead["clocked_ms"] / overhead["plain_ms"] - 1)
    assert re.search(r"cost of measuring \(budget\) .+: a step takes .+ without, .+ with it", " ".join(out.split()))
    assert profile["steps"]["traced"] == measuring.TRACED
    assert profile["operators"]
    for name in TABLES:
        assert profile[name] == {"missing": "no device in this trace"}
    # How busy this machine is decides which.
    assert {fix["status"] for fix in profile["advice"]} <= {"suggested", "not judged"}
    assert figures["precision"] == "float32"
    assert figures["trust"]["seed"] == 42


def test_a_trace_is_saved_and_can_be_read(call: Call) -> None:
    arguments = ("profile", "dlrm", *TINY, "--steps", "5", "--no-report", "--quiet", "--no-peaks", "--save-trace")
    assert call(*arguments, "--run-dir", "r")[0] == 0
    size = Path("r", "trace.json.gz").stat().st_size
    assert read()["workload"]["trace"] == {"file": "trace.json.gz", "bytes": size, "steps": measuring.TRACED}
    code, out, err = call("profile", "--trace", "r/trace.json.gz", "--verbose")
    assert code == 0, err
    assert re.search(rf"steps +{measuring.TRACED}\b", out)
    assert "embedding" in out


@pytest.mark.parametrize(
    ("error", "where"),
    [(KeyboardInterrupt, "measure_window"), (RuntimeError, "_save_trace")],
)
def test_whatever_ends_a_profile_leaves_no_half_folder(
    call: Call, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], where: str
) -> None:
    def ends(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(profiling, where, ends)
    arguments = ("profile", "dlrm", *TINY, "--steps", "5", "--save-trace", "--quiet", "--run-dir")
    assert call(*arguments, "r")[0] == (130 if error is KeyboardInterrupt else 1)
    assert not Path("r").exists()
    # A folder that was there stays, with what was in it.
    Path("mine").mkdir()
    Path("mine", "notes").write_text("kept")
    assert call(*arguments, "mine")[0] != 0
    assert [path.name for path in Path("mine").iterdir()] == ["notes"]


@pytest.mark.long
def test_fixes_are_tried_and_shown_beside_their_predictions(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixes_module, "WORTH", 0.0)
    arguments = ["--preset", "experiment-plain", *TINY, "--train.threads", "2", "--train.onednn", "on"]
    code, out, err = call("profile", "dlrm", *arguments, "--run-dir", "r", "--steps", "5", "--try-fixes", "--verbose")
    assert code == 0, err
    fixes = read()["advice"]
    assert {"embedding", "interaction", "optimizer"} <= {fix["name"] for fix in fixes}
    assert fixes[-1]["name"] == "all together"
    assert {fix["status"] for fix in fixes} <= {"tried", "not judged"}
    assert "note: trying --fast.embedding fused\n" in out
    ranked = "\n".join(layout.sections(report(out))["What to change"])
    assert all(fix["measured_ms"] for fix in fixes)
    assert re.search(r"all together .*yes", ranked)


def test_a_profile_is_not_taken_for_a_run(call: Call) -> None:
    arguments = ("profile", "dlrm", *TINY, "--steps", "5", "--no-report", "--quiet", "--no-peaks")
    assert call(*arguments, "--run-dir", "runs/p")[0] == 0
    for other in (("run", "--resume", "runs/p"), ("check", "--all", "runs")):
        code, _, err = call(*other)
        assert code in (2, 3), other
        assert "profile" in err or "no runs" in err
    assert call("report", "runs/p")[:2] == (0, "  page      runs/p/profile.html\n")
    Path("runs/p/profile.json").unlink()
    code, _, err = call(*arguments, "--run-dir", "runs/p")
    assert code == 0, f"what a killed profile left does not stand in the way: {err}"


def test_sigterm_during_a_profile_is_one_line_and_leaves_nothing(call, monkeypatch: pytest.MonkeyPatch) -> None:
    def terminated(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("recperf.execution.profiling.profile", terminated)
    code, out, err = call(
        "profile", "micro-dlrm", "--data.source", "embedded", "--no-peaks", "--run-dir", "p", "--json"
    )
    assert code == 75
    assert err == "error: stopped by SIGTERM before the profile was complete\n  try: run the profile again\n"
    assert json.loads(out)["error"]["exit_code"] == 75
    assert not Path("p").exists()
