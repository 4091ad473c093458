from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import convert
from msgspec.structs import replace as changed

from recperf import machine
from recperf.errors import DataError
from recperf.files import json_bytes
from recperf.jsonfile import Problem, fit, sealed
from recperf.machine import machine_facts, usable_cores
from recperf.measure import peaks
from recperf.measure.ceilings import ceilings_of
from recperf.measure.peaks import cpu, other_work, sampling
from recperf.measure.peaks.records import PeakFigure, Peaks, Rates
from recperf.measure.peaks.sampling import FULL, MIB, TINY, Sampler, better, figure, gather_row, knee_of

RATES = ("gemm", "copy", "read", "update", "first_touch", "cached", "special", "gather")


@pytest.fixture(scope="module")
def measured() -> Peaks:
    return peaks.measure_with(TINY, quick=True, say=lambda _: None)


@pytest.fixture
def stored(measured: Peaks) -> Peaks:
    """A copy that a test may change."""
    return copy.deepcopy(measured)


@pytest.fixture
def content(measured: Peaks) -> dict[str, Any]:
    """Its file."""
    return dict(json.loads(json_bytes(measured)))


def fault(content: dict[str, Any]) -> str:
    fitted = fit(content, Peaks)
    return str(fitted) if isinstance(fitted, Problem) else ""


@pytest.mark.parametrize(
    ("part", "field"),
    [
        ("", "knee.points"),
        ("", "calls.view"),
        ("other_threads.9.", "gather.dram.rows.0.ns"),
        ("gpu.H200.", "launch.kernel"),
    ],
)
@pytest.mark.parametrize("value", [None, 1e308])
def test_damage_of_any_part_is_named(content: dict[str, Any], part: str, field: str, value: Any) -> None:
    content["other_threads"]["9"] = {name: content[name] for name in RATES}
    launch = dict.fromkeys(("kernel", "queue"), content["copy"])
    content["gpu"] = {"H200": {name: content[name] for name in ("knee", "calls", *RATES)} | {"launch": launch}}
    damaged = json.loads(json.dumps(content))
    assert fault(damaged) == ""
    *path, last = f"{part}{field}".split(".")
    at = damaged
    for name in path:
        at = at[int(name) if isinstance(at, list) else name]
    at[int(last) if isinstance(at, list) else last] = value
    assert field in fault(damaged)


