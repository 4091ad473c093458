"""Compiles the small C file of an op once, with the machine's own compiler, and calls it on several threads.

Libraries are cached under a name that is a digest of everything that goes in: source, flags, compiler, processor.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ..errors import MachineError
from ..places import home

FLAGS = ("-O3", "-std=gnu11", "-shared", "-fPIC", "-ffp-contract=off", "-march=native")
SANITIZERS = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")

I64, F32, POINTER = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p

extra_flags: tuple[str, ...] = ()
"""`SANITIZERS` in a run of the tests under the sanitizers; set before anything is compiled."""


def load(source: Path, functions: Mapping[str, Any], returns: Mapping[str, Any] | None = None) -> ctypes.CDLL | str:
    """The compiled library, or the reason why it cannot be used. `functions`: the argument types of each."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return "no C compiler on this machine"
    path = _build(compiler, source)
    if isinstance(path, str):
        return path
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return f"the compiled file does not load: {error}"
    for name, arguments in functions.items():
        getattr(library, name).argtypes = list(arguments)
        getattr(library, name).restype = (returns or {}).get(name)
    return library


def native_library(
    module: str, functions: Mapping[str, Any], returns: Mapping[str, Any] | None = None
) -> Callable[[], ctypes.CDLL | str]:
    """A function that loads the native.c beside a module file, which is compiled at the first call only."""
    return functools.cache(lambda: load(Path(module).with_name("native.c"), functions, returns))


def usable(library: ctypes.CDLL | str) -> ctypes.CDLL:
    """The library; a body that is called although it cannot be compiled is an error."""
    if isinstance(library, str):
        raise MachineError(f"the C body cannot be used: {library}", fix="use the reference implementation")
    return library


def _build(compiler: str, source: Path) -> Path | str:
    """The path of the compiled library in the cache folder, or the reason why it cannot be compiled."""
    flags = (*FLAGS, *extra_flags)
    machine = subprocess.run([compiler, "-v", "-march=native", "-E", "-x", "c", os.devnull], capture_output=True)
    try:
        key = hashlib.sha256(source.read_bytes() + " ".join(flags).encode() + machine.stderr).hexdigest()[:16]
        built = home() / "native" / f"{source.parent.name}-{key}.so"
        if built.exists():
            return built
        _make_folder(built.parent)
        with tempfile.NamedTemporaryFile(dir=built.parent, suffix=".so", delete=False) as fresh:
            pass
        command = [compiler, *flags, "-o", fresh.name, str(source), "-lm"]
        # A library that is preloaded into Python, such as a sanitizer's, is not meant for the compiler.
        environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
        if result.returncode:
            os.unlink(fresh.name)
            lines = result.stderr.strip().splitlines()
            return f"{compiler} failed: {lines[-1] if lines else 'no message'}"
        # A temporary file is private; other users of a shared cache folder must be able to load the library.
        os.chmod(fresh.name, 0o755)
        os.replace(fresh.name, built)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"cannot compile: {error}"
    return built


def _make_folder(folder: Path) -> None:
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o755)


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="recperf-native")


def share(work: Callable[[int, int], None], cuts: list[int]) -> None:
    """Call `work` between consecutive cuts, each range on its own thread: ctypes releases the interpreter's lock."""
    ranges = list(zip(cuts, cuts[1:]))
    if len(ranges) == 1:
        work(*ranges[0])
        return
    others = [_pool(len(ranges)).submit(work, *one) for one in ranges[1:]]
    work(*ranges[0])
    for other in others:
        other.result()


def even_cuts(count: int, threads: int) -> list[int]:
    """Cuts that divide `count` items evenly between threads."""
    return [count * index // threads for index in range(threads + 1)]
