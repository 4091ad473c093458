from __future__ import annotations

from dataclasses import replace

import pytest

from recperf.cli import peaks as cli
from recperf.measure import peaks
from recperf.measure.peaks import sampling


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recperf.measure.peaks.other_work.OtherWork.share", lambda *_: 0.0)
    monkeypatch.setattr(sampling, "QUICK", sampling.TINY)
    monkeypatch.setattr(sampling, "FULL", replace(sampling.TINY, knee_points=2))


def test_the_ceilings_are_shown_and_kept(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.command([]) == 0
    printed = capsys.readouterr().out
    for expected in (
        "product of float32",
        "read + write",
        "random rows",
        "2048 B",
        "time of a lookup by table size",
        "#",
    ):
        assert expected in printed
    stored = peaks.load()
    assert stored is not None
    assert stored["quick"] is False
    assert f"written to {peaks.path_of(stored['machine'])}" in printed
    assert "in place of" not in printed


def test_a_disturbed_measurement_is_shown_but_not_stored(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cli.command(["--quiet"])
    first = peaks.load()
    assert cli.command(["--quick"]) == 0
    assert "beside 0% other work are better than quick ones" in capsys.readouterr().out
    monkeypatch.setattr("recperf.measure.peaks.other_work.OtherWork.share", lambda *_: 0.4)
    assert cli.command([]) == 0
    assert "are better than full ones beside 40% other work" in capsys.readouterr().out
    assert peaks.load() == first
