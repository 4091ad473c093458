"""What tests of kernels share."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from recperf.ops import compile as native


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--sanitize",
        action="store_true",
        help="compile the C bodies with AddressSanitizer and UBSan",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--sanitize", default=False):
        native.extra_flags = native.SANITIZERS


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that a kernel should write holds NaN before: what it forgets is seen."""

    def filled(make: Any) -> Any:
        def call(*sizes: Any, **more: Any) -> torch.Tensor:
            room: torch.Tensor = make(*sizes, **more)
            return room.fill_(torch.nan) if room.is_floating_point() else room

        return call

    monkeypatch.setattr(torch, "empty", filled(torch.empty))
    monkeypatch.setattr(torch, "empty_like", filled(torch.empty_like))
