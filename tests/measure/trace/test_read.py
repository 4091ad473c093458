from __future__ import annotations

import gzip
import json
import time
from pathlib import Path

import example_traces as made
import pytest

from recperf.errors import DataError
from recperf.measure.trace.analyse import analyse
from recperf.measure.trace.file import Scan
from recperf.measure.trace.read import read


@pytest.mark.parametrize("name", ["t.json", "t.json.gz", "no-suffix"])
def test_events_of_plain_and_packed_files(tmp_path: Path, name: str) -> None:
    path = made.write(tmp_path / name, made.gpu_step(0, 0.0, 10), torch_version="2.13.0")
    trace = read(path)
    assert len(trace.device) == 6
    assert {event.kind for event in trace.host} == {"op", "range", "call"}
    assert trace.header["torch_version"] == "2.13.0"
    mm = next(event for event in trace.host if event.name == "aten::mm")
    assert mm.shapes.dims == ((64, 32), (32, 16))


@pytest.mark.parametrize("piece", [1, 64])
def test_the_read_size_does_not_matter(tmp_path: Path, piece: int) -> None:
    header = {"number": 12.75, "text": 'a "quoted" ] } \\ line', "deep": {"traceEvents": [1, 2]}, "after": None}
    path = made.write(tmp_path / "t.json", made.gpu_step(0, 0.5, 10), **header)
    scan = Scan(path, piece=piece)
    events = list(scan.events())
    assert events == json.loads(path.read_text())["traceEvents"]
    assert {name: scan.header[name] for name in header} == header


def test_a_bare_list_may_lack_its_bracket(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    text = json.dumps([made.op("aten::mm", 0, 5), made.op("aten::mm", 5, 5)])
    for written in (text, text[:-1], text[:-1] + ",\n"):
        path.write_text(written)
        assert len(read(path).host) == 2


def test_categories_of_old_profilers_are_known(tmp_path: Path) -> None:
    old = [
        {**made.op("ProfilerStep#1", 0, 50), "cat": "Operator"},
        {**made.call("cudaLaunchKernel", 1, 2, 9), "cat": "Runtime"},
        {**made.kernel("k", 5, 5, 9), "cat": "Kernel"},
        {**made.copy("Memcpy HtoD (Pageable -> Device)", 11, 5, 10, 8), "cat": "Memcpy"},
    ]
    trace = read(made.write(tmp_path / "t.json", old))
    assert [event.kind for event in trace.host] == ["range", "call"]
    assert [work.kind for work in trace.device] == ["kernel", "copy"]


def test_invalid_events_are_ignored(tmp_path: Path) -> None:
    odd = [
        {"ph": "X", "cat": "kernel", "name": "no time"},
        {"ph": "X", "cat": "kernel", "name": "nan", "ts": float("nan"), "dur": 1},
        {"ph": "X", "cat": "kernel", "name": "negative", "ts": 1, "dur": -1},
        {"ph": "X", "cat": "kernel", "name": "huge", "ts": 10**400, "dur": 1},
        {"ph": "X", "cat": "something new", "name": "x", "ts": 1, "dur": 1},
        {"ph": "X", "cat": "kernel", "name": "words", "ts": 1, "dur": 1, "args": "none"},
        {"ph": "X", "cat": "cpu_op", "name": "list", "ts": 1, "dur": 1, "args": {"Input Dims": [[[2, 3], [4]], 5]}},
    ]
    trace = read(made.write(tmp_path / "t.json", odd))
    assert [work.name for work in trace.device] == ["words"]
    assert (trace.events, trace.ignored, trace.untimed) == (8, 5, 4)
    assert trace.host[0].shapes.dims == ((), ())


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty"),
        (b"PK\x03\x04", "not a trace"),
        (b'{"a": 1}', "no list traceEvents"),
        (b'{"traceEvents": [{"ph": "X"}, {"ph": "X", "na', "ends in the middle, after 1 events"),
        (b'{"traceEvents": [{"ph": "X"}]', "ends in the middle, after 1 events"),
        (b'[{"ph": "X"}, {"ph": ', "ends in the middle, after 1 events"),
        (b'{"traceEvents": [{"ph" = 3}' + b" " * 100 + b"]}", "not valid JSON at character 2"),
        (b'{"traceEvents": [' + b"[" * 100_000, "not valid JSON"),
        (b'{"traceEvents": [{"ts": ' + b"9" * 5000 + b"}]}", "not valid JSON"),
        (gzip.compress(b'{"traceEvents": [{"ph": "X"}]}', mtime=0)[:-9], "ends in the middle, after"),
        (b"\x1f\x8b\x08\x00garbage-that-is-long-enough", "not intact gzip"),
    ],
)
def test_a_broken_file_is_an_error_with_its_cause(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=says) as raised:
        read(path)
    assert raised.value.where["file"] == str(path)
    assert raised.value.fix
    with pytest.raises(DataError, match="cannot be read"):
        read(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"traceEvents": [{"name": "' + b"x" * (20 << 20) + b'"}]}', "event 1 or a field .* more than 8 MiB"),
        (b'{"a": [' + b"1," * (10 << 20) + b'1], "traceEvents": []}', "or a field .* more than 8 MiB"),
        (b'{"a": "' + b'", "a": "'.join([b"x" * (3 << 20)] * 3) + b'", "traceEvents": []}', "fields .* than 8 MiB"),
        (b'{"traceEvents": [{"ts": ' + b"9" * (20 << 20) + b"}]}", "not valid JSON|more than 8 MiB"),
    ],
)
def test_values_of_absurd_length_are_refused(tmp_path: Path, content: bytes, says: str) -> None:
    """Also in a small file: they compress well."""
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(content, 1))
    with pytest.raises(DataError, match=says):
        read(path)


