"""A test that asks for `yambda_case` runs once for every folder `yambda_*` of golden numbers."""

from __future__ import annotations

import pytest
from golden_numbers import golden


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "yambda_case" in metafunc.fixturenames:
        cases = [path for path in golden("yambda_*") if path.is_dir()]
        metafunc.parametrize("yambda_case", cases, ids=[path.name for path in cases])
