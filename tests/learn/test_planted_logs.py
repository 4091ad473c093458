"""The logs that the rules of quality are proven on: their best possible score is right, and a flaw costs some of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from planted_logs import expected_auc
from planted_quality import CASES, HEALTHY, TWO_FLAWS, prepare, train

from recperf.train.metrics import auc


def test_the_best_possible_auc_is_that_of_the_true_probabilities() -> None:
    draw = np.random.default_rng(5)
    shares = draw.choice([0.05, 0.2, 0.5, 0.9], 4000)
    drawn = [auc(torch.from_numpy(shares), torch.from_numpy(draw.random(4000) < shares)) for _ in range(50)]
    assert expected_auc(shares) == pytest.approx(np.mean(drawn), abs=3 * np.std(drawn) / 50**0.5)


def test_there_are_24_causes_and_enough_cases_without_a_flaw() -> None:
    assert len(CASES) - len(HEALTHY) >= 24
    assert len(TWO_FLAWS) == 6
    assert {case.workload for case in CASES} == {"micro-dlrm", "dlrm-v4", "next-item"}
    assert 4 * len(HEALTHY) >= len(CASES)


def test_a_flaw_costs_some_of_what_is_possible(tmp_path: Path) -> None:
    reached = {}
    for name in ("clicks: nothing wrong", "clicks: a frozen table"):
        workload, config, log = prepare(next(case for case in CASES if case.name == name), "small", 0)
        result = train(workload, config, tmp_path / name)
        reached[name] = result.quality.metrics["auc"] - log.possible
        assert result.quality.interval.low < log.possible
    assert reached["clicks: a frozen table"] < reached["clicks: nothing wrong"] - 0.03
