from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from recperf.errors import DataError, MachineError
from recperf.machine import machine_facts
from recperf.measure import peaks
from recperf.measure.peaks import cpu, sampling
from recperf.measure.peaks.sampling import FULL, MIB, TINY, Sampler, better, figure, noisy


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    return peaks.measure_with(TINY, quick=True, say=lambda _: None)


@pytest.fixture
def stored(measured: dict[str, Any]) -> dict[str, Any]:
    """A copy that a test may change."""
    return dict(json.loads(json.dumps(measured)))


def figures(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, list):
        return [result for item in value for result in figures(item)]
    if not isinstance(value, dict):
        return []
    return [value] if "p50" in value else [result for item in value.values() for result in figures(item)]


def test_every_figure_is_positive_ordered_and_has_a_unit(measured: dict[str, Any]) -> None:
    result = figures(measured)
    assert len(result) > 30
    for one in result:
        assert 0 < one["p20"] <= one["p50"] <= one["p80"]
        assert one["n"] >= 3
        assert one["unit"].startswith(("ns", "B/s", "FLOP/s"))
    assert peaks.faults(measured) == []


def test_the_layout_is_as_documented(measured: dict[str, Any]) -> None:
    assert measured["schema"] == 1
    assert measured["machine"] == machine_facts()
    assert measured["quick"] is True
    assert measured["threads"] == torch.get_num_threads()
    assert measured["gemm"]["float32"]["shape"] == [32, 32, 32]
    assert set(measured["dispatch"]) == {"op", "autograd"}
    for table in ("cache", "dram"):
        assert [row["row_bytes"] for row in measured["gather"][table]["rows"]] == [32, 64, 128, 256, 512, 1024, 2048]
    assert measured["gather"]["cache"]["table_bytes"] < measured["gather"]["dram"]["table_bytes"] == MIB
    knee = measured["knee"]
    assert (knee["row_bytes"], knee["threads"]) == (256, 1)
    assert [point["table_bytes"] >> 10 for point in knee["points"]] == [32, 64, 128, 256, 512, 1024]
    assert (measured["gpu"] is None) == (not torch.cuda.is_available())


def test_a_noisy_series_is_repeated_and_the_faster_one_counts() -> None:
    script = iter([9, 90, 20, 10, 11, 12])
    sampler = Sampler(replace(TINY, tries=3, patience=1e9))
    assert sampler.readings(lambda: next(script), warm_ups=0) == [10, 11, 12]


def test_the_faster_of_two_measurements_counts_for_each_figure() -> None:
    slow, fast = [20.0, 21.0, 22.0], [10.0, 11.0, 12.0]
    first = {"a": figure(slow, "ns"), "b": figure(slow, "B/s"), "rows": [{"ns": figure(slow, "ns"), "bytes_per_s": 1}]}
    second = {"a": figure(fast, "ns"), "b": figure(fast, "B/s"), "rows": [{"ns": figure(fast, "ns"), "bytes_per_s": 2}]}
    assert better(first, second) == {"a": second["a"], "b": first["b"], "rows": second["rows"]}


def test_noisy_figures_are_listed() -> None:
    rows = [{"row_bytes": 64, "ns": figure([1, 5, 9], "ns"), "bytes_per_s": figure([1, 5, 9], "B/s")}]
    result = {"copy": figure([10, 10, 10], "B/s"), "gather": {"dram": {"rows": rows}}}
    assert noisy(result) == ["gather dram rows 64 ns"]


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
    assert 3 * 4 * product["shape"][0] ** 2 <= 16 * MIB


def test_saved_ceilings_are_loaded(stored: dict[str, Any]) -> None:
    assert peaks.load() is None
    path = peaks.save(stored)
    assert path == peaks.path_of(machine_facts())
    assert path.parent.name == "machines"
    assert peaks.load() == stored
    assert peaks.load(stored["machine"]) == stored


def test_ceilings_of_another_machine_are_refused(stored: dict[str, Any]) -> None:
    path = peaks.save(stored)
    ours = stored["machine"]["fingerprint"]
    stored["machine"] = {**stored["machine"], "cpu": "abacus", "fingerprint": "f" * 16}
    path.write_text(json.dumps(stored))
    with pytest.raises(DataError, match="another machine") as caught:
        peaks.load()
    assert "f" * 16 in caught.value.what
    assert ours in caught.value.what
    assert caught.value.where["file"] == str(path)
    assert "abacus" in caught.value.where["measured on"]
    assert caught.value.fix == "recperf peaks"
    with pytest.raises(DataError, match=ours):
        peaks.require_own(stored, machine_facts())


@pytest.mark.parametrize(
    "damaged",
    [
        lambda stored: json.dumps(stored)[:-40],
        lambda stored: "[]",
        lambda stored: json.dumps(stored | {"schema": 99}),
        lambda stored: json.dumps(stored | {"gather": {}}),
        lambda stored: json.dumps(stored | {"copy": stored["copy"] | {"p50": None}}),
        lambda stored: json.dumps(stored | {"read": stored["read"] | {"p80": stored["read"]["p20"] / 2}}),
    ],
    ids=["cut", "list", "schema", "section", "null", "order"],
)
def test_a_damaged_file_is_refused(stored: dict[str, Any], damaged: Callable[[dict[str, Any]], str]) -> None:
    path = peaks.save(stored)
    path.write_text(damaged(stored))
    with pytest.raises(DataError) as caught:
        peaks.load()
    assert caught.value.exit_code == 3
    assert caught.value.where["file"] == str(path)
    assert caught.value.fix == "recperf peaks"


def test_a_folder_that_cannot_be_written_is_an_error(
    stored: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RECPERF_HOME", str(tmp_path / "file"))
    with pytest.raises(MachineError, match="cannot write") as caught:
        peaks.save(stored)
    assert "RECPERF_HOME" in (caught.value.fix or "")
