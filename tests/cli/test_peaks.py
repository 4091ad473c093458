from __future__ import annotations

import json
from dataclasses import replace

import pytest

from recperf.cli import peaks as cli
from recperf.errors import UsageError
from recperf.measure import peaks
from recperf.measure.peaks import sampling


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "QUICK", sampling.TINY)
    monkeypatch.setattr(sampling, "FULL", replace(sampling.TINY, knee_points=2))


def test_the_ceilings_are_shown_and_kept(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.command([]) == 0
    said = capsys.readouterr().out
    for expected in (
        "product of float32",
        "read + write",
        "random rows",
        "2048 B",
        "time of a lookup by table size",
        "#",
    ):
        assert expected in said
    kept = peaks.load()
    assert kept is not None
    assert kept["quick"] is False
    assert f"written to {peaks.path_of(kept['machine'])}" in said
    assert "in place of" not in said


def test_a_second_measurement_says_what_it_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    cli.command(["--quiet"])
    first = peaks.load()
    assert first is not None
    assert capsys.readouterr().out == ""
    cli.command(["--quick"])
    assert f"replacing full ceilings measured at {first['measured']}" in capsys.readouterr().out
    peaks.path_of(first["machine"]).write_text("{")
    cli.command(["--quick"])
    assert "replacing an unreadable file" in capsys.readouterr().out


def test_json_is_the_object_that_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.command(["--quick", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == peaks.load()
    assert "measuring" in captured.err


def test_cache_ends_stand_between_the_sizes() -> None:
    points = [{"table_bytes": size << 10, "p50": float(size)} for size in (32, 64, 128)]
    lines = cli._knee({"threads": 1, "row_bytes": 256, "points": points}, {"L1": 64 << 10, "L2": 1 << 20})
    assert [("ends" in line) for line in lines[1:]] == [False, False, True, False]
    assert lines[-1].count("#") == cli.BAR


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (73.5e9, "FLOP/s", "73.5 GFLOP/s"),
        (12.0, "B/s", "12 B/s"),
        (14.34, "ns a row", "14.3 ns"),
        (2642.0, "ns", "2.64 us"),
    ],
)
def test_values_are_shown_in_the_unit_a_person_says(value: float, unit: str, shown: str) -> None:
    assert cli._value(value, unit) == shown


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(UsageError, match="did you mean '--quick'"):
        cli.command(["--quik"])
