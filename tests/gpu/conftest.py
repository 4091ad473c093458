"""What tests on a GPU share: switches of torch that are restored afterwards, and the ranks of tests/distributed."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch

FOLDERS = ("distributed", "gpu", "models", "reliability", "train", "workloads")
# Tests are imported by path, so these folders are not on it by themselves.
sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in FOLDERS]


@pytest.fixture(autouse=True)
def _all_ratings(all_ratings: None) -> None:
    """A GPU has the ratings that users have: epochs are as long as tests count on."""


@pytest.fixture
def exact_products() -> Iterator[None]:
    """TF32 would hide an error of float32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture
def no_waiting() -> Callable[[], AbstractContextManager[None]]:
    """A block in which the host must not wait for the device."""

    @contextmanager
    def block() -> Iterator[None]:
        # Torch warns that this mode is a prototype.
        with warnings.catch_warnings(action="ignore"):
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return block
