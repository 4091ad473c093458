"""The commands as a user types them, in this process."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from recperf.cli import main
from recperf.data.known import movielens_like
from recperf.data.known.movielens import MovieLens
from recperf.data.known.movielens_like import generate
from recperf.stop import FLAG
from recperf.terminal import table

Call = Callable[..., tuple[int, str, str]]
QUICK = ["run", "micro-dlrm", "--data.source", "embedded", "--train.epochs", "1", "--target.beat", "none"]
QUICK += ["--train.batch-size", "1000", "--train.device", "cpu", "--no-peaks", "--no-report"]


@functools.cache
def few_ratings(seed: int) -> MovieLens:
    return generate(seed, users=120, items=200, ratings=5000)


@pytest.fixture
def call(call: Call, monkeypatch: pytest.MonkeyPatch) -> Call:
    # On all the embedded ratings, the baselines take most of a short run.
    monkeypatch.setattr(movielens_like, "generate", few_ratings)
    return call


COUNT = "print(sum(name.startswith('recperf') for name in sys.modules))"
WITHOUT_TORCH = f"""
import sys
from recperf.cli import main
for arguments in (["--help"], ["run", "--help"], ["show"], ["data", "--help"], ["--version"]):
    try:
        main(arguments)
    except SystemExit:
        pass
    if arguments == ["run", "--help"]:
        {COUNT}
assert "torch" not in sys.modules and "numpy" not in sys.modules
"""
RUNNING = f"""
import sys
import recperf.cli.run, recperf.execution.run, recperf.execution.training
import recperf.workloads.micro_dlrm.build, recperf.runs.report.run_report
assert "triton" not in sys.modules
import recperf.execution.measuring, recperf.execution.quality
{COUNT}
import torch
from recperf.measure.counting import Counter
from recperf.measure.trace.record import Recording
from recperf.models.dlrm_v4.stages import Stages
with Counter(1, 1):
    torch.ones(2) + 1
