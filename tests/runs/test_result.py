from __future__ import annotations

from typing import Any

import example_runs as examples
import msgspec
import pytest

from recperf.runs.result import Result, checked, fault

GOOD = examples.result("x", "micro-dlrm", seeds=1, auc=0.82)


def changed(path: str, value: object) -> dict[str, Any]:
    return examples.changed(GOOD, path, value)


def test_a_good_result_fits() -> None:
    assert fault(GOOD) is None
    assert checked(msgspec.convert(GOOD, Result)) == GOOD


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("quality.met", ..., "quality.met is missing"),
        ("quality.met", 1, "quality.met should be true or false, is 1"),
        ("quality.metrics.auc", float("nan"), "quality.metrics.auc should be a number"),
        ("quality.seeds.0.seed", "1", "quality.seeds.0.seed should be an integer, is '1'"),
        ("quality.seeds.0.stopped_early", 1.5, "quality.seeds.0.stopped_early should be an integer or null"),
        ("performance.step_ms.p50", ..., "performance.step_ms.p50 is missing"),
        ("performance.budget.data", 0.5, "performance.budget does not sum to 1"),
        ("data.rows", True, "data.rows should be an integer, is true"),
        ("extra", 1, "extra is not a known field"),
        ("quality.seeds.0.best.extra", 1, "quality.seeds.0.best.extra is not a known field"),
    ],
)
def test_a_fault_is_named(path: str, value: object, message: str) -> None:
    assert message in (fault(changed(path, value)) or "")


def test_fields_that_are_optional_or_null() -> None:
    assert fault(changed("quality.seeds.0.stopped_early", 7)) is None
    assert fault(changed("performance.step_ms", None)) is None
    assert fault(changed("performance.budget", None)) is None
