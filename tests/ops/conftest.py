"""Fixtures that tests of kernels and of C bodies share."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recperf.ops import compile
from recperf.ops import compile as native

FOLDER = Path(__file__).parent
INTERPRETED = not torch.cuda.is_available() and importlib.util.find_spec("triton") is not None
NO_TRITON = "no triton, or a GPU, where tests/gpu runs the kernels"
if INTERPRETED:
    # Triton decides at import whether to interpret a kernel; tests elsewhere must not see the variable.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        for file in sorted(Path(compile.__file__).parent.glob("*/triton.py")):
            importlib.import_module(f"recperf.ops.{file.parent.name}.triton")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Cases whose parameters name an implementation use its fixture."""
    for item in items:
        if FOLDER in item.path.parents and isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            names = [value for value in item.callspec.params.values() if isinstance(value, str)]
            item.fixturenames += [fixture for name, fixture in IMPLEMENTATIONS.items() if name in names]


IMPLEMENTATIONS = {"triton": "triton", "native": "native_code"}


@pytest.fixture
def triton() -> None:
    if not INTERPRETED:
        pytest.skip(NO_TRITON)


@pytest.fixture
def native_code() -> None:
    library = importlib.import_module("recperf.ops.mlp.native").library()
    if isinstance(library, str):
        pytest.skip(library)


@pytest.fixture(autouse=True)
def _interpreted(interpreter: None) -> None:
    """Every test here may run kernels."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sanitize", action="store_true", help="compile the C bodies with AddressSanitizer and UBSan")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--sanitize", default=False):
        native.extra_flags = native.SANITIZERS


def in_malloc(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor in memory from malloc, which AddressSanitizer guards; torch's own allocator it cannot see."""
    memory = np.empty(max(1, tensor.nbytes), np.uint8)
    guarded = torch.from_numpy(memory)[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    return guarded.copy_(tensor)


@pytest.fixture(autouse=True)
def _guarded_memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under --sanitize: what C reads and writes lies in guarded memory, so that one step beyond its end is reported."""
    if not request.config.getoption("--sanitize", default=False):
        return
    empty, empty_like = torch.empty, torch.empty_like
    monkeypatch.setattr(torch, "empty", lambda *sizes, **more: in_malloc(empty(*sizes, **more)))
    monkeypatch.setattr(torch, "empty_like", lambda like, **more: in_malloc(empty_like(like, **more)))
    for name in compile.native_ops():
        body = importlib.import_module(f"recperf.ops.{name}.native")
        monkeypatch.setattr(body, "address", _guarding(body.address))


def _guarding(address: Any) -> Any:
    moved: dict[int, torch.Tensor] = {}

    def call(name: str, array: Any, *more: Any, **options: Any) -> int:
        place = int(address(name, array, *more, **options))
        whole = isinstance(array, torch.Tensor) and array.untyped_storage().nbytes() == array.nbytes
        if whole and array.is_contiguous() and place not in moved:
            array.data = in_malloc(array)
            place = array.data_ptr()
            moved[place] = array
        return place

    return call