Recording(cuda=False).stop()
stages = Stages()
stages.run("part", lambda x: 2 * x.sum(), torch.ones(2, requires_grad=True))
stages.backward(1.0)
assert not {{"torch._dynamo", "sympy"}} & set(sys.modules)
"""


@pytest.mark.parametrize(("program", "most"), [(WITHOUT_TORCH, 40), (RUNNING, 165)], ids=["help", "run micro-dlrm"])
def test_a_command_loads_only_what_it_needs(program: str, most: int) -> None:
    """Counts the loaded modules of recperf; help and show need no torch, a run not its compiler, and no step triton."""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert max(int(line) for line in done.stdout.splitlines() if line.isdigit()) <= most


def test_list_and_show_as_json(call) -> None:
    names = [w["name"] for w in json.loads(call("show", "--json")[1])["workloads"]]
    assert "micro-dlrm" in names
    shown = json.loads(call("show", "micro-dlrm", "--train.batch-size", "512", "--json")[1])
    assert shown["config"]["train"]["batch_size"] == 512
    assert shown["estimate"]["parameters"]["total"] == 23001
    assert shown["estimate"]["table_bytes"] == 4 * 21192
    parts = shown["estimate"]["step"]
    assert parts["total"]["flops"] == sum(cost["flops"] for name, cost in parts.items() if name != "total")


def test_dry_run_runs_nothing(call, tmp_path: Path) -> None:
    code, out, _ = call(*QUICK, "--dry-run")
    assert code == 0
    assert "movielens-like" in out
    assert "synthetic" in out
    assert "nothing was run" in out
    assert list(tmp_path.iterdir()) == []


def test_a_run_leaves_everything(call, tmp_path: Path) -> None:
    code, out, err = call(*QUICK, "--train.batch-size", "50", "--run-dir", "r", "--json")
    assert code == 0
    result = json.loads(out)
    assert result == json.loads((tmp_path / "r" / "result.json").read_text())
    assert " · 1 epoch" in err
    assert result["data"]["synthetic"] is True
    assert "(synthetic)" in err
    assert sum(result["performance"]["budget"].values()) == pytest.approx(1)
    assert set(result["quality"]["baselines"]) == {"majority", "item_bias", "user_item_bias"}
    kinds = {json.loads(line)["kind"] for line in (tmp_path / "r" / "events.jsonl").read_text().splitlines()}
    assert {"step", "metric", "timing"} <= kinds
    names = {path.name for path in (tmp_path / "r").iterdir()}
    assert {"config.json", "machine.json", "events.jsonl", "result.json", "checkpoints"} <= names
    assert result["provenance"]["machine"] == json.loads((tmp_path / "r" / "machine.json").read_text())["fingerprint"]


def test_a_config_goes_round(call, tmp_path: Path) -> None:
    assert call(*QUICK, "--run-dir", "one", "--seed", "5", "--quiet") == (0, "", "")
    assert call("run", "--config", "one", "--run-dir", "two", "--quiet", "--no-peaks", "--no-report")[0] == 0
    first, second = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("one", "two"))
    assert first == second
    assert first["config"]["seed"] == 5
    one, two = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("one", "two"))
    assert one["quality"] == two["quality"]
    (tmp_path / "shown.json").write_text(call("show", "--config", "one", "--json")[1])
    assert call("run", "--config", "shown.json", "--seed", "6", "--dry-run")[0] == 0


def test_a_missed_target_is_a_failed_gate(call) -> None:
    code, out, err = call(*QUICK, "--run-dir", "r", "--target.auc", "0.99")
    assert code == 5
    assert " · target missed" in out
    assert err.startswith("error: the target was missed: AUC at least 0.99; ")
    assert json.loads(Path("r/result.json").read_text())["quality"]["met"] is False


def test_doctor(call) -> None:
    code, out, _ = call("doctor", "--json")
    findings = {finding["name"]: finding for finding in json.loads(out)["findings"]}
    assert code == 0
    assert findings["torch"]["state"] == "ok"
    assert findings["movielens-100k"]["fix"] == "recperf data get movielens-100k"
    assert "recperf works here" in call("doctor")[1]


def test_a_fault_of_our_own_is_not_dressed_up(call, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(arguments: list[str]) -> int:
        raise RuntimeError("oh")

    monkeypatch.setattr("recperf.cli.show.command", broken)
    code, _, err = call("show")
    assert code == 1
    assert "internal error: RuntimeError: oh" in err
    assert "Traceback" in err


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes."),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    ],
)
def test_running_out_of_memory_is_one_error_with_its_code(
    call, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr("recperf.execution.training.train", fails)
    code, out, err = call(*QUICK, "--quiet", "--json")
    assert code == 4
    told = json.loads(out)["error"]
    assert (told["what"], told["exit_code"], told["where"].get("cause", "")) == ("out of memory", 4, str(error))
    assert err.startswith("error: out of memory\n")


HOSTILE = "a\x1b[2Jb\x9bc\u202ed\x07"
"""A name that would clear the screen and reverse the text after it."""


def test_control_characters_out_of_files_are_printed_as_text(call: Call) -> None:
    events = [{"ph": "X", "cat": "cpu_op", "name": HOSTILE, "pid": 1, "tid": 1, "ts": 9 * i, "dur": 5} for i in (1, 2)]
    Path("trace.json").write_text(json.dumps({"traceEvents": events}))
    Path("events.csv").write_text(f"{HOSTILE},item,time,r\n1,2,3,1\n")
    Path(HOSTILE).mkdir()
    outputs = [
        call("profile", "--trace", "trace.json", "--verbose"),
        call("data", "import", "--events", "events.csv", "--store", "s", "--rating", "r", "--quiet"),
        call("report", HOSTILE),
        call("run", "--dry-run", "--run-dir", HOSTILE),
    ]
    for code, out, err in outputs:
        assert code in (0, 3), err
        assert "a\\x1b[2Jb\\x9bc\\u202ed\\x07" in out + err
        assert not set("\x1b\x9b\u202e\x07") & set(out + err)
    assert "a\\nb" in table([["name"], ["a\nb"]])


@pytest.mark.long
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has it")
def test_a_full_disk_under_the_output_loses_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-m", "recperf", *QUICK, "--run-dir", "r", "--train.max-steps", "30"]
    with Path("/dev/full").open("w") as full, Path("/dev/full").open("w") as stderr:
        done = subprocess.run(command, cwd=tmp_path, timeout=600, stdout=full, stderr=subprocess.PIPE)
        monkeypatch.setattr(sys, "stdout", full)
        monkeypatch.setattr(sys, "stderr", stderr)
        assert main(["show"]) == 4
        assert main(["show", "nothing"]) == 2
    assert done.returncode == 4
    assert (tmp_path / "r" / "seal.json").exists()
    expected = "error: standard output could not be written: No space left on device; nothing else failed\n"
    assert done.stderr.decode() == expected


@pytest.mark.parametrize(
    ("where", "became"),
    [("run.assessment_of", "nothing was trained yet"), ("measuring.measure_run", "what was trained is saved")],
)
def test_a_signal_outside_of_the_training_says_what_became_of_it(
    call: Call, monkeypatch: pytest.MonkeyPatch, where: str, became: str
) -> None:
    def stopped(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        FLAG.poll()

    monkeypatch.setattr(f"recperf.execution.{where}", stopped)
    code, _, err = call(*QUICK[:-1], "--run-dir", "r", "--train.max-steps", "10")
    assert (code, err.splitlines()[0]) == (75, f"error: stopped by SIGTERM; {became}")
