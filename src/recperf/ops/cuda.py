"""CUDA C++ kernels of an op: compiled by NVRTC, which every CUDA build of torch brings, and launched by the driver.

Compiled files are cached beside the C libraries (compile.py), under a digest of source, options and compiler.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import struct
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import MachineError, notice_once
from . import compile as files
from .compile import DIGEST_BYTES

OPTIONS = ("--std=c++17",)
MOST_SHARED = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES."""
KINDS = {torch.float16: 6, torch.bfloat16: 9}
"""Numbers of CUtensorMapDataType."""
SWIZZLE_128, PROMOTE_256 = 3, 3
MAP_BYTES = 128
NO_CONTEXT = 201
"""CUDA_ERROR_INVALID_CONTEXT."""


class Entry(NamedTuple):
    """A function of a source file, as it is started."""

    types: str
    """Of its parameters, as in Python's `struct`, and M for a map."""
    threads: int
    shared: int = 0
    """Bytes of shared memory that a program gets beside what the source declares."""


class Kernel:
    """A function of a compiled file on one device. Arguments are tensors (or None), numbers, and maps as bytes."""

    def __init__(self, device: torch.device, handle: ctypes.c_void_p, entry: Entry) -> None:
        self._device, self._handle, self._entry = device, handle, entry
        types = [f"{MAP_BYTES}s" if one == "M" else one for one in entry.types]
        self._layout = struct.Struct("".join(types))
        ends = [struct.calcsize("".join(types[: count + 1])) for count in range(len(types))]
        self._places = [end - struct.calcsize(one) for end, one in zip(ends, types)]
        self._thread = threading.local()

    def _room(self) -> tuple[Any, Any]:
        """Where this thread puts the arguments, and their addresses; the driver copies them."""
        if not hasattr(self._thread, "room"):
            buffer = ctypes.create_string_buffer(self._layout.size)
            first = ctypes.addressof(buffer)
            self._thread.room = buffer, (ctypes.c_void_p * len(self._places))(*(first + at for at in self._places))
        room: tuple[Any, Any] = self._thread.room
        return room

    def __call__(self, programs: int, *arguments: Tensor | float | bytes | None) -> None:
        """Start it on torch's current stream of its device."""
        if not programs:
            return
        current = torch.cuda.current_device()
        if current != self._device.index:
            with torch.cuda.device(self._device):
                return self(programs, *arguments)
        buffer, addresses = self._room()
        values = [one.data_ptr() if isinstance(one, Tensor) else 0 if one is None else one for one in arguments]
        self._layout.pack_into(buffer, 0, *values)
        stream, entry = ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(current)), self._entry
        shape = programs, 1, 1, entry.threads, 1, 1, entry.shared
        _call("a CUDA kernel could not be started", "cuLaunchKernel", self._handle, *shape, stream, addresses, None)


def load(
    source: Path, device: torch.device, *options: str, entries: Mapping[str, Entry], instead: str
) -> dict[str, Kernel] | None:
    """The kernels of a file for this device, by name; None where they cannot be used, and a note says why and what is
    done instead."""
    folder = files.folder()
    try:
        content = _content(folder, source, device, options)
        with torch.cuda.device(device):
            torch.cuda.current_stream()  # The driver needs torch's context.
            module = ctypes.c_void_p()
            _call("the driver does not load the compiled kernels", "cuModuleLoadData", ctypes.byref(module), content)
            return {name: _kernel(device, module, name, entry) for name, entry in entries.items()}
    except (OSError, MachineError) as error:
        notice_once(f"{error}: {instead}")
        return None


def _content(folder: Path, source: Path, device: torch.device, options: tuple[str, ...]) -> bytes:
    """The compiled file, from the cache if it is there."""
    major, minor = torch.cuda.get_device_capability(device)
    # What a chip has beside its generation's common instructions is behind an "a", from Hopper on.
    options = (f"--gpu-architecture=sm_{major}{minor}{'a' if major >= 9 else ''}", *OPTIONS, *options)
    compiler = _compiler()
    key = hashlib.sha256(source.read_bytes() + " ".join((*options, _version(compiler))).encode()).hexdigest()[:16]
    path = folder / f"{source.parent.name}-{key}.cubin"
    handle = files.cached(path, lambda: files.store(path, _compiled(compiler, source, options)))
    if isinstance(handle, str):
        raise MachineError(f"the compiled kernels {path} {handle}")
    with open(handle, "rb") as file:
        file.seek(0)
        return file.read()[:-DIGEST_BYTES]


def _kernel(device: torch.device, module: ctypes.c_void_p, name: str, entry: Entry) -> Kernel:
    handle, problem = ctypes.c_void_p(), f"kernel {name} cannot be used"
    _call(problem, "cuModuleGetFunction", ctypes.byref(handle), module, name.encode())
    _call(problem, "cuFuncSetAttribute", handle, MOST_SHARED, entry.shared)
    return Kernel(device, handle, entry)


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
            message = next((line for line in lines if "error" in line), "no message")
            raise MachineError(f"NVRTC {_version(compiler)} does not compile {source.name}: {message.strip()}")
        return _read(compiler, program, "CUBIN")
    finally:
        compiler.nvrtcDestroyProgram(ctypes.byref(program))


def _read(compiler: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    getattr(compiler, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(compiler, f"nvrtcGet{what}")(program, buffer)
    return buffer.raw


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(problem: str, function: str, *arguments: Any) -> None:
    """Call the driver; raise with this problem unless it succeeds.

    A thread has no context before it first uses the device through torch: one of autograd's may begin with a kernel of
    ours. It then gets the one that torch uses.
    """
    driver = _driver()
    code = getattr(driver, function)(*arguments)
    if code == NO_CONTEXT:
        context = ctypes.c_void_p()
        code = driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), torch.cuda.current_device())
        code = code or driver.cuCtxSetCurrent(context) or getattr(driver, function)(*arguments)
    if code:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(code, ctypes.byref(text))
        raise MachineError(f"{problem}: {(text.value or b'unknown error').decode()}")


@functools.lru_cache(maxsize=512)
def block_map(address: int, height: int, width: int, stride: int, dtype: torch.dtype, rows: int) -> bytes:
    """What the copy engine needs to know of a matrix: it copies so many rows and 64 columns at a time, swizzled."""
    room = ctypes.create_string_buffer(2 * MAP_BYTES)
    # At a multiple of 64 bytes.
    first = -ctypes.addressof(room) % 64
    one = (ctypes.c_char * MAP_BYTES).from_buffer(room, first)
    sizes, strides = (ctypes.c_uint64 * 2)(width, height), (ctypes.c_uint64 * 1)(stride * dtype.itemsize)
    box, steps = (ctypes.c_uint32 * 2)(64, rows), (ctypes.c_uint32 * 2)(1, 1)
    _call(
        "the copy engine cannot read this matrix", "cuTensorMapEncodeTiled",
        one, KINDS[dtype], 2, ctypes.c_void_p(address), sizes, strides, box, steps, 0, SWIZZLE_128, PROMOTE_256, 0,
    )  # fmt: skip
    return one.raw
