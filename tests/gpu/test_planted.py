"""Planted causes through the public API on a GPU: no wrong verdict with a high confidence, and 95 of 100 right."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from planted_cases import Machine
from recommender_cases import CASES

import recperf
from recperf.measure import peaks
from recperf.measure.ceilings import ceilings_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SLOW = ("compiled", "beside")
"""Parts of the names of cases that take more than ten seconds on a GPU."""


def test_causes_are_named_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECPERF_HOME", str(tmp_path / "home"))
    threads = torch.get_num_threads()
    ceilings = ceilings_of(
        peaks.require(threads, lambda text: None), device=torch.cuda.get_device_name(), threads=threads
    )
    assert ceilings is not None
    cases = [case for case in CASES if case.on_gpu and not any(part in case.name for part in SLOW)]
    wrong, sure = [], []
    for case in cases:
        machine = Machine(ceilings.cache_bytes, device="cuda", folder=str(tmp_path))
        try:
            step, batches = case.built(machine)
            report = recperf.profile(step, batches, quiet=True)
        finally:
            machine.close()
        assert sum(report.shares.values()) == pytest.approx(1.0)
        if report.verdict.limit not in case.on_gpu:
            wrong.append((case.name, report.verdict.limit))
            sure += [case.name] if report.verdict.confidence == "high" else []
    assert not sure
    assert len(wrong) <= 0.05 * len(cases), wrong
