"""CUDA C++ kernels of an op: compiled by NVRTC, which every CUDA build of torch brings, and launched by the driver.

Compiled files are cached beside the C libraries (compile.py), under a digest of source, options and compiler.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import struct
import threading
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from ..errors import MachineError
from . import compile as files
from .compile import DIGEST_BYTES

OPTIONS = ("--std=c++17",)
MOST_SHARED = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES."""
KINDS = {torch.float16: 6, torch.bfloat16: 9}
"""Numbers of CUtensorMapDataType."""
SWIZZLE_128, PROMOTE_256 = 3, 3
MAP_BYTES = 128
MOST_ARGUMENTS = 4096
"""Bytes."""
BUFFER, BUFFER_SIZE = 1, 2
"""CU_LAUNCH_PARAM_BUFFER_POINTER and _SIZE."""


class Arguments(threading.local):
    """Where a thread puts the arguments of the kernel that it starts; the driver copies them."""

    def __init__(self) -> None:
        self.room, self.size = ctypes.create_string_buffer(MOST_ARGUMENTS), ctypes.c_size_t()
        self.driver_options = (ctypes.c_void_p * 5)(
            BUFFER, ctypes.addressof(self.room), BUFFER_SIZE, ctypes.addressof(self.size), 0
        )


_arguments = Arguments()


class Kernel:
    """A function of a compiled file. Arguments are tensors (or None), numbers, and maps as bytes."""

    def __init__(self, driver: ctypes.CDLL, handle: ctypes.c_void_p, layout: str, threads: int, shared: int) -> None:
        self._start, self._handle, self._layout = driver.cuLaunchKernel, handle, struct.Struct(layout)
        self._driver, self.threads, self.shared = driver, threads, shared

    def __call__(self, programs: int, *arguments: Tensor | float | bytes | None) -> None:
        """Start it on torch's current stream."""
        if not programs:
            return
        values = [one.data_ptr() if isinstance(one, Tensor) else 0 if one is None else one for one in arguments]
        self._layout.pack_into(_arguments.room, 0, *values)
        _arguments.size.value = self._layout.size
        stream = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())
        code = self._start(
            self._handle, programs, 1, 1, self.threads, 1, 1, self.shared, ctypes.c_void_p(stream), None,
            _arguments.driver_options,
        )  # fmt: skip
        if code:
            raise RuntimeError(f"a CUDA kernel could not be started: {_message(self._driver, code)}")


class Kernels:
    """A compiled file, loaded on one device."""

    def __init__(self, driver: ctypes.CDLL, content: bytes) -> None:
        self._driver, self._module = driver, ctypes.c_void_p()
        code = driver.cuModuleLoadData(ctypes.byref(self._module), content)
        if code:
            raise MachineError(f"the driver does not load the compiled kernels: {_message(driver, code)}")

    def kernel(self, name: str, layout: str, *, threads: int, shared: int = 0) -> Kernel:
        """`layout`: the types of its parameters as in Python's `struct`. `shared`: bytes of shared memory of a program,
        beside what the source itself declares."""
        handle = ctypes.c_void_p()
        code = self._driver.cuModuleGetFunction(ctypes.byref(handle), self._module, name.encode())
        code = code or self._driver.cuFuncSetAttribute(handle, MOST_SHARED, shared)
        if code:
            raise MachineError(f"kernel {name} cannot be used: {_message(self._driver, code)}")
        return Kernel(self._driver, handle, layout, threads, shared)


