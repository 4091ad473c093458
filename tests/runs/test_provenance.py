from __future__ import annotations

from recperf.runs.provenance import checkout, packages


def test_packages_and_checkout_are_recorded() -> None:
    assert packages()["torch"]
    assert set(checkout()) == {"commit", "dirty"}
