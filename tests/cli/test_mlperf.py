"""recperf mlperf as a user types it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def made() -> ModuleType:
    pytest.importorskip("mlperf_logging", reason="mlperf-logging is not installed: pip install 'recperf[mlperf]'")
    import example_logs

    return example_logs


@pytest.fixture
def call(call: Call) -> Call:
    return functools.partial(call, "mlperf")


def test_check_a_log(call: Call, made: ModuleType) -> None:
    made.write(Path("good.log"))
    made.write(Path("bad.log"), learning_rate=1e-7, table_learning_rate=1e-7)
    code, out, err = call("check", "good.log")
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == "passed  good.log  (closed division)"
    assert out.splitlines()[1].startswith("  not checked: model.hstu.layers, data.history.length: there is no config")
    code, out, err = call("check", "bad.log")
    assert code == 5
    assert "FAILED  bad.log" in out
    assert "opt_base_learning_rate: CHECK for 'opt_base_learning_rate' failed" in out
    assert "1 of 1 logs fail ruleset 6.1.0" in err