@functools.cache
def load(source: Path, device: torch.device, *options: str) -> Kernels | str:
    """The kernels of a file for this device, or the reason why they cannot be used."""
    major, minor = torch.cuda.get_device_capability(device)
    # What a chip has beside its generation's common instructions is behind an "a", from Hopper on.
    options = (f"--gpu-architecture=sm_{major}{minor}{'a' if major >= 9 else ''}", *OPTIONS, *options)
    try:
        compiler = _compiler()
        key = hashlib.sha256(source.read_bytes() + " ".join((*options, _version(compiler))).encode()).hexdigest()[:16]
        path = files.folder() / f"{source.parent.name}-{key}.cubin"
        handle = files.cached(path, lambda: files.store(path, _compiled(compiler, source, options)))
        if isinstance(handle, str):
            return f"the compiled kernels {path} {handle}"
        with open(handle, "rb") as file:
            file.seek(0)
            content = file.read()[:-DIGEST_BYTES]
        with torch.cuda.device(device):
            torch.cuda.current_stream()  # The driver needs torch's context.
            return Kernels(ctypes.CDLL("libcuda.so.1"), content)
    except (OSError, MachineError) as error:
        return str(error)


def _compiler() -> ctypes.CDLL:
    major = str(torch.version.cuda).partition(".")[0]
    try:
        return ctypes.CDLL(f"libnvrtc.so.{major}")
    except OSError:
        return ctypes.CDLL(str(_beside_torch(major)))


def _beside_torch(major: str) -> Path:
    """Where wheels put it: nvidia/cu13/lib, or nvidia/cuda_nvrtc/lib before CUDA 13."""
    packages = Path(torch.__file__).parent.parent
    for place in (f"nvidia/cu{major}/lib", "nvidia/cuda_nvrtc/lib", "torch/lib"):
        for path in (packages / place).glob(f"libnvrtc.so.{major}*"):
            return path
    raise MachineError("NVRTC, the compiler of CUDA kernels, is not installed")


def _version(compiler: ctypes.CDLL) -> str:
    major, minor = ctypes.c_int(), ctypes.c_int()
    compiler.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def _compiled(compiler: ctypes.CDLL, source: Path, options: Iterable[str]) -> bytes:
    program, arguments = ctypes.c_void_p(), [option.encode() for option in options]
    compiler.nvrtcCreateProgram(ctypes.byref(program), source.read_bytes(), source.name.encode(), 0, None, None)
    try:
        if compiler.nvrtcCompileProgram(program, len(arguments), (ctypes.c_char_p * len(arguments))(*arguments)):
            lines = _read(compiler, program, "ProgramLog").decode(errors="replace").splitlines()
            said = next((line for line in lines if "error" in line), "no message")
            raise MachineError(f"NVRTC {_version(compiler)} does not compile {source.name}: {said.strip()}")
        return _read(compiler, program, "CUBIN")
    finally:
        compiler.nvrtcDestroyProgram(ctypes.byref(program))


def _read(compiler: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    getattr(compiler, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(compiler, f"nvrtcGet{what}")(program, buffer)
    return buffer.raw


def _message(driver: ctypes.CDLL, code: int) -> str:
    text = ctypes.c_char_p()
    driver.cuGetErrorString(code, ctypes.byref(text))
    return (text.value or b"unknown error").decode()


@functools.lru_cache(maxsize=512)
def block_map(address: int, height: int, width: int, stride: int, dtype: torch.dtype, rows: int) -> bytes:
    """What the copy engine needs to know of a matrix: it copies so many rows and 64 columns at a time, swizzled."""
    room = ctypes.create_string_buffer(2 * MAP_BYTES)
    # At a multiple of 64 bytes.
    first = -ctypes.addressof(room) % 64
    one = (ctypes.c_char * MAP_BYTES).from_buffer(room, first)
    sizes, strides = (ctypes.c_uint64 * 2)(width, height), (ctypes.c_uint64 * 1)(stride * dtype.itemsize)
    box, steps = (ctypes.c_uint32 * 2)(64, rows), (ctypes.c_uint32 * 2)(1, 1)
    driver = ctypes.CDLL("libcuda.so.1")
    code = driver.cuTensorMapEncodeTiled(
        one, KINDS[dtype], 2, ctypes.c_void_p(address), sizes, strides, box, steps, 0, SWIZZLE_128, PROMOTE_256, 0
    )
    if code:
        raise RuntimeError(f"the copy engine cannot read this matrix: {_message(driver, code)}")
    return one.raw