def long_trace(path: Path, steps: int, *, frames: int = 0, names: str = "ProfilerStep#{}") -> Path:
    """Host events of all steps come first, as torch.profiler writes them; work of a step runs during the next one."""
    frame = {**made.op("module.py(1): f", 0, 1), "cat": "python_function"}
    host, device = [], []
    for step in range(steps):
        at = 1000.0 * step
        host += [made.around(names.format(step), at, 990), *({**frame, "ts": at + one} for one in range(frames))]
        for one in range(100 * step, 100 * step + 100):
            begin = at + 9 * (one % 100)
            host += [made.op("aten::mm", begin, 5, external=one), made.call("cudaLaunchKernel", begin + 1, 2, one)]
            device.append(made.kernel("gemm", begin + 1000, 5, one))
    path.write_text(json.dumps({"traceEvents": [*host, *device]}))
    return path


@pytest.mark.long
def test_of_a_long_trace_the_first_steps_are_read_with_their_device_work(tmp_path: Path) -> None:
    path = long_trace(tmp_path / "t.json", 40, frames=10)
    whole, part = read(path), read(path, most=4000)
    assert not whole.part
    assert "the first 11 of 40 steps were read, since the trace has 12,440 events" in part.part
    assert part.events == whole.events
    assert [len(part.host), len(part.python), len(part.device)] == [11 * 201, 11 * 10, 11 * 100]
    assert part.host == whole.host[: len(part.host)]
    assert part.device == whole.device[: len(part.device)]
    alone = read(long_trace(tmp_path / "alone.json", 11, frames=10))
    assert analyse(part) == analyse(alone)
    without = read(path, most=340)
    assert "the first 1 of 40 steps were read" in without.part
    assert "Python frames were left out" in without.part
    for most, says in ((200, "events in a step"), (20, "steps")):
        with pytest.raises(DataError, match=f"more than {most} {says}"):
            read(path, most=most)
    with pytest.raises(DataError, match="events and no steps"):
        read(long_trace(tmp_path / "none.json", 5, names="forward"), most=500)


def test_reading_needs_less_memory_than_the_file(tmp_path: Path) -> None:
    """A scan holds about a piece of the file, not the file."""
    import tracemalloc

    path = tmp_path / "t.json"
    row = json.dumps(made.op("aten::mm", 0, 5, note="x" * 400))
    path.write_text('{"traceEvents": [' + ",".join([row] * 6_000) + "]}")
    assert path.stat().st_size > 3e6
    tracemalloc.start()
    assert sum(1 for _ in Scan(path, piece=1 << 16).events()) == 6_000
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1.5e6


def test_a_trace_above_the_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recperf.measure.trace.file.LARGEST", 1000)
    with pytest.raises(DataError, match="has more than"):
        read(made.write(tmp_path / "t.json.gz", made.gpu_step(0, 0.0, 10)))


@pytest.mark.parametrize(("filler", "message"), [(b" ", "of white space in one place"), (b",", "not valid JSON")])
def test_gigabytes_of_nothing_are_refused_at_once(tmp_path: Path, filler: bytes, message: str) -> None:
    path = tmp_path / "trace.json.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b'{"traceEvents": [')
        for _ in range(64):
            file.write(filler * (1 << 20))
    began = time.process_time()
    with pytest.raises(DataError, match=message):
        read(path)
    assert time.process_time() - began < 2.0
