from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import example_traces as made
import pytest

from recperf.cli.trace import command
from recperf.errors import DataError, UsageError


@pytest.fixture
def gpu(tmp_path: Path) -> Path:
    header = {"torch_version": "2.11.0", "cuda_runtime_version": 12080, "deviceProperties": [{"id": 0, "name": "H"}]}
    events = [*made.gpu_step(0, 0.0, 10), *made.gpu_step(1, 1000.0, 20)]
    return Path(made.write(tmp_path / "gpu.json.gz", events, **header))


def test_a_gpu_trace_in_words(gpu: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["info", str(gpu)]) == 0
    lines = capsys.readouterr().out.splitlines()
    printed = {" ".join(line.split()) for line in lines}
    assert "recorded by torch 2.11.0, CUDA 12.8" in printed
    assert "device 0: H" in printed
    assert "steps 2" in printed
    assert "wall 1.000 ms per step" in printed
    assert "input wait 0.220 22.0 %" in printed
    assert "sync 0.202 20.2 %" in printed
    assert "cudaStreamSynchronize 1 0.190 aten::item, part loss" in printed
    assert "host to device 1 200 k 0.020 10.0 yes 0 %" in printed
    assert "back 2 0.200 100.0 50.0 % 30.0 backward" in printed
    assert "5 kernels, of which 1 (20 %) run for less than 10 us" in printed


def test_top_limits_the_rows_and_says_so(gpu: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command(["info", str(gpu), "--top", "2"])
    printed = capsys.readouterr().out
    assert "and 2 more; --top 4 shows all" in printed
    assert "relu " not in printed
    with pytest.raises(UsageError, match="at least 1"):
        command(["info", str(gpu), "--top", "0"])


def test_json_holds_every_section(gpu: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command(["info", str(gpu), "--json"])
    info = json.loads(capsys.readouterr().out)
    assert info["torch"] == "2.11.0"
    assert {"window", "parts", "operator_table", "kernels", "idle", "transfers"} < set(info)
    assert len(info["kernels"]["rows"]) == 4


def test_a_trace_without_a_device_or_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = made.write(tmp_path / "cpu.json", [made.op("aten::mm", 0, 30)])
    command(["info", str(path)])
    printed = capsys.readouterr().out
    assert printed.count("no device in this trace") == 3
    assert "no named steps; the whole trace counts as one" in printed
    assert "recorded by  unknown" in printed


def test_errors_name_the_file_and_a_misspelt_action_its_word(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        command(["info", str(tmp_path / "none.json")])
    with pytest.raises(UsageError, match="did you mean 'info'"):
        command(["inof", "x"])
    with pytest.raises(UsageError):
        command(["info"])


def test_reading_a_trace_needs_no_torch(gpu: Path, runs_without_torch: Callable[..., None]) -> None:
    """Reading somebody's trace must not wait seconds for torch, nor need it."""
    runs_without_torch("trace", "info", gpu)


def test_merge_takes_a_folder(tmp_path: Path, runs_without_torch: Callable[..., None]) -> None:
    for rank in (0, 1):
        header = {"recperf": {"run": "a", "rank": rank, "ranks": 2, "host": "one"}}
        made.write(tmp_path / f"trace.rank{rank}.json.gz", made.gpu_step(0, 0.0, 10), **header)
    runs_without_torch("trace", "merge", tmp_path)
    assert (tmp_path / "trace.merged.json.gz").exists()
