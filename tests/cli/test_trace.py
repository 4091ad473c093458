from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Callable
from pathlib import Path

import example_traces as made
import pytest

import recperf
from recperf.cli import report
from recperf.cli.profile import command
from recperf.errors import DataError, UsageError
from recperf.measure.profile import StepProfile


@pytest.fixture
def gpu(tmp_path: Path) -> Path:
    header = {"torch_version": "2.11.0", "cuda_runtime_version": 12080, "deviceProperties": [{"id": 0, "name": "H"}]}
    events = [*made.gpu_step(0, 0.0, 10), *made.gpu_step(1, 1000.0, 20)]
    return Path(made.write(tmp_path / "gpu.json.gz", events, **header))


def test_a_gpu_trace_in_words(gpu: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["--trace", str(gpu), "--verbose"]) == 0
    lines = capsys.readouterr().out.splitlines()
    printed = {" ".join(line.split()) for line in lines}
    assert "recorded by torch 2.11.0, CUDA 12.8" in printed
    assert "device H" in printed
    assert "steps 2, from the ranges that name them" in printed
    assert "idle: input 200 µs 20.0%" in printed
    assert "idle: sync 17.0 µs 1.7%" in printed
    assert "cudaStreamSynchronize aten::item, part loss 1 190 µs" in printed
    assert "host to device 1 195 KiB 20.0 µs 10.0 GB/s yes 0%" in printed
    assert "back backward 2 200 µs 100 µs 50.0% 30.0 µs" in printed
    assert "backward 1 120 µs 12.0% 120 µs 200 µs 2" in printed


def test_json_of_a_trace_is_a_profile_as_of_a_step(gpu: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["--trace", str(gpu), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert set(printed) == {*StepProfile.__struct_fields__, "seal"}
    assert sum(printed["shares"].values()) == pytest.approx(1.0)
    assert printed["idle"]["causes"]["input"] == pytest.approx(0.2)
    saved = gpu.with_name("profile.json")
    saved.write_text(json.dumps(printed))
    loaded = recperf.load(saved)
    assert loaded.verdict.limit == printed["verdict"]["limit"]
    assert "Device idle" in loaded.html()


def test_errors_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        command(["--trace", str(tmp_path / "none.json")])
    trace = made.write(tmp_path / "t.json", [made.op("aten::mm", 0, 30)])
    with pytest.raises(DataError, match="file of ceilings cannot be read"):
        command(["--trace", str(trace), "--peaks", str(tmp_path / "none.json")])
    with pytest.raises(DataError, match="file of ceilings is damaged"):
        command(["--trace", str(trace), "--peaks", str(trace)])
    with pytest.raises(UsageError):
        command(["--trace"])


def test_a_page_holds_the_trace_for_perfetto_and_no_markup_of_it(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script>"
    path = made.write(tmp_path / f"{'x' * 20}.json", [made.around(evil, 0, 9), made.op(evil, 1, 5)])
    assert report.command([str(path), "--out", str(tmp_path / "p.html")]) == 0
    page = (tmp_path / "p.html").read_text()
    assert "alert(1)" in page
    assert "<script>alert" not in page
    embedded = page.partition('<script type="text/plain">')[2].partition("</script>")[0]
    assert gzip.decompress(base64.b64decode(embedded)) == path.read_bytes()
    assert report.command([str(path)]) == 0
    assert path.with_suffix(".html").exists()


def test_a_folder_of_ranks_is_compared_and_merged(tmp_path: Path, runs_without_torch: Callable[..., None]) -> None:
    for rank in (0, 1):
        header = {"recperf": {"run": "a", "rank": rank, "ranks": 2, "host": "one"}}
        made.write(tmp_path / f"trace.rank{rank}.json.gz", made.gpu_step(0, 0.0, 10), **header)
    runs_without_torch("profile", "--trace", tmp_path)
    assert (tmp_path / "trace.merged.json.gz").exists()
    runs_without_torch("report", tmp_path)
    assert (tmp_path / "trace.html").exists()
