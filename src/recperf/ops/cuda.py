"""CUDA C++ kernels of an op: compiled by NVRTC, which every CUDA build of torch brings, and launched from C (launch.c).

Compiled files are cached beside the C libraries (compile.py), under a digest of source, options and compiler.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import struct
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
LAYOUTS = {"M": "PQQQII", "Z": "PQ"}
"""How arguments lie that are more than one number."""
MOST_ARGUMENTS = 24


class Entry(NamedTuple):
    """A function of a source file, as it is started."""

    types: str
    """Of its parameters, as in Python's `struct`; M: a matrix that the copy engine reads (address, rows, numbers in a
    row, bytes from row to row, one of `KINDS`, rows copied at a time); Z: memory that is zero when the kernel starts
    (address, words of 32 bits)."""
    threads: int
    shared: int = 0
    """Bytes of shared memory that a program gets beside what the source declares."""


class Kernel:
    """A function of a compiled file on one device."""

    def __init__(self, device: torch.device, launch: Any, handle: int, entry: Entry) -> None:
        self._device, self._index, self._launch = device, device.index, launch
        layouts = [LAYOUTS.get(one, one) for one in entry.types]
        ends = [struct.calcsize("".join(layouts[: count + 1])) for count in range(len(layouts))]
        places = [end - struct.calcsize(one) for end, one in zip(ends, layouts)]
        self._pack = struct.Struct("".join(layouts)).pack
        described = struct.Struct(f"P3I{MOST_ARGUMENTS}I{MOST_ARGUMENTS}s")
        places += [0] * (MOST_ARGUMENTS - len(places))
        self._kernel = described.pack(handle, entry.threads, entry.shared, len(layouts), *places, entry.types.encode())

    def __call__(self, programs: int, *arguments: Tensor | float | None) -> None:
        """Start it on torch's current stream of its device."""
        self.start(programs, *(one.data_ptr() if isinstance(one, Tensor) else one or 0 for one in arguments))

    def start(self, programs: int, *arguments: float) -> None:
        """The same with addresses for tensors, which takes less time; they must live until this returns."""
        if not programs:
            return
        if torch._C._cuda_getDevice() != self._index:
            with torch.cuda.device(self._device):
                return self.start(programs, *arguments)
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        code = self._launch(self._kernel, self._index, programs, stream, self._pack(*arguments))
        if code:
            raise _failure("a CUDA kernel could not be started", code)


def load(
    source: Path, device: torch.device, *options: str, entries: Mapping[str, Entry], instead: str
) -> dict[str, Kernel] | None:
    """The kernels of a file for this device, by name; None where they cannot be used, and a note says why and what is
    done instead."""
    try:
        launch, content = _launch(), _content(files.folder(), source, device, options)
        with torch.cuda.device(device):
            torch.cuda.current_stream()  # The driver needs torch's context.
            module = ctypes.c_void_p()
            _call("the driver does not load the compiled kernels", "cuModuleLoadData", ctypes.byref(module), content)
            return {name: _kernel(device, launch, module, name, entry) for name, entry in entries.items()}
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


def _kernel(device: torch.device, launch: Any, module: ctypes.c_void_p, name: str, entry: Entry) -> Kernel:
    handle, problem = ctypes.c_void_p(), f"kernel {name} cannot be used"
    _call(problem, "cuModuleGetFunction", ctypes.byref(handle), module, name.encode())
    _call(problem, "cuFuncSetAttribute", handle, MOST_SHARED, entry.shared)
    return Kernel(device, launch, handle.value or 0, entry)


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
    return ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)


@functools.cache
def _launch() -> Any:
    """The function of launch.c, which calls the driver."""
    _driver()
    arguments = ctypes.c_char_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_char_p
    library = files.load(Path(__file__).with_name("launch.c"), {"launch": arguments}, {"launch": ctypes.c_int})
    if isinstance(library, str):
        raise MachineError(library)
    return library.launch


def _call(problem: str, function: str, *arguments: Any) -> None:
    """Call the driver; raise with this problem unless it succeeds."""
    code = getattr(_driver(), function)(*arguments)
    if code:
        raise _failure(problem, code)


def _failure(problem: str, code: int) -> MachineError:
    text = ctypes.c_char_p()
    _driver().cuGetErrorString(code, ctypes.byref(text))
    return MachineError(f"{problem}: {(text.value or b'unknown error').decode()}")
