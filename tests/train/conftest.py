"""Helpers beside the tests are imported by name. Baselines are as users have them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import short

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module", autouse=True)
def strong_baselines(short_runs: dict[str, Any]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        short.shorten(patch.setattr, {name: short_runs[name] for name in short.WEAK})
        yield
