"""The traces of several ranks as one."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import example_traces as made
import pytest

from recperf.errors import DataError
from recperf.measure.trace.file import write_trace
from recperf.measure.trace.merge import merge
from recperf.measure.trace.read import read

BASE = 1_790_000_000_000_000_000


def trace(
    folder: Path,
    rank: int,
    *,
    at: float = 1000.0,
    base: int = BASE,
    host: str | None = "one",
    **about: Any,
) -> Path:
    """A rank that takes a step with an arrow to a kernel."""
    events = [
        made.around("recperf.step#0", at + 100, 500), made.op("aten::mm", at + 110, 50, external=7),
        made.call("cudaLaunchKernel", at + 120, 5, 3), made.kernel("gemm", at + 130, 60, 3),
        *made.flow(3, at + 120, at + 130),
        {"ph": "M", "name": "thread_name", "pid": made.HOST, "tid": made.HOST, "ts": 0, "args": {"name": "main"}},
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": 7, "ts": 0, "args": {"name": "stream 7"}},
        {"ph": "M", "name": "process_labels", "pid": 0, "tid": 0, "ts": 0, "args": {"labels": "GPU 0"}},
    ]  # fmt: skip
    header = {"recperf": {"run": "a", "rank": rank, "ranks": 2, "host": host, **about}, "baseTimeNanoseconds": base}
    return Path(made.write(folder / f"trace.rank{rank}.json.gz", events, **header))


def merged(folder: Path, paths: list[Path]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    merged_trace = merge(paths, folder / "merged.json.gz")
    return merged_trace, json.loads(gzip.decompress((folder / "merged.json.gz").read_bytes()))["traceEvents"]


def steps(events: list[dict[str, Any]]) -> dict[int, float]:
    """When each process began its step."""
    return {event["pid"]: event["ts"] for event in events if event["name"] == "recperf.step#0"}


def test_every_rank_is_a_process(tmp_path: Path) -> None:
    merged_trace, events = merged(tmp_path, [trace(tmp_path, 1), trace(tmp_path, 0)])
    processes = {(e["pid"], e["name"]): e["args"] for e in events if e["ph"] == "M" and e["name"].startswith("process")}
    assert [processes[pid, "process_name"] for pid in (1, 2)] == [{"name": "rank 0"}, {"name": "rank 1"}]
    assert {event["pid"] for event in events} == {1, 2}
    # What ran on the device stands below the host's threads of the same rank.
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    threads = {(e["pid"], e["name"]): e["tid"] for e in events if e["ph"] == "X"}
    for pid in (1, 2):
        assert names[pid, threads[pid, "aten::mm"]] == "main"
        assert names[pid, threads[pid, "gemm"]] == "GPU 0: stream 7"
        assert threads[pid, "aten::mm"] != threads[pid, "gemm"]
    # Arrows from launches to kernels stay inside their rank.
    ends = {(e["pid"], e["ph"]): e["id"] for e in events if e["ph"] in ("s", "f")}
    assert ends[1, "s"] == ends[1, "f"] != ends[2, "s"] == ends[2, "f"]
    assert merged_trace.events == 2 * 10
    assert [row.rank for row in merged_trace.ranks] == [0, 1]


def test_ranks_on_one_host_share_its_clock(tmp_path: Path) -> None:
    """The second counts from a moment 1 ms earlier, and was 200 us late to begin."""
    late = [trace(tmp_path, 0), trace(tmp_path, 1, at=2200.0, base=BASE - 1_000_000)]
    merged_trace, events = merged(tmp_path, late)
    assert merged_trace.clock == "one host's clock"
    assert steps(events)[2] - steps(events)[1] == pytest.approx(200.0)
    for host in ("two", None):
        assert "not verified" in merged(tmp_path, [late[0], trace(tmp_path, 1, host=host)])[0].clock


def test_traces_of_other_programs_name_their_rank(tmp_path: Path) -> None:
    paths = []
    for rank in (0, 1):
        info = {"backend": "nccl", "rank": rank, "world_size": 2}
        paths.append(made.write(tmp_path / f"{rank}.json", [made.op("mm", 5.0, 2.0)], distributedInfo=info))
    merged_trace, events = merged(tmp_path, paths)
    assert merged_trace.of == 2
    assert {event["pid"] for event in events} == {1, 2}


@pytest.mark.parametrize(
    ("second", "what"),
    [
        ({"rank": 0}, "two traces belong to rank 0"),
        ({"rank": 1, "run": "b"}, "different runs"),
        ({"rank": 1, "ranks": 4}, "different runs"),
        ({"rank": 1, "base": BASE + 10**12}, "do not overlap in time"),
        ({"rank": 1, "merged": [0, 1]}, "already merged"),
    ],
)
def test_traces_that_do_not_belong_together_are_refused(tmp_path: Path, second: dict[str, Any], what: str) -> None:
    (tmp_path / "other").mkdir()
    paths = [trace(tmp_path, 0), trace(tmp_path / "other", **second)]
    with pytest.raises(DataError, match=what):
        merge(paths, tmp_path / "merged.json.gz")
    assert not (tmp_path / "merged.json.gz").exists()


def test_files_that_are_no_trace_of_a_rank_are_refused(tmp_path: Path) -> None:
    for events, what in (([made.op("mm", 5.0, 2.0)], "does not name its rank"), ([], "no event with a valid time")):
        with pytest.raises(DataError, match=what):
            merge([trace(tmp_path, 0), made.write(tmp_path / "odd.json", events)], tmp_path / "merged.json.gz")


def test_events_without_a_valid_time_are_left_out(tmp_path: Path) -> None:
    strange = [made.op("aten::strange", 0, 5) | {"ts": 1e308}, made.op("aten::strange", 0, 5) | {"dur": "x"}]
    paths = [trace(tmp_path, rank) for rank in (0, 1)]
    _, sane = merged(tmp_path, paths)
    for path in paths:
        content = json.loads(gzip.decompress(path.read_bytes()))
        content["traceEvents"] += strange
        path.write_bytes(gzip.compress(json.dumps(content).encode()))
    _, events = merged(tmp_path, paths)
    assert events == sane
    assert read(paths[0]).ignored == 2


def test_numbers_that_are_not_json_are_written_as_null(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = [{"args": {"rate": [math.nan, 1.5], "\ud800": -math.inf}}, {"name": "ä"}]
    write_trace(tmp_path / "trace.json.gz", events, {}, fix="")
    content = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))
    assert content["traceEvents"] == [{"args": {"rate": [None, 1.5], "\ud800": None}}, {"name": "ä"}]
