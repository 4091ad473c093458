from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import example_traces as made
import pytest

from recperf.errors import DataError
from recperf.measure.trace.analyse import analyse
from recperf.measure.trace.cut import write_cut
from recperf.measure.trace.read import read

STEPS = 20


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Twenty steps whose device work runs 700 us late, so that kernels of a step run inside the next one."""
    events: list[dict[str, Any]] = [made.op("aten::before", -100, 50)]
    for number in range(STEPS):
        for event in made.gpu_step(number, 1000.0 * number, 10 + 10 * number):
            late = event["cat"] in ("kernel", "gpu_memcpy") or event["ph"] == "f"
            events.append({**event, "ts": event["ts"] + (700 if late else 0)})
    events.append(made.op("aten::after", 1000.0 * STEPS + 50, 50))
    return Path(made.write(tmp_path / "source.json", events, torch_version="2.13.0"))


def content(path: Path) -> dict[str, Any]:
    raw = path.read_bytes()
    whole: dict[str, Any] = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
    return whole


@pytest.mark.parametrize("name", ["cut.json", "cut.json.gz"])
def test_a_cut_has_as_many_whole_steps_as_fit(source: Path, tmp_path: Path, name: str) -> None:
    limit = 0.03 if name.endswith("json") else 0.002
    cut = write_cut(source, tmp_path / name, limit)
    assert cut["file"] == name
    assert cut["bytes"] == (tmp_path / name).stat().st_size <= limit * 1e6
    assert cut["steps_recorded"] == STEPS
    assert 1 <= cut["steps_kept"] < STEPS
    trace = read(tmp_path / name)
    steps = [event.name for event in trace.host if event.name.startswith("recperf.step#")]
    assert steps == [f"recperf.step#{i}" for i in range(cut["steps_kept"])]
    # No kernel is lost though the last ones ran after the last step: they belong to whoever launched them.
    assert len(trace.device) == 6 * cut["steps_kept"]
    assert trace.header["torch_version"] == "2.13.0"
    assert trace.header["traceName"] == name
    assert not any(event.name in ("aten::before", "aten::after") for event in trace.host)


def test_a_cut_gives_the_same_analysis_per_step(source: Path, tmp_path: Path) -> None:
    write_cut(source, tmp_path / "cut.json", 0.03)
    whole, part = analyse(read(source)), analyse(read(tmp_path / "cut.json"))
    assert part["kernels"]["count"] == whole["kernels"]["count"] == 5
    assert part["parts"] == [pytest.approx(row) for row in whole["parts"]]


def test_metadata_stays_and_flows_are_complete(source: Path, tmp_path: Path) -> None:
    write_cut(source, tmp_path / "cut.json", 0.03)
    events = content(tmp_path / "cut.json")["traceEvents"]
    assert [event["name"] for event in events if event["ph"] == "M"] == ["process_name"]
    ends = [{event["id"] for event in events if event["ph"] == ph} for ph in ("s", "f")]
    assert ends[0] == ends[1]
    assert len(ends[0]) == len([event for event in events if event.get("cat") == "cuda_runtime"]) * 5 // 6


def test_a_flow_out_of_the_cut_is_dropped(source: Path, tmp_path: Path) -> None:
    whole = json.loads(source.read_text())
    across = {"cat": "fwdbwd", "name": "fwdbwd", "id": 999, "pid": made.HOST, "tid": made.HOST}
    whole["traceEvents"] += [{"ph": "s", **across, "ts": 5.0}, {"ph": "f", **across, "ts": 1000.0 * STEPS - 5}]
    source.write_text(json.dumps(whole))
    write_cut(source, tmp_path / "cut.json", 0.03)
    assert not any(event.get("id") == 999 for event in content(tmp_path / "cut.json")["traceEvents"])


@pytest.mark.parametrize("name", ["cut.json", "cut.json.gz"])
def test_a_trace_that_fits_is_written_whole(source: Path, tmp_path: Path, name: str) -> None:
    cut = write_cut(source, tmp_path / name, 50)
    assert (cut["steps_kept"], cut["steps_recorded"]) == (STEPS, STEPS)
    assert content(tmp_path / name)["traceEvents"] == content(source)["traceEvents"]


def test_a_limit_below_one_step_is_an_error(source: Path, tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"one step of the trace takes 0\.1 MB, more than the limit of 0\.001 MB"
    ) as raised:
        write_cut(source, tmp_path / "cut.json", 0.001)
    assert raised.value.fix == "allow 1 MB"
    assert [path.name for path in tmp_path.iterdir()] == ["source.json"]


def test_without_steps_a_trace_is_one_step(tmp_path: Path) -> None:
    events = [made.op("aten::mm", 10.0 * i, 5) for i in range(100)]
    source = made.write(tmp_path / "source.json", events)
    assert write_cut(source, tmp_path / "cut.json", 1)["steps_kept"] == 1
    with pytest.raises(DataError, match="one step of the trace takes"):
        write_cut(source, tmp_path / "other.json", 0.005)


def test_nan_is_written_as_null(tmp_path: Path) -> None:
    source = made.write(tmp_path / "source.json", [made.op("aten::mm", 0, 5, occupancy=[float("nan"), 1.0])])
    write_cut(source, tmp_path / "cut.json", 1)
    text = (tmp_path / "cut.json").read_text()
    assert "NaN" not in text
    assert '"occupancy":[null,1.0]' in text