def test_the_layout_is_as_documented(content: dict[str, Any]) -> None:
    assert content["schema"] == 2
    assert content["machine"] == machine_facts()
    assert content["quick"] is True
    assert content["threads"] == min(torch.get_num_threads(), usable_cores())
    assert content["gemm"]["float32"]["shape"] == [32, 32, 32]
    assert {"float32", "float64"} <= set(content["gemm"])
    assert {"elementwise", "view", "product", "reduction", "index", "embedding_bag", "node"} < set(content["calls"])
    assert [row["row_bytes"] for row in content["gather"]["dram"]["rows"]] == [32, 64, 128, 256, 512, 1024, 2048]
    assert content["gather"]["cache"]["table_bytes"] < content["gather"]["dram"]["table_bytes"] == MIB
    assert [row["row_bytes"] for row in content["gather"]["near"]["rows"]] == [64, 256, 1024]
    assert cpu.cached_tables({"caches": {"L2": 2 * MIB, "L3": 300 * MIB}}, 8 * MIB) == {"cache": 2 * MIB, "near": MIB}
    assert cpu.cached_tables({"caches": {}}, MIB) == {"cache": MIB // 4, "near": MIB // 4}
    knee = content["knee"]
    assert (knee["row_bytes"], knee["threads"]) == (256, 1)
    assert [point["table_bytes"] >> 10 for point in knee["points"]] == [32, 64, 128, 256, 512, 1024]
    assert knee["bytes"] == (knee_of(convert(knee["points"], list[PeakFigure])) or MIB)
    assert all(set(one) == set(RATES) for one in content["other_threads"].values())


KIB = 1 << 10


def curve(ns: Callable[[int], float], *, noise: dict[int, float] | None = None) -> list[PeakFigure]:
    """Points of 32 KiB to 512 MiB; a table of so many KiB in `noise` takes so many times longer."""
    sizes = [32 * KIB << step for step in range(15)]
    times = [ns(size) * (noise or {}).get(size // KIB, 1.0) for size in sizes]
    return [figure([time], "ns", table_bytes=size) for size, time in zip(sizes, times)]


def two_steps(size: int, *, l2: int = MIB, l3: int = 32 * MIB, ns: tuple[float, float, float] = (15, 40, 100)) -> float:
    return ns[0] if size <= l2 else ns[1] if size <= l3 else ns[2]


def test_the_knee_is_where_half_of_the_difference_is_paid() -> None:
    def knee(ns: Callable[[int], float], **noise: Any) -> float:
        """In MiB."""
        return (knee_of(curve(ns, **noise)) or 0) / MIB  # type: ignore[arg-type]

    assert 1 <= knee(lambda size: two_steps(size, ns=(15, 100, 100))) < 2
    assert 32 <= knee(two_steps) < 64
    assert 1 <= knee(lambda size: two_steps(size, ns=(15, 75, 100))) < 2, "an L3 about as slow as memory is no cache"
    assert 32 <= knee(two_steps, noise={64: 9.0, 4096: 3.0, 256 * KIB: 0.3}) < 64, "single disturbed points"
    assert knee(lambda size: 50 + size / (512 * MIB)) == 0, "a flat curve has none"
    # A curve that was measured; its times pass (15 + 100) / 2 between 8 and 16 MiB.
    measured = [14.5, 15.6, 16.8, 17.6, 19.8, 25.9, 30.6, 34.6, 47.8, 71.7, 79.4, 85.7, 92.3, 94.4, 102.1]
    points = curve(lambda size: measured[(size // (32 * KIB)).bit_length() - 1])
    assert 9 <= (knee_of(points) or 0) / MIB <= 12


def test_ceilings_are_those_of_the_number_of_threads(measured: Peaks, stored: Peaks) -> None:
    rates = Rates(**{name: copy.deepcopy(getattr(measured, name)) for name in RATES})
    rates.gemm["float64"].p50 = 7.0
    peaks_ = changed(stored, threads=4, other_threads={"1": rates})
    whole, single = ceilings_of(peaks_, threads=4), ceilings_of(peaks_, threads=1)
    assert whole == ceilings_of(peaks_)
    assert single.flops["float64"] == 7.0 != whole.flops["float64"] == measured.gemm["float64"].p50
    assert (single.threads, single.cache_bytes, single.calls) == (1, whole.cache_bytes, whole.calls)
    assert ceilings_of(peaks_, threads=3) is None
    assert ceilings_of(peaks_, device="a GPU elsewhere") is None
    assert ceilings_of(None) is None
    half = ceilings_of(peaks_, threads=2, ranks=2)
    assert (half.stream, half.cache_bytes) == (whole.stream / 2, whole.cache_bytes // 2)
    assert half.row_ns(96) == pytest.approx(2 * whole.row_ns(96))
    assert whole.row_ns(64, cached=True) == dict(whole.rows_cache)[64]


def test_streams_are_as_fast_as_the_fastest_kind(stored: Peaks) -> None:
    for name, rate in (("copy", 2e10), ("read", 1e10), ("update", 3e10)):
        setattr(stored, name, figure([rate] * 3, "B/s"))
    ceilings = ceilings_of(stored)
    assert ceilings.stream == 3e10
    assert ceilings.largest_cache >= max(stored.machine["caches"].values(), default=0)


def test_what_is_missing_is_measured_once_and_stored(measured: Peaks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peaks, "measure", lambda **_: changed(copy.deepcopy(measured), other_work=0.0))
    monkeypatch.setattr(sampling, "QUICK", TINY)
    said: list[str] = []
    assert peaks.require(3, said.append) == peaks.load()
    assert [line.split(" of ")[0].split(" for ")[0] for line in said] == ["measuring the ceilings"] * 2
    again = peaks.require(3, said.append)
    assert "3" in again.other_threads
    added = set(again.notes) - set(measured.notes)
    assert all("other processes" in note for note in added), "progress is not a note"
    assert said[2:] == []


def test_old_or_damaged_ceilings_are_measured_anew(
    stored: Peaks, measured: Peaks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peaks, "measure", lambda **_: measured)
    path = peaks.save(changed(stored, schema=1))
    for content, says in ((path.read_bytes(), "has schema 1; this recperf reads 2"), (b"{", "is damaged")):
        path.write_bytes(content)
        said: list[str] = []
        assert peaks.require(None, said.append) == peaks.load() == measured
        assert says in said[0]
        assert said[0].endswith("measured again")


def test_disturbed_ceilings_never_replace_better_ones(stored: Peaks, monkeypatch: pytest.MonkeyPatch) -> None:
    better, worse = changed(stored, other_work=0.2), changed(stored, other_work=0.4, measured="later")
    quiet = changed(stored, other_work=0.1, measured="last")
    for measured, expected in ((worse, worse), (better, better), (worse, better), (quiet, quiet), (worse, quiet)):
        peaks.save(measured)
        assert peaks.load() == expected
    # The same for a number of threads.
    monkeypatch.setattr(sampling, "QUICK", TINY)
    threads = quiet.other_threads
    for share, expected_share in ((0.3, 0.3), (0.5, 0.3), (0.2, 0.2)):
        monkeypatch.setattr("recperf.measure.peaks.other_work.OtherWork.share", lambda *_, share=share: share)
        peaks.add_threads(quiet, 3)
        assert threads["3"].other_work == expected_share
        assert peaks.has_threads(quiet, 3)
    monkeypatch.setattr("recperf.measure.peaks.other_work.OtherWork.share", lambda *_: 0.0)
    assert not peaks.has_threads(quiet, 3), "measured again, now that the machine is quiet"


def test_quick_ceilings_replace_full_ones_only_if_those_were_disturbed(
    stored: Peaks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recperf.measure.peaks.other_work.OtherWork.share", lambda *_: 0.0)
    rates = Rates(**{name: getattr(stored, name) for name in RATES})
    full = changed(stored, quick=False, other_threads={"7": rates})
    quick = changed(stored, quick=True, measured="later")
    for before, measured, replaced in ((0.1, 0.0, False), (0.2, 0.25, False), (0.2, 0.14, True)):
        peaks.path_of(stored.machine).unlink(missing_ok=True)
        peaks.save(changed(full, other_work=before))
        monkeypatch.setattr(peaks, "measure", lambda share=measured, **_: changed(quick, other_work=share))
        result = peaks.require(None, lambda _: None)
        assert (result.measured == "later") is replaced
        assert result == peaks.load()
        # What is known about other numbers of threads stays, with what was beside it.
        assert (result.other_threads["7"].other_work or result.other_work) == before
    # Two quick ones: beside 5 to 15 % other work the quieter one stays; less than that counts as none.
    for share, expected in ((0.1, 0.1), (0.14, 0.1), (0.03, 0.03), (0.1, 0.03), (0.04, 0.04)):
        peaks.save(changed(quick, other_work=share))
        assert peaks.load().other_work == expected


@pytest.mark.parametrize(
    ("allowed", "cores", "files", "expected"),
    [
        ({0, 1}, 2, {}, 0.5),  # One of two cores.
        ({0, 1}, 1, {}, 0.0),  # A quota of one core leaves the other to others,
        ({0, 1}, 1, {"cpu.stat": "usage_usec {used}\nthrottled_usec 0"}, 0.4),  # unless they share the quota,
        ({0, 1}, 1, {"cpu/cpu.stat": "throttled_time {throttled}"}, 0.3),  # or it holds this process back.
    ],
)
def test_other_work_is_what_others_take_of_the_own_cores(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    allowed: set[int],
    cores: int,
    files: dict[str, str],
    expected: float,
) -> None:
    """For ten seconds this process does nothing; others use core 0, in part by a hypervisor."""
    seconds = 0.0

    def write() -> None:
        ticks = int(seconds * os.sysconf("SC_CLK_TCK"))
        stat = f"cpu  0\ncpu0 {ticks // 2} 0 0 9 9 0 0 {ticks - ticks // 2} 0 0\ncpu1 0 0 0 9 9 0 0 0 0 0\nintr 5\n"
        (tmp_path / "stat").write_text(stat)
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            figures_ = {"used": int(4e5 * seconds), "throttled": int(3e8 * seconds)}
            (tmp_path / name).write_text(text.format(**figures_) + "\n")

    write()
    real = Path
    monkeypatch.setattr(other_work, "Path", lambda name: tmp_path / "stat" if name == "/proc/stat" else real(name))
    monkeypatch.setattr(other_work, "_CGROUP", tmp_path)
    monkeypatch.setattr(other_work, "_allowed", lambda: allowed)
    monkeypatch.setattr(other_work, "usable_cores", lambda: cores)
    monkeypatch.setattr(other_work, "monotonic", lambda: seconds)
    monkeypatch.setattr(other_work, "_own_seconds", lambda: 0.0)
    watch = other_work.OtherWork()
    seconds = 10.0
    write()
    assert watch.share() == pytest.approx(expected)
    assert watch.share(own_seconds=30.0) is None, "the system reports less than this process used"


def test_the_quota_of_a_container_limits_the_cores(tmp_path: Path) -> None:
    for text, cores in (("150000 100000", [2]), ("max 100000", [])):
        (tmp_path / "cpu.max").write_text(text + "\n")
        assert machine._container_cores(tmp_path) == cores
    (tmp_path / "cpu.max").unlink()
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    for text, cores in (("100000", [1]), ("-1", [])):
        (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(text + "\n")
        assert machine._container_cores(tmp_path) == cores


def test_a_noisy_series_is_repeated_and_the_faster_one_counts() -> None:
    script = iter([9, 90, 20, 10, 11, 12])
    sampler = Sampler(replace(TINY, tries=3, patience=1e9))
    assert sampler.readings(lambda: next(script), warm_ups=0) == [10, 11, 12]


def test_the_faster_of_two_measurements_counts_for_each_figure() -> None:
    slow, fast = [20.0, 21.0, 22.0], [10.0, 11.0, 12.0]
    first, second = (
        {"a": figure(readings, "ns"), "b": figure(readings, "B/s"), "rows": [gather_row(64, 1, {"take": readings})]}
        for readings in (slow, fast)
    )
    assert better(first, second) == {"a": second["a"], "b": first["b"], "rows": second["rows"]}


def test_at_most_a_quarter_of_the_memory_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "available_bytes", lambda: 64 * MIB)
    notes: list[str] = []
    table = cpu.memory_table(FULL, 32 * MIB, notes.append)
    assert table.numel() * 4 <= 16 * MIB
    assert "memory is short" in notes[0]
    assert "last-level cache" in notes[1]
    product = cpu.product(
        Sampler(replace(TINY, product_side=1 << 20, product_seconds=1e9, least=1, most=1)), torch.float32
    )
    assert 3 * 4 * (product.shape or [0])[0] ** 2 <= 16 * MIB


def test_ceilings_of_another_machine_are_refused(stored: Peaks) -> None:
    assert peaks.load() is None
    path = peaks.save(stored)
    assert path == peaks.path_of(machine_facts())
    assert peaks.load() == stored
    ours = stored.machine["fingerprint"]
    stored.machine = {**stored.machine, "cpu": "abacus", "fingerprint": "f" * 16}
    path.write_text(json.dumps(sealed(stored)))
    with pytest.raises(DataError, match="another machine") as caught:
        peaks.load()
    assert "f" * 16 in caught.value.what
    assert "abacus" in caught.value.where["measured on"]
    with pytest.raises(DataError, match=ours):
        peaks.require_own(stored, machine_facts())
