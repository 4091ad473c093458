"""How kernels in CUDA C++ are compiled, cached and started, with stand-ins for the compiler and the driver."""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from recperf import errors
from recperf.ops import cuda

DEVICE = torch.device("cuda", 0)


class Driver:
    """Records what is started; `code` is what its calls return."""

    def __init__(self) -> None:
        self.code, self.started = 0, list[tuple[Any, ...]]()

    def cuModuleLoadData(self, module: Any, content: bytes) -> int:
        assert content == b"compiled"
        return self.code

    def cuModuleGetFunction(self, handle: Any, module: Any, name: bytes) -> int:
        return 0

    def cuFuncSetAttribute(self, handle: Any, attribute: int, value: int) -> int:
        return 0

    def cuGetErrorString(self, code: int, text: Any) -> int:
        ctypes.cast(text, ctypes.POINTER(ctypes.c_char_p))[0] = b"no such chip"
        return 0

    def cuLaunchKernel(self, handle: Any, programs: int, *rest: Any) -> int:
        sizes = (cuda.MAP_BYTES, 8, 4, 8, 4)
        self.started.append((programs, *(ctypes.string_at(at, size) for at, size in zip(rest[-2], sizes))))
        return self.code


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver, compiled = Driver(), list[tuple[str, ...]]()

    def compiler(*arguments: Any) -> bytes:
        compiled.append(arguments[-1])
        assert len(compiled) == 1, "the second call finds the compiled file"
        return b"compiled"

    monkeypatch.setenv("RECPERF_HOME", str(tmp_path))
    monkeypatch.setattr(errors, "quiet", False)
    errors.notice_once.cache_clear()
    for name, value in {"_compiler": lambda: None, "_version": lambda _: "13.0", "_compiled": compiler}.items():
        monkeypatch.setattr(cuda, name, value)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    return driver


def loaded(tmp_path: Path) -> dict[str, cuda.Kernel] | None:
    source = tmp_path / "some.cu"
    source.write_text("kernels")
    return cuda.load(source, DEVICE, "-DX", entries={"one": cuda.Entry("MPiqf", 128)}, instead="torch serves")


def test_arguments_lie_where_the_driver_looks(tmp_path: Path, driver: Driver) -> None:
    map_bytes, rows = bytes(range(cuda.MAP_BYTES)), torch.zeros(3)
    for _ in range(2):
        kernels = loaded(tmp_path)
        assert kernels is not None
        kernels["one"](7, map_bytes, rows, 5, 1 << 40, 0.5)
    kernels["one"](2, map_bytes, None, -1, -2, 1.0)
    kernels["one"](0, map_bytes, None, 0, 0, 0.0)
    first = (7, map_bytes, struct.pack("P", rows.data_ptr()), struct.pack("i", 5), struct.pack("q", 1 << 40))
    assert driver.started[:2] == [(*first, struct.pack("f", 0.5))] * 2
    none = (2, map_bytes, bytes(8), struct.pack("i", -1), struct.pack("q", -2), struct.pack("f", 1.0))
    assert driver.started[2:] == [none]


def test_a_driver_that_refuses_is_stated(tmp_path: Path, driver: Driver, capsys: pytest.CaptureFixture[str]) -> None:
    kernels = loaded(tmp_path)
    assert kernels is not None
    driver.code = 1
    with pytest.raises(errors.MachineError, match="could not be started: no such chip"):
        kernels["one"](1, bytes(cuda.MAP_BYTES), None, 0, 0, 0.0)
    assert loaded(tmp_path) is None
    assert "does not load the compiled kernels: no such chip: torch serves" in capsys.readouterr().err
