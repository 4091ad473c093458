"""A test that asks for `yambda_case` runs once for every folder `yambda_*` of golden numbers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "yambda_case" not in metafunc.fixturenames:
        return
    folder = Path(os.environ.get("RECPERF_GOLDEN", ROOT.parent / "shared" / "golden"))
    cases = [pytest.param(case, id=case.name) for case in sorted(folder.glob("yambda_*")) if case.is_dir()]
    missing = pytest.mark.skip(reason=f"no golden numbers at {folder}; set RECPERF_GOLDEN")
    metafunc.parametrize("yambda_case", cases or [pytest.param(None, id="none", marks=missing)])
